"""Plans of the CUDA cross-entropy at the eight shapes; ablations; products and slabs of linear_cross_entropy."""
import sys, json, time, os, statistics
sys.path.insert(0, "src"); sys.path.insert(0, "benchmarks")
import torch
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from measure import gpu_ms, copy_rate, forward_backward
from gradproof.kernels import cuda_loss, cuda_driver, triton_loss
from gradproof.kernels.cross_entropy import cross_entropy
from gradproof.kernels.loss_options import LossOptions
from gradproof.kernels.reference import reference_loss_and_gradient
from gradproof.kernels.cuda_loss import Plan
T0 = time.monotonic()
BUDGET = float(sys.argv[1]) if len(sys.argv) > 1 else 230
def left(): return BUDGET - (time.monotonic() - T0)
def say(*a): print(f"[{time.monotonic() - T0:4.0f}]", *a, flush=True)
SOURCE = Path("src/gradproof/kernels/cross_entropy.cu").read_text()
PATCH = {"source": SOURCE}
real_read = Path.read_text
Path.read_text = lambda self, *a, **k: PATCH["source"] if self.name == "cross_entropy.cu" else real_read(self, *a, **k)
rate = copy_rate()["GB/s"]
say("copy rate", round(rate))
real_plan = cuda_loss.plan_row
pool = ThreadPoolExecutor(12, initializer=lambda: torch.zeros(1, device="cuda"))

def inputs(dtype, n, v):
    g = torch.Generator("cuda").manual_seed(v)
    x = torch.empty(n, v, dtype=dtype, device="cuda")
    for part in x.split(1024):
        part.copy_(torch.randn(part.shape, generator=g, device="cuda") * 3)
    y = torch.randint(0, v, (n,), generator=g, device="cuda"); y[::17] = -100
    return x.requires_grad_(), y

def compile_all(plans, x, y, grad):
    def one(p):
        try: cuda_loss._loss_kernel(p, x, y, None, grad, None)
        except Exception as e: return f"{p}: {e}"[:200]
    for e in pool.map(one, plans):
        if e: say(e)

def whole(plan, x, y, reps=8):
    cuda_loss.plan_row = lambda *a: plan
    try:
        return limit(x) / gpu_ms(forward_backward(lambda: cross_entropy(x, y), x), reps, 2)
    finally:
        cuda_loss.plan_row = real_plan

def limit(x): return 2 * x.numel() * x.element_size() / rate / 1e6

def right(x, y):
    x.grad = None
    loss = cross_entropy(x, y); loss.backward()
    rows = torch.linspace(0, len(x) - 1, 48, device="cuda").long()
    exact, _, dexact = reference_loss_and_gradient(x.detach()[rows], y[rows], None, None, LossOptions(reduction="none"))
    scale = 1 / (y != -100).sum().double()
    dexact = dexact * scale
    error = ((x.grad[rows].double() - dexact).abs().amax(1) / dexact.abs().amax(1).clamp_min(1e-300))[y[rows] != -100].max().item()
    ref = torch.nn.functional.cross_entropy(x.detach()[:].float() if x.dtype == torch.float32 else x.detach().float(), y) if x.numel() < 5e8 else None
    return {"gradient": error, "loss": loss.item(), "torch": None if ref is None else ref.item(), "nan": bool(x.grad.isnan().any())}

