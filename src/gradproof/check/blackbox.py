"""A kernel seen from outside: called with copies of its arguments, laid out and filled as a test wants them.

Nothing of its inside is looked at, and it is never handed another dtype than it was given: code behind a pointer takes
what it was written for, and makes garbage of the rest without a word. Each argument lies amid a margin that is looked
at afterwards: what a kernel writes beside its output is seen.
"""

from __future__ import annotations

import ctypes
import gc
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from gradproof.check.behaviour import seeded
from gradproof.check.culprit import scale_of
from gradproof.check.gradient import incoming_gradients
from gradproof.check.subject import Subject, argument_names, like_layout, name_of, names_of_leaves
from gradproof.numerics.difference import Difference, difference

MARGIN = 64  # elements before and behind each argument
ROUNDINGS = 16  # how many roundings two right results may be apart, for each root of the numbers summed
FRESH = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted", "resize_",
}  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """What one call left behind: its outputs, then the arguments it wrote into."""

    results: tuple[Tensor, ...]
    names: tuple[str, ...]
    written: tuple[int, ...] = ()  # arguments, by their place among the leaves
    refused: str = ""  # what it raised instead
    beside: str = ""  # the argument next to which it wrote
    codes: tuple[str, ...] = ()  # C functions that returned another number than 0


@dataclass(frozen=True)
class BlackBox:
    """A kernel and the call that it is tried with."""

    name: str
    names: tuple[str, ...]  # of the leaves
    leaves: tuple[Any, ...]
    run: Callable[[list[Any]], Any]
    part: str = ""  # "" or "backward of "
    module: torch.nn.Module | None = None
    functions: list[Any] = field(default_factory=list)  # C functions behind ctypes, once they are known
    results: tuple[str, ...] = ()  # what they are called; "output 0" and so on where nothing is said

    @property
    def tensors(self) -> list[int]:
        return [k for k, x in enumerate(self.leaves) if isinstance(x, Tensor)]

    @property
    def floats(self) -> list[int]:
        return [k for k in self.tensors if self.leaves[k].is_floating_point() and self.leaves[k].numel()]

    def with_leaves(self, leaves: Sequence[Any]) -> BlackBox:
        return replace(self, leaves=tuple(leaves))

    def ask(
        self, layouts: Mapping[int, str] | None = None, fresh: float | None = None, followed: bool = False
    ) -> Answer:
        """Call it once, with arguments in other layouts, or with all new memory filled with a number."""
        placed = {k: place(self.leaves[k], (layouts or {}).get(k, "as given")) for k in self.tensors}
        leaves = [placed[k].view if k in placed else x for k, x in enumerate(self.leaves)]
        if followed:  # as a training calls it: what is followed is no leaf that it may not write into
            leaves = [x.requires_grad_()[...] if k in self.floats else x for k, x in enumerate(leaves)]
        codes: list[str] = []
        try:
            with ExitStack() as stack:
                stack.enter_context(warnings.catch_warnings())
                warnings.simplefilter("ignore")
                stack.enter_context(return_codes(self.functions, codes))
                if fresh is not None:
                    stack.enter_context(filled_memory(fresh))
                stack.enter_context(torch.set_grad_enabled(followed))
                made = seeded(self.run, leaves)
        except Exception as error:
            text = (str(error).splitlines() or [""])[0][:160]
            return Answer((), (), refused=f"{type(error).__name__}: {text}", codes=tuple(codes))
        outs = [x for x in tree_flatten(made)[0] if isinstance(x, Tensor)]
        own = {x.untyped_storage().data_ptr() for x in leaves if isinstance(x, Tensor)}
        called = self.results or tuple(
            "the output" if len(outs) == 1 else f"output {k}" for k in range(len(outs))
        )
        results = list(zip(called, outs, strict=True))
        results = [(n, x) for n, x in results if x.untyped_storage().data_ptr() not in own or not x.numel()]
        written = [k for k in placed if not same_bits(placed[k].view, self.leaves[k])]
        results += [(self.names[k], placed[k].view) for k in written]
        beside = next((self.names[k] for k, p in placed.items() if p.disturbed()), "")
        kept = tuple(x.detach().clone(memory_format=torch.contiguous_format) for _, x in results)
        return Answer(kept, tuple(n for n, _ in results), tuple(written), "", beside, tuple(codes))

    def allowed(self, result: Tensor) -> float:
        """How far two right results may be apart by rounding, for sums in any order."""
        if not result.is_floating_point():
            return 0.0
        floats = [self.leaves[k] for k in self.floats]
        eps = max([_eps(result), *(_eps(x) for x in floats)])
        longest = max([result.numel(), *(x.numel() for x in floats)])
        finite = result[torch.isfinite(result)]
        size = scale_of(finite) if finite.numel() and bool(finite.any()) else 0.0
        if result.numel() <= 4:  # few numbers may have cancelled to nothing
            size = max([size, *(scale_of(x[torch.isfinite(x)]) for x in floats if x.isfinite().any())])
        return ROUNDINGS * eps * math.sqrt(longest) * size

    def apart(self, now: Answer, before: Answer, noise: Sequence[float] = ()) -> list[tuple[str, Difference]]:
        """The results in which two calls differ by more than rounding; NaN at the same places is the same."""
        found = []
        for k, (name, a, b) in enumerate(zip(before.names, now.results, before.results, strict=False)):
            if a.shape != b.shape:
                continue
            both = a.isnan() & b.isnan()
            a, b = a.masked_fill(both, 0), b.masked_fill(both, 0)
            room = self.allowed(b) + (4 * noise[k] if k < len(noise) else 0.0)
            gap = difference(a, b, absolute=room, relative=0.0)
            if not gap.ok:
                found.append((name, gap))
        return found


