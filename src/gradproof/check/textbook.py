"""What kernels claim to be, as their textbook formulas, and how each goes wrong, in words.

A formula takes a Call (the kernel's arguments in float64) and returns its result, or the new values of the arguments
that it writes, by name. The first readings of a textbook are right, each for another habit of the field; the others
are mistakes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gradproof.check.blackbox import BlackBox
from gradproof.numerics.adam import adam_direction

SMALL = 2.0**-12  # of the large addend: what bfloat16 and float16 lose beside it, and float32 does not
EPSILONS = (1e-5, 1e-6, 1e-8, 1e-12, 0.0, 1e-3, 1e-4, 1e-7, 2.0**-23, 2.0**-7, 1e-2, 0.1)
LARGE = 30.0  # times a normal number: exponentials of such logits overflow float32


@dataclass(frozen=True)
class Call:
    """The arguments of a kernel: floating tensors and integer ones in their order, numbers and tensors by name."""

    floats: list[Tensor]
    integers: list[Tensor]
    numbers: dict[str, float]
    named: dict[str, Tensor]

    def number(self, *names: str) -> float | None:
        return next((self.numbers[name] for name in names if name in self.numbers), None)

    def tensor(self, *names: str) -> Tensor:
        return next(self.named[name] for name in names if name in self.named)


Formula = Callable[..., Any]  # of a Call: a tensor, or tensors by name
Reading = tuple[str, Formula]  # what is wrong about it; "" where nothing is


@dataclass(frozen=True)
class Textbook:
    """One kind of kernel: how it is called, what it takes, and its readings."""

    name: str
    words: tuple[str, ...]
    takes: Callable[[Call], bool]
    readings: Callable[[Call], Iterator[Reading]]
    hard: Callable[[list[Tensor]], list[Tensor]] | None = None  # small addends beside a large one
    exponentials: bool = False
    sums: bool = True  # found by trying, too; what has no sum in it is so only where it agrees to four digits


def order_of(box: BlackBox) -> list[int]:
    """The floating tensors among the arguments; those of a module's call come before its parameters."""
    own = len(list(box.module.parameters())) if box.module is not None else 0
    floats = [k for k in box.tensors if box.leaves[k].is_floating_point()]
    return [k for k in floats if k >= own] + [k for k in floats if k < own]


def call_of(box: BlackBox, dtype: torch.dtype) -> Call:
    """The arguments of a box on the host, in a dtype."""
    leaves = [
        x.detach().cpu().to(dtype if x.is_floating_point() else x.dtype) if isinstance(x, Tensor) else x
        for x in box.leaves
    ]
    pairs = list(zip(box.names, leaves, strict=True))
    return Call(
        [leaves[k] for k in order_of(box)],
        [leaves[k] for k in box.tensors if not leaves[k].is_floating_point()],
        {name: x for name, x in pairs if isinstance(x, (int, float))},
        {name: x for name, x in pairs if isinstance(x, Tensor)},
    )


def ranks(*wanted: int | None) -> Callable[[Call], bool]:
    """Whether a call has so many floating tensors, of these ranks (None: any above 0), and no integer ones."""

    def takes(call: Call) -> bool:
        found = [x.dim() for x in call.floats]
        fit = len(found) == len(wanted) and all(
            n > 0 if w is None else n == w for n, w in zip(found, wanted, strict=True)
        )
        return fit and not call.integers

    return takes


def either(*choices: Callable[[Call], bool]) -> Callable[[Call], bool]:
    return lambda call: any(takes(call) for takes in choices)


# ---- softmax


def softmax_readings(call: Call) -> Iterator[Reading]:
    dim = int(call.number("dim", "axis") or -1)
    yield "", lambda c: c.floats[0].softmax(dim)
    yield "", lambda c: c.floats[0].log_softmax(dim)
    yield "normalises over the first axis, not over the last", lambda c: c.floats[0].softmax(0)
    yield (
        "divides by the sum of all rows, not of each",
        lambda c: c.floats[0].flatten().softmax(0).view_as(c.floats[0]),
    )
    yield "does not divide by the sum", lambda c: (c.floats[0] - c.floats[0].amax(dim, True)).exp()
    yield "takes powers of 2, not of e", lambda c: (c.floats[0] * math.log(2)).softmax(dim)
    yield "leaves the last entry out of the sum", _softmax_without_last
    yield "counts what lies beyond the end of a row, up to a whole block, as zeros", _softmax_with_zeros


