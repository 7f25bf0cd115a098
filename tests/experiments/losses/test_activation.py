"""An output that does not fit its loss is found, one that fits is excluded."""

import pytest
import torch
import torch.nn.functional as F
from experiment_steps import confirmed_ids, evidence_of, excluded_families
from torch import nn

from gradproof.experiments.losses.activation import does_the_output_fit_the_loss

X, CLASS, VALUE = torch.randn(16, 5), torch.randint(0, 4, (16,)), torch.randn(16, 4)
YES = (VALUE > 0).float()
BAD = {
    "softmax-twice": lambda out: F.cross_entropy(out.softmax(1), CLASS),
    "missing-log": lambda out: F.nll_loss(out.softmax(1), CLASS),
    "nll-of-raw-scores": lambda out: F.nll_loss(out, CLASS),
    "bounded-scores": lambda out: F.cross_entropy(out.sigmoid(), CLASS),
    "relu-before-cross-entropy": lambda out: F.cross_entropy(out.relu(), CLASS),
    "sigmoid-twice": lambda out: F.binary_cross_entropy_with_logits(torch.sigmoid(out), YES),
    "softmax-of-one": lambda out: F.binary_cross_entropy(out[:, :1].softmax(1), YES[:, :1]),
    "relu-at-the-end": lambda out: F.mse_loss(torch.relu(out), VALUE),
    "hardtanh-at-the-end": lambda out: F.mse_loss(F.relu6(out), VALUE - 3),
    "tanh-at-the-end": lambda out: ((torch.tanh(out) - 5 * VALUE) ** 2).mean(),
    "sigmoid-at-the-end": lambda out: F.l1_loss(out.sigmoid().view(-1), VALUE.view(-1)),
}
GOOD = {
    "cross entropy": lambda out: F.cross_entropy(out, CLASS),
    "log twice": lambda out: F.cross_entropy(out.log_softmax(1), CLASS),
    "nll": lambda out: F.nll_loss(out.log_softmax(1), CLASS),
    "log of softmax": lambda out: F.nll_loss(torch.log(out.softmax(1) + 1e-9), CLASS),
    "bce": lambda out: F.binary_cross_entropy(out.sigmoid(), YES),
    "logits": lambda out: F.binary_cross_entropy_with_logits(out, YES),
    "relu of positive": lambda out: F.mse_loss(out.relu(), VALUE.abs()),
    "tanh of scaled": lambda out: F.mse_loss(out.tanh(), VALUE / 10),
    "relu6 of what it can put out": lambda out: F.mse_loss(F.relu6(out), 5 * YES),
    "soft targets": lambda out: F.cross_entropy(out, YES / 4),
}


def test_a_probability_picked_by_hand():
    model = nn.Linear(5, 4)
    rows = torch.arange(16)
    wrong = evidence_of(model, lambda: -model(X).softmax(1)[rows, CLASS].mean())
    right = evidence_of(model, lambda: -model(X).softmax(1)[rows, CLASS].log().mean())
    assert confirmed_ids(does_the_output_fit_the_loss, wrong) == ["loss-activation-mismatch/missing-log"]
    assert not confirmed_ids(does_the_output_fit_the_loss, right)


@pytest.mark.parametrize("name", BAD)
def test_a_mismatch_is_named(name):
    model = nn.Linear(5, 4)
    evidence = evidence_of(model, lambda: BAD[name](model(X)))
    assert confirmed_ids(does_the_output_fit_the_loss, evidence) == [f"loss-activation-mismatch/{name}"]


@pytest.mark.parametrize("end", [torch.tanh, torch.relu, F.softplus])
def test_scores_of_a_yes_or_no_must_be_free(end):
    model = nn.Linear(5, 4)
    bad = evidence_of(model, lambda: F.binary_cross_entropy_with_logits(end(model(X)), YES))
    assert confirmed_ids(does_the_output_fit_the_loss, bad) == ["loss-activation-mismatch/bounded-scores"]