def _eps(x: Tensor) -> float:
    eps = torch.finfo(x.dtype).eps
    return max(eps, 2.0**-10) if x.is_cuda and x.dtype == torch.float32 else eps  # TF32


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal, and NaN where the other is NaN."""
    return bool(((a == b) | (a.isnan() & b.isnan())).all()) if a.is_floating_point() else torch.equal(a, b)


@dataclass(frozen=True)
class Placed:
    """A tensor amid memory that nobody may touch."""

    view: Tensor
    base: Tensor
    around: Tensor  # which elements of the base are not the tensor's

    def disturbed(self) -> bool:
        beside = self.base[self.around]
        return not bool(beside.isnan().all() if self.base.is_floating_point() else (beside == 0).all())


LAYOUTS = ("transposed", "sliced", "with longer rows", "at an odd offset", "channels-last")


def place(x: Tensor, layout: str) -> Placed:
    """A copy of a tensor in a layout of memory, with a margin of NaN (integers: 0) around and between."""
    shape, strides, offset = tuple(x.shape), strides_of(x, layout), MARGIN
    offset += layout == "at an odd offset"
    span = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if x.numel() else 0
    base = torch.empty(offset + span + MARGIN, dtype=x.dtype, device=x.device)
    base.fill_(math.nan if x.is_floating_point() or x.is_complex() else 0)
    around = torch.ones(base.shape, dtype=torch.bool, device=x.device)
    around.as_strided(shape, strides, offset).fill_(False)
    view = base.as_strided(shape, strides, offset)
    if layout != "expanded":
        view.copy_(x.detach())
    elif x.numel():
        base[offset] = x.detach().flatten()[0]
    return Placed(view, base, around)


def strides_of(x: Tensor, layout: str) -> tuple[int, ...]:
    """The strides of a layout.

    >>> strides_of(torch.empty(2, 3), "transposed"), strides_of(torch.empty(2, 3), "with longer rows")
    ((1, 2), (6, 1))
    """
    order = list(range(x.dim()))
    if layout == "transposed":
        order.reverse()
    elif layout == "channels-last" and x.dim() == 4:
        order = [0, 2, 3, 1]
    elif layout == "as given" and not x.is_contiguous():
        dense = all(s > 0 or n == 1 for n, s in zip(x.shape, x.stride(), strict=True))
        return tuple(x.stride()) if dense and _apart(x) else strides_of(x, "contiguous")
    if layout == "expanded":
        return (0,) * x.dim()
    strides, step = [0] * x.dim(), 2 if layout == "sliced" else 1
    for k, axis in enumerate(reversed(order)):
        strides[axis] = step
        step *= max(x.shape[axis], 1)
        if layout == "with longer rows" and k == 0:
            step += 3
    return tuple(strides)


def _apart(x: Tensor) -> bool:
    """No two elements of a tensor lie at one place of memory."""
    reach = 0
    for stride, size in sorted((s, n) for n, s in zip(x.shape, x.stride(), strict=True) if n > 1):
        if stride <= reach:
            return False
        reach += (size - 1) * stride
    return True


def layouts_for(x: Tensor) -> list[str]:
    """The layouts in which a tensor is laid out otherwise than it is, without those that look alike."""
    seen = {(strides_of(x, "as given"), 0)}
    found = []
    for layout in LAYOUTS:
        key = (strides_of(x, layout), int(layout == "at an odd offset"))
        alike = layout == "transposed" and sum(n > 1 for n in x.shape) < 2
        if x.dim() and not alike and key not in seen:
            seen.add(key)
            found.append(layout)
    return found


class _Filled(TorchDispatchMode):
    """All memory that is asked for holds one number before it is used."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.number = number

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the compiler is imported, which takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in FRESH and isinstance(made, Tensor):
            made.fill_(self.number) if made.is_floating_point() else made.zero_()
        return made


