"""Back, behind and ahead from an operation of a step whose graph is known, and what views do to numbers of places."""

import torch
from experiment_steps import evidence_of
from torch import nn

from gradproof.instruments.flow import RESHAPES
from gradproof.instruments.walk import ahead, anything, back, behind, carry, operands, tracked


def step():
    """(x w + b) viewed, through a tanh, its square times an exponential of the same."""
    model, x = nn.Linear(3, 4), torch.randn(5, 3)

    def loss():
        hidden = model(x).view(20).tanh()
        return (hidden.square() * hidden.exp()).mean()

    flow = evidence_of(model, loss).flow
    return flow, {op.name: op for op in flow.operations}


def names(operations):
    return [op.name for op in operations]


def test_back_goes_through_what_is_named_and_no_further():
    flow, made = step()
    (slot,) = flow.reads(made["tanh"])
    assert names(back(flow, slot, RESHAPES)) == ["view", "addmm"]
    assert names(back(flow, slot, ())) == ["view"]
    assert names(back(flow, flow.tape.parameters[0].index, RESHAPES)) == []


def test_behind_comes_once_to_everything_that_is_asked_for():
    flow, made = step()
    found = names(behind(flow, operands(made["mul"]), flow.reads))
    assert sorted(found[:2]) == ["exp", "pow"] and found.count("tanh") == found.count("addmm") == 1
    assert sorted(names(behind(flow, operands(made["mul"]), lambda op: ()))) == ["exp", "pow"]


def test_ahead_says_who_reads_it_and_what_is_made_of_it():
    flow, made = step()
    from_layer = names(ahead(flow, made["addmm"].makes, RESHAPES))
    assert from_layer == ["view", "tanh"]
    assert names(ahead(flow, made["addmm"].makes, lambda op: op.name != "tanh")) == ["view", "tanh"]
    assert {"exp", "pow", "mul", "mean"} <= set(names(ahead(flow, made["addmm"].makes, anything)))


def test_operands_and_those_that_carry_gradient():
    flow, made = step()
    assert len(operands(made["mul"])) == len(tracked(made["mul"])) == 2
    x = next(slot for slot in flow.reads(made["addmm"]) if slot in flow.inputs)
    assert x not in tracked(made["addmm"]) and x in operands(made["addmm"], 3)


def test_numbers_of_places_are_carried_as_the_values_were():
    flow, made = step()
    path = [made["view"], made["tanh"]]
    assert torch.equal(carry(flow, path, torch.arange(20).view(5, 4)), torch.arange(20))
