"""Are the ranks in step? What each wrote of its steps is held side by side: weights, gradients, batches, times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gradproof.diagnosis.findings import Symptom
from gradproof.diagnosis.lost_ranks import ranks_lost
from gradproof.diagnosis.places import line_of
from gradproof.record.prints import IN_TURN, SUM_BITS
from gradproof.record.ranks import Ranks, read_ranks
from gradproof.record.run import Run, read_events
from gradproof.record.schema import EVENTS_FILE, EXAMINATION_FILE

FEWEST = 5  # steps that two ranks have in common
SAME = 1e-4  # relative difference of norms that the order of sums explains
EXACT = 1e-12  # of norms of the same bits
ONE_LOSS = 1e-5  # relative difference of a loss that two ranks compute from one output, in float32
ONE_FACTOR, TENSORS = (
    1e-4,
    3,
)  # so many gradients that differ by one factor, to this, are the same gradients, scaled
MOST_RANKS = 256  # whose events are read
MANY_BITS = -1
DRAWN_AT = (1, 2, 4, 8)  # steps at whose begin the states of the generators are noted
LONGER = 1.5  # times as many entries in a batch
SLOWER, SLOW_SECONDS, SLOW_STEPS = 3.0, 0.02, 50  # a straggler: times as slow, by so much, over so many steps
# calls by which ranks share one model, or hold parts of it: they are not meant to be alike
STAGES = ("send", "recv", "batch_isend_irecv")
EXPERTS = ("all_to_all", "all_to_all_single")
SCALE_FREE = ("adam", "lion", "adafactor", "lamb", "rmsprop", "adagrad", "muon")


def ranks_out_of_step(run: Run) -> Iterator[Symptom]:
    """What the ranks of one training have, that should be alike or should differ."""
    ranks = run.ranks or (read_ranks(run.path) if run.info.get("world", 2) > 1 else None)
    if ranks is None:
        return
    for find in CHECKS:
        yield from find(ranks, run)


def copies(ranks: Ranks, run: Run) -> list[int]:
    """The ranks that train copies of one model on data of their own; none where each holds a part of it."""
    if ranks.sharded or line_of(run, *STAGES):
        return []
    members = max(ranks.groups(), key=len)
    return members if len(members) > 1 and not parts_of_one(ranks, members) else []


def parts_of_one(ranks: Ranks, members: list[int]) -> bool:
    """Whether ranks with different weights begin with one loss of one batch: they compute it together, each a part."""
    rows = [ranks.numbers.index(rank) for rank in members]
    batch, loss, weight = (ranks.tables[kind][rows, :1] for kind in ("batch", "loss", "weight"))
    if not batch.size or not np.isfinite([batch, loss, weight]).all():
        return False
    one_loss = np.ptp(loss) <= ONE_LOSS * np.abs(loss).max()
    return bool(np.ptp(batch) == 0 and one_loss and np.ptp(weight) > 2 * SAME * np.abs(weight).max())


def drifted_apart(ranks: Ranks, run: Run) -> Iterator[Symptom]:
    """Gradients that differ although they were meant to be averaged, weights that differ: the first, and since when."""
    members = copies(ranks, run)
    if not members:
        return
    gradients, weights = (Apart(ranks, members, kind) for kind in ("gradient", "weight"))
    if weights.returns() or (weights.first == 0 and line_of(run, *EXPERTS)):
        return  # averaged now and then, on purpose; experts of each rank's own
    if gradients.mostly():
        yield not_averaged(ranks, run, gradients, members)
    elif weights.first is not None and gradients.apart[gradients.steps < weights.first].any():
        yield lost_on_the_way(ranks, run, gradients)
    elif weights.first is not None and weights.known >= FEWEST and gradients.known >= FEWEST:
        yield weights_differ(ranks, run, weights, gradients)
    else:
        yield from one_tensor_changed(ranks, run, members, gradients)


class Apart:
    """At which steps a number differs between ranks."""

    def __init__(self, ranks: Ranks, members: Sequence[int], kind: str, tolerance: float = SAME) -> None:
        table = ranks.tables[kind][[ranks.numbers.index(rank) for rank in members]]
        table = np.where(np.isfinite(table), table, np.nan)
        both = np.isfinite(table).sum(axis=0) > 1
        self.steps = ranks.steps[both]
        values = table[:, both]
        low, high = (
            (np.nanmin(values, axis=0), np.nanmax(values, axis=0)) if both.any() else (np.zeros(0),) * 2
        )
        self.size = (high - low) / (np.abs(high) + np.abs(low) + 1e-300)
        self.apart = ~(self.size <= 2 * tolerance)  # of squares
        self.known = len(self.steps)
        self._values, self._members = values, members

    @property
    def first(self) -> int | None:
        """The first step at which they differ, and from which on they do."""
        return int(self.steps[self.apart][0]) if self.apart.any() and self.apart[-1] else None

    def mostly(self) -> bool:
        return self.known >= FEWEST and bool(np.median(self.size) > 2 * SAME)

    def returns(self) -> bool:
        """Whether ranks that were apart have become alike again."""
        return bool((self.apart[:-1] & (self.size[1:] <= 1e-9)).any()) if self.known else False

    def pair(self, step: int) -> tuple[int, int]:
        """Two ranks that differ at a step; of more than two, one that is with the most, then the one farthest off."""
        column = self._values[:, int(np.flatnonzero(self.steps == step)[0])]
        off = np.abs(column - np.nanmedian(np.sort(column)[: max(1, len(column))]))
        if len(column) == 2:
            return self._members[0], self._members[1]
        off = np.where(np.isnan(off), -1.0, off)
        known = np.where(off < 0, np.inf, off)
        return self._members[int(np.argmin(known))], self._members[int(np.argmax(off))]

    def percent(self, step: int | None = None) -> str:
        size = np.median(self.size[self.apart]) if step is None else self.size[self.steps == step][0]
        return f"{50 * size:.2g} %"  # of norms: half of that of their squares


def not_averaged(ranks: Ranks, run: Run, gradients: Apart, members: list[int]) -> Symptom:
    step = int(gradients.steps[gradients.apart][0])
    one, other = gradients.pair(step)
    differing, alike = differing_tensors(ranks, one, other, "gradient", step)
    text = f"the optimizers of rank {one} and rank {other} see different gradients, {gradients.percent()} apart in size"
    if len(members) > 2:
        text += f" (of {len(members)} ranks)"
    name = differing[0] if differing else ""
    text += f"; first in {name}" if name else ""
    why, line = why_not_averaged(run)
    what = "gradients-not-averaged"
    if differing and alike and line_of(run, "ddp", "all_reduce"):
        some = ", ".join(differing[:3]) + (" …" if len(differing) > 3 else "")
        verb = "is" if len(differing) == 1 else "are"
        text += f". Those of {len(alike)} other parameters agree: {some} {verb} outside of what is averaged"
        what = "parameters-outside"
        why, line = "", line_of(run, "ddp", "all_reduce")
    return Symptom(
        "ranks_differ", "problem", text + why, step, place(name, line), (f"distributed-desync/{what}",)
    )


def lost_on_the_way(ranks: Ranks, run: Run, gradients: Apart) -> Symptom:
    """The gradients agree at most steps and differ at some: what is averaged does not always arrive."""
    at = gradients.steps[gradients.apart]
    step = int(at[0])
    one, other = gradients.pair(step)
    differing, _ = differing_tensors(ranks, one, other, "gradient", step)
    name, line = differing[0] if differing else "", line_of(run, "all_reduce", "ddp")
    text = f"the optimizers of rank {one} and rank {other} see the same gradients at {gradients.known - len(at)} of "
    text += f"{gradients.known} steps and different ones at {len(at)}, first at step {step}, there "
    text += (
        f"{gradients.percent(step)} apart in size"
        + (f", in {name}" if name else "")
        + ". What is averaged does not always arrive"
    )
    return Symptom(
        "ranks_differ", "problem", text, step, place(name, line), ("distributed-desync/lost-on-the-way",)
    )


def scaled_apart(ranks: Ranks, run: Run) -> Iterator[Symptom]:
    """Parameters that two ranks hold alike, whose gradients differ by one factor: one rank has scaled them."""
    members = max(ranks.groups(), key=len)
    if ranks.sharded or len(members) < 2:
        return
    one, other = members[:2]
    mine, theirs = ranks.tensors(one), ranks.tensors(other)
    for step in sorted(set(mine) & set(theirs)):
        factor, names = common_factor(mine[step], theirs[step])
        if len(names) >= TENSORS:
            line = line_of(run, "clip", "step")
            text = (
                f"the gradients of {names[0]} and {len(names) - 1} other parameters that rank {one} and rank "
            )
            text += f"{other} hold alike are {factor:.4g} times as long on rank {other} as on rank {one}, all by this "
            text += "factor: the same gradients, which one rank has scaled or clipped and the other has not"
            yield Symptom(
                "ranks_clip_apart",
                "problem",
                text,
                step,
                place(names[0], line),
                ("distributed-desync/own-clip",),
            )
            return


def common_factor(mine: dict, theirs: dict) -> tuple[float, list[str]]:
    """The factor other than 1 by which most gradients of equal weights differ, and the names of those."""
    ratios: list[tuple[float, str]] = []
    for (kind, name), (square, _) in mine.items():
        weights = [found.get(("weight", name), (np.nan, 0))[0] for found in (mine, theirs)]
        there = theirs.get((kind, name), (0.0, 0))[0]
        if kind == "gradient" and weights[0] == weights[1] and square > 0 and there > 0:
            ratios.append((float(np.sqrt(there / square)), name))
    scaled = [ratio for ratio, _ in ratios if abs(ratio - 1) > 10 * ONE_FACTOR]
    best = max(scaled, key=lambda r: sum(abs(r / other - 1) <= ONE_FACTOR for other in scaled), default=1.0)
    return best, [name for ratio, name in ratios if best != 1.0 and abs(ratio / best - 1) <= ONE_FACTOR]


def weights_differ(ranks: Ranks, run: Run, weights: Apart, gradients: Apart) -> Symptom:
    """The gradients agree, the weights do not: from the start, or from a step on."""
    step = weights.first or 0
    one, other = weights.pair(step)
    differing, alike = differing_tensors(ranks, one, other, "weight", step)
    name = differing[0] if differing else ""
    text = f"the gradients of rank {one} and rank {other} agree, their weights do not "
    text += f"({weights.percent(step)} apart in size)"
    text += f"; first {name}" if name else ""
    if step == int(weights.steps[0]):
        seed = line_of(run, "manual_seed")
        text += f". They begin with the random numbers of the seed set at {seed}" if seed else ""
        return Symptom(
            "ranks_differ", "problem", text, step, place(name, seed), ("distributed-desync/initial-weights",)
        )
    text += f". Until step {step} they were alike"
    rates = Apart(ranks, [one, other], "lr", 1e-7)
    if rates.apart.any():
        at = int(rates.steps[rates.apart][0])
        text += f"; since step {at} the learning rates differ"
        line = line_of(run, "lr set", "scheduler made", "optimizer")
        return Symptom(
            "ranks_differ", "problem", text, at, place(name, line), ("distributed-desync/learning-rates",)
        )
    states, _ = differing_tensors(ranks, one, other, "state", step)
    text += f", and so is not the optimizer's state of {states[0]}" if states else ""
    if len(differing) == 1 and alike:
        return changed_alone(ranks, run, one, other, name, step)
    line, again = line_of(run, "step"), done_again(run, name, step)
    if again is not None and again["outcome"] != "undecided":
        text += in_words(again, name)
        line = again.get("where") or line
        if again["outcome"] == "memory":
            return Symptom("ranks_differ", "problem", text, step, name, ("distributed-desync/bit-flip",))
    return Symptom(
        "ranks_differ", "problem", text, step, place(name, line), ("distributed-desync/weights-drift",)
    )


@dataclass(frozen=True)
class Parting:
    """From which step on the weights of two ranks are not the same, and first in which parameter."""

    step: int
    one: int
    other: int
    name: str


def find_parting(ranks: Ranks, run: Run) -> Parting | None:
    """Weights that were alike, and part although the gradients agree: what the step before would tell, done again."""
    members = copies(ranks, run)
    if not members:
        return None
    gradients, weights = (Apart(ranks, members, kind) for kind in ("gradient", "weight"))
    apart = weights if weights.first is not None else Apart(ranks, members, "checksum", 0.0)
    step = apart.first
    if step is None or step == apart.steps[0] or weights.returns() or gradients.mostly():
        return None
    one, other = apart.pair(step)
    differing, _ = differing_tensors(ranks, one, other, "weight", step, EXACT)
    return Parting(step, one, other, differing[0]) if differing else None


def done_again(run: Run, name: str, step: int) -> dict[str, Any] | None:
    """What doing the step before again has shown, if somebody has asked for it."""
    events = (event for event in run.events if event["event"] == "done again")
    return next((event for event in events if (event["name"], event["step"]) == (name, step)), None)


def in_words(found: dict[str, Any], name: str) -> str:
    """What came of a step that was done again, as a sentence."""
    begins = f". Step {found.get('done', '')}, done again from what was recorded, "
    if found["outcome"] == "undecided":
        return f". Doing it again does not decide it: {found.get('why', '')}"
    if found["outcome"] == "code":
        who = "" if found.get("rank") is None else f" on rank {found['rank']} alone"
        return f"{begins}gives what each rank had: it was written by {found.get('what', 'code')}{who}"
    entry = f"entry {found['place']} " if found.get("place") else "an entry "
    text = f"{begins}gives {name} as the other rank has it, to the last bit, and rank {found.get('rank')} had another "
    text += f"one: {found.get('entries')} of its entries, {entry}is {found.get('now'):.9g} and should be "
    text += f"{found.get('was'):.9g} (bits {', '.join(map(str, found.get('bits', ())))}). No operation of the script "
    return text + f"wrote that: it is the memory or the processor of rank {found.get('rank')}"


def one_tensor_changed(ranks: Ranks, run: Run, members: list[int], gradients: Apart) -> Iterator[Symptom]:
    """A fingerprint that differs by bits alone, in one tensor of one rank: all of them would be another rounding."""
    sums = Apart(ranks, members, "checksum", 0.0)
    if sums.first is None or sums.known < FEWEST or sums.first == sums.steps[0] or gradients.known < FEWEST:
        return
    exact = Apart(ranks, members, "gradient", EXACT)
    if exact.apart[exact.steps < sums.first].any():
        return
    one, other = sums.pair(sums.first)
    differing, alike = differing_tensors(ranks, one, other, "weight", sums.first, EXACT)
    if len(differing) == 1 and len(alike) > 1:
        yield changed_alone(ranks, run, one, other, differing[0], sums.first)


def changed_alone(ranks: Ranks, run: Run, one: int, other: int, name: str, step: int) -> Symptom:
    """By memory or by code, as the step says that was done again; else by the bits that differ: one, or more."""
    again, bit = done_again(run, name, step), flipped_bit(ranks, one, other, step)
    known = other if len(ranks.numbers) > 2 else again.get("rank") if again is not None else None
    who = f"on rank {known} alone" if known is not None else f"on one of rank {one} and rank {other} alone"
    text = f"{name} was changed {who} before step {step}: every gradient until then, and every other weight, is alike "
    text += "to the last bit"
    if again is not None and again["outcome"] != "undecided":
        where = place(name, again.get("where") or None) if again["outcome"] == "code" else name
        what = "weights-drift" if again["outcome"] == "code" else "bit-flip"
        text += in_words(again, name)
        return Symptom("ranks_differ", "problem", text, step, where, (f"distributed-desync/{what}",))
    if bit == MANY_BITS:
        text += ". More than one bit is different: code that writes on one rank only does that"
    elif bit is not None:
        text += f". Bit {bit} of one entry is all that is different: a memory that flips a bit does that"
    else:
        text += ". A memory that flips a bit does that, and so does code that writes on one rank only"
    if again is not None:
        text += in_words(again, name)
    elif bit is not None and bit != MANY_BITS:
        text += f". `gradproof run --until {step}` does the same steps again: what code has done comes back"
    if bit == MANY_BITS:
        where = place(name, line_of(run, "step"))
        return Symptom("ranks_differ", "problem", text, step, where, ("distributed-desync/weights-drift",))
    return Symptom("ranks_differ", "problem", text, step, name, ("distributed-desync/bit-flip",))


def flipped_bit(ranks: Ranks, one: int, other: int, step: int) -> int | None:
    """Which bit, if two ranks' sums of bits differ as by one of them; MANY_BITS by more; None: they do not differ.

    The sums of several tensors are added up with odd weights (probes/prints): one bit of the third is 5 · 2^bit.
    """
    column = int(np.flatnonzero(ranks.steps == step)[0]) if step in ranks.steps else -1
    pair = ranks.tables["checksum"][[ranks.numbers.index(rank) for rank in (one, other)], column]
    if column < 0 or not np.isfinite(pair).all() or pair[0] == pair[1]:
        return None
    apart, size = int(pair[0]) - int(pair[1]), 1 << SUM_BITS
    for weight in range(1, 2 * IN_TURN, 2):
        found = apart * pow(weight, -1, size) % size
        found = min(found, size - found)
        if found & (found - 1) == 0:
            return found.bit_length() - 1
    return MANY_BITS


def differing_tensors(
    ranks: Ranks, one: int, other: int, kind: str, step: int, tolerance: float = SAME
) -> tuple[list[str], list[str]]:
    """Tensors that two ranks have different, and those that are alike, at the first landmark from a step on."""
    mine, theirs = ranks.tensors(one), ranks.tensors(other)
    later = sorted(number for number in set(mine) & set(theirs) if number >= step)
    if not later:
        return [], []
    here, there = mine[later[0]], theirs[later[0]]
    differing: list[str] = []
    alike: list[str] = []
    for key, (value, _) in here.items():
        if key[0] == kind and key in there:
            second = there[key][0]
            same = value == second or abs(value - second) <= 2 * tolerance * (abs(value) + abs(second))
            (alike if same else differing).append(key[1])
    return differing, alike


def why_not_averaged(run: Run) -> tuple[str, str | None]:
    """What the script does about averaging, in words, and the line of it."""
    wrapped, without = line_of(run, "ddp"), line_of(run, "no_sync")
    if wrapped and not line_of(run, "synchronised forward"):
        if without:
            return (
                f". Every pass through the DDP model of {wrapped} is inside the no_sync of {without}",
                without,
            )
        forward = line_of(run, "forward")
        return (
            f". The DDP model made at {wrapped} is never called: the forward at {forward} goes around it",
            forward,
        )
    if wrapped and without:
        return f". The last backward before a step is inside the no_sync of {without}", without
    if by_hand := line_of(run, "all_reduce"):
        return f". all_reduce is called at {by_hand}", by_hand
    if wrapped:
        return f". DDP is made at {wrapped}", wrapped
    return ". Nothing in the script averages them", line_of(run, "backward", "step")


def place(name: str, line: str | None) -> str | None:
    return f"{name} ({line})" if name and line else name or line


def fed_alike(ranks: Ranks, run: Run) -> Iterator[Symptom]:
    """Two ranks that get the same batches, or batches of very different lengths."""
    members = copies(ranks, run) or (ranks.numbers if fully_sharded(ranks) else [])
    if len(members) < 2:
        return
    rows = [ranks.numbers.index(rank) for rank in members]
    batches, losses = ranks.tables["batch"][rows], ranks.tables["loss"][rows]
    share, distinct = share_alike(batches)
    if share is None and np.isfinite(ranks.tables["gradient"]).any():
        share, distinct = share_alike(losses)
        what = "have the same loss, to the last digit,"
    else:
        what = "are fed the same batch"
    if share is not None and share > 0.9 and distinct > 1:
        first, second = which_alike(batches if what.startswith("are") else losses, members)
        text = f"rank {first} and rank {second} {what} at {100 * share:.0f} % of the steps"
        line = line_of(run, "sampler", "loader", "forward")
        yield Symptom("ranks_see_the_same", "problem", text, 0, line, ("distributed-desync/same-data",))
        return
    entries = ranks.tables["entries"][rows]
    both = (np.isfinite(entries) & (entries > 0)).all(axis=0)
    if both.sum() >= FEWEST:
        ratio = entries[:, both].max(axis=0) / entries[:, both].min(axis=0)
        if np.median(ratio) >= LONGER:
            text = f"batches of one step differ {np.median(ratio):.2g} times in size between ranks, and each rank's "
            text += "mean counts the same: what is in a short batch weighs more"
            line = line_of(run, "loader", "forward")
            yield Symptom(
                "ranks_fed_unevenly", "warning", text, 0, line, ("distributed-desync/different-lengths",)
            )


def fully_sharded(ranks: Ranks) -> bool:
    return all(info.get("facts", {}).get("fully_sharded") for info in ranks.infos.values())


def share_alike(table: np.ndarray) -> tuple[float | None, int]:
    """At how many of the steps that all have measured two ranks have the same number; how many numbers there are."""
    known = np.isfinite(table).all(axis=0)
    if known.sum() < FEWEST:
        return None, 0
    values = np.sort(table[:, known], axis=0)
    return float((np.diff(values, axis=0) == 0).any(axis=0).mean()), len(np.unique(values))


def which_alike(table: np.ndarray, members: Sequence[int]) -> tuple[int, int]:
    known = np.isfinite(table).all(axis=0)
    column = table[:, known][:, -1]
    order = np.argsort(column, kind="stable")
    at = int(np.flatnonzero(np.diff(column[order]) == 0)[0]) if (np.diff(column[order]) == 0).any() else 0
    first, second = sorted((members[int(order[at])], members[int(order[at + 1])]))
    return first, second


def sampler_stays(ranks: Ranks, run: Run) -> Iterator[Symptom]:
    """A DistributedSampler that shuffles draws by its epoch: nobody has told it that there was another one."""
    found = run.info.get("facts", {}).get("sampler_epochs")
    if found:
        text = f"the DistributedSampler is asked for an order {found['passes']} times, and set_epoch is never called: "
        text += "it gives each rank the same part of the data in the same order every time"
        yield Symptom(
            "sampler_stays", "problem", text, 0, found.get("line"), ("distributed-desync/set-epoch",)
        )


def set_up_differently(ranks: Ranks, run: Run) -> Iterator[Symptom]:
    """One rank in another mode, another precision, another version of the code."""
    training = ranks.tables["training"]
    known = np.isfinite(training).all(axis=0)
    members = copies(ranks, run)
    if known.sum() >= FEWEST and members:
        values = training[:, known]
        apart = (values.max(axis=0) != values.min(axis=0)).mean()
        if apart > 0.5:
            odd = ranks.numbers[int(np.argmin(values.mean(axis=1)))]
            step = int(ranks.steps[known][values.max(axis=0) != values.min(axis=0)][0])
            least = 100 * values[ranks.numbers.index(odd)].min()
            text = f"rank {odd} trains with {least:.0f} % of its modules in training mode, another rank with "
            text += f"{100 * values.max():.0f} %"
            line = line_of(run, "eval", "forward")
            yield Symptom(
                "ranks_set_up_differently", "problem", text, step, line, ("distributed-desync/mode",)
            )
    for rank, info in ranks.infos.items():
        first = ranks.infos[ranks.numbers[0]]
        if (what := difference_of(first, info)) and rank != ranks.numbers[0]:
            id, name, text = what
            text = f"rank {ranks.numbers[0]} and rank {rank} {text}"
            where = place(name, line_of(run, "step")) if name else None
            yield Symptom(
                "ranks_set_up_differently", "problem", text, 0, where, (f"distributed-desync/{id}",)
            )
            return


def difference_of(one: dict, other: dict) -> tuple[str, str, str] | None:
    """What two ranks were set up with: the cause, the parameter or file that it is about, and the words."""
    types = {p["name"]: p.get("dtype") for p in one.get("parameters", ())}
    for parameter in other.get("parameters", ()):
        name, mine = parameter["name"], types.get(parameter["name"])
        if mine and parameter.get("dtype") and mine != parameter["dtype"]:
            return "dtype", name, f"hold {name} as {mine} and as {parameter['dtype']}"
    if (a := one.get("source", {}).get("sha256")) and (b := other.get("source", {}).get("sha256")) and a != b:
        return "code", "", f"run different versions of {one['source'].get('file', 'the script')}"
    mine, theirs = (info.get("versions", {}).get("torch") for info in (one, other))
    if mine and theirs and mine != theirs:
        return "code", "", f"run torch {mine} and torch {theirs}"
    return None


def wrongly_averaged(ranks: Ranks, run: Run) -> Iterator[Symptom]:
    """Gradients of means that were added up over ranks, or divided by their number once more."""
    members = copies(ranks, run)
    if not 2 <= len(members) <= MOST_RANKS or len(members) != ranks.world:
        return
    heard = [averagings(ranks, rank) for rank in members]
    ratios = []
    for step in sorted(set.intersection(*(set(found) for found in heard))):
        events = [found[step] for found in heard]
        if len({len(event["local"]) for event in events}) > 1:
            continue
        mean = np.mean([event["local"] for event in events], axis=0)
        final = np.array(events[0]["final"]) / max(events[0]["clip"], 1e-30)
        if not (np.isfinite(mean).all() and np.isfinite(final).all()) or np.linalg.norm(mean) < 1e-20:
            continue
        ratio = float(final @ mean / (mean @ mean))
        if np.linalg.norm(final - ratio * mean) <= 0.02 * np.linalg.norm(final):
            ratios.append(ratio)
    if not ratios:
        return
    ratio, world = float(np.median(ratios)), len(members)
    level = "note" if is_scale_free(run) else "problem"
    line = line_of(run, "all_reduce", "ddp")
    text = f"the gradient that the optimizer gets is {ratio:.4g} times the mean of the {world} ranks' own"
    if abs(ratio / world - 1) <= 0.02:
        text += ": it was added up and not divided, and every step is as many times too long"
        yield Symptom("ranks_add_up", level, text, 1, line, ("distributed-desync/summed-gradients",))
    elif abs(ratio * world - 1) <= 0.02:
        text += ": it was averaged, and divided by the number of ranks once more"
        yield Symptom("ranks_add_up", level, text, 1, line, ("distributed-desync/averaged-twice",))


def averagings(ranks: Ranks, rank: int) -> dict[int, dict]:
    events = read_events(ranks.paths[rank] / EVENTS_FILE, [])
    return {event["step"]: event for event in events if event["event"] == "averaging"}


def is_scale_free(run: Run) -> bool:
    names = [str(o.get("class", "")).lower() for o in run.info.get("optimizers", ())]
    return any(word in name for name in names for word in SCALE_FREE)


def first_nonfinite(ranks: Ranks, run: Run) -> Iterator[Symptom]:
    """One rank's loss is not finite while the others' still are: the others get it with the averaged gradient."""
    found = ranks_first_nonfinite(ranks)
    if found is None:
        return
    who, step, others = found
    if run.info.get("rank", 0) in who:
        return  # its own record says more
    named = f"rank {who[0]}" if len(who) == 1 else f"{len(who)} ranks, first rank {who[0]},"
    text = f"the loss of {named} is the first that is not finite, at step {step}; those of "
    text += f"{others} others are finite there, and get it with the next gradients"
    born = birth_on(ranks.paths[who[0]], step)
    if born is not None:
        where = born.get("where") or line_of(run, "forward", "backward")
        said = [" ".join(str(line).split()) for line in born.get("evidence", ())]
        told = [line for line in said if line.startswith(("first bad value", "because"))]
        text += f"; its own taped step has the {', '.join(told)}"
    else:
        where = line_of(run, "forward", "backward")
        text += f". `gradproof diagnose {ranks.paths[who[0]].name}` says what that rank has recorded"
    yield Symptom("one_rank_nonfinite", "problem", text, step, where, ("forward-nonfinite/one-rank",))


def ranks_first_nonfinite(ranks: Ranks) -> tuple[list[int], int, int] | None:
    """Who had a loss that was not finite first, at which step, and how many had a good one there; None if all had."""
    bad = np.isinf(ranks.tables["loss"])
    if not bad.any():
        return None
    column = int(np.flatnonzero(bad.any(axis=0))[0])
    known = ~np.isnan(ranks.tables["loss"][:, column])
    if bad[known, column].all():
        return None
    who = [rank for rank, is_bad in zip(ranks.numbers, bad[:, column], strict=True) if is_bad]
    return who, int(ranks.steps[column]), int(known.sum()) - len(who)


def birth_on(place: Path, step: int) -> dict[str, Any] | None:
    """What the examination of a rank's own step says: where its first bad value was born."""
    births = (
        event
        for event in read_events(place / EXAMINATION_FILE, [])
        if event.get("event") == "verdict" and event.get("experiment") == "where_was_it_born"
    )
    return next((v for v in births if v.get("verdict") == "confirmed" and v.get("step") == step), None)