@contextmanager
def filled_memory(number: float) -> Iterator[None]:
    """What torch.empty returns is full of a number; inside PyTorch's own operators, too, where it is NaN."""
    memory: Any = torch.utils.deterministic
    before = (torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory)
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        if math.isnan(number):  # torch.use_deterministic_algorithms would import the compiler
            torch._C._set_deterministic_algorithms(True, warn_only=True)
            memory.fill_uninitialized_memory = True
        with _Filled(number):
            yield
    finally:
        torch._C._set_deterministic_algorithms(before[0], warn_only=warn_only)
        memory.fill_uninitialized_memory = before[1]


def c_functions() -> list[Any]:
    """The functions of shared libraries that were called through ctypes and return an int."""
    libraries = [found for found in gc.get_objects() if issubclass(type(found), ctypes.CDLL)]
    functions = [f for library in libraries for f in vars(library).values()]
    plain: Any = ctypes._CFuncPtr  # type: ignore[attr-defined]
    kept = [f for f in functions if isinstance(f, plain) and f.restype is ctypes.c_int]
    return [f for f in kept if getattr(f, "errcheck", None) is None]


@contextmanager
def return_codes(functions: Sequence[Any], codes: list[str]) -> Iterator[None]:
    """Notes what C functions return, if it is not 0."""

    def look(result: Any, function: Any, arguments: tuple) -> Any:
        if result:
            codes.append(f"{getattr(function, '__name__', 'a C function')} returned {result}")
        return result

    for function in functions:
        function.errcheck = look
    try:
        yield
    finally:
        for function in functions:
            del function.errcheck


def black_box(kernel: Any, inputs: Sequence[Any], name: str | None = None) -> BlackBox:
    """A function, an autograd.Function or a module, with the call that it is tried with."""
    if isinstance(kernel, torch.nn.Module):
        return _box_of_module(kernel, tuple(inputs), name or type(kernel).__name__)
    call, names = kernel, argument_names(kernel)
    if isinstance(kernel, type) and issubclass(kernel, torch.autograd.Function):
        call, names = kernel.apply, argument_names(kernel.forward)
        names = names if names[:1] != ["ctx"] else names[1:]
    leaves, tree = tree_flatten(tuple(inputs))

    def run(leaves: list[Any]) -> Any:
        return call(*tree_unflatten(leaves, tree))

    named = name or (kernel.__name__ if isinstance(kernel, type) else name_of(kernel))
    return BlackBox(named, tuple(names_of_leaves(tuple(inputs), {}, names)), tuple(leaves), run)


def _box_of_module(module: torch.nn.Module, inputs: tuple, name: str) -> BlackBox:
    """Parameters are arguments like the others; each call writes into copies of the buffers."""
    parameters = dict(module.named_parameters())
    leaves, tree = tree_flatten(inputs)
    count = len(parameters)

    def run(leaves: list[Any]) -> Any:
        buffers = {n: b.detach().clone() for n, b in module.named_buffers()}
        filled = {**buffers, **dict(zip(parameters, leaves[:count], strict=True))}
        return torch.func.functional_call(module, filled, tree_unflatten(leaves[count:], tree))

    names = (*parameters, *names_of_leaves(inputs, {}, argument_names(module.forward)))
    return BlackBox(name, names, (*(p.detach() for p in parameters.values()), *leaves), run, module=module)