def _softmax_without_last(c: Call) -> Tensor:
    e = (c.floats[0] - c.floats[0].amax(-1, True)).exp()
    return e / e[..., :-1].sum(-1, keepdim=True)


def _softmax_with_zeros(c: Call) -> Tensor:
    x = c.floats[0]
    beyond = (1 << (x.shape[-1] - 1).bit_length()) - x.shape[-1]
    return torch.cat([x, x.new_zeros(*x.shape[:-1], beyond)], -1).softmax(-1)[..., : x.shape[-1]]


def hard_exponents(floats: list[Tensor]) -> list[Tensor]:
    return [_large_and_small(floats[0]).log(), *floats[1:]]


# ---- norms


def rms_norm_readings(call: Call) -> Iterator[Reading]:
    given = call.number("eps", "epsilon")
    for eps in EPSILONS if given is None else (given,):
        yield "", lambda c, e=eps: _rms(c, e) * _weight(c)
        yield "", lambda c, e=eps: _rms(c, e) * (1 + _weight(c))
    eps = 1e-6 if given is None else given
    x_of = lambda c: c.floats[0]  # noqa: E731
    square = lambda c: x_of(c).square().mean(-1, True)  # noqa: E731
    yield "divides by the mean square, not by its root", lambda c: x_of(c) / (square(c) + eps) * _weight(c)
    yield (
        "divides by the root of the sum of squares, not of their mean",
        lambda c: x_of(c) / (x_of(c).square().sum(-1, True) + eps).sqrt() * _weight(c),
    )
    yield (
        "multiplies by the root mean square, not divides by it",
        lambda c: x_of(c) * square(c).sqrt() * _weight(c),
    )
    yield "leaves the weight out", lambda c: _rms(c, eps)
    yield "subtracts the mean, as LayerNorm does", lambda c: _standard(c, eps) * _weight(c)
    yield "leaves the last entry out of the mean square", lambda c: _rms_without_last(c, eps)


def _rms(c: Call, eps: float) -> Tensor:
    x = c.floats[0]
    return x / (x.square().mean(-1, True) + eps).sqrt()


def _rms_without_last(c: Call, eps: float) -> Tensor:
    x = c.floats[0]
    return x / (x[..., :-1].square().sum(-1, True) / x.shape[-1] + eps).sqrt() * _weight(c)


def _weight(c: Call) -> Tensor | float:
    return c.floats[1] if len(c.floats) > 1 else 1.0


def layer_norm_readings(call: Call) -> Iterator[Reading]:
    given = call.number("eps", "epsilon")
    for eps in EPSILONS if given is None else (given,):
        yield "", lambda c, e=eps: _standard(c, e) * _weight(c) + _bias(c)
    eps = 1e-5 if given is None else given
    var = lambda c: c.floats[0].var(-1, unbiased=False, keepdim=True)  # noqa: E731
    centred = lambda c: c.floats[0] - c.floats[0].mean(-1, True)  # noqa: E731
    yield (
        "divides by the variance, not by its root",
        lambda c: centred(c) / (var(c) + eps) * _weight(c) + _bias(c),
    )
    yield (
        "takes the variance over n - 1, not n",
        lambda c: centred(c) / (c.floats[0].var(-1, keepdim=True) + eps).sqrt() * _weight(c) + _bias(c),
    )
    yield "does not subtract the mean", lambda c: _rms(c, eps) * _weight(c) + _bias(c)
    yield (
        "subtracts the mean from the variance only",
        lambda c: c.floats[0] / (var(c) + eps).sqrt() * _weight(c) + _bias(c),
    )
    yield "leaves the bias out", lambda c: _standard(c, eps) * _weight(c)
    yield "leaves the weight out", lambda c: _standard(c, eps) + _bias(c)
    yield "leaves weight and bias out", lambda c: _standard(c, eps)


def _standard(c: Call, eps: float) -> Tensor:
    x = c.floats[0]
    return (x - x.mean(-1, True)) / (x.var(-1, unbiased=False, keepdim=True) + eps).sqrt()


def _bias(c: Call) -> Tensor | float:
    return c.floats[2] if len(c.floats) > 2 else 0.0


def hard_squares(floats: list[Tensor]) -> list[Tensor]:
    return [_large_and_small(floats[0]).sqrt(), *map(_near_one, floats[1:])]


# ---- products and sums


