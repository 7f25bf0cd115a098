"""Attention sees what it must not, or not what it must: no causal mask, an inverted one, padding that is
attended to, a mask of the wrong shape. A model that sees the future has a loss that is too good to be
true."""

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
        return self.head(self.block(x))  # fix: return self.head(self.block(x, src_mask=mask))


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(100):
    ids = torch.randint(16, (16, 13))
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