def backward_box(box: BlackBox, written: Sequence[int]) -> BlackBox | None:
    """The backward as a kernel of its own: from arguments and incoming gradients to gradients, or None without one."""
    which = [k for k in box.floats if k not in written or len(written) == 1]
    which = [k for k in which if bool(torch.isfinite(box.leaves[k]).all())]
    count = len(box.leaves)

    def tracked(leaves: list[Any]) -> tuple[list[Tensor], list[Tensor]]:
        own = {k: leaves[k].detach().requires_grad_() for k in which}
        # a leaf cannot be written into: a kernel that does gets a copy
        given = [own[k].clone() if k in written else own.get(k, x) for k, x in enumerate(leaves)]
        outs = [x for x in tree_flatten(box.run(given[:count]))[0] if isinstance(x, Tensor)]
        # what went in and comes out has no backward of the kernel's
        passed = [x.grad_fn for x in given if isinstance(x, Tensor) and x.grad_fn is not None]
        outs = [x for x in outs if x.requires_grad and all(x.grad_fn is not fn for fn in passed)]
        return outs, list(own.values())

    def run(leaves: list[Any]) -> Any:
        with torch.enable_grad():
            outs, own = tracked(leaves)
            found = torch.autograd.grad(outs, own, leaves[count:], allow_unused=True)
        return [torch.zeros_like(x) if g is None else g for x, g in zip(own, found, strict=True)]

    try:
        with warnings.catch_warnings(), torch.enable_grad():
            warnings.simplefilter("ignore")
            outs, _ = tracked([place(x, "as given").view if isinstance(x, Tensor) else x for x in box.leaves])
    except Exception:
        return None
    if not outs or not which:
        return None
    # moved on by one: inputs drawn with the same seed would be the same numbers, and a norm's gradient nothing
    incoming = [w.flatten().roll(1).view_as(w) for w in incoming_gradients([x.detach() for x in outs])]
    words = tuple(
        "incoming gradient" if len(outs) == 1 else f"incoming gradient {k}" for k in range(len(outs))
    )
    return BlackBox(
        box.name, (*box.names, *words), (*box.leaves, *incoming), run, "backward of ", box.module, box.functions,
        tuple(f"the gradient of {box.names[k]}" for k in which),
    )  # fmt: skip


def subject_of_box(box: BlackBox, backward: BlackBox) -> Subject:
    """What the gradient check takes: the kernel in its own precision, and in no other."""
    which = [box.names.index(name.removeprefix("the gradient of ")) for name in backward.results]

    def filled(values: Sequence[Tensor]) -> list[Any]:
        leaves = [x.clone() if isinstance(x, Tensor) else x for x in box.leaves]
        for k, value in zip(which, values, strict=True):
            leaves[k] = like_layout(value, box.leaves[k])
        return leaves

    def outputs(values: Sequence[Tensor]) -> list[Tensor]:
        with torch.no_grad():
            made = tree_flatten(seeded(box.run, filled(values)))[0]
        found = [x for x in made if isinstance(x, Tensor)]
        return [x.detach() for x, follow in zip(found, followed, strict=True) if follow]

    def gradients(values: Sequence[Tensor], cotangents: Sequence[Tensor]) -> list[Tensor | None]:
        return seeded(backward.run, [*filled(values), *cotangents])

    with torch.enable_grad():
        own = [
            x.requires_grad_() if k in which else x
            for k, x in enumerate(filled([box.leaves[k] for k in which]))
        ]
        made = tree_flatten(box.run([x.clone() if isinstance(x, Tensor) else x for x in own]))[0]
        followed = [x.requires_grad for x in made if isinstance(x, Tensor)]
    point = tuple(box.leaves[k].detach() for k in which)
    return Subject(box.name, tuple(box.names[k] for k in which), point, outputs, gradients)