def buffers_apart(ranks: Ranks, run: Run) -> Iterator[Symptom]:
    """Running statistics that nobody brings together: each rank would be evaluated with others."""
    members = copies(ranks, run)
    if not members:
        return
    buffers, weights = Apart(ranks, members, "buffer", 0.01), Apart(ranks, members, "weight")
    if buffers.first is None or buffers.known < FEWEST or not buffers.apart[-3:].all() or weights.apart.any():
        return
    one, other = buffers.pair(buffers.first)
    names, _ = differing_tensors(ranks, one, other, "buffer", buffers.first, 0.01)
    size = buffers.percent(int(buffers.steps[-1]))
    text = f"the buffers of rank {one} and rank {other} differ, {size} in size at the end; "
    text += (
        f"first {names[0] if names else 'at this step'}: each rank keeps the statistics of its own batches"
    )
    where = place(names[0] if names else "", line_of(run, "ddp", "forward"))
    yield Symptom("ranks_differ", "warning", text, buffers.first, where, ("distributed-desync/buffers",))


def small_batches(ranks: Ranks, run: Run) -> Iterator[Symptom]:
    """BatchNorm over the few samples of one rank, where all ranks together have many."""
    found = run.info.get("facts", {}).get("small_batch_norm")
    if found and (copies(ranks, run) or fully_sharded(ranks)):
        text = f"{found['modules']} BatchNorm layers normalise over the {found['rows']} samples of one rank, first "
        text += f"{found['name']}; over all ranks there are {found['rows'] * ranks.world}"
        where = place(found["name"], line_of(run, "ddp", "forward"))
        yield Symptom(
            "small_batch_norm", "warning", text, 0, where, ("normalization-error/not-synchronised",)
        )