def linear_readings(call: Call) -> Iterator[Reading]:
    x = call.floats[0]
    bias = _bias
    ways = [lambda c: c.floats[1].mT, lambda c: c.floats[1]]
    for matrix in [m for m in ways if m(call).shape[-2] == x.shape[-1]]:
        yield "", lambda c, m=matrix: c.floats[0] @ m(c) + bias(c)
    for matrix in [m for m in ways if m(call).shape[-2] == x.shape[-1]]:
        yield "leaves the bias out", lambda c, m=matrix: c.floats[0] @ m(c)
        yield "adds the bias twice", lambda c, m=matrix: c.floats[0] @ m(c) + 2 * bias(c)
        yield (
            f"leaves the last of {x.shape[-1]} terms out of each sum",
            lambda c, m=matrix: c.floats[0][..., :-1] @ m(c)[..., :-1, :] + bias(c),
        )
        yield (
            f"leaves the first of {x.shape[-1]} terms out of each sum",
            lambda c, m=matrix: c.floats[0][..., 1:] @ m(c)[..., 1:, :] + bias(c),
        )


def takes_linear(call: Call) -> bool:
    shapes = [tuple(x.shape) for x in call.floats]
    if len(shapes) not in (2, 3) or call.integers or len(shapes[0]) < 2 or len(shapes[1]) != 2:
        return False
    return shapes[0][-1] in shapes[1] and (len(shapes) == 2 or len(shapes[2]) == 1)


def hard_terms(floats: list[Tensor]) -> list[Tensor]:
    return [_large_and_small(floats[0]), *map(_near_one, floats[1:])]


def sum_readings(call: Call) -> Iterator[Reading]:
    for what in ("sum", "mean"):
        for dim in (None, -1, 0):
            yield (
                "",
                lambda c, w=what, d=dim: (
                    getattr(c.floats[0], w)() if d is None else getattr(c.floats[0], w)(d)
                ),
            )
    yield "leaves the last term out", lambda c: c.floats[0].flatten()[:-1].sum()
    yield "leaves the last term of each row out", lambda c: c.floats[0][..., :-1].sum(-1)


def segment_sum_readings(call: Call) -> Iterator[Reading]:
    yield "", lambda c: _segments(c, c.floats[0].shape[0])
    yield "keeps the last of a segment, not the sum", _last_of_segment
    yield "leaves the last element out", lambda c: _segments(c, c.floats[0].shape[0] - 1)
    yield "takes the mean of a segment, not the sum", _segment_mean


def _count_of_segments(c: Call) -> int:
    own = [n for n in c.numbers.values() if isinstance(n, int) and n > int(c.integers[0].max())]
    return own[0] if own else int(c.integers[0].max()) + 1


def _segments(c: Call, count: int) -> Tensor:
    x, ids = c.floats[0][:count], c.integers[0][:count].long()
    return torch.zeros(_count_of_segments(c), *x.shape[1:], dtype=x.dtype).index_add_(0, ids, x)


def _last_of_segment(c: Call) -> Tensor:
    x, made = c.floats[0], torch.zeros(_count_of_segments(c), *c.floats[0].shape[1:], dtype=c.floats[0].dtype)
    for k, segment in enumerate(c.integers[0].tolist()):
        made[segment] = x[k]
    return made


def _segment_mean(c: Call) -> Tensor:
    count = torch.bincount(c.integers[0].long(), minlength=_count_of_segments(c)).clamp_min(1)
    total = _segments(c, c.floats[0].shape[0])
    return total / count.view(-1, *[1] * (total.dim() - 1))


def takes_segments(call: Call) -> bool:
    if len(call.floats) != 1 or len(call.integers) != 1 or call.floats[0].dim() not in (1, 2):
        return False
    ids = call.integers[0]
    one_each = ids.dim() == 1 and len(ids) == len(call.floats[0])
    return one_each and ids.dtype != torch.bool and bool((ids >= 0).all())


def hard_column(floats: list[Tensor]) -> list[Tensor]:
    return [_large_and_small(floats[0].movedim(0, -1)).movedim(-1, 0).contiguous()]


# ---- cross-entropy


