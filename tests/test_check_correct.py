"""Correct gradients, over every family of differentiable operators: none may be called wrong."""

import pytest
import torch
import torch.nn.functional as F

from gradproof.check.gradient import check_gradient


def t(*shape, low=None, high=None):
    """A tensor of that shape: normal, or uniform between two bounds."""
    if low is None:
        return torch.randn(shape)
    return torch.rand(shape) * (high - low) + low


def positive(*shape):
    return t(*shape, low=0.2, high=3.0)


def spd(n):
    a = torch.randn(n, n)
    return a @ a.T + n * torch.eye(n)


def swiglu(x, gate, up, down):
    return (F.silu(x @ gate) * (x @ up)) @ down


def rms_norm(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def rotary(x):
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] / 10.0 ** torch.arange(half, dtype=x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


def causal_attention(q, k, v):
    scores = q @ k.mT / q.shape[-1] ** 0.5
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v


INDEX = torch.tensor([2, 0, 2, 1])
TARGET = torch.tensor([1, 0, 4])

# name -> (function, a function that draws its inputs)
CORRECT = {
    "add": (torch.add, lambda: (t(3, 4), t(4))),
    "mul": (torch.mul, lambda: (t(3, 4), t(3, 1))),
    "div": (torch.div, lambda: (t(3, 4), positive(4))),
    "pow": (torch.pow, lambda: (positive(3, 4), t(4))),
    "sqrt": (torch.sqrt, lambda: (positive(5),)),
    "rsqrt": (torch.rsqrt, lambda: (positive(5),)),
    "exp": (torch.exp, lambda: (t(3, 4),)),
    "expm1": (torch.expm1, lambda: (t(7),)),
    "log": (torch.log, lambda: (positive(3, 4),)),
    "log1p": (torch.log1p, lambda: (positive(6),)),
    "sin": (torch.sin, lambda: (t(6),)),
    "tan": (torch.tan, lambda: (t(6, low=-1.0, high=1.0),)),
    "atan2": (torch.atan2, lambda: (t(6), positive(6))),
    "acos": (torch.acos, lambda: (t(6, low=-0.9, high=0.9),)),
    "sinh": (torch.sinh, lambda: (t(6),)),
    "erf": (torch.erf, lambda: (t(3, 4),)),
    "lgamma": (torch.lgamma, lambda: (positive(6),)),
    "digamma": (torch.digamma, lambda: (positive(6),)),
    "abs": (torch.abs, lambda: (t(9),)),
    "clamp": (lambda x: x.clamp(-0.5, 0.5), lambda: (t(20),)),
    "where": (lambda a, b: torch.where(a > 0, a, b), lambda: (t(8), t(8))),
    "maximum": (torch.maximum, lambda: (t(8), t(8))),
    "relu": (F.relu, lambda: (t(4, 6),)),
    "relu at zeros": (F.relu, lambda: (t(40).round(),)),
    "leaky relu": (F.leaky_relu, lambda: (t(4, 6),)),
    "gelu": (F.gelu, lambda: (t(4, 6),)),
    "gelu tanh": (lambda x: F.gelu(x, approximate="tanh"), lambda: (t(4, 6),)),
    "silu": (F.silu, lambda: (t(4, 6),)),
    "mish": (F.mish, lambda: (t(10),)),
    "softplus": (F.softplus, lambda: (t(10),)),
    "hardswish": (F.hardswish, lambda: (t(20) * 3,)),
    "glu": (F.glu, lambda: (t(3, 8),)),
    "prelu": (F.prelu, lambda: (t(3, 4, 5), t(4))),
    "sigmoid": (torch.sigmoid, lambda: (t(4, 6),)),
    "sum": (lambda x: x.sum(-1), lambda: (t(3, 4, 5),)),
    "prod": (lambda x: x.prod(-1), lambda: (t(3, 4),)),
    "var": (lambda x: x.var(-1), lambda: (t(3, 6),)),
    "norm": (lambda x: x.norm(dim=-1), lambda: (t(3, 6),)),
    "amax": (lambda x: x.amax(-1), lambda: (t(3, 6),)),
    "amax of ties": (lambda x: x.amax(-1), lambda: (t(6, 9).round(),)),
    "median": (lambda x: x.median(-1).values, lambda: (t(3, 7),)),
    "logsumexp": (lambda x: x.logsumexp(-1), lambda: (t(3, 6) * 5,)),
    "cumsum": (lambda x: x.cumsum(-1), lambda: (t(3, 6),)),
    "cumprod": (lambda x: x.cumprod(-1), lambda: (t(3, 5),)),
    "sort": (lambda x: x.sort(-1).values, lambda: (t(3, 6),)),
    "topk": (lambda x: x.topk(2).values, lambda: (t(3, 6),)),
    "softmax": (lambda x: x.softmax(-1), lambda: (t(3, 6) * 3,)),
    "log softmax": (lambda x: x.log_softmax(-1), lambda: (t(3, 6) * 3,)),
    "cross entropy": (lambda x: F.cross_entropy(x, TARGET), lambda: (t(3, 5),)),
    "binary cross entropy": (
        lambda x: F.binary_cross_entropy_with_logits(x, x.new_ones(x.shape)), lambda: (t(8),)),
    "smooth l1": (F.smooth_l1_loss, lambda: (t(9), t(9))),
    "kl": (
        lambda x, y: F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="sum"),
        lambda: (t(3, 4), t(3, 4))),
    "mse": (F.mse_loss, lambda: (t(9), t(9))),
    "matmul": (torch.matmul, lambda: (t(2, 3, 4), t(4, 5))),
    "bilinear": (F.bilinear, lambda: (t(2, 3), t(2, 4), t(5, 3, 4), t(5))),
    "einsum": (lambda a, b: torch.einsum("bij,bkj->bik", a, b), lambda: (t(2, 3, 4), t(2, 5, 4))),
    "outer": (torch.outer, lambda: (t(3), t(4))),
    "inverse": (torch.inverse, lambda: (spd(4),)),
    "solve": (torch.linalg.solve, lambda: (spd(4), t(4, 2))),
    "cholesky": (lambda a: torch.linalg.cholesky((a + a.mT) / 2), lambda: (spd(4),)),
    "eigenvalues": (lambda a: torch.linalg.eigvalsh((a + a.mT) / 2), lambda: (spd(4),)),
    "singular values": (torch.linalg.svdvals, lambda: (t(4, 3),)),
    "logdet": (torch.logdet, lambda: (spd(4),)),
    "linear": (F.linear, lambda: (t(3, 4), t(5, 4), t(5))),
    "conv1d": (lambda x, w: F.conv1d(x, w, padding=1), lambda: (t(2, 3, 7), t(4, 3, 3))),
    "conv2d": (F.conv2d, lambda: (t(1, 2, 5, 5), t(3, 2, 3, 3), t(3))),
    "conv transpose": (F.conv_transpose2d, lambda: (t(1, 2, 3, 3), t(2, 3, 2, 2))),
    "max pool": (lambda x: F.max_pool2d(x, 2), lambda: (t(1, 2, 6, 6),)),
    "average pool": (lambda x: F.avg_pool2d(x, 2), lambda: (t(1, 2, 6, 6),)),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"), lambda: (t(1, 2, 3, 3),)),
    "grid sample": (
        lambda x, g: F.grid_sample(x, g.tanh(), align_corners=False), lambda: (t(1, 1, 4, 4), t(1, 3, 3, 2))),
    "pad reflect": (lambda x: F.pad(x, (2, 2), mode="reflect"), lambda: (t(2, 3, 5),)),
    "layer norm": (lambda x, w, b: F.layer_norm(x, (6,), w, b), lambda: (t(3, 6), t(6), t(6))),
    "rms norm": (rms_norm, lambda: (t(3, 6), t(6))),
    "batch norm": (lambda x: F.batch_norm(x, None, None, training=True), lambda: (t(6, 3),)),
    "group norm": (lambda x: F.group_norm(x, 2), lambda: (t(3, 4, 5),)),
    "embedding": (lambda w: F.embedding(INDEX, w), lambda: (t(5, 3),)),
    "gather": (lambda x: x.gather(0, INDEX), lambda: (t(5),)),
    "index add": (lambda x, s: x.index_add(0, INDEX, s), lambda: (t(5, 2), t(4, 2))),
    "scatter reduce": (lambda x, s: x.scatter_add(0, INDEX, s), lambda: (t(5), t(4))),
    "cat, split, permute": (
        lambda x, y: torch.cat([x, y], 1).split(3, 1)[1].permute(1, 0), lambda: (t(2, 4), t(2, 3))),
    "stride and view": (lambda x: x[:, ::2].flip(0).reshape(-1), lambda: (t(3, 6),)),
    "roll and triu": (lambda x: x.roll(1, 0).triu(), lambda: (t(4, 4),)),
    "attention": (causal_attention, lambda: (t(2, 5, 4), t(2, 5, 4), t(2, 5, 4))),
    "fused attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        lambda: (t(1, 2, 5, 4), t(1, 2, 5, 4), t(1, 2, 5, 4))),
    "rotary": (rotary, lambda: (t(2, 5, 4),)),
    "swiglu": (swiglu, lambda: (t(2, 3), t(3, 4), t(3, 4), t(4, 3))),
    "fft": (lambda x: torch.fft.rfft(x), lambda: (t(2, 8),)),
    "complex inside": (lambda x: torch.fft.rfft(x).abs(), lambda: (t(2, 8),)),
    "dropout": (F.dropout, lambda: (t(20),)),
    "cosine": (F.cosine_similarity, lambda: (t(3, 5), t(3, 5))),
    "cdist": (torch.cdist, lambda: (t(3, 4), t(5, 4))),
    "scalar": (lambda x: x * x, lambda: (torch.tensor(1.7),)),
    "constant": (lambda x: x.softmax(-1).sum(-1), lambda: (t(3, 5),)),
    "unused input": (lambda x, y: x.exp() + 0 * y.sum(), lambda: (t(4), t(3))),
    "float32 inside": (lambda x: x.float().exp().sum(-1).to(x.dtype), lambda: (t(4, 9),)),
    "deep relu": (lambda x, w: F.relu(F.relu(F.relu(x @ w) @ w) @ w), lambda: (t(8, 16), t(16, 16) / 4)),
    "tiny numbers": (lambda x: (x * 1e-12).sin() * 1e12, lambda: (t(5),)),
    "huge numbers": (lambda x: (x.double() * 1e8).square().to(x.dtype), lambda: (t(5),)),
}  # fmt: skip
MODULES = {
    "lstm": (lambda: torch.nn.LSTM(3, 4, batch_first=True), lambda: (t(2, 5, 3),)),
    "gru": (lambda: torch.nn.GRU(3, 4), lambda: (t(5, 2, 3),)),
    "encoder layer": (
        lambda: torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), lambda: (t(2, 3, 8),)),
    "inplace relu": (
        lambda: torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(inplace=True)), lambda: (t(5, 3),)),
}  # fmt: skip


NO_BFLOAT16 = {
    "inverse", "solve", "cholesky", "eigenvalues", "singular values", "logdet", "fft", "complex inside",
    "cdist",
}  # fmt: skip


def test_there_are_enough():
    assert len(CORRECT) >= 60


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CORRECT)
def test_correct_functions_pass(name, dtype):
    if dtype == torch.bfloat16 and name in NO_BFLOAT16:
        pytest.skip("torch has no bfloat16 for it")
    fn, draw = CORRECT[name]
    for seed in range(2):
        torch.manual_seed(seed)
        inputs = [x.to(dtype) for x in draw()]
        found = check_gradient(fn, *inputs, name=name)
        if dtype == torch.float64:
            assert found.decided, found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_correct_modules_pass(name, dtype):
    build, draw = MODULES[name]
    torch.manual_seed(0)
    assert check_gradient(build().to(dtype), *[x.to(dtype) for x in draw()], name=name).decided