def test_a_relu_before_targets_that_are_all_one_is_no_limit():
    model = nn.Linear(5, 4)
    step = evidence_of(model, lambda: F.binary_cross_entropy_with_logits(model(X).relu(), torch.ones(16, 4)))
    assert not confirmed_ids(does_the_output_fit_the_loss, step)


@pytest.mark.parametrize("name", GOOD)
def test_a_fitting_end_is_excluded(name):
    model = nn.Linear(5, 4)
    evidence = evidence_of(model, lambda: GOOD[name](model(X)))
    assert not confirmed_ids(does_the_output_fit_the_loss, evidence)
    if name != "soft targets":  # no operation of which the tape knows the target
        assert excluded_families(does_the_output_fit_the_loss, evidence) == ["loss-activation-mismatch"]


def test_a_softmax_over_the_batch_is_not_said_to_make_rows_that_sum_to_one():
    """Over the classes each row sums to 1, and it is said; over the batch it is another sentence that is true."""
    for dim, said in ((1, True), (0, False)):
        model = nn.Sequential(nn.Linear(4, 3), nn.Softmax(dim))
        x, y = torch.randn(12, 4), torch.arange(12) % 3
        evidence = evidence_of(model, lambda: nn.functional.cross_entropy(model(x), y))  # noqa: B023
        (found,) = [v for v in does_the_output_fit_the_loss(evidence) if v.id]
        assert ("each row sums to 1" in found.evidence[0]) == said


IN_PLACE = {
    "relu-at-the-end": (lambda: nn.ReLU(inplace=True), lambda out: F.mse_loss(out.view(-1), VALUE.view(-1))),
    "hardtanh-at-the-end": (lambda: nn.Hardtanh(inplace=True), lambda out: F.mse_loss(out, 5 * VALUE)),
    "relu-before-cross-entropy": (lambda: nn.ReLU(inplace=True), lambda out: F.cross_entropy(out, CLASS)),
    "bounded-scores": (lambda: nn.Hardtanh(inplace=True), lambda out: F.cross_entropy(out.squeeze(), CLASS)),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_an_activation_in_place_is_seen(name):
    """It writes into what the layer made, and makes nothing of its own."""
    activation, loss = IN_PLACE[name]
    model = nn.Sequential(nn.Linear(5, 4), activation())
    evidence = evidence_of(model, lambda: loss(model(X)))
    assert confirmed_ids(does_the_output_fit_the_loss, evidence) == [f"loss-activation-mismatch/{name}"]


def test_an_activation_in_place_that_was_there_before_the_last_layer_is_not_the_last():
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(inplace=True), nn.Linear(8, 4))
    evidence = evidence_of(model, lambda: F.cross_entropy(model(X).view(-1, 4), CLASS))
    assert not confirmed_ids(does_the_output_fit_the_loss, evidence)


@pytest.mark.parametrize("inplace", [False, True])
def test_a_class_that_a_relu_has_cut_off_is_a_problem_of_its_own(inplace):
    """Its scores are 0 for all samples, those of it too; where each class has some above 0 it may yet do."""
    for bias, dead in ((-20.0, True), (5.0, False)):
        model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(inplace))
        nn.init.constant_(model[0].bias, 5.0)
        model[0].bias.data[2] = bias
        evidence = evidence_of(model, lambda: F.cross_entropy(model(X), CLASS))  # noqa: B023
        (found,) = [v for v in does_the_output_fit_the_loss(evidence) if v.id]
        assert found.id.endswith("relu-before-cross-entropy")
        assert found.if_troubled != dead and (found.confidence == "proven") == dead
        assert any("1 of 4 classes (2)" in line for line in found.evidence) == dead


def test_a_cut_off_class_that_no_target_is_of_is_not_missed():
    model = nn.Sequential(nn.Linear(5, 5), nn.ReLU())
    model[0].bias.data[4] = -20.0  # the targets are 0 to 3
    model[0].bias.data[:4] = 5.0
    evidence = evidence_of(model, lambda: F.cross_entropy(model(X), CLASS))
    (found,) = [v for v in does_the_output_fit_the_loss(evidence) if v.id]
    assert found.if_troubled
