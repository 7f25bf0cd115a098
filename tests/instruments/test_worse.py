"""Which samples are worse off: those of one source, and none where all are."""

import pytest
import torch
import torch.nn.functional as F
from taped_trainings import evidence_of_step
from torch import nn

from gradproof.examination.worker import Worker
from gradproof.instruments import worse
from gradproof.instruments.worse import who_loses
from gradproof.tape.specimen import save


class Stations(nn.Module):
    """Readings of four stations, of which each is known by its number: their class, or their level."""

    def __init__(self, classes):
        super().__init__()
        self.station, self.read = nn.Embedding(4, 8), nn.Linear(6, 8)
        self.out = nn.Linear(8, classes)

    def forward(self, x, station):
        return self.out(torch.tanh(self.read(x) + self.station(station)))


def steps_of(classes, wrong, count=60):
    """Recorded steps of a training whose targets go wrong, in its last third, where `wrong` says so."""
    torch.manual_seed(0)
    model = Stations(classes)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    truth = torch.randn(6, classes)
    kept = []
    for number in range(count):
        x, station = torch.randn(32, 6), torch.randint(0, 4, (32,))
        score = (x @ truth).tanh() * 3
        bad = wrong(station) if number >= count * 2 // 3 else torch.zeros(32, dtype=torch.bool)
        if classes > 1:
            target = torch.where(bad, (score.argmax(1) + 1) % classes, score.argmax(1))
        else:
            target = torch.where(bad[:, None], score + 5, score)

        def step(x=x, station=station, target=target):
            scores = model(x, station)
            loss = F.cross_entropy(scores, target) if classes > 1 else F.mse_loss(scores, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        if count // 3 < number < count * 2 // 3 or number > count * 2 // 3:
            kept.append(evidence_of_step(step, {"": model}, [optimizer], number))
        else:
            step()
    turn = count * 2 // 3
    return [e for e in kept if e.step < turn][-6:], [e for e in kept if e.step > turn][:6]


@pytest.mark.parametrize("classes", [5, 1])
def test_the_samples_of_one_station(classes):
    found = who_loses(*steps_of(classes, lambda station: station == 2))
    assert found is not None and (found.column, found.value) == ("input 1", 2)
    assert found.among_them > 0.6 > 4 * found.among_others and "with 2 in input 1" in str(found)


@pytest.mark.parametrize("wrong", [lambda s: s < 0, lambda s: s >= 0, lambda s: torch.rand(len(s)) < 0.3])
@pytest.mark.parametrize("classes", [5, 1])
def test_none_all_and_any_samples_are_no_kind(classes, wrong):
    assert who_loses(*steps_of(classes, wrong)) is None


def test_an_exchange_stands_without_it(tmp_path, monkeypatch):
    """Whose samples are worse off is more than was asked: where it fails, the data are to blame all the same."""
    sides = steps_of(5, lambda station: station == 2)
    paths = [
        [str(save(each.specimen, tmp_path / side)) for each in steps]
        for side, steps in zip("ab", sides, strict=True)
    ]
    assert "with 2 in input 1" in Worker().swap(*paths)["changed"][0]
    monkeypatch.setattr(worse, "who_loses", lambda early, late: 1 / 0)
    found = Worker().swap(*paths)
    assert found["blame"] == "data" and not any("input 1" in text for text in found["changed"])
