"""Is it the data's order? Fingerprints and labels of the batches of many taped steps, compared with each other."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from gradproof.experiments.verdict import Verdict, confirmed, excluded, undecided
from gradproof.instruments.evidence import Evidence
from gradproof.instruments.flow import place_of_data
from gradproof.instruments.ledger import Batch, remember_batch
from gradproof.tape.operations import Line

FAMILY = "data-order-or-sampling"
AGAIN = 20  # samples that came twice
ENOUGH = 5  # batches before anything is said
OFTEN = 0.3  # of what came again: wrong code shows in half of it and more, twins in the data in little
VARIED = 0.9  # of the samples drawn: the others are those of an epoch that begins again
IMBALANCED = 0.95  # of the labels in one class: whoever always says it is hardly ever wrong
MIXED = 0.2  # a batch that tells less of its labels, or holds more of the inputs' variance, is a mixture
FALLING, RISING = 0.1, 0.9  # of the batches above the one before: of shuffled ones, half are


def do_batches_differ(evidence: Evidence) -> Iterator[Verdict]:
    """The same batch again and again, a few samples over and over, one class at a time, a generator seeded anew."""
    batches = remember_batch(evidence)
    if batches is None and not evidence.memory["batches"]:
        said = "the step's batch was not found: nothing that the network is given comes from outside"
        yield undecided(FAMILY, said)
    if batches is None or len(batches) < ENOUGH:
        return
    first = (is_the_generator_seeded_anew, is_it_the_same_batch, are_there_few_samples)
    for judge in (*first, do_pairs_stay, do_inputs_come_in_order, are_labels_mixed):
        verdict = judge(batches)
        if verdict is not None:
            yield verdict
            if verdict.id:
                return


def seen(what: str, said: str, batches: list[Batch], **details: Any) -> Verdict:
    """Found in what came, at the line where the last batch was cut."""
    return confirmed(
        f"{FAMILY}/{what}", said, confidence="likely", **({"where": batches[-1].where} | details)
    )


def is_the_generator_seeded_anew(batches: list[Batch]) -> Verdict | None:
    """Everything random is bit for bit the same at every step, and with it the batch or the noise of its samples.

    A part that stays the same while the rest changes is a fixed part of the task.
    """
    recent = batches[-ENOUGH:]
    drawn, size = recent[-1].random, len(recent[-1].prints)
    again = [
        all(key in b.random and b.random[key].print == d.print for b in recent) for key, d in drawn.items()
    ]
    of_the_batch = len({key_of(batch) for batch in recent}) == 1
    of_the_batch = of_the_batch or any(draw.shape[0] == size for draw in drawn.values())
    if not drawn or not all(again) or not of_the_batch:
        return None
    key, draw = next(iter(drawn.items()))
    return confirmed(
        f"{FAMILY}/seeded-every-step",
        f"{key.split()[0]} at {Path(draw.line.file).name}:{draw.line.number} drew the same numbers at each of "
        f"{len(recent)} taped steps (the last: {recent[-1].step})",
        where=place_of_data(seeding_line(draw.line) or draw.line),
        confidence="proven",  # the same to the last bit
    )


def seeding_line(line: Line) -> Line | None:
    """The innermost call of manual_seed in the same file."""
    try:
        text = Path(line.file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    calls = [(len(row) - len(row.lstrip()), i + 1) for i, row in enumerate(text) if "manual_seed(" in row]
    return Line(line.file, max(calls)[1], "<seed>") if calls else None


def key_of(batch: Batch) -> tuple[float, ...]:
    """Its samples, in whatever order."""
    return tuple(sorted(batch.prints))


def is_it_the_same_batch(batches: list[Batch]) -> Verdict | None:
    last, keys = batches[-1], {key_of(batch) for batch in batches}
    if len(keys) == 1:
        if last.held < 2 * len(set(last.prints)) or last.rows == "fixed":
            return None  # all the data there is, or all that is meant for training
        said = f"the same {len(last.prints)} samples at each of {len(batches)} taped steps"
        level = "problem" if last.rows == "drawn" else "warning"  # a part may be all that is meant
        return seen(
            "same-batch", f"{said}, cut from data with {last.held} different ones", batches, level=level
        )
    pairs = [(a, b) for a, b in pairwise(batches) if b.step == a.step + 1]
    twice = [b.step for a, b in pairs if key_of(a) == key_of(b)]
    # what is not fetched is there from step to step: epochs on one rollout
    fetched = last.alone and all(batch.where for batch in batches)
    if len(pairs) >= 4 and len(twice) >= OFTEN * len(pairs) and fetched:
        said = (
            f"{len(twice)} of {len(pairs)} batches are the batch before over again (step {twice[0]} for one)"
        )
        return seen(
            "batches-repeated", said, batches, level="warning"
        )  # several steps on one batch may be meant
    return None


def are_there_few_samples(batches: list[Batch]) -> Verdict | None:
    drawn = np.concatenate([batch.prints for batch in batches])
    distinct, size, last = len(np.unique(drawn)), len(batches[-1].prints), batches[-1]
    if last.held >= 4 * distinct and distinct <= 2 * size and size > 1 and last.rows == "drawn":
        said = f"{len(drawn)} samples were drawn in {len(batches)} taped steps, but only {distinct} different ones"
        return seen("few-samples", f"{said}, from data with {last.held}", batches)
    if distinct < VARIED * len(drawn):
        return None
    said = f"{distinct} different samples among the {len(drawn)} of {len(batches)} steps"
    return excluded(f"{FAMILY}/few-samples", said)


def do_pairs_stay(batches: list[Batch]) -> Verdict | None:
    """Samples that come again, in later epochs, with the target of another one.

    A target that no other sample had before is none of another sample: it may depend on who else is in the batch,
    or be the same sample's in another task.
    """
    known = [
        (b.prints, b.answers) for b in batches if b.answers is not None and len(b.answers) == len(b.prints)
    ]
    if any(len(np.unique(prints)) < len(prints) for prints, _ in known):
        return None  # samples that are the same by nature may well have several answers
    first: dict[float, float] = {}
    owners: dict[float, set[float]] = {}  # of a target, the samples that had it
    same = other = 0
    for prints, answers in known:
        for sample, answer in zip(prints.tolist(), answers.tolist(), strict=True):
            before = first.get(sample)
            first.setdefault(sample, answer)
            same += before == answer
            other += before not in (None, answer) and not owners.get(answer, set()) <= {sample}
        for sample, answer in zip(prints.tolist(), answers.tolist(), strict=True):
            owners.setdefault(answer, set()).add(sample)
    if same + other < AGAIN or other < OFTEN * (same + other):
        return None
    return confirmed(
        "data-target-misaligned/pairs-change",
        f"{same + other} samples came a second time in {len(known)} taped steps, {other} of them with another target "
        "than the first time",
        where=[batch.where for batch in batches if batch.answers is not None][-1],
        confidence="likely",  # targets that are drawn anew change, too
    )


def are_labels_mixed(batches: list[Batch]) -> Verdict | None:
    """How much a batch tells of the labels in it; of mixed batches, nothing."""
    known = [batch for batch in batches if batch.labels is not None and len(batch.labels) >= 4]
    if len(known) < ENOUGH:
        return None
    parts = [batch.labels for batch in known if batch.labels is not None]
    labels, steps = np.concatenate(parts), np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    values, counts = np.unique(labels, return_counts=True)
    classes, most = known[-1].classes, float(counts.max()) / len(labels)
    if len(values) == 1:
        if len(labels) < 100 or classes < 2 or classes > 100:
            return None
        said = f"all {len(labels)} labels of {len(known)} taped batches are {values[0]}, of {classes} classes"
        return seen("one-class", said, known, if_troubled=True, lasting=False)
    told = share_told(labels, steps)
    said = f"the batch tells {100 * told:.0f} % of a label's entropy ({len(known)} batches, {len(values)} classes)"
    if told > 0.5:
        return seen("sorted-by-class", said, known)
    if most > IMBALANCED and len(labels) >= 200:  # of fewer, the rare ones may yet come
        said = f"{100 * most:.1f} % of {len(labels)} labels are class {values[counts.argmax()]}"
        fix = "weight the rare classes in the loss, or sample them more often"
        return seen("imbalance", said, known, where=None, fix=fix, level="warning", lasting=False)
    return excluded(f"{FAMILY}/sorted-by-class", said) if told < MIXED else None


def do_inputs_come_in_order(batches: list[Batch]) -> Verdict | None:
    """Of inputs that are one number a sample, the means of the batches, and how much they vary inside."""
    ids = [batch.ids for batch in batches if batch.ids is not None]
    if len(ids) < len(batches) or len(ids) < 2 * ENOUGH:
        return None
    means, inside, total = (
        np.array([i.mean() for i in ids]),
        np.mean([i.var() for i in ids]),
        np.concatenate(ids).var(),
    )
    rising = np.mean(np.diff(means) > 0)
    if total == 0 or inside > MIXED * total or FALLING <= rising <= RISING:
        return None
    said = (
        f"the inputs come in order: their mean goes from {means[0]:.4g} to {means[-1]:.4g} over {len(means)} "
    )
    said += f"batches, within a batch they vary by {100 * inside / total:.1f} % of the whole variance"
    return seen("not-shuffled", said, batches, level="warning", lasting=False)


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
