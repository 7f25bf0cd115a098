"""A forward as a list of operations: what each used and made, at which line, and what would be if one were another.

A layer norm, a softmax and an attention are taken apart into the lines that a hand-written backward has to undo.
"""

from __future__ import annotations

import itertools
import linecache
import math
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

SIGNS = {
    "add": "+", "sub": "-", "subtract": "-", "mul": "*", "multiply": "*", "matmul": "@", "truediv": "/", "div": "/",
    "true_divide": "/", "divide": "/", "pow": "**", "getitem": "index", "rsub": "-", "radd": "+", "rmul": "*",
    "neg": "minus", "negative": "minus",
}  # fmt: skip
OURS = (
    str(Path(torch.__file__).parent),
    str(Path(__file__).parent),
    sysconfig.get_paths()["stdlib"],
    "<frozen",
)


@dataclass(frozen=True)
class Call:
    """A line of somebody's code, and the invocation of the function that it stands in."""

    function: str
    place: str  # "reference.py:12"
    line: str  # the source there
    frame: int


@dataclass(frozen=True, eq=False)
class Operation:
    """One call: its arguments with slots for the tensors among them, and the slots of what it made."""

    index: int
    function: Callable
    name: str
    calls: tuple[Call, ...]  # the lines of the reference that led here, innermost first
    leaves: tuple  # arguments, flattened; None where a tensor stood
    positions: tuple[int, ...]  # of the tensors among the leaves
    tree: Any
    inputs: tuple[int, ...]  # their slots
    outputs: tuple[int, ...]
    writes: int | None  # which of the inputs it writes into, where it does
    instead: Callable[[Sequence[Tensor]], list[Tensor]] | None = None  # what it does in a changed graph

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """What it makes of these; what it writes into is a copy."""
        if self.instead is not None:
            return self.instead(inputs)
        filled = list(self.leaves)
        for k, (position, x) in enumerate(zip(self.positions, inputs, strict=True)):
            filled[position] = x.clone() if k == self.writes else x
        args, kwargs = tree_unflatten(filled, self.tree)
        result = self.function(*args, **kwargs)
        if self.writes is not None:
            return [filled[self.positions[self.writes]]]
        return [x for x in tree_flatten(result)[0] if isinstance(x, Tensor)]

    def __str__(self) -> str:
        return _say(self.name, self.calls)


def _say(name: str, calls: Sequence[Call]) -> str:
    if not calls:
        return f"the {name}"
    called = f", called at {calls[1].place}" if len(calls) > 1 else ""
    return f"the {name} of {calls[0].place}{called}, `{calls[0].line}`"


@dataclass(frozen=True, eq=False)
class Part:
    """All operations of one call of a function of the reference: a gelu, a norm, as its author named it."""

    operations: tuple[Operation, ...]
    name: str
    calls: tuple[Call, ...]  # from the line that calls it outwards
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def index(self) -> int:
        return self.operations[0].index

    def run(self, inputs: Sequence[Tensor], values: Sequence[Tensor] = ()) -> list[Tensor]:
        known = dict(zip(self.inputs, inputs, strict=True))
        for operation in self.operations:
            made = operation.run([known[s] if s in known else values[s] for s in operation.inputs])
            known.update(zip(operation.outputs, made, strict=True))
        return [known[s] for s in self.outputs]

    def __str__(self) -> str:
        return _say(self.name, self.calls)


