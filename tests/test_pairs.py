"""Samples that a loader hands out again with other targets, and loaders that keep pairs together."""

import torch
from torch.utils.data import DataLoader, TensorDataset

from gradproof.diagnosis.ranking import diagnose
from gradproof.probes.watch import watch


def diagnosed(path, data, collate=None, epochs=4):
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(data, batch_size=8, shuffle=True, collate_fn=collate)
    with watch(model, optimizer, out=path, experiments=False):
        for _ in range(epochs):
            for x, y in loader:
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
    return {cause.id for cause in diagnose(path).causes if cause.level == "problem"}


def sorted_alone(batch):
    inputs = sorted((x for x, _ in batch), key=lambda x: float(x.sum()))
    return torch.stack(inputs), torch.stack([y for _, y in batch])


def sorted_together(batch):
    batch = sorted(batch, key=lambda pair: float(pair[0].sum()))
    return torch.stack([x for x, _ in batch]), torch.stack([y for _, y in batch])


def test_inputs_sorted_without_their_targets(tmp_path):
    data = TensorDataset(torch.randn(64, 6), torch.arange(64) % 3)
    assert "data-target-misaligned/pairs-change" in diagnosed(tmp_path / "a", data, sorted_alone)
    assert not diagnosed(tmp_path / "b", data, sorted_together)
    assert not diagnosed(tmp_path / "c", data)


def test_samples_that_are_alike_may_have_several_targets(tmp_path):
    x = torch.randint(0, 2, (200, 6)).float()  # 64 kinds
    assert not diagnosed(tmp_path / "a", TensorDataset(x, torch.randint(0, 3, (200,))))


def test_samples_augmented_anew_never_come_twice(tmp_path):
    data = TensorDataset(torch.randn(64, 6), torch.arange(64) % 3)

    def noisy(batch):
        return torch.stack([x + 0.1 * torch.randn(6) for x, _ in batch]), torch.stack([y for _, y in batch])

    assert not diagnosed(tmp_path / "a", data, noisy)


def test_samples_that_rounding_has_made_alike_are_not_taken_for_one(tmp_path):
    coarse = torch.linspace(0, 1, 512).to(torch.bfloat16).float()[:, None].expand(512, 6)
    assert not diagnosed(tmp_path / "a", TensorDataset(coarse, torch.arange(512) % 3))
