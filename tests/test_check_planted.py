"""Wrong gradients, planted the way people make them: each must be found, and named by pattern or entry."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gradproof.check.gradient import GradientMismatch, check_gradient

# B batch, T time, C channels, V vocabulary


@dataclass(frozen=True)
class Plant:
    layer: str
    fault: str
    forward: Callable
    spoil: Callable  # (right gradients as a list, incoming gradient, inputs) -> wrong gradients
    draw: Callable  # () -> inputs
    words: str  # what the message must say


def with_backward(plant: Plant, spoil: Callable) -> type:
    """An autograd.Function whose backward is the right one, spoilt."""

    class Layer(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            ctx.inputs = inputs
            return plant.forward(*inputs)

        @staticmethod
        def backward(ctx, dout):
            floats = [x.is_floating_point() for x in ctx.inputs]
            with torch.enable_grad():
                inputs = [x.detach().requires_grad_(f) for x, f in zip(ctx.inputs, floats, strict=True)]
                out = plant.forward(*inputs)
                leaves = [x for x in inputs if x.requires_grad]
                right = list(torch.autograd.grad(out, leaves, dout))
            wrong = iter(spoil(right, dout, [x.detach() for x in inputs]))
            return tuple(next(wrong) if f else None for f in floats)

    return Layer


def scaled(which: int, factor: float, *place) -> Callable:
    """Spoil one gradient by a factor at a place (everywhere if none is given)."""

    def spoil(grads, dout, inputs):
        grads[which] = grads[which].clone()
        grads[which][place or ...] *= factor
        return grads

    return spoil


def replaced(which: int, formula: Callable) -> Callable:
    """Spoil one gradient by another formula of (right gradient, incoming gradient, *inputs)."""

    def spoil(grads, dout, inputs):
        grads[which] = formula(grads[which], dout, *inputs)
        return grads

    return spoil


def t(*shape: int) -> Tensor:
    return torch.randn(shape)


def linear(x, weight, bias):
    return x @ weight.T + bias


def layer_norm(x, weight, bias):
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps=1e-5)


def rms_norm(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def batch_norm(x, weight):
    return (x - x.mean(0)) * torch.rsqrt(x.var(0, unbiased=False) + 1e-5) * weight


def causal_softmax(scores):
    above = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(above, float("-inf")).softmax(-1)


def attention(q, k, v):
    return causal_softmax(q @ k.mT / q.shape[-1] ** 0.5) @ v


def cross_entropy(logits, target):
    return F.cross_entropy(logits, target)


def embedding(weight, index):
    return F.embedding(index, weight)


def dropout(x, keep):
    return x * keep * 2.0


def rotary(x):
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] / 10.0 ** torch.arange(half, dtype=x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


def swiglu(x, gate, up):
    return F.silu(x @ gate) * (x @ up)


def gru_gates(x, weight):
    z, r, n = (x @ weight).chunk(3, -1)
    return (1 - z.sigmoid()) * (r.sigmoid() * n).tanh()


def residual(x, weight):
    return x + torch.tanh(x @ weight)


def rstd(x):
    return torch.rsqrt(x.var(-1, unbiased=False, keepdim=True) + 1e-5)


def layer_norm_without_mean(dx, dout, x, weight, bias):
    """Forgets the mean of the incoming gradient."""
    return dx + rstd(x) * (dout * weight).mean(-1, keepdim=True)


def layer_norm_without_projection(dx, dout, x, weight, bias):
    xhat = (x - x.mean(-1, keepdim=True)) * rstd(x)
    return dx + rstd(x) * xhat * (dout * weight * xhat).mean(-1, keepdim=True)


def softmax_without_sum(dx, dout, scores):
    return scores.softmax(-1) * dout


def embedding_overwritten(dweight, dout, weight, index):
    """`=` where `+=` belongs: of an index that comes twice only the last share stays."""
    wrong = torch.zeros_like(dweight)
    for i, row in zip(index.flatten().tolist(), dout.reshape(-1, dout.shape[-1]), strict=True):
        wrong[i] = row
    return wrong


def leak_above(dx, dout, scores):
    return dx + 0.01 * torch.ones_like(dx).triu(1)


def tanh_gelu_backward(dx, dout, x):
    with torch.enable_grad():
        leaf = x.clone().requires_grad_()
        return torch.autograd.grad(F.gelu(leaf, approximate="tanh"), leaf, dout)[0]


TARGET = torch.tensor([1, 0, 4, 2, 2, 3])
PADDED = torch.tensor([1, -100, 4, 2, -100, 3])
INDEX = torch.tensor([[2, 0, 2], [5, 1, 0]])
KEEP = torch.tensor([[1, 0, 1, 1, 0], [0, 1, 1, 0, 1], [1, 1, 0, 0, 1]]).bool()


def draw_linear():
    return t(6, 5), t(8, 5), t(8)


def draw_attention():
    return t(2, 5, 4), t(2, 5, 4), t(2, 5, 4)


def draw_norm():
    return t(4, 6), t(6), t(6)


PLANTED = [
    Plant("linear", "factor 2", linear, scaled(1, 2.0), draw_linear, "a factor 2.000"),
    Plant("linear", "sign", linear, scaled(0, -1.0), draw_linear, "sign"),
    Plant(
        "linear",
        "transposed",
        linear,
        replaced(1, lambda g, *_: g.T),
        lambda: (t(6, 5), t(5, 5), t(5)),
        "transposed",
    ),
    Plant(
        "linear",
        "view for transpose",
        linear,
        replaced(1, lambda g, *_: g.T.reshape(g.shape)),
        draw_linear,
        "transposed",
    ),
    Plant(
        "linear", "bias mean", linear, scaled(2, 1 / 6), draw_linear, "one over the size of axis 0 of input 0"
    ),
    Plant("linear", "bias forgotten", linear, replaced(2, lambda g, *_: None), draw_linear, "says zero"),
    Plant("linear", "rows, 1e-3", linear, scaled(1, 1.001, slice(0, 4)), draw_linear, "rows 0 to 3"),
    Plant(
        "linear",
        "columns, 1e-2",
        linear,
        scaled(1, 1.01, slice(None), slice(1, None, 2)),
        lambda: (t(6, 7), t(8, 7), t(8)),
        "every second column from 1",
    ),
    Plant("linear", "last row", linear, scaled(1, 0.0, -1), draw_linear, "row 7 (the last)"),
    Plant("linear", "one entry, 1e-3", linear, scaled(1, 0.999, 3, 2), draw_linear, "only entry (3, 2)"),
    Plant(
        "layer norm",
        "mean forgotten",
        layer_norm,
        replaced(0, layer_norm_without_mean),
        draw_norm,
        "constant along columns",
    ),
    Plant(
        "layer norm",
        "projection forgotten",
        layer_norm,
        replaced(0, layer_norm_without_projection),
        draw_norm,
        "every entry",
    ),
    Plant(
        "layer norm",
        "weight gradient from x",
        layer_norm,
        replaced(1, lambda g, dout, x, w, b: (dout * x).sum(0)),
        draw_norm,
        "every entry",
    ),
    Plant("layer norm", "bias gradient, 1e-3", layer_norm, scaled(2, 1.001), draw_norm, "a factor 1.001"),
    Plant(
        "rms norm",
        "projection forgotten",
        rms_norm,
        replaced(0, lambda g, dout, x, w: dout * w * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)),
        lambda: (t(4, 6), t(6)),
        "every entry",
    ),
    Plant(
        "rms norm",
        "weight mean",
        rms_norm,
        scaled(1, 1 / 4),
        lambda: (t(4, 6), t(6)),
        "one over the size of axis 0",
    ),
    Plant(
        "batch norm",
        "mean forgotten",
        batch_norm,
        replaced(
            0, lambda g, dout, x, w: g + torch.rsqrt(x.var(0, unbiased=False) + 1e-5) * (dout * w).mean(0)
        ),
        lambda: (t(8, 3), t(3)),
        "constant along rows",
    ),
    Plant("batch norm", "weight sign", batch_norm, scaled(1, -1.0), lambda: (t(8, 3), t(3)), "sign"),
    Plant(
        "batch norm",
        "one channel, 1e-2",
        batch_norm,
        scaled(0, 1.01, slice(None), 1),
        lambda: (t(8, 3), t(3)),
        "column 1",
    ),
    Plant(
        "softmax",
        "sum forgotten",
        lambda x: x.softmax(-1),
        replaced(0, softmax_without_sum),
        lambda: (t(4, 6),),
        "every entry",
    ),
    Plant(
        "softmax",
        "mask forgotten",
        causal_softmax,
        replaced(0, leak_above),
        lambda: (t(2, 5, 5),),
        "above the diagonal",
    ),
    Plant(
        "cross entropy",
        "mean forgotten",
        cross_entropy,
        scaled(0, 6.0),
        lambda: (t(6, 5), TARGET),
        "a sum where a mean belongs",
    ),
    Plant(
        "cross entropy",
        "target forgotten",
        cross_entropy,
        replaced(0, lambda g, dout, x, y: dout * x.softmax(-1) / 6),
        lambda: (t(6, 5), TARGET),
        "names in each row",
    ),
    Plant(
        "cross entropy",
        "incoming gradient ignored",
        cross_entropy,
        replaced(0, lambda g, dout, x, y: g / dout),
        lambda: (t(6, 5), TARGET),
        "ignores the incoming",
    ),
    Plant(
        "cross entropy",
        "padding counted",
        cross_entropy,
        replaced(0, lambda g, dout, x, y: torch.where((y == -100)[:, None], dout * x.softmax(-1) / 4, g)),
        lambda: (t(6, 5), PADDED),
        "is -100",
    ),
    Plant(
        "cross entropy",
        "smoothing, 1e-3",
        cross_entropy,
        scaled(0, 0.999),
        lambda: (t(6, 5), TARGET),
        "a factor 0.999",
    ),
    Plant("attention", "scale forgotten", attention, scaled(0, 2.0), draw_attention, "a factor 2.000"),
    Plant(
        "attention", "swapped", attention, lambda g, dout, x: [g[1], g[0], g[2]], draw_attention, "swapped"
    ),
    Plant(
        "attention",
        "last key",
        attention,
        scaled(2, 0.0, slice(None), -1),
        draw_attention,
        "index 4 (the last) of axis 1",
    ),
    Plant("attention", "one head, 1e-3", attention, scaled(1, 1.001, 1), draw_attention, "index 1 of axis 0"),
    Plant(
        "attention",
        "off by one",
        attention,
        replaced(2, lambda g, *_: g.roll(1, 1)),
        draw_attention,
        "shifted by +1 along axis 1",
    ),
    Plant("gelu", "tanh formula", F.gelu, replaced(0, tanh_gelu_backward), lambda: (t(4, 5),), "every entry"),
    Plant(
        "gelu",
        "density forgotten",
        F.gelu,
        replaced(0, lambda g, dout, x: dout * 0.5 * (1 + torch.erf(x / 2**0.5))),
        lambda: (t(4, 5),),
        "every entry",
    ),
    Plant(
        "gelu",
        "zero below zero",
        F.gelu,
        replaced(0, lambda g, dout, x: g * (x > 0)),
        lambda: (t(5, 6),),
        "the input is negative",
    ),
    Plant(
        "relu",
        "passed through",
        F.relu,
        replaced(0, lambda g, dout, x: dout),
        lambda: (t(5, 6),),
        "passes the incoming gradient through",
    ),
    Plant(
        "leaky relu",
        "slope, 1e-1",
        F.leaky_relu,
        replaced(0, lambda g, d, x: torch.where(x < 0, 1.1 * g, g)),
        lambda: (t(5, 6),),
        "the input is negative",
    ),
    Plant(
        "silu",
        "tails, 1e-3",
        F.silu,
        replaced(0, lambda g, d, x: torch.where(x.abs() > 1, 1.001 * g, g)),
        lambda: (t(5, 6),),
        "exactly where |input| >",
    ),
    Plant(
        "embedding",
        "overwritten",
        embedding,
        replaced(0, embedding_overwritten),
        lambda: (t(7, 3), INDEX),
        "more than once",
    ),
    Plant(
        "embedding",
        "off by one",
        embedding,
        replaced(0, lambda g, *_: g.roll(1, 0)),
        lambda: (t(7, 3), INDEX),
        "shifted by +1 along rows",
    ),
    Plant(
        "embedding", "counted twice", embedding, scaled(0, 2.0), lambda: (t(7, 3), INDEX), "a factor 2.000"
    ),
    Plant(
        "convolution",
        "kernel not flipped",
        lambda x, w: F.conv1d(x, w, padding=1),
        replaced(1, lambda g, *_: g.flip(2)),
        lambda: (t(2, 3, 7), t(4, 3, 3)),
        "reversed along axis 2",
    ),
    Plant(
        "convolution",
        "border",
        lambda x, w: F.conv2d(x, w, padding=1),
        replaced(0, lambda g, *_: F.pad(g[..., 1:-1, 1:-1], (1, 1, 1, 1))),
        lambda: (t(1, 2, 6, 6), t(2, 2, 3, 3)),
        "everywhere except in indices 1 to 4 of axis 2",
    ),
    Plant(
        "convolution",
        "one output channel, 1e-3",
        lambda x, w: F.conv2d(x, w),
        scaled(1, 1.001, 2),
        lambda: (t(1, 2, 5, 5), t(3, 2, 3, 3)),
        "index 2 (the last) of axis 0",
    ),
    Plant(
        "max pool",
        "shared out",
        lambda x: F.max_pool2d(x, 2),
        scaled(0, 0.25),
        lambda: (t(1, 2, 6, 6),),
        "a factor 0.250",
    ),
    Plant("dropout", "scale forgotten", dropout, scaled(0, 0.5), lambda: (t(3, 5), KEEP), "a factor 0.500"),
    Plant(
        "dropout",
        "mask forgotten",
        dropout,
        replaced(0, lambda g, dout, x, keep: dout * 2.0),
        lambda: (t(3, 5), KEEP),
        "is False",
    ),
    Plant(
        "rotary",
        "turned the wrong way",
        rotary,
        replaced(0, lambda g, dout, x: rotary(dout)),
        lambda: (t(2, 5, 4),),
        "indices 1 to 4 of axis 1",
    ),
    Plant(
        "swiglu", "gate forgotten", swiglu, scaled(1, 0.0), lambda: (t(4, 3), t(3, 5), t(3, 5)), "says zero"
    ),
    Plant(
        "swiglu",
        "gate and up swapped",
        swiglu,
        lambda g, dout, x: [g[0], g[2], g[1]],
        lambda: (t(4, 3), t(3, 5), t(3, 5)),
        "swapped",
    ),
    Plant(
        "gru",
        "reset gate, 1e-2",
        gru_gates,
        scaled(1, 1.01, slice(None), slice(4, 8)),
        lambda: (t(3, 5), t(5, 12)),
        "columns 4 to 7",
    ),
    Plant(
        "residual",
        "skip forgotten",
        residual,
        replaced(0, lambda g, dout, x, w: g - dout),
        lambda: (t(4, 5), t(5, 5)),
        "-1 times the incoming gradient",
    ),
    Plant(
        "matmul",
        "last of the batch only",
        torch.matmul,
        scaled(0, 0.0, slice(0, 2)),
        lambda: (t(3, 4, 5), t(3, 5, 2)),
        "indices 0 to 1 of axis 0",
    ),
    Plant(
        "bilinear",
        "one axis scaled",
        lambda x, w: torch.einsum("bi,ijk,bk->bj", x, w, x),
        replaced(1, lambda g, *_: g * torch.arange(1.0, 5.0, dtype=g.dtype)[:, None]),
        lambda: (t(3, 5), t(5, 4, 5)),
        "index along axis 1 only",
    ),
]


def inputs_of(plant: Plant, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(len(plant.fault))
    return [x.to(dtype) if x.is_floating_point() else x for x in plant.draw()]


def test_there_are_enough():
    assert len(PLANTED) >= 40 and len({plant.layer for plant in PLANTED}) >= 12


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: f"{plant.layer}, {plant.fault}")
def test_planted_gradient_is_found_and_named(plant, dtype):
    with pytest.raises(GradientMismatch) as caught:
        check_gradient(with_backward(plant, plant.spoil), *inputs_of(plant, dtype), name="layer")
    assert plant.words in str(caught.value)
    assert caught.value.culprit.input == f"input {first_spoilt(plant, dtype)}"


def first_spoilt(plant: Plant, dtype: torch.dtype) -> int:
    """Which input's gradient the plant spoils, by looking."""
    inputs = inputs_of(plant, dtype)
    leaves = [x.requires_grad_() for x in inputs if x.is_floating_point()]
    out = plant.forward(*inputs)
    dout = torch.randn_like(out)
    right = torch.autograd.grad(out, leaves, dout)
    spoilt = with_backward(plant, plant.spoil).apply(*inputs)
    wrong = torch.autograd.grad(spoilt, leaves, dout, allow_unused=True)
    return next(
        k for k, (a, b) in enumerate(zip(right, wrong, strict=True)) if b is None or not torch.equal(a, b)
    )


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: f"{plant.layer}, {plant.fault}")
def test_healthy_twin_passes(plant):
    healthy = with_backward(plant, lambda grads, dout, inputs: grads)
    assert check_gradient(healthy, *inputs_of(plant, torch.float64), name="layer").decided


