"""Images and questions about them: a processor makes one batch of both."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(0)
torch.set_num_threads(1)


class Asked(Dataset):
    """Which of two patches is brighter? The question names them."""

    def __init__(self, n):
        self.images = torch.randn(n, 6, 8)
        self.questions = torch.stack([torch.randperm(6)[:2] for _ in range(n)])

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        means = self.images[i].mean(1)
        first, second = self.questions[i]
        return {
            "pixels": self.images[i],
            "ids": self.questions[i],
            "answer": (means[first] > means[second]).long(),
        }


def process(samples):
    pixels = torch.stack([sample["pixels"] for sample in samples])
    ids = torch.stack([sample["ids"] for sample in samples])
    return pixels, ids, torch.stack([sample["answer"] for sample in samples])


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.vision = nn.Embedding(6, 32), nn.Linear(48, 64)
        self.mix = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 2))

    def forward(self, pixels, ids):
        words = self.words(ids).flatten(1)
        seen = self.vision(pixels.flatten(1))
        return self.mix(torch.cat([seen + words, seen * words], 1))


loader = DataLoader(Asked(1600), batch_size=32, shuffle=True, collate_fn=process)
model = Reader()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for epoch in range(4):
    for pixels, ids, answer in loader:
        loss = F.cross_entropy(model(pixels, ids), answer)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(epoch, round(loss.item(), 4))
