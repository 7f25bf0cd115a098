"""Which digits are lost, and does it matter? Updates and gradients in half precision; positions, phases and tables."""

from __future__ import annotations

import linecache
import math
import re
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gradproof.experiments.numbers.nonfinite import step_is_nonfinite
from gradproof.experiments.verdict import Verdict, confirmed, first_of, undecided
from gradproof.instruments import digits
from gradproof.instruments.digits import EXACT_UP_TO, Jumps, jumps, wrong_share
from gradproof.instruments.evidence import Evidence
from gradproof.instruments.flow import VIEWS, place_of, with_line
from gradproof.instruments.source import cut_line, forward_line, lines_behind
from gradproof.instruments.walk import ahead
from gradproof.numerics.stored import HALF, format_of, spacing
from gradproof.tape.operations import Operation, Slot
from gradproof.tape.replay import replay_forward
from gradproof.tape.replica import line_that_sets, source_of_class

FAMILY = "low-precision-error"
MOSTLY = 0.9  # of the updates: nothing can be learned from the rest, whatever the loss does
MUCH = 0.5  # of updates, gradients or rows that are used: half of every step is gone
SOME = 0.3  # of the gradients: less is lost in many trainings that go well
SMALLEST = 16  # entries: of fewer, all may stay by chance
WRONG = 0.1  # of a sine or cosine, whose whole range is 2: what a network takes for noise
WRONG_OF_TRAINED = 0.3  # where weights are trained to live with it
MANY = 0.2  # of the sines and cosines: as many as one frequency in five
FEWEST = 2  # whole numbers that have become others: one may be an odd sample
MOST = 24  # sines of a step that are looked at: a stack of blocks makes the same ones again
KEPT = 8192  # samples remembered, to find twins among them
PAIRS = 30  # samples with the numbers of another one: a variance among fewer is chance
APART = 0.3  # of a variance: what is left among samples that have become one, or from one number to the next
FEW = 0.15  # of the columns: those of one frequency in six
LARGEST = 8_000_000  # entries of a table: a second of work
WAVES = ("sin", "cos", "sin_", "cos_", "polar", "complex")
PICKS = ("eq", "remainder", "fmod", "floor_divide")  # that ask which number it is; beside casts to int
CASTS = {"_to_copy", "lift_fresh", "detach", "alias", "clone"}
TAKES = VIEWS | {"index", "index_select", "embedding", "gather", "select", "split", "unbind"}
SHORT = re.compile(r"half\b|float16|[\"']f2[\"']")
COUNTS = re.compile(r"arange|linspace|cumsum|range\(")
CONVERTS = re.compile(r"^(?!.*finfo).*(astype|\.to\(|half\(|dtype|\.type\(|bfloat16\(|array\()")
FORMAT = re.compile(r"half|float16|dtype|\.type\(")


def is_it_precision(evidence: Evidence) -> Iterator[Verdict]:
    """Only where half precision is on the tape at all."""
    half = {slot.dtype for slot in evidence.tape.slots} & set(HALF)
    if half and not step_is_nonfinite(evidence):
        looks = (lost_masters, lost_updates, *([lost_gradients] if torch.float16 in half else []))
        yield from first_of(look(evidence) for look in looks)


def lost_updates(evidence: Evidence) -> Verdict | None:
    """Entries that a step (or an average) writes to and that stay, because the change is below half a last digit."""
    found = [each for each in digits.swallowed_updates(evidence) if each.wanted >= SMALLEST]
    if not found:
        return None
    share = sum(each.stay for each in found) / sum(each.wanted for each in found)
    history = evidence.memory.setdefault("lost updates", [])
    history.append(share)
    if len(history) < 2 or min(history[-2:]) < MUCH:
        return None
    worst = max(found, key=lambda each: each.stay / each.wanted)
    hit = evidence.slot(worst.slot)
    writer = next((op for op in evidence.tape.operations if worst.slot in op.writes), None)
    averaged = writer is not None and writer.phase != "optimizer"
    return confirmed(
        f"{FAMILY}/lost-updates",
        f"{100 * share:.0f} % of the entries that {'an average' if averaged else 'the optimizer'} writes to stay: "
        f"the change is below the last digit of {name_of(hit.dtype)}",
        f"worst: {hit.name}, {100 * worst.stay / worst.wanted:.0f} %",
        where=place_of(hit.name, writer.line) if averaged and writer is not None else hit.name,
        confidence="proven",  # the same tensor before and after
        if_troubled=share < MOSTLY,
        lasting=share >= MOSTLY,
    )


