"""Patterns that are followed, what is chosen and weighed, neighbours, and the ledger of the batches."""

import torch
import torch.nn.functional as F
from experiment_steps import evidence_of
from torch import nn

from gradproof.instruments.choices import policy_terms, weighs_choices
from gradproof.instruments.ledger import remember_batch
from gradproof.instruments.neighbours import agreement, nearest_others
from gradproof.instruments.rows import inputs_of
from gradproof.instruments.walk import users

X, Y = torch.randn(20, 5), torch.randn(20, 3)


def test_a_pattern_is_followed_through_views_and_ends_where_it_breaks():
    model = nn.Linear(5, 3)
    flow = evidence_of(model, lambda: (model(X).sigmoid().view(-1).exp() - Y.view(-1)).square().mean()).flow
    (exp,) = [op for op in flow.operations if op.name == "exp"]
    sigmoid = flow.follow(exp.makes[0], {"exp"}, {"sigmoid"})
    assert sigmoid is not None and sigmoid.name == "sigmoid"
    assert flow.follow(exp.makes[0], {"exp"}, {"addmm"}) is None  # there is a sigmoid between
    assert flow.follow(exp.makes[0], {"addmm"}, through={"exp", "view", "sigmoid"}).name == "addmm"
    assert [op.name for op in users(flow, sigmoid.makes, {"view", "exp"})] == ["sub"]


def test_what_parameters_have_a_part_in_is_learned():
    model, teacher = nn.Linear(5, 3), nn.Linear(5, 3)
    for target, learned in ((lambda: Y, False), (lambda: teacher(X).detach(), True)):
        both = nn.ModuleList([model, teacher])
        flow = evidence_of(both, lambda t=target: F.mse_loss(model(X), t())).flow
        (comparison,) = flow.comparisons
        assert flow.is_learned(comparison.target) is learned
        assert inputs_of(flow, comparison) == flow.inputs[:1]


def test_what_was_chosen_is_known_by_what_it_is_made_of():
    model, done, gain = nn.Linear(5, 3), torch.randint(0, 3, (20,)), torch.randn(20)
    policy = lambda: torch.distributions.Categorical(logits=model(X)).log_prob(done)  # noqa: E731
    flow = evidence_of(model, lambda: -(policy() * gain).mean()).flow
    ((_, _, product),) = policy_terms(flow)
    assert product.name == "mul" and weighs_choices(flow)
    flow = evidence_of(model, lambda: (model(X)[:, 0] * gain).mean()).flow  # scores, not probabilities
    assert not policy_terms(flow) and not weighs_choices(flow)


def test_neighbours_against_counting():
    x = torch.tensor([[0.0], [0.1], [5.0], [5.2], [9.0]])
    assert nearest_others(x).tolist() == [1, 0, 3, 2, 3]
    share, chance, z = agreement(x, torch.tensor([1, 1, 2, 2, 2]), classes=True)
    assert share == 1 and abs(chance - (4 + 9) / 25) < 1e-6 and z > 2


def test_the_ledger_knows_samples_again():
    model, data, memory = nn.Linear(5, 3), torch.randn(60, 5), {}
    for step, rows in enumerate((torch.arange(20), torch.arange(20).flip(0), torch.arange(20) + 20)):
        evidence = evidence_of(model, lambda r=rows: F.mse_loss(model(data[r]), Y), step, memory)
        batches = remember_batch(evidence)
    first, again, others = (sorted(batch.prints) for batch in batches)
    assert first == again and not set(first) & set(others)
    assert {batch.held for batch in batches} == {60} and not (batches[0].prints == batches[1].prints).any()
