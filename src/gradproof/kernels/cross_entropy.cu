// Cross-entropy of rows of logits: each logit is read once from memory, each entry of the gradient written once.
//
// A row lies in the shared memory of a cluster of CTAs while it is worked on, as blocks that one warp each takes care
// of: its first lane asks the copy engine for them, the warp sums their exponentials, the cluster exchanges (largest,
// sum) of its warps, and the warp makes the gradient from the same blocks, asking for those of the next row as they
// fall free. The target is left out of the largest and of the sum, so that a confident target keeps its digits.
//
// Pieces of 16 bytes are the unit of all copies. In the blocks at the ends of a row, where entries of its neighbours
// come along, and in the one with the target, what does not count is replaced by -inf whenever the block is read.
//
// Compiled by cuda_loss.py with: Logit, Gradient (float, bf16, half as types below), Target, Scale, CLUSTER, THREADS,
// CTAS (on a processor), ALIGNED (rows start and end with whole pieces), HAS_MASK, PER_ROW (a scale for each row),
// WANT (the gradient).

struct bf16 { unsigned short bits; };
struct half { unsigned short bits; };

constexpr int WARPS = THREADS / 32;
constexpr int ENTRIES = 16 / sizeof(Logit);   // of a piece
constexpr int GROUP = 4;                      // pieces of a block that a lane has: every 32nd
constexpr int BLOCK = 32 * GROUP;
constexpr int BYTES = 16 * BLOCK;
constexpr bool SHORT = sizeof(Gradient) == 2;
constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;
constexpr float NEAR = 65536;                 // largest logits below which the quick exponentials are right
#define INF __int_as_float(0x7f800000)

// ---- entries of 32 or 16 bits

void unpack(unsigned word, float* x, float) { x[0] = __uint_as_float(word); }
void unpack(unsigned word, float* x, bf16) {
    x[0] = __uint_as_float(word << 16);
    x[1] = __uint_as_float(word & 0xffff0000u);
}
void unpack(unsigned word, float* x, half) {
    asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}"
        : "=f"(x[0]), "=f"(x[1]) : "r"(word));
}
void unpack(const uint4& piece, float* x) {
    const unsigned words[4] = {piece.x, piece.y, piece.z, piece.w};
    for (int i = 0; i < 4; i++) unpack(words[i], x + i * ENTRIES / 4, Logit());
}
// the larger of each entry of two words; of two pieces, the largest in a word
unsigned larger(unsigned a, unsigned b, float) {
    return __float_as_uint(fmaxf(__uint_as_float(a), __uint_as_float(b)));
}
unsigned larger(unsigned a, unsigned b, bf16) {
    unsigned word;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(word) : "r"(a), "r"(b));
    return word;
}
unsigned larger(unsigned a, unsigned b, half) {
    unsigned word;
    asm("max.f16x2 %0, %1, %2;" : "=r"(word) : "r"(a), "r"(b));
    return word;
}
unsigned larger(const uint4& a, const uint4& b) {
    const Logit kind = Logit();
    return larger(larger(larger(a.x, b.x, kind), larger(a.y, b.y, kind), kind),
                  larger(larger(a.z, b.z, kind), larger(a.w, b.w, kind), kind), kind);
}
float load_one(const float* from) { return *from; }
template <typename Short> float load_one(const Short* from) {
    float x[2];
    unpack(from->bits, x, Short());
    return x[0];
}

unsigned pack(float low, float high, bf16) {
    unsigned word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}
unsigned pack(float low, float high, half) {
    unsigned word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}
// logits from floats that came from logits
uint4 pack_piece(const float* x, float) {
    return {__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3])};
}
template <typename Short> uint4 pack_piece(const float* x, Short kind) {
    return {pack(x[0], x[1], kind), pack(x[2], x[3], kind), pack(x[4], x[5], kind), pack(x[6], x[7], kind)};
}

void store_one(float* out, float dx) { *out = dx; }
template <typename Short> void store_one(Short* out, float dx) { out->bits = pack(dx, 0, Short()); }