def own_clips(ranks: Ranks, run: Run) -> Iterator[Symptom]:
    """Of a sharded model, the norm of one rank's part is not that of the gradient."""
    if not ranks.sharded or not np.isfinite(ranks.tables["clip"]).any():
        return
    norms = Apart(ranks, ranks.numbers, "clip", 0.005)
    if norms.mostly() and norms.apart.mean() > 0.8:
        one, other = norms.pair(int(norms.steps[norms.apart][0]))
        text = f"rank {one} and rank {other} clip by different norms ({norms.percent()} apart): each takes that of its "
        text += "own shard, and scales its part of one gradient by a factor of its own"
        step = int(norms.steps[norms.apart][0])
        line = line_of(run, "clip")
        yield Symptom("ranks_clip_apart", "problem", text, step, line, ("distributed-desync/own-clip",))


def straggles(ranks: Ranks, run: Run) -> Iterator[Symptom]:
    """A rank for which all others wait: what it does before backward takes far longer than theirs."""
    own, whole = ranks.tables["own"], ranks.tables["seconds"]
    known = np.isfinite(own).all(axis=0) & (ranks.steps >= FEWEST)
    if known.sum() < SLOW_STEPS or len(ranks.numbers) < 2:
        return
    typical = np.median(own[:, known], axis=1)
    slow = int(np.argmax(typical))
    others = float(np.median(np.delete(typical, slow)))
    lost = float(typical[slow]) - others
    often = (own[slow, known] > SLOWER * np.delete(own, slow, axis=0)[:, known].max(axis=0)).mean()
    if lost > SLOW_SECONDS and lost > 0.2 * np.median(whole[:, known]) and often > 0.7:
        rank = ranks.numbers[slow]
        text = f"rank {rank} takes {1e3 * typical[slow]:.0f} ms from the begin of a step to its backward, the others "
        text += f"{1e3 * others:.0f} ms: they wait for it at every step"
        line = line_of(run, "loader", "forward")
        yield Symptom("rank_straggles", "warning", text, None, line, ("distributed-desync/straggler",))


