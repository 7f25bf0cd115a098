"""Is it the data's order? Fingerprints and labels of the batches of many taped steps, compared with each other."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gradproof.experiments.verdict import Verdict, confirmed, excluded, undecided
from gradproof.instruments.evidence import Evidence
from gradproof.instruments.flow import ALIASES, place_of_data
from gradproof.tape.operations import Line
from gradproof.tape.operators import is_random

FAMILY = "data-order-or-sampling"
MOST = 64  # steps remembered
COLUMNS = 4096  # of a sample that its fingerprint looks at
LOOK_AT = 20_000  # rows of the data that are counted
AGAIN = 20  # samples that came twice
ENOUGH = 5  # batches before anything is said
GAP = 1.2  # times the last step remembered, once there are MOST: a dozen for every tenfold of the training
OFTEN = 0.3  # of what came again: wrong code shows in half of it and more, twins in the data in little
VARIED = 0.9  # of the samples drawn: the others are those of an epoch that begins again
IMBALANCED = 0.95  # of the labels in one class: whoever always says it is hardly ever wrong
MIXED = 0.2  # a batch that tells less of its labels, or holds more of the inputs' variance, is a mixture
FALLING, RISING = 0.1, 0.9  # of the batches above the one before: of shuffled ones, half are


@dataclass(frozen=True)
class Draw:
    """Random numbers of a step."""

    print: float
    shape: tuple[int, ...]
    line: Line


@dataclass
class Batch:
    """What is remembered of one step's batch."""

    step: int
    kind: str  # what is trained for what: a script may train for one thing after the other, with the same inputs
    prints: np.ndarray  # one number a sample
    held: int  # different samples in the data that the batch was cut from; 0 when it came whole
    where: str | None
    alone: bool  # one optimizer: two may well take turns on a batch
    rows: str  # drawn in this step; cut, always from the same place; or fixed, by an index that was there before
    answers: np.ndarray | None = None  # one number for each sample's target
    labels: np.ndarray | None = None
    classes: int = 0
    ids: np.ndarray | None = None  # of inputs that are one number a sample
    random: dict[str, Draw] = field(default_factory=dict)


def do_batches_differ(evidence: Evidence) -> Iterator[Verdict]:
    """The same batch again and again, a few samples over and over, one class at a time, a generator seeded anew."""
    batches = remember_batch(evidence)
    if batches is None and not evidence.memory["batches"]:
        yield undecided(
            FAMILY, "the step's batch was not found: nothing that the network is given comes from outside"
        )
        return
    if batches is None or len(batches) < ENOUGH:
        return
    first = (is_the_generator_seeded_anew, is_it_the_same_batch, are_there_few_samples)
    for judge in (*first, do_pairs_stay, are_labels_mixed):
        verdict = judge(batches)
        if verdict is not None:
            yield verdict
            if verdict.id:
                return


def remember_batch(evidence: Evidence) -> list[Batch] | None:
    """The batches of this kind so far, this one the last; None where it has none, or enough are known."""
    batches: list[Batch] = evidence.memory.setdefault("batches", [])
    batch = look_at_batch(evidence) if len(batches) < MOST or evidence.step > GAP * batches[-1].step else None
    if batch is None:
        return None
    batches.append(batch)
    return [known for known in batches if known.kind == batch.kind]


def look_at_batch(evidence: Evidence) -> Batch | None:
    flow = evidence.flow
    if not flow.inputs:
        return None
    slot = max(flow.inputs, key=lambda s: math.prod(evidence.slot(s).shape))
    size = evidence.slot(slot).shape[0]
    others = [s for s in flow.inputs if s != slot and evidence.slot(s).shape[0] == size]
    found = next((c for c in flow.comparisons if c.kind == "class"), None)
    target = found.target if found is not None else next((c.target for c in flow.comparisons), None)
    wanted = [slot, *others[:3], *([] if target is None else [target])]  # a rollout has many inputs
    values = flow.values(wanted)
    if slot not in values or not size:
        return None
    value = values[slot]
    kind = kind_of(evidence, slot, target)
    known: list[Batch] = [batch for batch in evidence.memory["batches"] if batch.kind == kind]
    held = known[-1].held if known else count_samples(evidence, slot)
    alone = len(evidence.optimizers) == 1
    batch = Batch(
        evidence.step, kind, fingerprints(value), held, flow.origin(slot), alone, how_chosen(evidence, slot)
    )
    for place, other in values.items():
        if place not in (slot, target) and other.dim() and other.numel() % size == 0:
            batch.prints = batch.prints + math.pi * fingerprints(other.reshape(size, -1))
    if value.dim() == 1 and not value.is_floating_point():
        batch.ids = value.double().cpu().numpy()
    answer = values.get(target) if target is not None else None
    data = {leaf.index for leaf in evidence.tape.inputs}
    if (
        answer is not None
        and target is not None
        and not data.isdisjoint(flow.ancestors(target))
        and not are_rows_of_the_batch(answer)
    ):
        if answer.dim() and answer.shape[0] == size:
            batch.answers = fingerprints(answer)
        if found is not None and answer.numel() == size:
            batch.labels = answer.reshape(-1).cpu().numpy()
            batch.classes = evidence.slot(found.prediction).shape[1]
    batch.random = random_numbers(evidence)
    return batch


