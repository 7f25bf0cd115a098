"""Do the targets belong to the inputs? Where both come from, whether one holds the other, whether neighbours agree."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from gradproof.experiments.verdict import UNDECIDED, Verdict, confirmed, excluded, undecided
from gradproof.instruments.evidence import Evidence
from gradproof.instruments.flow import Comparison, Flow, TooLong, place_of
from gradproof.instruments.rows import SHORT_NUMBERS, data_behind, send_numbers, sources
from gradproof.instruments.source import say_where_made

FAMILY = "data-target-misaligned"
MOST = 600  # samples remembered
FEWEST = 60  # of them, to compare neighbours
COLUMNS = 256  # of a sample
MOST_OPERATIONS = 60_000  # replayed for one step: one or two seconds
WALKED = 8  # operations are walked over, to find what a comparison is made from, while one is replayed
WINDOW = 4  # numbers of a series
FEWEST_VIEWS = 8  # of a batch
PAIRED = 0.9  # of the views: but for a few that augmentation has carried away
STRANGERS, ALIKE = 2.5, 5  # deviations from chance: less may well be chance, more cannot be
NOTHING = 0.03  # of the targets explained: a network that guesses comes to 0, give or take a batch
CERTAIN = 0.1  # entropy of labels that are nearly all one: there is nothing to explain
# what a divergence, or a difference of scores, is made of
BESIDE = ("mul", "sub", "xlogy", "mse_loss", "kl_div")
LATE = 100  # steps after which a network that can learn has learned something


def do_targets_belong_to_inputs(evidence: Evidence) -> Iterator[Verdict]:
    """Follows inputs and targets back to the rows they were taken from, unless a long rollout lies between."""
    flow = evidence.flow
    try:
        with flow.at_most(MOST_OPERATIONS):
            for verdict in judge_targets(evidence):
                evidence.memory["targets judged"] = verdict.verdict != UNDECIDED
                yield verdict
    except TooLong:
        if not evidence.memory.get("targets judged"):  # what an earlier step has shown stays said
            reason = f"not done: to follow the data through the {len(flow.forward)} operations of step {evidence.step} "
            yield undecided(FAMILY, f"{reason}takes more than the {MOST_OPERATIONS} operations it is allowed")


def judge_targets(evidence: Evidence) -> Iterator[Verdict]:
    flow = evidence.flow
    for comparison in flow.comparisons:
        flow.spend(len(flow.forward) // WALKED)
        for judge in (are_targets_noise, do_rows_match, is_the_target_in_the_input, are_pairs_of_one_sample):
            verdict = judge(flow, comparison)
            if verdict is not None:
                yield verdict
                if verdict.id:
                    return
    yield from do_two_targets_agree(evidence)
    yield from do_neighbours_agree(evidence)


def are_targets_noise(flow: Flow, comparison: Comparison) -> Verdict | None:
    """Targets drawn at random that the network has not seen any part of."""
    leaves, drawn = sources(flow, comparison.target)
    if comparison.kind != "value" or leaves or not drawn:
        return None
    if not drawn.isdisjoint(sources(flow, comparison.prediction)[1]):
        return None
    line = flow.tape.operations[min(drawn)].line
    return confirmed(
        f"{FAMILY}/fresh-noise",
        "the target is random numbers drawn for it alone: nothing that the prediction is made from depends on them",
        where=place_of("", line),
        confidence="proven",  # nothing that it was made from is in the prediction
    )


def do_rows_match(flow: Flow, comparison: Comparison) -> Verdict | None:
    """From which row of its data each input and each target was taken: row numbers are sent the same way."""
    halves = halves_of_pairs(flow, comparison)
    for ends in halves or [(slot, comparison.target) for slot in inputs_of(flow, comparison)]:
        for first in data_behind(flow, ends[0]):
            for second in data_behind(flow, ends[1]):
                rows = flow.tape.slots[first].shape[0]
                if first == second or flow.tape.slots[second].shape[0] != rows:
                    continue
                sent = send_numbers(flow, (first, second), ends, SHORT_NUMBERS)
                if sent is None or len(sent[0]) == rows:
                    continue
                whole = send_numbers(flow, (first, second), ends, rows)
                found = _verdict_on_rows(flow, ends[1], sent, whole)
                if halves and found is not None and found.id:  # the other half may be another of its class
                    return replace(found, if_troubled=True, confidence="likely")
                return found
    return None


def halves_of_pairs(flow: Flow, comparison: Comparison) -> list[tuple[int, int]]:
    """The two inputs of a contrastive loss, whose scores (n, n) have the right answers on their diagonal."""
    shape = flow.tape.slots[comparison.prediction].shape
    if not is_diagonal(flow, comparison):
        return []
    behind = flow.ancestors(comparison.prediction)
    found = [s for s in flow.inputs if s in behind and flow.tape.slots[s].shape[0] == shape[0]]
    return [(found[0], other) for other in found[1:]]


def is_diagonal(flow: Flow, comparison: Comparison) -> bool:
    """Whether each row of a square of scores is to be highest in its own column."""
    shape = flow.tape.slots[comparison.prediction].shape
    if comparison.kind != "class" or len(shape) != 2 or shape[0] != shape[1]:
        return False
    labels = flow.values([comparison.target]).get(comparison.target)
    return labels is not None and torch.equal(labels.cpu().long(), torch.arange(shape[0]))


def _verdict_on_rows(
    flow: Flow, target: int, sent: tuple[Tensor, ...], whole: tuple[Tensor, ...] | None
) -> Verdict | None:
    """From the numbers of the rows modulo SHORT_NUMBERS, and, to show, the `whole` numbers if they got through."""
    a, b = sent
    wrong = float((a != b).double().mean())
    if wrong == 0:
        return excluded(
            f"{FAMILY}/rows-of-another-batch", f"each of {len(a)} targets is taken from the row of its input"
        )
    if wrong < 0.5 or len(torch.unique((b - a) % SHORT_NUMBERS)) == 1:
        return None  # always the same distance: a window of a series
    if len(torch.unique(b)) == 1:
        return None  # zeros, say, of the shape of something that came from the data
    pairs = ""
    if (
        whole is not None
        and torch.equal(whole[0] % SHORT_NUMBERS, a)
        and torch.equal(whole[1] % SHORT_NUMBERS, b)
    ):
        first = zip(whole[0][:4], whole[1][:4], strict=True)
        pairs = ": rows " + ", ".join(f"{int(x)} with {int(y)}" for x, y in first) + ", …"
    return confirmed(
        f"{FAMILY}/rows-of-another-batch",
        f"{100 * wrong:.0f} % of the targets are taken from another row than their input{pairs}",
        where=flow.origin(target),
        confidence="proven",  # the numbers of the rows were sent along
    )


def is_the_target_in_the_input(flow: Flow, comparison: Comparison) -> Verdict | None:
    """A column of the input that equals the target in every sample, or a window of a series that is all of it."""
    if comparison.kind != "value":
        return None
    target = comparison.target
    inputs = inputs_of(flow, comparison)
    found = flow.values([target, *inputs])
    wanted = found.get(target)
    if wanted is None or wanted.numel() < 8 or len(torch.unique(wanted)) < 8:
        return None
    for slot in inputs:
        value = found.get(slot)
        if value is None or not value.is_floating_point() or value.dim() < 2:
            continue
        if wanted.numel() % value.shape[0] or value.numel() < 2 * wanted.numel():
            continue
        columns = value.reshape(value.shape[0], -1)
        goals = wanted.reshape(value.shape[0], -1).to(columns.dtype)
        if (first := same_columns(columns, goals)) is not None:
            last = first + goals.shape[1] - 1
            which = f"column {first}" if first == last else f"columns {first} to {last}"
            return confirmed(
                f"{FAMILY}/target-in-the-input",
                f"{which} of the {columns.shape[1]} inputs equal{'s' if first == last else ''} the target in all "
                f"{len(columns)} samples: the answer is given with the question",
                where=flow.origin(target, comparison.operation.line),
                confidence="proven",  # equal to the last bit
            )
    return None


def same_columns(columns: Tensor, goals: Tensor) -> int | None:
    """Where in a table another one stands, column by column; of several, only a window that others come before.

    A sample that is asked back on purpose stands at the front, with what it is told beside it behind.
    """
    width = goals.shape[1]
    if 1 < width < WINDOW:
        return None
    starts = (columns[:, : columns.shape[1] - width + 1] == goals[:, :1]).all(0).nonzero().flatten().tolist()
    starts = [at for at in starts if at or width == 1]
    return next((at for at in starts if torch.equal(columns[:, at : at + width], goals)), None)


def are_pairs_of_one_sample(flow: Flow, comparison: Comparison) -> Verdict | None:
    """Of scores between all views of a batch, each row's right answer should be the other view of its sample.

    Views of one sample are nearer to each other than to any other: where they lie two by two, and never where the
    targets say, halves were taken for neighbours, or neighbours for halves.
    """
    shape = flow.tape.slots[comparison.prediction].shape
    if comparison.kind != "class" or len(shape) != 2 or shape[0] != shape[1] or shape[0] < FEWEST_VIEWS:
        return None
    slots = [s for s in inputs_of(flow, comparison) if flow.tape.slots[s].dtype.is_floating_point]
    found = flow.values([comparison.target, *slots])
    labels, views = found.get(comparison.target), [found[s].detach() for s in slots if s in found]
    if labels is None or not views or sum(len(view) for view in views) != len(labels):
        return None
    if len({view.shape[1:] for view in views}) > 1 or sorted(labels.tolist()) != list(range(len(labels))):
        return None
    flat = torch.cat(views).reshape(len(labels), -1)
    near, rows = nearest_others(flat[:, :: max(1, flat.shape[1] // COLUMNS)].double().cpu()), labels.cpu()
    each_other = float((near[near] == torch.arange(len(near))).double().mean())
    meant = float((near == rows).double().mean())
    if each_other < PAIRED:
        return None
    said = f"of {len(near)} views {100 * each_other:.0f} % lie nearest to each other, two by two"
    if meant > 0.5:
        return excluded(
            f"{FAMILY}/views-of-another-sample", f"{said}, and {100 * meant:.0f} % as the loss wants"
        )
    if meant > 1 - PAIRED:
        return None
    first = ", ".join(f"{row} with {int(near[row])} and not {int(rows[row])}" for row in range(3))
    return confirmed(
        f"{FAMILY}/views-of-another-sample",
        f"{said}, and {100 * meant:.0f} % of those are what the loss takes for views of one sample: {first}, …",
        where=flow.origin(slots[0], comparison.operation.line),
        confidence="likely",  # near is what looks alike
    )


def do_two_targets_agree(evidence: Evidence) -> Iterator[Verdict]:
    """Labels, and probabilities that somebody stored for the same samples, should say the same more often than not."""
    flow = evidence.flow
    for comparison in (c for c in flow.comparisons if c.kind == "class"):
        shape = flow.tape.slots[comparison.prediction].shape
        stored = stored_beside(flow, shape) if len(shape) == 2 else []
        # what a network computes may still have to be learned
        for slot in [s for s in stored if not is_computed(evidence, s)][:1]:
            found = flow.values([comparison.target, slot])
            if len(found) < 2:
                continue
            kept = evidence.memory.setdefault(f"two targets {comparison.operation.line}", [])
            kept.append((found[comparison.target].cpu(), found[slot].argmax(1).cpu()))
            labels, others = (torch.cat(part) for part in zip(*kept, strict=True))
            shares = [
                torch.bincount(part.clamp(min=0), minlength=shape[1]) / len(part) for part in (labels, others)
            ]
            chance = float((shares[0] * shares[1]).sum())
            share = float((labels == others).double().mean())
            z = (share - chance) / math.sqrt(max(chance * (1 - chance), 1e-9) / len(labels))
            said = f"labels and stored targets of one prediction agree in {100 * share:.0f} % of {len(labels)} rows"
            if z > ALIKE:
                yield excluded(f"{FAMILY}/two-targets", said)
            elif z < STRANGERS and len(labels) >= 100 and chance < 0.5:
                yield confirmed(
                    f"{FAMILY}/two-targets",
                    f"{said}, by chance {100 * chance:.0f} %: they are those of other samples",
                    *say_where_made(evidence, slot),
                    where=flow.origin(slot, comparison.operation.line),
                    confidence="likely",
                    lasting=False,
                )


def stored_beside(flow: Flow, shape: tuple[int, ...]) -> list[int]:
    """Scores or probabilities (samples, classes) without gradient that the loss puts beside the prediction."""
    found = []
    for op in flow.operations:
        reads = flow.reads(op)
        if op.name not in BESIDE or flow.tail.isdisjoint([*reads, *flow.makes(op)]):
            continue
        found += [s for s in reads if s not in flow.tracked and flow.tape.slots[s].shape == shape]
    floating = (s for s in dict.fromkeys(found) if flow.tape.slots[s].dtype.is_floating_point)
    return [s for s in floating if any(leaf in flow.tape.memory_of for leaf in sources(flow, s)[0])]


def do_neighbours_agree(evidence: Evidence) -> Iterator[Verdict]:
    """Similar samples should have similar targets; if not, and nothing is learned, suspect the pairs."""
    flow = evidence.flow
    comparison = next(iter(flow.comparisons), None)
    if comparison is None or is_computed(evidence, comparison.target):
        return
    slot = next((s for s in inputs_of(flow, comparison) if evidence.slot(s).dtype.is_floating_point), None)
    if slot is None:
        return
    found = flow.values([slot, comparison.target])
    x, y = found.get(slot), found.get(comparison.target)
    if x is None or y is None or y.numel() != x.shape[0] or x.dim() < 2:
        return
    if comparison.kind == "class" and len(y.unique()) == y.numel() > 2:
        return  # each its own: numbers of rows, of which no two can agree
    place = f"neighbours {x.shape[1:]} {comparison.operation.line}"  # of two networks, each has its own
    kept = evidence.memory.setdefault(place, {"x": [], "y": [], "count": 0})
    if kept["count"] < MOST:
        flat = x.reshape(len(x), -1)
        kept["x"].append(flat[:, :: max(1, flat.shape[1] // COLUMNS)].double().cpu())
        kept["y"].append(y.reshape(-1).double().cpu())
        kept["count"] += len(x)
    judged = evidence.memory.get("targets judged")  # what the rows have shown needs no neighbours
    if kept["count"] < FEWEST:
        if not judged:
            said = f"{kept['count']} of the {FEWEST} samples were seen that it takes to compare neighbours"
            yield undecided(FAMILY, said)
        return
    share, chance, z = agreement(torch.cat(kept["x"]), torch.cat(kept["y"]), comparison.kind != "value")
    text = f"nearest neighbours agree in {100 * share:.0f} % of {kept['count']} samples, by chance {100 * chance:.0f} %"
    if z > ALIKE:
        yield excluded(f"{FAMILY}/targets-independent-of-inputs", text)
    elif z < STRANGERS and evidence.step >= LATE and kept["count"] >= 100:
        learned = share_learned(evidence, comparison)
        if learned is not None and learned < NOTHING:
            yield confirmed(
                f"{FAMILY}/targets-independent-of-inputs",
                text,
                f"after {evidence.step} steps the predictions explain {100 * max(learned, 0):.1f} % of the targets",
                *say_where_made(evidence, slot),
                where=flow.origin(comparison.target, comparison.operation.line),
                if_troubled=True,
                confidence="likely",
                lasting=False,
            )


def inputs_of(flow: Flow, comparison: Comparison) -> list[int]:
    """What this prediction was made from: a step may have several batches, each with targets of its own.

    Batch norms hand statistics on from one pass to the next, so that a prediction depends on earlier batches, too.
    """
    behind = flow.ancestors(comparison.prediction)
    found = [slot for slot in flow.inputs if slot in behind]
    calls = [call for call in flow.tape.modules if not behind.isdisjoint(call.outputs)]
    calls = [
        call for call in calls if call.first <= comparison.operation.index and set(call.inputs) & set(found)
    ]
    if not calls:
        return found
    last, *later = sorted(
        calls, key=lambda call: (call.first, -call.last)
    )  # outer ones before what they call
    for call in later:
        if call.last > last.last:
            last = call
    return [slot for slot in found if slot in last.inputs]


def is_computed(evidence: Evidence, target: int) -> bool:
    """By a network: a return that is estimated, or a teacher's answer, is not data."""
    behind = evidence.flow.ancestors(target)
    return any(slot.index in behind for slot in evidence.tape.parameters)


