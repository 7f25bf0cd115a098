"""PyTorch's own operators on the device in use, against the same on the host in float64: forward, backward, steps.

Each is run into and from memory that is transposed, sliced, offset: on one backend, addcmul_ into a transposed tensor
once wrote nothing, and a model did not train for a week.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gradproof.check.blackbox import backward_box, black_box, layouts_for
from gradproof.check.findings import Fault, KernelCheck
from gradproof.check.steps import find_step_faults
from gradproof.errors import UserError
from gradproof.numerics.difference import difference

DTYPES = (torch.float32, torch.bfloat16)
SHAPE = (6, 8)

# name -> (call on its arguments, how many of the shape (6, 8)): the first is written
IN_PLACE: dict[str, tuple[Callable[..., Any], int]] = {
    "addcmul_": (lambda x, a, b: x.addcmul_(a, b, value=0.5), 3),
    "addcdiv_": (lambda x, a, b: x.addcdiv_(a, b.abs().add(0.5), value=0.5), 3),
    "lerp_": (lambda x, a: x.lerp_(a, 0.25), 2),
    "lerp_ by a tensor": (lambda x, a, w: x.lerp_(a, w.sigmoid()), 3),
    "add_": (lambda x, a: x.add_(a, alpha=-0.1), 2),
    "sub_": (lambda x, a: x.sub_(a), 2),
    "mul_": (lambda x, a: x.mul_(a), 2),
    "mul_ by a number": (lambda x: x.mul_(0.9), 1),
    "div_": (lambda x, a: x.div_(a.abs().add(0.5)), 2),
    "copy_": (lambda x, a: x.copy_(a), 2),
    "sqrt_": (lambda x: x.abs_().sqrt_(), 1),
    "clamp_": (lambda x: x.clamp_(-0.5, 0.5), 1),
    "fill_": (lambda x: x.fill_(0.25), 1),
    "zero_": (lambda x: x.zero_(), 1),
    "addmm_": (lambda x, a, b: x.addmm_(a, (a.mT @ b)), 3),
    "masked_fill_": (lambda x, a: x.masked_fill_(a > 0, 2.0), 2),
    "index_add_": (lambda x, a: x.index_add_(0, torch.tensor([0, 2, 2, 1, 5, 4], device=x.device), a), 2),
    "_foreach_addcmul_": (lambda x, a, b: torch._foreach_addcmul_([x], [a], [b], 0.5), 3),
    "_foreach_lerp_": (lambda x, a: torch._foreach_lerp_([x], [a], 0.25), 2),
    "out= of add": (lambda x, a, b: torch.add(a, b, out=x), 3),
    "out= of matmul": (lambda x, a, b: torch.matmul(a, b.mT @ a, out=x), 3),
}

OUT_OF_PLACE: dict[str, tuple[Callable[..., Any], Sequence[tuple[int, ...]]]] = {
    "matmul": (torch.matmul, ((6, 8), (8, 5))),
    "linear": (F.linear, ((6, 8), (5, 8), (5,))),
    "softmax": (lambda x: x.softmax(-1), ((6, 8),)),
    "log_softmax": (lambda x: x.log_softmax(-1), ((6, 8),)),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (8,), w, b), ((6, 8), (8,), (8,))),
    "gelu": (F.gelu, ((6, 8),)),
    "silu": (F.silu, ((6, 8),)),
    "tanh": (torch.tanh, ((6, 8),)),
    "sum over rows": (lambda x: x.sum(0), ((6, 8),)),
    "mean": (lambda x: x.mean(-1), ((6, 8),)),
    "var": (lambda x: x.var(-1), ((6, 8),)),
    "amax": (lambda x: x.amax(-1), ((6, 8),)),
    "cat": (lambda a, b: torch.cat([a, b], -1), ((6, 8), (6, 3))),
    "where": (lambda a, b: torch.where(a > 0, a, b), ((6, 8), (6, 8))),
    "cumsum": (lambda x: x.cumsum(-1), ((6, 8),)),
    "scaled_dot_product_attention": (F.scaled_dot_product_attention, ((2, 6, 8), (2, 6, 8), (2, 6, 8))),
    "conv2d": (lambda x, w: F.conv2d(x, w, padding=1), ((2, 3, 6, 6), (4, 3, 3, 3))),
    "batch_norm": (lambda x: F.batch_norm(x, None, None, training=True), ((6, 8),)),
    "cross_entropy": (lambda x: F.cross_entropy(x, torch.arange(6, device=x.device)), ((6, 8),)),
}

OPTIMIZERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("SGD", {"lr": 0.1, "momentum": 0.9}),
    ("Adam", {"lr": 0.01}),
    ("AdamW", {"lr": 0.01}),
    ("AdamW", {"lr": 0.01, "foreach": True}),
    ("AdamW", {"lr": 0.01, "fused": True}),
    ("RMSprop", {"lr": 0.01}),
    ("Adagrad", {"lr": 0.1}),
)


def check_device(device: str) -> KernelCheck:
    """PyTorch's operators and optimizers on a device; what is wrong is in the faults of what is returned."""
    try:
        torch.zeros(2, device=device).add_(1).cpu()
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"there is no device {device!r} here: {str(error).splitlines()[0][:120]}") from error
    check = KernelCheck(f"torch {torch.__version__} on {device}")
    for dtype in DTYPES:
        for name, (call, count) in IN_PLACE.items():
            _compare(name, call, _drawn([SHAPE] * count, dtype, device), check, backward=False)
        for name, (call, shapes) in OUT_OF_PLACE.items():
            _compare(name, call, _drawn(shapes, dtype, device), check, backward=dtype == torch.float32)
    for name, settings in OPTIMIZERS:
        _compare_steps(name, settings, device, check)
    check.tried = [
        f"{len(IN_PLACE)} operators in place, {len(OUT_OF_PLACE)} forward and backward, "
        f"{len(OPTIMIZERS)} optimizers, in {' and '.join(str(d)[6:] for d in DTYPES)}, in all layouts"
    ]
    return check


