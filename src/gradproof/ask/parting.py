"""Where do two runs part? Settings, the loss, then weights, inputs and operations of a step that both recorded."""

from __future__ import annotations

from gradproof.ask.answer import Answer, Row
from gradproof.ask.opened import Asked, OpenedRun
from gradproof.ask.samples import place_of_sample
from gradproof.ask.spots import is_kept, place_of, relative
from gradproof.errors import UserError
from gradproof.instruments.evidence import Evidence
from gradproof.report.comparison import find_differences, find_parting

ROUNDING = 1e-5  # of a tensor or a number: less is rounding
MOST = 12


def answer(asked: Asked) -> Answer:
    if not asked.other:
        raise UserError("with which run? --with RUN")
    first, other = OpenedRun(asked.run.path), OpenedRun(asked.other)
    settings: list[Row] = [
        {"what": f"{found.group}: {found.what}", "here": found.values[0], "there": found.values[1]}
        for found in find_differences([first.run, other.run])
    ]
    loss = find_parting(first.run, other.run)
    common = sorted(set(first.steps) & set(other.steps))
    steps = [asked.step] if asked.step is not None else common
    if asked.step is not None and asked.step not in common:
        raise UserError(
            f"step {asked.step} was not recorded in both; in both are {', '.join(map(str, common[:12])) or 'none'}"
        )
    step, rows = first_difference(first, other, steps, loss, asked.step is not None)
    if rows:
        found = f"step {step}, {rows[0]['what']}"
        found += f", from row {rows[0]['first_row']} on" if "first_row" in rows[0] else ""
    elif loss is not None:
        found = f"the loss of step {loss}; no step recorded in both differs before it"
    else:
        found = ""
    return Answer(
        "parting",
        f"They {f'part at {found}' if found else 'do not part in what was looked at'}. "
        f"{len(settings)} {'setting, version or line' if len(settings) == 1 else 'settings, versions or lines'} "
        "of code differ.",
        "proven" if rows else "measured",
        step=step if rows else loss,
        place=str(rows[0].get("line") or "") or None if rows else None,
        numbers={"loss_differs_since": loss, "recorded_in_both": len(common)},
        rows=(*rows, *settings),
        not_looked_at=() if common else ("tensors: no step was recorded in both",),
        ask_next=("gradproof compare RUN OTHER",),
    )


def first_difference(
    first: OpenedRun, other: OpenedRun, steps: list[int], loss: int | None, named: bool
) -> tuple[int | None, list[Row]]:
    """The first recorded step that differs beyond rounding: halving, for who has parted stays apart."""
    if not named and loss is not None:
        steps = [step for step in steps if step <= loss + 1] or steps[:1]
    low, high, found = 0, len(steps) - 1, None
    while low <= high:
        middle = (low + high) // 2
        rows = differences(first._open(steps[middle]), other._open(steps[middle]))
        if rows:
            found, high = (steps[middle], rows), middle - 1
        else:
            low = middle + 1
    return found if found is not None else (None, [])


def differences(here: Evidence, there: Evidence) -> list[Row]:
    """What goes into a step, then what its operations make of it."""
    rows: list[Row] = []
    for name, slot in here.tape.leaf_named.items():
        other = there.tape.leaf_named.get(name)
        if other is not None and is_kept(here, slot) and is_kept(there, other):
            rows += compared(f"{here.slot(slot).kind} {name}", here, slot, there, other)
    unnamed = [[s.index for s in e.tape.inputs if not s.name] for e in (here, there)]
    for number, (slot, other) in enumerate(zip(*unnamed, strict=False)):
        if is_kept(here, slot) and is_kept(there, other):
            rows += compared(f"input {number}", here, slot, there, other)
    rows.sort(key=lambda row: -float(row["apart"]))
    return (rows or operations(here, there))[:MOST]


def compared(what: str, here: Evidence, slot: int, there: Evidence, other: int) -> list[Row]:
    one, two = here.tape.leaf_value(slot), there.tape.leaf_value(other)
    if one.shape != two.shape:
        return [{"what": what, "here": list(one.shape), "there": list(two.shape), "apart": float("inf")}]
    if one.is_sparse or two.is_sparse or one.is_complex():
        return []
    one, two = one.double().cpu(), two.double().cpu()
    apart = relative(float((one - two).norm()), float(one.norm()))
    if apart <= ROUNDING:  # NaN is apart
        return []
    row: Row = {"what": what, "apart": apart}
    if one.dim() and here.slot(slot).kind != "parameter":
        rows = (one != two).reshape(len(one), -1).any(1).nonzero().flatten().tolist()
        row |= {"first_row": rows[0], "rows": len(rows), "file": place_of_sample(here, rows[0], len(one))}
    return [row]


def operations(here: Evidence, there: Evidence) -> list[Row]:
    """The first operation that is another one, or that made something else, by its recorded sum."""
    prints = here.tape.fingerprints, there.tape.fingerprints
    for one, two in zip(here.tape.operations, there.tape.operations, strict=False):
        if one.name != two.name:
            return [
                {
                    "what": f"operation {one.index}",
                    "here": one.name,
                    "there": two.name,
                    "line": place_of(one) or "",
                }
            ]
        if one.fingerprint is None or two.fingerprint is None:
            continue
        a, b = float(prints[0][one.fingerprint]), float(prints[1][two.fingerprint])
        if not abs(a - b) <= ROUNDING * max(abs(a), abs(b), 1.0) and not (a != a and b != b):
            what = f"operation {one.index} ({one.name})"
            return [{"what": what, "here": a, "there": b, "apart": abs(a - b), "line": place_of(one) or ""}]
    counts = len(here.tape.operations), len(there.tape.operations)
    return (
        []
        if counts[0] == counts[1]
        else [{"what": "operations in the step", "here": counts[0], "there": counts[1]}]
    )