def agreement(x: Tensor, y: Tensor, classes: bool) -> tuple[float, float, float]:
    """(share of samples whose nearest other has the same label, share by chance, how many deviations apart)."""
    return agreement_with(nearest_others(x), y, classes)


def nearest_others(x: Tensor) -> Tensor:
    """The number of the sample that is nearest to each; one seen twice is no neighbour of itself."""
    x = (x - x.mean(0)) / (x.std(0) + 1e-9)
    _, first = torch.unique(x, dim=0, return_inverse=True)
    distance = torch.cdist(x, x)
    distance[first[:, None] == first[None, :]] = math.inf
    return distance.argmin(1)


def agreement_with(near: Tensor, y: Tensor, classes: bool) -> tuple[float, float, float]:
    if not classes:
        y = (y > y.median()).double()
    _, counts = torch.unique(y, return_counts=True)
    chance = float(((counts / counts.sum()) ** 2).sum())
    share = float((y == y[near]).double().mean())
    return share, chance, (share - chance) / math.sqrt(max(chance * (1 - chance), 1e-9) / len(y))


def share_learned(evidence: Evidence, comparison: Comparison) -> float | None:
    """How much of this batch's entropy or variance the predictions take away."""
    found = loss_and_guess(evidence, comparison)
    return None if found is None else 1 - found[0] / found[1]


