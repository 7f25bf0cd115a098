"""One training of each kind that a specimen has to hold, as (models, optimizers, step); a step returns its losses."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from trainings import Tagger, Transformer


def step_of(optimizer, make_loss, before=lambda: None):
    def step():
        optimizer.zero_grad()
        loss = make_loss()
        loss.backward()
        before()
        optimizer.step()
        return [loss.detach()]

    return step


def classify(model, optimizer, shape, classes=3, dtype=torch.float32):
    def make_loss():
        x = torch.randn(shape, dtype=dtype)
        return F.cross_entropy(model(x), torch.randint(classes, shape[:1]))

    return {"": model}, [optimizer], step_of(optimizer, make_loss)


def next_token(model, optimizer, words=11):
    def make_loss():
        ids = torch.randint(words, (4, 9))
        return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    return {"": model}, [optimizer], step_of(optimizer, make_loss)


def mlp():
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    return classify(model, torch.optim.Adam(model.parameters(), lr=1e-2), (12, 6))


def channels_last_cnn():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.AvgPool2d(2), nn.Flatten(),
        nn.Linear(8 * 16, 3),
    ).to(memory_format=torch.channels_last)  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)

    def make_loss():
        x = torch.randn(6, 3, 8, 8).to(memory_format=torch.channels_last)
        return F.cross_entropy(model(x), torch.randint(3, (6,)))

    return {"": model}, [optimizer], step_of(optimizer, make_loss)


def lstm():
    model = Tagger()
    return next_token(model, torch.optim.RMSprop(model.parameters(), lr=1e-3))


def transformer_with_dropout():
    model = Transformer(dropout=0.2)
    return next_token(model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.body = nn.Linear(16, 16)
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.body(self.embedding(ids)).tanh())


def tied_weights():
    model = Tied()
    return next_token(model, torch.optim.Adam(model.parameters(), lr=1e-2))


def sparse_embedding():
    model = nn.Sequential(nn.Embedding(50, 8, sparse=True), nn.Flatten(), nn.Linear(24, 3))
    sparse = torch.optim.SparseAdam(list(model[0].parameters()), lr=1e-2)
    dense = torch.optim.SGD(model[2].parameters(), lr=1e-2)

    def step():
        sparse.zero_grad()
        dense.zero_grad()
        loss = F.cross_entropy(model(torch.randint(50, (6, 3))), torch.randint(3, (6,)))
        loss.backward()
        sparse.step()
        dense.step()
        return [loss.detach()]

    return {"": model}, [sparse, dense], step


class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        self.filter = nn.Parameter(torch.randn(4, 9, dtype=torch.complex64))
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        waves = torch.fft.rfft(x) * self.filter
        return self.head(torch.fft.irfft(waves.conj(), n=16).mean(1))


def complex_numbers():
    model = Spectral()
    return classify(model, torch.optim.Adam(model.parameters(), lr=1e-2), (5, 4, 16))


def autocast():
    model = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def make_loss():
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(model(torch.randn(12, 6)), torch.randint(3, (12,)))

    return {"": model}, [optimizer], step_of(optimizer, make_loss)


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, slope):
        ctx.save_for_backward(x)
        ctx.slope = slope
        return x * torch.sigmoid(slope * x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(ctx.slope * x)
        return grad * (s + ctx.slope * x * s * (1 - s)), None


class WithSwish(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x):
        return self.second(Swish.apply(self.first(x), 1.5))


def custom_function():
    model = WithSwish()
    return classify(model, torch.optim.SGD(model.parameters(), lr=0.1), (12, 6))


def lbfgs():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)

    def step():
        x = torch.randn(10, 4)
        losses = []

        def closure():
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), x.sum(1, keepdim=True))
            loss.backward()
            losses.append(loss.detach().clone())
            return loss

        optimizer.step(closure)
        return losses

    return {"": model}, [optimizer], step


def accumulation():
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(
        [
            {"params": model[0].parameters(), "lr": 1e-3},
            {"params": model[2].parameters(), "weight_decay": 0.0},
        ],
        lr=1e-2,
    )

    def step():
        optimizer.zero_grad()
        losses = []
        for _ in range(3):
            loss = F.cross_entropy(model(torch.randn(4, 6)), torch.randint(3, (4,))) / 3
            loss.backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return losses

    return {"": model}, [optimizer], step


def grad_scaler():
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(torch.randn(12, 6)), torch.randint(3, (12,)))
        scaled = scaler.scale(loss)
        scaled.backward()
        scaler.step(optimizer)
        scaler.update()
        return [scaled.detach()]

    return {"": model}, [optimizer], step


def two_players():
    generator = nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2), nn.Linear(8, 2))
    critic = nn.Sequential(nn.Linear(2, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
    first = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
    second = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    true, false = torch.ones(6, 1), torch.zeros(6, 1)

    def step():
        first.zero_grad()
        fake = generator(torch.randn(6, 4))
        loss = F.binary_cross_entropy_with_logits(critic(torch.randn(6, 2)), true)
        loss = loss + F.binary_cross_entropy_with_logits(critic(fake.detach()), false)
        loss.backward()
        first.step()
        second.zero_grad()
        other = F.binary_cross_entropy_with_logits(critic(fake), true)
        other.backward()
        second.step()
        return [loss.detach(), other.detach()]

    return {"generator": generator, "critic": critic}, [first, second], step


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.1), nn.Tanh()) for _ in range(3)]
        )
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def checkpointing():
    model = Checkpointed()
    return classify(model, torch.optim.Adam(model.parameters(), lr=1e-2), (12, 6))


def frozen_part():
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    model[0].requires_grad_(False)
    model[1].eval()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2, amsgrad=True)
    return classify(model, optimizer, (12, 6))


def numpy_inputs():
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    random = np.random.RandomState(0)

    def make_loss():
        x = random.randn(12, 6).astype(np.float32)
        y = random.randint(0, 3, 12)
        return F.cross_entropy(model(torch.from_numpy(x)), torch.from_numpy(y))

    return {"": model}, [optimizer], step_of(optimizer, make_loss)


KINDS = (
    *(
        mlp,
        channels_last_cnn,
        lstm,
        transformer_with_dropout,
        tied_weights,
        sparse_embedding,
        complex_numbers,
    ),
    *(autocast, custom_function, lbfgs, accumulation, grad_scaler, two_players, checkpointing, frozen_part),
    numpy_inputs,
)
