"""linear_cross_entropy: pieces, slab rows, overlap; candidates interleaved in rounds, medians."""
import sys, time, statistics
sys.path.insert(0, "src"); sys.path.insert(0, "benchmarks")
import torch
from measure import gpu_ms, forward_backward, extra_memory
from gradproof.kernels import linear_cross_entropy as module, triton_loss, cuda_loss
from gradproof.kernels.loss_options import LossOptions
from peers import linear_peers
T0 = time.monotonic()
def say(*a): print(f"[{time.monotonic() - T0:4.0f}]", *a, flush=True)

def inputs(n, d, v):
    g = torch.Generator("cuda").manual_seed(v)
    h = torch.randn(n, d, generator=g, device="cuda", dtype=torch.bfloat16).requires_grad_()
    w = (torch.randn(v, d, generator=g, device="cuda") * 0.02).bfloat16().requires_grad_()
    return h, w, torch.randint(0, v, (n,), generator=g, device="cuda")

side = torch.cuda.Stream()
def by_slabs(h, w, y, scale, rows, overlap, late_dh, split=1):
    """All gradients of logits kept; the loss of one slab beside the product of the next."""
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

for n, d, v in ((4096, 2304, 256000), (8192, 4096, 128256), (8192, 768, 50257)):
    h, w, y = inputs(n, d, v)
    hd, wd = h.detach(), w.detach()
    scale = torch.tensor(1 / n, dtype=torch.float64, device="cuda")
    peers = linear_peers(h, w, y)
    candidates = {"gradproof": forward_backward(lambda: module.linear_cross_entropy(h, w, y), h, w),
                  "compile": forward_backward(peers["compile"], h, w)}
    if v % 64 == 0:
        logits = torch.empty(n, v, dtype=torch.bfloat16, device="cuda")
        dh, dw = torch.empty_like(hd), torch.empty_like(wd)
        def products():
            torch.mm(hd, wd.mT, out=logits); torch.mm(logits, wd, out=dh); torch.mm(logits.mT, hd, out=dw)
        candidates["three products"] = products
        def first(): torch.mm(hd, wd.mT, out=logits)
        logits.copy_(torch.randn(n, v, device="cuda", dtype=torch.bfloat16) * 1e-4)
        for rows in {256000: (256, 384, 512, 528, 1024), 128256: (512, 640, 768, 1024)}[v]:
            candidates[f"slabs of {rows}"] = lambda rows=rows: by_slabs(hd, wd, y, scale, rows, False, True)
        for rows in {256000: (256, 512), 128256: (512, 1024)}[v]:
            candidates[f"slabs of {rows}, overlapped"] = lambda rows=rows: by_slabs(hd, wd, y, scale, rows, True, True)
            candidates[f"slabs of {rows}, dhidden early"] = lambda rows=rows: by_slabs(hd, wd, y, scale, rows, False, False)
        out = torch.empty(1 << 28, device="cuda")
        for rows in (256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 2048):
            if rows * v > 1 << 28: break
            o = out[: rows * v].view(rows, v)
            ms = gpu_ms(lambda: module.multiply(hd[:rows], wd.mT, out=o), 5)
            say(f"{n},{d},{v} logits float32 rows {rows}: all {n / rows * ms:.3f} ms, {2e-9 * rows * d * v / ms:.0f} TFLOP/s")
        rows = {256000: 512, 128256: 1024}[v]
        o = out[: rows * v].view(rows, v)
        say("logits bf16 all rows", gpu_ms(first, 5), "loss", n / rows * gpu_ms(lambda: triton_loss.losses_and_gradient(o, y[:rows], None, None, LossOptions(), scale, logits[:rows]), 8), "limit", 6 * n * v / 4.27e9,
            "dhidden", gpu_ms(lambda: torch.mm(logits, wd, out=dh), 5), "dweight", gpu_ms(lambda: torch.mm(logits.mT, hd, out=dw), 5))
        del out, o
    times = {c: [] for c in candidates}
    for c in candidates.values(): c(); 
    torch.cuda.synchronize()
    for round_ in range(9):
        for name, c in candidates.items():
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            c()
            a.record(); c(); c(); b.record(); torch.cuda.synchronize()
            times[name].append(a.elapsed_time(b) / 2)
    for name, t in times.items(): say(f"{n},{d},{v} {name}: {statistics.median(t):.3f} ms ({min(t):.3f} .. {max(t):.3f})")
    candidates.clear()
    logits = dh = dw = None
    del hd, wd, peers
    h.grad = w.grad = None
    torch.cuda.empty_cache()
    kept = 2 * (h.numel() + w.numel())
    say("extra GB", extra_memory(forward_backward(lambda: module.linear_cross_entropy(h, w, y), h, w), kept))
    del h, w, y
    torch.cuda.empty_cache()

# an odd vocabulary: padded weight, or rows of logits at an aligned distance
n, d, v, stride = 8192, 768, 50257, 50304
h, w, y = (t.detach() for t in inputs(n, d, v))
padded = torch.nn.functional.pad(w, (0, 0, 0, stride - v))
for rows in (256, 384, 512, 768, 1024):
    x = torch.empty(rows, stride, device="cuda")
    a = gpu_ms(lambda: module.multiply(h[:rows], padded.mT, out=x), 6)
    b = gpu_ms(lambda: module.multiply(h[:rows], w.mT, out=x[:, :v]), 6)
    say(f"odd: logits rows {rows}: all {n / rows * a:.3f} padded, {n / rows * b:.3f} as it is")
for rows in (1920, 2048, 2432, 2560, 3456, 4096):
    dl = torch.randn(rows, stride, device="cuda", dtype=torch.bfloat16) * 1e-3
    dl[:, v:] = 0
    dh = torch.empty(rows, d, device="cuda", dtype=torch.bfloat16)
    a = gpu_ms(lambda: torch.mm(dl, padded, out=dh), 6)
    b = gpu_ms(lambda: torch.mm(dl[:, :v], w, out=dh), 6)
    sp, so = torch.zeros(stride, d, device="cuda"), torch.zeros(v, d, device="cuda")
    c = gpu_ms(lambda: module.multiply(dl.mT, h[:rows], out=sp, add=True), 6)
    e = gpu_ms(lambda: module.multiply(dl[:, :v].mT, h[:rows], out=so, add=True), 6)
    say(f"odd: rows {rows}: dhidden all {n / rows * a:.3f} padded, {n / rows * b:.3f}; dweight all {n / rows * c:.3f} padded, {n / rows * e:.3f}")
real = module.slab_rows
h, w, y = inputs(n, d, v)
for size in (0.3, 0.38, 0.46, 0.6):
    for few in (256, 512, 1024):
        def rows_of(n_, row, size_, in_place, room, keep, size=size, few=few):
            own = module._whole_tiles(int((size * 1e9 - few * row) // (row // 2)))
            return few, own, False
        module.slab_rows = rows_of
        ms = gpu_ms(forward_backward(lambda: module.linear_cross_entropy(h, w, y), h, w), 8, 2)
        say(f"odd: {size} GB, few {few}, own {rows_of(n, 4 * stride, 0, 0, 0, 0)[1]}: {ms:.3f} ms")
module.slab_rows = real
