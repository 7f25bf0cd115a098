"""What one operation of a reference would have to be, for its results to be those of a program that went wrong."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gradproof.check.graph import Graph, Operation, ancestors
from gradproof.check.path import Backward
from gradproof.check.slip import Allowance, Case

SECONDS = 4.0  # of its own thread, that looking for one change may take
MANY = 400  # operations above which only the plain changes are tried
ALTERNATIVES = 24
Change = tuple[str, list[Operation]]  # in words, and the operations that do something else


def find_change(
    backward: Backward,
    graph: Graph,
    slot: int,
    case: Case,
    right: Mapping[int, Allowance],
    samples: int,
    only_plain: bool = False,
) -> Change | None:
    """The change that makes of this slot what the program has there, and leaves alone what it has right."""
    known, made_from = ancestors(graph, right), ancestors(graph, [slot])
    suspects = [
        o for o in graph.operations if not made_from.isdisjoint(o.outputs) and not known.issuperset(o.outputs)
    ]
    until = time.thread_time() + SECONDS
    for words, operations in _changes(backward, graph, suspects, samples, only_plain):
        if time.thread_time() > until:
            return None
        try:
            twin = graph.changed(operations, until=slot)
        except (RuntimeError, IndexError, ValueError, TypeError):
            continue
        value = twin.values[slot]
        if value.shape != case.truth.shape or not case.is_(finite_part(value)):
            continue
        if all(
            a.admits(finite_part(twin.values[s]) - finite_part(graph.values[s])) for s, a in right.items()
        ):
            return words, operations
    return None


def finite_part(x: Tensor) -> Tensor:
    """Masked scores are −inf in one program and −1e9 in another: 0 in both."""
    x = x.double()
    return torch.where(x <= -1e4, 0.0, x) if bool((x <= -1e4).any()) else x


def shifted(graph: Graph, slot: int, value: Tensor) -> list[Operation]:
    """The operation that makes the slot, made to give this value, with the derivative it has."""
    maker = graph.makers.get(slot)
    if maker is None or not bool(torch.isfinite(value).all()):
        return []
    which, own = maker.outputs.index(slot), graph.values[slot]
    delta = torch.where(torch.isfinite(own), value.reshape(own.shape) - own, 0.0)

    def instead(inputs: Sequence[Tensor]) -> list[Tensor]:
        made = maker.run(inputs)
        return [out + delta if k == which else out for k, out in enumerate(made)]

    return [replace(maker, instead=instead)]


def _changes(
    backward: Backward, graph: Graph, suspects: Sequence[Operation], samples: int, only_plain: bool
) -> Iterator[Change]:
    """Plain ones first: something left out, the batch index missing; each in one place, then in every layer."""
    everywhere: list[Change] = []
    for kind in (_left_out, _off_by_one, _without_batch, _transposed):
        groups: dict[tuple, list[tuple[str, Operation]]] = {}
        met: dict[tuple, int] = {}
        for operation in suspects:
            call = operation.calls[0] if operation.calls else None
            line = (operation.name, call.place if call else "")
            run = (*line, call.frame if call else 0)
            met[run] = met.get(run, -1) + 1  # which of the operations of this name in one run of the line
            for k, (words, other) in enumerate(kind(backward, graph, operation, samples)):
                yield words, [other]
                groups.setdefault((*line, met[run], k), []).append((words, other))
        for same in groups.values():
            if len(same) > 1:
                words = f"{same[0][0]} (so in all {len(same)} runs of this line)"
                everywhere.append((words, [other for _, other in same]))
    for part in graph.parts:
        yield from _part_left_out(graph, part.inputs, part.outputs, str(part), suspects)
    yield from everywhere
    for operation in () if only_plain or len(suspects) > MANY else suspects:
        yield from _other_inputs(backward, graph, operation)


def _left_out(
    backward: Backward, graph: Graph, operation: Operation, samples: int
) -> Iterator[tuple[str, Operation]]:
    """Its result is one of its inputs: no mask, no residual, no scale, no bias."""
    made = graph.values[operation.outputs[0]] if operation.outputs else None
    if made is None or len(operation.outputs) != 1 or not made.is_floating_point():
        return
    for k, slot in enumerate(operation.inputs):
        value = graph.values[slot]
        if value.shape == made.shape and value.is_floating_point() and not torch.equal(value, made):
            words = _say_left_out(backward, graph, operation, k)
            yield words, replace(operation, instead=_passes(k))


def _passes(k: int) -> Callable[[Sequence[Tensor]], list[Tensor]]:
    return lambda inputs: [inputs[k] + 0.0]


def _say_left_out(backward: Backward, graph: Graph, operation: Operation, k: int) -> str:
    made = graph.values[operation.outputs[0]]
    hidden = ~torch.isfinite(made) | (made <= -1e4)
    if bool(hidden.any()) and bool(torch.isfinite(graph.values[operation.inputs[k]]).all()):
        square = made.dim() > 1 and made.shape[-1] == made.shape[-2]
        future = torch.ones(made.shape[-2:]).triu(1).bool().expand_as(hidden) if square else None
        if future is not None and torch.equal(hidden, future):
            return (
                f"the causal mask is missing: it equals the reference without {operation}; every position sees "
                "the future"
            )
        return f"the mask is missing: it equals the reference without {operation}"
    kept = backward.named(operation.inputs[k])
    return f"left out: it equals the reference without {operation} (only {kept} is passed on)"


def _off_by_one(
    backward: Backward, graph: Graph, operation: Operation, samples: int
) -> Iterator[tuple[str, Operation]]:
    """A triangular mask with its diagonal elsewhere."""
    if operation.name.split()[0] not in ("triu", "tril"):
        return
    own = next((x for x in operation.leaves if isinstance(x, int) and not isinstance(x, bool)), 0)
    upper = operation.name.startswith("triu")
    for by in (1, -1):

        def instead(inputs: Sequence[Tensor], by: int = by) -> list[Tensor]:
            return [(torch.triu if upper else torch.tril)(inputs[0], own + by)]

        yield (
            f"the mask is off by one: it equals the reference with a diagonal of {own + by} in {operation}",
            replace(operation, instead=instead),
        )


def _without_batch(
    backward: Backward, graph: Graph, operation: Operation, samples: int
) -> Iterator[tuple[str, Operation]]:
    """One of its inputs is the first sample's, for every sample."""
    for k, slot in enumerate(operation.inputs):
        value = graph.values[slot]
        if samples < 2 or not value.dim() or value.shape[0] % samples or not value.is_floating_point():
            continue

        def instead(inputs: Sequence[Tensor], k: int = k) -> list[Tensor]:
            x = inputs[k].reshape(samples, -1, *inputs[k].shape[1:])
            first = x[:1].expand_as(x).reshape(inputs[k].shape)
            return operation.run([*inputs[:k], first, *inputs[k + 1 :]])

        words = (
            f"the batch index is missing: every sample has sample 0 of {backward.named(slot)}, in {operation}"
        )
        yield words, replace(operation, instead=instead)


