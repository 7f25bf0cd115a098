"""The history of gains: the block that begins to grow is named, not the parameter with the largest gradient."""

import torch
import torch.nn.functional as F
from test_examination import examine
from torch import nn

from gradproof.diagnosis.gains import find_gain_change
from gradproof.diagnosis.ranking import diagnose
from gradproof.instruments.gains import gains_by_module
from gradproof.record.run import open_run
from gradproof.tape.record import record


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, x):
        return x + 0.3 * torch.tanh(x) + self.linear(x)


class Stack(nn.Module):
    """Residual blocks between a first and a last layer, whose gradients are the largest."""

    def __init__(self, width=8, depth=6):
        super().__init__()
        self.enter, self.leave = nn.Linear(4, width), nn.Linear(width, 1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        for block in self.blocks:
            nn.init.normal_(block.linear.weight, std=0.02)

    def forward(self, x):
        x = self.enter(20 * x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x) / 20


def train(growth, steps=40):
    """The name of the parameter whose gradient is largest at the end."""
    torch.manual_seed(0)
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for _ in range(steps):
        x = torch.randn(16, 4)
        optimizer.zero_grad()
        F.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
        optimizer.step()
        with torch.no_grad():
            model.blocks[3].linear.weight.mul_(growth)
    return max(model.named_parameters(), key=lambda named: named[1].grad.norm())[0]


def test_the_block_that_grows_is_named(tmp_path):
    largest = examine(tmp_path / "run", lambda: train(growth=1.3), questions=("where_was_it_born",))
    run = open_run(tmp_path / "run")
    change = find_gain_change(run)
    assert change.path.startswith("blocks.3") and change.growth > 100
    assert "blocks" not in largest
    finding = next(c for c in diagnose(run).causes if c.family == "exploding-signal")
    assert finding.where.startswith("blocks.3")
    assert any("gain of blocks.3" in line and "at step 1 to" in line for line in finding.evidence)


def test_a_steady_stack_has_no_place_to_name(tmp_path):
    examine(tmp_path / "run", lambda: train(growth=1.0), questions=("where_was_it_born",))
    run = open_run(tmp_path / "run")
    assert [event["step"] for event in run.events if event["event"] == "gains"] == [1, 3, 10, 32]
    assert find_gain_change(run) is None and find_gain_change(run, growing=False) is None
    assert not [c for c in diagnose(run).causes if c.family in ("exploding-signal", "vanishing-signal")]


def test_gains_along_the_calls_of_a_recurrent_cell():
    torch.manual_seed(0)
    model = nn.ModuleDict({"cell": nn.RNNCell(3, 5, nonlinearity="relu")})
    with torch.no_grad():
        model["cell"].weight_hh.copy_(1.5 * torch.eye(5))
        model["cell"].weight_ih.abs_()
    with record({p: n for n, p in model.named_parameters()}) as tape:
        h = torch.zeros(2, 5)
        for part in torch.rand(12, 2, 3):
            h = model["cell"](part, h)
        h.sum().backward()
    along = gains_by_module(tape)["cell"]["along"]
    assert len(along) == 8 and along[-1] > 1.4
