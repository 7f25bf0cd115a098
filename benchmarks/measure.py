"""What the benchmarks share: timing, results that are written down as they come, and the table of them."""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
import traceback
from pathlib import Path

import torch
from torch import Tensor

RESULTS: dict = {}
START = time.monotonic()


def seconds_left(budget: float) -> float:
    return budget - (time.monotonic() - START)


def section(name: str, function, *args):
    """Run one part; keep its result or its error, and write everything down."""
    begin = time.monotonic()
    try:
        result = function(*args)
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {error}"[:2000], "where": traceback.format_exc()[-1500:]}
        torch.cuda.empty_cache() if torch.cuda.is_available() else None
    RESULTS[name] = result
    took = time.monotonic() - begin
    said = json.dumps(result)[: 9500 if name == "tests" else 1800]
    print(f"[{time.monotonic() - START:5.0f} s, {took:4.0f}] {name}: {said}")
    sys.stdout.flush()
    if "out" in RESULTS:
        Path(RESULTS["out"], "kernels.json").write_text(json.dumps(RESULTS, indent=1))
    return result


def gpu_ms(function, repetitions: int = 10, warm: int = 3) -> float:
    """Median milliseconds of the GPU between two events around the call, launched ahead, as in training."""
    for _ in range(warm):
        function()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    function()
    host = time.perf_counter() - begin
    torch.cuda.synchronize()
    torch.cuda._sleep(int(2e9 * min(host * repetitions * 1.5, 0.2)))  # cycles, so that the host gets ahead
    times = []
    for _ in range(repetitions):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        function()
        end.record()
        times.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(b.elapsed_time(e) for b, e in times)


def in_turns(ways: dict, rounds: int = 6, repetitions: int = 6) -> dict:
    """Median milliseconds of each way. They are taken in turns, shuffled, and each runs for a third of a second before
    it is timed: matrix products heat a GPU up, and what comes after them is slower for a while."""
    times: dict = {name: [] for name in ways}
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(ways), len(ways)):
            try:
                once = gpu_ms(ways[name], 1, 2)
                times[name].append(gpu_ms(ways[name], repetitions, min(100, int(300 / once))))
            except Exception as error:
                del ways[name]
                times[name] = f"{type(error).__name__}: {error}"[:200]
    return {name: t if isinstance(t, str) else statistics.median(t) for name, t in times.items()}


def graph_ms(step, repetitions: int = 10) -> float:
    """Median milliseconds of a step replayed from a CUDA graph: the GPU's own time, without launches."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return gpu_ms(graph.replay, repetitions)


def cpu_ms(function, repetitions: int = 5) -> float:
    """Least milliseconds of CPU time."""
    function()
    times = []
    for _ in range(repetitions):
        begin = time.process_time()
        function()
        times.append(time.process_time() - begin)
    return 1e3 * min(times)


def copy_rate() -> dict:
    """GB/s, bytes read plus bytes written, of a copy of 4 GiB."""
    x = torch.empty(1 << 30, dtype=torch.float32, device="cuda")
    y = torch.empty_like(x)
    ms = gpu_ms(lambda: y.copy_(x), 20)
    return {"GB/s": 2 * x.numel() * 4 / ms / 1e6}


def forward_backward(loss, x: Tensor, *others):
    def step():
        x.grad = None
        for other in others:
            if isinstance(other, Tensor):
                other.grad = None
        loss().backward()

    return step


def extra_memory(step, kept: int) -> float:
    """GB at the peak of a step beyond what was there before and the gradients that stay."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before - kept) / 1e9


def render_table() -> str:
    """Everything measured, as markdown."""
    lines = [f"# Kernels on {RESULTS['machine']}", ""]
    rate = RESULTS.get("copy rate", {}).get("GB/s")
    if rate:
        lines += [
            f"Copy rate {rate:.0f} GB/s, bytes read plus written. Milliseconds, forward + backward.",
            "",
        ]
    for group in ("cross_entropy", "linear_cross_entropy", "tensor_stats"):
        found = {k: v for k, v in RESULTS.items() if k.startswith(group + " ")}
        flat = {}
        for key, value in found.items():
            rows = value if all(isinstance(v, dict) for v in value.values()) else {"": value}
            for name, row in rows.items():
                flat[f"{key} {name}".strip()] = {k: v for k, v in row.items() if isinstance(v, (int, float))}
        if not flat:
            continue
        columns = list(dict.fromkeys(c for row in flat.values() for c in row))
        lines += [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
        for name, row in flat.items():
            cells = (f"{row[c]:.3g}" if c in row else "" for c in columns)
            lines.append(f"| {name} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)
