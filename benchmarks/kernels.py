"""Speed of the kernels beside their peers: `python benchmarks/kernels.py OUT` writes OUT/kernels.json, .md.

On a GPU: the copy rate; cross_entropy, linear_cross_entropy and tensor_stats, forward and backward, beside
torch eager, torch.compile, Liger, CCE and quack where installed; every way to launch the loss kernel;
that no hot path waits for the device; that a CUDA graph can hold it. On a CPU: ratios to torch.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

import torch
from measure import (
    RESULTS,
    copy_rate,
    cpu_ms,
    extra_memory,
    forward_backward,
    gpu_ms,
    graph_ms,
    in_turns,
    render_table,
    seconds_left,
    section,
)
from peers import ce_peers, linear_peers, separate_operators
from torch import Tensor

from gradproof.kernels.cross_entropy import cross_entropy
from gradproof.kernels.linear_cross_entropy import linear_cross_entropy
from gradproof.kernels.loss_options import LossOptions
from gradproof.kernels.reference import reference_loss_and_gradient
from gradproof.kernels.tensor_stats import COLUMNS, look_closely, tensor_stats

CE_SHAPES = [
    (dtype, n, v)
    for dtype in (torch.bfloat16, torch.float32)
    for n, v in ((8192, 32000), (8192, 50257), (8192, 128256), (4096, 262144))
]
LINEAR_SHAPES = [(8192, 768, 50257), (8192, 4096, 128256), (4096, 2304, 256000)]

# ---- cross-entropy


def ce_inputs(dtype: torch.dtype, n: int, v: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator("cuda").manual_seed(v)
    logits = torch.empty(n, v, dtype=dtype, device="cuda")
    for part in logits.split(1024):
        part.copy_(torch.randn(part.shape, generator=g, device="cuda") * 3)
    targets = torch.randint(0, v, (n,), generator=g, device="cuda")
    targets[::17] = -100
    return logits.requires_grad_(), targets


def launches(dtype: torch.dtype) -> list:
    from gradproof.kernels.triton_loss import Launch

    ways = (
        (4096, 1024, 4, None),
        (8192, 1024, 4, None),
        (8192, 2048, 8, None),
        (16384, 1024, 4, None),
        (16384, 2048, 4, None),
        (16384, 2048, 8, None),
        (16384, 2048, 8, 40),
        (16384, 4096, 8, 64),
        (16384, 4096, 16, 64),
        (32768, 2048, 8, None),
        (32768, 4096, 8, None),
        (32768, 4096, 16, None),
        (32768, 8192, 32, 64),
        (65536, 4096, 16, None),
        (65536, 8192, 32, 64),
        (1 << 20, 2048, 8, None),
        (1 << 20, 4096, 16, None),
        (1 << 20, 8192, 32, 64),
    )
    return [Launch(*way) for way in ways if not RESULTS.get("hangs") or way[0] == 1 << 20]


def launch_name(launch) -> str:
    return f"{launch.slice}/{launch.block}, {launch.warps} warps, {launch.registers} registers"


def one_launch(dtype: torch.dtype, n: int, v: int, launch):
    """The kernel alone at a shape, as a function, and a check of what it computes."""
    from gradproof.kernels import triton_loss

    x, y = ce_inputs(dtype, n, v)
    x = x.detach()
    gradient = torch.full_like(x, torch.nan)
    scale = triton_loss.mean_scale(y, None, None, -100)

    def run():
        return triton_loss.losses_and_gradient(x, y, None, None, LossOptions(), scale, gradient, launch)

    return run, x, y, gradient, scale


def is_right(run, x, y, gradient, scale) -> dict:
    """Worst errors of the kernel over 64 rows; bars 1e-6, 2e-6 (float32), one rounding (bf16)."""
    gradient.fill_(torch.nan)
    losses, _ = run()
    rows = torch.linspace(0, len(x) - 1, 64, device=x.device).long()
    exact, _, dexact = reference_loss_and_gradient(
        x[rows], y[rows], None, None, LossOptions(reduction="none")
    )
    dexact = dexact * scale
    valid = y[rows] != -100
    loss_error = ((losses[rows] - exact).abs() / exact.clamp_min(1e-30))[valid].max().item()
    error = (gradient[rows].double() - dexact).abs() / dexact.abs().amax(1, keepdim=True).clamp_min(1e-300)
    error = torch.where(valid[:, None], error, gradient[rows].double().abs())
    written = not gradient.isnan().any().item()
    return {"loss": loss_error, "gradient": error.max().item(), "every entry written": written}


def sweep(dtype: torch.dtype, n: int, v: int, budget: float) -> dict:
    """Milliseconds of the kernel alone by launch."""
    times: dict = {}
    best = None
    for launch in launches(dtype):
        if seconds_left(budget) < 0:
            break
        name = launch_name(launch)
        try:
            run, x, y, gradient, scale = one_launch(dtype, n, v, launch)
            times[name] = round(gpu_ms(run, 10), 4)
            if best is None or times[name] < times[best[0]]:
                best = (name, is_right(run, x, y, gradient, scale))
            del run, x, y, gradient
        except Exception as error:
            times[name] = f"{type(error).__name__}: {error}"[:300]
    return {"ms": times, "best": best}


def in_place_ms(x: Tensor, y: Tensor) -> float:
    leaf = x.detach().clone().requires_grad_()

    def step():
        leaf.grad = None
        cross_entropy(leaf, y, in_place=True).backward()

    return gpu_ms(step)


def ce_table(dtype: torch.dtype, n: int, v: int) -> dict:
    x, y = ce_inputs(dtype, n, v)
    limit = 2 * x.numel() * x.element_size() / RESULTS["copy rate"]["GB/s"] / 1e6
    losses = {"gradproof": lambda: cross_entropy(x, y), **ce_peers(x, y)}
    ways = {name: forward_backward(loss, x) for name, loss in losses.items()}
    liger = ways.pop("liger", None)  # it overwrites its input, and so comes last
    row = {"limit": limit, **in_turns(ways)}
    row["gradproof in place"] = in_place_ms(x, y)
    row["gradproof in a graph"] = graph_ms(forward_backward(lambda: cross_entropy(x, y), x))
    if liger:
        row |= in_turns({"liger": liger})
    row["share of copy rate"] = limit / row["gradproof"]
    row["share of copy rate in a graph"] = limit / row["gradproof in a graph"]
    peers = [row[p] for p in ("eager", "compile", "liger") if isinstance(row.get(p), float)]
    if peers:
        row["times the fastest peer"] = min(peers) / row["gradproof"]
    return row


# ---- linear + cross-entropy


def linear_inputs(n: int, d: int, v: int):
    g = torch.Generator("cuda").manual_seed(v)
    hidden = torch.randn(n, d, generator=g, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = (torch.randn(v, d, generator=g, device="cuda") * 0.02).bfloat16().requires_grad_()
    return hidden, weight, torch.randint(0, v, (n,), generator=g, device="cuda")


def three_products(hidden: Tensor, weight: Tensor):
    """The three cuBLAS products of a linear layer's forward and backward in bf16; an odd vocabulary is padded."""
    from gradproof.kernels.linear_cross_entropy import _padded

    h, w = hidden.detach(), _padded(weight.detach())
    logits = torch.empty(len(h), len(w), dtype=torch.bfloat16, device="cuda")
    dh, dw = torch.empty_like(h), torch.empty_like(w)

    def products():
        torch.mm(h, w.mT, out=logits)
        torch.mm(logits, w, out=dh)
        torch.mm(logits.mT, h, out=dw)

    return products


