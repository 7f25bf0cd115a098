"""Where NaN and Inf come from: modules with one line that does it, inside a causal model full of −inf."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, TIME, BATCH, VOCABULARY, BAD_ROW = 8, 5, 4, 9, 2


class Causal(nn.Module):
    """Attention with an explicit −inf mask: healthy, and full of infinities."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.register_buffer("mask", torch.full((TIME, TIME), -math.inf).triu(1))

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + (q @ k.mT / math.sqrt(WIDTH) + self.mask).softmax(-1) @ v


class Host(nn.Module):
    def __init__(self, bad):
        super().__init__()
        self.tok = nn.Embedding(VOCABULARY, WIDTH)
        self.before, self.bad, self.after = Causal(), bad, Causal()
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids, features, targets):
        x = self.before(self.tok(ids)) + features
        logits = self.head(self.after(self.bad(x)))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def at_bad_row(x, value):
    """x with one entry of the bad row set to a value; the rest of the row still depends on x."""
    place = torch.zeros_like(x)
    place[BAD_ROW, 3, 1] = 1.0
    return x * (1 - place) + value * place + x * 0 * place


class Origin(nn.Module):
    """The line marked # HERE is what has to be found."""

    marker = "# HERE"


class LogZero(Origin):
    def forward(self, x):
        return x + at_bad_row(x.abs() + 1, 0.0).log()  # HERE


class ZeroOverZero(Origin):
    def forward(self, x):
        y = at_bad_row(x.abs() + 1, 0.0)
        return x + y / y  # HERE


class NegativeRoot(Origin):
    def forward(self, x):
        return x + at_bad_row(x.abs() + 1, -1.0).sqrt()  # HERE


class NegativePower(Origin):
    def forward(self, x):
        return x + at_bad_row(x.abs() + 1, -2.0).pow(0.5)  # HERE


class ExpOverflow(Origin):
    def forward(self, x):
        return x + at_bad_row(x, 100.0).exp()  # HERE


class HalfOverflow(Origin):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH))

    def forward(self, x):
        y = at_bad_row(x, 400.0).half() @ (200 * self.weight).half()  # HERE
        return x + y.float()


class AllMasked(Origin):
    def forward(self, x):
        scores = (x @ x.mT).masked_fill(torch.ones(TIME, TIME, dtype=torch.bool).triu(1), -math.inf)
        padding = torch.zeros(BATCH, 1, TIME, dtype=torch.bool)
        padding[BAD_ROW] = True
        p = scores.masked_fill(padding, -math.inf).softmax(-1)  # HERE
        return p @ x


class OneSample(Origin):
    def forward(self, x):
        return x - x[:, :1].var(1, keepdim=True)  # HERE


class SquaredNormOverflow(Origin):
    def forward(self, x):
        big = at_bad_row(x, 1e25)
        norm = big.square().sum(-1, keepdim=True)  # HERE
        return x + norm.rsqrt() * 0 + norm * 0


class UnfilledMemory(Origin):
    def forward(self, x):
        out = torch.empty(BATCH, TIME, WIDTH)  # HERE
        out[:, :-1] = x[:, :-1]
        return x + out


class UnfilledCache(Origin):
    def forward(self, x):
        cache = torch.empty(BATCH, TIME + 3, WIDTH)  # HERE
        cache[:, :TIME] = x
        positions = torch.arange(TIME) + 1
        return x + cache[:, positions]


# -- finite forward, bad backward


class RootAtZero(Origin):
    def forward(self, x):
        return x + at_bad_row(x.abs() + 1, 0.0).sqrt()  # HERE


class NormAtZero(Origin):
    def forward(self, x):
        keep = torch.ones(BATCH, TIME, 1)
        keep[BAD_ROW, 3] = 0
        return x + (x * keep).square().sum(-1, keepdim=True).sqrt()  # HERE


class WhereBranch(Origin):
    def forward(self, x):
        y = at_bad_row(x.abs() + 1, 0.0)
        root = y.log()  # HERE
        return x + torch.where(y > 0, root, 0.0)


class PowerAtZero(Origin):
    def forward(self, x):
        return x + at_bad_row(x.abs() + 1, 0.0).pow(0.5)  # HERE


class AcosAtOne(Origin):
    def forward(self, x):
        return x + at_bad_row(x.tanh() * 0.5, 1.0).acos()  # HERE


class TinyRms(Origin):
    def forward(self, x):
        keep = torch.ones(BATCH, TIME, 1)
        keep[BAD_ROW, 3] = 1e-30
        y = x * keep
        return x + y / y.square().mean(-1, keepdim=True).sqrt()  # HERE


class InfinityTimesZero(Origin):
    def forward(self, x):
        y = at_bad_row(x.abs() + 1, 0.0)
        scale = at_bad_row(torch.ones_like(x), 0.0).detach()
        return x + y.pow(0.5) * scale  # HERE


