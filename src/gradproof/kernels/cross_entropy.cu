// Cross-entropy of rows of logits: each logit is read once from memory, each entry of the gradient written once.
//
// A row lies in the shared memory of a cluster of CTAs while it is worked on. A thread loads 16-byte pieces into
// slots that only it reads: it sums their exponentials, the cluster exchanges (largest, sum) of its warps, and the
// thread makes the gradient from the same slots, asking for pieces of later rows as the slots fall free. The slots
// are a ring with more places than a row has pieces, so that memory has work to do while a row is summed and its sums
// are exchanged. Clusters stay for many rows; with REDUCE the last one to finish adds up the losses.
// The target is left out of the largest and of the sum, so that a confident target keeps its digits; so are the
// entries of the neighbouring rows that a row which starts or ends inside a piece brings along.
//
// Compiled by cuda_loss.py with: Logit, Gradient (float, bf16, half as types below), Target, Scale, CLUSTER, THREADS,
// PIECES (of a row, for a thread), RING (places for them), GROUP (of them, worked on together), CTAS (to share a
// processor), ODD (rows start or end inside a piece), HAS_MASK, PER_ROW (a scale for each row), WANT (the gradient),
// REDUCE.

struct bf16 { unsigned short bits; };
struct half { unsigned short bits; };

constexpr int WARPS = THREADS / 32;
constexpr int SUMS = CLUSTER * WARPS;         // exchanged for a row
constexpr int ENTRIES = 16 / sizeof(Logit);   // of a piece
constexpr bool SHORT = sizeof(Gradient) == 2;
constexpr int GROUPS = PIECES / GROUP;        // of a row
constexpr int PLACES = RING / GROUP;          // for groups
constexpr int AHEAD = PLACES / GROUPS, MORE = PLACES % GROUPS;  // rows, and groups of one more row, that these hold
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
    const float lost = u == -INF ? 0.f : fmaf(u, LOG2E, -z);
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

// into the same place of a CTA of the cluster
__device__ unsigned place_in(int cta, const void* here) {
    unsigned at;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(shared_address(here)), "r"(cta));
    return at;
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
struct Place {
    long long start;      // of its first piece, in entries; the row itself starts `lead` entries later
    int lead, end, whole; // `whole` pieces lie before its end
    __device__ Place(int row, int stride, int v) {
        start = (long long)row * stride;
        lead = ODD ? (int)(start % ENTRIES) : 0;
        start -= lead;
        end = lead + v;
        whole = end / ENTRIES;
    }
    // the entries of a piece that are the row's
    __device__ int begin_of(int piece) const { return piece ? 0 : lead; }
    __device__ int end_of(int piece) const { return max(0, min(ENTRIES, end - piece * ENTRIES)); }
};
constexpr int MASKED = -2, UNKNOWN = -1;  // instead of a target

// until at most `groups` of the groups of pieces that this thread asked for are missing
__device__ void wait_for(int groups) {
#define WAIT(n) case n: asm volatile("cp.async.wait_group " #n ";" ::: "memory"); break;
    switch (groups) {
        WAIT(0) WAIT(1) WAIT(2) WAIT(3) WAIT(4) WAIT(5) WAIT(6) WAIT(7) WAIT(8) WAIT(9) WAIT(10) WAIT(11)
        default: asm volatile("cp.async.wait_group 12;" ::: "memory");
    }
}

// what the launch before this one leaves: see count_valid
struct Shared {
    double scale;
    int finished;
};

struct Arguments {
    const Logit* logits;
    Gradient* gradient;
    const Target* targets;
    const signed char* masks;
    const Scale* scales;
    float *losses, *lses, *loss;
    Shared* shared;
    int v, rows, x_stride, g_stride, ignore_index;
    double z_loss;
};

