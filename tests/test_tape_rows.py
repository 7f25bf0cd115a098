"""The batch row behind a NaN where every result depends on the whole batch: found by replacing rows."""

import pytest
import torch
from torch import nn

from gradproof.tape import halving
from gradproof.tape.locate import find_first_bad_operation
from gradproof.tape.record import record

BATCH = 37


class BatchSum(nn.Module):
    """A sum over the batch overflows: no single element of it is bad."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x):
        h = self.linear(x)
        total = h.abs().sum() / 100
        return self.norm(h).square().mean() + total.exp()


class Flagged(nn.Module):
    """Finite forward; the slope of the root is 1 / 0 when a row of the batch is flagged."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        flagged = (x[:, 0] > 1e3).sum()
        h = self.linear(x / x.abs().amax(1, keepdim=True))
        room = h.square().mean() * 0 + 1 - flagged.clamp(max=1)
        return h.square().mean() + room.sqrt()


class OwnFault(nn.Module):
    """Bad whatever the batch is."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return (self.linear(x).sum() * 0).log()


def located(model, rows):
    torch.manual_seed(0)
    x = torch.randn(BATCH, 4)
    for row in rows:
        x[row, 0] = 1e5
    with record({p: n for n, p in model.named_parameters()}) as tape:
        model(x).backward()
    assert not tape.broken
    return tape, find_first_bad_operation(tape)


@pytest.mark.parametrize("kind, phase", [(BatchSum, "forward"), (Flagged, "backward")])
@pytest.mark.parametrize("rows", [[0], [21], [36], [5, 30]])
def test_rows_are_found_by_halving(kind, phase, rows, monkeypatch):
    replays, result_is_bad = [], halving._result_is_bad
    monkeypatch.setattr(halving, "_result_is_bad", lambda *args: replays.append(0) or result_is_bad(*args))
    _, bad = located(kind(), rows)
    assert bad.phase == phase
    assert bad.rows.startswith(f"batch row {', '.join(map(str, rows))} of input")
    assert len(replays) <= 14 * len(rows)  # 2 log₂ 37 = 10.4, and what finds good rows to begin with


def test_healthy_batches_and_faults_of_the_model_name_no_row():
    assert located(BatchSum(), [])[1] is None
    assert located(Flagged(), [])[1] is None
    assert located(OwnFault(), [])[1].rows == ""


def test_views_of_one_memory_are_replaced_together():
    torch.manual_seed(0)
    tok = nn.Embedding(50, 4)
    ids = torch.randint(0, 49, (8, 6))
    ids[3, 2] = 49
    with torch.no_grad():
        tok.weight[49] = 1e4
    with record({p: n for n, p in tok.named_parameters()}) as tape:
        guess, wanted = tok(ids[:, :-1]), tok(ids[:, 1:])
        ((guess - wanted).abs().sum() / 100).exp().backward()
    assert "batch row 3 of" in find_first_bad_operation(tape).rows
