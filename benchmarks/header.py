"""What gradproof.h costs: statistics of a tensor beside memcpy on one core, and a step that is not measured.

python benchmarks/header.py               with cc, at -O2 and at -O3 -march=native
python benchmarks/header.py --device      with nvcc, on the GPU: statistics beside a copy on the device
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

INCLUDE = Path(__file__).parent.parent / "src" / "gradproof" / "include"

HOST = r"""
#include "gradproof.h"

enum { ROUNDS = 9 };

static void fill(unsigned char *data, size_t count, gp_dtype dtype) {
    unsigned state = 1;
    for (size_t i = 0; i < count; i++) {
        state = state * 1664525u + 1013904223u;
        float x = (float)(state >> 8) / 16777216.0f - 0.5f;
        uint16_t half = (uint16_t)(dtype == GP_BF16 ? gp__bits32(x) >> 16 : 0x3000 | (state >> 12 & 0x83ff));
        double wide = x;
        const void *from = dtype == GP_F32 ? (void *)&x : dtype == GP_F64 ? (void *)&wide : (void *)&half;
        memcpy(data + i * gp__size_of(dtype), from, gp__size_of(dtype));
    }
}

int main(void) {
    const char *names[] = {"float32", "float64", "bfloat16", "float16"};
    size_t bytes = 256u << 20;
    unsigned char *data = malloc(bytes), *other = malloc(bytes);
    volatile double sink = 0;
    memset(other, 1, bytes);
    for (int dtype = GP_F32; dtype <= GP_F16; dtype++) {
        double best = 1e9, change = 1e9, copy = 1e9;
        size_t count = bytes / gp__size_of(dtype);
        fill(data, count, dtype);
        for (int round = 0; round < ROUNDS; round++) {
            double start = gp__now();
            sink += gp_measure(data, NULL, dtype, count).squares;
            if (gp__now() - start < best) best = gp__now() - start;
            start = gp__now();
            memcpy(other, data, bytes);
            if (gp__now() - start < copy) copy = gp__now() - start;
            sink += other[round * 4096];
            start = gp__now();
            sink += gp_measure(data, other, dtype, count).squares;
            if (gp__now() - start < change) change = gp__now() - start;
        }
        printf("%s %g %g %g\n", names[dtype], bytes / best / 1e9, bytes / change / 1e9, bytes / copy / 1e9);
    }
    gp_run *run = gp_open("run", 1 << 30);
    gp_tensor(run, GP_WEIGHT, "w", data, GP_F32, gp_1d((int64_t)(bytes / 4)));
    gp_step(run, 1.0, 1e-3);
    double start = gp__now();
    for (int i = 0; i < 20000; i++) gp_step(run, 1.0, 1e-3);
    printf("step %g 0 0\n", (gp__now() - start) / 20000 * 1e6);
    gp_close(run);
    return sink == 12345;
}
"""

DEVICE = r"""
#include "gradproof.h"

