"""The benchmark of training steps runs, in small."""

import importlib.util
from pathlib import Path

import pytest
import torch

from gradproof.lm.gpt import GPT
from gradproof.lm.shape import GPTShape

spec = importlib.util.spec_from_file_location(
    "train_benchmark", Path(__file__).parent.parent / "benchmarks" / "train.py"
)
benchmark = importlib.util.module_from_spec(spec)
spec.loader.exec_module(benchmark)

TINY = GPTShape(vocabulary=50, context=16, width=16, heads=2, layers=1)


def test_every_variant_of_the_gpu_table_takes_its_steps():
    seconds = benchmark.measure_gpu(TINY, 2, device="cpu", compiled=False, blocks=1, steps=2)
    assert len(seconds) == 5 and all(value > 0 for value in seconds.values())


def test_every_variant_of_the_cpu_table_takes_its_steps():
    for make in (benchmark.autograd_default, benchmark.autograd_fused, benchmark.explicit_step):
        make(TINY, 2)()
    assert benchmark.resident("VmHWM") >= benchmark.resident("VmRSS") > 0


def test_model_flops_of_gpt2():
    """6·N + 12·L·C·T a token: 124M parameters less the positions, and the attention."""
    flops = benchmark.model_flops(benchmark.GPT2, 1)
    assert 6 * 123.6e6 + 12 * 12 * 768 * 1024 < flops < 6 * 123.7e6 + 12 * 12 * 768 * 1024


def test_the_model_and_its_loss_are_one_graph_under_autocast():
    torch._dynamo.reset()
    module = GPT(TINY)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    inputs, targets = benchmark.random_batch(TINY, 2)
    losses = []
    for model in (module, compiled):
        module.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(inputs, targets)
        loss.backward()
        losses.append((loss.item(), module.token_embedding.weight.grad.norm().item()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
