"""A recorded step as a checkpoint: training goes on from it as it went, to the bit."""

import pytest
import torch
from asked_runs import write_run
from taped_trainings import plain_step
from torch import nn

from gradproof.cli import main


def make(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
    model[2].register_buffer("scratch", torch.ones(3), persistent=False)
    groups = [
        {"params": model[0].parameters(), "lr": 0.01},
        {"params": [*model[1].parameters(), *model[3].parameters()]},
    ]
    return model, kind(groups, lr=0.05)


class AdamW(torch.optim.Optimizer):
    """The script's own, of a name that PyTorch has, too: its count of steps is a number."""

    def __init__(self, groups, lr):
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"], state["average"] = 0, torch.zeros_like(p)
                state["step"] += 1
                state["average"].lerp_(p.grad, 0.1)
                p.sub_(group["lr"] * state["average"] / (1 - 0.9 ** state["step"]))


X, Y = torch.randn(12, 4, generator=torch.Generator().manual_seed(1)), torch.arange(12) % 3


def step_of(model, optimizer):
    return plain_step(model, optimizer, lambda: nn.functional.cross_entropy(model(X), Y))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.SGD, AdamW])
def test_training_goes_on_from_it_to_the_bit(tmp_path, kind, capsys):
    model, optimizer = make(kind)
    run = write_run(tmp_path / "run", step_of(model, optimizer), model, optimizer, steps=4)
    assert main(["checkpoint", str(run), "--step", "2", "--out", str(tmp_path / "good.pt")]) == 0
    assert "what step 2 began with, 9 weights and buffers" in capsys.readouterr().out
    saved = torch.load(tmp_path / "good.pt")
    again, other = make(kind)
    again.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimizer"])
    assert saved["step"] == 2 and [g["lr"] for g in other.param_groups] == [0.01, 0.05]
    for _ in range(2):
        step_of(again, other)()
    for name, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


def test_nothing_is_written_over_and_what_is_not_there_is_said(tmp_path, capsys):
    model, optimizer = make(torch.optim.SGD)
    run = write_run(tmp_path / "run", step_of(model, optimizer), model, optimizer)
    (tmp_path / "mine.pt").write_text("dear")
    assert main(["checkpoint", str(run), "--out", str(tmp_path / "mine.pt")]) == 2
    assert (tmp_path / "mine.pt").read_text() == "dear" and "is there already" in capsys.readouterr().err
    assert main(["checkpoint", str(run), "--step", "77", "--out", str(tmp_path / "new.pt")]) == 2
    assert "step 77" in capsys.readouterr().err and not (tmp_path / "new.pt").exists()