def lost_masters(evidence: Evidence) -> Verdict | None:
    """Copies in float32 that lose at each step what the step before has given them."""
    found = list(digits.overwritten_masters(evidence))
    wanted = sum(each.wanted for each, _, _ in found)
    if wanted < SMALLEST or sum(each.stay for each, _, _ in found) < MUCH * wanted:
        return None
    worst, op, format = max(found, key=lambda each: each[0].stay / max(1, each[0].wanted))
    name, short = evidence.slot(worst.slot).name, name_of(format)
    share = sum(each.stay for each, _, _ in found) / wanted
    return confirmed(
        f"{FAMILY}/lost-updates",
        f"before each step the optimizer's own copy is overwritten with the weights in {short}: {100 * share:.0f} % of "
        f"the entries lose what a step gives them, which is below the last digit of {short}",
        f"worst: {name}, {100 * worst.stay / worst.wanted:.0f} %",
        where=place_of(name, op.line),
        fix=f"copy from the optimizer's copy to the {short} weights after each step, and never back",
        confidence="proven",  # the copy as it was, and what it was given
        if_troubled=share < MOSTLY,
        lasting=share >= MOSTLY,
    )


def lost_gradients(evidence: Evidence) -> Verdict | None:
    """Gradients below the smallest float16: zero as they are read, and neither in float64 nor in float32."""
    if digits.flushed_gradients(evidence, torch.float64) < SOME:
        return None
    share = digits.flushed_gradients(evidence, torch.float32)  # what it loses as well is no fault of float16
    if share < SOME:
        return None
    return confirmed(
        f"{FAMILY}/underflow",
        f"{100 * share:.0f} % of the gradient's entries are zero in float16, and not in float32 or float64",
        "the loss is scaled, but not enough" if evidence.tape.scaled else "the loss is not scaled",
        confidence="proven",  # against float64
        if_troubled=share < MUCH,
        lasting=False,
    )


def which_digits_are_lost(evidence: Evidence) -> Iterator[Verdict]:
    """What the step computes of its data, against float64; then what was stored in few digits before the step."""
    waves = [op for op in evidence.flow.operations if op.name in WAVES and op.makes][:MOST]
    if waves and step_is_nonfinite(evidence):
        yield undecided(FAMILY, f"step {evidence.step} is not finite: what its digits did cannot be told")
        return
    looks = (lost_on_the_way, lost_in_the_batch, lost_in_tables)
    yield from first_of(look(evidence, waves) for look in looks)


# on the tape ------------------------------------------------------------------------------------------------


def lost_on_the_way(evidence: Evidence, waves: list[Operation]) -> Verdict | None:
    """Rows and phases that are others than in float64: of whole numbers that were rounded, or computed in half."""
    ranges, picks = dict(ranges_of(evidence)), dict(picked(evidence))
    found = digits.against_float64(evidence, [*picks, *(op.makes[0] for op in waves)], ranges)
    for slot, op in ((slot, op) for slot, op in picks.items() if slot in found):
        here, true = found[slot]
        wrong = wrong_share(here, true, 0.5) if bool((true == true.round()).all()) else 0.0
        said = f"{100 * wrong:.0f} % of them are another number where {op.name} uses them ({at(op)})"
        verdict = rounded_numbers(evidence, slot, ranges, said) if wrong > 0 else None
        if verdict is not None:
            return verdict
    for op in (op for op in waves if op.makes[0] in found):
        allowed = WRONG_OF_TRAINED if op.makes[0] in evidence.flow.tracked else WRONG
        wrong = wrong_share(*found[op.makes[0]], allowed)
        said = (
            f"{100 * wrong:.0f} % of what {op.name} makes is off by more than {allowed} of ±1 against float64"
        )
        if wrong > MANY:
            return rounded_numbers(evidence, op.reads[0], ranges, said) or phase_in_half(evidence, op, said)
    return None


def at(op: Operation) -> str | None:
    return place_of(op.module, op.line)


def picked(evidence: Evidence) -> Iterator[tuple[int, Operation]]:
    """Data in floating point that are asked which number they are: cast to int, compared, divided with a rest."""
    for op in evidence.flow.operations:
        to_int = op.name == "_to_copy" and not evidence.slot(op.makes[0]).dtype.is_floating_point
        if to_int or op.name in PICKS:
            slots = [s for s in op.reads if evidence.slot(s).dtype in EXACT_UP_TO]
            yield from ((slot, op) for slot in slots if slot not in evidence.flow.tracked)