def sharded_late(ranks: Ranks, run: Run) -> Iterator[Symptom]:
    """fully_shard puts other parameters into the model: an optimizer made before it steps those that were there."""
    if run.info.get("facts", {}).get("sharded_late"):
        text = "the model was sharded after the optimizer was made: what that holds is no parameter of the model any "
        text += f"more, on rank {run.info.get('rank', 0)} as on the others"
        line = line_of(run, "optimizer")
        yield Symptom("sharded_late", "problem", text, 0, line, ("distributed-desync/sharded-late",))


def draws_alike(ranks: Ranks, run: Run) -> Iterator[Symptom]:
    """Ranks with data of their own that draw the same random numbers: one mask, one augmentation, for all of them."""
    members = copies(ranks, run) or (ranks.numbers if fully_sharded(ranks) else [])
    share, _ = share_alike(ranks.tables["batch"][[ranks.numbers.index(rank) for rank in members]])
    heard = [drawn(ranks, rank) for rank in members[:MOST_RANKS]]
    if share is None or share > 0.5:
        return  # what they are fed is not known, or is the same: that is another story
    if len(heard) < 2 or any(len(events) < len(DRAWN_AT) for events in heard):
        return
    for kind, words in (("torch", "PyTorch's"), ("numpy", "NumPy's"), ("python", "Python's")):
        states = [[events[step].get(kind) for step in DRAWN_AT] for events in heard]
        if None in states[0] or len(set(states[0])) < len(DRAWN_AT) or any(s != states[0] for s in states):
            continue  # not in use, or not at every step, or each its own
        text = f"ranks {members[0]} to {members[-1]} draw the same numbers from {words} generator, step by step, for "
        text += "batches of their own: dropout and augmentations are the same on all of them"
        line = line_of(run, "manual_seed", "forward")
        yield Symptom("ranks_draw_alike", "note", text, 1, line, ("distributed-desync/same-random-numbers",))
        return


