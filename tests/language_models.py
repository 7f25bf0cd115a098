"""Small language models with slips to choose from, and one step of them, for the tests of experiments."""

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, TIME, BATCH, WIDTH = 19, 10, 6, 16


class Block(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, 2, c // 2).permute(2, 0, 3, 1, 4).unbind(0)
        if self.kind == "fused":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        elif self.kind == "fused, not causal":
            y = F.scaled_dot_product_attention(q, k, v)
        else:
            mask = torch.ones(t, t).triu() if self.kind == "upper" else torch.ones(t, t).tril()
            if self.kind == "diagonal":
                mask = torch.eye(t)
            scores = (q @ k.mT).masked_fill(mask == 0, -1e9)
            y = scores.softmax(-2 if self.kind == "queries" else -1) @ v
        y = y.contiguous() if self.kind == "not transposed" else y.transpose(1, 2)
        return x + self.proj(y.reshape(b, t, c))


class Transformer(nn.Module):
    def __init__(self, kind="causal"):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TIME, WIDTH)
        self.blocks = nn.Sequential(Block(kind), Block(kind))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        return self.head(self.blocks(self.tok(ids) + self.pos(torch.arange(ids.shape[1]))))


class Recurrent(nn.Module):
    def __init__(self, batch_first=True, bidirectional=False):
        super().__init__()
        self.tok = nn.Embedding(VOCABULARY, WIDTH)
        self.rnn = nn.LSTM(WIDTH, WIDTH, batch_first=batch_first, bidirectional=bidirectional)
        self.head = nn.Linear(WIDTH * (1 + bidirectional), VOCABULARY)

    def forward(self, ids):
        return self.head(self.rnn(self.tok(ids))[0])


def language_step(model, shift=1, time_first=False):
    text = torch.randint(0, VOCABULARY, (BATCH, TIME + 4))
    ids, targets = text[:, :TIME], text[:, shift : shift + TIME]
    if time_first:
        ids, targets = ids.T.contiguous(), targets.T.contiguous()
    return lambda: F.cross_entropy(model(ids).reshape(-1, VOCABULARY), targets.reshape(-1))
