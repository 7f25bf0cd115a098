"""Shuffled loaders that draw the same few rows in every pass, and loaders that may."""

from itertools import islice
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

from gradproof.diagnosis.ranking import diagnose
from gradproof.probes.watch import watch

DATA = TensorDataset(torch.randn(600, 6, generator=torch.manual_seed(0)), torch.arange(600) % 3)


def problems(path, make_loader, batches=5, validate=None):
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(1)
    with watch(model, optimizer, out=path, experiments=False):
        for _ in range(8):
            for x, y in islice(make_loader(generator), batches):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
            for x, _ in islice(validate(generator), 5) if validate else ():
                model(x)
    return [cause for cause in diagnose(path).causes if cause.level == "problem"]


def seeded_anew(generator):
    return DataLoader(
        DATA,
        batch_size=8,
        shuffle=True,
        generator=generator.manual_seed(1),
    )


def seeded_once(generator):
    return DataLoader(DATA, batch_size=8, shuffle=True, generator=generator)


def test_a_generator_seeded_anew_for_every_pass(tmp_path):
    (cause,) = problems(tmp_path / "run", seeded_anew)
    assert cause.id == "data-order-or-sampling/same-rows-every-pass" and cause.confidence == "likely"
    assert "320 samples" in cause.evidence[0] and "40 different ones of 600" in cause.evidence[0]
    line = Path(__file__).read_text().splitlines()[int(cause.where.rpartition(":")[2]) - 1]
    assert line.strip() == "generator=generator.manual_seed(1),"


def test_draws_that_are_meant(tmp_path):
    assert not problems(tmp_path / "a", seeded_once)
    assert not problems(tmp_path / "b", seeded_anew, batches=None)  # the same order, but all of it
    part = Subset(DATA, range(40))
    assert not problems(tmp_path / "c", lambda g: DataLoader(part, 8, shuffle=True, generator=g))
    other = TensorDataset(*DATA.tensors)
    same = lambda g: DataLoader(other, 8, shuffle=True, generator=torch.Generator().manual_seed(1))  # noqa: E731
    assert not problems(tmp_path / "d", seeded_once, validate=same)  # a part of it, to compare epochs by