int main(void) {
    const char *names[] = {"float32", "float64", "bfloat16", "float16"};
    size_t bytes = (size_t)1 << 30;
    unsigned char *host = (unsigned char *)malloc(bytes), *data, *other;
    cudaMalloc((void **)&data, bytes);
    cudaMalloc((void **)&other, bytes);
    cudaEvent_t start, end;
    cudaEventCreate(&start);
    cudaEventCreate(&end);
    for (int dtype = GP_F32; dtype <= GP_F16; dtype++) {
        size_t count = bytes / gp__size_of((gp_dtype)dtype);
        unsigned state = 1;
        for (size_t i = 0; i < count; i++) {
            state = state * 1664525u + 1013904223u;
            float x = (float)(state >> 8) / 16777216.0f - 0.5f;
            if (i % 1000003 == 7) x = i % 2 ? 0.0f : x * 1e30f * 1e30f; /* some zeros, some Inf */
            uint16_t half = (uint16_t)(dtype == GP_BF16 ? gp__bits32(x) >> 16 : 0x3000 | (state >> 12 & 0x83ff));
            double wide = x;
            const void *from = dtype == GP_F32 ? (void *)&x : dtype == GP_F64 ? (void *)&wide : (void *)&half;
            memcpy(host + i * gp__size_of((gp_dtype)dtype), from, gp__size_of((gp_dtype)dtype));
        }
        cudaMemcpy(data, host, bytes, cudaMemcpyHostToDevice);
        gp_run *run = gp_open("device", 1);
        gp_device_tensor(run, GP_GRADIENT, "x", data, (gp_dtype)dtype, gp_1d((int64_t)count));
        float best = 1e9f, copy = 1e9f, ms;
        for (int round = 0; round < 9; round++) {
            gp__tensor *t = run->tensors[0];
            cudaEventRecord(start);
            run->device->measure(run, t, NULL);
            cudaEventRecord(end);
            run->device->collect(run);
            cudaEventElapsedTime(&ms, start, end);
            if (ms < best) best = ms;
            cudaEventRecord(start);
            cudaMemcpyAsync(other, data, bytes, cudaMemcpyDeviceToDevice);
            cudaEventRecord(end);
            cudaEventSynchronize(end);
            cudaEventElapsedTime(&ms, start, end);
            if (ms < copy) copy = ms;
        }
        gp_stats there = run->tensors[0]->last, here = gp_measure(host, NULL, (gp_dtype)dtype, count);
        int same = there.count == here.count && there.nan == here.nan && there.inf == here.inf &&
                   there.zero == here.zero && there.subnormal == here.subnormal && there.min == here.min &&
                   there.max == here.max &&
                   fabs(there.squares - here.squares) <= 2e-6 * here.squares &&
                   fabs(there.sum - here.sum) <= 2e-6 * sqrt(here.squares * here.count);
        /* a copy reads and writes: its rate is counted in both, a reader's in what it reads */
        printf("%s %g %d %g\n", names[dtype], bytes / best / 1e6, same, 2 * bytes / copy / 1e6);
        gp_close(run);
    }
    return 0;
}
"""


def build_and_run(compiler: list[str], source: str, suffix: str) -> list[list[str]]:
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / f"bench{suffix}"
        file.write_text(source)
        program = str(Path(directory) / "bench")
        subprocess.run([*compiler, f"-I{INCLUDE}", str(file), "-o", program, "-lm"], check=True)
        out = subprocess.run([program], cwd=directory, check=True, capture_output=True, text=True).stdout
    return [line.split() for line in out.splitlines()]


def render_host(flags: str) -> str:
    lines = [
        f"cc {flags}",
        f"{'dtype':10} {'statistics':>12} {'of a change':>12} {'memcpy':>12} {'share of memcpy':>16}",
    ]
    for name, *numbers in build_and_run(["cc", *flags.split()], HOST, ".c"):
        rate, change, copy = map(float, numbers)
        if name == "step":
            lines.append(f"a step that is not measured: {rate:.1f} µs")
        else:
            lines.append(
                f"{name:10} {rate:7.1f} GB/s {change:7.1f} GB/s {copy:7.1f} GB/s {100 * rate / copy:14.0f} %"
            )
    return "\n".join(lines)


def render_device() -> str:
    lines = [f"{'dtype':10} {'statistics':>12} {'copy (r + w)':>13} {'share':>8}  same numbers as the host's"]
    for name, rate, same, copy in build_and_run(["nvcc", "-O3", "-arch=native"], DEVICE, ".cu"):
        read, copied, agree = float(rate), float(copy), "yes" if same == "1" else "NO"
        lines.append(f"{name:10} {read:7.0f} GB/s {copied:8.0f} GB/s {100 * read / copied:6.0f} %  {agree}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", action="store_true", help="on a GPU, with nvcc")
    device = parser.parse_args().device
    if not shutil.which("nvcc" if device else "cc"):
        sys.exit(f"there is no {'nvcc' if device else 'cc'} here")
    if device:
        print(render_device())
    else:
        print("\n\n".join(render_host(flags) for flags in ("-O2", "-O3 -march=native")))


if __name__ == "__main__":
    main()