def ranges_of(evidence: Evidence) -> Iterator[tuple[int, Tensor]]:
    """What was counted in a format that does not know all of its numbers, leaves and on the tape; and the numbers."""
    for leaf in evidence.tape.leaves():
        limit, count = EXACT_UP_TO.get(leaf.dtype, 0), math.prod(leaf.shape)
        if leaf.kind in ("buffer", "input") and 0 < limit < count <= LARGEST:
            numbers = torch.arange(count, dtype=torch.float64, device=leaf.device).reshape(leaf.shape)
            if torch.equal(evidence.tape.leaf_value(leaf.index), numbers.to(leaf.dtype)):
                yield leaf.index, numbers
    for op in evidence.flow.operations:
        if op.name == "arange" and evidence.slot(op.makes[0]).dtype in EXACT_UP_TO:
            ends = [arg for arg in op.args if isinstance(arg, (int, float))]
            yield op.makes[0], torch.arange(*ends, dtype=torch.float64)


def rounded_numbers(evidence: Evidence, end: int, ranges: dict[int, Tensor], said: str) -> Verdict | None:
    """The first whole numbers on the way to a slot that a cast, or a range, has made others."""
    flow, behind = evidence.flow, evidence.flow.ancestors(end)
    casts = [op.makes[0] for op in flow.operations if op.name == "_to_copy"]
    casts = [s for s in casts if evidence.slot(s).dtype in EXACT_UP_TO and s in behind - flow.tracked]
    truths = {slot: true for slot, true in ranges.items() if slot in behind}
    truths |= {slot: true for slot, (_, true) in digits.against_float64(evidence, casts, ranges).items()}
    for slot, true in truths.items():
        dtype = evidence.slot(slot).dtype
        columns = whole_columns(true, EXACT_UP_TO[dtype])
        rounded = columns.to(dtype).double()
        changed = int((rounded != columns).sum())
        if changed >= FEWEST:
            return confirmed(
                f"{FAMILY}/whole-numbers",
                f"{changed} of {columns.numel()} whole numbers (up to {int(columns.abs().max())}) are rounded to "
                f"others in {name_of(dtype)}, which knows every one only up to {EXACT_UP_TO[dtype]}; "
                f"{len(torch.unique(columns))} different ones become {len(torch.unique(rounded))}",
                said,
                at=flow.maker(slot) or flow.readers(slot)[0],
                confidence="proven",  # against float64
            )
    return None


def whole_columns(values: Tensor, limit: int) -> Tensor:
    """The columns that hold whole numbers only, some of them beyond the limit."""
    columns = values.reshape(-1, values.shape[-1] if values.dim() > 1 else 1)
    if not columns.numel():
        return columns
    return columns[:, (columns == columns.round()).all(0) & (columns.abs().amax(0) > limit)]


def phase_in_half(evidence: Evidence, wave: Operation, said: str) -> Verdict | None:
    """A sine of 300 radians needs all of its digits: named is the first operation on its way that computes in half."""
    phase = wave.reads[0]
    behind = {slot for slot in evidence.flow.ancestors(phase) if evidence.slot(slot).dtype in HALF}
    makers = [op for op in evidence.forward if not behind.isdisjoint(op.makes)]
    computing = (op for op in makers if op.name not in CASTS and op.line is not None)
    first = next(computing, next(iter(makers), None))
    if first is None:
        return None
    dtype, value = evidence.slot(first.makes[0]).dtype, evidence.flow.values([phase]).get(phase)
    size = float(value.double().abs().max()) if value is not None else 0.0
    return confirmed(
        f"{FAMILY}/phases",
        f"{said}: its argument goes up to {size:.3g} radians and is computed in {name_of(dtype)}, whose last digit is "
        f"worth {float(spacing(torch.tensor(size), dtype)):.2g} there",
        f"in {name_of(dtype)} since {first.name} at {at(first)}",
        at=first,
        confidence="proven",  # against float64
    )


# before the tape --------------------------------------------------------------------------------------------


def lost_in_the_batch(evidence: Evidence, waves: list[Operation]) -> Verdict | None:
    """Times or coordinates that were kept in half precision: samples that the phases do not tell apart any more."""
    flow = evidence.flow
    for slot in data_behind(evidence, waves) if waves else ():
        value = flow.values([slot]).get(slot)
        dtype = format_of(value) if value is not None else None
        if value is None or dtype is None:
            continue
        ends = [op.makes[0] for op in waves if slot in flow.ancestors(op.reads[0])]
        moved = digits.within_the_last_digit(evidence, slot, value, dtype, ends)
        wrong = max((wrong_share(*pair, WRONG) for pair in moved.values()), default=0.0)
        apart, count = variance_among_twins(evidence, value) if wrong > MANY else (0.0, 0)
        if count < PAIRS or apart < APART:
            continue
        return confirmed(
            f"{FAMILY}/stored-phases",
            f"the numbers that phases are made of were kept in {name_of(dtype)} (up to {float(value.abs().max()):.3g}, "
            f"where its last digit is worth {float(spacing(value.double().abs().max(), dtype)):.2g}): within it "
            f"{100 * wrong:.0f} % of the sines and cosines change by more than {WRONG} of ±1",
            f"{count} samples have the same numbers as another one; {100 * apart:.0f} % of the targets' variance is "
            "left among those",
            where=place_of_storing(evidence, slot),
            confidence="likely",  # a share of a variance
        )
    return None


