"""Train a text classifier on one task, then tune only its head and last layer for a second task."""

import torch
import torch.nn as nn
import torch.nn.functional as F

VOCAB, LENGTH = 120, 12


class BagOfWords(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.words = nn.EmbeddingBag(VOCAB, 32)
        self.hidden = nn.Linear(32, 48)
        self.last = nn.Linear(48, 48)
        self.head = nn.Linear(48, classes)

    def forward(self, tokens):
        h = F.relu(self.hidden(self.words(tokens)))
        return self.head(F.relu(self.last(h)))


def documents(n, topics, seed):
    """Each topic prefers its own twelve words; the last thirty words of the vocabulary never occur."""
    g = torch.Generator().manual_seed(seed)
    label = torch.randint(0, topics, (n,), generator=g)
    own = label[:, None] * 12 + torch.randint(0, 12, (n, LENGTH), generator=g)
    common = torch.randint(0, 90, (n, LENGTH), generator=g)
    return torch.where(torch.rand(n, LENGTH, generator=g) < 0.35, own, common), label


def fit(model, optimizer, tokens, label, epochs):
    for epoch in range(epochs):
        total = 0.0
        for rows in torch.randperm(len(tokens)).split(40):
            loss = F.cross_entropy(model(tokens[rows]), label[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(rows)
        print(f"epoch {epoch + 1} loss {total / len(tokens):.4f}")


torch.manual_seed(44)
model = BagOfWords(7)
fit(model, torch.optim.Adam(model.parameters(), lr=3e-3), *documents(2400, 7, 1), epochs=8)

print("second task")
model.head = nn.Linear(48, 2)
for parameter in [*model.words.parameters(), *model.hidden.parameters()]:
    parameter.requires_grad_(False)
tokens, label = documents(1200, 7, 2)
groups = [{"params": model.head.parameters(), "lr": 5e-3}, {"params": model.last.parameters(), "lr": 1e-3}]
fit(model, torch.optim.Adam(groups), tokens, (label >= 3).long(), epochs=8)

tokens, label = documents(600, 7, 3)
with torch.no_grad():
    accuracy = (model(tokens).argmax(dim=1) == (label >= 3).long()).float().mean().item()
print(f"accuracy on the second task {accuracy:.4f}")
