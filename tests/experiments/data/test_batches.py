"""Batches that do not represent the data, over a dozen taped steps, and batches that do."""

import pytest
import torch
import torch.nn.functional as F
from experiment_steps import evidence_of
from torch import nn

from gradproof.experiments.data.batches import do_batches_differ

DATA, LABELS = torch.randn(600, 5), torch.arange(600) % 3


def last_verdict(step, count=12):
    """The last verdict after so many steps, each a function of its number."""
    memory, said = {}, None
    model = nn.Linear(5, 3)
    for number in range(count):
        for said in do_batches_differ(evidence_of(model, lambda n=number: step(model, n), number, memory)):  # noqa: B007
            pass
    return said


def take(model, rows, labels=LABELS):
    return F.cross_entropy(model(DATA[rows]), labels[rows])


def test_shuffled_batches_are_excluded():
    order = torch.randperm(600)
    said = last_verdict(lambda model, n: take(model, order[30 * n : 30 * n + 30]))
    assert said.verdict == "excluded" and said.family == "data-order-or-sampling"


@pytest.mark.parametrize(
    "rows, id",
    [
        (lambda n: torch.arange(30), "same-batch"),
        (lambda n: torch.randint(0, 30, (30,)), "few-samples"),
        (lambda n: torch.arange(30) + 30 * (n // 2), "batches-repeated"),
    ],
)
def test_few_rows_of_many(rows, id):
    said = last_verdict(lambda model, n: take(model, rows(n)))
    assert said.id == f"data-order-or-sampling/{id}" and "test_batches.py" in said.where


def test_a_fixed_part_of_the_data_may_be_all_that_is_trained_on():
    labelled = torch.randperm(600)[:30]  # few labels, known before training
    assert last_verdict(lambda model, n: take(model, labelled)).verdict == "excluded"  # labels are mixed
    said = last_verdict(lambda model, n: take(model, slice(0, 30)))  # or the counter was forgotten
    assert (said.id, said.level) == ("data-order-or-sampling/same-batch", "warning")


def test_labels_sorted_or_rare():
    in_order = LABELS.sort().values
    said = last_verdict(lambda model, n: take(model, torch.arange(45) + 45 * n, in_order))
    assert said.id == "data-order-or-sampling/sorted-by-class"
    rare = (torch.arange(600) % 40 == 0).long()
    said = last_verdict(lambda model, n: take(model, torch.randperm(600)[:40], rare))
    assert said.id == "data-order-or-sampling/imbalance" and said.level == "warning"


def test_a_generator_seeded_at_every_step():
    def step(model, n, seed):
        noise = torch.randn(30, 5, generator=torch.Generator().manual_seed(seed))
        return F.cross_entropy(model(DATA[30 * n : 30 * n + 30] + noise), LABELS[30 * n : 30 * n + 30])

    assert last_verdict(lambda model, n: step(model, n, 3)).id == "data-order-or-sampling/seeded-every-step"
    assert not last_verdict(lambda model, n: step(model, n, n)).id


def test_a_fixed_part_of_the_task_may_be_drawn_anew():
    def step(model, n):
        fixed = torch.randn(5, 5, generator=torch.Generator().manual_seed(7))
        x = torch.randn(30, 5) @ fixed
        return F.cross_entropy(model(x), x[:, :3].argmax(1))

    said = last_verdict(step)
    assert said is None or not said.id


def test_data_of_few_kinds_is_no_fault():
    table = torch.randint(0, 2, (600, 5)).float()[:, [0, 0, 0, 1, 1]]
    order = torch.randperm(600)

    def step(model, n):
        rows = order[30 * n : 30 * n + 30]
        return F.cross_entropy(model(table[rows]), table[rows, 0].long())

    said = last_verdict(step)
    assert said is None or not said.id


def test_the_whole_data_as_one_batch_is_well():
    assert not last_verdict(lambda model, n: F.cross_entropy(model(DATA), LABELS)).id


@pytest.mark.parametrize("made_before", [True, False])
@pytest.mark.parametrize("rows", [torch.arange(30), (torch.arange(30) + 15) % 30])
def test_labels_of_a_contrastive_loss_are_no_data(made_before, rows):
    """Each row's partner, counted in the step or once before all of them; the samples come again among others."""

    few = DATA[:60].clone()

    def step(model, n):
        z = model(few[torch.randperm(60)[:30]])
        return F.cross_entropy(z @ z.T, rows if made_before else rows + torch.zeros_like(rows))

    said = last_verdict(step)
    assert said is None or not said.id


def test_pairs_that_change_and_targets_that_depend_on_the_rest_of_the_batch():
    """Distances of all pairs in a batch: each row of the target is another one whenever its node comes again."""
    nodes = DATA[:40].clone()
    distances = torch.cdist(nodes, nodes)

    def of_pairs(model, n):
        rows = torch.randperm(40)[:20]
        points = model(nodes[rows])
        return F.mse_loss(torch.cdist(points, points), distances[rows][:, rows])

    said = last_verdict(of_pairs)
    assert said is None or said.verdict != "confirmed"

    def shuffled_apart(model, n):
        rows = torch.randperm(40)[:20]
        return F.mse_loss(model(nodes[rows]), nodes[rows[torch.randperm(20)]][:, :3])

    assert last_verdict(shuffled_apart).id == "data-target-misaligned/pairs-change"


def test_what_the_same_inputs_are_trained_for_next_are_other_pairs():
    """First to give values back, then to name classes, as a head on an encoder is trained."""
    nodes, values, classes = DATA[:40].clone(), torch.randn(40, 3), torch.arange(40) % 3

    def one_after_the_other(model, n):
        rows = torch.randperm(40)[:20]
        if n < 6:
            return F.mse_loss(model(nodes[rows]), values[rows])
        return F.cross_entropy(model(nodes[rows]), classes[rows])

    said = last_verdict(one_after_the_other)
    assert said is None or said.verdict != "confirmed"


@pytest.mark.parametrize("apart", [False, True])
def test_samples_that_come_again_in_another_task_have_the_targets_of_that(apart):
    """Sines of one grid, as meta-learning draws them: a few steps on each."""
    grid = DATA[:40].clone()
    tasks = [grid[:, :3] * torch.randn(3) for _ in range(4)]

    def step(model, n):
        rows = torch.randperm(40)[:30]
        return F.mse_loss(model(grid[rows]), tasks[n // 4][rows[torch.randperm(30)] if apart else rows])

    said = last_verdict(step, 16)
    assert (said is not None and said.id == "data-target-misaligned/pairs-change") == apart


@pytest.mark.parametrize("apart", [False, True])
def test_players_that_take_turns_on_the_same_samples_want_something_else_of_them(apart):
    """An actor's old log-probabilities and a critic's returns, both compared by one helper's difference."""
    states, actor, critic = DATA[:40].clone(), nn.Linear(5, 1), nn.Linear(5, 1)
    choices = -torch.rand(40, 1).round(decimals=1)  # few different ones, as of a policy of two actions
    returns = choices[torch.randperm(40)] - 0.5

    def away(one, other):
        return (one - other).square().mean()

    def step(n):
        rows = torch.randperm(40)[:20]
        theirs = rows[torch.randperm(20)] if apart else rows
        if n % 2:
            return away(actor(states[rows]), choices[theirs])
        return away(critic(states[rows]), returns[theirs])

    memory, said = {}, set()
    for n in range(16):
        evidence = evidence_of(nn.ModuleList([actor, critic]), lambda n=n: step(n), n, memory)
        said |= {verdict.id for verdict in do_batches_differ(evidence) if verdict.verdict == "confirmed"}
    assert said == ({"data-target-misaligned/pairs-change"} if apart else set())


def test_several_epochs_on_one_rollout_are_meant():
    """What is there from step to step was not fetched twice."""
    torch.manual_seed(0)
    rollouts = [torch.randn(30, 5) for _ in range(20)]
    labels = torch.randint(0, 3, (30,))

    def step(model, n):
        return F.cross_entropy(model(rollouts[n // 3]), labels)

    assert not last_verdict(step).id
