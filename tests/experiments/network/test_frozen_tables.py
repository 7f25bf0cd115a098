"""Tables of random numbers that from_pretrained has frozen unasked, and tables that are frozen with good reason."""

import math
from contextlib import ExitStack
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from taped_trainings import examine, ids, plain_step
from torch import nn

from gradproof.experiments.network.frozen_tables import is_a_random_table_frozen, looks_drawn
from gradproof.probes.pretrained import frozen_by_default

USERS, ITEMS = 80, 60
ID = "param-not-updated/frozen-table"


class Factors(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.users, self.items = make(USERS), make(ITEMS)
        self.bias = nn.Embedding(USERS, 1)
        nn.init.zeros_(self.bias.weight)

    def forward(self, u, i):
        return (self.users(u) * self.items(i)).sum(-1) + self.bias(u).squeeze(-1)


def by_default(count):
    return nn.Embedding.from_pretrained(torch.randn(count, 6) * 0.3)


def with_a_word(count):
    return nn.Embedding.from_pretrained(torch.randn(count, 6) * 0.3, freeze=True)


def trained(count):
    return nn.Embedding.from_pretrained(torch.randn(count, 6) * 0.3, freeze=False)


def by_hand(count):
    return nn.Embedding(count, 6).requires_grad_(False)


def train(make, steps=24):
    generator = torch.manual_seed(0)
    u, v = torch.randn(USERS, 3, generator=generator), torch.randn(ITEMS, 3, generator=generator)
    session = SimpleNamespace(facts={})
    with ExitStack() as stack:
        frozen_by_default(session, stack, lambda _: True)
        model = Factors(make)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.02)

    def loss():
        a, b = (torch.randint(0, n, (128,), generator=generator) for n in (USERS, ITEMS))
        return nn.functional.mse_loss(model(a, b), (u[a] * v[b]).sum(-1))

    step = plain_step(model, optimizer, loss)
    return examine(is_a_random_table_frozen, model, optimizer, step, steps=steps, facts=session.facts)


def test_an_initialisation_that_is_frozen():
    said = train(by_default)[-1]
    line = by_default.__code__.co_firstlineno + 1
    assert said.id == ID and said.level == "problem"
    assert said.where == f"users (test_frozen_tables.py:{line})"


@pytest.mark.parametrize("make", [with_a_word, trained, by_hand])
def test_what_was_asked_for(make):
    assert not train(make, steps=10)


def test_what_is_noted_and_that_nothing_stays_behind():
    before, session = vars(nn.Embedding)["from_pretrained"], SimpleNamespace(facts={})
    table = torch.randn(20, 4)

    class Words(nn.Embedding):
        pass

    def make(given):
        return Words.from_pretrained(given, padding_idx=0)

    with ExitStack() as stack:
        frozen_by_default(session, stack, lambda _: True)
        words = make(table)
        bag = nn.EmbeddingBag.from_pretrained(torch.randn(20, 4), mode="sum")
        nn.Embedding.from_pretrained(table, True)
    noted = session.facts["_frozen_by_default"]
    assert type(words) is Words and words.padding_idx == 0 and bag.mode == "sum"
    assert all(entry["weight"]() is made.weight for entry, made in zip(noted, (words, bag), strict=True))
    assert [entry["given"] for entry in noted] == [True, False]
    assert vars(nn.Embedding)["from_pretrained"] is before


def reservoir_of_words(given, steps=12):
    """Random vectors under a trained head: what they are a table of is linear in them, and is learned."""
    torch.manual_seed(0)
    table = torch.randn(50, 8)
    meaning = table @ torch.randn(8)
    made = nn.Embedding.from_pretrained(table)
    model = nn.Sequential(made, nn.Linear(8, 1))
    entry = {"weight": lambda: made.weight, "line": "words.py:3", "given": given}
    optimizer = torch.optim.Adam(model[1].parameters(), lr=0.3)

    def loss():
        words = torch.randint(0, 50, (64,))
        return nn.functional.mse_loss(model(words).squeeze(-1), meaning[words])

    facts = {"_frozen_by_default": [entry]}
    step = plain_step(model, optimizer, loss)
    return examine(is_a_random_table_frozen, model, optimizer, step, steps=steps, facts=facts)


def test_a_table_that_somebody_else_holds_or_that_serves_is_no_problem():
    assert not ids(reservoir_of_words(given=True), level="problem")
    late = reservoir_of_words(given=False, steps=40)[-1:]
    assert not ids(late, level="problem")


def sinusoids(rows, columns):
    rates = torch.exp(-math.log(1e4) * torch.arange(0, columns, 2) / columns)
    phases = torch.arange(rows)[:, None] * rates
    return torch.cat([phases.sin(), phases.cos()], 1)


def vectors_of_words():
    """Two hundred words of ten topics."""
    return torch.randn(10, 16).repeat(20, 1) + 0.3 * torch.randn(200, 16)


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.randn(200, 12) * 0.1,
        lambda: nn.init.xavier_uniform_(torch.empty(200, 16)),
        lambda: nn.Embedding(100, 3).weight.detach(),
        lambda: torch.cat([torch.zeros(1, 8), torch.randn(64, 8)]),  # with padding
        lambda: torch.rand(3000, 64),
    ],
)
def test_fresh_draws(draw):
    torch.manual_seed(0)
    assert looks_drawn(draw())


@pytest.mark.parametrize(
    "table",
    [
        lambda: sinusoids(200, 16),
        lambda: vectors_of_words(),
        lambda: torch.eye(64),
        lambda: torch.linalg.svd(torch.randn(200, 40))[0][:, :16],
        lambda: torch.as_tensor(np.linalg.svd(vectors_of_words())[0][:, :8]),
        lambda: (
            torch.randn(200, 16) + torch.randn(16)
        ),  # columns with means of their own, as of trained vectors
        lambda: torch.randn(200, 16) * torch.rand(200, 1),  # and rows with sizes of their own
        lambda: torch.zeros(50, 4),
    ],
)
def test_tables_with_something_in_them(table):
    torch.manual_seed(0)
    assert not looks_drawn(table())


def flat():
    return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 20)), torch.randn(20, 16)


def over_images():
    body = [nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveMaxPool2d(1), nn.Flatten()]
    return nn.Sequential(*body, nn.Linear(16, 20)), torch.randn(20, 1, 6, 6)


@pytest.mark.parametrize("make", [flat, over_images])
@pytest.mark.parametrize("frozen", [(0, -1), (0,)], ids=["with the last layer", "without it"])
def test_a_frozen_last_layer_of_random_numbers(make, frozen):
    torch.manual_seed(0)
    model, classes = make()
    for place in frozen:
        model[place].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)

    def step():
        y = torch.randint(20, (32,), generator=generator)
        noise = torch.randn((32, *classes.shape[1:]), generator=generator)
        loss = nn.functional.cross_entropy(model(classes[y] + 0.2 * noise), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    found = examine(is_a_random_table_frozen, model, optimizer, step, steps=16)
    assert ids(found) == ({"param-not-updated/frozen-last-layer"} if -1 in frozen else set())
    last = f"{len(model) - 1}.weight"
    assert all(verdict.where.startswith(last) for verdict in found)
