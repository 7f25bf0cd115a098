"""Samples that a loader hands out again with other targets, and loaders that keep pairs together."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gradproof.diagnosis.ranking import diagnose
from gradproof.probes.watch import watch


def entropy(model, x, y):
    return nn.functional.cross_entropy(model(x), y)


def diagnosed(path, data, collate=None, epochs=4, loss=entropy):
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(data, batch_size=8, shuffle=True, collate_fn=collate)
    with watch(model, optimizer, out=path, experiments=False):
        for _ in range(epochs):
            for x, y in loader:
                optimizer.zero_grad()
                loss(model, x, y).backward()
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


def test_places_that_a_masked_language_model_is_asked_for_are_drawn_anew(tmp_path):
    """Of short sentences some come again with nothing hidden, and with other words asked for."""

    def masked(batch):
        ids = torch.stack([x for x, _ in batch]).long()
        chosen = torch.rand(ids.shape) < 0.4
        hidden = ids.masked_fill(chosen & (torch.rand(ids.shape) < 0.3), 1)
        return hidden.float() / 99, ids.masked_fill(~chosen, -100)

    def spoken(model, x, y):
        return nn.functional.mse_loss(model(x)[:, 0], y.clamp(min=0).float().mean(1) / 99)

    data = TensorDataset(torch.randint(2, 99, (64, 6)).float(), torch.zeros(64))
    assert not diagnosed(tmp_path / "a", data, masked, loss=spoken, epochs=8)


def test_padded_targets_that_are_sorted_alone_are_still_seen(tmp_path):
    def padded(batch):
        x, y = sorted_alone(batch)
        return x, torch.stack([y, y + 1, torch.full_like(y, -100)], dim=1)

    def spoken(model, x, y):
        return nn.functional.cross_entropy(model(x), y[:, 0])

    data = TensorDataset(torch.randn(64, 6), torch.arange(64) % 3)
    assert "data-target-misaligned/pairs-change" in diagnosed(tmp_path / "a", data, padded, loss=spoken)


def test_targets_that_are_padded_to_the_longest_of_each_batch_are_the_same_targets(tmp_path):
    """Each batch pads to another length, with another number than zero."""
    lengths = torch.randint(2, 60, (64,))

    def padded(batch, value, shift=0):
        width = max(int(lengths[int(i)]) for _, i in batch)
        target = torch.full((len(batch), width), value)
        for row, (_, i) in enumerate(batch):
            target[row, : lengths[int(i)]] = (int(i) + shift + torch.arange(int(lengths[int(i)]))) % 3
        return torch.stack([x for x, _ in batch]), target

    def spoken(model, x, y):
        return nn.functional.cross_entropy(model(x), y[:, 0])

    data = TensorDataset(torch.randn(64, 6), torch.arange(64))
    for value in (-1, -100, 0):
        path = tmp_path / f"padded{value}"
        assert not diagnosed(path, data, lambda batch, v=value: padded(batch, v), loss=spoken)

    def another(batch):
        return padded(batch, -1, int(torch.randint(0, 3, ())))

    found = diagnosed(tmp_path / "others", data, another, loss=spoken)
    assert "data-target-misaligned/pairs-change" in found