def _drawn(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).to(device) for s in shapes]


def _compare(name: str, call: Callable, inputs: list[Tensor], check: KernelCheck, backward: bool) -> None:
    """One operator, each argument in each layout, forward and backward, against float64 on the host."""
    host = [x.cpu().double() for x in inputs]
    for of in ("", "backward of ") if backward else ("",):
        box, exact = black_box(call, inputs, name), black_box(call, host, name)
        if of:
            box, exact = backward_box(box, ()), backward_box(exact, ())  # type: ignore[assignment]
        if box is None or exact is None:
            return
        exact = exact.with_leaves([x.cpu().double() if isinstance(x, Tensor) else x for x in box.leaves])
        truth = exact.ask()
        for k in (-1, *box.tensors):
            for layout in layouts_for(box.leaves[k]) if k >= 0 else ["as given"]:
                _judge(f"{of}{name}", box, truth, k, layout, check)


def _judge(name: str, box: Any, truth: Any, k: int, layout: str, check: KernelCheck) -> None:
    said = f"{name} in {str(box.leaves[0].dtype)[6:]}"
    said += f", {'written' if k in truth.written else box.names[k]} {layout}" if k >= 0 else ""
    answer = box.ask({k: layout} if k >= 0 else None)
    if answer.refused:
        check.refused.append(f"{said}: {answer.refused}")
        return
    missing = [n for n in truth.names if n not in answer.names]
    if missing:
        check.add([Fault("device", f"{said}: writes nothing", f"{missing[0]} is as it was before")])
        return
    if answer.beside:
        check.add([Fault("device", f"{said}: writes into memory beside its output")])
    for result, exact in zip(answer.results, truth.results, strict=True):
        room = 4 * torch.finfo(result.dtype).eps * math.sqrt(48) * max(1.0, float(exact.abs().max()))
        gap = difference(result.cpu(), exact, absolute=8 * room if name.startswith("backward") else 2 * room)
        if not gap.ok:
            numbers = f"{gap.value.real:.6g} in place of {gap.reference.real:.6g} at {gap.place}"
            check.add([Fault("device", f"{said}: wrong in {gap.disagree} of {gap.total} entries", numbers)])
            return


def _compare_steps(name: str, settings: dict[str, Any], device: str, check: KernelCheck) -> None:
    parameters = [x.to(device) for x in _drawn([(4, 6), (7,), (2, 3, 4, 4)], torch.float32, "cpu")]
    said = name + "".join(f", {key}" for key in settings if key in ("foreach", "fused"))
    try:
        made = getattr(torch.optim, name)([torch.nn.Parameter(x.clone()) for x in parameters], **settings)
    except RuntimeError as error:
        check.refused.append(f"{said}: {str(error)[:120]}")
        return
    found = find_step_faults(made, parameters, name)
    check.add([Fault("device", fault.what.replace(name, said, 1), fault.evidence) for fault in found.faults])