void store_piece(float* out, const float* dx) {
    __stcs((float4*)out, make_float4(dx[0], dx[1], dx[2], dx[3]));  // float from float: ENTRIES is 4
}
template <typename Short> void store_piece(Short* out, const float* dx) {
    unsigned words[ENTRIES / 2];
    for (int i = 0; i < ENTRIES / 2; i++) words[i] = pack(dx[2 * i], dx[2 * i + 1], Short());
    if constexpr (ENTRIES == 8) __stcs((uint4*)out, make_uint4(words[0], words[1], words[2], words[3]));
    else __stcs((uint2*)out, make_uint2(words[0], words[1]));
}

// ---- exponentials

float exp2_quick(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// exp(u) for u <= 0, with what the rounding of u * log2(e) loses put back
float exp_below(float u) {
    const float z = u * LOG2E, e = exp2_quick(z);
    const float lost = z == -INF ? 0.f : fmaf(u, LOG2E, -z);
    return fmaf(e * LN2, lost, e);
}
// the same where u has more digits
double exp_below(double u) {
    u = u < -1000 ? -1000 : u;  // NaN stays
    const float high = (float)u;
    return expf(high) * (1.0 + (u - high));
}

// exp(x - largest) as exp2(x * log2(e) + shift): `shift` is rounded, and all such exponentials are too large by
// 2^off. That is as exact as exp(x - largest), for one instruction less, while largest is near.
struct Shift {
    float shift, off;
    bool near;
    explicit Shift(float largest) : shift(0), off(0), near(fabsf(largest) <= NEAR) {
        if (!near) return;
        shift = -largest * LOG2E;
        off = fmaf(largest, LOG2E, shift);
    }
    float undo() const {  // 2^-off
        const float u = off * LN2;
        return 1 - u + 0.5f * u * u;
    }
};

// ---- sums among lanes and CTAs

struct Sum { float largest, x_y; double total; };  // of exponentials: total * exp(largest)

Sum add_lanes(Sum mine) {  // in a fixed order; the same in every lane
    float largest = mine.largest;
    for (int i = 16; i; i /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, i));
    double total = mine.largest == -INF ? mine.total : mine.total * exp_below(mine.largest - largest);
    for (int i = 16; i; i /= 2) total += __shfl_xor_sync(~0u, total, i);
    return {largest, mine.x_y, total};
}

unsigned shared_address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }

// ---- barriers in shared memory that count bytes, and the copy engine

void start_barrier(unsigned barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(barrier) : "memory");
}
void expect_bytes(unsigned barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}
void wait_for_bytes(unsigned barrier, bool parity) {
    unsigned done;
    do {
        asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                     : "=r"(done) : "r"(barrier), "r"((unsigned)parity) : "memory");
    } while (!done);
}

void start_copy(unsigned to, const void* from, int bytes, unsigned barrier) {
    expect_bytes(barrier, bytes);
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
// the same place in the shared memory of another CTA of the cluster
unsigned in_cta(unsigned address, int rank) {
    asm("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(rank));
    return address;
}
void send(unsigned to, const Sum& sum, unsigned barrier) {
    const unsigned long long total = __double_as_longlong(sum.total);
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];"
                 :: "r"(to), "r"(__float_as_uint(sum.largest)), "r"(__float_as_uint(sum.x_y)), "r"((unsigned)total),
                    "r"((unsigned)(total >> 32)), "r"(barrier) : "memory");
}

struct Arguments {
    const Logit* logits;
    Gradient* gradient;
    const Target* targets;
    const signed char* masks;
    const Scale* scales;
    float *losses, *lses;
    int v, rows, x_stride, g_stride, ignore_index, blocks;  // blocks of a row that a CTA takes
    double z_loss;
};