// the sum of all losses, in a fixed order, by one CTA
__device__ void add_losses(const Arguments& a, double scale) {
    __shared__ double sums[WARPS];
    double sum = 0;
    for (int i = threadIdx.x; i < a.rows; i += THREADS) sum += __ldcg(a.losses + i);
    for (int i = 16; i; i /= 2) sum += __shfl_xor_sync(~0u, sum, i);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x) return;
    for (int i = 1; i < WARPS; i++) sum += sums[i];
    *a.loss = (float)(sum * scale);
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS)
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
cross_entropy(const __grid_constant__ Arguments a) {
    extern __shared__ uint4 slots[];
    __shared__ float largests[2][SUMS];
    __shared__ double totals[2][SUMS];
    __shared__ bool last;
    const int thread = threadIdx.x, lane = thread % 32, rank = CLUSTER == 1 ? 0 : blockIdx.x % CLUSTER;
    const int first = rank * THREADS * PIECES + thread;  // this thread's pieces: first + k * THREADS
    const int clusters = gridDim.x / CLUSTER, v = a.v, rows = a.rows;
    const bool leads = rank == 0 && thread == 0;
    auto piece_of = [&](int group, int j) { return first + (group * GROUP + j) * THREADS; };
    auto slots_of = [&](int place) { return slots + thread + place * (GROUP * THREADS); };
    auto next_place = [](int place) { return place + 1 == PLACES ? 0 : place + 1; };

    auto is_masked = [&](int row) { return HAS_MASK && row < rows && !a.masks[row]; };
    auto target_at = [&](int row) { return row < rows ? a.targets[row] : (Target)a.ignore_index; };
    auto read_target = [&](Target y, bool masked) {
        return masked || y == (Target)a.ignore_index ? MASKED : y < 0 || y >= v ? UNKNOWN : (int)y;
    };
    // what a row does not have of a group is not loaded
    auto ask_for = [&](int row, int y, int group, int place) {
        if (y != MASKED) {
            const Place it(row, a.x_stride, v);
            const Logit* from = a.logits + it.start + (long long)piece_of(group, 0) * ENTRIES;
            const unsigned to = shared_address(slots_of(place));
            if (piece_of(group, GROUP - 1) < it.whole) {
#pragma unroll
                for (int j = 0; j < GROUP; j++)
                    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                                 :: "r"(to + j * THREADS * 16), "l"(from + j * THREADS * ENTRIES) : "memory");
            } else {
#pragma unroll 1
                for (int j = 0; j < GROUP; j++) {
                    const int bytes = it.end_of(piece_of(group, j)) * (int)sizeof(Logit);
                    if (bytes)
                        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                                     :: "r"(to + j * THREADS * 16), "l"(from + j * THREADS * ENTRIES), "r"(bytes)
                                     : "memory");
                }
            }
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };

    int number = blockIdx.x / CLUSTER, place = 0;
    int ys[AHEAD + 2];  // of this row and those after it that are asked for
#pragma unroll
    for (int i = 0; i < AHEAD + 2; i++)
        ys[i] = read_target(target_at(number + i * clusters), is_masked(number + i * clusters));
