"""What is put to the test: a function of some tensors at one point, and the gradients its backward claims.

A torch function, a module, and a hand-written forward/backward pair all become a `Subject`.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from gradproof.errors import UserError


@dataclass(frozen=True)
class Subject:
    """A function at a point: `outputs` evaluates it, `gradients` asks its backward."""

    name: str
    input_names: tuple[str, ...]
    point: tuple[Tensor, ...]  # the differentiable inputs
    outputs: Callable[[Sequence[Tensor]], list[Tensor]]
    gradients: Callable[..., list[Tensor | None]]  # of (inputs, incoming gradients)
    in_float64: Callable[[], Subject] | None = None  # builds the same function in float64
    others: tuple[
        tuple[str, Tensor], ...
    ] = ()  # integer and boolean inputs, by name: masks, indices, targets
    parameters: int = 0  # how many of the inputs, from the first on, are a module's parameters
    notes: tuple[str, ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        """The narrowest of the inputs' dtypes: what the noise of the function is counted in."""
        return max((x.dtype for x in self.point), key=lambda dtype: torch.finfo(dtype).eps)


def subject_of_function(fn: Callable, inputs: Sequence[Any], name: str | None = None) -> Subject:
    """A torch function, `autograd.Function` or module, with the inputs it is called with."""
    if isinstance(fn, torch.nn.Module):
        return subject_of_module(copy.deepcopy(fn), tuple(inputs), {}, name or type(fn).__name__)
    if isinstance(fn, type) and issubclass(fn, torch.autograd.Function):
        names = argument_names(fn.forward)  # the class has the name; fn.apply.__name__ is "apply"
        skip = 0 if hasattr(fn, "setup_context") and fn.setup_context is not _OLD_STYLE else 1
        return _subject_of_call(fn.apply, tuple(inputs), {}, name or fn.__name__, names[skip:])
    named = name or name_of(fn)
    return _subject_of_call(fn, tuple(inputs), {}, named, argument_names(fn))


_OLD_STYLE = torch.autograd.Function.setup_context


def name_of(fn: Callable) -> str:
    """What a person calls this function: `Gelu` for `Gelu.apply`, `softmax` for a partial of it."""
    owner = getattr(fn, "__self__", None)
    if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
        return owner.__name__
    inner = getattr(fn, "func", fn)  # functools.partial
    return getattr(inner, "__name__", type(inner).__name__)


def argument_names(fn: Callable) -> list[str]:
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # built-in functions have none
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def subject_of_module(module: torch.nn.Module, args: tuple, kwargs: dict, name: str) -> Subject:
    """A module at its real inputs; parameters that require gradients are inputs like the others."""
    args, kwargs = tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, (args, kwargs))
    parameters = {n: p.detach() for n, p in module.named_parameters() if p.requires_grad}

    def call(parameters: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        # a module may write into its inputs (ReLU(inplace=True)): never into ours, and never into a leaf
        args, kwargs = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, (args, kwargs))
        return torch.func.functional_call(module, parameters, args, kwargs)

    def in_float64() -> Subject:
        wide_args, wide_kwargs = widen((args, kwargs))
        return subject_of_module(copy.deepcopy(module).double(), wide_args, wide_kwargs, name)

    names = ["", *argument_names(module.forward)]
    subject = _subject_of_call(call, (parameters, *args), kwargs, name, names)
    count = sum(name in parameters for name in subject.input_names)
    return replace(subject, in_float64=in_float64, parameters=count)