def cross_entropy_readings(call: Call) -> Iterator[Reading]:
    ignored = int(call.number("ignore_index") or -100)
    for way in ("mean", "sum", "none"):
        yield (
            "",
            lambda c, w=way: F.cross_entropy(
                c.floats[0], c.integers[0].long(), reduction=w, ignore_index=ignored
            ),
        )
    rows, classes = call.floats[0].shape
    mean = lambda c: F.cross_entropy(c.floats[0], c.integers[0].long(), ignore_index=ignored)  # noqa: E731
    total = lambda c: F.cross_entropy(  # noqa: E731
        c.floats[0], c.integers[0].long(), ignore_index=ignored, reduction="sum"
    )
    yield (
        f"divides by the {classes} classes, not by the {rows} rows",
        lambda c: total(c) / c.floats[0].shape[1],
    )
    yield "counts the ignored rows in the mean", lambda c: total(c) / c.floats[0].shape[0]
    yield "has the wrong sign", lambda c: -mean(c)
    yield "leaves the logarithm of the sum out", lambda c: -_picked(c).mean()
    yield "takes powers of 2, not of e, inside the logarithm", _base_two
    yield "leaves the last class out of the sum", _without_last_class


def _picked(c: Call) -> Tensor:
    return c.floats[0].gather(1, c.integers[0].long().clamp_min(0)[:, None])[:, 0]


def _base_two(c: Call) -> Tensor:
    return ((c.floats[0] * math.log(2)).logsumexp(1) - _picked(c)).mean()


def _without_last_class(c: Call) -> Tensor:
    return (c.floats[0][:, :-1].logsumexp(1) - _picked(c)).mean()


def takes_classes(call: Call) -> bool:
    if len(call.floats) != 1 or len(call.integers) != 1 or call.floats[0].dim() != 2:
        return False
    ids, (rows, classes) = call.integers[0], call.floats[0].shape
    return ids.shape == (rows,) and ids.dtype != torch.bool and bool((ids < classes).all())


# ---- attention


def attention_readings(call: Call) -> Iterator[Reading]:
    given = call.number("scale", "softmax_scale", "sm_scale")
    d = call.floats[0].shape[-1]
    scale = 1 / math.sqrt(d) if given is None else given
    for causal in (False, True):
        yield "", lambda c, k=causal: _attend(c, scale, k)
    for causal in (False, True):
        if given is None:
            yield "does not scale the scores by 1/√d", lambda c, k=causal: _attend(c, 1.0, k)
            yield "scales the scores by 1/d, not by 1/√d", lambda c, k=causal: _attend(c, 1 / d, k)
            yield "scales the scores by √d, not by 1/√d", lambda c, k=causal: _attend(c, math.sqrt(d), k)
    yield "its causal mask lets each position see the next one", lambda c: _attend(c, scale, True, 1)
    yield "its causal mask hides each position from itself", lambda c: _attend(c, scale, True, -1)
    yield "does not divide by the sum of the weights", lambda c: _scores(c, scale).exp() @ c.floats[2]


def _scores(c: Call, scale: float) -> Tensor:
    return c.floats[0] @ c.floats[1].mT * scale


def _attend(c: Call, scale: float, causal: bool, ahead: int = 0) -> Tensor:
    scores = _scores(c, scale)
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(ahead)
        scores = scores.masked_fill(~seen, -math.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ c.floats[2]


def takes_attention(call: Call) -> bool:
    if len(call.floats) != 3 or call.integers or call.floats[0].dim() < 2:
        return False
    q, k, v = (tuple(x.shape) for x in call.floats)
    return len(q) == len(k) == len(v) and q[:-2] == k[:-2] == v[:-2] and q[-1] == k[-1] and k[-2] == v[-2]


# ---- one number at a time


def elementwise(*right: Callable[[Tensor], Tensor], wrong: Sequence[tuple[str, Callable]] = ()) -> Callable:
    def readings(call: Call) -> Iterator[Reading]:
        for formula in right:
            yield "", lambda c, f=formula: f(c.floats[0])
        for words, formula in wrong:
            yield words, lambda c, f=formula: f(c.floats[0])

    return readings


def tanh_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


GELU_WRONG = (
    ("leaves the factor 1/2 out", lambda x: 2 * F.gelu(x)),
    ("takes x, not x/√2, into the error function", lambda x: x * 0.5 * (1 + torch.erf(x))),
    ("leaves the cubic term out", lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * x))),
)


def add_readings(call: Call) -> Iterator[Reading]:
    yield "", lambda c: c.floats[0] + c.floats[1]
    yield "", lambda c: c.floats[0] * c.floats[1]
    yield "subtracts", lambda c: c.floats[0] - c.floats[1]


# ---- steps of optimizers, on tensors that are written in place

P = ("p", "param", "params", "parameter", "weight", "w", "theta")
G = ("g", "grad", "gradient", "dw", "dp")
M = ("m", "exp_avg", "momentum", "momentum_buffer", "buf")
V = ("v", "exp_avg_sq", "square_avg", "second")
LR = ("lr", "learning_rate", "rate", "alpha")
DECAY = ("weight_decay", "wd", "decay")
STEP = ("step", "t", "steps")


