"""Does what ought to follow follow? Averages of the weights and of their gradients, target networks, tied weights."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from gradproof.experiments.verdict import Verdict, confirmed, excluded, first_of
from gradproof.instruments.averages import Follower, entries_left_behind, find_followers
from gradproof.instruments.evidence import Evidence
from gradproof.instruments.flow import place_of
from gradproof.instruments.moments import beyond_the_bound, bound, outgrown

FAMILY = "weights-state-error"
TIMES = 2  # later taped steps that average anew, from a tensor that has not changed by one bit
SMALL, LARGE = 0.3, 3.0  # times the size of the weights: no average of what they have been is that far off
FEWEST = 64  # entries that their weights have left: of fewer, all may stay by chance
MOST = 0.5  # of them: half of every update is lost
EARLY = 3  # steps: later, equal weights have had time to come apart
UNTIED = 1e-3  # of the size of a table: beyond rounding, and less than a step changes it
A_FEW = 8  # entries of a tensor: so many are a slip of memory, more are a state that was put together


def does_the_average_follow(evidence: Evidence) -> Iterator[Verdict]:
    followers = list(find_followers(evidence))
    found = [each for each in followers if not each.is_the_weight]
    averages = [each for each in found if each.averages]
    note_decay(evidence, averages)
    yield from first_of((overflown_state(evidence), rounded_away(evidence, averages)))
    own = [each for each in followers if each.is_the_weight]
    looks = (impossible_moments(evidence), average_of_itself(own), thrown_away(evidence, averages))
    yield from first_of((*looks, wrong_size(evidence, found), came_untied(evidence)))


def overflown_state(evidence: Evidence) -> Verdict | None:
    """Who divides by the root of what is infinite moves these weights no more."""
    for name, line, key, value in outgrown(evidence):
        return confirmed(
            "low-precision-error/state-overflow",
            f"{int(torch.isinf(value).sum())} of {value.numel()} entries of the optimizer's {key!r} of {name} are "
            f"infinite ({value.dtype}); at an earlier step none was, and the weights are finite",
            where=f"{name}, {line}" if line else name,
            confidence="proven",  # it is infinite, and was not
        )
    return None


def rounded_away(evidence: Evidence, averages: list[Follower]) -> Verdict | None:
    """An average in half precision that its weights have left: what an update adds is below its last digit."""
    found = entries_left_behind(evidence, averages)
    wanted = sum(count for _, count in found.values())
    if wanted < FEWEST or sum(stay for stay, _ in found.values()) < MOST * wanted:
        return None
    worst = next(each for each in averages if each.slot in found)
    dtype = str(evidence.slot(worst.slot).dtype).removeprefix("torch.")
    share = sum(stay for stay, _ in found.values()) / wanted
    return confirmed(
        "low-precision-error/lost-updates",
        f"{len(found)} averages of weights are kept in {dtype}: of {wanted} entries that their weights have left, "
        f"{100 * share:.0f} % stay as they are to the last bit, whatever is added",
        f"an update takes {worst.take:.3g} of the way, and the last digit of {dtype} is larger",
        where=place_of(worst.operation.module, worst.operation.line),
        fix="keep the average in float32: .float() where it is made, or loaded",
        confidence="proven",  # the same bits before and after
    )


def impossible_moments(evidence: Evidence) -> Verdict | None:
    found, looked_at = beyond_the_bound(evidence)
    if not found:
        said = f"every entry of Adam's averages of {looked_at} tensors is one that gradients can make"
        return excluded(f"{FAMILY}/impossible-moments", said) if looked_at else None
    worst, few = found[0], all(each.count <= A_FEW for each in found)
    return confirmed(
        f"{FAMILY}/impossible-moments",
        f"Adam's average of the gradient at {worst.name}{list(worst.place)} is {worst.mean:.3g}, of its square "
        f"{worst.square:.3g}: with the usual betas no gradients make the first more than {bound(0.9, 0.999):.2g} "
        "times the root of the second",
        f"so it is with {worst.count} of {worst.entries} entries of {worst.name}"
        + (f" and with {len(found) - 1} other tensors" if found[1:] else ""),
        "single entries: something else has written into this memory, a library or the hardware"
        if few
        else "whole tensors: the two averages were not saved together, or one of them was set by itself",
        where=f"{worst.name}, {worst.line}" if worst.line else worst.name,
        confidence="proven",  # an inequality
    )


def average_of_itself(found: list[Follower]) -> Verdict | None:
    """What was taken for a copy, `dict(model.state_dict())`, is the weights: averaging them remembers nothing."""
    if not found:
        return None
    factor = found[0].keep + found[0].take
    changes = f": each update multiplies the weights by {factor:.6g}" if factor != 1 else ""
    return confirmed(
        "aliasing-or-inplace/average-of-itself",
        f"the average of {len(found)} weights (decay {found[0].keep:g}) is kept in the weights' own memory, so there "
        f"is none{changes}",
        at=found[0].operation,
        confidence="proven",  # one memory is read and written
    )


def note_decay(evidence: Evidence, averages: list[Follower]) -> None:
    """Into the run's facts: how much of the start an average still holds is known, and judged, at the end."""
    if not averages or len({average.operation.line for average in averages}) > 2:
        return
    slots = {average.slot for average in averages}
    first = averages[0].operation
    facts = evidence.memory.setdefault(
        "average",
        {
            "tensors": len(averages),
            "shapes": signature(evidence.slot(s).shape for s in slots),
            "module": all(evidence.slot(s).kind == "parameter" for s in slots),
            "where": place_of(first.module, first.line),
            "in_training": False,
            "decays": [],
        },
    )
    facts["decays"].append([evidence.step, sorted(a.keep for a in averages)[len(averages) // 2]])
    # a validation between two steps is no part of the training
    inside = (op for op in evidence.flow.operations if op.module and not slots.isdisjoint(op.reads))
    facts["in_training"] |= next(inside, None) is not None
    evidence.noted["average"] = facts


def signature(shapes: Iterable[tuple[int, ...]]) -> int:
    """One number for the shapes of a model's parameters, whatever their order."""
    return zlib.crc32(repr(sorted(tuple(shape) for shape in shapes)).encode())


def thrown_away(evidence: Evidence, averages: list[Follower]) -> Verdict | None:
    """Each step computes decay * average + (1 - decay) * weight; at the next one, the average is what it was."""
    written = {evidence.slot(slot).storage for op in evidence.tape.operations for slot in op.writes}
    found = [average for average in averages if not average.operation.grad_enabled]
    found = [average for average in found if evidence.slot(average.slot).storage not in written]
    if not found or any(evidence.slot(average.slot).made_by is not None for average in found):
        return None
    value = evidence.tape.leaf_value
    now = [value(average.slot) for average in found]
    leaves = [average for average in found if evidence.slot(average.weight).made_by is None]
    moves = any(not value(average.slot).equal(value(average.weight)) for average in leaves)
    kept = evidence.memory.setdefault("lost average", {"before": [], "times": 0})
    before = kept["before"]
    same = len(before) == len(now) and all(a.equal(b) for a, b in zip(before, now, strict=True))
    kept["times"] = kept["times"] + 1 if same and moves else 0
    kept["before"] = [value.clone() for value in now]
    if kept["times"] < TIMES:
        return None
    return confirmed(
        f"{FAMILY}/average-thrown-away",
        f"every step averages {len(found)} tensors with the weights (decay {found[0].keep:g}), and {TIMES + 1} "
        "taped steps find them unchanged to the last bit: the result is never written back",
        at=found[0].operation,
        confidence="proven",  # the same to the last bit
    )


def wrong_size(evidence: Evidence, found: list[Follower]) -> Verdict | None:
    """Parameters that are averaged in place, by factors that do not add up to one, and have gone where these lead."""
    followers = (
        f for f in found if f.slot in f.operation.writes and evidence.slot(f.slot).kind == "parameter"
    )
    sizes = [(size_of(evidence, f.slot), size_of(evidence, f.weight), f) for f in followers]
    ratios = sorted(((slow / fast, f) for slow, fast, f in sizes if fast > 0), key=lambda each: each[0])
    if not ratios:
        return None
    ratio, middle = ratios[len(ratios) // 2]
    said = f"the averaged weights have {ratio:.2g} times the size of those they average"
    if SMALL < ratio < LARGE:
        return excluded(f"{FAMILY}/average", said)
    if SMALL < middle.limit < LARGE:  # it begins at zero, or far away, and comes nearer
        return None
    return confirmed(
        f"{FAMILY}/average",
        f"{said}: their factors add up to {middle.keep + middle.take:.3g}, which leads to {middle.limit:.2g} times",
        at=middle.operation,
        confidence="likely",
        lasting=False,
    )


def size_of(evidence: Evidence, slot: int) -> float:
    return float(evidence.tape.leaf_value(slot).double().norm())


def came_untied(evidence: Evidence) -> Verdict | None:
    """An embedding and an output layer with the same first values and memory of their own: tied by a copy."""
    kept = evidence.memory.setdefault("tied at the start", {})
    if evidence.step <= EARLY and "pairs" not in kept:
        kept["pairs"] = equal_pairs(evidence)
    slots = {slot.name: slot.index for slot in evidence.tape.parameters}
    for table, output in kept.get("pairs", ()):
        if table not in slots or output not in slots:
            continue
        one, two = (evidence.tape.leaf_value(slots[name]) for name in (table, output))
        apart = float((one - two).norm() / one.norm())
        if apart > UNTIED:
            return confirmed(
                f"{FAMILY}/untied",
                f"{output} began as a copy of {table} and is now {100 * apart:.2g} % away: two tensors, not one",
                where=output,
                fix=f"share the parameter itself: {output} = {table}, not its .data or a clone",
                level="warning",
                confidence="likely",
            )
    return None


def equal_pairs(evidence: Evidence) -> list[tuple[str, str]]:
    """(looked-up table, matrix) with bit-identical values before the step, both trained, neither constant."""
    tables = {op.reads[0] for op in evidence.forward if op.name == "embedding" and op.reads}
    stepped, value = set(evidence.tape.stepped), evidence.tape.leaf_value
    slots = [slot for slot in evidence.tape.parameters if len(slot.shape) == 2 and slot.index in stepped]
    return [
        (one.name, two.name)
        for one in slots
        for two in slots
        if one.index in tables
        and two.index not in tables
        and one.shape == two.shape
        and one.storage != two.storage
        and differs_inside(value(one.index))
        and torch.equal(value(one.index), value(two.index))
    ]


def differs_inside(values: Tensor) -> bool:
    return bool((values != values.reshape(-1)[0]).any())
