"""Masked-token pretraining of a small encoder on arithmetic sequences of different lengths."""

import torch
import torch.nn as nn
import torch.nn.functional as F

PAD, MASK = 0, 1
NUMBERS = 17
VOCAB = NUMBERS + 2
MAX_LEN = 14
IGNORE = -100


def make_sequences(n, g):
    """a, a+d, a+2d ... modulo 17, between 5 and 14 long, padded with PAD."""
    start = torch.randint(0, NUMBERS, (n, 1), generator=g)
    stride = torch.randint(1, 4, (n, 1), generator=g)
    tokens = (start + stride * torch.arange(MAX_LEN)) % NUMBERS + 2
    lengths = torch.randint(5, MAX_LEN + 1, (n,), generator=g)
    valid = torch.arange(MAX_LEN)[None] < lengths[:, None]
    return torch.where(valid, tokens, PAD), valid


def mask_tokens(tokens, valid, g):
    """Replace some real tokens by MASK; the labels are the originals there and IGNORE elsewhere."""
    chosen = (torch.rand(tokens.shape, generator=g) < 0.2) & valid
    inputs = torch.where(chosen, MASK, tokens)
    labels = torch.where(chosen, tokens, IGNORE)
    return inputs, labels


class EncoderLayer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.ff = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x, key_mask):
        n, t, d = x.shape
        qkv = self.qkv(self.norm1(x)).view(n, t, 3, self.heads, d // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) * (d // self.heads) ** -0.5
        scores = scores.masked_fill(~key_mask[:, None, None, :], float("-inf"))
        x = x + self.proj((scores.softmax(dim=-1) @ v).transpose(1, 2).reshape(n, t, d))
        return x + self.ff(self.norm2(x))


class MaskedLM(nn.Module):
    def __init__(self, dim=48, layers=2):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, dim, padding_idx=PAD)
        self.positions = nn.Embedding(MAX_LEN, dim)
        self.layers = nn.ModuleList([EncoderLayer(dim, 4) for _ in range(layers)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, inputs):
        x = self.tokens(inputs) + self.positions(torch.arange(inputs.size(1)))
        key_mask = inputs != PAD
        for layer in self.layers:
            x = layer(x, key_mask)
        return self.head(self.norm(x))


def fill_in_accuracy(model, g):
    """One token of each sequence is hidden; how often is it found?"""
    tokens, valid = make_sequences(500, g)
    place = (torch.rand(500, generator=g) * valid.sum(dim=1)).long()
    rows = torch.arange(500)
    inputs = tokens.clone()
    inputs[rows, place] = MASK
    with torch.no_grad():
        guess = model(inputs)[rows, place].argmax(dim=-1)
    return (guess == tokens[rows, place]).float().mean().item()


def main():
    torch.manual_seed(19)
    g = torch.Generator().manual_seed(20)
    model = MaskedLM()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 30))
    for step in range(300):
        inputs, labels = mask_tokens(*make_sequences(64, g), g)
        logits = model(inputs)
        loss = F.cross_entropy(logits.view(-1, VOCAB), labels.view(-1), ignore_index=IGNORE)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 50 == 49:
            print(f"[{step + 1}] mlm loss {loss.item():.4f} filled in {fill_in_accuracy(model, g):.3f}")


if __name__ == "__main__":
    main()
