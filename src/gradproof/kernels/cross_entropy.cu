// Cross-entropy of rows of logits: each logit is read once from memory, each entry of the gradient written once.
//
// A row lies in the shared memory of a cluster of CTAs while it is worked on. A thread loads 16-byte pieces into
// slots that only it reads: it sums their exponentials, the cluster exchanges (largest, sum) of its warps, and the
// thread makes the gradient from the same slots, asking for its pieces of the next row as the slots fall free.
// The target is left out of the largest and of the sum, so that a confident target keeps its digits; so are the
// entries of the neighbouring rows that a row which starts or ends inside a piece brings along.
//
// Compiled by cuda_loss.py with: Logit, Gradient (float, bf16, half as types below), Target, Scale, CLUSTER, THREADS,
// PIECES (of a thread), HAS_MASK, PER_ROW (a scale for each row), WANT (the gradient).

struct bf16 { unsigned short bits; };
struct half { unsigned short bits; };

constexpr int WARPS = THREADS / 32;
constexpr int SUMS = CLUSTER * WARPS;         // exchanged for a row
constexpr int ENTRIES = 16 / sizeof(Logit);   // of a piece
constexpr bool SHORT = sizeof(Gradient) == 2;
constexpr int GROUP = 4;                      // pieces a thread looks at together
constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;
#define INF __int_as_float(0x7f800000)

__device__ void unpack(unsigned word, float* x, float) { x[0] = __uint_as_float(word); }
__device__ void unpack(unsigned word, float* x, bf16) {
    x[0] = __uint_as_float(word << 16);
    x[1] = __uint_as_float(word & 0xffff0000u);
}
__device__ void unpack(unsigned word, float* x, half) {
    asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}"
        : "=f"(x[0]), "=f"(x[1]) : "r"(word));
}
__device__ void unpack(const uint4& piece, float* x) {
    const unsigned words[4] = {piece.x, piece.y, piece.z, piece.w};
    for (int i = 0; i < 4; i++) unpack(words[i], x + i * ENTRIES / 4, Logit());
}
// the larger of each entry of two pieces
__device__ unsigned larger(unsigned a, unsigned b, float) {
    return __float_as_uint(fmaxf(__uint_as_float(a), __uint_as_float(b)));
}
__device__ unsigned larger(unsigned a, unsigned b, bf16) {
    unsigned word;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(word) : "r"(a), "r"(b));
    return word;
}
__device__ unsigned larger(unsigned a, unsigned b, half) {
    unsigned word;
    asm("max.f16x2 %0, %1, %2;" : "=r"(word) : "r"(a), "r"(b));
    return word;
}
__device__ uint4 larger(const uint4& a, const uint4& b) {
    const Logit kind = Logit();
    return {larger(a.x, b.x, kind), larger(a.y, b.y, kind), larger(a.z, b.z, kind), larger(a.w, b.w, kind)};
}
__device__ float load_one(const float* from) { return *from; }
template <typename Short> __device__ float load_one(const Short* from) {
    float x[2];
    unpack(from->bits, x, Short());
    return x[0];
}

__device__ unsigned pack(float low, float high, bf16) {
    unsigned word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}