SHAPES = [(d, n, v) for d in (torch.bfloat16, torch.float32) for n, v in ((8192, 32000), (8192, 50257), (8192, 128256), (4096, 262144))]
best_of = {}
for dtype, n, v in sorted(SHAPES, key=lambda s: -s[2]):
    if left() < 40: say("out of time"); break
    name = f"{str(dtype)[6:]} {v}"
    x, y = inputs(dtype, n, v)
    grad = torch.empty_like(x.detach())
    size = x.element_size(); aligned = v % (16 // size) == 0
    total = -(-v * size // 16) + (not aligned)
    base = real_plan(v, size, aligned)
    say(name, "base", base, base.ctas, "right", right(x, y))
    plans = [base]
    clusters = {262144: (6, 7, 8, 9, 10, 12, 14, 16), 128256: (2, 3, 4, 5, 6, 7, 8, 12), 50257: (1, 2, 3, 4), 32000: (1, 2, 3)}[v]
    for cluster in clusters:
        for pieces in (8, 12, 16, 20, 24):
            threads = -(-total // (32 * cluster * pieces)) * 32
            plan = Plan(cluster, threads, pieces)
            if threads > 768 or threads < 64 or cluster * threads * pieces / total > 1.13 or plan.shared_bytes > 220 << 10: continue
            if plan.ctas * plan.shared_bytes < 120 << 10: continue
            if plan not in plans: plans.append(plan)
    compile_all(plans, x, y, grad)
    rows = []
    for plan in plans:
        try: rows.append((round(whole(plan, x, y), 3), plan))
        except Exception as e: say("failed", plan, str(e)[:150])
    rows.sort(key=lambda r: -r[0])
    for s, p in rows[:7]: say(name, s, p.cluster, p.threads, p.pieces, "ctas", p.ctas, "rows", p.rows, "held", p.held)
    second = [Plan(p.cluster, p.threads, p.pieces, r, h) for _, p in rows[:2] for r in (0, 1, 2, 4) for h in (0, 1, 2) if (r, h) != (0, 1)]
    compile_all(second, x, y, grad)
    for plan in second:
        try: rows.append((round(whole(plan, x, y), 3), plan))
        except Exception as e: say("failed", plan, str(e)[:150])
    rows.sort(key=lambda r: -r[0])
    say(name, "---- best")
    for s, p in rows[:8]: say(name, s, p.cluster, p.threads, p.pieces, "ctas", p.ctas, "rows", p.rows, "held", p.held)
    best = rows[0][1]
    one = torch.tensor(1e-3, dtype=torch.float64, device="cuda")
    xd = x.detach()
    alone = gpu_ms(lambda: cuda_loss.losses_and_gradient(xd, y, None, LossOptions(), one, grad, best), 10)
    say(name, "best alone (static)", round(limit(x) / alone, 3), "base whole", round(whole(base, x, y, 12), 3), "best again", round(whole(best, x, y, 12), 3))
    best_of[name] = (rows[0][0], best)
    say(name, "clusters at once", cuda_loss._at_once(cuda_loss._loss_kernel(best, x, y, None, grad, None), best, x.device), "estimate", best.ctas * 132 // best.cluster)
    if v == 262144:
        def patched(*pairs):
            s = SOURCE
            for old, new in pairs:
                assert old in s, old
                s = s.replace(old, new)
            return s
        cut = {
            "no exchange": patched(("        cluster_barrier();\n        if (number < clusters)", "        __syncthreads();\n        if (number < clusters)")),
            "no stores": patched(("store_piece(here, x[j], gradient_of.flip);", "{ float q = 0; for (int i = 0; i < ENTRIES; i++) q += x[j][i]; if (q == 12345.678f) store_piece(here, x[j], gradient_of.flip); }")),
            "no exponentials": patched(("x[j][i] = exp_below(x[j][i] - below);", "x[j][i] = x[j][i] - below;"), ("x[j][i] = gradient_of(x[j][i]);", "x[j][i] = x[j][i] * gradient_of.times;")),
            "no loads": patched(("if (piece < it.whole + (it.rest() > 0)) {", "if (piece < it.whole + (it.rest() > 0) && a.rows == 77) {")),
        }
        for label, source in cut.items():
            PATCH["source"] = source; cuda_loss._compiled.cache_clear(); cuda_driver.find_kernel.cache_clear()
            say(name, label, round(whole(best, x, y), 3))
        PATCH["source"] = SOURCE; cuda_loss._compiled.cache_clear(); cuda_driver.find_kernel.cache_clear()
    if v == 32000:
        torch.cuda.synchronize()
        step = forward_backward(lambda: cross_entropy(x, y), x)
        t = time.perf_counter()
        for _ in range(20): step()
        host = (time.perf_counter() - t) / 20
        torch.cuda.synchronize()
        small = x.detach()[:8].clone().requires_grad_(); ys = y[:8]
        step = forward_backward(lambda: cross_entropy(small, ys), small)
        for _ in range(5): step()
        torch.cuda.synchronize(); t = time.perf_counter()
        for _ in range(200): step()
        say("host us of forward + backward", 1e6 * (time.perf_counter() - t) / 200, "large", 1e6 * host)
        import cProfile, pstats
        pr = cProfile.Profile(); pr.enable()
        for _ in range(200): step()
        pr.disable(); pstats.Stats(pr).sort_stats("tottime").print_stats(14)
    del x, y, grad, xd
    torch.cuda.empty_cache()
say("plans done")
for name, b in best_of.items(): say("BEST", name, b)