def _transposed(
    backward: Backward, graph: Graph, operation: Operation, samples: int
) -> Iterator[tuple[str, Operation]]:
    for k, slot in enumerate(operation.inputs):
        value = graph.values[slot]
        if value.dim() < 2 or value.shape[-1] != value.shape[-2] or not value.is_floating_point():
            continue

        def instead(inputs: Sequence[Tensor], k: int = k) -> list[Tensor]:
            return operation.run([*inputs[:k], inputs[k].mT, *inputs[k + 1 :]])

        yield f"{backward.named(slot)} is transposed in {operation}", replace(operation, instead=instead)


def _part_left_out(
    graph: Graph, inputs: Sequence[int], outputs: Sequence[int], name: str, suspects: Sequence[Operation]
) -> Iterator[Change]:
    """A whole function of the reference is not called: its result is what it was given."""
    if len(outputs) != 1 or graph.makers[outputs[0]] not in suspects:
        return
    out = graph.values[outputs[0]]
    for slot in inputs:
        value = graph.values[slot]
        if value.shape == out.shape and value.is_floating_point():
            maker = graph.makers[outputs[0]]
            passed = replace(maker, inputs=(slot,), instead=_passes(0))
            yield f"left out: it equals the reference without {name}", [passed]


def _other_inputs(backward: Backward, graph: Graph, operation: Operation) -> Iterator[Change]:
    """Another value of the same shape where its own belongs: a buffer that was not updated, a wrong index."""
    for k, slot in enumerate(operation.inputs):
        own = graph.values[slot]
        if not own.is_floating_point() or own.numel() < 2:
            continue
        alike = graph.slots_by_shape.get((own.shape, own.dtype), [])
        before = [
            s
            for s in alike
            if s != slot and (s not in graph.makers or graph.makers[s].index < operation.index)
        ]
        for other in sorted(before, key=lambda s: abs(s - slot))[:ALTERNATIVES]:
            if torch.equal(graph.values[other], own):
                continue
            inputs = (*operation.inputs[:k], other, *operation.inputs[k + 1 :])
            words = (
                f"stale: it was computed from {backward.named(other)} where {backward.named(slot)} belongs, "
                f"in {operation}"
            )
            yield words, [replace(operation, inputs=inputs)]