__device__ unsigned pack(float low, float high, half) {
    unsigned word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

__device__ void store_one(float* out, float dx, unsigned = 0) { *out = dx; }
template <typename Short> __device__ void store_one(Short* out, float dx, unsigned flip = 0) {
    out->bits = pack(dx, 0, Short()) ^ flip;
}

__device__ void store_piece(float* out, const float* dx, unsigned) {
    for (int i = 0; i < ENTRIES; i += 4) __stcs((float4*)(out + i), make_float4(dx[i], dx[i + 1], dx[i + 2], dx[i + 3]));
}
template <typename Short> __device__ void store_piece(Short* out, const float* dx, unsigned flip) {
    unsigned words[ENTRIES / 2];
    for (int i = 0; i < ENTRIES / 2; i++) words[i] = pack(dx[2 * i], dx[2 * i + 1], Short()) ^ flip;
    if constexpr (ENTRIES == 8) __stcs((uint4*)out, make_uint4(words[0], words[1], words[2], words[3]));
    else __stcs((uint2*)out, make_uint2(words[0], words[1]));
}

__device__ float exp2_quick(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// exp(u) for u <= 0. Of 16-bit logits the rounding of u * log2(e) is far below their own; of float32 it is put back.
__device__ float exp_below(float u) {
    const float z = u * LOG2E;
    const float e = exp2_quick(z);
    if constexpr (sizeof(Logit) == 2) return e;
    const float lost = z == -INF ? 0.f : fmaf(u, LOG2E, -z);
    return fmaf(e * LN2, lost, e);
}

// times * exp(x - largest). For a 16-bit gradient, |times| goes into the exponent, which loses 2e-6, a thousandth of
// its rounding; the sign of times is `flip`, put onto pairs of entries.
struct Exponential {
    float largest, times, exponent;
    unsigned flip;
    __device__ Exponential(float largest, float times)
        : largest(largest), times(times), exponent(log2f(fabsf(times))), flip(SHORT && times < 0 ? 0x80008000u : 0) {}
    __device__ float operator()(float x) const {
        if (SHORT) return exp2_quick(fmaf(x - largest, LOG2E, exponent));
        return exp2_quick((x - largest) * LOG2E) * times;
    }
};

// exp(a - b) for a <= b, without the rounding of a - b
__device__ double exp_difference(double a, double b) {
    const double difference = a - b < -1000 ? -1000 : a - b;  // NaN stays
    const float high = (float)difference;
    return expf(high) * (1.0 + (difference - high));
}

__device__ unsigned shared_address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }

__device__ void cluster_barrier() {
    if constexpr (CLUSTER == 1) {
        __syncthreads();
        return;
    }
    __syncwarp();  // "aligned": of whole warps
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// the sum of a warp's threads in double, each relative to its own largest; the same in every lane
struct Sum { float largest; double total; };
__device__ Sum add_lanes(Sum mine) {
    float largest = mine.largest;
    for (int i = 16; i; i /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, i));
    double total = mine.largest == -INF ? mine.total : mine.total * exp_difference(mine.largest, largest);
    for (int i = 16; i; i /= 2) total += __shfl_xor_sync(~0u, total, i);
    return {largest, total};
}

// where a row lies, counted in pieces from the last multiple of 16 bytes before it
struct Row {
    long long start;            // of its first piece, in entries; the row itself starts `lead` entries later
    int y, lead, pieces, whole; // `whole` pieces lie before its end
    bool valid;
};

// until at most `groups` of the groups of pieces that this thread asked for are missing
__device__ void wait_for(int groups) {
    switch (groups) {
        case 0: asm volatile("cp.async.wait_group 0;" ::: "memory"); break;
        case 1: asm volatile("cp.async.wait_group 1;" ::: "memory"); break;
        case 2: asm volatile("cp.async.wait_group 2;" ::: "memory"); break;
        case 3: asm volatile("cp.async.wait_group 3;" ::: "memory"); break;
        default: asm volatile("cp.async.wait_group 4;" ::: "memory");
    }
}

struct Arguments {
    const Logit* logits;
    Gradient* gradient;
    const Target* targets;
    const signed char* masks;
    const Scale* scales;
    float *losses, *lses;
    int v, rows, x_stride, g_stride, ignore_index;
    double z_loss;
};

extern "C" __global__ void __launch_bounds__(THREADS)
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
cross_entropy(const __grid_constant__ Arguments a) {
    extern __shared__ uint4 slots[];
    __shared__ float largests[2][SUMS];
    __shared__ double totals[2][SUMS];
    const int thread = threadIdx.x, rank = CLUSTER == 1 ? 0 : blockIdx.x % CLUSTER;
    const int first = rank * THREADS * PIECES + thread;  // this thread's pieces: first + k * THREADS
    const int stride = gridDim.x / CLUSTER, v = a.v, rows = a.rows;
    uint4* const mine = slots + thread;

    auto find_row = [&](int row) {
        Row it = {};
        if (row >= rows) return it;
        const Target y = a.targets[row];
        it.valid = y != (Target)a.ignore_index;
        if (HAS_MASK) it.valid = it.valid && a.masks[row] != 0;
        it.y = y < 0 || y >= v ? -1 : (int)y;
        it.start = (long long)row * a.x_stride;
        it.lead = (int)(it.start % ENTRIES);
        it.start -= it.lead;
        it.pieces = (it.lead + v + ENTRIES - 1) / ENTRIES;
        it.whole = (it.lead + v) / ENTRIES;
        return it;
    };
    auto ask_for = [&](const Row& it, int k) {  // a group of its pieces; what the row does not have is -inf
        if (it.valid) {
            const Logit* from = a.logits + it.start + (long long)(first + k * THREADS) * ENTRIES;
#pragma unroll
            for (int j = 0; j < GROUP; j++) {
                const int piece = first + (k + j) * THREADS;
                uint4* slot = mine + (k + j) * THREADS;
                if (piece < it.pieces) {
                    const int bytes = piece < it.whole ? 16 : (it.lead + v) % ENTRIES * (int)sizeof(Logit);
                    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                                 :: "r"(shared_address(slot)), "l"(from + j * THREADS * ENTRIES), "r"(bytes) : "memory");
                } else {
                    for (int i = 0; i < ENTRIES; i++) store_one((Logit*)slot + i, -INF);
                }
            }
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    auto slot_of = [&](int piece) {  // the k of a piece of the row, if it is this thread's, else -1
        const int k = (piece - first) / THREADS;
        return piece >= first && k < PIECES && piece == first + k * THREADS ? k : -1;
    };

    int number = blockIdx.x / CLUSTER, turn = 0;
    Row row = find_row(number);
    for (int k = 0; k < PIECES; k += GROUP) ask_for(row, k);
    if (CLUSTER > 1) cluster_barrier();  // everyone is there to be written to
    asm volatile("griddepcontrol.wait;" ::: "memory");  // until the launch before, which finds the scale, has ended
    for (; number < rows; number += stride) {
        const Row next = find_row(number + stride);
        Gradient* out = a.gradient + (long long)number * a.g_stride;
        const bool writes = rank == 0 && thread == 0;
        if (!row.valid) {
            if (WANT)
                for (int i = rank * THREADS + thread; i < v; i += CLUSTER * THREADS) store_one(out + i, 0.f);
            if (writes) a.losses[number] = a.lses[number] = 0.f;
            for (int k = 0; k < PIECES; k += GROUP) ask_for(next, k);
            row = next;
            continue;
        }
        const int at_y = row.lead + row.y;
        float x_y = __int_as_float(0x7fffffff);  // NaN: not a class
        if (row.y >= 0) x_y = load_one(a.logits + row.start + at_y);
        const int with_y = row.y < 0 ? -1 : slot_of(at_y / ENTRIES);
        const int with_head = row.lead ? slot_of(0) : -1;
        const int with_tail = row.whole < row.pieces ? slot_of(row.whole) : -1;

        // the largest and the compensated sum of exponentials of this thread's pieces
        float largest = -INF, sum = 0, lost = 0;
#pragma unroll 1
        for (int k = 0; k < PIECES; k += GROUP) {
            wait_for((PIECES - k) / GROUP - 1);
            auto forget = [&](int slot, int begin, int end) {  // take entries out of the largest and the sum
                if (slot < k || slot >= k + GROUP) return;
                for (int i = begin; i < end; i++) store_one((Logit*)(mine + slot * THREADS) + i, -INF);
            };
            forget(with_y, at_y % ENTRIES, at_y % ENTRIES + 1);
            forget(with_head, 0, row.lead);
            forget(with_tail, (row.lead + v) % ENTRIES, ENTRIES);
            uint4 pieces[GROUP], top_piece;
#pragma unroll
            for (int j = 0; j < GROUP; j++) {
                pieces[j] = mine[(k + j) * THREADS];
                top_piece = j ? larger(top_piece, pieces[j]) : pieces[j];
            }
            float x[GROUP][ENTRIES];
            unpack(top_piece, x[0]);
            float most = x[0][0];
#pragma unroll
            for (int i = 1; i < ENTRIES; i++) most = fmaxf(most, x[0][i]);
            if (most > largest) {
                const float times = largest == -INF ? 0.f : expf(largest - most);
                sum *= times;
                lost *= times;
                largest = most;
            }
            const float below = largest == -INF ? 0.f : largest;
#pragma unroll
            for (int j = 0; j < GROUP; j++) {
                unpack(pieces[j], x[j]);
#pragma unroll
                for (int i = 0; i < ENTRIES; i++) x[j][i] = exp_below(x[j][i] - below);
#pragma unroll
                for (int apart = ENTRIES / 2; apart; apart /= 2)
#pragma unroll
                    for (int i = 0; i < apart; i++) x[j][i] += x[j][i + apart];
                const float more = x[j][0] - lost, together = sum + more;
                lost = (together - sum) - more;
                sum = together;
            }
        }
        // exchanged among the cluster, added up by every warp in the same order
        const Sum warp = add_lanes({largest, (double)sum - lost});
        const int lane = thread % 32, place = rank * WARPS + thread / 32;
        if (CLUSTER == 1 && lane == 0) {
            largests[turn][place] = warp.largest;
            totals[turn][place] = warp.total;
        } else if (CLUSTER > 1 && lane < CLUSTER) {
            unsigned at;
            asm("mapa.shared::cluster.u32 %0, %1, %2;"
                : "=r"(at) : "r"(shared_address(&largests[turn][place])), "r"(lane));
            asm volatile("st.shared::cluster.f32 [%0], %1;" :: "r"(at), "f"(warp.largest) : "memory");
            asm("mapa.shared::cluster.u32 %0, %1, %2;"
                : "=r"(at) : "r"(shared_address(&totals[turn][place])), "r"(lane));
            asm volatile("st.shared::cluster.f64 [%0], %1;" :: "r"(at), "d"(warp.total) : "memory");
        }
        cluster_barrier();
        Sum all = {-INF, 0};
        for (int i = lane; i < SUMS; i += 32) {
            const float theirs = largests[turn][i], most = fmaxf(all.largest, theirs);
            if (most == -INF) { all.total += totals[turn][i]; continue; }
            all.total = all.total * exp_difference(all.largest, most) + totals[turn][i] * exp_difference(theirs, most);
            all.largest = most;
        }
        all = add_lanes(all);
        turn = 1 - turn;

        // loss = log(1 + others / e_y): the difference of the log-sum-exp and the target's logit cancels
        if (all.largest == -INF) all.largest = x_y;
        const double top = fmax((double)x_y, (double)all.largest);
        const double ahead = exp_difference(all.largest, top), e_y = exp_difference(x_y, top);
        const double others = all.total * ahead, d = others + e_y;
        const double lse = top + logf((float)d), pull = 2 * a.z_loss * lse;
        if (writes) {
            const double loss = e_y >= others ? log1pf((float)others / (float)e_y) : logf((float)d) + (top - x_y);
            a.losses[number] = (float)(loss + a.z_loss * lse * lse);
            a.lses[number] = (float)lse;
        }
        if (WANT) {
            const double scale = a.scales[PER_ROW ? number : 0];
            const float times = (float)((1 + pull) * scale * ahead) / (float)d;
            const Exponential gradient_of(all.largest, times);
            Gradient* to = out - row.lead + (long long)first * ENTRIES;
#pragma unroll 1
            for (int k = 0; k < PIECES; k += GROUP) {
                float x[GROUP][ENTRIES];
#pragma unroll
                for (int j = 0; j < GROUP; j++) {
                    unpack(mine[(k + j) * THREADS], x[j]);
#pragma unroll
                    for (int i = 0; i < ENTRIES; i++) x[j][i] = gradient_of(x[j][i]);
                }
                ask_for(next, k);
#pragma unroll
                for (int j = 0; j < GROUP; j++) {
                    Gradient* here = to + (k + j) * THREADS * ENTRIES;
                    if (first + (k + j) * THREADS < row.whole && k + j != with_head) store_piece(here, x[j], gradient_of.flip);
                    else if (k + j == with_head || k + j == with_tail)
#pragma unroll
                        for (int i = 0; i < ENTRIES; i++)
                            if (here + i >= out && here + i < out + v) store_one(here + i, x[j][i], gradient_of.flip);
                }
            }
            if (with_y >= 0) store_one(out + row.y, (float)((pull * e_y - others) * scale) / (float)d);
        } else {
            for (int k = 0; k < PIECES; k += GROUP) ask_for(next, k);
        }
        row = next;
    }
}
