"""Training steps side by side: the explicit model against autograd on a CPU; fused loss and watching on a GPU.

    python benchmarks/train.py            whichever of the two this machine can do (a GPU run takes under 4 minutes)
    python benchmarks/train.py --cpu      the CPU part on a machine that has a GPU

On a CPU both models take whole steps (forward, backward, clip, AdamW) in turn, in one process, timed by CPU time on
one thread; the ratio is the median over the pairs. Memory is the growth of the peak resident size in a process of its
own. On a GPU, GPT-2 124M trains on 16 × 1024 tokens in bfloat16 under torch.compile.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.nn.functional as F

import gradproof
from gradproof.lm.adam import FlatAdamW, clip_global_norm
from gradproof.lm.explicit_gpt import ExplicitGPT
from gradproof.lm.gpt import GPT
from gradproof.lm.shape import GPTShape, count_parameters, parameter_shapes

CPU_SIZES = (  # shape, batch; the first is that of `gradproof train`
    (GPTShape(vocabulary=257, context=128, width=128, heads=4, layers=4), 16),
    (GPTShape(vocabulary=257, context=128, width=192, heads=6, layers=4), 16),
    (GPTShape(vocabulary=257, context=256, width=256, heads=4, layers=4), 16),
)
GPT2 = GPTShape(vocabulary=50257, context=1024, width=768, heads=12, layers=12)
PEAK = {"H200": 989e12, "H100": 989e12, "A100": 312e12}  # dense bfloat16, FLOP/s, by the maker's data sheets

Step = Callable[[], object]


def random_batch(shape: GPTShape, batch: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, shape.vocabulary, (batch, shape.context + 1), generator=generator).to(device)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def explicit_step(shape: GPTShape, batch: int) -> Step:
    model = ExplicitGPT(shape)
    optimizer = FlatAdamW(model.flat_parameters, parameter_shapes(shape))
    inputs, targets = random_batch(shape, batch)

    def step() -> None:
        model.zero_gradients()
        model.forward(inputs, targets)
        model.backward()
        clip_global_norm(model.flat_gradients, 1.0)
        optimizer.step(model.flat_gradients, 1e-3)

    return step


def autograd_step(shape: GPTShape, batch: int, *, fused: bool) -> Step:
    """The same nn.Module in eager mode; `fused` is for its optimizer (PyTorch's default is not)."""
    module = GPT(shape)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=fused or None)
    inputs, targets = random_batch(shape, batch)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(module(inputs).flatten(0, 1), targets.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()

    return step


def autograd_default(shape: GPTShape, batch: int) -> Step:
    return autograd_step(shape, batch, fused=False)


def autograd_fused(shape: GPTShape, batch: int) -> Step:
    return autograd_step(shape, batch, fused=True)


def cpu_seconds(step: Step) -> float:
    start = time.process_time()
    step()
    return time.process_time() - start


def measure_cpu(shape: GPTShape, batch: int, rounds: int) -> dict[str, list[float]]:
    """CPU seconds of each variant in each round."""
    torch.set_num_threads(1)
    steps = {make.__name__: make(shape, batch) for make in (autograd_default, autograd_fused, explicit_step)}
    for step in steps.values():
        step()
        step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(cpu_seconds(step))
    return times


def resident(field: str) -> int:
    """VmRSS (now) or VmHWM (peak) of this process, in bytes."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))


def measure_peak(make: Callable[[GPTShape, int], Step], shape: GPTShape, batch: int) -> int:
    """How far building a model and three of its steps raise the peak resident size."""
    torch.set_num_threads(1)
    tiny = make(GPTShape(vocabulary=16, context=8, width=8, heads=1, layers=1), 1)
    tiny()  # what the first step of a process loads is nobody's
    before = resident("VmRSS")
    step = make(shape, batch)
    for _ in range(3):
        step()
    return resident("VmHWM") - before


def peak_in_own_process(make: Callable[[GPTShape, int], Step], shape: GPTShape, batch: int) -> int:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure_peak, (make, shape, batch))


def print_cpu_table(rounds: int) -> None:
    print(f"CPU, one thread, torch {torch.__version__}; explicit against the nn.Module in eager autograd\n")
    print(
        "| width, layers, batch × context | autograd ms | fused AdamW ms | explicit ms | ratio | ratio to fused |",
        end="",
    )
    print(" autograd MiB | explicit MiB | ratio |\n|---|---|---|---|---|---|---|---|---|")
    for shape, batch in CPU_SIZES:
        times = measure_cpu(shape, batch, rounds)
        eager, fused, explicit = (times[n] for n in ("autograd_default", "autograd_fused", "explicit_step"))
        ratio, to_fused = (
            statistics.median(e / other for e, other in zip(explicit, base, strict=True))
            for base in (eager, fused)
        )
        peaks = [peak_in_own_process(make, shape, batch) for make in (autograd_default, explicit_step)]
        cells = [f"{shape.width}, {shape.layers}, {batch} × {shape.context}"]
        cells += [f"{1000 * statistics.median(t):.1f}" for t in (eager, fused, explicit)]
        cells += [
            f"{ratio:.3f}",
            f"{to_fused:.3f}",
            *(f"{p / 2**20:.0f}" for p in peaks),
            f"{peaks[1] / peaks[0]:.2f}",
        ]
        print(f"| {' | '.join(cells)} |", flush=True)


class GPUTraining:
    """One model, its optimizer and its batch; `step` is a whole training step in bfloat16."""

    def __init__(self, shape: GPTShape, batch: int, device: str, *, fused_loss: bool, compiled: bool) -> None:
        self.device, self.fused_loss = device, fused_loss
        self.module = GPT(shape).to(device)
        self.model = torch.compile(self.module) if compiled else self.module
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)
        self.inputs, self.targets = random_batch(shape, batch, device)

    def loss(self) -> torch.Tensor:
        with torch.autocast(self.device, torch.bfloat16):
            if self.fused_loss:
                return self.model(self.inputs, self.targets)
            return F.cross_entropy(self.model(self.inputs).flatten(0, 1), self.targets.flatten())

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.loss().backward()
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        self.optimizer.step()

    def seconds(self, steps: int) -> float:
        """Of one step, in a block of so many."""
        synchronize = torch.cuda.synchronize if self.device == "cuda" else lambda: None
        synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        synchronize()
        return (time.perf_counter() - start) / steps


def model_flops(shape: GPTShape, tokens: int) -> float:
    """Forward and backward: 6 for each weight that multiplies a token, 12·L·C·T for attention, a token."""
    weights = count_parameters(shape) - shape.context * shape.width
    return tokens * (6 * weights + 12 * shape.layers * shape.width * shape.context)


def measure_gpu(
    shape: GPTShape,
    batch: int,
    *,
    device: str = "cuda",
    compiled: bool = True,
    blocks: int = 7,
    steps: int = 10,
) -> dict[str, float]:
    """Seconds a step of each variant: medians over blocks; the plain one is measured first and last."""
    plain = GPUTraining(shape, batch, device, fused_loss=False, compiled=compiled)
    fused = GPUTraining(shape, batch, device, fused_loss=True, compiled=compiled)
    watched = (("watched, default", None), ("watched, parameters every step", "parameters every step"))
    variants = [("plain", plain, False, None), ("fused loss", fused, False, None)]
    variants += [(f"fused loss, {name}", fused, True, schedule) for name, schedule in watched]
    variants += [("plain again", plain, False, None)]
    seconds = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, training, watch, schedule in variants:
            out = f"{folder}/{len(seconds)}"
            with (
                gradproof.watch(training.module, training.optimizer, out=out, schedule=schedule)
                if watch
                else nullcontext()
            ):
                training.seconds(steps)  # compiles, and lets the budget settle
                seconds[name] = statistics.median(training.seconds(steps) for _ in range(blocks))
    return seconds


def print_gpu_table(shape: GPTShape, batch: int) -> None:
    torch.set_float32_matmul_precision("high")
    name, tokens = torch.cuda.get_device_name(), batch * shape.context
    peak = next((p for card, p in PEAK.items() if card in name), None)
    seconds = measure_gpu(shape, batch)
    plain = (seconds["plain"] + seconds["plain again"]) / 2
    print(f"\n{name}, torch {torch.__version__}; {count_parameters(shape) / 1e6:.0f}M parameters, ", end="")
    print(f"{batch} × {shape.context} tokens, bfloat16, torch.compile\n")
    print(
        "| variant | ms a step | tokens/s | ratio to plain | model FLOPs utilisation |\n|---|---|---|---|---|"
    )
    for variant, value in seconds.items():
        rate = model_flops(shape, tokens) / value
        used = f"{100 * rate / peak:.1f} %" if peak else f"{rate / 1e12:.0f} TFLOP/s"
        print(f"| {variant} | {1000 * value:.2f} | {tokens / value:,.0f} | {value / plain:.3f} | {used} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--cpu", action="store_true", help="the CPU part, even where there is a GPU")
    parser.add_argument("--rounds", type=int, default=12, help="pairs of steps on a CPU")
    args = parser.parse_args()
    if args.cpu or not torch.cuda.is_available():
        print_cpu_table(args.rounds)
    else:
        print_gpu_table(GPT2, 16)


if __name__ == "__main__":
    main()