def has_step(*wanted: tuple[str, ...]) -> Callable[[Call], bool]:
    return lambda call: (
        call.number(*LR) is not None and all(any(n in call.named for n in names) for names in wanted)
    )


def name_in(call: Call, names: tuple[str, ...]) -> str:
    return next(n for n in names if n in call.named)


def adam_readings(call: Call) -> Iterator[Reading]:
    decay = call.number(*DECAY) or 0.0
    yield "", lambda c: adam(c, decoupled=True)
    if decay:
        yield "adds the decay to the gradient, as Adam with L2 does", lambda c: adam(c, decoupled=False)
        yield "leaves the weight decay out", lambda c: adam(c, decay=0.0)
        yield (
            "decays by the rate alone, without lr",
            lambda c: adam(c, decay=decay / (call.number(*LR) or 1.0)),
        )
    yield "leaves the bias correction out", lambda c: adam(c, corrected=(False, False))
    yield "corrects the bias of the first moment only", lambda c: adam(c, corrected=(True, False))
    yield "corrects the bias of the second moment only", lambda c: adam(c, corrected=(False, True))
    yield "adds eps under the root", lambda c: adam(c, eps_inside=True)
    yield "keeps the gradient, not its square, in the second moment", lambda c: adam(c, squared=False)
    yield "divides by the second moment, not by its root", lambda c: adam(c, rooted=False)
    yield "goes up the gradient: the sign is wrong", lambda c: adam(c, sign=-1.0)
    yield "does nothing", lambda c: {name_in(c, P): c.tensor(*P)}


def adam(
    c: Call,
    decoupled: bool = True,
    decay: float | None = None,
    corrected: tuple[bool, bool] = (True, True),
    eps_inside: bool = False,
    squared: bool = True,
    rooted: bool = True,
    sign: float = 1.0,
) -> dict[str, Tensor]:
    """One step of AdamW (or of Adam with L2), with one thing wrong where it is asked for."""
    p, g, m, v = c.tensor(*P), c.tensor(*G), c.tensor(*M), c.tensor(*V)
    lr, b1, b2 = c.number(*LR) or 0.0, c.number("beta1", "b1"), c.number("beta2", "b2")
    b1, b2, eps = 0.9 if b1 is None else b1, 0.999 if b2 is None else b2, c.number("eps", "epsilon") or 1e-8
    decay = (c.number(*DECAY) or 0.0) if decay is None else decay
    t = c.number(*STEP) or 1
    g = g if decoupled else g + decay * p
    m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * (g.square() if squared else g)
    direction = adam_direction(m, v, t, (b1, b2), eps, corrected, eps_inside, rooted)
    p = p * (1 - lr * decay) if decoupled else p
    return {name_in(c, P): p - sign * lr * direction, name_in(c, M): m, name_in(c, V): v}


def momentum_readings(call: Call) -> Iterator[Reading]:
    yield "", sgd
    yield "", lambda c: sgd(c, nesterov=True)
    yield (
        "leaves the momentum out",
        lambda c: {name_in(c, P): c.tensor(*P) - (c.number(*LR) or 0) * c.tensor(*G)},
    )
    yield "goes up the gradient: the sign is wrong", lambda c: sgd(c, sign=-1.0)
    yield "does nothing", lambda c: {name_in(c, P): c.tensor(*P)}


def sgd(c: Call, sign: float = 1.0, nesterov: bool = False) -> dict[str, Tensor]:
    p, g, m = c.tensor(*P), c.tensor(*G), c.tensor(*M)
    mu = next((c.numbers[n] for n in ("mu", "momentum", "beta") if n in c.numbers), 0.9)
    g = g + (c.number(*DECAY) or 0.0) * p
    m = mu * m + g
    return {
        name_in(c, P): p - sign * (c.number(*LR) or 0) * (g + mu * m if nesterov else m),
        name_in(c, M): m,
    }


def plain_readings(call: Call) -> Iterator[Reading]:
    lr = call.number(*LR) or 0.0
    yield (
        "",
        lambda c: {
            name_in(c, P): c.tensor(*P) - lr * (c.tensor(*G) + (c.number(*DECAY) or 0) * c.tensor(*P))
        },
    )
    yield (
        "goes up the gradient: the sign is wrong",
        lambda c: {name_in(c, P): c.tensor(*P) + lr * c.tensor(*G)},
    )
    yield "does nothing", lambda c: {name_in(c, P): c.tensor(*P)}


