"""Are observations kept, or only looked at? torch.from_numpy shares the memory of an array that its owner changes."""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterator

from gradproof.experiments.evidence import Evidence, Verdict, confirmed
from gradproof.experiments.nonfinite import place_of
from gradproof.tape.arrays import content_of
from gradproof.tape.operations import Line, OneArray, Operation

SHARES = re.compile(r"\b(from_numpy|as_tensor|from_dlpack|frombuffer)\s*\(")


def are_arrays_kept_as_they_were(evidence: Evidence) -> Iterator[Verdict]:
    """stack of tensors that are one NumPy array: proof where the array was seen to change, else only a suspicion."""
    earlier: list[OneArray] = evidence.memory.setdefault("one array", [])
    # a mask that stays may stand beside observations that do not
    for index, found in sorted(evidence.tape.one_arrays.items(), key=lambda item: -item[1].changed):
        operation = evidence.tape.operations[index]
        proven = True
        if found.changed:
            since = f"{found.changed} of them held something else when they were first read in this step"
        elif any(map(has_changed, earlier)):
            since = "the array has changed since it was first put together"
        else:
            since, proven = "the array was not seen to change", False
            earlier[:] = [*earlier[-8:], found]
        yield confirmed(
            "aliasing-or-inplace/one-array",
            f"{found.count} of the {found.of} tensors that {operation.name} puts together are one NumPy array: "
            "all hold what was written last",
            f"put together at {operation.line}; {since}",
            where=where_made(evidence, operation)
            or line_that_shares(operation.line)
            or place_of(operation.module, operation.line),
            fix="keep a copy: torch.from_numpy(array.copy()), torch.tensor(array) or .clone()",
            level="problem" if proven else "note",
            confidence="proven" if proven else "possible",
            lasting=proven,
        )
        return


def has_changed(array: OneArray) -> bool:
    """Whether a tensor that still lives holds something else than it did."""
    member = array.member()
    return member is not None and content_of(member) != array.content


def where_made(evidence: Evidence, stack: Operation) -> str | None:
    """The line that made a tensor of the array, if this step did."""
    storages = {evidence.slot(slot).storage for slot in stack.reads}
    for op in evidence.tape.operations[: stack.index]:
        if op.name == "lift_fresh" and evidence.slot(op.reads[0]).storage in storages:
            return place_of("", op.line)
    return None


def line_that_shares(line: Line | None) -> str | None:
    """Where the file makes tensors of arrays without a copy: the nearest above, or the only one."""
    if line is None:
        return None
    source = enumerate(linecache.getlines(line.file), 1)
    numbers = [n for n, text in source if SHARES.search(text.partition("#")[0])]
    above = [n for n in numbers if n <= line.number]
    number = above[-1] if above else numbers[0] if len(numbers) == 1 else None
    return f"{line.file.rsplit('/', 1)[-1]}:{number}" if number is not None else None
