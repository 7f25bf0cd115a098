"""Targets of other rows, targets made of noise, targets inside the input; and pairs that belong together."""

import pytest
import torch
import torch.nn.functional as F
from experiment_steps import confirmed_ids, evidence_of, excluded_families
from torch import nn

from gradproof.experiments.data import targets
from gradproof.experiments.data.targets import do_targets_belong_to_inputs
from gradproof.instruments import neighbours
from gradproof.instruments.neighbours import agreement, nearest_others
from gradproof.instruments.rows import inputs_of

X = torch.randn(200, 5, generator=torch.Generator().manual_seed(0))
Y = torch.arange(200) % 4


def test_rows_of_another_batch():
    model, order = nn.Linear(5, 4), torch.randperm(200)
    rows = order[20:50]
    wrong = evidence_of(model, lambda: F.cross_entropy(model(X[rows]), Y[20:50]))
    right = evidence_of(model, lambda: F.cross_entropy(model(X[rows]), Y[rows]))
    assert confirmed_ids(do_targets_belong_to_inputs, wrong) == [
        "data-target-misaligned/rows-of-another-batch"
    ]
    assert excluded_families(do_targets_belong_to_inputs, right)[0] == "data-target-misaligned"
    assert not confirmed_ids(do_targets_belong_to_inputs, right)
    chosen = evidence_of(model, lambda: F.cross_entropy(model(X[order[:30]]), Y[order[:30]]))
    assert not confirmed_ids(do_targets_belong_to_inputs, chosen)


def after_a_rollout(length, rows, memory=None):
    """A step on rows of data that have come a long way, as observations and returns of a rollout have."""
    model = nn.Linear(5, 4)

    def loss():
        x, y = X, Y
        for _ in range(length):
            x, y = x.clone(), y.clone()
        return F.cross_entropy(model(x[rows]), y[20:50])

    return evidence_of(model, loss, memory=memory)


def test_a_long_tape_is_left_and_a_short_one_judged(monkeypatch):
    monkeypatch.setattr("gradproof.experiments.data.targets.MOST_OPERATIONS", 2000)
    rows = torch.randperm(200)[20:50]
    (left,) = do_targets_belong_to_inputs(after_a_rollout(600, rows))
    assert left.verdict == "undecided" and "not done" in left.reason and "2000" in left.reason
    memory = {}
    assert confirmed_ids(do_targets_belong_to_inputs, after_a_rollout(20, rows, memory)) == [
        "data-target-misaligned/rows-of-another-batch"
    ]
    assert not list(do_targets_belong_to_inputs(after_a_rollout(600, rows, memory)))  # it stays said


def test_the_allowance_ends_with_the_question(monkeypatch):
    monkeypatch.setattr("gradproof.experiments.data.targets.MOST_OPERATIONS", 10)
    evidence = after_a_rollout(20, torch.arange(20, 50))
    assert [v.verdict for v in do_targets_belong_to_inputs(evidence)] == ["undecided"]
    target = evidence.flow.comparisons[0].target
    assert torch.equal(evidence.flow.values([target])[target], Y[20:50])


def test_of_nested_calls_the_last_outer_one_gives_the_inputs():
    first, second = nn.Sequential(nn.Sequential(nn.Linear(5, 4))), X[:30].clone()
    model = nn.Sequential(first)

    def loss():
        model(X[30:60])
        return F.mse_loss(model(second), torch.zeros(30, 4)) + model(X[30:60]).sum() * 0

    flow = evidence_of(model, loss).flow
    (inputs,) = {tuple(inputs_of(flow, comparison)) for comparison in flow.comparisons}
    assert [flow.tape.slots[slot].shape for slot in inputs] == [(30, 5)]
    assert torch.equal(flow.values(list(inputs))[inputs[0]], second)


def test_rows_of_many_samples_cast_to_sixteen_bits():
    many, labels = torch.randn(9000, 5), torch.arange(9000) % 4
    model, rows = nn.Linear(5, 4).bfloat16(), torch.randint(0, 9000, (32,))
    cast = lambda: model(many[rows].bfloat16()).float()  # noqa: E731
    right = evidence_of(model, lambda: F.cross_entropy(cast(), labels[rows]))
    wrong = evidence_of(model, lambda: F.cross_entropy(cast(), labels[torch.randint(0, 9000, (32,))]))
    assert not confirmed_ids(do_targets_belong_to_inputs, right)
    assert confirmed_ids(do_targets_belong_to_inputs, wrong) == [
        "data-target-misaligned/rows-of-another-batch"
    ]


def test_noise_that_nobody_has_seen():
    model = nn.Linear(5, 5)

    def step(fresh):
        noise = torch.randn_like(X)
        return F.mse_loss(model(X + noise), torch.randn_like(X) if fresh else noise)

    assert confirmed_ids(do_targets_belong_to_inputs, evidence_of(model, lambda: step(True))) == [
        "data-target-misaligned/fresh-noise"
    ]
    assert not confirmed_ids(do_targets_belong_to_inputs, evidence_of(model, lambda: step(False)))


