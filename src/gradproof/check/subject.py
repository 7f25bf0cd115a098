"""What is put to the test: a function of some tensors at one point, and the gradients its backward claims.

A torch function, a module, and a hand-written forward/backward pair all become a `Subject`; what cannot be
checked at all (nothing to differentiate, a mutated input, chance) is refused here, in one sentence.
"""

from __future__ import annotations

import copy
import inspect
import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from gradproof.errors import UserError
from gradproof.numerics.difference import difference

SEED = 20_26


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
    notes: tuple[str, ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        """The narrowest of the inputs' dtypes: what the noise of the function is counted in."""
        return max((x.dtype for x in self.point), key=lambda dtype: torch.finfo(dtype).eps)


def subject_of_function(fn: Callable, inputs: Sequence[Any], name: str | None = None) -> Subject:
    """A torch function, `autograd.Function` or module, with the inputs it is called with."""
    if isinstance(fn, torch.nn.Module):
        return subject_of_module(fn, tuple(inputs), {}, name or type(fn).__name__)
    if isinstance(fn, type) and issubclass(fn, torch.autograd.Function):
        names = _argument_names(fn.forward)  # the class has the name; fn.apply.__name__ is "apply"
        skip = 0 if hasattr(fn, "setup_context") and fn.setup_context is not _OLD_STYLE else 1
        return _subject_of_call(fn.apply, tuple(inputs), {}, name or fn.__name__, names[skip:])
    named = name or name_of(fn)
    return _subject_of_call(fn, tuple(inputs), {}, named, _argument_names(fn))


_OLD_STYLE = torch.autograd.Function.setup_context


def name_of(fn: Callable) -> str:
    """What a person calls this function: `Gelu` for `Gelu.apply`, `softmax` for a partial of it."""
    owner = getattr(fn, "__self__", None)
    if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
        return owner.__name__
    inner = getattr(fn, "func", fn)  # functools.partial
    return getattr(inner, "__name__", type(inner).__name__)


def _argument_names(fn: Callable) -> list[str]:
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # built-in functions have none
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def subject_of_module(
    module: torch.nn.Module, args: tuple, kwargs: dict, name: str, *, copied: bool = False
) -> Subject:
    """A module at its real inputs; parameters that require gradients are inputs like the others."""
    module = module if copied else copy.deepcopy(module)
    parameters = {n: p.detach() for n, p in module.named_parameters() if p.requires_grad}

    def call(parameters: dict[str, Tensor], args: tuple, kwargs: dict) -> Any:
        return torch.func.functional_call(module, parameters, args, kwargs)

    def in_float64() -> Subject:
        wide_args, wide_kwargs = _widen((args, kwargs))
        return subject_of_module(copy.deepcopy(module).double(), wide_args, wide_kwargs, name, copied=True)

    names = ["", *_argument_names(module.forward)]
    subject = _subject_of_call(
        lambda parameters, *args, **kwargs: call(parameters, args, kwargs),
        (parameters, *args), kwargs, name, names, own_inputs=False,
    )  # fmt: skip
    return replace(subject, in_float64=in_float64)


def _subject_of_call(
    fn: Callable, args: tuple, kwargs: dict, name: str, names: list[str], *, own_inputs: bool = True
) -> Subject:
    leaves, tree = tree_flatten((args, kwargs))
    leaf_names = _leaf_names(args, kwargs, names)
    which = _differentiable(leaves)
    if not which:
        kinds = ", ".join(_describe(x) for x in leaves) or "no inputs"
        raise UserError(
            f"{name} has no differentiable input: got {kinds}; pass at least one floating-point tensor"
        )
    point = tuple(leaves[i].detach() for i in which)

    def call(values: Sequence[Tensor]) -> list[Tensor]:
        filled = list(leaves)
        for i, value in zip(which, values, strict=True):
            # a module may write into its input (ReLU(inplace=True)): never into ours, and never into a leaf
            filled[i] = value if own_inputs else value.clone()
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
        wide_args, wide_kwargs = _widen((args, kwargs))
        return _subject_of_call(fn, wide_args, wide_kwargs, name, names, own_inputs=own_inputs)

    input_names = tuple(leaf_names[i] for i in which)
    others = tuple((n, x) for n, x in zip(leaf_names, leaves, strict=True) if _is_integral(x))
    return Subject(name, input_names, point, outputs, gradients, in_float64, others)


def _is_integral(x: Any) -> bool:
    return isinstance(x, Tensor) and not x.is_floating_point() and not x.is_complex()


def _differentiable(leaves: list) -> list[int]:
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


def _leaf_names(args: tuple, kwargs: dict, names: list[str]) -> list[str]:
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
            f"{name} returned {_describe(result)}, not a floating-point tensor; return the tensor itself"
        )
    return found


