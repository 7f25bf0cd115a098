"""Labels in the order of ids under features in the order of their appearance, and orders that are meant."""

from pathlib import Path

import pytest
import torch
from taped_trainings import examine, ids, plain_step
from torch import nn

from gradproof.experiments.data.other_order import are_targets_in_another_order
from gradproof.probes.orders import ids_of, orders_kept, values_as_long

ID = "data-target-misaligned/other-order"
ROWS = 400


class Papers:
    """Features in the order of `index`; labels in that order too, or in the order of the ids."""

    def __init__(self, right, keep_index=True):
        generator = torch.manual_seed(0)
        topic = torch.randint(0, 4, (ROWS,), generator=generator)
        words = 2 * torch.randn(4, 10, generator=generator)[topic] + torch.randn(
            ROWS, 10, generator=generator
        )
        seen = torch.randperm(ROWS, generator=generator).tolist()
        if keep_index:
            self.index = {f"paper {1000 + id}": row for row, id in enumerate(seen)}
        self.x = words[seen]
        self.y = topic[seen] if right else topic


def train(papers, way="whole", order=None):
    torch.manual_seed(0)
    orders = list(orders_kept())
    facts = {"_orders": orders, "_ordered_targets": list(values_as_long({len(o["places"]) for o in orders}))}
    model = nn.Linear(10, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    chosen = torch.randperm(ROWS)[:200]

    def loss():
        if way == "whole":
            return nn.functional.cross_entropy(model(papers.x), papers.y)
        if way == "masked":
            return nn.functional.cross_entropy(model(papers.x)[chosen], papers.y[chosen])
        if way == "rows":
            return nn.functional.cross_entropy(model(papers.x[chosen]), papers.y[chosen])
        return nn.functional.cross_entropy(model(papers.x)[order], papers.y)  # told who belongs to whom

    step = plain_step(model, optimizer, loss)
    return examine(are_targets_in_another_order, model, optimizer, step, 2, facts=facts)


@pytest.mark.parametrize("way", ["whole", "masked", "rows"])
def test_labels_in_the_order_of_the_ids(way):
    (said,) = train(Papers(right=False), way)
    lines = Path(__file__).read_text().splitlines()
    line = next(n for n, text in enumerate(lines, 1) if "self.y = " in text)
    assert said.id == ID and said.level == "problem" and "papers.index" in said.evidence[0]
    assert said.where == f"test_other_order.py:{line}"


@pytest.mark.parametrize("way", ["whole", "masked", "rows"])
def test_labels_in_the_order_of_the_features(way):
    assert not ids(train(Papers(right=True), way))


def test_labels_that_no_order_puts_right():
    assert not ids(train(Papers(right=False, keep_index=False)))
    papers = Papers(right=True)
    papers.y = torch.randint(0, 4, (ROWS,))  # a control: labels of chance
    assert not ids(train(papers))


def test_an_order_that_the_network_follows():
    papers = Papers(right=True)
    order = torch.randperm(ROWS)
    papers.y = papers.y[order]
    assert not ids(train(papers, "told", order))


def test_what_is_an_order():
    numbers = list(range(ROWS))
    assert ids_of(numbers[::-1])[0] == ROWS - 1
    assert list(ids_of({name: row for row, name in enumerate(numbers[::-1])})[:2]) == [ROWS - 1, ROWS - 2]
    for other in (
        numbers[:50],
        [0.5] * ROWS,
        [1] * ROWS,
        dict.fromkeys(numbers, "a"),
        torch.rand(ROWS),
        "text",
        None,
    ):
        assert ids_of(other) is None
    assert not any(order["name"] == "numbers" for order in orders_kept())  # sorted
