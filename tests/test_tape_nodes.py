"""Node by node: right operators of every family are silent in every precision; a planted mistake is found."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gradproof.tape import nodes
from gradproof.tape.nodes import check_nodes
from gradproof.tape.record import record
from gradproof.tape.shadow import shadow

PRECISIONS = ("float32", "bf16 autocast", "fp16 autocast", "bf16")


class Sized(nn.Module):
    """A family of operators with random sizes: `parts` are its modules, `call` what it computes of x."""

    def __init__(self, shape, call, **parts):
        super().__init__()
        self.shape, self.call = shape, call
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.call(self, x)


def sizes(draw, *limits):
    return [int(torch.randint(low, high + 1, (), generator=draw)) for low, high in limits]


def linear(draw):
    n, a, b = sizes(draw, (1, 40), (1, 70), (1, 70))
    return Sized((n, a), lambda m, x: m.f(x), f=nn.Linear(a, b))


def matmul(draw):
    n, a, b = sizes(draw, (1, 40), (1, 70), (1, 70))
    return Sized((n, a), lambda m, x: x @ m.w, w=nn.Parameter(torch.randn(a, b)))


def bmm(draw):
    n, t, a = sizes(draw, (1, 5), (1, 30), (1, 30))
    return Sized((n, t, a), lambda m, x: x @ (x * m.w).mT, w=nn.Parameter(torch.randn(a)))


def conv1d(draw):
    n, c, t = sizes(draw, (1, 4), (1, 9), (5, 30))
    return Sized((n, c, t), lambda m, x: m.f(x), f=nn.Conv1d(c, 6, 3, padding=1, stride=2))


def conv2d(draw):
    n, c, t = sizes(draw, (1, 4), (1, 9), (5, 14))
    return Sized((n, c, t, t), lambda m, x: m.f(x), f=nn.Conv2d(c, 6, 3))


def conv_transpose(draw):
    n, c, t = sizes(draw, (1, 4), (1, 9), (3, 8))
    return Sized((n, c, t, t), lambda m, x: m.f(x), f=nn.ConvTranspose2d(c, 5, 4, stride=2, padding=1))


def layer_norm(draw):
    n, t, c = sizes(draw, (1, 4), (1, 20), (1, 130))
    return Sized((n, t, c), lambda m, x: m.f(x), f=nn.LayerNorm(c))


def group_norm(draw):
    n, t = sizes(draw, (1, 4), (2, 9))
    return Sized((n, 8, t, t), lambda m, x: m.f(x), f=nn.GroupNorm(4, 8))


def batch_norm(draw):
    n, c, t = sizes(draw, (2, 6), (1, 9), (2, 8))
    return Sized((n, c, t, t), lambda m, x: m.f(x), f=nn.BatchNorm2d(c))


def softmax(draw):
    n, c = sizes(draw, (1, 30), (1, 200))
    return Sized((n, c), lambda m, x: (x * m.w).softmax(-1), w=nn.Parameter(torch.randn(c)))


def log_softmax(draw):
    n, c = sizes(draw, (1, 30), (1, 200))
    return Sized((n, c), lambda m, x: (x * m.w).log_softmax(-1), w=nn.Parameter(torch.randn(c)))


def pointwise(function):
    def family(draw):
        n, c = sizes(draw, (1, 30), (1, 60))
        return Sized((n, c), lambda m, x: function(x * m.w), w=nn.Parameter(torch.randn(c)))

    return family


def embedding(draw):
    v, c, t = sizes(draw, (2, 30), (1, 40), (1, 60))
    ids = torch.randint(0, v, (4, t), generator=draw)
    return Sized(
        (4, t, c),
        lambda m, x: m.f(ids) * x + m.p(torch.arange(t)),
        f=nn.Embedding(v, c),
        p=nn.Embedding(70, c),
    )


def attention(draw, causal=True):
    t, d = sizes(draw, (1, 40), (1, 33))
    d = 8 * (1 + d // 8)

    def call(m, x):
        q, k, v = m.f(x).unflatten(-1, (3, 2, d)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return Sized((3, t, d), call, f=nn.Linear(d, 6 * d))


def attention_formula(draw):
    t, d = sizes(draw, (1, 40), (1, 33))

    def call(m, x):
        q, k, v = m.f(x).chunk(3, -1)
        return (q @ k.mT / math.sqrt(d)).softmax(-1) @ v

    return Sized((3, t, d), call, f=nn.Linear(d, 3 * d))


def cross_entropy(draw):
    n, c = sizes(draw, (1, 40), (2, 120))
    y = torch.randint(0, c, (n,), generator=draw)
    return Sized(
        (n, 16), lambda m, x: F.cross_entropy(m.f(x).float(), y, label_smoothing=0.1), f=nn.Linear(16, c)
    )


def reductions(draw):
    n, c = sizes(draw, (1, 40), (1, 90))
    return Sized(
        (n, c),
        lambda m, x: (x * m.w).mean(0) * (x * m.w).sum(1, keepdim=True) + (x * m.w).mean(),
        w=nn.Parameter(torch.randn(c)),
    )


def broadcasting(draw):
    n, t, c = sizes(draw, (1, 9), (1, 20), (1, 40))
    parts = {
        "w": nn.Parameter(torch.randn(c)),
        "d": nn.Parameter(1 + torch.rand(t, 1)),
        "s": nn.Parameter(torch.ones(())),
    }
    return Sized((n, t, c), lambda m, x: (x * m.w + m.s) / m.d / m.s * 0.37, **parts)


def indexing(draw):
    n, c = sizes(draw, (2, 30), (2, 40))
    rows = torch.randint(0, n, (50,), generator=draw)
    columns = torch.randint(0, c, (n, 20), generator=draw)

    def call(m, x):
        h = x * m.w
        spread = torch.zeros(n, c, dtype=h.dtype).scatter_add(1, columns, h.gather(1, columns))
        return (
            h[rows].sum() + h.index_select(0, rows).square().sum() + (spread * h).sum() + h[:, 1:].abs().sum()
        )

    return Sized((n, c), call, w=nn.Parameter(torch.randn(c)))


def joining(draw):
    n, c = sizes(draw, (1, 9), (2, 40))

    def call(m, x):
        h = m.f(x)
        left, right = h.split([1, c - 1], 1)
        return torch.stack([torch.cat([right, left], 1), h]).permute(1, 0, 2).flatten(1).roll(1, 1)

    return Sized((n, c), call, f=nn.Linear(c, c))


def interpolation(draw):
    n, t = sizes(draw, (1, 3), (2, 9))

    def call(m, x):
        h = m.f(x)
        wide = F.interpolate(h, scale_factor=2, mode="bilinear", align_corners=False)
        return wide + F.interpolate(h, scale_factor=2, mode="nearest")

    return Sized((n, 3, t, t), call, f=nn.Conv2d(3, 4, 1))


def pooling(draw):
    n, t = sizes(draw, (1, 3), (4, 12))

    def call(m, x):
        h = m.f(x)
        pooled = F.max_pool2d(h, 3, 2, padding=1).sum() + F.adaptive_avg_pool2d(h, 2).square().sum()
        return pooled + F.avg_pool2d(h, 3, 1, padding=1).square().mean()

    return Sized((n, 3, t, t), call, f=nn.Conv2d(3, 4, 1))


def recurrent(kind):
    def family(draw):
        n, c, t = sizes(draw, (1, 5), (1, 20), (1, 9))
        return Sized((t, n, c), lambda m, x: m.f(x)[0], f=kind(c, 7))

    return family


def gated(draw):
    """What a network writes in place, and reads again."""
    n, c = sizes(draw, (1, 20), (1, 40))
    return Sized((n, c), lambda m, x: m.f(x).relu_() * m.g(x).sigmoid(), f=nn.Linear(c, c), g=nn.Linear(c, c))


FAMILIES = {
    "linear": linear, "matmul": matmul, "bmm": bmm, "conv1d": conv1d, "conv2d": conv2d,
    "conv_transpose": conv_transpose, "layer_norm": layer_norm, "group_norm": group_norm, "batch_norm": batch_norm,
    "softmax": softmax, "log_softmax": log_softmax, "gelu": pointwise(F.gelu), "silu": pointwise(F.silu),
    "tanh": pointwise(torch.tanh), "sigmoid": pointwise(torch.sigmoid), "softplus": pointwise(F.softplus),
    "exp": pointwise(lambda x: x.clamp(-9, 9).exp()), "embedding": embedding, "attention": attention,
    "attention_formula": attention_formula, "cross_entropy": cross_entropy, "reductions": reductions,
    "broadcasting": broadcasting, "indexing": indexing, "joining": joining, "interpolation": interpolation,
    "pooling": pooling, "rnn": recurrent(nn.RNN), "lstm": recurrent(nn.LSTM), "gated": gated,
}  # fmt: skip


def tape_of(model, x, precision, weigh=lambda out: out, plant=None):
    """One taped step; `weigh` makes a scalar of what comes out, `plant` may put a hook on what goes in."""
    if precision == "bf16":
        model, x = model.bfloat16(), x.bfloat16()
    low = torch.float16 if precision == "fp16 autocast" else torch.bfloat16
    with record({p: n for n, p in model.named_parameters()}) as tape:
        with torch.autocast("cpu", low, enabled="autocast" in precision):
            h = x * model.gain
            if plant is not None:
                h.register_hook(plant)
            out = model(h)
        weigh(out).backward()
    assert not tape.broken, tape.broken
    return tape


def built(family, seed, scale=1.0, offset=0.0):
    torch.manual_seed(seed)
    draw = torch.Generator().manual_seed(seed)
    model = FAMILIES[family](draw)
    model.gain = nn.Parameter(torch.ones(model.shape[-1]))
    return model, scale * torch.randn(model.shape) + offset


def cancelling(out):
    """Weights of both signs that sum to zero, so that what is summed cancels."""
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(77))
    return (out.float() * (weights - weights.mean())).sum()


def saturated(out):
    """A loss that is nearly zero and whose gradient is what rounding leaves of it."""
    flat = out.float().flatten()[None] * 30
    return F.cross_entropy(flat, flat.argmax(1)) + 1e-6 * flat.sum()


def squared(out):
    return out.float().square().mean()


# scale and offset of what goes in, and what is made of what comes out
WAYS = (
    (1.0, 0.0, squared), (30.0, 0.0, cancelling), (1e-3, 0.0, saturated), (1.0, 20.0, cancelling),
    (1.0, 0.0, saturated),
)  # fmt: skip


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_right_operators_are_silent(family, precision):
    for seed, (scale, offset, weigh) in enumerate(WAYS):
        model, x = built(family, seed, scale, offset)
        try:
            tape = tape_of(model, x, precision, weigh)
        except (RuntimeError, NotImplementedError) as error:
            pytest.skip(f"not on this device: {str(error).splitlines()[0][:80]}")
        report = check_nodes(tape)
        assert not report.wrong, (seed, report.wrong)
        assert report.judged and not report.unjudged, (seed, report)


MISTAKES = {
    "26 % off": lambda g: g * 1.26,
    "twice": lambda g: g * 2,
    "the sign": lambda g: -g,
    "one row": lambda g: torch.cat([3 * g[:1], g[1:]]),
}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize(
    "family", ["linear", "conv2d", "layer_norm", "attention", "embedding", "lstm", "gelu"]
)
def test_a_changed_gradient_is_found(family, mistake, precision):
    model, x = built(family, 1)
    try:
        tape = tape_of(model, x, precision, cancelling, plant=MISTAKES[mistake])
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"not on this device: {str(error).splitlines()[0][:80]}")
    answer = shadow(tape)
    assert [culprit.kind for culprit in answer.culprits] == ["changed by a hook"], str(answer)
    assert answer.culprits[0].line.file == __file__
    assert answer.culprits[0].confidence == "proven"


@pytest.mark.parametrize("plant", [None, MISTAKES["twice"]])
def test_a_step_that_does_not_fit_is_judged_in_parts(plant, monkeypatch):
    """Each part is a replay of its own; a tensor's readers are always in one of them."""
    model, x = built("attention_formula", 3)
    tape = tape_of(model, x, "bf16 autocast", squared, plant)
    whole = check_nodes(tape)
    monkeypatch.setattr(nodes, "HELD", 1)
    parts = check_nodes(tape)
    assert len(list(nodes._windows(tape, nodes.Plan(tape).targets()))) > 5
    assert (parts.judged, len(parts.wrong)) == (whole.judged, len(whole.wrong))
    assert parts.sizes == pytest.approx(whole.sizes)
    assert len(whole.wrong) == (plant is not None)


def test_a_tensor_with_several_readers_written_in_place():
    torch.manual_seed(0)
    model = nn.Linear(5, 5)
    x = torch.randn(7, 5)
    with record({p: n for n, p in model.named_parameters()}) as tape:
        h = model(x)
        y = h * 2 + h.exp()
        y.mul_(h).add_(1).relu_()
        (y * y + y.detach()).sum().backward()
    report = check_nodes(tape)
    assert report.right, report
