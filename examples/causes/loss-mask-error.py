"""The wrong positions count in the loss: padding is learned, the mask is inverted, `ignore_index` is another
token, or the mean is over all positions instead of the valid ones."""

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


PAD = 0


def draw_batch():
    """Sequences of different lengths that count up, filled with PAD."""
    ids = 1 + (torch.randint(15, (16, 1)) + torch.arange(13)) % 15
    lengths = torch.randint(3, 14, (16, 1))
    return torch.where(torch.arange(13) < lengths, ids, PAD)


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(100):
    ids = draw_batch()
    logits = model(ids[:, :-1]).flatten(0, 1)
    targets = ids[:, 1:].flatten()
    loss = F.cross_entropy(logits, targets)  # fix: loss = F.cross_entropy(logits, targets, ignore_index=PAD)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
