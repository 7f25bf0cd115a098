"""A small character-level transformer on its own source text. It learns."""

import pathlib

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
text = pathlib.Path(__file__).read_text()
letters = sorted(set(text))
data = torch.tensor([letters.index(c) for c in text])
CONTEXT, WIDTH, HEADS, LAYERS, BATCH = 32, 64, 4, 3, 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, WIDTH))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(len(letters), WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, len(letters))

    def forward(self, ids):
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        return self.head(self.norm(self.blocks(x)))


model = Transformer()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for step in range(300):
    starts = torch.randint(len(data) - CONTEXT - 1, (BATCH,))
    inputs = torch.stack([data[s : s + CONTEXT] for s in starts])
    targets = torch.stack([data[s + 1 : s + CONTEXT + 1] for s in starts])
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 50 == 0 or step == 299:
        print(f"step {step:3d}  loss {loss.item():.3f}")