def test_a_window_that_holds_its_target():
    series, model = torch.randn(300), nn.Linear(12, 1)
    starts = torch.randint(0, 250, (20,)).tolist()
    x = torch.stack([series[s : s + 12] for s in starts])

    def step(ahead):
        y = torch.stack([series[s + ahead] for s in starts])
        return evidence_of(model, lambda: ((model(x).squeeze(1) - y) ** 2).mean())

    assert confirmed_ids(do_targets_belong_to_inputs, step(11)) == [
        "data-target-misaligned/target-in-the-input"
    ]
    assert not confirmed_ids(do_targets_belong_to_inputs, step(12))


def test_a_window_that_holds_all_of_what_is_ahead():
    series, model = torch.randn(300), nn.Linear(24, 6)
    starts = torch.randint(0, 250, (20,)).tolist()
    x = torch.stack([series[s : s + 24] for s in starts])

    def step(ahead):
        y = torch.stack([series[s + ahead : s + ahead + 6] for s in starts])
        return evidence_of(model, lambda: F.mse_loss(model(x), y))

    assert confirmed_ids(do_targets_belong_to_inputs, step(18)) == [
        "data-target-misaligned/target-in-the-input"
    ]
    assert not confirmed_ids(do_targets_belong_to_inputs, step(24))  # the next ones
    assert not confirmed_ids(do_targets_belong_to_inputs, step(20))  # some of them


def test_a_sample_that_is_asked_back_with_what_it_is_told_beside_it():
    model, label = nn.Linear(15, 5), torch.eye(10)[torch.randint(0, 10, (200,))]
    told = torch.cat([X, label], 1)
    assert not confirmed_ids(
        do_targets_belong_to_inputs, evidence_of(model, lambda: F.mse_loss(model(told), X))
    )


def test_an_autoencoder_has_its_input_as_target():
    model = nn.Linear(5, 5)
    assert not confirmed_ids(do_targets_belong_to_inputs, evidence_of(model, lambda: F.mse_loss(model(X), X)))


def test_neighbours_agree_or_not():
    y = (X[:, 0] > 0).long()
    assert agreement(X.double(), y.double(), True)[2] > 5
    assert abs(agreement(X.double(), y[torch.randperm(200)].double(), True)[2]) < 5


def test_shuffled_labels_are_suspected_late():
    y = (X[:, 0] > 0).long()
    model = nn.Linear(5, 2)
    nn.init.zeros_(model.weight)
    shuffled = y[torch.randperm(200, generator=torch.Generator().manual_seed(1))]
    late = [evidence_of(model, lambda t=t: F.cross_entropy(model(X), t), step=100) for t in (shuffled, y)]
    (said,) = [v for v in do_targets_belong_to_inputs(late[0]) if v.id]
    assert said.id == "data-target-misaligned/targets-independent-of-inputs" and said.if_troubled
    assert not confirmed_ids(do_targets_belong_to_inputs, late[1])


@pytest.mark.parametrize("apart", [False, True])
def test_of_many_rows_some_are_compared(apart, monkeypatch):
    """All the pixels of an image in one batch: their distances, each from each, fit into no memory."""
    compared = []
    monkeypatch.setattr(neighbours, "nearest_others", lambda x: compared.append(len(x)) or nearest_others(x))
    model = nn.Linear(2, 1)
    nn.init.zeros_(model.weight)
    tmp = torch.linspace(-1, 1, 100)
    places = torch.stack(torch.meshgrid(tmp, tmp, indexing="ij"), -1).reshape(-1, 2)
    values = (5 * places).sin().sum(1, keepdim=True)
    values = values[torch.randperm(len(values))] if apart else values
    late = evidence_of(model, lambda: F.mse_loss(model(places), values), step=100)
    said = [verdict.verdict for verdict in do_targets_belong_to_inputs(late) if "neighbours" in str(verdict)]
    assert compared and max(compared) < 2 * targets.MOST
    assert said == (["confirmed"] if apart else ["excluded"])


def test_numbers_of_rows_have_no_neighbours():
    """As in a contrastive loss: the right one of each row stands at its own place."""
    model = nn.Linear(5, 200)
    nn.init.zeros_(model.weight)
    rows = torch.randperm(200)
    assert not confirmed_ids(
        do_targets_belong_to_inputs, evidence_of(model, lambda: F.cross_entropy(model(X), rows), step=100)
    )