def kind_of(evidence: Evidence, slot: int, target: int | None) -> str:
    """Types and axes of the largest input and the target, by what and where they are compared, and what is trained:
    players that take turns on the same samples want something else of them each."""
    tensors = [evidence.slot(each) for each in (slot, target) if each is not None]
    forms = [f"{tensor.dtype} {len(tensor.shape)}" for tensor in tensors]
    flow = evidence.flow
    compared = [f"{c.operation.name} at {c.operation.line}" for c in flow.comparisons if c.target == target]
    first = [evidence.slot(s).name for op in flow.layers[:1] for s in flow.reads(op) if s in flow.weights]
    return ", ".join([*forms, *compared[:1], *first])


def are_rows_of_the_batch(answer: Tensor) -> bool:
    """Whether labels name each row of the batch once, as those of a contrastive loss do: they are of no sample."""
    rows = answer.detach().reshape(-1).sort().values.cpu()
    whole = not rows.is_floating_point() and len(rows) > 2
    return whole and bool((rows == torch.arange(len(rows))).all())


def how_chosen(evidence: Evidence, slot: int) -> str:
    """Whether a step drew its rows (by an index made in it, or one by one), cut a slice, or used a fixed index.

    A fixed index is what training on a fixed part of the data looks like.
    """
    flow = evidence.flow
    maker = flow.maker(flow.behind(slot, ALIASES - {"slice", "select"}))
    if maker is None:
        return "fixed"
    if maker.name in ("slice", "select"):
        return "cut"
    if maker.name.startswith(("index", "gather", "take")) and len(maker.reads) > 1:
        made = flow.maker(flow.behind(maker.reads[1], ALIASES - {"slice", "select"}))
        return "drawn" if made is not None else "fixed"
    return "drawn"


