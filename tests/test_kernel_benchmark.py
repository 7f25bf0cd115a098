"""The benchmark of kernels calls its peers as their makers say, and one that fails is a cell of the table."""

import importlib.util
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F


def benchmark(name):
    file = Path(__file__).parent.parent / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"kernel_benchmark_{name}", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


measure, peers = benchmark("measure"), benchmark("peers")
X, Y = torch.randn(4, 8), torch.tensor([1, 2, 3, -100])


def public_liger(
    input,
    target,
    weight=None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap=None,
    return_z_loss: bool = False,
):
    """As liger_kernel.transformers.functional has it; its Function takes other arguments with each release."""
    return F.cross_entropy(input, target, weight, ignore_index=ignore_index, reduction=reduction)


def raises(*args, **kwargs):
    raise TypeError("forward() takes 9 positional arguments but 3 were given")


@pytest.fixture
def timed(monkeypatch):
    """The row of the table with a stand-in for Liger, or with none; each way is called once instead of timed."""
    monkeypatch.setattr(measure, "gpu_ms", lambda function, *_: float(function()))
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)

    def row(function):
        for name in ("liger_kernel", "liger_kernel.transformers", "liger_kernel.transformers.functional"):
            module = types.ModuleType(name)
            module.__path__ = []
            if function is not None:
                monkeypatch.setitem(sys.modules, name, module)
        if function is not None:
            module.liger_cross_entropy = function
        return measure.in_turns(peers.ce_peers(X, Y), 2, 2)

    return row


def test_liger_is_called_by_its_public_function(timed):
    row = timed(public_liger)
    assert row["liger"] == pytest.approx(row["eager"]) == pytest.approx(F.cross_entropy(X, Y).item())


def test_a_peer_that_raises_is_a_cell(timed):
    row = timed(raises)
    assert row["liger"].startswith("TypeError: forward() takes 9") and isinstance(row["eager"], float)


def test_a_peer_that_does_not_load_is_a_cell(timed, monkeypatch):
    def broken(module):
        if module.startswith("liger"):
            raise RuntimeError("it wants another triton")
        raise ModuleNotFoundError(name=module.partition(".")[0])

    monkeypatch.setattr(peers.importlib, "import_module", broken)
    row = timed(None)
    assert row["liger"] == "RuntimeError: it wants another triton" and "quack" not in row


def test_a_peer_that_is_not_installed_has_no_cell(timed, monkeypatch):
    def absent(module):
        raise ModuleNotFoundError(name=module.partition(".")[0])

    monkeypatch.setattr(peers.importlib, "import_module", absent)
    assert set(timed(None)) == {"eager", "compile"}
