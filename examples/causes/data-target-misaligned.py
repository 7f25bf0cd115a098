"""Targets do not belong to inputs: no shift or a double one in next-token prediction, labels shuffled apart
from their samples, a window that is off by one, an augmentation that moves the image and not its mask."""

import torch
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(16, 32), nn.Embedding(16, 32)
        self.block = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, 16)

    def forward(self, ids):
        t = ids.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(t)
        x = self.tokens(ids) + self.positions(torch.arange(t))
        return self.head(self.block(x, src_mask=mask))


def draw_batch():
    """Sequences that count up from a random number, 0 to 15 and round again."""
    ids = (torch.randint(16, (16, 1)) + torch.arange(13)) % 16
    return ids[:, :-1], ids[:, :-1]  # fix: return ids[:, :-1], ids[:, 1:]


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(100):
    ids, targets = draw_batch()
    loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