#pragma unroll
    for (int i = 0; i < PLACES; i++) ask_for(number + i / GROUPS * clusters, ys[i / GROUPS], i % GROUPS, i);
    double scale = 1;
    if (CLUSTER > 1) cluster_barrier();  // everyone is there to be written to
    for (int turn = 0; number < rows; number += clusters, turn ^= 1) {
        const Place row(number, a.x_stride, v);
        const int y = ys[0], newest = number + (AHEAD + 2) * clusters;
        const Target newest_y = target_at(newest);
        const bool newest_masked = is_masked(newest);
        const int at_y = y < 0 ? -1 : row.lead + y, with_y = at_y < 0 ? -1 : at_y / ENTRIES;
        const int k_y = (with_y - first) / THREADS;  // whose slot holds the target, if `mine`
        const bool mine = with_y >= first && k_y < PIECES && with_y == first + k_y * THREADS;
        float x_y = __int_as_float(0x7fffffff);  // NaN: not a class
        if (y >= 0) x_y = load_one(a.logits + row.start + at_y);
        if (PER_ROW) scale = a.scales[number];
        // whether all pieces of a group are the row's, from their first entry to their last
        auto is_whole = [&](int group) {
            return piece_of(group, GROUP - 1) < row.whole && !(ODD && row.lead && piece_of(group, 0) == 0);
        };

        if (y != MASKED) {
            // the largest and the compensated sum of exponentials of this thread's pieces
            float largest = -INF, sum = 0, lost = 0;
            int at = place;
#pragma unroll 1
            for (int group = 0; group < GROUPS; group++, at = next_place(at)) {
                wait_for(PLACES - 1 - group);
                uint4* const from = slots_of(at);
                if (!is_whole(group) || (mine && k_y / GROUP == group)) {  // entries that do not belong to the sum
#pragma unroll 1
                    for (int j = 0; j < GROUP; j++) {
                        const int piece = piece_of(group, j);
                        for (int i = 0; i < ENTRIES; i++)
                            if (i < row.begin_of(piece) || i >= row.end_of(piece) || piece * ENTRIES + i == at_y)
                                store_one((Logit*)(from + j * THREADS) + i, -INF);
                    }
                }
                uint4 pieces[GROUP], top_piece;
#pragma unroll
                for (int j = 0; j < GROUP; j++) {
                    pieces[j] = from[j * THREADS];
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
            const int post = rank * WARPS + thread / 32;
            if (CLUSTER == 1 && lane == 0) {
                largests[turn][post] = warp.largest;
                totals[turn][post] = warp.total;
            } else if (CLUSTER > 1 && lane < CLUSTER) {
                asm volatile("st.shared::cluster.f32 [%0], %1;"
                             :: "r"(place_in(lane, &largests[turn][post])), "f"(warp.largest) : "memory");
                asm volatile("st.shared::cluster.f64 [%0], %1;"
                             :: "r"(place_in(lane, &totals[turn][post])), "d"(warp.total) : "memory");
            }
        }
        cluster_barrier();
        if (number < clusters) {  // the first row: what the launch before leaves is needed from here on
            asm volatile("griddepcontrol.wait;" ::: "memory");
            if (!PER_ROW) scale = REDUCE ? a.shared->scale : (double)a.scales[0];
        }

        Gradient* const out = a.gradient + (long long)number * a.g_stride;
        auto store_group = [&](int group, const float (*x)[ENTRIES], unsigned flip) {
            Gradient* const to = out - row.lead + (long long)piece_of(group, 0) * ENTRIES;
            if (is_whole(group)) {
#pragma unroll
                for (int j = 0; j < GROUP; j++) store_piece(to + j * THREADS * ENTRIES, x[j], flip);
            } else {
#pragma unroll
                for (int j = 0; j < GROUP; j++) {
                    const int piece = piece_of(group, j), begin = row.begin_of(piece), end = row.end_of(piece);
                    Gradient* const here = to + j * THREADS * ENTRIES;
                    if (begin == 0 && end == ENTRIES) store_piece(here, x[j], flip);
                    else if (ODD)
#pragma unroll
                        for (int i = 0; i < ENTRIES; i++)
                            if (i >= begin && i < end) store_one(here + i, x[j][i], flip);
                }
            }
        };
        auto ask_for_later = [&](int group, int at) {  // into the place of a group that is done with
            const int later = group + MORE;
            if (later < GROUPS) ask_for(number + AHEAD * clusters, ys[AHEAD], later, at);
            else ask_for(number + (AHEAD + 1) * clusters, ys[AHEAD + 1], later - GROUPS, at);
        };
        if (y == MASKED) {
            if (leads) a.losses[number] = a.lses[number] = 0.f;
            const float zeros[GROUP][ENTRIES] = {};
#pragma unroll 1
            for (int group = 0; group < GROUPS; group++, place = next_place(place)) {
                ask_for_later(group, place);
                if (WANT) store_group(group, zeros, 0);
            }
        } else {
            Sum all = {-INF, 0};
#pragma unroll
            for (int i = lane; i < SUMS; i += 32) all.largest = fmaxf(all.largest, largests[turn][i]);
#pragma unroll
            for (int i = lane; i < SUMS; i += 32) {
                const float theirs = largests[turn][i];
                all.total += totals[turn][i] * (theirs == all.largest ? 1. : exp_difference(theirs, all.largest));
            }
            all = add_lanes(all);

            // loss = log(1 + others / e_y): the difference of the log-sum-exp and the target's logit cancels
            if (all.largest == -INF) all.largest = x_y;
            const double top = fmax((double)x_y, (double)all.largest);
            const double ahead = exp_difference(all.largest, top), e_y = exp_difference(x_y, top);
            const double others = all.total * ahead, d = others + e_y;
            const double lse = top + logf((float)d), pull = 2 * a.z_loss * lse;
            if (leads) {
                const double loss = e_y >= others ? log1pf((float)others / (float)e_y) : logf((float)d) + (top - x_y);
                a.losses[number] = (float)(loss + a.z_loss * lse * lse);
                a.lses[number] = (float)lse;
            }
            const float times = (float)((1 + pull) * scale * ahead) / (float)d;
            const Exponential gradient_of(all.largest, times);
#pragma unroll 1
            for (int group = 0; group < GROUPS; group++, place = next_place(place)) {
                float x[GROUP][ENTRIES];
#pragma unroll
                for (int j = 0; WANT && j < GROUP; j++) {
                    unpack(slots_of(place)[j * THREADS], x[j]);
#pragma unroll
                    for (int i = 0; i < ENTRIES; i++) x[j][i] = gradient_of(x[j][i]);
                }
                ask_for_later(group, place);
                if (WANT) store_group(group, x, gradient_of.flip);
            }
            if (WANT && mine) store_one(out + y, (float)((pull * e_y - others) * scale) / (float)d);
        }
#pragma unroll
        for (int i = 0; i < AHEAD + 1; i++) ys[i] = ys[i + 1];
        ys[AHEAD + 1] = read_target(newest_y, newest_masked);
    }
    if (!REDUCE || rank) return;
    if (leads) {
        __threadfence();
        last = atomicAdd(&a.shared->finished, 1) == clusters - 1;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    add_losses(a, scale);
}
