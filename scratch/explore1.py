"""What limits the CUDA cross-entropy at long rows; GEMM rates of slabs."""
import sys, json, time, os, statistics
sys.path.insert(0, "src"); sys.path.insert(0, "benchmarks")
import torch
from pathlib import Path
from measure import gpu_ms, copy_rate
from gradproof.kernels import cuda_loss, triton_loss
from gradproof.kernels.loss_options import LossOptions
from gradproof.kernels.cuda_loss import Plan
OUT = os.environ.get("OUT", "/tmp")
T0 = time.monotonic()
SOURCE = Path("src/gradproof/kernels/cross_entropy.cu").read_text()
rate = copy_rate()["GB/s"]
print("copy rate", rate, flush=True)
real_read = Path.read_text
PATCH = {"source": SOURCE}
Path.read_text = lambda self, *a, **k: PATCH["source"] if self.name == "cross_entropy.cu" else real_read(self, *a, **k)

def patched(**kw):
    s = SOURCE
    for old, new in kw.values():
        assert s.count(old) >= 1, old
        s = s.replace(old, new)
    return s

VARIANTS = {
    "as it is": SOURCE,
    "no exchange": patched(a=("        cluster_barrier();\n        Sum all", "        __syncthreads();\n        Sum all")),
    "no stores": patched(a=("store_piece(here, x[j], gradient_of.flip);", "{ float q = 0; for (int i = 0; i < ENTRIES; i++) q += x[j][i]; if (q == 12345.678f) store_piece(here, x[j], gradient_of.flip); }")),
    "no exponentials in the sum": patched(a=("x[j][i] = exp_below(x[j][i] - below);", "x[j][i] = x[j][i] - below;")),
    "no exponentials in the gradient": patched(a=("x[j][i] = gradient_of(x[j][i]);", "x[j][i] = x[j][i] * gradient_of.times;")),
    "no exponentials": patched(a=("x[j][i] = exp_below(x[j][i] - below);", "x[j][i] = x[j][i] - below;"), b=("x[j][i] = gradient_of(x[j][i]);", "x[j][i] = x[j][i] * gradient_of.times;")),
    "no loads": patched(a=("if (piece < it.pieces) {", "if (piece < it.pieces && it.lead == 77) {")),
}

def inputs(dtype, n, v):
    g = torch.Generator("cuda").manual_seed(v)
    x = torch.empty(n, v, dtype=dtype, device="cuda")
    for part in x.split(1024):
        part.copy_(torch.randn(part.shape, generator=g, device="cuda") * 3)
    y = torch.randint(0, v, (n,), generator=g, device="cuda"); y[::17] = -100
    return x, y

def share(x, y, grad, scale, plan, reps=12):
    run = lambda: cuda_loss.losses_and_gradient(x, y, None, LossOptions(), scale, grad, plan)
    ms = gpu_ms(run, reps)
    return 2 * x.numel() * x.element_size() / rate / 1e6 / ms

results = {}
scale = torch.tensor(1e-3, dtype=torch.float64, device="cuda")
for dtype in (torch.bfloat16, torch.float32):
    name = str(dtype)[6:]
    x, y = inputs(dtype, 4096, 262144)
    grad = torch.empty_like(x)
    base = cuda_loss.plan_row(262144, x.element_size(), True)
    for label, source in VARIANTS.items():
        PATCH["source"] = source; cuda_loss._compiled.cache_clear()
        results[name, label] = share(x, y, grad, scale, base)
        print(f"{name} {label}: {results[name, label]:.3f}", flush=True)
    PATCH["source"] = SOURCE; cuda_loss._compiled.cache_clear()
    total = 262144 * x.element_size() // 16
    rows = []
    for cluster in (4, 5, 6, 7, 8, 9, 10, 12, 14, 16):
        for pieces in (4, 8, 12, 16, 20, 24, 28, 32):
            threads = -(-total // (32 * cluster * pieces)) * 32
            plan = Plan(cluster, threads, pieces, 4)
            waste = cluster * plan.threads * pieces / total
            if threads > 1024 or threads < 64 or waste > 1.14 or plan.shared_bytes > 220 * 1024: continue
            for many in (4, 1000):
                try:
                    s = share(x, y, grad, scale, Plan(cluster, threads, pieces, many), 8)
                    rows.append((round(s, 3), cluster, threads, pieces, many, plan.shared_bytes >> 10))
                except Exception as e:
                    rows.append((0, cluster, threads, pieces, many, str(e)[:60]))
    for r in sorted(rows, key=lambda r: -r[0])[:22]: print(name, r, flush=True)
    for many in (1, 2, 3, 4, 6, 8, 16):
        s = share(x, y, grad, scale, Plan(base.cluster, base.threads, base.pieces, many))
        print(name, "rows of a cluster", many, round(s, 3), flush=True)
    flat = x.view(-1); gflat = grad.view(-1)
    for v in (262144 - 64, 262144 - 2048, 256000, 131072, 131072 - 64, 128256, 65536):
        n = 4096 * 262144 // v // 8 * 8
        xs, gs = flat[: n * v].view(n, v), gflat[: n * v].view(n, v)
        ys = torch.randint(0, v, (n,), device="cuda")
        plan = cuda_loss.plan_row(v, x.element_size(), True)
        print(name, "v", v, plan, round(share(xs, ys, gs, scale, plan), 3), flush=True)
    del x, y, grad, flat, gflat, xs, gs
    torch.cuda.empty_cache()
print("seconds", time.monotonic() - T0, flush=True)

# products of slabs
from gradproof.kernels import linear_cross_entropy as module
for n, d, v in ((8192, 768, 50304), (8192, 4096, 128256), (4096, 2304, 256000)):
    h = torch.randn(n, d, device="cuda").bfloat16(); w = (torch.randn(v, d, device="cuda") * 0.02).bfloat16()
    logits = torch.empty(1 << 28, device="cuda"); dl = (torch.randn(n, v, device="cuda", dtype=torch.bfloat16) * 1e-3)
    for rows in (256, 384, 512, 640, 768, 896, 1024, 1152, 1280, 1536, 2048):
        if rows * v > 1 << 28: break
        out = logits[: rows * v].view(rows, v)
        ms = gpu_ms(lambda: module.multiply(h[:rows], w.mT, out=out), 8)
        print(f"{n},{d},{v} logits rows {rows}: all {n / rows * ms:.3f} ms, {2e-9 * rows * d * v / ms:.0f} TFLOP/s", flush=True)
    dh = torch.empty_like(h)
    for rows in (512, 1024, 2048, 4096, 8192):
        if rows > n: break
        ms = gpu_ms(lambda: torch.mm(dl[:rows], w, out=dh[:rows]), 8)
        print(f"  dhidden rows {rows}: all {n / rows * ms:.3f}", flush=True)
        for kind in (torch.float32, torch.bfloat16):
            dw = torch.zeros(v, d, device="cuda", dtype=kind)
            ms = gpu_ms(lambda: module.multiply(dl[:rows].mT, h[:rows], out=dw, add=kind == torch.float32), 8)
            print(f"  dweight {kind} rows {rows}: all {n / rows * ms:.3f}", flush=True)
            del dw
    # transposed logits product: weight @ hidden.T
    rows = {50304: 1024, 128256: 1024, 256000: 512}[v]
    del logits, dl, dh
    torch.cuda.empty_cache()
print("seconds", time.monotonic() - T0)
