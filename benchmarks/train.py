"""Training steps side by side: the explicit model and autograd on a CPU; fused loss and watching on a GPU.

    python benchmarks/train.py            whichever of the two this machine can do
    python benchmarks/train.py --cpu      the CPU part on a machine that has a GPU

On a CPU each model takes whole steps (forward, backward, clip, AdamW) in a process of its own, as in a real
training, in turn with the others, on one thread; ratios are medians over the rounds of CPU time. Memory is
how far building the model and its steps raise the peak resident size. On a GPU (under 4 minutes), GPT-2 124M
trains on 16 × 1024 tokens in bfloat16 under torch.compile.
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


class Worker:
    """A process that builds a model and takes its steps when told."""

    def __init__(self, make: Callable[[GPTShape, int], Step], shape: GPTShape, batch: int) -> None:
        self.pool = multiprocessing.get_context("spawn").Pool(1, build_here, (make, shape, batch))
        self.seconds: list[float] = []

    def take(self, steps: int) -> float:
        """CPU seconds of a step, system time included."""
        return self.pool.apply(take_here, (steps,))

    def peak(self) -> int:
        return self.pool.apply(peak_here)


def build_here(make: Callable[[GPTShape, int], Step], shape: GPTShape, batch: int) -> None:
    global here, before
    torch.set_num_threads(1)
    make(
        GPTShape(vocabulary=16, context=8, width=8, heads=1, layers=1), 1
    )()  # loads what any first step loads
    before = resident("VmRSS")
    here = make(shape, batch)


def take_here(steps: int) -> float:
    start = time.process_time()
    for _ in range(steps):
        here()
    return (time.process_time() - start) / steps


def peak_here() -> int:
    return resident("VmHWM") - before


here: Step
before: int


def resident(field: str) -> int:
    """VmRSS (now) or VmHWM (peak) of this process, in bytes."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))


def measure_cpu(shape: GPTShape, batch: int, rounds: int) -> list[Worker]:
    """Workers for autograd, autograd with a fused optimizer, and the explicit model, measured in turn."""
    workers = [Worker(make, shape, batch) for make in (autograd_default, autograd_fused, explicit_step)]
    for worker in workers:
        worker.take(3)
    for _ in range(rounds):
        for worker in workers:
            worker.seconds.append(worker.take(2))
    return workers


def median_ratio(worker: Worker, base: Worker) -> float:
    return statistics.median(a / b for a, b in zip(worker.seconds, base.seconds, strict=True))


def print_cpu_table(rounds: int) -> None:
    print(
        f"CPU, one thread, torch {torch.__version__}; the explicit model and the nn.Module under eager autograd\n"
    )
    columns = ["width, layers, batch × context", "autograd ms", "with fused AdamW ms", "explicit ms", "ratio"]
    columns += ["ratio to fused AdamW", "autograd MiB", "explicit MiB", "ratio"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for shape, batch in CPU_SIZES:
        workers = measure_cpu(shape, batch, rounds)
        autograd, fused, explicit = workers
        cells = [f"{shape.width}, {shape.layers}, {batch} × {shape.context}"]
        cells += [f"{1000 * statistics.median(w.seconds):.1f}" for w in workers]
        cells += [f"{median_ratio(explicit, autograd):.3f}", f"{median_ratio(explicit, fused):.3f}"]
        cells += [f"{w.peak() / 2**20:.0f}" for w in (autograd, explicit)]
        cells.append(f"{explicit.peak() / autograd.peak():.2f}")
        print(f"| {' | '.join(cells)} |", flush=True)
        for worker in workers:
            worker.pool.terminate()


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
                gradproof.watch(
                    training.model, training.optimizer, out=out, schedule=schedule, experiments=False
                )
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
    parser.add_argument("--rounds", type=int, default=10, help="of two steps each on a CPU")
    args = parser.parse_args()
    if args.cpu or not torch.cuda.is_available():
        print_cpu_table(args.rounds)
    else:
        print_gpu_table(GPT2, 16)


if __name__ == "__main__":
    main()
