"""What instruments measure, on steps in which one thing is planted, and on their healthy twins."""

import copy
import doctest

import pytest
import torch
import torch.nn.functional as F
from experiment_steps import evidence_of
from taped_trainings import evidence_of_step, plain_step
from torch import nn

from gradproof.instruments import arms, digits, hearing, rows, rules, update, weights
from gradproof.instruments.averages import find_followers
from gradproof.numerics import adam

DRAW = torch.Generator().manual_seed(0)
X, Y = torch.randn(20, 5, generator=DRAW), torch.randn(20, 3, generator=DRAW)
CLASS = torch.arange(20) % 3


@pytest.mark.parametrize("module", [adam, rules, update])
def test_examples_hold(module):
    found = doctest.testmod(module)
    assert found.attempted and not found.failed


@pytest.mark.parametrize("dtype, wrong", [(torch.bfloat16, True), (torch.float32, False)])
def test_what_is_computed_is_held_against_float64(dtype, wrong):
    model, times = nn.Linear(1, 1), torch.linspace(200.1, 300.7, 64)
    evidence = evidence_of(model, lambda: model(times.to(dtype)[:, None].sin().float()).square().mean())
    (wave,) = [op.makes[0] for op in evidence.forward if op.name == "sin"]
    (here, true) = digits.against_float64(evidence, [wave])[wave]
    assert true.dtype == torch.float64 and (digits.wrong_share(here, true, 0.1) > 0.5) == wrong


@pytest.mark.parametrize("dtype, lost", [(torch.bfloat16, True), (torch.float32, False)])
def test_what_is_stored_may_be_any_number_within_its_last_digit(dtype, lost):
    model, times = nn.Linear(1, 1), (300 * torch.rand(64)).to(dtype).float()
    evidence = evidence_of(model, lambda: model(times[:, None].sin()).square().mean())
    slot = next(slot.index for slot in evidence.tape.inputs if slot.shape == (64,))
    (wave,) = [op.makes[0] for op in evidence.forward if op.name == "sin"]
    ((one, other),) = digits.within_the_last_digit(evidence, slot, times, dtype, [wave]).values()
    assert (digits.wrong_share(one, other, 0.1) > 0.2) == lost


@pytest.mark.parametrize("rate, all_stay", [(1e-6, True), (10.0, False)])
def test_updates_below_the_last_digit_are_counted(rate, all_stay):
    model = nn.Linear(5, 3).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    loss = lambda: F.mse_loss(model(X.bfloat16()), Y.bfloat16())  # noqa: E731
    found = list(digits.swallowed_updates(evidence_of(model, loss, optimizer=optimizer)))
    assert len(found) == 2 and all((each.stay > 0.9 * each.wanted) == all_stay for each in found)


def test_nan_is_wrong_and_nothing_is_not():
    one = torch.ones(4)
    assert digits.wrong_share(one * torch.nan, one, 0.5) == 1 and digits.wrong_share(one, one, 0.0) == 0
    assert digits.wrong_share(torch.zeros(0), torch.zeros(0), 0.1) == 0


@pytest.mark.parametrize("decay, taken", [(0.1, 0.01), (0.0, None)])
def test_what_a_decay_takes_off(decay, taken):
    model = nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=decay)
    found = update.shrinkage(evidence_of(model, lambda: F.mse_loss(model(X), Y), optimizer=optimizer))
    assert [each.share for each in found] == ([pytest.approx(taken)] if taken else [])