def count_samples(evidence: Evidence, slot: int) -> int:
    """Different samples in the largest tensor that a batch was cut from: its rows, or windows of a series."""
    flow = evidence.flow
    if evidence.slot(slot).made_by is None:
        return 0
    behind, shape = flow.ancestors(slot), evidence.slot(slot).shape
    kept = evidence.tape.memory_of  # of a large data set, only the batch is on the tape
    leaves = [
        leaf for leaf in evidence.tape.inputs if leaf.index in behind and leaf.index in kept and leaf.shape
    ]
    rows = [leaf for leaf in leaves if leaf.shape[1:] == shape[1:] and leaf.shape[0] > shape[0]]
    series = [
        leaf for leaf in leaves if len(leaf.shape) == 1 and len(shape) == 2 and leaf.shape[0] > 2 * shape[1]
    ]
    if rows:
        value = evidence.tape.leaf_value(max(rows, key=lambda leaf: leaf.shape[0]).index)
    elif series:
        value = evidence.tape.leaf_value(max(series, key=lambda leaf: leaf.shape[0]).index)
        value = value[: len(value) // shape[1] * shape[1]].reshape(-1, shape[1])
    else:
        return 0
    return len(np.unique(fingerprints(value[:LOOK_AT])))


def fingerprints(value: Tensor) -> np.ndarray:
    """One number a sample that another sample is all but sure not to have."""
    rows = value.reshape(value.shape[0], -1)
    stride = max(1, rows.shape[1] // COLUMNS)
    rows = rows[:, ::stride].double()
    weights = torch.cos(torch.arange(1, rows.shape[1] + 1, dtype=torch.float64, device=rows.device) ** 2)
    return torch.nan_to_num(rows @ weights).cpu().numpy()


def random_numbers(evidence: Evidence) -> dict[str, Draw]:
    """A fingerprint of everything random that the loss of this step depends on, by operation and line."""
    found: dict[str, Draw] = {}
    for op in evidence.flow.operations:
        if op.frozen is None or not is_random(op.func, op.args, op.kwargs):
            continue
        for value in op.frozen:
            if isinstance(value, Tensor) and value.numel() >= 16 and op.line is not None:
                key = f"{op.name} {op.line.file}:{op.line.number} {tuple(value.shape)}"
                found.setdefault(
                    key, Draw(float(fingerprints(value.reshape(1, -1))[0]), tuple(value.shape), op.line)
                )
    return found


def is_the_generator_seeded_anew(batches: list[Batch]) -> Verdict | None:
    """Everything random is bit for bit the same at every step, and with it the batch or the noise of its samples.

    A part that stays the same while the rest changes is a fixed part of the task.
    """
    recent = batches[-ENOUGH:]
    drawn, size = recent[-1].random, len(recent[-1].prints)
    again = [
        all(key in b.random and b.random[key].print == d.print for b in recent) for key, d in drawn.items()
    ]
    same_batch = all(np.array_equal(np.sort(b.prints), np.sort(recent[-1].prints)) for b in recent)
    if not drawn or not all(again) or not (same_batch or any(d.shape[0] == size for d in drawn.values())):
        return None
    key, draw = next(iter(drawn.items()))
    return confirmed(
        f"{FAMILY}/seeded-every-step",
        f"{key.split()[0]} at {Path(draw.line.file).name}:{draw.line.number} drew the same numbers at each of "
        f"{len(recent)} taped steps (the last: {recent[-1].step})",
        where=place_of_data(_seeding_line(draw.line) or draw.line),
        confidence="proven",  # the same to the last bit
    )


def _seeding_line(line: Line) -> Line | None:
    """The innermost call of manual_seed in the same file."""
    try:
        text = Path(line.file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    calls = [(len(row) - len(row.lstrip()), i + 1) for i, row in enumerate(text) if "manual_seed(" in row]
    return Line(line.file, max(calls)[1], "<seed>") if calls else None


def is_it_the_same_batch(batches: list[Batch]) -> Verdict | None:
    sets = [tuple(sorted(batch.prints)) for batch in batches]
    size = len(batches[-1].prints)
    if len(set(sets)) == 1:
        held = batches[-1].held
        if held < 2 * len(set(sets[0])) or batches[-1].rows == "fixed":
            return None  # all the data there is, or all that is meant for training
        return confirmed(
            f"{FAMILY}/same-batch",
            f"the same {size} samples at each of {len(batches)} taped steps, cut from data with {held} different ones",
            where=batches[-1].where,
            level="problem" if batches[-1].rows == "drawn" else "warning",  # a part may be all that is meant
            confidence="likely",
        )
    pairs = [(a, b) for a, b in pairwise(batches) if b.step == a.step + 1]
    twice = [b.step for a, b in pairs if tuple(sorted(a.prints)) == tuple(sorted(b.prints))]
    fetched = all(
        batch.where for batch in batches
    )  # else it is there from step to step: epochs on one rollout
    if len(pairs) >= 4 and len(twice) >= OFTEN * len(pairs) and batches[-1].alone and fetched:
        return confirmed(
            f"{FAMILY}/batches-repeated",
            f"{len(twice)} of {len(pairs)} batches are the batch before over again (step {twice[0]} for one)",
            where=batches[-1].where,
            level="warning",  # several steps on one batch may be meant
            confidence="likely",
        )
    return None


def are_there_few_samples(batches: list[Batch]) -> Verdict | None:
    drawn = np.concatenate([batch.prints for batch in batches])
    distinct, size, last = len(np.unique(drawn)), len(batches[-1].prints), batches[-1]
    if last.held >= 4 * distinct and distinct <= 2 * size and size > 1 and last.rows == "drawn":
        return confirmed(
            f"{FAMILY}/few-samples",
            f"{len(drawn)} samples were drawn in {len(batches)} taped steps, but only {distinct} different ones, "
            f"from data with {last.held}",
            where=last.where,
            confidence="likely",
        )
    if distinct >= VARIED * len(drawn):
        return excluded(
            f"{FAMILY}/few-samples",
            f"{distinct} different samples among the {len(drawn)} of {len(batches)} steps",
        )
    return None


def do_pairs_stay(batches: list[Batch]) -> Verdict | None:
    """Samples that come again, in later epochs, with the target of another one.

    A target that no other sample had before is none of another sample: it may depend on who else is in the batch,
    or be the same sample's in another task.
    """
    known = [
        batch for batch in batches if batch.answers is not None and len(batch.answers) == len(batch.prints)
    ]
    if any(len(np.unique(batch.prints)) < len(batch.prints) for batch in known):
        return None  # samples that are the same by nature may well have several answers
    first: dict[float, float] = {}
    owners: dict[float, set[float]] = {}  # of a target, the samples that had it
    same = other = 0
    for batch in known:
        for sample, answer in zip(batch.prints.tolist(), batch.answers.tolist(), strict=True):  # type: ignore[union-attr]
            before = first.get(sample)
            first.setdefault(sample, answer)
            same += before == answer
            other += before not in (None, answer) and not owners.get(answer, set()) <= {sample}
        for sample, answer in zip(batch.prints.tolist(), batch.answers.tolist(), strict=True):  # type: ignore[union-attr]
            owners.setdefault(answer, set()).add(sample)
    again = same + other
    if again < AGAIN or other < OFTEN * again:
        return None
    return confirmed(
        "data-target-misaligned/pairs-change",
        f"{again} samples came a second time in {len(known)} taped steps, {other} of them with another target than "
        "the first time",
        where=known[-1].where,
        confidence="likely",  # targets that are drawn anew change, too
    )


def are_labels_mixed(batches: list[Batch]) -> Verdict | None:
    """How much a batch tells of the labels in it; of mixed batches, nothing."""
    if all(batch.ids is not None for batch in batches):
        verdict = _do_inputs_come_in_order(batches)
        if verdict is not None:
            return verdict
    known = [batch for batch in batches if batch.labels is not None and len(batch.labels) >= 4]
    if len(known) < ENOUGH:
        return None
    labels = np.concatenate([batch.labels for batch in known if batch.labels is not None])
    steps = np.repeat(np.arange(len(known)), [len(b.labels) for b in known if b.labels is not None])
    values, counts = np.unique(labels, return_counts=True)
    classes, most = known[-1].classes, float(counts.max()) / len(labels)
    if len(values) == 1:
        if len(labels) < 100 or classes < 2 or classes > 100:
            return None
        return confirmed(
            f"{FAMILY}/one-class",
            f"all {len(labels)} labels of {len(known)} taped batches are {values[0]}, of {classes} classes",
            where=known[-1].where,
            if_troubled=True,
            confidence="likely",
            lasting=False,
        )
    told = share_told(labels, steps)
    line = f"the batch tells {100 * told:.0f} % of a label's entropy ({len(known)} batches, {len(values)} classes)"
    if told > 0.5:
        return confirmed(f"{FAMILY}/sorted-by-class", line, where=known[-1].where, confidence="likely")
    if most > IMBALANCED and len(labels) >= 200:  # of fewer, the rare ones may yet come
        text = f"{100 * most:.1f} % of {len(labels)} labels are class {values[counts.argmax()]}"
        fix = "weight the rare classes in the loss, or sample them more often"
        return confirmed(
            f"{FAMILY}/imbalance", text, fix=fix, level="warning", confidence="likely", lasting=False
        )
    return excluded(f"{FAMILY}/sorted-by-class", line) if told < MIXED else None


def _do_inputs_come_in_order(batches: list[Batch]) -> Verdict | None:
    means = np.array([batch.ids.mean() for batch in batches if batch.ids is not None])
    every = np.concatenate([batch.ids for batch in batches if batch.ids is not None])
    inside = np.mean([batch.ids.var() for batch in batches if batch.ids is not None])
    total = every.var()
    rising = np.mean(np.diff(means) > 0)
    in_order = rising > RISING or rising < FALLING
    if len(means) < 2 * ENOUGH or total == 0 or inside > MIXED * total or not in_order:
        return None
    return confirmed(
        f"{FAMILY}/not-shuffled",
        f"the inputs come in order: their mean goes from {means[0]:.4g} to {means[-1]:.4g} over {len(means)} batches, "
        f"within a batch they vary by {100 * inside / total:.1f} % of the whole variance",
        where=batches[-1].where,
        level="warning",
        confidence="likely",
        lasting=False,
    )


def share_told(labels: np.ndarray, steps: np.ndarray) -> float:
    """Mutual information of label and batch over the label's entropy, less what chance alone would give."""

    def information(order: np.ndarray) -> float:
        joint = np.zeros((steps.max() + 1, codes.max() + 1))
        np.add.at(joint, (steps, codes[order]), 1)
        joint /= joint.sum()
        expected = joint.sum(1, keepdims=True) * joint.sum(0, keepdims=True)
        some = joint > 0
        return float((joint[some] * np.log(joint[some] / expected[some])).sum())

    codes = np.unique(labels, return_inverse=True)[1].reshape(-1)
    shares = np.bincount(codes) / len(codes)
    entropy = float(-(shares * np.log(shares)).sum())
    generator = np.random.default_rng(0)
    chance = float(np.mean([information(generator.permutation(len(codes))) for _ in range(5)]))
    return max(0.0, information(np.arange(len(codes))) - chance) / max(entropy - chance, 1e-9)
