// The steps before and after cross_entropy.cu, each a launch of its own.

struct bf16 { unsigned short bits; };
struct half { unsigned short bits; };

struct Count {
    const void* targets;
    const signed char* masks;
    double* scale;
    int rows, ignore_index, mean;
};

// The sum of a CTA's threads, for its first thread, in a fixed order.
template <typename Number> Number add_threads(Number mine) {
    __shared__ Number sums[32];
    for (int i = 16; i; i /= 2) mine += __shfl_xor_sync(~0u, mine, i);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = mine;
    __syncthreads();
    if (threadIdx.x == 0)
        for (int i = 1; i < blockDim.x / 32; i++) mine += sums[i];
    return mine;
}

// The scale of a mean: 1 / valid positions, 1 where there are none. One CTA; the launch that needs it may start at
// once, and waits where it does.
template <typename Target> void count(const Count& a) {
    asm volatile("griddepcontrol.launch_dependents;");
    const Target* targets = (const Target*)a.targets;
    int valid = 0;
    if (a.mean)
#pragma unroll 8
        for (int i = threadIdx.x; i < a.rows; i += blockDim.x)
            valid += targets[i] != (Target)a.ignore_index && (!a.masks || a.masks[i]);
    valid = add_threads(valid);
    if (threadIdx.x == 0) *a.scale = valid ? 1. / valid : 1.;
}
extern "C" __global__ void count_long(const __grid_constant__ Count a) { count<long long>(a); }
extern "C" __global__ void count_int(const __grid_constant__ Count a) { count<int>(a); }

struct Losses {
    const float* losses;
    const double* scale;
    float* loss;
    int rows;
};

// scale * sum of the losses, by one CTA that may be there before the launch that finds them has ended
extern "C" __global__ void add_losses(const __grid_constant__ Losses a) {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    double sum = 0;
#pragma unroll 8
    for (int i = threadIdx.x; i < a.rows; i += blockDim.x) sum += __ldcg(a.losses + i);
    sum = add_threads(sum);
    if (threadIdx.x == 0) *a.loss = (float)(sum * *a.scale);
}

struct Scaling {
    uint4* gradient;
    const float* by;
    long long pieces;
};

unsigned times_word(unsigned word, float times, float) { return __float_as_uint(__uint_as_float(word) * times); }
unsigned times_word(unsigned word, float times, bf16) {
    const float low = __uint_as_float(word << 16) * times, high = __uint_as_float(word & 0xffff0000u) * times;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}
unsigned times_word(unsigned word, float times, half) {
    float low, high;
    asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}"
        : "=f"(low), "=f"(high) : "r"(word));
    low *= times, high *= times;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

// pieces of 16 bytes times a number; nothing is read if that is 1
template <typename Entry> void scale(const Scaling& a) {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const float times = *a.by;
    if (times == 1) return;
    const long long stride = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < a.pieces; i += stride) {
        uint4 piece = a.gradient[i];
        piece.x = times_word(piece.x, times, Entry());
        piece.y = times_word(piece.y, times, Entry());
        piece.z = times_word(piece.z, times, Entry());
        piece.w = times_word(piece.w, times, Entry());
        __stcs(a.gradient + i, piece);
    }
}
extern "C" __global__ void scale_float(const __grid_constant__ Scaling a) { scale<float>(a); }
extern "C" __global__ void scale_bf16(const __grid_constant__ Scaling a) { scale<bf16>(a); }
extern "C" __global__ void scale_half(const __grid_constant__ Scaling a) { scale<half>(a); }
