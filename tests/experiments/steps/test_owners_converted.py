"""Parameters that were converted after they were wrapped; and tensors made of weights that somebody trains."""

from pathlib import Path

import pytest
import torch
from taped_trainings import evidence_of_step
from torch import nn

from gradproof.experiments.steps.owners import does_the_optimizer_hold_everything


class Shops(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.net = nn.Linear(4, 3).double()
        values = torch.randn(5, 3)
        if how == "converted":
            self.profile = nn.Parameter(values).to(torch.float64)
        elif how == "reshaped":
            self.profile = nn.Parameter(values.double().flatten()).view(5, 3)
        elif how == "in a list":
            self.profile = [nn.Parameter(values).double()]
        elif how == "wrapped last":
            self.profile = nn.Parameter(values.to(torch.float64))
        elif how == "tied":
            self.table = nn.Parameter(values.double().t().contiguous())
            self.profile = self.table.t()
        elif how == "of another model":
            self.__dict__["other"] = nn.Linear(5, 3).double()
            self.profile = self.__dict__["other"].weight.t()
        elif how == "by hand":
            self.__dict__["hand"] = (nn.Parameter(values.double()),)
            self.profile = self.__dict__["hand"][0].t().t()

    def forward(self, shop, x):
        profile = self.profile[0] if isinstance(self.profile, list) else self.profile
        return (profile[shop] * self.net(x)).sum(-1)


def verdicts(model, use=None, after=lambda: None):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    shop, x, y = torch.arange(5).repeat(4), torch.randn(20, 4).double(), torch.randn(20).double()
    memory, found = {}, []

    def step():
        optimizer.zero_grad()
        loss = (model(shop, x) * (1 if use is None else use) - y).square().mean()
        loss.backward()
        optimizer.step()
        after()
        return loss.item()

    for number in range(1, 4):
        evidence = evidence_of_step(step, {"": model}, [optimizer], number, memory=memory)
        found += does_the_optimizer_hold_everything(evidence)
    return found


@pytest.mark.parametrize("how", ["converted", "reshaped", "in a list"])
def test_a_parameter_that_was_converted(how):
    found = verdicts(Shops(how))[0]
    assert found.id == "param-not-updated/plain-tensor" and found.where.startswith("profile (")
    number = int(found.where.rpartition(":")[2].rstrip(")"))
    assert "self.profile = " in Path(__file__).read_text().splitlines()[number - 1]


def test_a_variable_of_the_script():
    scale = nn.Parameter(torch.ones(1)).double()
    found = verdicts(Shops("wrapped last"), use=scale)[0]
    assert found.where.startswith(("scale (test_owners_converted.py:", "use"))


@pytest.mark.parametrize("how", ["wrapped last", "tied", "of another model"])
def test_tensors_made_of_weights_that_have_a_home(how):
    assert not verdicts(Shops(how))


def test_a_parameter_that_is_changed_by_hand():
    model = Shops("by hand")
    (parameter,) = model.__dict__["hand"]

    def descend():
        with torch.no_grad():
            parameter.sub_(0.1 * parameter.grad)
            parameter.grad = None

    assert not verdicts(model, after=descend)