def drawn(ranks: Ranks, rank: int) -> dict[int, dict]:
    events = read_events(ranks.paths[rank] / EVENTS_FILE, [])
    return {e["step"]: e for e in events if e["event"] == "random" and e["step"] in DRAWN_AT}


def reduces_each_part(ranks: Ranks, run: Run) -> Iterator[Symptom]:
    """Several backwards a step, each averaged over all ranks, where the last one would do."""
    counts = run.steps["backwards"][np.isfinite(run.steps["backwards"])]
    accumulates = len(counts) >= FEWEST and np.median(counts) > 1
    if (
        accumulates
        and line_of(run, "synchronised forward")
        and not line_of(run, "no_sync")
        and copies(ranks, run)
    ):
        text = f"{int(np.median(counts))} backwards a step, and DDP averages the gradients in each: under no_sync, all "
        text += "but the last would add them up without asking the other ranks"
        line = line_of(run, "backward")
        yield Symptom("reduces_each_part", "note", text, 0, line, ("distributed-desync/without-no-sync",))


CHECKS = (
    ranks_lost,
    first_nonfinite,
    scaled_apart,
    drifted_apart,
    wrongly_averaged,
    fed_alike,
    sampler_stays,
    set_up_differently,
    buffers_apart,
    small_batches,
    own_clips,
    straggles,
    reduces_each_part,
    sharded_late,
    draws_alike,
)
