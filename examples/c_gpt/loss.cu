/* The same loss on a GPU: a block a row, its threads share the vocabulary. Logits and probabilities stay with the host. */
#include <stdio.h>
#include <stdlib.h>

#include "loss.h"

enum { THREADS = 128 };

static void check(cudaError_t error, const char *what) {
    if (error == cudaSuccess) return;
    fprintf(stderr, "loss.cu: %s: %s\n", what, cudaGetErrorString(error));
    exit(1);
}

/* Adds up, or takes the largest of, one number a thread. */
template <typename Join> __device__ double joined(double mine, Join join) {
    __shared__ double all[THREADS];
    all[threadIdx.x] = mine;
    __syncthreads();
    for (int half = THREADS / 2; half; half /= 2) {
        if (threadIdx.x < half) all[threadIdx.x] = join(all[threadIdx.x], all[threadIdx.x + half]);
        __syncthreads();
    }
    double result = all[0];
    __syncthreads();
    return result;
}

struct Larger {
    __device__ double operator()(double a, double b) const { return a > b ? a : b; }
};

struct Sum {
    __device__ double operator()(double a, double b) const { return a + b; }
};

__global__ void forward_kernel(real *probs, real *losses, const real *logits, const int *targets, int V) {
    const real *x = logits + (size_t)blockIdx.x * V;
    real *p = probs + (size_t)blockIdx.x * V;
    double most = -1e300, sum = 0;
    for (int v = threadIdx.x; v < V; v += THREADS) most = x[v] > most ? x[v] : most;
    most = joined(most, Larger());
    for (int v = threadIdx.x; v < V; v += THREADS) sum += exp((double)x[v] - most);
    sum = joined(sum, Sum());
    for (int v = threadIdx.x; v < V; v += THREADS) p[v] = (real)(exp((double)x[v] - most) / sum);
    if (threadIdx.x == 0) losses[blockIdx.x] = (real)(log(sum) - (x[targets[blockIdx.x]] - most));
}

__global__ void backward_kernel(real *dlogits, const real *probs, const int *targets, int rows, int V) {
    size_t start = (size_t)blockIdx.x * V;
    for (int v = threadIdx.x; v < V; v += THREADS)
        dlogits[start + v] = (probs[start + v] - (real)(v == targets[blockIdx.x])) / rows;
}

static struct {
    real *in, *out, *losses;
    int *targets;
} on_device;

static void make_room(int rows, int V) {
    size_t logits = (size_t)rows * V * sizeof(real);
    if (on_device.in) return;
    check(cudaMalloc((void **)&on_device.in, logits), "cudaMalloc");
    check(cudaMalloc((void **)&on_device.out, logits), "cudaMalloc");
    check(cudaMalloc((void **)&on_device.losses, rows * sizeof(real)), "cudaMalloc");
    check(cudaMalloc((void **)&on_device.targets, rows * sizeof(int)), "cudaMalloc");
}

extern "C" real cross_entropy_forward(real *probs, const real *logits, const int *targets, int rows, int V) {
    size_t bytes = (size_t)rows * V * sizeof(real);
    real *losses = (real *)malloc(rows * sizeof(real));
    double sum = 0;
    make_room(rows, V);
    check(cudaMemcpy(on_device.in, logits, bytes, cudaMemcpyHostToDevice), "copying the logits");
    check(cudaMemcpy(on_device.targets, targets, rows * sizeof(int), cudaMemcpyHostToDevice), "copying the targets");
    forward_kernel<<<rows, THREADS>>>(on_device.out, on_device.losses, on_device.in, on_device.targets, V);
    check(cudaGetLastError(), "the forward kernel");
    check(cudaMemcpy(probs, on_device.out, bytes, cudaMemcpyDeviceToHost), "copying the probabilities");
    check(cudaMemcpy(losses, on_device.losses, rows * sizeof(real), cudaMemcpyDeviceToHost), "copying the losses");
    for (int r = 0; r < rows; r++) sum += losses[r] / rows;
    free(losses);
    return (real)sum;
}

extern "C" void cross_entropy_backward(real *dlogits, const real *probs, const int *targets, int rows, int V) {
    size_t bytes = (size_t)rows * V * sizeof(real);
    make_room(rows, V);
    check(cudaMemcpy(on_device.in, probs, bytes, cudaMemcpyHostToDevice), "copying the probabilities");
    check(cudaMemcpy(on_device.targets, targets, rows * sizeof(int), cudaMemcpyHostToDevice), "copying the targets");
    backward_kernel<<<rows, THREADS>>>(on_device.out, on_device.in, on_device.targets, rows, V);
    check(cudaGetLastError(), "the backward kernel");
    check(cudaMemcpy(dlogits, on_device.out, bytes, cudaMemcpyDeviceToHost), "copying the gradient");
}
