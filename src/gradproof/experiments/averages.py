"""How slow is an average of the weights? Its decay, read from the operations that average; judged at the run's end."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from gradproof.experiments.evidence import Evidence, Verdict
from gradproof.experiments.nonfinite import place_of
from gradproof.tape.operations import Operation, Ref

SAME = ("detach", "alias")  # p.detach() and p.data are the weight itself


@dataclass(frozen=True)
class Average:
    """One tensor that follows a weight: average = decay * average + (1 - decay) * weight."""

    slot: int
    weight: int
    decay: float
    operation: Operation


def how_slow_is_the_average(evidence: Evidence) -> Iterator[Verdict]:
    """Notes decay and place in the run's facts: how much of the start an average still holds is known at the end."""
    found = list(find_averages(evidence))
    if not found or len({average.operation.line for average in found}) > 2:
        return
    decay = sorted(average.decay for average in found)[len(found) // 2]
    slots = {average.slot for average in found}
    facts = evidence.memory.setdefault("facts", {}).setdefault(
        "average",
        {
            "tensors": len(found),
            "shapes": signature(evidence.slot(s).shape for s in slots),
            "module": all(evidence.slot(s).kind == "parameter" for s in slots),
            "where": place_of(found[0].operation.module, found[0].operation.line),
            "in_training": False,
            "decays": [],
        },
    )
    facts["decays"].append([evidence.step, decay])
    inside = (op for op in evidence.forward if op.module and not slots.isdisjoint(op.reads))
    facts["in_training"] |= next(inside, None) is not None
    yield from ()


def signature(shapes: Iterable[tuple[int, ...]]) -> int:
    """One number for the shapes of a model's parameters, whatever their order."""
    return zlib.crc32(repr(sorted(tuple(shape) for shape in shapes)).encode())


def find_averages(evidence: Evidence) -> Iterator[Average]:
    """Sums of two tensors whose factors add up to one, the one a weight that the optimizer steps; and lerps."""
    trained = set(evidence.tape.final_gradients)
    scaled: dict[int, tuple[int, float]] = {}  # slot -> (what it is a multiple of, how many times)
    for op in evidence.tape.operations:
        if op.phase == "optimizer" or op.in_backward is not None or (op.grad_enabled and op.module):
            continue
        for name, first, second, number in single_operations(op):
            first = evidence.flow.behind(first, SAME)
            second = None if second is None else evidence.flow.behind(second, SAME)
            made = first if name.endswith("_") else next(iter(op.makes), first)
            if name in ("mul", "mul_") and second is None:
                scaled[made] = (first, number)
            elif name in ("lerp", "lerp_") and second in trained and 0 < number < 1:
                yield Average(first, second, 1 - number, op)
            elif name in ("add", "add_") and second is not None:
                one, two = scaled.get(first, (first, 1.0)), scaled.get(second, (second, 1.0))
                parts = [one, (two[0], two[1] * number)]
                (slow, decay), (weight, rest) = parts if parts[1][0] in trained else parts[::-1]
                same = evidence.slot(slow).shape == evidence.slot(weight).shape
                if (
                    weight in trained
                    and slow not in trained
                    and same
                    and abs(decay + rest - 1) < 1e-6
                    and 0 < decay < 1
                ):
                    yield Average(slow, weight, decay, op)


def single_operations(op: Operation) -> Iterator[tuple[str, int, int | None, float]]:
    """(name, first tensor, second tensor, number) of an operation, or of each pair of a _foreach_ operation."""
    name = op.name.removeprefix("_foreach_")
    if name.rstrip("_") not in ("mul", "add", "lerp") or not op.args:
        return
    others: Any = op.args[1] if len(op.args) > 1 else op.kwargs.get("other")
    number = op.args[2] if len(op.args) > 2 else op.kwargs.get("alpha", op.kwargs.get("weight", 1.0))
    firsts = (
        op.args[0]
        if isinstance(op.args[0], (list, tuple)) and not isinstance(op.args[0], Ref)
        else [op.args[0]]
    )
    for index, first in enumerate(firsts):
        several = isinstance(others, (list, tuple)) and not isinstance(others, Ref)
        other = others[index] if several and index < len(others) else others
        if isinstance(other, (int, float)) and not isinstance(number, Ref):
            yield name, first.slot, None, float(other)
        elif isinstance(other, Ref) and isinstance(number, (int, float)):
            yield name, first.slot, other.slot, float(number)
