"""Which step of a hand-written backward was left out, done twice, or done with other numbers.

The residual, by hand minus right, is pushed forward through the reference once, with a few random directions beside
it: that tells for every use of every value how much of the residual it could explain. What fits is then tried.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradproof.check.graph import Graph, Operation, Part, pull
from gradproof.check.slip import Allowance, Size, name_factor

FIT = 0.1  # relative misfit along the probes up to which a suspicion is tried
TRIED = 24
PROBES = 3
ALTERNATIVES = 48  # other values of the same shape that an operation may have been given


@dataclass(frozen=True)
class Step:
    """A step of backward that was done otherwise, and what that adds to the gradient of which slots."""

    kind: str  # scaled: a use counts 1 + `times` times; passed: nothing lies between; taken: `other` for its own
    operation: Operation | Part
    added: Mapping[int, Tensor]
    times: float = 1.0
    position: int = 0  # of the value that another was taken for
    other: int | str = ""  # its slot, or its name

    @property
    def rank(self) -> int:
        """The plainer, the lower."""
        if self.kind == "scaled":
            return 0 if self.times in PLAIN else 3
        return 1 if self.kind == "passed" else 2

    @property
    def below(self) -> int:
        """The operations before this one carry it on."""
        return self.operation.index + (self.kind == "passed")


PLAIN = {-1.0: "missing term", 1.0: "accumulated twice", -2.0: "sign"}


@dataclass(frozen=True)
class Backward:
    """A reference with its right gradients: of every slot, and by every use of it."""

    graph: Graph
    total: Mapping[int, Tensor]
    uses: Mapping[tuple[int, int], Tensor]
    names: Mapping[int, str]  # of slots that have one
    held: Mapping[int, Tensor]  # gradients that are what a program says they are

    def named(self, slot: int | str) -> str:
        if isinstance(slot, str):
            return slot
        return self.names.get(slot) or self.graph.name_value(slot)

    def carried(self, step: Step) -> dict[int, Tensor]:
        """What a step adds to the gradient of every slot above."""
        unmoved = {slot: torch.zeros_like(x) for slot, x in self.held.items()}
        return self.graph.gradients(step.added, below=step.below, held=unmoved)[0]

    def describe(self, step: Step, sizes: Sequence[Size]) -> str:
        slot = next(iter(step.added))
        beside = [self.names[s] for s in step.operation.inputs if s in self.names and s != slot]
        back = f"what comes back to {self.named(slot)} through {step.operation}"
        back += f" with {', '.join(beside)}," if beside else ""
        if step.kind == "passed":
            return (
                f"missing derivative: the gradient of {self.named(slot)} is that of {self.named(step.other)}, as if "
                "nothing lay between them"
            )
        if step.kind == "taken":
            right = self.named(step.operation.inputs[step.position])
            other = self.named(step.other)
            return f"stale: backward took {other} where {right} belongs, in {step.operation}"
        if step.times == -1.0:
            return f"missing term: {back} is left out"
        if step.times == 1.0:
            return f"accumulated twice: {back} is counted twice"
        if step.times == -2.0:
            return f"sign: {back} has the wrong sign"
        return f"{name_factor(1 + step.times, sizes, 0.01)}: {back}"


def find_step(
    backward: Backward,
    slot: int,
    residual: Tensor,
    allowed: Mapping[int, Allowance],
    right: Sequence[int],
    extra: Mapping[str, Tensor] | None = None,
) -> tuple[Step, dict[int, Tensor]] | None:
    """The step that explains the residual of one parameter and leaves those that are right as they are."""
    generator = torch.Generator().manual_seed(0)
    unit = residual / residual.norm().clamp_min(1e-300)
    probes = [unit] + [_random_like(residual, generator) for _ in range(PROBES)]
    targets = torch.tensor([float((p * residual).sum()) for p in probes], dtype=torch.float64)
    moved = [backward.graph.push(slot, p) for p in probes]
    forms = _forms(backward.graph, slot)
    odd: list[Step] = []  # factors that are no plain ones are the last resort
    suspicions = (
        _uses(backward, moved[0]),
        _passed(backward, moved[0]),
        _others(backward, forms, moved[0], extra or {}),
        odd,
    )
    for steps in suspicions:
        fits = []
        for step in steps:
            times = _fit(_numbers(moved, step.added), targets, step.kind != "scaled" or steps is odd)
            if times is not None:
                fits.append(step if steps is odd else _scaled(step, times))
        odd += [step for step in fits if step.rank == 3 and steps is not odd]
        plain = fits if steps is odd else [step for step in fits if step.rank < 3]
        for step in sorted(plain, key=lambda step: step.rank)[:TRIED]:  # stable: nearest to the loss first
            carried = backward.carried(step)
            explained = slot in carried and allowed[slot].admits(residual - carried[slot], 2.0)
            if explained and all(allowed[s].admits(carried[s], 2.0) for s in right if s in carried):
                return step, carried
    return None


def _random_like(x: Tensor, generator: torch.Generator) -> Tensor:
    v = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    return v / v.norm().clamp_min(1e-300)


def _fit(numbers: Tensor, targets: Tensor, fixed: bool) -> float | None:
    """The multiple of `numbers` that the targets are, or None where they are none."""
    scale = float((numbers * numbers).sum())
    if not scale > 0 or not math.isfinite(scale):
        return None
    times = 1.0 if fixed else float((numbers * targets).sum()) / scale
    misfit = float((targets - times * numbers).norm() / targets.norm().clamp_min(1e-300))
    return times if misfit <= FIT else None


def _scaled(step: Step, times: float) -> Step:
    if step.kind != "scaled":
        return step
    times = next((plain for plain in PLAIN if abs(times - plain) < 0.02), times)
    return replace(step, times=times, added={slot: times * use for slot, use in step.added.items()})


def _forms(graph: Graph, slot: int) -> set[int]:
    """The slots that are made from this one alone: its transpose, a part of it."""
    forms = {slot}
    for operation in graph.operations:
        if operation.inputs and all(s in forms for s in operation.inputs):
            forms.update(operation.outputs)
    return forms


def _uses(backward: Backward, reached: Mapping[int, Tensor]) -> Iterator[Step]:
    """Every use of a value, from the loss backwards: it may be left out, count twice, have another sign."""
    for operation in reversed(backward.graph.operations):
        for k, slot in enumerate(operation.inputs):
            use = backward.uses.get((operation.index, k))
            if use is not None and slot in reached:
                yield Step("scaled", operation, {slot: use})


def _passed(backward: Backward, reached: Mapping[int, Tensor]) -> Iterator[Step]:
    """Every value whose gradient may be that of a later one of its shape: what lies between is not undone."""
    graph = backward.graph
    for slot in reversed(list(reached)):
        own, maker = backward.total.get(slot), graph.makers.get(slot)
        if own is None or maker is None or own.numel() < 2:
            continue
        for other in graph.slots_by_shape.get((own.shape, own.dtype), []):
            there = backward.total.get(other)
            if there is not None and other > slot and not torch.equal(there, own):
                yield Step("passed", maker, {slot: there - own}, other=other)


def _others(
    backward: Backward, forms: set[int], reached: Mapping[int, Tensor], extra: Mapping[str, Tensor]
) -> Iterator[Step]:
    """Every operation undone otherwise, functions of the reference first."""
    graph = backward.graph
    every: list[Operation | Part] = [*reversed(graph.parts), *reversed(graph.operations)]
    for operation in every:
        douts = [backward.total.get(s) for s in operation.outputs]
        if any(s in reached for s in operation.inputs) and not all(d is None for d in douts):
            yield from _otherwise(backward, operation, forms, reached, douts, extra)


def _numbers(moved: Sequence[Mapping[int, Tensor]], added: Mapping[int, Tensor]) -> Tensor:
    """What the probes say of something that is added."""
    sums = [sum(float((m[s] * d).sum()) for s, d in added.items() if s in m) for m in moved]
    return torch.tensor(sums, dtype=torch.float64)


def _otherwise(
    backward: Backward,
    operation: Operation | Part,
    forms: set[int],
    reached: Mapping[int, Tensor],
    douts: Sequence[Tensor | None],
    extra: Mapping[str, Tensor],
) -> Iterator[Step]:
    """Its backward done with another value where its own belongs."""
    graph = backward.graph
    own = [graph.values[s] for s in operation.inputs]
    right = graph.pull(operation, douts)
    for k, x in enumerate(own):
        if not x.is_floating_point() or x.numel() < 2:
            continue
        for other, value in _alternatives(backward, operation, k, forms, extra):
            try:
                found = pull(*graph.local_with(operation, [*own[:k], value, *own[k + 1 :]]), douts)
            except (RuntimeError, IndexError, ValueError):
                continue
            added: dict[int, Tensor] = {}
            for slot, a, b in zip(operation.inputs, found, right, strict=True):
                if a is not None and b is not None:
                    added[slot] = added.get(slot, torch.zeros_like(a)) + (a - b)
            alone = {slot: dx for slot, dx in added.items() if slot in reached}
            if alone:
                yield Step("taken", operation, added, position=k, other=other)
            if alone and len(alone) < len(added):
                yield Step("taken", operation, alone, position=k, other=other)


def _alternatives(
    backward: Backward, operation: Operation | Part, k: int, forms: set[int], extra: Mapping[str, Tensor]
) -> Iterator[tuple[int | str, Tensor]]:
    """Values of the same shape: all of them beside the parameter itself, else those of like operations."""
    graph, slot = backward.graph, operation.inputs[k]
    own = graph.values[slot]
    direct = any(s in forms for s in operation.inputs) and slot not in forms
    alike = graph.slots_by_shape[own.shape, own.dtype]
    nearby = alike if direct or isinstance(operation, Part) else _like_slots(graph, operation, k)
    for other in nearby[:ALTERNATIVES]:
        value = graph.values[other]
        if other != slot and value.shape == own.shape and not torch.equal(value, own):
            yield other, value
    if own.dim() > 1 and own.shape[-1] == own.shape[-2] and not torch.equal(own, own.mT):
        yield "its transpose", own.mT
    for name, value in extra.items() if direct else ():
        if value.shape == own.shape and not torch.equal(value, own):
            yield name, value


def _like_slots(graph: Graph, operation: Operation | Part, k: int) -> list[int]:
    """What the operation made, and what others of its kind were given."""
    assert isinstance(operation, Operation)
    alike = [
        o.inputs[k]
        for o in graph.operations
        if o.function is operation.function and len(o.inputs) == len(operation.inputs) and o is not operation
    ]
    return [*operation.outputs, *alike]
