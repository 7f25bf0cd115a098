"""A small GPT that learns to continue counting songs. Attention, blocks and schedule written out."""

import math
import random
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.nn import functional as F


@dataclass
class Config:
    vocab_size: int = 0
    block_size: int = 48
    n_layer: int = 2
    n_head: int = 4
    n_embd: int = 64
    dropout: float = 0.0


max_steps = 220
warmup_steps = 20
batch_size = 16
learning_rate = 4e-3
min_lr = 2e-4

SONGS = [
    "one two three four five six seven eight nine ten".split(),
    "jan feb mar apr may jun jul aug sep oct nov dec".split(),
    "red orange yellow green blue indigo violet".split(),
    "do re mi fa sol la ti".split(),
]


def make_line(rng):
    song = rng.choice(SONGS)
    start = rng.randrange(len(song))
    return " ".join(song[(start + i) % len(song)] for i in range(5)) + "\n"


class CausalSelfAttention(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.n_head = cfg.n_head
        self.c_attn = nn.Linear(cfg.n_embd, 3 * cfg.n_embd)
        self.c_proj = nn.Linear(cfg.n_embd, cfg.n_embd)
        mask = torch.tril(torch.ones(cfg.block_size, cfg.block_size))
        self.register_buffer("mask", mask.view(1, 1, cfg.block_size, cfg.block_size))

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.c_attn(x).split(C, dim=2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        att = att.masked_fill(self.mask[:, :, :T, :T] == 0, float("-inf"))
        att = F.softmax(att, dim=-1)
        y = att @ v
        y = y.transpose(1, 2).reshape(B, T, C)
        return self.c_proj(y)


class Block(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.ln_1 = nn.LayerNorm(cfg.n_embd)
        self.attn = CausalSelfAttention(cfg)
        self.ln_2 = nn.LayerNorm(cfg.n_embd)
        self.c_fc = nn.Linear(cfg.n_embd, 4 * cfg.n_embd)
        self.c_proj = nn.Linear(4 * cfg.n_embd, cfg.n_embd)
        self.drop = nn.Dropout(cfg.dropout)

    def forward(self, x):
        x = x + self.drop(self.attn(self.ln_1(x)))
        x = x + self.drop(self.c_proj(F.gelu(self.c_fc(self.ln_2(x)))))
        return x


class GPT(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.wte = nn.Embedding(cfg.vocab_size, cfg.n_embd)
        self.wpe = nn.Embedding(cfg.block_size, cfg.n_embd)
        self.blocks = nn.ModuleList([Block(cfg) for _ in range(cfg.n_layer)])
        self.ln_f = nn.LayerNorm(cfg.n_embd)
        self.lm_head = nn.Linear(cfg.n_embd, cfg.vocab_size, bias=False)
        self.apply(self._init_weights)
        self.lm_head.weight = self.wte.weight

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, mean=0.0, std=0.04)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, idx):
        pos = torch.arange(idx.size(1))
        x = self.wte(idx) + self.wpe(pos)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def get_batch(data, cfg):
    ix = torch.randint(len(data) - cfg.block_size - 1, (batch_size,))
    x = torch.stack([data[i : i + cfg.block_size] for i in ix])
    y = torch.stack([data[i + 1 : i + cfg.block_size + 1] for i in ix])
    return x, y


def get_lr(step):
    if step < warmup_steps:
        return learning_rate * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / (max_steps - warmup_steps)
    return min_lr + 0.5 * (learning_rate - min_lr) * (1 + math.cos(math.pi * progress))


def configure_optimizer(model):
    decay = [p for p in model.parameters() if p.dim() >= 2]
    no_decay = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))


@torch.no_grad()
def continue_songs(model, encode, rng):
    """Share of characters right when each line is continued greedily from its first word."""
    model.eval()
    lines = [make_line(rng) for _ in range(12)]
    right = total = 0
    for line in lines:
        start = line.index(" ") + 1
        tokens = encode("\n" + line[:start])
        while len(tokens) <= len(line):
            logits = model(torch.tensor([tokens]))
            tokens.append(int(logits[0, -1].argmax()))
        answer = encode(line)
        right += sum(a == b for a, b in zip(tokens[1 + start :], answer[start:]))
        total += len(answer) - start
    model.train()
    return right / total


def main():
    torch.manual_seed(1337)
    rng = random.Random(1337)
    text = "".join(make_line(rng) for _ in range(1500))
    chars = sorted(set(text))
    stoi = {ch: i for i, ch in enumerate(chars)}

    def encode(s):
        return [stoi[ch] for ch in s]

    data = torch.tensor(encode(text))
    cfg = Config(vocab_size=len(chars))
    model = GPT(cfg)
    optimizer = configure_optimizer(model)
    model.train()
    for step in range(max_steps):
        lr = get_lr(step)
        for group in optimizer.param_groups:
            group["lr"] = lr
        x, y = get_batch(data, cfg)
        logits = model(x)
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 0 or step == max_steps - 1:
            print(f"step {step}: loss {loss.item():.4f}, lr {lr:.2e}")
    print(f"songs continued: {continue_songs(model, encode, random.Random(5)):.3f}")


if __name__ == "__main__":
    main()
