"""Hand-written backward passes without any autograd: forward and backward as a pair, in NumPy or torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from gradproof.check.gradient import GradientCheck, check_subject
from gradproof.check.subject import (
    Subject,
    argument_names,
    describe,
    differentiable,
    floating_outputs,
    is_integral,
    name_of,
    widen,
)
from gradproof.errors import UserError


def check_backward(forward: Callable, backward: Callable, *inputs: Any) -> GradientCheck:
    """Raise `GradientMismatch` if `backward` is not the derivative of `forward`, else say how surely it is.

    `forward(*inputs)` returns `(out, cache)`; `backward(dout, cache)` returns the gradients of the inputs in
    their order, for all of them or for the floating-point ones; `out` may be a tuple, then `dout` is one too.

        check_backward(layernorm_forward, layernorm_backward, x, weight, bias)
    """
    return check_subject(subject_of_pair(forward, backward, inputs))


def subject_of_pair(forward: Callable, backward: Callable, inputs: Sequence[Any]) -> Subject:
    """A hand-written pair: forward(*inputs) -> (out, cache), backward(dout, cache) -> gradients."""
    numpy_in = any(isinstance(x, numpy.ndarray) for x in inputs)
    tensors = [torch.from_numpy(x.copy()) if isinstance(x, numpy.ndarray) else x for x in inputs]
    name = name_of(forward).removesuffix("_forward")
    names = argument_names(forward)
    floats = [i for i, x in enumerate(tensors) if isinstance(x, Tensor) and x.is_floating_point()]
    which = differentiable(tensors)
    if not which:
        kinds = ", ".join(describe(x) for x in tensors) or "no inputs"
        raise UserError(
            f"{name} has no differentiable input: got {kinds}; pass at least one floating-point array"
        )

    def run(values: Sequence[Tensor]) -> tuple[list[Tensor], Any, Any]:
        filled = list(tensors)
        for i, value in zip(which, values, strict=True):
            filled[i] = value
        with torch.no_grad():
            result = forward(*[x.numpy() if numpy_in and isinstance(x, Tensor) else x for x in filled])
        if not (isinstance(result, tuple) and len(result) == 2):
            raise UserError(
                f"{name_of(forward)} returned {describe(result)}; forward must return (out, cache)"
            )
        outs = floating_outputs(_to_tensors(result[0]), name, imaginary=values[0].is_complex())
        return outs, *result

    def gradients(values: Sequence[Tensor], cotangents: Sequence[Tensor]) -> list[Tensor | None]:
        _, out, cache = run(values)
        douts = [w.numpy() if numpy_in else w for w in cotangents]
        with torch.no_grad():
            found = backward(tuple(douts) if isinstance(out, tuple | list) else douts[0], cache)
        found = [_to_tensors(g) for g in (found if isinstance(found, tuple | list) else [found])]
        return _match_gradients(found, name_of(backward), len(tensors), floats, which)

    def in_float64() -> Subject:
        wide = widen(tensors)
        return subject_of_pair(
            forward, backward, [x.numpy() if numpy_in and isinstance(x, Tensor) else x for x in wide]
        )

    input_names = tuple(names[i] if i < len(names) else f"input {i}" for i in which)
    point = tuple(tensors[i].detach() for i in which)
    others = tuple((names[i], x) for i, x in enumerate(tensors) if is_integral(x) and i < len(names))
    return Subject(name, input_names, point, lambda values: run(values)[0], gradients, in_float64, others)


def _to_tensors(result: Any) -> Any:
    if isinstance(result, tuple | list):
        return [_to_tensors(x) for x in result]
    if isinstance(result, numpy.ndarray | numpy.number | float):
        return torch.from_numpy(numpy.array(result))
    return result


def _match_gradients(
    found: list, name: str, inputs: int, floats: list[int], which: list[int]
) -> list[Tensor | None]:
    """Gradients in the order of the checked inputs, from a backward that gives all or the floating ones."""
    if len(found) == inputs:
        return [found[i] for i in which]
    if len(found) == len(floats):
        return [found[floats.index(i)] for i in which]
    raise UserError(
        f"{name} returned {len(found)} gradients for {inputs} inputs, {len(floats)} of them floating-point; "
        "return one for each, in the order of forward's arguments"
    )