struct Row {
    long long start;  // its first entry
    int lead;         // entries of its first piece that are not its own
    int copied;       // pieces that the copy engine brings; none if the row does not count
    int y;            // the target; -1: not a class
    int pieces(int v) const { return (lead + v + ENTRIES - 1) / ENTRIES; }  // that have entries of it
    int whole(int v) const { return (lead + v) / ENTRIES; }                 // of these, before the one it ends in
};

extern "C" __global__ void __launch_bounds__(THREADS, CTAS)
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
cross_entropy(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(128) uint4 slots[];  // the blocks, then a barrier for each
    __shared__ Sum of_warps[WARPS], of_ctas[2][CLUSTER];
    __shared__ unsigned long long met[2];  // barriers of of_ctas
    __shared__ struct { float largest, times, dy; } found;  // dx = times * exp(x - largest), but dy of the target
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, rank = CLUSTER == 1 ? 0 : blockIdx.x % CLUSTER;
    const int stride = gridDim.x / CLUSTER, v = a.v;
    const unsigned slot = shared_address(slots), barrier = slot + a.blocks * BYTES;
    unsigned parities = 0;  // of the barriers of this warp's blocks

    auto find_row = [&](int number) {
        Row it = {};
        if (number >= a.rows) return it;
        const Target y = a.targets[number];
        it.start = (long long)number * a.x_stride;
        it.lead = ALIGNED ? 0 : (int)(it.start % ENTRIES);
        it.y = y < 0 || y >= v ? -1 : (int)y;
        const bool counts = y != (Target)a.ignore_index && (!HAS_MASK || a.masks[number]);
        if (counts) it.copied = number < a.rows - 1 ? it.pieces(v) : it.whole(v);  // not beyond the end of the last
        return it;
    };
    auto first_piece = [&](int block) { return (rank * a.blocks + block) * BLOCK; };
    auto ask_for = [&](const Row& row, int block) {
        const int pieces = min(row.copied - first_piece(block), BLOCK);
        if (lane == 0 && pieces > 0)
            start_copy(slot + block * BYTES, a.logits + row.start - row.lead + (long long)first_piece(block) * ENTRIES,
                       16 * pieces, barrier + 8 * block);
    };

    if (lane == 0)
        for (int block = warp; block < a.blocks; block += WARPS)
            start_barrier(barrier + 8 * block);
    if (CLUSTER > 1 && threadIdx.x < 2) start_barrier(shared_address(met + threadIdx.x));
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    __syncwarp();
    int number = blockIdx.x / CLUSTER, turn = 0;
    Row row = find_row(number);
    for (int block = warp; block < a.blocks; block += WARPS) ask_for(row, block);
    if (CLUSTER > 1)  // everyone is there to be written to
        asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");  // until the launch before, which finds the scale, has ended

    for (; number < a.rows; number += stride) {
        const Row next = find_row(number + stride);
        Gradient* const out = a.gradient + (long long)number * a.g_stride;

        auto is_edge = [&](int first) { return (!ALIGNED && first == 0) || first + BLOCK > row.whole(v); };
        auto write = [&](int first, const float (*dx)[ENTRIES]) {
            Gradient* const to = out - row.lead + (first + lane) * ENTRIES;
            if (!is_edge(first)) {
#pragma unroll
                for (int j = 0; j < GROUP; j++) store_piece(to + j * 32 * ENTRIES, dx[j]);
                return;
            }
#pragma unroll
            for (int j = 0; j < GROUP; j++)
#pragma unroll
                for (int i = 0; i < ENTRIES; i++) {
                    const int at = (first + j * 32 + lane) * ENTRIES - row.lead + i;
                    if (at >= 0 && at < v) store_one(out + at, dx[j][i]);
                }
        };
        if (!row.copied) {
            const float zeros[GROUP][ENTRIES] = {};
            for (int block = warp; block < a.blocks; block += WARPS) {
                if (WANT && first_piece(block) < row.pieces(v)) write(first_piece(block), zeros);
                ask_for(next, block);
            }
            if (rank == 0 && threadIdx.x == 0) a.losses[number] = a.lses[number] = 0.f;
            row = next;
            continue;
        }
        float x_y = __int_as_float(0x7fffffff);  // NaN: not a class
        if (warp == 0 && row.y >= 0) x_y = load_one(a.logits + row.start + row.y);
        const int piece_y = row.y < 0 ? -1 : (row.lead + row.y) / ENTRIES;

        // a block, with -inf for what does not count: entries of other rows and the target
        auto read = [&](int block, uint4* pieces) {
#pragma unroll
            for (int j = 0; j < GROUP; j++) pieces[j] = slots[block * BLOCK + j * 32 + lane];
            const int first = first_piece(block);
            if (!is_edge(first) && (unsigned)(piece_y - first) >= BLOCK) return;
#pragma unroll
            for (int j = 0; j < GROUP; j++) {
                const int piece = first + j * 32 + lane, at = piece * ENTRIES - row.lead;
                if (at >= 0 && at + ENTRIES <= v && piece != piece_y) continue;
                float x[ENTRIES];
                unpack(pieces[j], x);
#pragma unroll
                for (int i = 0; i < ENTRIES; i++) {
                    const bool counts = at + i >= 0 && at + i < v && at + i != row.y;
                    if (!ALIGNED && counts && piece >= row.copied) x[i] = load_one(a.logits + row.start + at + i);
                    if (!counts) x[i] = -INF;
                }
                pieces[j] = pack_piece(x, Logit());
            }
        };

        // the largest and the compensated sum of exponentials of this lane's pieces
        float largest = -INF, sum = 0, lost = 0;
        Shift shift(largest);
        for (int block = warp, bit = 1; block < a.blocks; block += WARPS, bit *= 2) {
            if (first_piece(block) >= row.pieces(v)) break;
            if (first_piece(block) < row.copied) {
                wait_for_bytes(barrier + 8 * block, parities & bit);
                parities ^= bit;
            }
            uint4 pieces[GROUP];
            read(block, pieces);
            unsigned word = larger(pieces[0], pieces[1]);
#pragma unroll
            for (int j = 2; j < GROUP; j += 2) word = larger(word, larger(pieces[j], pieces[j + 1]), Logit());
            float x[GROUP][ENTRIES];
            unpack(word, x[0], Logit());
            const float most = sizeof(Logit) == 4 ? x[0][0] : fmaxf(x[0][0], x[0][1]);
            if (most > largest) {
                const Shift now(most);
                const float times = largest == -INF ? 0.f : exp_below(largest - most) * exp2_quick(now.off - shift.off);
                sum *= times;
                lost *= times;
                largest = most;
                shift = now;
            }
#pragma unroll
            for (int j = 0; j < GROUP; j++) unpack(pieces[j], x[j]);
            if (shift.near) {
#pragma unroll
                for (int j = 0; j < GROUP; j++)
#pragma unroll
                    for (int i = 0; i < ENTRIES; i++) x[j][i] = exp2_quick(fmaf(x[j][i], LOG2E, shift.shift));
            } else {
                const float below = largest == -INF ? 0.f : largest;
#pragma unroll
                for (int j = 0; j < GROUP; j++)
#pragma unroll
                    for (int i = 0; i < ENTRIES; i++) x[j][i] = exp_below(x[j][i] - below);
            }
#pragma unroll
            for (int j = 0; j < GROUP; j++) {
#pragma unroll
                for (int apart = ENTRIES / 2; apart; apart /= 2)
#pragma unroll
                    for (int i = 0; i < apart; i++) x[j][i] += x[j][i + apart];
                const float more = x[j][0] - lost, together = sum + more;
                lost = (together - sum) - more;
                sum = together;
            }
        }
        // The first warp of each CTA adds up the sums of all warps, in a fixed order, and exchanges that among the
        // cluster. The others wait: if all did the same, they would take time from the other CTAs of the processor.
        const Sum mine = add_lanes({largest, x_y, ((double)sum - lost) * shift.undo()});
        if (lane == 0) of_warps[warp] = mine;
        if (warp) {
            asm volatile("barrier.cta.arrive 1, %0;" :: "n"(THREADS) : "memory");
        } else {
            asm volatile("barrier.cta.sync 1, %0;" :: "n"(THREADS) : "memory");
            Sum all = add_lanes(lane < WARPS ? of_warps[lane] : Sum{-INF, 0, 0});
            all.x_y = x_y;  // sent along only to be there: as soon as all have sent, it may be overwritten in place
            if (CLUSTER > 1) {
                const unsigned here = shared_address(met + turn % 2);
                if (lane == 0) expect_bytes(here, sizeof(Sum) * CLUSTER);
                if (lane < CLUSTER)
                    send(in_cta(shared_address(&of_ctas[turn % 2][rank]), lane), all, in_cta(here, lane));
                wait_for_bytes(here, turn / 2 % 2);
                all = add_lanes(lane < CLUSTER ? of_ctas[turn % 2][lane] : Sum{-INF, 0, 0});
                turn++;
            }
            // loss = log(1 + others / e_y): the difference of the log-sum-exp and the target's logit cancels
            if (all.largest == -INF) all.largest = x_y;
            const double gap = x_y == INF ? x_y - INF : (double)x_y - all.largest;  // NaN for what has no softmax
            const double small = exp_below(-fabs(gap)), e_y = gap > 0 ? 1 : small, ahead = gap > 0 ? small : 1;
            const double others = all.total * ahead, d = others + e_y, top = gap > 0 ? x_y : all.largest;
            const double lse = top + logf((float)d), pull = 2 * a.z_loss * lse;
            const double scale = WANT ? a.scales[PER_ROW ? number : 0] : 0;
            if (lane == 0) {
                found = {all.largest, (float)((1 + pull) * scale * ahead) / (float)d,
                              (float)((pull * e_y - others) * scale) / (float)d};
                if (rank == 0) {
                    const double loss =
                        e_y >= others ? log1pf((float)others / (float)e_y) : logf((float)d) + (top - x_y);
                    a.losses[number] = (float)(loss + a.z_loss * lse * lse);
                    a.lses[number] = (float)lse;
                }
            }
        }
        asm volatile("barrier.cta.sync 2, %0;" :: "n"(THREADS) : "memory");

        // times * exp(x - largest): of 16 bits with |times| in the exponent, which loses a hundredth of their rounding
        auto write_gradient = [&](auto gradient_of) {
            for (int block = warp; block < a.blocks; block += WARPS) {
                const int first = first_piece(block);
                if (first < row.pieces(v)) {
                    uint4 pieces[GROUP];
                    read(block, pieces);
                    float x[GROUP][ENTRIES];
#pragma unroll
                    for (int j = 0; j < GROUP; j++) {
                        unpack(pieces[j], x[j]);
#pragma unroll
                        for (int i = 0; i < ENTRIES; i++) x[j][i] = gradient_of(x[j][i]);
                    }
                    __syncwarp();  // all lanes have read
                    ask_for(next, block);
                    write(first, x);
                    if ((unsigned)(piece_y - first) < BLOCK && lane == piece_y % 32) store_one(out + row.y, found.dy);
                } else {
                    ask_for(next, block);
                }
            }
        };
        if (WANT) {
            const float most = found.largest, times = found.times;
            const Shift from(most);
            const float exponent = fmaf(-most, LOG2E, log2f(times)), times_near = times * from.undo();
            if (SHORT && fabsf(exponent) < 1024)  // of times > 0
                write_gradient([=](float x) { return exp2_quick(fmaf(x, LOG2E, exponent)); });
            else if (!SHORT && from.near)
                write_gradient([=](float x) { return exp2_quick(fmaf(x, LOG2E, from.shift)) * times_near; });
            else
                write_gradient([=](float x) { return exp2_quick((x - most) * LOG2E) * times; });
        } else {
            for (int block = warp; block < a.blocks; block += WARPS) ask_for(next, block);
        }
        row = next;
    }
}
