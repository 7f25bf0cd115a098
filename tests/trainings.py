"""Small trainings of each kind, as generators of losses: the same code runs plain and watched."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


def mlp(steps=8, model=None):
    model = model or nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return model, optimizer, _classify(model, optimizer, steps, (12, 6), 3)


def cnn(steps=5):
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 3),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, _classify(model, optimizer, steps, (8, 1, 8, 8), 3)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.lstm = nn.LSTM(8, 8, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(8, 11)

    def forward(self, ids):
        hidden, _ = self.lstm(self.embedding(ids))
        return self.head(hidden)


def lstm(steps=5):
    model = Tagger()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return model, optimizer, _next_token(model, optimizer, steps)


class Transformer(nn.Module):
    def __init__(self, dropout=0.1):
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=dropout, batch_first=True)
        self.head = nn.Linear(16, 11)

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.head(self.block(self.embedding(ids), src_mask=mask, is_causal=True))


def transformer(steps=5, clip=1.0):
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, _next_token(model, optimizer, steps, clip)


def checkpointed(steps=4):
    class Wrapped(nn.Sequential):
        def forward(self, x):
            for layer in self:
                x = checkpoint(layer, x, use_reentrant=False)
            return x

    return mlp(steps, Wrapped(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)))


def _classify(model, optimizer, steps, shape, classes):
    for _ in range(steps):
        x, y = torch.randn(shape), torch.randint(classes, shape[:1])
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


def _next_token(model, optimizer, steps, clip=None):
    for _ in range(steps):
        ids = torch.randint(11, (4, 9))
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        yield loss.item()
