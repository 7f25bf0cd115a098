"""What Adam remembers and no gradients can have made: a bit that flipped, a part of a checkpoint that is missing."""

import pytest
import torch
from taped_trainings import evidence_of_step, examine, ids, plain_step
from torch import nn

from gradproof.experiments.steps.averages import does_the_average_follow, impossible_moments, overflown_state
from gradproof.instruments.moments import bound

ID = "weights-state-error/impossible-moments"
ADAMS = {
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "AdamW, other betas": lambda p: torch.optim.AdamW(p, lr=1e-3, betas=(0.8, 0.95)),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True, weight_decay=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=1e-3),
}
SIZES = {  # of the gradient at a step
    "even": lambda step: 1.0,
    "bursts": lambda step: 1e6 if step % 37 == 0 else 1e-3,
    "seldom": lambda step: 1.0 if step == 60 else 0.0,
    "growing": lambda step: 3.0**step if step < 60 else 3.0**60,
    "dying": lambda step: 10.0**-step,
    "tiny": lambda step: 1e-25,
}


def train(make, size=SIZES["even"], steps=80, harm=lambda model, optimizer: None):
    """Some steps, then what is done to the state, then one that is recorded."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    x = torch.randn(16, 4)
    optimizer, number = make(model.parameters()), [0]

    def loss():
        number[0] += 1
        return model(x).square().mean() * size(number[0] - 1)

    step = plain_step(model, optimizer, loss)
    for _ in range(steps):
        step()
    harm(model, optimizer)
    return step, model, optimizer


def look(step, model, optimizer):
    return impossible_moments(evidence_of_step(step, {"": model}, [optimizer]))


def flip(model, optimizer):
    mean = optimizer.state[model[2].weight]["exp_avg"]
    mean.view(torch.int32)[0, 5] ^= 1 << 30


def clear_squares(model, optimizer):
    for parameter in model[0].parameters():
        optimizer.state[parameter]["exp_avg_sq"].zero_()


def exchange(model, optimizer):
    """The squares of one layer's gradients for those of another, a million times larger."""
    for parameter in model[0].parameters():
        optimizer.state[parameter]["exp_avg_sq"].mul_(1e-12)


@pytest.mark.parametrize("kind", ADAMS)
@pytest.mark.parametrize(
    "harm, place, why",
    [
        (flip, "2.weight", "single entries: something else has written"),
        (clear_squares, "0.", "whole tensors: the two averages were not saved together"),
        (exchange, "0.", "whole tensors"),
    ],
)
def test_a_state_that_no_gradients_make(kind, harm, place, why):
    found = look(*train(ADAMS[kind], harm=harm))
    assert (found.id, found.verdict, found.confidence) == (ID, "confirmed", "proven")
    assert found.where.startswith(place) and why in " ".join(found.evidence)
    if harm is flip:
        assert "2.weight[0, 5]" in found.evidence[0] and "1 of 8 entries" in found.evidence[1]


@pytest.mark.parametrize("kind", ADAMS)
@pytest.mark.parametrize("size", SIZES)
def test_whatever_the_gradients_were_a_healthy_state_is_possible(kind, size):
    found = look(*train(ADAMS[kind], SIZES[size]))
    assert found is not None and found.verdict == "excluded"


def test_who_has_no_such_averages_is_not_asked():
    assert look(*train(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))) is None


def test_betas_that_turn_are_no_fault():
    """As OneCycleLR turns them, with a state that was begun with others."""

    def turn(model, optimizer):
        optimizer.param_groups[0]["betas"] = (0.85, 0.95)

    assert look(*train(ADAMS["Adam"], SIZES["bursts"], harm=turn)).verdict == "excluded"


def test_the_bound_holds_and_is_reached():
    """By gradients that fall as (β₁ / β₂)^age, the ones by which Cauchy and Schwarz are equal."""
    first, second = 0.9, 0.999
    mean = square = 0.0
    for age in range(400, -1, -1):
        gradient = (first / second) ** age
        mean, square = first * mean + (1 - first) * gradient, second * square + (1 - second) * gradient**2
    assert 0.99 * bound(first, second) < mean / square**0.5 <= bound(first, second)


def test_the_question_says_it_first():
    step, model, optimizer = train(ADAMS["Adam"], harm=flip)
    assert ids(examine(does_the_average_follow, model, optimizer, step, steps=1)) == {ID}


class Ageing(torch.optim.Optimizer):
    """Keeps each mean square divided by what is left of its first weight, which is never rescaled."""

    def __init__(self, params, keep, start=0.0):
        super().__init__(params, {"lr": 1e-3})
        self.keep, self.start = keep, start

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["acc"], state["age"] = torch.full_like(parameter, self.start), 1.0
            state["age"] = max(state["age"] * self.keep, 1e-300)
            state["acc"].add_(parameter.grad.square() * (1 - self.keep) / state["age"])
            parameter.addcdiv_(
                parameter.grad, (state["acc"].double() * state["age"]).sqrt().float() + 1e-8, value=-1e-3
            )


AGEING = {
    "it outgrows float32": (lambda p: Ageing(p, 0.3), True),
    "it does not": (lambda p: Ageing(p, 0.999), False),
    "infinite from the start": (lambda p: Ageing(p, 0.9, start=torch.inf), False),
    "Adam": (ADAMS["Adam"], False),
}


@pytest.mark.parametrize("what", AGEING)
def test_a_state_that_outgrows_its_format(what):
    make, wanted = AGEING[what]
    step, model, optimizer = train(make, steps=5)
    memory, said = {}, []
    for number in range(6, 150, 12):
        said.append(overflown_state(evidence_of_step(step, {"": model}, [optimizer], number, memory=memory)))
        for _ in range(11):
            step()
    found = [verdict for verdict in said if verdict is not None]
    assert bool(found) == wanted and said[0] is None
    if wanted:
        assert found[0].id == "low-precision-error/state-overflow" and found[0].confidence == "proven"
        assert "'acc'" in found[0].evidence[0] and found[0].where.startswith("0.")
