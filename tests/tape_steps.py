"""Training steps of many kinds: each builder returns (named parameters, step), and step() the loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, width, heads, dropout=0.1, norm=nn.LayerNorm):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = norm(width), norm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.f1, self.f2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        batch, time, width = x.shape
        qkv = self.qkv(self.ln1(x)).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.proj(a.transpose(1, 2).reshape(batch, time, width)))
        return x + self.f2(F.gelu(self.f1(self.ln2(x))))


class GPT(nn.Module):
    def __init__(self, vocabulary=17, width=32, layers=2, heads=4, time=12, dropout=0.1, block=Block):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocabulary, width), nn.Embedding(time, width)
        self.blocks = nn.ModuleList(block(width, heads, dropout) for _ in range(layers))
        self.ln, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.tok.weight, std=0.3)
        nn.init.normal_(self.pos.weight, std=0.3)

    def forward(self, ids, targets):
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.ln(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def backward_step(module, make_loss):
    def step():
        module.zero_grad()
        loss = make_loss()
        loss.backward()
        return loss

    return dict(module.named_parameters()), step


def gpt(**options):
    torch.manual_seed(0)
    model = GPT(**options)
    ids = torch.randint(0, 17, (3, 13))
    return backward_step(model, lambda: model(ids[:, :-1], ids[:, 1:]))


def tied():
    torch.manual_seed(0)
    model = GPT()
    model.head.weight = model.tok.weight
    ids = torch.randint(0, 17, (3, 13))
    return backward_step(model, lambda: model(ids[:, :-1], ids[:, 1:]))


def convolutional():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Conv2d(8, 4, 3),
        nn.GroupNorm(2, 4), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(4,
        5),
    )  # fmt: skip
    x, y = torch.randn(4, 3, 12, 12), torch.randint(0, 5, (4,))
    return backward_step(model, lambda: F.cross_entropy(model(x), y))


def recurrent(kind):
    torch.manual_seed(0)
    model = nn.ModuleDict({"rnn": kind(6, 8, num_layers=2, dropout=0.1), "head": nn.Linear(8, 1)})
    x, y = torch.randn(7, 3, 6), torch.randn(7, 3, 1)
    return backward_step(model, lambda: F.mse_loss(model["head"](model["rnn"](x)[0]), y))


def cells():
    torch.manual_seed(0)
    model = nn.ModuleDict({"cell": nn.GRUCell(4, 6), "head": nn.Linear(6, 2)})
    x = torch.randn(5, 3, 4)

    def make_loss():
        h = torch.zeros(3, 6)
        for part in x:
            h = model["cell"](part, h)
        return model["head"](h).square().mean()

    return backward_step(model, make_loss)


class Inplace(nn.Module):
    """Views, in-place writes, index_put_, scatter, masked_fill_, out=, buffers, split and shallow copies."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        h = self.a(x)
        h[:, 0] = 0.5
        h[:, 1:3].mul_(2.0)
        h.masked_fill_(h > 2.0, 1.0)
        out = torch.empty(len(x), 6)
        out[:, :3] = h[:, 3:]
        out[:, 3:].copy_(h[:, :3].tanh())
        left, right = out.split(3, dim=1)
        y = self.b(torch.cat([right, left], 1))
        y.index_put_((torch.tensor([0, 1]),), torch.ones(2, 6), accumulate=True)
        z = torch.zeros(len(x), 6).scatter_add(1, torch.arange(6).expand(len(x), 6).flip(1), y)
        w = torch.empty(6)
        torch.add(torch.ones(6), 2.0, out=w)
        z += w * self.count
        running = z.detach().clone()
        running.data.mul_(3.0)
        return z.relu_() * (1 + running.mean())


def inplace():
    torch.manual_seed(0)
    model, x = Inplace(), torch.randn(4, 6)
    return backward_step(model, lambda: model(x).pow(2).mean())


def complex_numbers():
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    x = torch.randn(3, 8)
    return backward_step(
        model, lambda: torch.fft.irfft(torch.fft.rfft(model(x)) * (0.5 + 0.2j)).square().sum()
    )


def checkpointed(reentrant):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Dropout(0.3), nn.Linear(9, 2))
    x = torch.randn(4, 5, requires_grad=reentrant)
    return backward_step(model, lambda: checkpoint(model, x, use_reentrant=reentrant).square().sum())


def accumulated():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)), torch.randn(6, 4)

    def step():
        model.zero_grad()
        total = torch.zeros(())
        for part in x.split(2):
            loss = model(part).square().mean() / 3
            loss.backward()
            total += loss.detach()
        return total

    return dict(model.named_parameters()), step


def adversarial():
    torch.manual_seed(0)
    models = nn.ModuleDict({"G": nn.Linear(2, 3), "D": nn.Linear(3, 1)})
    z, real = torch.randn(5, 2), torch.randn(5, 3)

    def step():
        models.zero_grad()
        fake = models["G"](z)
        d = F.softplus(models["D"](fake.detach())).mean() + F.softplus(-models["D"](real)).mean()
        d.backward()
        g = F.softplus(-models["D"](fake)).mean()
        g.backward()
        return g

    return dict(models.named_parameters()), step


def gradient_penalty():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    real, fake = torch.randn(5, 3), torch.randn(5, 3)

    def make_loss():
        mixed = (real + torch.rand(5, 1) * (fake - real)).requires_grad_()
        (slope,) = torch.autograd.grad(model(mixed).sum(), mixed, create_graph=True)
        return model(fake).mean() - model(real).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()

    return backward_step(model, make_loss)


def autocast():
    torch.manual_seed(0)
    model = GPT()
    ids = torch.randint(0, 17, (3, 13))

    def make_loss():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(ids[:, :-1], ids[:, 1:])

    return backward_step(model, make_loss)


def scaled():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    x = torch.randn(6, 4)

    def step():
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss

    return dict(model.named_parameters()), step


def encoder():
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, norm_first=True)
    x = torch.randn(2, 6, 16)
    mask = nn.Transformer.generate_square_subsequent_mask(6)
    padding = torch.zeros(2, 6).masked_fill(torch.arange(6) > 4, -torch.inf)
    make_loss = lambda: model(x, src_mask=mask, src_key_padding_mask=padding).square().mean()  # noqa: E731
    return backward_step(model, make_loss)


def clipped_and_stepped():
    named, step = gpt()
    optimizer = torch.optim.AdamW(named.values(), lr=1e-3, foreach=True)

    def whole():
        loss = step()
        nn.utils.clip_grad_norm_(named.values(), 0.5)
        optimizer.step()
        return loss

    return named, whole


def function_transform():
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    x = torch.randn(4, 3)

    def make_loss():
        jacobian = torch.func.vmap(torch.func.jacrev(lambda row: model(row).tanh()))(x)
        return jacobian.square().sum()

    return backward_step(model, make_loss)


STEPS = {
    "gpt": gpt, "tied": tied, "convolutional": convolutional, "rnn": lambda: recurrent(nn.RNN),
    "gru": lambda: recurrent(nn.GRU), "lstm": lambda: recurrent(nn.LSTM), "cells": cells, "inplace": inplace,
    "complex": complex_numbers, "checkpointed": lambda: checkpointed(False),
    "checkpointed_reentrant": lambda: checkpointed(True), "accumulated": accumulated,
    "adversarial": adversarial,
    "gradient_penalty": gradient_penalty, "autocast": autocast, "scaled": scaled, "encoder": encoder,
    "stepped": clipped_and_stepped, "function_transform": function_transform,
}  # fmt: skip
