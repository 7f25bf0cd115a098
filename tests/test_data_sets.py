"""Data sets that are changed by being read; and caches, first-time normalisation, resampling and copies."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

import gradproof

ID = "aliasing-or-inplace/stored-data-changed"


class Rows(Dataset):
    """40 rows; `read` is what __getitem__ does with a stored one."""

    def __init__(self, read, kind=np.array):
        random = np.random.default_rng(0)
        self.x = random.normal(size=(40, 6)).astype(np.float32)
        if kind is list:
            self.x = [torch.from_numpy(row.copy()) for row in self.x]
        self.cache = np.zeros((40, 6), dtype=np.float32)
        self.done = set()
        self.random, self.read = random, read

    def __len__(self):
        return 40

    def __getitem__(self, i):
        return torch.as_tensor(self.read(self, i)).clone()


def noise_in_place(data, i):
    x = data.x[i]
    x += 0.3 * data.random.normal(size=6).astype(np.float32)
    return x


def noise_in_place_on_tensors(data, i):
    return data.x[i].add_(torch.randn(6), alpha=0.3)


def noise(data, i):
    return data.x[i] + 0.3 * data.random.normal(size=6).astype(np.float32)


def cached(data, i):
    if i not in data.done:
        data.cache[i] = 2 * data.x[i]
        data.done.add(i)
    return data.cache[i]


def normalised_once(data, i):
    if i not in data.done:
        data.x[i] -= data.x[i].mean()
        data.done.add(i)
    return data.x[i]


def drawn_anew(data, i):
    data.cache[i] = data.random.normal(size=6)
    return data.cache[i]


def mirrored_in_place(data, i):
    if data.random.random() < 0.5:
        data.x[i] = data.x[i][::-1].copy()
    return data.x[i]


def found(tmp_path, data, **how):
    torch.manual_seed(0)
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(data, batch_size=8, shuffle=True, **how)
    with gradproof.watch(model, optimizer, out=tmp_path / "run", experiments=False):
        for _ in range(5):
            for batch in loader:
                x = batch[0] if isinstance(batch, list) else batch
                optimizer.zero_grad()
                F.mse_loss(model(x), x[:, :1] - x[:, 1:2]).backward()
                optimizer.step()
    return {c.id: c for c in gradproof.diagnose(tmp_path / "run").causes}


def test_noise_added_in_place(tmp_path):
    cause = found(tmp_path, Subset(Rows(noise_in_place), range(32)))[ID]
    assert cause.level == "problem" and cause.where.startswith("Rows (test_data_sets.py:")


def test_noise_added_in_place_to_a_list_of_tensors(tmp_path):
    assert found(tmp_path, Rows(noise_in_place_on_tensors, list))[ID].level == "problem"


def test_a_batch_changed_in_place_where_it_is_put_together(tmp_path):
    data = TensorDataset(torch.randn(40, 6))

    def collate(samples):
        return torch.stack([x.add_(torch.randn(6)) for (x,) in samples])

    assert found(tmp_path, data, collate_fn=collate)[ID].level == "problem"


def test_mirrored_in_place_is_no_problem(tmp_path):
    assert found(tmp_path, Rows(mirrored_in_place))[ID].level == "warning"


@pytest.mark.parametrize("read", [noise, cached, normalised_once, drawn_anew])
def test_what_is_read_as_it_was_meant_is_silent(tmp_path, read):
    assert ID not in found(tmp_path, Rows(read))