def test_adams_direction_is_torchs():
    torch.manual_seed(0)
    weight = torch.zeros(8, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([weight], lr=1.0, betas=(0.8, 0.95), eps=1e-3)
    for step in range(1, 4):
        before, weight.grad = weight.detach().clone(), torch.randn(8, dtype=torch.float64)
        optimizer.step()
        state = optimizer.state[weight]
        way = adam.adam_direction(state["exp_avg"], state["exp_avg_sq"], step, (0.8, 0.95), 1e-3)
        assert torch.allclose(before - way, weight.detach(), rtol=0, atol=1e-12)
        for wrong in ({"corrected": (True, False)}, {"eps_inside": True}, {"rooted": False}):
            other = adam.adam_direction(
                state["exp_avg"], state["exp_avg_sq"], step, (0.8, 0.95), 1e-3, **wrong
            )
            assert not torch.allclose(way, other, rtol=1e-4)


@pytest.mark.parametrize("keep, take, limit", [(0.9, 0.1, 1.0), (0.1, 0.1, 1 / 9), (0.9, 0.9, 9.0)])
def test_the_formula_of_an_average_is_read(keep, take, limit):
    model = nn.Linear(5, 3)
    average, optimizer = copy.deepcopy(model), torch.optim.SGD(model.parameters(), lr=0.1)
    train = plain_step(model, optimizer, lambda: F.mse_loss(model(X), Y))

    def step():
        train()
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                slow.mul_(keep).add_(fast, alpha=take)

    found = list(find_followers(evidence_of_step(step, {"model": model, "average": average}, [optimizer])))
    assert [(each.keep, each.take) for each in found] == [(keep, take)] * 2
    assert all(each.limit == pytest.approx(limit) and each.averages == (limit == 1) for each in found)


def test_entries_that_do_not_count_pull_nothing():
    model, wanted = nn.Linear(5, 3), torch.where(torch.arange(20) < 8, -100, CLASS)
    evidence = evidence_of(model, lambda: F.cross_entropy(model(X), wanted))
    (comparison,) = evidence.flow.comparisons
    pulls = weights.pull(evidence, comparison.prediction).abs().sum(1) > 0
    assert pulls.tolist() == (torch.arange(20) >= 8).tolist()


def backwards(losses_of):
    model = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        for loss in losses_of(model):
            loss.backward(retain_graph=True)
        optimizer.step()

    evidence = evidence_of_step(step, {"": model}, [optimizer])
    walks = weights.count_walks(evidence)
    return walks.times, weights.have_passes_of_their_own(evidence, evidence.tape.top_backwards)


def parts(model):
    return [F.mse_loss(model(x), y) for x, y in zip(X.split(5), Y.split(5), strict=True)]


def running_sums(model):
    total = torch.zeros(())
    for loss in parts(model):
        total = total + loss
        yield total


def terms_of_one_pass(model):
    out = model(X)
    return [out.square().mean(), out.abs().mean()]


def test_how_often_each_loss_counts():
    assert backwards(parts) == ([1, 1, 1, 1], True)
    assert backwards(running_sums) == ([4, 3, 2, 1], False)
    assert backwards(terms_of_one_pass) == ([1, 1], False)


def test_a_loss_is_taken_apart_into_what_its_entries_count():
    model = nn.Linear(5, 3)
    loss = lambda: F.mse_loss(model(X), Y) + 0.5 * model(X).square().sum() / 20  # noqa: E731
    evidence = evidence_of(model, loss)
    terms = weights.take_apart(evidence.flow, evidence.tape.loss_slots[0])
    assert sorted((term.mean, term.weight) for term in terms) == [
        (False, 0.025),
        (True, pytest.approx(1 / 60)),
    ]


@pytest.mark.parametrize("middle, alone", [(lambda h: h.softmax(1), True), (lambda h: h.softmax(0), False)])
def test_who_hears_whom(middle, alone):
    """Samples apart: only the diagonal moves; a softmax over the batch carries each to all."""
    first, last = nn.Linear(5, 4), nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))
    model = nn.ModuleList([first, last])
    evidence = evidence_of(model, lambda: F.cross_entropy(last(middle(first(X))), CLASS))
    heard = hearing.who_hears_whom(evidence)
    assert heard.shape == (20, 20) and heard.dtype == torch.float64 and bool((heard.diag() > 0).all())
    assert bool((heard - heard.diag().diag() < 1e-12).all()) == alone  # of float64's last digits


def test_who_hears_whom_along_time():
    """Of a recurrence, what comes later; of nothing that can be exchanged, nothing."""
    torch.manual_seed(0)
    model, x = nn.GRU(5, 3, batch_first=True), torch.randn(4, 6, 5)
    evidence = evidence_of(model, lambda: F.mse_loss(model(x)[0], torch.ones(4, 6, 3)))
    heard = hearing.who_hears_whom(evidence, axis=1, end_axis=1)
    assert torch.equal(heard > 0, torch.ones(6, 6, dtype=torch.bool).triu())
    one = evidence_of(model, lambda: F.mse_loss(model(x[:1])[0], torch.ones(1, 6, 3)))
    assert hearing.who_hears_whom(one).numel() == 0


def handled(between=lambda parameters: None, scale=1.0):
    """How a run treats its gradients, of which something is made between backward and the optimizer."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        (scale * F.mse_loss(model(X), 10 * Y)).backward()
        between(list(model.parameters()))
        optimizer.step()

    return arms.find_handling(evidence_of_step(step, {"": model}, [optimizer]))


def unscale(parameters):
    for parameter in parameters:
        parameter.grad.div_(1024.0)


def add_noise(parameters):
    for parameter in parameters:
        parameter.grad.add_(parameter.grad.roll(1, 0))


def test_the_control_arm_clips_and_scales_as_the_run_does():
    assert handled() == arms.Handling() == handled(lambda p: nn.utils.clip_grad_norm_(p, 1e6))
    clipped = handled(lambda p: nn.utils.clip_grad_norm_(p, 0.5))
    assert clipped.longest == pytest.approx(0.5, rel=1e-3) and clipped.scale == 1
    assert handled(unscale, scale=1024.0) == arms.Handling(scale=1 / 1024)
    assert handled(add_noise) is None  # something else: no arm is the run's


@pytest.mark.parametrize("clip, far", [(0.01, False), (None, True)])
def test_an_arm_goes_where_the_run_goes(clip, far):
    """At a rate of 8 the loss runs away, unless each step is clipped to a hundredth."""
    model = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=8.0)

    def step():
        optimizer.zero_grad()
        F.mse_loss(model(X), Y).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()

    evidence = evidence_of_step(step, {"": model}, [optimizer])
    start, _ = arms.gradient_at(evidence, {})
    handling = arms.find_handling(evidence)
    assert (arms.train(evidence, handling, 12) > 2 * start) == far
    assert arms.train(evidence, handling, 12, rate=0.02) < start


@pytest.mark.parametrize("mixed", [False, True])
def test_the_rows_of_the_data_that_a_batch_comes_from(mixed):
    torch.manual_seed(0)
    model, data, wanted = nn.Linear(5, 3), torch.randn(300, 5), torch.randn(300, 3)
    chosen = torch.randperm(300)[:20]
    taken = chosen.roll(1) if mixed else chosen
    evidence = evidence_of(model, lambda: F.mse_loss(model(data[chosen]), wanted[taken]))
    (comparison,) = evidence.flow.comparisons
    (given,) = evidence.flow.inputs
    ((one,), (other,)) = (rows.rows_behind(evidence, s).values() for s in (given, comparison.target))
    assert torch.equal(one, chosen) and torch.equal(one, other) != mixed