def test_labels_shuffled_before_training_are_suspected_though_every_row_is_its_own():
    model, answers = nn.Linear(5, 1), (X.sum(1) > 0).float()

    def say(labels):
        memory = {}
        for step in (30, 60, 100):
            rows = torch.arange(step, step + 100)

            def loss(rows=rows):
                return F.binary_cross_entropy_with_logits(model(X[rows]).squeeze(1), labels[rows])

            evidence = evidence_of(model, loss, step=step, memory=memory)
            found = list(do_targets_belong_to_inputs(evidence))
        return {(v.verdict, v.id or v.about) for v in found}

    torch.manual_seed(0)
    own = "data-target-misaligned/rows-of-another-batch"
    independent = "data-target-misaligned/targets-independent-of-inputs"
    with torch.no_grad():
        model.weight.zero_()
    assert say(answers[torch.randperm(200)]) == {("excluded", own), ("confirmed", independent)}
    assert say(answers) == {("excluded", own), ("excluded", independent)}


def test_each_micro_batch_has_targets_of_its_own():
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    parts = torch.randperm(200, generator=torch.Generator().manual_seed(1))[:90].split(30)

    def loss(shift=0):
        return sum(F.cross_entropy(model(X[rows]), Y[parts[k - shift]]) for k, rows in enumerate(parts))

    assert not confirmed_ids(do_targets_belong_to_inputs, evidence_of(model, loss))
    assert confirmed_ids(do_targets_belong_to_inputs, evidence_of(model, lambda: loss(1))) == [
        "data-target-misaligned/rows-of-another-batch"
    ]


def test_targets_that_a_network_computes_are_no_data():
    model, teacher = nn.Linear(5, 1), nn.Linear(5, 1)
    nn.init.zeros_(model.weight)
    noise = torch.randn(200, 1, generator=torch.Generator().manual_seed(2))

    def loss(bootstrapped):
        target = noise + 0.001 * teacher(X).detach() if bootstrapped else noise
        return F.mse_loss(model(X), target)

    assert not confirmed_ids(do_targets_belong_to_inputs, evidence_of(model, lambda: loss(True), step=100))
    assert confirmed_ids(do_targets_belong_to_inputs, evidence_of(model, lambda: loss(False), step=100))


def test_an_error_held_against_zeros_has_its_target_in_the_error():
    """zeros_like reads the shape of what came from the data, and none of its rows."""
    model, angles = nn.Linear(5, 1), X.sum(1, keepdim=True)
    rows = torch.randperm(200)[:40]

    def loss():
        error = torch.remainder(model(X[rows]) - angles[rows] + 3.0, 6.0) - 3.0
        return F.smooth_l1_loss(error, torch.zeros_like(error))

    assert not confirmed_ids(do_targets_belong_to_inputs, evidence_of(model, loss))


def test_two_networks_that_take_turns_have_neighbours_of_their_own():
    """A discriminator on images and a generator on noise, of other widths: each has too few samples for itself."""
    memory: dict = {}
    for width in (5, 3, 5, 3):
        model, x = nn.Linear(width, 4), X[:40, :width]
        evidence = evidence_of(model, lambda m=model, x=x: F.cross_entropy(m(x), Y[:40]), memory=memory)
        assert not confirmed_ids(do_targets_belong_to_inputs, evidence)
    assert len([key for key in memory if key.startswith("neighbours")]) == 2


def contrast(order, noise=0.3):
    """SimCLR: two views of each of 16 samples, stacked, or in two halves, as the loss wants them."""
    torch.manual_seed(0)
    model, samples = nn.Linear(12, 6), torch.randn(16, 12)
    views = [samples + noise * torch.randn(16, 12) for _ in range(2)]
    batch = torch.cat(views) if order == "halves" else torch.stack(views, 1).flatten(0, 1)

    def loss():
        z = F.normalize(model(batch), dim=1)
        scores = (z @ z.T / 0.2).masked_fill(torch.eye(32, dtype=torch.bool), -1e9)
        return F.cross_entropy(scores, (torch.arange(32) + 16) % 32)

    return confirmed_ids(do_targets_belong_to_inputs, evidence_of(model, loss))


def test_views_of_another_sample():
    assert contrast("neighbours") == ["data-target-misaligned/views-of-another-sample"]
    assert contrast("halves") == []
    assert contrast("neighbours", noise=3.0) == []  # nobody can tell who belongs to whom


def distil(order, computed=False):
    torch.manual_seed(0)
    model, teacher, x = nn.Linear(5, 4), nn.Linear(5, 4), torch.randn(200, 5)
    labels = (x @ torch.randn(5, 4)).argmax(1)
    stored = (4 * F.one_hot(labels, 4) + 0.5 * torch.randn(200, 4))[order]

    def loss():
        scores = model(x)
        with torch.no_grad():
            soft = (teacher(x) if computed else stored).softmax(1)
        divergence = F.kl_div(scores.log_softmax(1), soft, reduction="batchmean")
        return divergence + F.cross_entropy(scores, labels)

    return confirmed_ids(do_targets_belong_to_inputs, evidence_of(model, loss))


def test_stored_targets_of_other_samples():
    shuffled = torch.randperm(200, generator=torch.Generator().manual_seed(0))
    assert distil(shuffled) == ["data-target-misaligned/two-targets"]
    assert distil(torch.arange(200)) == []
    assert distil(shuffled, computed=True) == []  # a teacher that knows nothing yet
