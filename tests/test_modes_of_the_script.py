"""What looks into a script's operations (counters, fake quantisation, hooks) sees them all, and nothing of ours."""

import collections
from contextlib import nullcontext

import pytest
import torch
from test_identical import taped
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from gradproof.probes import taping
from gradproof.tape.label import find_specimens
from gradproof.tape.modes import below_all
from gradproof.tape.replay import replay_exactly
from gradproof.tape.specimen import load


class Rounds(TorchDispatchMode):
    """Fake quantisation of every matrix product."""

    def __init__(self):
        super().__init__()
        self.seen = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[str(func)] += 1
        result = func(*args, **(kwargs or {}))
        return (result * 16).round() / 16 if func is torch.ops.aten.addmm.default else result


class Counts(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = collections.Counter()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen[getattr(func, "__name__", str(func))] += 1
        return func(*args, **(kwargs or {}))


class Flops(FlopCounterMode):
    def __init__(self):
        super().__init__(display=False)

    @property
    def seen(self):
        return self.get_total_flops()


def training(kind, around_all):
    """What a mode sees of a small training, and the losses; the mode is open all the time, or in parts of each step."""
    torch.manual_seed(0)
    mode = kind()
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    x, losses, packed = torch.randn(64, 8), [], []

    def pack(tensor):
        packed.append(tuple(tensor.shape))
        return tensor

    with mode if around_all else nullcontext():
        for _ in range(6):
            with nullcontext() if around_all else mode:
                with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                    loss = (model(x) - x[:, :1]).square().mean()
                optimizer.zero_grad()
                loss.backward()
            with nullcontext() if around_all else mode:
                optimizer.step()
            losses.append(loss.item())
    return losses, mode.seen, packed


@pytest.mark.parametrize("around_all", [True, False])
@pytest.mark.parametrize("kind", [Rounds, Counts, Flops])
def test_a_mode_of_the_script_sees_what_it_sees_without_us(kind, around_all, tmp_path, monkeypatch):
    monkeypatch.setattr(taping, "PLAIN_STEPS", ())
    monkeypatch.setattr(taping, "ALLOWANCE", 1e9)
    plain = training(kind, around_all)
    assert taped(tmp_path / "run", lambda: training(kind, around_all)) == plain
    found = find_specimens(tmp_path / "run")
    assert len(found) >= 5
    if kind is Rounds:  # the tape stands below: what it holds is what the mode made of the operations
        tape = load(found[-1]).tape
        assert "round" in {operation.name for operation in tape.operations}
        assert replay_exactly(tape).departs_at is None


def test_a_mode_below_all_others_is_taken_out_of_the_middle():
    ours, first, second = Rounds(), Rounds(), Rounds()
    with first:
        inside = below_all(ours)
        inside.__enter__()
        with second:
            torch.ones(2) + 1
            inside.__exit__(None, None, None)
            torch.ones(2) * 2
    seen = [sorted(mode.seen) for mode in (first, second, ours)]
    assert seen[0] == seen[1] == ["aten.add.Tensor", "aten.mul.Tensor", "aten.ones.default"]
    assert seen[2] == ["aten.add.Tensor", "aten.ones.default"]
    assert torch._C._len_torch_dispatch_stack() == 0
