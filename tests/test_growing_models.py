"""A model that grows, or whose parameters are swapped, in mid-training: who trains each is still known."""

import pytest
import torch
from torch import nn

from gradproof.diagnosis.ranking import diagnose
from gradproof.probes.watch import watch
from gradproof.record.run import open_run


def train(path, given, handed_over, schedule):
    """A layer comes every five steps and goes to the optimizer, or is forgotten; one weight is swapped."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(8, 8)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(16, 8)
    with watch(model if given else None, optimizer, out=path, schedule=schedule, experiments=False):
        for step in range(30):
            if step % 5 == 4:
                model.append(nn.Linear(8, 8))
                if handed_over:
                    optimizer.add_param_group({"params": list(model[-1].parameters())})
            if step == 12:
                model[0].weight = optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.eye(8))
            optimizer.zero_grad()
            hidden = x
            for layer in model:
                hidden = hidden + 0.1 * layer(hidden)
            hidden.square().mean().backward()
            optimizer.step()
    return open_run(path).info["parameters"]


@pytest.mark.parametrize("schedule", ["bare every step", "light every step"])
@pytest.mark.parametrize("given", [True, False])
def test_a_model_that_grows_is_one_model(given, schedule, tmp_path):
    described = train(tmp_path / "run", given, True, schedule)
    assert all(parameter["optimizer"] == 0 for parameter in described)
    assert {f"{layer}.bias" for layer in range(7)} <= {parameter["name"] for parameter in described}
    assert "not-in-optimizer" not in str(diagnose(tmp_path / "run").causes)


@pytest.mark.parametrize("given", [True, False])
def test_layers_that_no_optimizer_was_given_are_named(given, tmp_path):
    train(tmp_path / "run", given, False, "light every step")
    assert "not-in-optimizer" in str(diagnose(tmp_path / "run").causes)
