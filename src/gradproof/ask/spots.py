"""What --of means: a parameter, its gradient, a module, input, target, prediction, loss, a slot, or FILE:LINE."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gradproof.errors import UserError
from gradproof.instruments.evidence import Evidence
from gradproof.tape.operations import Operation
from gradproof.tape.replay import replay_exactly

WORDS = ("input", "target", "prediction", "loss")
WORD = re.compile(rf"({'|'.join(WORDS)})(?:s|es)? ?(\d+)?")  # of several, by its number: "input 1"
MOST_SPOTS = 200
PART = 1 << 20  # numbers that are looked at together


@dataclass(frozen=True)
class Spot:
    """One tensor of the step."""

    slot: int
    words: str
    gradient: bool = False  # the gradient of this parameter is meant


def predictions(evidence: Evidence) -> list[int]:
    flow = evidence.flow
    return list(dict.fromkeys(c.prediction for c in (*flow.comparisons, *flow.picked))) or flow.predictions


def targets(evidence: Evidence) -> list[int]:
    flow = evidence.flow
    return list(dict.fromkeys(c.target for c in (*flow.comparisons, *flow.picked))) or list(
        evidence.roles.target_slots
    )


def find_spots(evidence: Evidence, of: str) -> list[Spot]:
    """The tensors that a name stands for; UserError names some that there are."""
    tape, of = evidence.tape, of.strip()
    if meant := WORD.fullmatch(of):
        word, number = meant[1], meant[2]
        found = {
            "input": lambda: evidence.flow.inputs,
            "target": lambda: targets(evidence),
            "prediction": lambda: predictions(evidence),
            "loss": lambda: tape.loss_slots,
        }[word]()
        spots = [Spot(slot, f"{word} {i}" if len(found) > 1 else word) for i, slot in enumerate(found)]
        chosen = spots[int(number) :][:1] if number else spots
        if chosen or of not in tape.leaf_named:
            if not chosen:
                known = f"; it has {', '.join(spot.words for spot in spots)}" if spots else ""
                raise UserError(f"step {evidence.step} has no {of} that could be told apart{known}")
            return chosen
    if of.startswith("slot ") and of[5:].isdecimal() and int(of[5:]) < len(tape.slots):
        return [Spot(int(of[5:]), of)]
    if of.endswith(".grad") and of.removesuffix(".grad") in tape.leaf_named:
        return [Spot(tape.leaf_named[of.removesuffix(".grad")], of, gradient=True)]
    if of in tape.leaf_named:
        return [Spot(tape.leaf_named[of], of)]
    calls = [call for call in tape.modules if call.path == of.removesuffix(".in") or call.path == of]
    if calls:
        inside = of.endswith(".in") and all(call.path != of for call in calls)
        slots = [slot for call in calls for slot in (call.inputs if inside else call.outputs)]
        return [
            Spot(slot, f"{'input' if inside else 'output'} of {of.removesuffix('.in')}") for slot in slots
        ]
    if ":" in of:
        operations = operations_at(evidence, of)
        made = [(op, slot) for op in operations if op.in_backward is None for slot in op.makes]
        return [Spot(slot, f"{op.name} at {of}") for op, slot in made[:MOST_SPOTS]]
    raise UserError(f"step {evidence.step} has no {of!r}; {suggest(evidence, of)}")


def suggest(evidence: Evidence, of: str) -> str:
    names = list(dict.fromkeys([*evidence.tape.leaf_named, *(call.path for call in evidence.tape.modules)]))
    near = difflib.get_close_matches(of, [name for name in names if name], 6, 0.4)
    return (
        f"it has {', '.join(near or [name for name in names if name][:6]) or 'no names'}, {', '.join(WORDS)}"
    )


def operations_at(evidence: Evidence, place: str) -> list[Operation]:
    """What ran at FILE:LINE; the file by the end of its path."""
    file, _, number = place.rpartition(":")
    if not number.isdecimal():
        raise UserError(f"a line is written like train.py:42, not {place!r}")
    lines = [(op, op.line) for op in evidence.tape.operations if op.line is not None]
    here = [op for op, line in lines if line.number == int(number) and same_file(line.file, file)]
    if not here:
        known = sorted({line.number for _, line in lines if same_file(line.file, file)})
        near = sorted(sorted(known, key=lambda n: abs(n - int(number)))[:8])
        others = sorted({line.file.rsplit("/", 1)[-1] for _, line in lines})[:6]
        what = (
            f"lines {', '.join(map(str, near))} did" if near else f"there is {', '.join(others) or 'no line'}"
        )
        raise UserError(f"no operation of step {evidence.step} ran at {place}; {what}")
    return here


def same_file(path: str, name: str) -> bool:
    """
    >>> same_file("/home/a/train.py", "train.py"), same_file("/home/a/train.py", "rain.py")
    (True, False)
    """
    return path == name or path.endswith(f"/{name.lstrip('./')}")


def value_of(evidence: Evidence, spot: Spot) -> Tensor:
    """The numbers, brought back by replaying what made them."""
    return values_of(evidence, [spot])[spot]


def values_of(evidence: Evidence, spots: list[Spot]) -> dict[Spot, Tensor]:
    """Of those that can be brought back."""
    tape = evidence.tape
    made = [s.slot for s in spots if not s.gradient and tape.slots[s.slot].made_by is not None]
    forward = {slot for op in evidence.forward for slot in evidence.flow.makes(op)}
    replayed = evidence.flow.values([slot for slot in made if slot in forward])
    if late := [slot for slot in made if slot not in forward]:
        until = max(tape.slots[slot].made_by or 0 for slot in late) + 1
        replayed |= replay_exactly(tape, keep=late, until=until, compare=False).values
    found: dict[Spot, Tensor] = {}
    for spot in spots:
        value = replayed.get(spot.slot)
        if spot.gradient:
            value = evidence.gradients.get(spot.slot)
        elif tape.slots[spot.slot].made_by is None and is_kept(evidence, spot.slot):
            value = tape.leaf_value(spot.slot)
        if value is not None:
            found[spot] = dense(value.detach())
    if spots and not found:
        raise UserError(f"{spots[0].words} of step {evidence.step} cannot be brought back: it was not kept")
    return found


def is_kept(evidence: Evidence, slot: int) -> bool:
    return slot in evidence.tape.loose or slot in evidence.tape.memory_of


def dense(value: Tensor) -> Tensor:
    return value if value.layout == torch.strided else value.to_dense()


def describe(value: Tensor) -> dict[str, float | int | list[int] | str]:
    """What one look at a tensor tells."""
    found: dict[str, float | int | list[int] | str] = {
        "shape": list(value.shape),
        "dtype": str(value.dtype).removeprefix("torch."),
    }
    flat = real(value)
    finite = finite_of(flat)
    if len(finite) < len(flat):
        found["nan"], found["inf"] = int(torch.isnan(flat).sum()), int(torch.isinf(flat).sum())
    if len(finite):
        low, high = torch.aminmax(finite)
        mean = sum(float(part.sum()) for part in in_parts(finite)) / len(finite)
        spread = sum(float((part - mean).square().sum()) for part in in_parts(finite))
        found |= {"min": float(low), "max": float(high), "mean": mean}
        found["std"] = math.sqrt(spread / (len(finite) - 1)) if len(finite) > 1 else 0.0
        found["norm"] = math.sqrt(sum(float(part.square().sum()) for part in in_parts(finite)))
        found["zero"] = int((finite == 0).sum()) / len(finite)
    return found


def real(value: Tensor) -> Tensor:
    """All numbers in one row; of complex ones their size, of truth values 0 and 1."""
    flat = value.reshape(-1)
    return flat.abs() if flat.is_complex() else flat.byte() if flat.dtype == torch.bool else flat


def finite_of(flat: Tensor) -> Tensor:
    """Those that are finite: the tensor itself, not a copy, where all are."""
    if not flat.numel() or not flat.is_floating_point():
        return flat
    ends = torch.stack(torch.aminmax(flat))  # a NaN is both of them
    return flat if bool(torch.isfinite(ends).all()) else flat[torch.isfinite(flat)]


def in_parts(flat: Tensor) -> Iterator[Tensor]:
    """Some numbers at a time, in float64: a copy of all of a large tensor is slower than what is done with it."""
    return (part.double() for part in flat.split(PART))


def place_of(operation: Operation | None) -> str | None:
    """`train.py:10 in step`."""
    if operation is None or operation.line is None:
        return None
    line = operation.line
    return f"{line.file.rsplit('/', 1)[-1]}:{line.number} in {line.function}"


def below(name: str, of: str) -> bool:
    """Whether a parameter is the one that is meant, or of the module that is meant."""
    return not of or name == of or name.startswith(f"{of}.")


def relative(apart: float, size: float) -> float:
    return apart / size if size > 0 else (0.0 if apart == 0 else math.inf)