def region(shape, generator) -> tuple:
    """A random block, stride or single entry of a tensor, as an index."""
    place = [slice(None)] * len(shape)
    axis = int(torch.randint(len(shape), (1,), generator=generator))
    kind = int(torch.randint(3, (1,), generator=generator))
    start = int(torch.randint(shape[axis], (1,), generator=generator))
    if kind == 0:
        return tuple(int(torch.randint(n, (1,), generator=generator)) for n in shape)
    place[axis] = slice(start, None) if kind == 1 else slice(start % 2, None, 2)
    return tuple(place)


HEALTHY_LAYERS = {
    plant.layer: plant for plant in PLANTED if plant.layer not in ("dropout", "max pool", "relu")
}


@pytest.mark.parametrize("seed", range(30))
def test_random_plants_are_found_at_the_place_where_they_are(seed):
    generator = torch.Generator().manual_seed(seed)
    plant = sorted(HEALTHY_LAYERS.items())[seed % len(HEALTHY_LAYERS)][1]
    inputs = inputs_of(plant, torch.float64)
    floats = [k for k, x in enumerate(inputs) if x.is_floating_point()]
    which = int(torch.randint(len(floats), (1,), generator=generator))
    factor = 1 + 10 ** (-3 * float(torch.rand(1, generator=generator)))  # 100 % down to 1e-3
    place = region(inputs[floats[which]].shape, generator)
    with pytest.raises(GradientMismatch) as caught:
        check_gradient(with_backward(plant, scaled(which, factor, *place)), *inputs, name="layer")
    culprit = caught.value.culprit
    spoilt = torch.zeros(inputs[floats[which]].shape, dtype=torch.bool)
    spoilt[place] = True
    assert culprit.input == f"input {floats[which]}" and spoilt[culprit.place]
    assert culprit.error == pytest.approx(factor - 1, rel=1e-3)