def _describe(x: Any) -> str:
    if isinstance(x, Tensor):
        return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
    if isinstance(x, tuple | list):
        return f"a {type(x).__name__} of {', '.join(_describe(y) for y in x[:3]) or 'nothing'}"
    return f"a {type(x).__name__}" if x is not None else "None"


def _widen(tree: Any) -> Any:
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


def subject_of_pair(forward: Callable, backward: Callable, inputs: Sequence[Any]) -> Subject:
    """A hand-written pair: forward(*inputs) -> (out, cache), backward(dout, cache) -> gradients."""
    numpy_in = any(isinstance(x, numpy.ndarray) for x in inputs)
    tensors = [torch.from_numpy(x.copy()) if isinstance(x, numpy.ndarray) else x for x in inputs]
    name = name_of(forward).removesuffix("_forward")
    names = _argument_names(forward)
    floats = [i for i, x in enumerate(tensors) if isinstance(x, Tensor) and x.is_floating_point()]
    which = _differentiable(tensors)
    if not which:
        kinds = ", ".join(_describe(x) for x in tensors) or "no inputs"
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
                f"{name_of(forward)} returned {_describe(result)}; forward must return (out, cache)"
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
        wide = _widen(tensors)
        return subject_of_pair(
            forward, backward, [x.numpy() if numpy_in and isinstance(x, Tensor) else x for x in wide]
        )

    input_names = tuple(names[i] if i < len(names) else f"input {i}" for i in which)
    point = tuple(tensors[i].detach() for i in which)
    others = tuple((names[i], x) for i, x in enumerate(tensors) if _is_integral(x) and i < len(names))
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


def with_checked_behaviour(subject: Subject, *, masked: bool = False) -> Subject:
    """The subject, made repeatable; refuses what mutates its inputs, is not finite, or stays random."""
    given = [x.clone() for x in subject.point]
    passed = [like_layout(x, x) for x in subject.point]
    first = _copies(subject.outputs(passed))
    for name, before, after in zip(subject.input_names, given, passed, strict=True):
        if not _same(before, after):
            place = difference(after, before).place
            raise UserError(
                f"{subject.name} writes into its input {name} (first seen at {place}), so it cannot be "
                "evaluated twice at one point; copy the input inside the function"
            )
    for k, out in enumerate(first):
        if not masked and not bool(torch.isfinite(out).all()):
            bad = int((~torch.isfinite(out)).sum())
            raise UserError(
                f"output {k} of {subject.name} is not finite at this point ({bad} of {out.numel()} entries); "
                "a derivative needs a point where the function is finite"
            )
    if _all_same(first, _copies(subject.outputs(subject.point))):
        return subject
    return _with_fixed_seeds(subject)


def _with_fixed_seeds(subject: Subject) -> Subject:
    seeded = replace(
        subject,
        outputs=lambda values: _seeded(subject.outputs, values),
        gradients=lambda values, cotangents: _seeded(subject.gradients, values, cotangents),
        notes=(*subject.notes, "the function is random; every evaluation was given the same seeds"),
    )
    first, second = (_copies(seeded.outputs(subject.point)) for _ in range(2))
    for k, (a, b) in enumerate(zip(first, second, strict=True)):
        # sums in changing order (atomics) are noise, which the check measures; anything larger is chance
        apart = difference(a, b, absolute=1e3 * torch.finfo(a.dtype).eps * b.abs().amax().double())
        if not apart.ok:
            raise UserError(
                f"{subject.name} is random even with torch's, NumPy's and Python's seeds fixed: output {k} "
                f"at {apart.place} was {apart.reference:.6g}, then {apart.value:.6g}; "
                "pass the random numbers as an input"
            )
    return seeded


def _seeded(call: Callable, *args: Any) -> Any:
    """Call with all seeds fixed, and put the generators back afterwards."""
    python, arrays = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng():
            torch.manual_seed(SEED)
            random.seed(SEED)
            numpy.random.seed(SEED)
            return call(*args)
    finally:
        random.setstate(python)
        numpy.random.set_state(arrays)


def _copies(outs: Sequence[Tensor]) -> list[Tensor]:
    return [out.detach().clone() for out in outs]


def _same(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    return torch.equal(a, b) or difference(a, b).disagree == int((a.isnan() & b.isnan()).sum())


def _all_same(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(_same(a, b) for a, b in zip(first, second, strict=True))


def find_float64_twin(subject: Subject) -> Subject | None:
    """The same function in float64 at the same point, or None where it does not run or stay there."""
    if subject.dtype == torch.float64:
        return subject
    if subject.in_float64 is None:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            twin = with_checked_behaviour(subject.in_float64(), masked=True)
            outs = twin.outputs(twin.point)
    except Exception:  # whatever a float32-only kernel raises when it is handed float64
        return None
    return twin if all(out.dtype == torch.float64 for out in outs) else None
