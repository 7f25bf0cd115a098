"""A running sum backpropagated at every micro-batch; and losses that share a trunk, are cleared, or differentiated."""

import pytest
import torch
import torch.nn.functional as F
from taped_trainings import examine, ids
from torch import nn

from gradproof.experiments.gradients.accumulation import do_micro_batches_add_up

ID = "grad-accumulation-error/walked-again"


def verdicts(backpropagate, model=None):
    """The experiment on one step; `backpropagate(model, optimizer)` is all but the update."""
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step():
        optimizer.zero_grad()
        loss = backpropagate(model, optimizer)
        optimizer.step()
        return loss.detach()

    return examine(do_micro_batches_add_up, model, optimizer, step, steps=1)


def loss_of(model):
    return F.mse_loss(model(torch.randn(4, 3)), torch.randn(4, 1))


@pytest.mark.parametrize("before", [1.0, 0.25])
@pytest.mark.parametrize("at_last", [lambda loss: loss, lambda loss: loss / 4, lambda loss: 1024 * loss])
def test_a_running_sum_is_walked_again_at_every_micro_batch(before, at_last):
    def run(model, optimizer):
        total = 0.0
        for _ in range(4):
            total = total + before * loss_of(model)
            at_last(total).backward(retain_graph=True)
        return total

    [found] = verdicts(run)
    assert (
        found.id == ID
        and found.level == "problem"
        and "the first counts 4 times, the last 1" in found.evidence[1]
    )


SUMS = {
    "stack": lambda losses: torch.stack(losses).sum(),
    "sum": sum,
    "mean": lambda losses: sum(losses) / len(losses),
}


@pytest.mark.parametrize("add_up", SUMS.values(), ids=SUMS)
def test_a_growing_list_of_losses(add_up):
    def run(model, optimizer):
        losses = []
        for _ in range(3):
            losses.append(loss_of(model))
            add_up(losses).backward(retain_graph=True)
        return losses[0]

    assert ids(verdicts(run), "problem") == {ID}


def test_a_sum_in_place():
    def run(model, optimizer):
        total = torch.zeros(())
        for _ in range(3):
            total += loss_of(model)
            total.backward(retain_graph=True)
        return total

    assert ids(verdicts(run), "problem") == {ID}


def test_one_loss_walked_at_two_lines_is_a_warning():
    def run(model, optimizer):
        first = loss_of(model)
        first.backward(retain_graph=True)
        both = first + loss_of(model)
        both.backward()
        return both

    assert ids(verdicts(run), "warning") == {ID}


def micro_batches(model, optimizer):
    total = 0.0
    for _ in range(4):
        loss = loss_of(model) / 4
        loss.backward()
        total = total + loss.detach()
    return total


def two_losses_of_one_trunk(model, optimizer):
    out = model(torch.randn(4, 3))
    out.square().mean().backward(retain_graph=True)
    out.abs().mean().backward()
    return out.mean()


def terms_of_one_pass_in_a_loop(model, optimizer):
    out = model(torch.randn(4, 3))
    for loss in (out.square().mean(), out.abs().mean(), out.exp().mean()):
        loss.backward(retain_graph=True)
    return out.mean()


def truncated_in_time(model, optimizer):
    state = torch.zeros(4, 3)
    for _ in range(3):
        state = state + model(state + torch.randn(4, 3))
        loss = state.square().mean()
        loss.backward(retain_graph=True)
    return loss


def one_penalty_for_all(model, optimizer):
    penalty = sum(p.square().sum() for p in model.parameters())
    for _ in range(3):
        loss = (loss_of(model) + 0.1 * penalty) / 3
        loss.backward(retain_graph=True)
    return loss


def one_loss_for_each_layer_in_turn(model, optimizer):
    loss = loss_of(model)
    for layer in (model[2], model[0]):
        loss.backward(inputs=list(layer.parameters()), retain_graph=True)
    return loss


def cleared_between(model, optimizer):
    """Each loss for its own norm, then the sum for the step."""
    losses = [loss_of(model), loss_of(model)]
    for loss in losses:
        loss.backward(retain_graph=True)
        optimizer.zero_grad()
    total = losses[0] + losses[1]
    total.backward()
    return total


def cleared_by_hand(model, optimizer):
    first = loss_of(model)
    first.backward(retain_graph=True)
    for p in model.parameters():
        p.grad.zero_()
    total = first + loss_of(model)
    total.backward()
    return total


def differentiated_twice(model, optimizer):
    loss = loss_of(model).sqrt()
    loss.backward(create_graph=True)
    norm = sum(p.grad.square().sum() for p in model.parameters())
    norm.backward()
    for p in model.parameters():
        p.grad = p.grad.detach()
    return loss