def _subject_of_call(fn: Callable, args: tuple, kwargs: dict, name: str, names: list[str]) -> Subject:
    leaves, tree = tree_flatten((args, kwargs))
    leaf_names = names_of_leaves(args, kwargs, names)
    which = differentiable(leaves)
    if not which:
        kinds = ", ".join(describe(x) for x in leaves) or "no inputs"
        raise UserError(
            f"{name} has no differentiable input: got {kinds}; pass at least one floating-point tensor"
        )
    point = tuple(leaves[i].detach() for i in which)

    def call(values: Sequence[Tensor]) -> list[Tensor]:
        filled = list(leaves)
        for i, value in zip(which, values, strict=True):
            filled[i] = value
        args, kwargs = tree_unflatten(filled, tree)
        return floating_outputs(fn(*args, **kwargs), name, imaginary=values[0].is_complex())

    def outputs(values: Sequence[Tensor]) -> list[Tensor]:
        with torch.no_grad():
            return [out.detach() for out in call(values)]

    def gradients(
        values: Sequence[Tensor], cotangents: Sequence[Tensor], *, graph: bool = False
    ) -> list[Tensor | None]:
        """Ask autograd; with `graph`, at these very values, so that the answer can be differentiated."""
        with torch.enable_grad():
            if not graph:
                values = [like_layout(v, p).requires_grad_() for v, p in zip(values, point, strict=True)]
            outs = call(values)
            pairs = [(o, w) for o, w in zip(outs, cotangents, strict=True) if o.requires_grad]
            if not pairs:
                raise UserError(
                    f"no output of {name} is connected to its inputs, so there is no gradient to check; "
                    "look for detach(), .data, .item(), torch.no_grad() or a round trip through NumPy"
                )
            connected, weights = zip(*pairs, strict=True)
            return list(
                torch.autograd.grad(connected, values, weights, create_graph=graph, allow_unused=True)
            )

    def in_float64() -> Subject:
        wide_args, wide_kwargs = widen((args, kwargs))
        return _subject_of_call(fn, wide_args, wide_kwargs, name, names)

    input_names = tuple(leaf_names[i] for i in which)
    others = tuple((n, x) for n, x in zip(leaf_names, leaves, strict=True) if is_integral(x))
    return Subject(name, input_names, point, outputs, gradients, in_float64, others)


def is_integral(x: Any) -> bool:
    return isinstance(x, Tensor) and not x.is_floating_point() and not x.is_complex()


def differentiable(leaves: list) -> list[int]:
    """Inputs that require gradients where some do, else every finite floating-point one (not a −inf mask)."""
    floats = [
        i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.is_floating_point() and x.numel()
    ]
    if any(isinstance(x, Tensor) and x.is_complex() for x in leaves):
        raise UserError(
            "complex inputs are not checked; pass torch.view_as_real(z) and rebuild z inside the function"
        )
    chosen = [i for i in floats if leaves[i].requires_grad]
    return chosen or [i for i in floats if bool(torch.isfinite(leaves[i]).all())]


def names_of_leaves(args: tuple, kwargs: dict, names: list[str]) -> list[str]:
    found = []
    for k, arg in enumerate(args):
        found += _names_below(arg, names[k] if k < len(names) else f"input {k}")
    for key, arg in kwargs.items():
        found += _names_below(arg, key)
    return found


def _names_below(arg: Any, name: str) -> list[str]:
    if isinstance(arg, dict):
        prefix = f"{name}." if name else ""
        return [n for key, value in arg.items() for n in _names_below(value, f"{prefix}{key}")]
    if type(arg) in (list, tuple):
        return [n for k, value in enumerate(arg) for n in _names_below(value, f"{name}[{k}]")]
    return [name] * len(tree_flatten(arg)[0])


def floating_outputs(result: Any, name: str, *, imaginary: bool = False) -> list[Tensor]:
    """The floating-point tensors among what a function returned, or one sentence that there are none.

    At `imaginary` inputs (a complex step) outputs are complex; else a complex output is two real ones.
    """
    tensors = [x for x in tree_flatten(result)[0] if isinstance(x, Tensor)]
    found = [x for x in tensors if x.is_floating_point() or x.is_complex()]
    if not imaginary:
        found = [torch.view_as_real(x) if x.is_complex() else x for x in found]
    if not found:
        raise UserError(
            f"{name} returned {describe(result)}, not a floating-point tensor; return the tensor itself"
        )
    return found


def describe(x: Any) -> str:
    if isinstance(x, Tensor):
        return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
    if isinstance(x, tuple | list):
        return f"a {type(x).__name__} of {', '.join(describe(y) for y in x[:3]) or 'nothing'}"
    return f"a {type(x).__name__}" if x is not None else "None"


def widen(tree: Any) -> Any:
    leaves, spec = tree_flatten(tree)
    wide = [like_layout(x, x, torch.float64).requires_grad_(x.requires_grad)
            if isinstance(x, Tensor) and x.is_floating_point() else x for x in leaves]  # fmt: skip
    return tree_unflatten(wide, spec)


def like_layout(values: Tensor, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A copy of `values` with the strides of `like`, so that a kernel sees the layout it was given."""
    overlapping = any(
        stride == 0 and size > 1 for size, stride in zip(like.shape, like.stride(), strict=True)
    )
    dtype = dtype or values.dtype
    if overlapping or like.is_contiguous():
        return values.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)
    laid_out = torch.empty_strided(like.shape, like.stride(), dtype=dtype, device=values.device)
    return laid_out.copy_(values.detach())