@dataclass
class Graph:
    """The operations of one forward, and the value of every slot."""

    operations: list[Operation] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    aliased: bool = False  # something was written through a view: slots no longer say which version is meant
    roots: frozenset[int] = (
        frozenset()
    )  # the parameters: nothing else has gradients, nor what is not made from them

    def with_values(self, values: list[Tensor]) -> Graph:
        return Graph(self.operations, values, self.aliased, self.roots)

    @cached_property
    def live(self) -> set[int]:
        """The slots that are made from parameters."""
        found = set(self.roots)
        for operation in self.operations:
            if not found.isdisjoint(operation.inputs):
                found.update(operation.outputs)
        return found

    @cached_property
    def consumers(self) -> dict[int, list[tuple[Operation, int]]]:
        """Who uses a slot: operation and position."""
        found: dict[int, list[tuple[Operation, int]]] = {}
        for operation in self.operations:
            for k, slot in enumerate(operation.inputs):
                found.setdefault(slot, []).append((operation, k))
        return found

    @cached_property
    def slots_by_shape(self) -> dict[tuple[torch.Size, torch.dtype], list[int]]:
        found: dict[tuple[torch.Size, torch.dtype], list[int]] = {}
        for slot, value in enumerate(self.values):
            if value.is_floating_point():
                found.setdefault((value.shape, value.dtype), []).append(slot)
        return found

    @cached_property
    def makers(self) -> dict[int, Operation]:
        return {slot: operation for operation in self.operations for slot in operation.outputs}

    def name_value(self, slot: int) -> str:
        """The variable that a line keeps its last result in, else the operation that made it."""
        maker = self.makers.get(slot)
        if maker is None:
            return "an input"
        for call in maker.calls:
            assigned = re.match(r"(\w+)\s*=(?!=)", call.line)
            if assigned and (maker.index, call.frame, call.place) in self._ends:
                return f"{assigned[1]} ({call.place})"
        place = f" in {maker.calls[0].place}" if maker.calls else ""
        return f"the result of {maker.name}{place}"

    @cached_property
    def _ends(self) -> set[tuple[int, int, str]]:
        """The operations after which a line is left, each time that it runs."""
        found = set()
        for operation, following in itertools.zip_longest(self.operations, self.operations[1:]):
            go_on = {(call.frame, call.place) for call in following.calls} if following else set()
            found |= {
                (operation.index, call.frame, call.place)
                for call in operation.calls
                if (call.frame, call.place) not in go_on
            }
        return found

    @cached_property
    def parts(self) -> list[Part]:
        """The calls of functions inside the reference, in the order of their first operations."""
        inside: dict[int, list[Operation]] = {}
        for operation in self.operations:
            for call in operation.calls[:-1]:
                inside.setdefault(call.frame, []).append(operation)
        return [self._part(frame, operations) for frame, operations in inside.items() if len(operations) > 1]

    def _part(self, frame: int, operations: list[Operation]) -> Part:
        calls = operations[0].calls
        depth = next(k for k, call in enumerate(calls) if call.frame == frame)
        made = {slot for o in operations for slot in o.outputs}
        known = {o.index for o in operations}
        inputs = dict.fromkeys(s for o in operations for s in o.inputs if s not in made)
        outputs = [s for s in made if any(o.index not in known for o, _ in self.consumers.get(s, ()))]
        return Part(
            tuple(operations),
            calls[depth].function,
            calls[depth + 1 :],
            tuple(inputs),
            tuple(sorted(outputs)),
        )

    def changed(self, operations: Iterable[Operation], until: int | None = None) -> Graph:
        """The same forward with some operations replaced by others; only as far as a slot, where one is given."""
        others = {operation.index: operation for operation in operations}
        twin = Graph(
            [others.get(o.index, o) for o in self.operations], list(self.values), self.aliased, self.roots
        )
        dirty: set[int] = set()
        stop = self.makers[until].index + 1 if until in self.makers else None
        for operation in twin.operations[min(others, default=0) : stop]:
            if operation.index not in others and dirty.isdisjoint(operation.inputs):
                continue
            with torch.no_grad():
                made = operation.run([twin.values[s] for s in operation.inputs])
            for slot, value in zip(operation.outputs, made, strict=True):
                twin.values[slot] = value
                dirty.add(slot)
        return twin

    def local(self, operation: Operation | Part) -> tuple[list[Tensor], list[Tensor]]:
        """The operation alone, with a graph behind it: its inputs as leaves, and its outputs."""
        if operation not in self._locals:
            self._locals[operation] = self.local_with(operation, [self.values[s] for s in operation.inputs])
        return self._locals[operation]

    def local_with(
        self, operation: Operation | Part, values: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The same with other values than its own."""
        with torch.enable_grad():
            inputs = [
                v.detach().clone().requires_grad_() if v.is_floating_point() and s in self.live else v
                for s, v in zip(operation.inputs, values, strict=True)
            ]
            return inputs, operation.run(inputs)

    @cached_property
    def _locals(self) -> dict[Operation | Part, tuple[list[Tensor], list[Tensor]]]:
        return {}

    def pull(self, operation: Operation | Part, douts: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of its inputs, position by position, from those of its outputs."""
        return pull(*self.local(operation), douts)

    def gradients(
        self,
        seeds: Mapping[int, Tensor],
        below: int | None = None,
        round_: Callable[[Tensor, int], Tensor] | None = None,
        held: Mapping[int, Tensor] | None = None,
    ) -> tuple[dict[int, Tensor], dict[tuple[int, int], Tensor]]:
        """Backward from `seeds`: the gradient of every slot, and what each use (operation, position) contributed.

        A slot that is held has the gradient it is given, whatever comes back to it.
        """
        total, uses = dict(seeds), {}
        for operation in reversed(self.operations[:below]):
            total.update((s, held[s]) for s in operation.outputs if held and s in held)
            douts = [total.get(slot) for slot in operation.outputs]
            if all(d is None for d in douts):
                continue
            for k, dx in enumerate(self.pull(operation, douts)):
                if dx is None:
                    continue
                dx = round_(dx, max(d.numel() for d in douts if d is not None)) if round_ else dx
                uses[operation.index, k] = dx
                slot = operation.inputs[k]
                total[slot] = dx if slot not in total else total[slot] + dx
        return total, uses

    def push(self, slot: int, tangent: Tensor) -> dict[int, Tensor]:
        """How every slot behind this one changes, to first order, when it changes by `tangent`."""
        moved = {slot: tangent}
        for operation in self.operations:
            if not any(s in moved for s in operation.inputs):
                continue
            for s, t in zip(operation.outputs, self._pushed(operation, moved), strict=True):
                if t is not None:
                    moved[s] = t
        return moved

    def _pushed(self, operation: Operation, moved: Mapping[int, Tensor]) -> list[Tensor | None]:
        """The derivative of its backward in the gradients that come in: that is its forward derivative."""
        inputs, outs = self.local(operation)
        reached = [k for k, s in enumerate(operation.inputs) if s in moved and inputs[k].requires_grad]
        live = [k for k, out in enumerate(outs) if out.requires_grad]
        if not reached or not live:
            return [None] * len(outs)
        douts = [torch.zeros_like(outs[k]).requires_grad_() for k in live]
        back = torch.autograd.grad(
            [outs[k] for k in live], [inputs[k] for k in reached], douts, create_graph=True, allow_unused=True
        )
        pairs = [
            (b, moved[operation.inputs[k]])
            for k, b in zip(reached, back, strict=True)
            if b is not None and b.requires_grad
        ]
        if not pairs:
            return [None] * len(outs)
        found = torch.autograd.grad([b for b, _ in pairs], douts, [t for _, t in pairs], allow_unused=True)
        by_output = dict(zip(live, found, strict=True))
        return [by_output.get(k) for k in range(len(outs))]

    def rounded(self, eps: float, seed: int) -> Graph:
        """The same operations as a program with numbers of that precision would do them: each result a little off."""
        generator = torch.Generator().manual_seed(seed)
        twin = self.with_values(list(self.values))
        for operation in self.operations:
            inputs = [twin.values[slot] for slot in operation.inputs]
            largest = max((x.numel() for x in inputs), default=0)
            with torch.no_grad():
                made = operation.run(inputs) if inputs else [self.values[s] for s in operation.outputs]
            for slot, value in zip(operation.outputs, made, strict=True):
                # a view has no roundings of its own, nor have an exponent, a mask, a count
                exact = _shares(value, inputs) or (slot not in self.live and _is_whole(value))
                twin.values[slot] = value if exact else jitter(value, eps, largest, generator)
        return twin


def _shares(x: Tensor, others: Sequence[Tensor]) -> bool:
    return any(x.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() for other in others)


def _is_whole(x: Tensor) -> bool:
    return not x.is_floating_point() or torch.equal(x, x.round())


def jitter(x: Tensor, eps: float, summed: int, generator: torch.Generator) -> Tensor:
    """x with roundings of a relative size eps, more where each entry is a sum of many."""
    if not x.is_floating_point() or not x.numel():
        return x
    terms = max(summed / x.numel(), 1.0)
    size = eps * max(1.0, 0.5 * math.sqrt(terms))
    noise = torch.rand(x.shape, generator=generator, dtype=torch.float64)
    return noise.sub_(0.5).mul_(size).add_(1).mul_(x)  # x (1 + e), so that −inf stays −inf


def pull(
    inputs: Sequence[Tensor], outs: Sequence[Tensor], douts: Sequence[Tensor | None]
) -> list[Tensor | None]:
    pairs = [(o, d) for o, d in zip(outs, douts, strict=True) if d is not None and o.requires_grad]
    asked = [k for k, x in enumerate(inputs) if x.requires_grad]
    if not pairs or not asked:
        return [None] * len(inputs)
    found = torch.autograd.grad(
        [o for o, _ in pairs],
        [inputs[k] for k in asked],
        [d.reshape(o.shape) for o, d in pairs],
        retain_graph=True,
        allow_unused=True,
    )
    by_position = dict(zip(asked, found, strict=True))
    return [by_position.get(k) for k in range(len(inputs))]


class Recorder(TorchFunctionMode):
    """Notes every torch function called while it is on; `graph` is what it heard."""

    def __init__(self) -> None:
        super().__init__()
        self.graph = Graph()
        self._slots: dict[int, int] = {}  # id of a tensor -> slot of its present version
        self._kept: list[Tensor] = []  # so that no id is used twice
        self._inside: list[str] = []
        self._aliases: set[int] = set()  # slots that share memory which was written to
        self._outside: Any = None
        self._frames: list[Any] = []  # so that no two invocations look alike; dropped with the recorder

    def __enter__(self) -> Recorder:
        if self._outside is None:
            self._outside = sys._getframe(1)
        return super().__enter__()

    def slot_of(self, tensor: Tensor) -> int | None:
        return self._slots.get(id(tensor))

    def name_slot(self, tensor: Tensor) -> int:
        """The slot of a tensor, a new one where it is not known yet."""
        return self._slots[id(tensor)] if id(tensor) in self._slots else self._new_slot(tensor)

    def _new_slot(self, tensor: Tensor) -> int:
        self._kept.append(tensor)
        self.graph.values.append(tensor.detach())
        self._slots[id(tensor)] = len(self.graph.values) - 1
        return self._slots[id(tensor)]

    def __torch_function__(
        self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        formula = FORMULAS.get(function)
        if formula is not None:
            with self:
                return self._taken_apart(formula, args, kwargs, _name(function))
        leaves, tree = tree_flatten((args, kwargs))
        positions = tuple(k for k, x in enumerate(leaves) if isinstance(x, Tensor))
        inputs = tuple(self.name_slot(leaves[k]) for k in positions)
        writes = 0 if _writes(function) and positions else None
        if writes is not None:
            self._keep_old_versions(leaves[positions[0]], inputs[0])
        result = function(*args, **kwargs)
        made = [x for x in tree_flatten(result)[0] if isinstance(x, Tensor)]
        if writes is not None:
            made = [leaves[positions[0]]]
        elif all(id(x) in self._slots for x in made):  # contiguous() of a contiguous tensor, and the like
            return result
        calls = self._calls()
        name = " in ".join([_name(function), *reversed(self._inside)])
        bare = tuple(None if isinstance(x, Tensor) else x for x in leaves)
        outputs = tuple(self._new_slot(x) for x in made)
        self.graph.operations.append(
            Operation(
                len(self.graph.operations), function, name, calls, bare, positions, tree, inputs, outputs, writes
            )
        )  # fmt: skip
        return result

    def _calls(self) -> tuple[Call, ...]:
        """The lines of the reference that are being run, neither torch's nor ours, innermost first."""
        found = []
        frame: Any = sys._getframe(2)
        while frame is not None and frame is not self._outside:
            code = frame.f_code
            if not code.co_filename.startswith(OURS):
                text = linecache.getline(code.co_filename, frame.f_lineno).strip()
                text = text if len(text) <= 72 else text[:69] + "..."
                place = f"{Path(code.co_filename).name}:{frame.f_lineno}"
                found.append(Call(code.co_name, place, text, id(frame)))
                self._frames.append(frame)
            frame = frame.f_back
        return tuple(found)

    def trim(self, wanted: Sequence[int], roots: Iterable[int]) -> None:
        """Forgets what these slots are not made from, and who called the reference."""
        needed = ancestors(self.graph, wanted)
        self.graph.aliased = not self._aliases.isdisjoint(needed)
        kept = [o for o in self.graph.operations if not needed.isdisjoint(o.outputs)]
        frames = [[call.frame for call in o.calls] for o in kept if o.calls]
        common = set(frames[0]).intersection(*frames[1:]) if frames else set()
        for k, operation in enumerate(kept):
            shared = sum(call.frame in common for call in operation.calls)
            own = operation.calls[
                : len(operation.calls) - max(shared - 1, 0)
            ]  # the innermost common one stays
            kept[k] = replace(operation, index=k, calls=own)
        self.graph = Graph(kept, self.graph.values, self.graph.aliased, frozenset(roots))
        self._frames.clear()

    def _taken_apart(self, formula: Callable, args: tuple, kwargs: dict, name: str) -> Any:
        self._inside.append(name)
        try:
            return formula(*args, **kwargs)
        finally:
            self._inside.pop()

    def _keep_old_versions(self, target: Tensor, present: int) -> None:
        storage = target.untyped_storage().data_ptr()
        for slot, value in enumerate(self.graph.values):
            if value.untyped_storage().data_ptr() == storage:
                self.graph.values[slot] = value.clone()
                if slot != present and value.numel():
                    self._aliases |= {slot, present}


def _writes(function: Callable) -> bool:
    name = getattr(function, "__name__", "")
    if name in ("requires_grad_", "retain_grad", "detach_"):
        return False
    in_place = name.startswith("__i") and name not in ("__int__", "__index__", "__invert__")
    return in_place or name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def _name(function: Callable) -> str:
    name = getattr(function, "__name__", str(function))
    if name == "__get__":
        name = getattr(getattr(function, "__self__", None), "__name__", "attribute")
    bare = name.strip("_")
    bare = bare[1:] if name.startswith("__i") and bare[1:] in SIGNS else bare
    return SIGNS.get(bare, bare)


# ---- what a hand-written backward undoes line by line, as the lines


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    out = x @ weight.mT if weight.dim() > 1 else x @ weight
    return out if bias is None else out + bias


def softmax(x: Tensor, dim: int | None = None, *args: Any, **kwargs: Any) -> Tensor:
    dim = dim if dim is not None else kwargs.get("axis", -1)
    weights = (x - x.detach().amax(dim, keepdim=True)).exp()
    return weights / weights.sum(dim, keepdim=True)


def layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5,
    *_: Any,
) -> Tensor:  # fmt: skip
    axes = tuple(range(-len(shape), 0))
    centred = x - x.mean(axes, keepdim=True)
    normal = centred * (centred.square().mean(axes, keepdim=True) + eps).rsqrt()
    scaled = normal if weight is None else normal * weight
    return scaled if bias is None else scaled + bias


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    scores = query @ key.mT
    scores = scores * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, -math.inf)
    elif attn_mask is not None:
        boolean = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -math.inf) if boolean else scores + attn_mask
    return softmax(scores, -1) @ value


FORMULAS: dict[Any, Callable] = {
    F.linear: linear,
    F.softmax: softmax,
    torch.softmax: softmax,
    Tensor.softmax: softmax,
    F.layer_norm: layer_norm,
    F.scaled_dot_product_attention: attention,
}


def ancestors(graph: Graph, slots: Iterable[int]) -> set[int]:
    """All slots that these are made from, themselves included."""
    found, open_ = set(), list(slots)
    while open_:
        slot = open_.pop()
        if slot in found:
            continue
        found.add(slot)
        if slot in graph.makers:
            open_ += graph.makers[slot].inputs
    return found