def _large_and_small(x: Tensor) -> Tensor:
    """1 in the first place of each row, and what half precision loses beside it in the others."""
    made = torch.full_like(x, SMALL, memory_format=torch.contiguous_format)
    made[..., 0] = 1.0
    return made


def _near_one(x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return (1 + 0.5 * torch.rand(x.shape, generator=generator, dtype=torch.float64)).to(x)


TEXTBOOKS = (
    Textbook(
        "cross-entropy",
        ("crossentropy", "celoss"),
        takes_classes,
        cross_entropy_readings,
        hard_exponents,
        True,
    ),
    Textbook("softmax", ("softmax",), ranks(None), softmax_readings, hard_exponents, True),
    Textbook(
        "RMSNorm", ("rmsnorm", "rms"), either(ranks(None, 1), ranks(None)), rms_norm_readings, hard_squares
    ),
    Textbook(
        "LayerNorm",
        ("layernorm", "ln"),
        either(ranks(None, 1, 1), ranks(None, 1), ranks(None)),
        layer_norm_readings,
        hard_squares,
    ),
    Textbook("attention", ("attention", "sdpa", "attn"), takes_attention, attention_readings, None, True),
    Textbook("linear", ("linear", "matmul", "gemm", "mm"), takes_linear, linear_readings, hard_terms),
    Textbook(
        "segment sum",
        ("segmentsum", "scattersum", "scatteradd"),
        takes_segments,
        segment_sum_readings,
        hard_column,
    ),
    Textbook("AdamW", ("adamw", "adam"), has_step(P, G, M, V), adam_readings, sums=False),
    Textbook("SGD with momentum", ("sgd", "momentum"), has_step(P, G, M), momentum_readings, sums=False),
    Textbook("SGD", ("sgd",), has_step(P, G), plain_readings, sums=False),
    Textbook("sum", ("sum", "mean", "reduce"), ranks(None), sum_readings, hard_terms),
    Textbook(
        "GELU",
        ("gelu",),
        ranks(None),
        elementwise(F.gelu, tanh_gelu, quick_gelu, wrong=GELU_WRONG),
        sums=False,
    ),
    Textbook("SiLU", ("silu", "swish"), ranks(None), elementwise(F.silu), sums=False),
    Textbook("ReLU", ("relu",), ranks(None), elementwise(torch.relu), sums=False),
    Textbook("tanh", ("tanh",), ranks(None), elementwise(torch.tanh), sums=False),
    Textbook("sigmoid", ("sigmoid",), ranks(None), elementwise(torch.sigmoid), sums=False),
    Textbook("sum of two", ("add", "mul"), ranks(None, None), add_readings, sums=False),
)

NEUTRAL = {
    "fused", "my", "own", "triton", "cuda", "cpp", "c", "cc", "native", "custom", "fast", "simple", "naive", "kernel",
    "op", "fn", "function", "func", "forward", "fwd", "backward", "layer", "module", "step", "call", "apply", "loss",
    "float", "f32", "fp32", "float32", "bf16", "half", "ctypes", "ext", "inplace", "the", "flash", "causal", "run",
    "block", "blocked", "tiled", "wrong", "right", "good", "bad", "py", "v", "with", "by", "and", "of",
}  # fmt: skip


def said_by(name: str) -> tuple[list[Textbook], bool]:
    """The textbooks that a name speaks of, and whether it speaks of nothing else.

    >>> [book.name for book in said_by("FusedRMSNorm")[0]], said_by("fused_linear_gelu")[1]
    (['RMSNorm'], False)
    """
    parts = [p.lower() for p in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)]
    spans = {"".join(parts[i:j]): (i, j) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1)}
    found = [(book, [spans[w] for w in book.words if w in spans]) for book in TEXTBOOKS]
    found = [(book, at) for book, at in found if at]
    covered = {k for _, at in found[:1] for i, j in at for k in range(i, j)}
    others = {k for _, at in found[1:] for i, j in at for k in range(i, j)} - covered
    left = [p for k, p in enumerate(parts) if k not in covered and p not in NEUTRAL and not p.isdigit()]
    return [book for book, _ in found], not left and not others


def fitting(books: Sequence[Textbook], call: Call) -> Iterator[tuple[Textbook, Any]]:
    """The textbooks whose arguments these are, with their readings."""
    for book in books:
        try:
            if book.takes(call):
                yield book, list(book.readings(call))
        except (RuntimeError, IndexError, StopIteration, ValueError):
            continue