def data_behind(evidence: Evidence, waves: list[Operation]) -> list[int]:
    """The batch as the network is given it, and what was widened on its way, where phases are made of it."""
    flow = evidence.flow
    behind = set().union(*(flow.ancestors(op.reads[0]) for op in waves))
    casts = [op.reads[0] for op in flow.forward if op.name == "_to_copy"]
    widened = [slot for slot in casts if evidence.slot(slot).dtype in HALF]
    read_first = [slot.index for slot in evidence.tape.inputs if slot.shape]
    found = [evidence.slot(s) for s in dict.fromkeys([*widened, *flow.inputs, *read_first]) if s in behind]
    data = [s.index for s in found if s.dtype.is_floating_point and s.kind in ("input", "result")]
    return [slot for slot in data if slot not in flow.tracked][:4]


def variance_among_twins(evidence: Evidence, value: Tensor) -> tuple[float, int]:
    """(share of the targets' variance among samples that have become one, how many these are) of all steps so far."""
    kept = evidence.memory.setdefault("stored phases", {"x": [], "y": []})
    comparison = next((c for c in evidence.flow.comparisons if c.kind == "value"), None)
    target = evidence.flow.values([comparison.target]).get(comparison.target) if comparison else None
    if target is None or not target.dim() or len(target) != len(value) or value.dim() > 2:
        return 0.0, 0
    if sum(map(len, kept["y"])) < KEPT:
        kept["x"].append(value.reshape(len(value), -1).double().cpu())
        kept["y"].append(target.reshape(len(target), -1)[:, 0].double().cpu())
    y = torch.cat(kept["y"])
    _, group, size = torch.unique(torch.cat(kept["x"]), dim=0, return_inverse=True, return_counts=True)
    mean = torch.zeros(len(size), dtype=torch.float64).index_add_(0, group, y) / size
    several = size[group] > 1
    # of two equal samples each is half as far from their mean as it seems: n / (n - 1)
    within = ((y - mean[group]).square() * size[group] / (size[group] - 1).clamp_min(1))[several]
    total = float(y.var()) if len(y) > 1 else 0.0
    return (float(within.mean()) / total if total > 0 and len(within) else 0.0), int(several.sum())


def lost_in_tables(evidence: Evidence, waves: list[Operation]) -> Verdict | None:
    """Rows made of numbers in half precision, and wholly different at its next number; some have become one."""
    for slot, dim in long_tables(evidence):
        found = counted_in(evidence.tape.leaf_value(slot.index).movedim(dim, 0))
        if found is not None and share_of(found.twins[rows_used(evidence, slot, dim)]) >= MUCH:
            name, where = slot.name or "a table of the batch", place_of_table(evidence, slot)
            return made_of("merged-rows", f"{name}, whose rows were counted", found, where)
    for table in evidence.facts.stepped_tables:
        found = counted_in(table["values"])
        if found is not None and share_of(found.twins) >= MUCH:
            where = line_with(table["file"], (SHORT, COUNTS), (SHORT, CONVERTS))
            return made_of("merged-rows", f"{table['name']}, whose rows were counted", found, where)
    for table in evidence.facts.tables:
        format = format_of(table["values"])
        for name, feature in table["others"].items():
            found = jumps(table["values"], feature, format) if format is not None else None
            if found is not None and float(found.share) >= APART:
                where = line_with(table["file"], (SHORT, CONVERTS))
                return made_of("stored-in-half", f"{name}, made of {table['name']}", found, where)
    return None


def share_of(true: Tensor) -> float:
    return float(true.double().mean())


def made_of(what: str, made: str, found: Jumps, where: str | None) -> Verdict:
    jumping = found.share[found.share > APART]
    return confirmed(
        f"{FAMILY}/{what}",
        f"{made} in {name_of(found.format)}, has {found.distinct} different rows of {len(found.twins)}: the numbers go "
        f"up to {found.largest:.4g}, in steps of {found.spacing:.3g}",
        f"{len(jumping)} of {len(found.share)} columns have little in common from one of these numbers to the next: "
        f"{100 * min(float(jumping.mean()), 1.0):.0f} % of their variance lie between them",
        where=where,
        confidence="likely",  # a share of a variance
    )