def linear_table(n: int, d: int, v: int) -> dict:
    h, w, y = linear_inputs(n, d, v)
    kept = 2 * (h.numel() + w.numel())
    losses = {
        "gradproof": lambda: linear_cross_entropy(h, w, y),
        "gradproof, least memory": lambda: linear_cross_entropy(h, w, y, least_memory=True),
        **linear_peers(h, w, y),
    }
    ways = {name: forward_backward(loss, h, w) for name, loss in losses.items()}
    row = in_turns({"three products": three_products(h, w), **ways}, 8, 4)
    for name, step in ways.items():
        h.grad = w.grad = None
        torch.cuda.empty_cache()
        if isinstance(row[name], float):
            row[name + " extra GB"] = extra_memory(step, kept)
    h.grad = w.grad = None
    return row


def linear_pieces(n: int, d: int, v: int) -> dict:
    """Milliseconds of the pieces of linear_cross_entropy, all rows, each alone."""
    from gradproof.kernels import linear_cross_entropy as module
    from gradproof.kernels import triton_loss
    from gradproof.kernels.product import multiply

    h, w, y = linear_inputs(n, d, v)
    w = module._padded(w.detach())
    h, stride = h.detach(), len(w)
    slabs = module.slabs_of_16_bits(n, 4 * stride, module.SLAB_BYTES, v * d // stride, 2 * d, 4 * stride * d)
    rows, many = slabs.rows, slabs.gradient_rows
    logits = torch.empty(rows, stride, device="cuda")
    dlogits = torch.randn(many, stride, device="cuda", dtype=torch.bfloat16)
    sum_dw = torch.zeros(stride, d, device="cuda", dtype=torch.bfloat16 if many == n else torch.float32)
    dh = torch.empty(many, d, device="cuda", dtype=torch.bfloat16)
    scale = triton_loss.mean_scale(y, None, None, -100)

    def loss():
        return triton_loss.losses_and_gradient(
            logits[:, :v], y[:rows], None, None, LossOptions(), scale, dlogits[:rows, :v]
        )

    return {
        "rows": [rows, many],
        "logits, float32": n / rows * gpu_ms(lambda: multiply(h[:rows], w.mT, out=logits)),
        "loss": n / rows * graph_ms(loss),
        "dhidden": n / many * gpu_ms(lambda: torch.mm(dlogits, w, out=dh)),
        "dweight": n / many * gpu_ms(lambda: multiply(dlogits.mT, h[:many], out=sum_dw, add=many < n)),
        "dweight to bf16": 0.0 if many == n else gpu_ms(lambda: sum_dw.bfloat16()),
    }


# ---- statistics


def gpt2_shapes() -> list[tuple[int, ...]]:
    d = 768
    block = [
        (d,),
        (d,),
        (3 * d, d),
        (3 * d,),
        (d, d),
        (d,),
        (d,),
        (d,),
        (4 * d, d),
        (4 * d,),
        (d, 4 * d),
        (d,),
    ]
    return [(50257, d), (1024, d), *12 * block, (d,), (d,)]


def stats_table(device: str, launches: bool = False) -> dict:
    g = torch.Generator(device).manual_seed(0)
    measure = gpu_ms if device == "cuda" else cpu_ms
    out = {}
    for name, dtype, make in (
        ("float32", torch.float32, lambda s: torch.randn(s, generator=g, device=device) * 1e-3),
        ("float32, half zeros", torch.float32, lambda s: torch.randn(s, generator=g, device=device).relu()),
        ("bfloat16", torch.bfloat16, lambda s: torch.randn(s, generator=g, device=device)),
    ):
        tensors = [make(shape).to(dtype) for shape in gpt2_shapes()]
        read = sum(x.numel() * x.element_size() for x in tensors)
        row = {"gradproof": measure(lambda t=tensors: tensor_stats(t))}
        row["separate operators"] = measure(lambda t=tensors: separate_operators(t), 2)
        row["times faster"] = row["separate operators"] / row["gradproof"]
        row["_foreach_norm"] = measure(lambda t=tensors: torch._foreach_norm(t))
        if device == "cuda":
            row["limit"] = read / RESULTS["copy rate"]["GB/s"] / 1e6
            row["share of copy rate"] = row["limit"] / row["gradproof"]
            row["gradproof in a graph"] = graph_ms(lambda t=tensors: tensor_stats(t))
            row["share of copy rate in a graph"] = row["limit"] / row["gradproof in a graph"]
            if launches:
                row.update(stats_sweep(tensors))
        found, exact = tensor_stats(tensors), torch.cat([look_closely(x.reshape(1, -1)) for x in tensors])
        error = (found - exact).abs() / exact.abs().clamp_min(1e-300)
        worst = {c: e for c, e in zip(COLUMNS, error.amax(0).tolist(), strict=True) if e}
        out[name] = {**row, "worst relative errors": worst}
    return out


def stats_sweep(tensors: list[Tensor]) -> dict:
    from gradproof.kernels.triton_stats import stats_on_gpu

    flat = [x.reshape(-1) for x in tensors]
    ways = ((8192, 1024, 8), (16384, 1024, 8), (16384, 512, 4), (16384, 1024, 4), (16384, 2048, 8))
    ways += ((32768, 1024, 8), (32768, 2048, 8), (32768, 2048, 16), (65536, 1024, 8), (65536, 2048, 16))
    return {
        f"chunk {c}, block {b}, {w} warps": graph_ms(lambda c=c, b=b, w=w: stats_on_gpu(flat, None, c, b, w))
        for c, b, w in ways
    }


# ---- waiting, graphs, hangs, tests


def no_waiting() -> dict:
    """Every hot path under torch's own check that nothing synchronises."""
    x, y = ce_inputs(torch.bfloat16, 64, 50257)
    h, w, t = linear_inputs(256, 64, 5003)
    tensors = [torch.randn(s, device="cuda") for s in ((1000, 7), (3,), (4096,))]

    def everything():
        x.grad = None
        (2 * cross_entropy(x, y)).backward()
        linear_cross_entropy(h, w, t).backward()
        tensor_stats(tensors)

    everything()
    from gradproof.kernels import triton_stats

    triton_stats._on_device.cache_clear()  # as with gradients that lie elsewhere in each step
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        everything()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return {"waits": False}


def in_a_graph() -> dict:
    """A captured step gives the same loss, gradient and statistics when it is replayed on new logits."""
    x, y = ce_inputs(torch.bfloat16, 64, 50257)
    tensors = [torch.randn(s, device="cuda") for s in ((1000, 7), (3,), (4096,))]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            x.grad = None
            cross_entropy(x, y).backward()
            tensor_stats(tensors)
    torch.cuda.current_stream().wait_stream(side)
    x.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = cross_entropy(x, y)
        loss.backward()
        stats = tensor_stats(tensors)
    with torch.no_grad():
        x.copy_(x.flip(0))
    graph.replay()
    torch.cuda.synchronize()
    captured = loss.clone(), x.grad.clone(), stats.clone()
    x.grad = None
    again = cross_entropy(x, y)
    again.backward()
    same = torch.equal(captured[0], again) and torch.equal(captured[1], x.grad)
    return {"same": same and torch.equal(captured[2], tensor_stats(tensors))}


def repeats() -> dict:
    """Ten runs agree bit for bit: a race in the exchange between slices would not."""
    x, y = ce_inputs(torch.float32, 512, 128256)
    seen = []
    for _ in range(10):
        x.grad = None
        loss = cross_entropy(x, y)
        loss.backward()
        seen.append((loss.item(), x.grad.double().sum().item(), x.grad.view(torch.int32).sum().item()))
    return {"same": len(set(seen)) == 1}


def warm(share: int, of: int) -> None:
    """Compile every launch once, a share of them in this process, so that the cache on disk is full."""
    jobs = [(d, n, v, la) for d, n, v in CE_SHAPES if v in (50257, 128256) for la in launches(d)]
    for dtype, _, v, launch in jobs[share::of]:
        try:
            one_launch(dtype, 48, v, launch)[0]()
            torch.cuda.synchronize()
        except Exception as error:
            print(f"warm {dtype} {v} {launch_name(launch)}: {type(error).__name__}: {error}"[:500])


def warm_in_parallel() -> dict:
    """In other processes, so that a kernel that never ends costs a minute and not the run."""
    workers = min(12, os.cpu_count() or 1)
    command = [sys.executable, __file__, "-", "--warm"]
    running = [
        subprocess.Popen(
            [*command, f"{i}/{workers}"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for i in range(workers)
    ]
    deadline = time.monotonic() + 150
    said, hung = [], 0
    for process in running:
        try:
            said.append(process.communicate(timeout=max(1, deadline - time.monotonic()))[0][-1500:])
        except subprocess.TimeoutExpired:
            process.kill()
            hung += 1
            said.append((process.communicate()[0] or "")[-1500:])
    if hung:  # measure what is left
        from gradproof.kernels import triton_loss

        RESULTS["hangs"] = hung
        triton_loss.choose_launch = lambda *_: triton_loss.Launch(1 << 20, 4096, 16, 64)
    return {"hung": hung, "said": [s for s in said if s]}


def gpu_tests(budget: float) -> dict:
    names = ("cuda_loss", "tensor_stats", "operators", "cross_entropy", "linear_cross_entropy")
    tests = [f"tests/test_{name}.py" for name in names]
    root = Path(__file__).parent.parent
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--maxfail=8",
        "--no-header",
        "-p",
        "no:cacheprovider",
        *tests,
    ]
    try:
        done = subprocess.run(
            command, cwd=root, capture_output=True, text=True, timeout=max(10, seconds_left(budget)),
            env={**os.environ, "PYTHONPATH": str(root / "src"), "TRITON_INTERPRET": "0"},
        )  # fmt: skip
    except subprocess.TimeoutExpired as late:
        return {"timeout": True, "tail": (late.stdout or b"")[-1500:].decode()}
    return {"rc": done.returncode, "tail": (done.stdout + done.stderr)[-9000:]}


# ---- CPU


def cpu_cross_entropy(n: int = 1024, v: int = 50257) -> dict:
    x = torch.randn(n, v, generator=torch.Generator().manual_seed(0)) * 3
    y = torch.randint(0, v, (n,))
    leaf = x.clone().requires_grad_()
    eager = forward_backward(lambda: torch.nn.functional.cross_entropy(leaf, y), leaf)
    plain = forward_backward(lambda: cross_entropy(leaf, y), leaf)
    copies, used = [x.clone() for _ in range(4)], []

    def in_place():
        used.append(copies.pop().requires_grad_())  # kept: to free the logits is no part of it
        cross_entropy(used[-1], y, in_place=True).backward()

    row = {
        "eager": cpu_ms(eager, 3),
        "gradproof": cpu_ms(plain, 3),
        "gradproof in place": cpu_ms(in_place, 3),
    }
    row["times faster"] = row["eager"] / row["gradproof"]
    row["times faster in place"] = row["eager"] / row["gradproof in place"]
    return row


def on_gpu(budget: float, launches: bool) -> None:
    section("copy rate", copy_rate)
    if launches:
        section("warm", warm_in_parallel)
        for dtype, n, v in CE_SHAPES:
            name = f"{str(dtype).removeprefix('torch.')} {n}x{v}"
            section(f"launches {name}", sweep, dtype, n, v, budget)
    section("waiting", no_waiting)
    section("graph", in_a_graph)
    section("repeats", repeats)
    section("tensor_stats GPT-2 124M", stats_table, "cuda", launches)
    for shape in LINEAR_SHAPES:
        if seconds_left(budget) > 30:
            section(f"linear_cross_entropy {'x'.join(map(str, shape))}", linear_table, *shape)
    for shape in LINEAR_SHAPES if launches else ():
        section(f"pieces of {'x'.join(map(str, shape))}", linear_pieces, *shape)
    for dtype, n, v in CE_SHAPES:
        name = f"{str(dtype).removeprefix('torch.')} {n}x{v}"
        if seconds_left(budget) > 20:
            section(f"cross_entropy {name}", ce_table, dtype, n, v)
    if seconds_left(budget) > 20:
        section("tests", gpu_tests, budget)


def on_cpu() -> None:
    torch.set_num_threads(1)
    section("cross_entropy CPU float32 1024x50257", cpu_cross_entropy)
    section("tensor_stats CPU GPT-2 124M", stats_table, "cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="directory for kernels.json and kernels.md")
    parser.add_argument(
        "--seconds", type=float, default=460, help="leave out what does not fit into this time"
    )
    parser.add_argument(
        "--launches",
        action="store_true",
        help="time every way to launch the Triton kernels, and the pieces of linear_cross_entropy",
    )
    parser.add_argument("--warm", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.warm:
        share, of = map(int, args.warm.split("/"))
        warm(share, of)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    gpu = torch.cuda.is_available()
    machine = torch.cuda.get_device_name() if gpu else platform.processor() or platform.machine()
    RESULTS.update(out=str(args.out), machine=f"{machine}, torch {torch.__version__}")
    on_gpu(args.seconds, args.launches) if gpu else on_cpu()
    (args.out / "kernels.md").write_text(render_table())
    print(render_table())


if __name__ == "__main__":
    main()