def loss_and_guess(evidence: Evidence, comparison: Comparison) -> tuple[float, float] | None:
    """The cross-entropy, or the mean square, of this batch, and that of the best constant."""
    found = evidence.values([comparison.prediction, comparison.target])
    if len(found) < 2:
        return None
    prediction, target = found[comparison.prediction].double(), found[comparison.target]
    if comparison.kind == "class" and prediction.dim() == 2:
        target = target.reshape(-1)
        classes = (target >= 0) & (target < prediction.shape[1])  # what is ignored is none
        log_probs, target = prediction.log_softmax(1)[classes], target[classes]
        if not len(target):
            return None
        _, counts = torch.unique(target, return_counts=True)
        shares = counts.double() / counts.sum()
        # few samples of many classes seem surer than they are (Miller and Madow)
        entropy = float(-(shares * shares.log()).sum()) + (len(counts) - 1) / (2 * len(target))
        entropy = min(entropy, math.log(prediction.shape[1]))
        loss = float(-log_probs.gather(1, target[:, None]).mean())
        return (loss, entropy) if entropy > CERTAIN else None
    if "with_logits" in comparison.operation.name:
        prediction = prediction.sigmoid()
    variance = float(target.double().var())
    if prediction.shape != target.shape or not variance > 0:
        return None
    return float(((prediction - target) ** 2).mean()), variance