def physics(model, optimizer):
    x = torch.rand(6, 3, requires_grad=True)
    u = model(x)
    slope = torch.autograd.grad(u.sum(), x, create_graph=True)[0]
    bend = torch.autograd.grad(slope.sum(), x, create_graph=True)[0]
    loss = (bend - u).square().mean()
    loss.backward()
    return loss


def rows_of_a_jacobian(model, optimizer):
    out = model(torch.randn(2, 3))
    for row in torch.eye(2):
        out.backward(gradient=row[:, None], retain_graph=True)
    return out.mean()


HEALTHY = [
    micro_batches, two_losses_of_one_trunk, terms_of_one_pass_in_a_loop, truncated_in_time, one_penalty_for_all,
    one_loss_for_each_layer_in_turn, cleared_between, cleared_by_hand, physics, rows_of_a_jacobian,
]  # fmt: skip


@pytest.mark.parametrize("run", HEALTHY, ids=lambda run: run.__name__)
def test_what_is_walked_once(run):
    assert not ids(verdicts(run))


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_gradient_that_is_differentiated():
    assert not ids(verdicts(differentiated_twice))


def not_at_all(p):
    """The planted one."""


@pytest.mark.parametrize("divide", [lambda p: p.grad.div_(4), lambda p: p.grad.mul_(0.25), not_at_all])
def test_gradients_may_be_divided_after_the_last_backward(divide):
    def run(model, optimizer):
        for _ in range(4):
            loss = loss_of(model)
            loss.backward()
        for p in model.parameters():
            divide(p)
        return loss

    found = [verdict.id for verdict in verdicts(run) if verdict.verdict == "confirmed"]
    assert found == (["grad-accumulation-error/not-divided"] if divide is not_at_all else [])


@pytest.mark.parametrize(
    "make, clips, level",
    [
        (lambda p: torch.optim.Adam(p), False, "note"),
        (lambda p: torch.optim.AdamW(p), False, "note"),  # its decay is no part of the gradient
        (lambda p: torch.optim.Adam(p), True, "warning"),
        (lambda p: torch.optim.Adam(p, weight_decay=0.1), False, "warning"),
        (lambda p: torch.optim.SGD(p, lr=1.0), False, "problem"),
    ],
)
def test_what_a_sum_in_place_of_a_mean_does_depends_on_who_steps(make, clips, level):
    """MAML adds up the gradients of its tasks, and Adam makes the same step of a sum and of a mean."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = make(model.parameters())

    def step():
        optimizer.zero_grad()
        for _ in range(6):
            loss = loss_of(model)
            loss.backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return loss.detach()

    found = examine(do_micro_batches_add_up, model, optimizer, step, steps=1)
    [said] = [verdict for verdict in found if verdict.verdict == "confirmed"]
    assert (said.id, said.level) == ("grad-accumulation-error/not-divided", level)
    assert ("the step is the same" in said.evidence[1]) == (level == "note")


@pytest.mark.parametrize("moves", [True, False])
def test_a_gradient_that_only_leads_to_where_the_next_is_taken(moves):
    """Sharpness-aware training: up the first gradient, and the second from there: nothing adds up or is lost."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    memory = {}

    def step():
        before = [p.detach().clone() for p in model.parameters()]
        for turn in range(2):
            loss = loss_of(model)
            loss.backward()
            with torch.no_grad():
                for p, old in zip(model.parameters(), before, strict=True):
                    if moves:
                        p.add_(p.grad, alpha=0.05) if turn == 0 else p.copy_(old)
            if turn == 0:
                optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    assert not ids(examine(do_micro_batches_add_up, model, optimizer, step, steps=1, memory=memory))
    assert memory.get("noted", {}).get("moved_between_backwards", False) == moves


TEXT = torch.randint(1, 9, (8, 12))


@pytest.mark.parametrize(
    ("kept", "by_sum", "level"),
    [((12, 12, 1, 1), False, "problem"), ((12, 12, 4, 4), False, "warning"), ((12, 10, 9, 12), False, ""),
     ((12, 12, 1, 1), True, "")],
)  # fmt: skip
def test_targets_of_short_and_of_long_micro_batches(kept, by_sum, level):
    """Each micro-batch is averaged by itself, or all are added up and divided by the number of targets."""
    model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 9))

    def run(model, optimizer):
        for part, count in enumerate(kept):
            text = TEXT[2 * part : 2 * part + 2]
            targets = text.roll(-1, 1).masked_fill(torch.arange(12) >= count, -100)
            how = {"reduction": "sum"} if by_sum else {}
            loss = F.cross_entropy(model(text).flatten(0, 1), targets.flatten(), **how)
            loss = loss / (2 * sum(kept) if by_sum else len(kept))
            loss.backward()
        return loss

    found = [v for v in verdicts(run, model) if v.verdict == "confirmed"]
    assert [(v.id, v.level) for v in found] == (
        [("grad-accumulation-error/unequal-shares", level)] if level else []
    )