def long_tables(evidence: Evidence) -> Iterator[tuple[Slot, int]]:
    """(leaf, dimension): what the forward pass reads and nobody trains, longer than a format can count."""
    read = {slot for op in evidence.flow.operations for slot in evidence.flow.reads(op)}
    for slot in evidence.tape.leaves():
        fixed = slot.index in read and slot.index not in evidence.tape.stepped
        plain = slot.dtype.is_floating_point and not slot.is_sparse
        if fixed and plain and math.prod(slot.shape) <= LARGEST:
            yield from (
                (slot, dim) for dim, n in enumerate(slot.shape) if n > 2 * EXACT_UP_TO[torch.bfloat16]
            )


def counted_in(table: Tensor) -> Jumps | None:
    """The format that the rows of a table were counted in, where many of its columns suffer from it."""
    for dtype in HALF[::-1]:
        limit, count = EXACT_UP_TO[dtype], len(table)
        if count <= 2 * limit + 1 or not bool((table[2 * limit] == table[2 * limit + 1]).all()):
            continue  # the first two that the format makes one
        rows = table.detach().reshape(count, -1).cpu()
        # rounded, and as arange counts them, which is rougher on a CPU
        for numbers in (torch.arange(count).to(dtype), torch.arange(count, dtype=dtype)):
            found = jumps(numbers, rows, dtype)
            if found is not None and share_of(found.share > APART) >= FEW:
                return found
    return None


def rows_used(evidence: Evidence, slot: Slot, dim: int) -> Tensor:
    """The numbers of the rows that a step takes from a table: its entries are replaced by them, and read again."""
    users = list(ahead(evidence.flow, [slot.index], TAKES, evidence.flow.operations))
    taken = {slot.index, *(made for op in users if op.name in TAKES for made in op.makes)}
    ends = {read for op in users if op.name not in TAKES for read in op.reads} & taken
    count = slot.shape[dim]
    if slot.index in ends:
        return torch.arange(count)
    shape = [count if d == dim else 1 for d in range(len(slot.shape))]
    numbers = torch.arange(count, dtype=torch.float64, device=slot.device).reshape(shape).expand(slot.shape)
    found = replay_forward(evidence.tape, torch.float64, {slot.index: numbers}, keep=list(ends)).values
    rows = [value.reshape(-1).cpu() for value in found.values()]
    return torch.cat(rows).round().long().unique().clamp(0, count - 1) if rows else torch.arange(0)


# places -----------------------------------------------------------------------------------------------------


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def place_of_storing(evidence: Evidence, slot: int) -> str | None:
    """The line behind a batch that names a short format, or the nearest one."""
    line = cut_line(evidence.flow, slot) or forward_line(evidence)
    if line is None:
        return evidence.flow.origin(slot)
    numbers = [line.number, *lines_behind(line)]
    short = [n for n in numbers if FORMAT.search(linecache.getline(line.file, n))]
    return f"{line.file.rsplit('/', 1)[-1]}:{next(iter([*short, *numbers[1:], line.number]))}"


def place_of_table(evidence: Evidence, slot: Slot) -> str | None:
    """The module that keeps a buffer, and the line of its class that counts in the short format."""
    path, _, name = slot.name.rpartition(".")
    owner = evidence.modules.get(path)
    if owner is None or not owner._buffers:
        first = next((op.line for op in evidence.flow.operations if slot.index in op.reads), None)
        return line_with(first.file, (SHORT, COUNTS), (SHORT, CONVERTS)) if first is not None else None
    file, number, lines = source_of_class(type(owner))
    line = line_with(file, (SHORT, COUNTS), (SHORT,), (COUNTS,), lines=lines, first=number)
    line = line or line_that_sets(type(owner), name)
    return with_line(path or type(owner).__name__, line) if line else path


def line_with(
    file: str, *choices: tuple[re.Pattern[str], ...], lines: Sequence[str] | None = None, first: int = 1
) -> str | None:
    """The first line of a file, or of a part of it, that has all the words of the first choice that any line has."""
    numbered = list(enumerate(linecache.getlines(file) if lines is None else lines, first))
    for choice in choices:
        for number, text in numbered:
            if all(word.search(text.partition("#")[0]) for word in choice):
                return f"{file.rsplit('/', 1)[-1]}:{number}"
    return None
