"""Augmented samples from a loader with two workers."""

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, get_worker_info

torch.manual_seed(0)
torch.set_num_threads(1)


class Patterns(Dataset):
    """Each sample is shifted and made noisy by numbers that are drawn as it is read."""

    def __init__(self, n):
        made = np.random.default_rng(1)
        self.prototypes = made.normal(size=(10, 32)).astype(np.float32)
        self.labels = made.integers(0, 10, n)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        label = int(self.labels[i])
        x = np.roll(self.prototypes[label], np.random.randint(-2, 3))
        return (x + np.random.normal(0, 0.5, 32)).astype(np.float32), label


def start(worker):
    np.random.seed(get_worker_info().seed % 2**32)


if __name__ == "__main__":
    loader = DataLoader(Patterns(1024), batch_size=32, shuffle=True, num_workers=2, worker_init_fn=start)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in range(5):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(epoch, round(loss.item(), 4))
