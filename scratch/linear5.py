"""linear_cross_entropy: its pieces, slab rows, overlap; candidates interleaved in rounds, medians."""
import sys, time, statistics
sys.path.insert(0, "src"); sys.path.insert(0, "benchmarks")
import torch
from measure import gpu_ms, forward_backward, extra_memory
from gradproof.kernels import linear_cross_entropy as module, triton_loss
from gradproof.kernels.loss_options import LossOptions
from peers import linear_peers
T0 = time.monotonic()
budget = float(sys.argv[1])
def left(): return budget - (time.monotonic() - T0)
def say(*a): print(f"[{time.monotonic() - T0:4.1f}]", *a, flush=True)
def inputs(n, d, v):
    g = torch.Generator("cuda").manual_seed(v)
    h = torch.randn(n, d, generator=g, device="cuda", dtype=torch.bfloat16).requires_grad_()
    w = (torch.randn(v, d, generator=g, device="cuda") * 0.02).bfloat16().requires_grad_()
    return h, w, torch.randint(0, v, (n,), generator=g, device="cuda")
side = torch.cuda.Stream()
def by_slabs(h, w, y, scale, rows, overlap, late_dh):
    n, v = len(h), len(w)
    dl = torch.empty(n, v, dtype=torch.bfloat16, device="cuda")
    dh, dw = torch.empty_like(h), torch.empty_like(w)
    slabs = [torch.empty(rows, v, device="cuda") for _ in range(2 if overlap else 1)]
    main = torch.cuda.current_stream()
    free = [None, None]
    for i, start in enumerate(range(0, n, rows)):
        stop = min(start + rows, n)
        x = slabs[i % len(slabs)][: stop - start]
        if overlap and free[i % 2] is not None: main.wait_event(free[i % 2])
        module.multiply(h[start:stop], w.mT, out=x)
        if overlap:
            side.wait_stream(main)
            with torch.cuda.stream(side):
                triton_loss.losses_and_gradient(x, y[start:stop], None, None, LossOptions(), scale, dl[start:stop])
                free[i % 2] = side.record_event()
        else:
            triton_loss.losses_and_gradient(x, y[start:stop], None, None, LossOptions(), scale, dl[start:stop])
            if not late_dh: torch.mm(dl[start:stop], w, out=dh[start:stop])
    if overlap: main.wait_stream(side)
    if late_dh or overlap: torch.mm(dl, w, out=dh)
    torch.mm(dl.mT, h, out=dw)
    return dh, dw
def interleave(name, candidates, rounds):
    times = {c: [] for c in candidates}
    for c in candidates.values(): c()
    torch.cuda.synchronize()
    for _ in range(rounds):
        for label, c in candidates.items():
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            c(); a.record(); c(); c(); b.record(); torch.cuda.synchronize()
            times[label].append(a.elapsed_time(b) / 2)
    for label, t in times.items(): say(f"{name} {label}: {statistics.median(t):.3f} ms ({min(t):.3f} .. {max(t):.3f})")

# an odd vocabulary: how much memory the slabs need
n, d, v, stride = 8192, 768, 50257, 50304
h, w, y = inputs(n, d, v)
real = module.slab_rows
candidates = {"compile": forward_backward(linear_peers(h, w, y)["compile"], h, w), "gradproof": forward_backward(lambda: module.linear_cross_entropy(h, w, y), h, w)}
def with_slabs(size, few):
    def rows_of(n_, row, size_, in_place, room, keep):
        return few, module._whole_tiles(int((size - few * row) // (row // 2))), False
    def step():
        module.slab_rows = rows_of
        try: candidates["gradproof"]()
        finally: module.slab_rows = real
    return step
for size in (0.29e9, 0.38e9, 0.46e9):
    for few in (256, 384, 512): candidates[f"{size / 1e9} GB, {few} rows of logits"] = with_slabs(size, few)
interleave("odd", candidates, 4)
h.grad = w.grad = None
for label, c in list(candidates.items())[1:]:
    h.grad = w.grad = None
    torch.cuda.empty_cache()
    say("extra GB", label, round(extra_memory(c, 2 * (h.numel() + w.numel())), 3))
candidates.clear()
del h, w, y
torch.cuda.empty_cache()

for n, d, v in ((4096, 2304, 256000), (8192, 4096, 128256)):
    h, w, y = inputs(n, d, v)
    hd, wd = h.detach(), w.detach()
    scale = torch.tensor(1 / n, dtype=torch.float64, device="cuda")
    logits = (torch.randn(n, v, device="cuda", dtype=torch.bfloat16) * 1e-4)
    dh, dw = torch.empty_like(hd), torch.empty_like(wd)
    def products():
        torch.mm(hd, wd.mT, out=logits); torch.mm(logits, wd, out=dh); torch.mm(logits.mT, hd, out=dw)
    name = f"{n},{d},{v}"
    out = torch.empty(1 << 28, device="cuda")
    for rows in (256, 384, 512, 640, 768, 1024, 1536, 2048):
        if rows * v > 1 << 28: break
        o = out[: rows * v].view(rows, v)
        ms = gpu_ms(lambda: module.multiply(hd[:rows], wd.mT, out=o), 5)
        b = logits[:rows]
        ms2 = gpu_ms(lambda: torch.mm(hd[:rows], wd.mT, out=b), 5)
        ls = gpu_ms(lambda: triton_loss.losses_and_gradient(o, y[:rows], None, None, LossOptions(), scale, b), 5)
        say(f"{name} rows {rows}: logits float32 all {n / rows * ms:.3f} ms ({2e-9 * rows * d * v / ms:.0f} TFLOP/s), bf16 {n / rows * ms2:.3f}; loss {n / rows * ls:.3f}, limit {6 * n * v / 4.29e9:.3f}")
    logits.normal_(0, 1e-4)
    say(name, "logits bf16 all rows", round(gpu_ms(lambda: torch.mm(hd, wd.mT, out=logits), 4), 3), "dhidden", round(gpu_ms(lambda: torch.mm(logits, wd, out=dh), 4), 3), "dweight", round(gpu_ms(lambda: torch.mm(logits.mT, hd, out=dw), 4), 3))
    del out, o
    few, many = {256000: (256, 512), 128256: (512, 1024)}[v]
    candidates = {"gradproof": forward_backward(lambda: module.linear_cross_entropy(h, w, y), h, w),
                  "three products": products,
                  f"slabs of {few}": lambda: by_slabs(hd, wd, y, scale, few, False, True),
                  f"slabs of {many}": lambda: by_slabs(hd, wd, y, scale, many, False, True),
                  f"slabs of {2 * many}": lambda: by_slabs(hd, wd, y, scale, 2 * many, False, True),
                  f"slabs of {few}, overlapped": lambda: by_slabs(hd, wd, y, scale, few, True, True),
                  f"slabs of {many}, overlapped": lambda: by_slabs(hd, wd, y, scale, many, True, True),
                  f"slabs of {many}, dhidden early": lambda: by_slabs(hd, wd, y, scale, many, False, False)}
    if v == 256000: candidates["compile"] = forward_backward(linear_peers(h, w, y)["compile"], h, w)
    interleave(name, candidates, 4)
    candidates.clear()
    del h, w, y, hd, wd, logits, dh, dw
    torch.cuda.empty_cache()
