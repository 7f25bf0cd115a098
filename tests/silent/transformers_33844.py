"""Attention with dropout inside the operator, trained and validated."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
torch.set_num_threads(1)


class Attention(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
        return self.out(y.transpose(1, 2).reshape(B, T, C))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(20, 32), nn.LayerNorm(32)
        self.attention, self.head = Attention(32, 4, 0.3), nn.Linear(32, 20)

    def forward(self, ids):
        x = self.embed(ids)
        return self.head((x + self.attention(self.norm(x))).mean(1))


def batch(n=32):
    y = torch.randint(20, (n,))
    ids = torch.randint(20, (n, 12))
    ids[:, ::3] = y[:, None]
    return ids, y


model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(160):
    ids, y = batch()
    loss = F.cross_entropy(model(ids), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 40 == 39:
        model.eval()
        with torch.no_grad():
            ids, y = batch(200)
            print(step, round(loss.item(), 4), round(F.cross_entropy(model(ids), y).item(), 4))
        model.train()