class Unsafe(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x / x  # HERE


class HandWritten(Origin):
    def forward(self, x):
        keep = torch.ones_like(x)
        keep[BAD_ROW, 3, 1] = 0
        return x + Unsafe.apply(x * keep)


class RootOfTinyRms(Origin):
    def forward(self, x):
        keep = torch.ones(BATCH, TIME, 1)
        keep[BAD_ROW, 3] = 1e-14
        y = x * keep
        return x + y * y.square().mean(-1, keepdim=True).rsqrt()  # HERE


class EqualEigenvalues(Origin):
    def forward(self, x):
        symmetric = torch.eye(WIDTH) + 0 * (x[BAD_ROW, 0, :, None] * x[BAD_ROW, 0])
        return x + torch.linalg.eigh(symmetric).eigenvectors.sum()  # HERE


class ReciprocalSquares(Origin):
    def forward(self, x):
        y = at_bad_row(x.abs() + 1, 1e-25)
        return x + 1e-25 / y  # HERE


class HalfGradientOverflow(Origin):
    def forward(self, x):
        y = (x * 1e-4).half()
        z = y * 60000.0  # HERE
        return x + z.float() * 1e3


FORWARD = [
    LogZero, ZeroOverZero, NegativeRoot, NegativePower, ExpOverflow, HalfOverflow, AllMasked, OneSample,
    SquaredNormOverflow, UnfilledMemory, UnfilledCache, TinyRms,
]  # fmt: skip
BACKWARD = [
    RootAtZero, NormAtZero, WhereBranch, PowerAtZero, AcosAtOne, InfinityTimesZero, HandWritten,
    HalfGradientOverflow,
    RootOfTinyRms, EqualEigenvalues, ReciprocalSquares,
]  # fmt: skip
OPERATORS = {
    LogZero: "log", ZeroOverZero: "div", NegativeRoot: "sqrt", NegativePower: "pow", ExpOverflow: "exp",
    HalfOverflow: "mm", AllMasked: "_softmax", OneSample: "var", SquaredNormOverflow: "pow", UnfilledMemory:
    "empty",
    UnfilledCache: "empty", TinyRms: "div", RootAtZero: "sqrt", NormAtZero: "sqrt", WhereBranch: "log",
    PowerAtZero: "pow", AcosAtOne: "acos", InfinityTimesZero: "pow", HandWritten: "Unsafe",
    HalfGradientOverflow: "mul", RootOfTinyRms: "rsqrt", EqualEigenvalues: "_linalg_eigh",
    ReciprocalSquares: "reciprocal",
}  # fmt: skip


def build(origin, bad_row=False):
    torch.manual_seed(0)
    model = Host(origin())
    ids = torch.randint(0, VOCABULARY, (BATCH, TIME + 1))
    features = torch.randn(BATCH, TIME, WIDTH)
    if bad_row:
        features[BAD_ROW, 1, 3] = math.nan
    return model, (ids[:, :-1], features, ids[:, 1:])


def marked_line(origin):
    """(file, line) of the line marked # HERE in a class."""
    import inspect

    cls = Unsafe if origin is HandWritten else origin
    lines, first = inspect.getsourcelines(cls)
    return inspect.getsourcefile(cls), first + next(i for i, line in enumerate(lines) if "# HERE" in line)


# -- healthy models full of infinities and NaN that reach nothing


class Additive(nn.Module):
    def forward(self, x):
        keep = (torch.arange(TIME)[:, None] >= torch.arange(TIME)).float()
        return (x @ x.mT + keep.log()).softmax(-1) @ x  # log(0) as a mask


class UntakenLog(nn.Module):
    def forward(self, x):
        return x + torch.where(x > 0, x.log(), torch.zeros_like(x))  # log of negatives, never chosen


class UntakenDivision(nn.Module):
    def forward(self, x):
        zeros = torch.zeros_like(x).detach()
        return x + torch.where(zeros > 1, 1 / zeros, x)


class Filled(nn.Module):
    def forward(self, x):
        out = torch.empty(BATCH, TIME, WIDTH)
        out[:, ::2] = x[:, ::2]
        out[:, 1::2] = x[:, 1::2] * 2
        return out


class UnusedTail(nn.Module):
    def forward(self, x):
        cache = torch.empty(BATCH, 2 * TIME, WIDTH)
        cache[:, :TIME] = x
        return x + cache[:, :TIME]


class BadMetric(nn.Module):
    def forward(self, x):
        self.ratio = (x.detach() * 0) / (x.detach() * 0)  # 0/0, only logged
        self.average = self.ratio.mean()
        return x


class RunningMaximum(nn.Module):
    def forward(self, x):
        top = torch.full((BATCH, 1, WIDTH), -math.inf)
        for part in x.split(1, dim=1):
            top = torch.maximum(top, part)
        return x - top.detach()


class TopOnly(nn.Module):
    def forward(self, x):
        low = x.topk(3, -1).values[..., -1:]
        return x + x.masked_fill(x < low, -math.inf).softmax(-1)


class Clamped(nn.Module):
    def forward(self, x):
        return x.clamp(min=-math.inf, max=math.inf) + torch.tensor(math.inf).reciprocal()


class NanToNumber(nn.Module):
    def forward(self, x):
        hidden = x.detach().clone()
        hidden[0, 0, 0] = math.nan
        return x + hidden.nan_to_num(0.0)


class Packed(nn.Module):
    def forward(self, x):
        document = torch.tensor([0, 0, 1, 1, 1])
        blocked = (document[:, None] != document) | torch.ones(TIME, TIME, dtype=torch.bool).triu(1)
        bias = torch.zeros(TIME, TIME).masked_fill(blocked, -math.inf)
        return F.scaled_dot_product_attention(x, x, x, attn_mask=bias) + x.masked_fill(
            x < -9, -math.inf
        ).logsumexp(-1, True)


HEALTHY = [
    Additive, UntakenLog, UntakenDivision, Filled, UnusedTail, BadMetric, RunningMaximum, TopOnly, Clamped,
    NanToNumber,
    Packed,
]  # fmt: skip


def source_of(origin):
    """(number of lines, first line) of an origin's class."""
    import inspect

    lines, first = inspect.getsourcelines(origin)
    return len(lines), first
