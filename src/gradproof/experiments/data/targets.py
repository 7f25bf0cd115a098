"""Do the targets belong to the inputs? Where both come from, whether one holds the other, whether neighbours agree."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from gradproof.experiments.verdict import UNDECIDED, Verdict, confirmed, excluded, undecided
from gradproof.instruments.evidence import Evidence
from gradproof.instruments.flow import Comparison, Flow, TooLong, place_of
from gradproof.instruments.neighbours import (
    LATE,
    agreement,
    columns_of,
    deviations,
    learned_line,
    nearest_others,
    share_learned,
)
from gradproof.instruments.rows import (
    SHORT_NUMBERS,
    data_behind,
    inputs_of,
    is_diagonal,
    send_numbers,
    sources,
)
from gradproof.instruments.source import say_where_made

FAMILY = "data-target-misaligned"
MOST = 600  # samples remembered
FEWEST, ENOUGH = 60, 100  # of them, to compare neighbours; and to say that those are strangers
MOST_OPERATIONS = 60_000  # replayed for one step: one or two seconds
WALKED = 8  # operations are walked over, to find what a comparison is made from, while one is replayed
WINDOW = 4  # numbers of a series
FEWEST_VIEWS = 8  # of a batch
PAIRED = 0.9  # of the views: but for a few that augmentation has carried away
STRANGERS, ALIKE = 2.5, 5  # deviations from chance: less may well be chance, more cannot be
NOTHING = 0.03  # of the targets explained: a network that guesses comes to 0, give or take a batch
# what a divergence, or a difference of scores, is made of
BESIDE = ("mul", "sub", "xlogy", "mse_loss", "kl_div")


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
    return confirmed(
        f"{FAMILY}/fresh-noise",
        "the target is random numbers drawn for it alone: nothing that the prediction is made from depends on them",
        where=place_of("", flow.tape.operations[min(drawn)].line),
        confidence="proven",  # nothing that it was made from is in the prediction
    )


# rows -------------------------------------------------------------------------------------------------------


def do_rows_match(flow: Flow, comparison: Comparison) -> Verdict | None:
    """From which row of its data each input and each target was taken: row numbers are sent the same way."""
    halves = halves_of_pairs(flow, comparison)
    for ends in halves or [(slot, comparison.target) for slot in inputs_of(flow, comparison)]:
        for tables in product(*(data_behind(flow, end) for end in ends)):
            rows, others = (flow.tape.slots[table].shape[0] for table in tables)
            sent = None
            if tables[0] != tables[1] and rows == others:
                sent = send_numbers(flow, tables, ends, SHORT_NUMBERS)
            if sent is None or len(sent[0]) == rows:
                continue
            found = verdict_on_rows(flow, ends[1], sent, send_numbers(flow, tables, ends, rows))
            if halves and found is not None and found.id:  # the other half may be another of its class
                return replace(found, if_troubled=True, confidence="likely")
            return found
    return None


def halves_of_pairs(flow: Flow, comparison: Comparison) -> list[tuple[int, int]]:
    """The two inputs of a contrastive loss, whose scores (n, n) have the right answers on their diagonal."""
    if not is_diagonal(flow, comparison):
        return []
    count, behind = flow.tape.slots[comparison.prediction].shape[0], flow.ancestors(comparison.prediction)
    found = [s for s in flow.inputs if s in behind and flow.tape.slots[s].shape[0] == count]
    return [(found[0], other) for other in found[1:]]


def verdict_on_rows(
    flow: Flow, target: int, sent: tuple[Tensor, ...], whole: tuple[Tensor, ...] | None
) -> Verdict | None:
    """From the numbers of the rows modulo SHORT_NUMBERS, and, to show, the `whole` numbers if they got through."""
    a, b = sent
    wrong = float((a != b).double().mean())
    if wrong == 0:
        said = f"each of {len(a)} targets is taken from the row of its input"
        return excluded(f"{FAMILY}/rows-of-another-batch", said)
    # always the same distance is a window of a series; one row is zeros, say, of the shape of something from the data
    if wrong < 0.5 or len(torch.unique((b - a) % SHORT_NUMBERS)) == 1 or len(torch.unique(b)) == 1:
        return None
    pairs = ""
    if whole is not None and all(torch.equal(w % SHORT_NUMBERS, s) for w, s in zip(whole, sent, strict=True)):
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
    inputs = inputs_of(flow, comparison) if comparison.kind == "value" else []
    found = flow.values([comparison.target, *inputs]) if inputs else {}
    wanted = found.get(comparison.target)
    if wanted is None or wanted.numel() < 8 or len(torch.unique(wanted)) < 8:
        return None
    for value in (found[slot] for slot in inputs if slot in found):
        if not value.is_floating_point() or value.dim() < 2 or wanted.numel() % value.shape[0]:
            continue
        columns = value.reshape(value.shape[0], -1)
        goals = wanted.reshape(value.shape[0], -1).to(columns.dtype)
        first = same_columns(columns, goals) if columns.shape[1] >= 2 * goals.shape[1] else None
        if first is None:
            continue
        last = first + goals.shape[1] - 1
        which = f"column {first}" if first == last else f"columns {first} to {last}"
        return confirmed(
            f"{FAMILY}/target-in-the-input",
            f"{which} of the {columns.shape[1]} inputs equal{'s' if first == last else ''} the target in all "
            f"{len(columns)} samples: the answer is given with the question",
            where=flow.origin(comparison.target, comparison.operation.line),
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


# neighbours -------------------------------------------------------------------------------------------------


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
    if labels is None or not views or len({view.shape[1:] for view in views}) > 1:
        return None
    if sum(map(len, views)) != len(labels) or sorted(labels.tolist()) != list(range(len(labels))):
        return None
    near, rows = nearest_others(columns_of(torch.cat(views))), labels.cpu()
    each_other = float((near[near] == torch.arange(len(near))).double().mean())
    meant = float((near == rows).double().mean())
    said = f"of {len(near)} views {100 * each_other:.0f} % lie nearest to each other, two by two"
    said += f", and {100 * meant:.0f} %"
    if each_other < PAIRED or 1 - PAIRED < meant <= 0.5:
        return None
    if meant > 0.5:
        return excluded(f"{FAMILY}/views-of-another-sample", f"{said} as the loss wants")
    first = ", ".join(f"{row} with {int(near[row])} and not {int(rows[row])}" for row in range(3))
    return confirmed(
        f"{FAMILY}/views-of-another-sample",
        f"{said} of those are what the loss takes for views of one sample: {first}, …",
        where=flow.origin(slots[0], comparison.operation.line),
        confidence="likely",  # near is what looks alike
    )


def do_two_targets_agree(evidence: Evidence) -> Iterator[Verdict]:
    """Labels, and probabilities that somebody stored for the same samples, should say the same more often than not."""
    flow = evidence.flow
    for comparison in (c for c in flow.comparisons if c.kind == "class"):
        shape = flow.tape.slots[comparison.prediction].shape
        stored = stored_beside(flow, shape) if len(shape) == 2 else []
        found = flow.values([comparison.target, *stored[:1]])
        if len(found) < 2:
            continue
        kept = evidence.memory.setdefault(f"two targets {comparison.operation.line}", [])
        kept.append((found[comparison.target].cpu(), found[stored[0]].argmax(1).cpu()))
        both = labels, others = [torch.cat(part) for part in zip(*kept, strict=True)]
        shares = [torch.bincount(part.clamp(min=0), minlength=shape[1]) / len(part) for part in both]
        chance, share = float((shares[0] * shares[1]).sum()), float((labels == others).double().mean())
        z = deviations(share, chance, len(labels))
        said = (
            f"labels and stored targets of one prediction agree in {100 * share:.0f} % of {len(labels)} rows"
        )
        if z > ALIKE:
            yield excluded(f"{FAMILY}/two-targets", said)
        elif z < STRANGERS and len(labels) >= ENOUGH and chance < 0.5:
            yield confirmed(
                f"{FAMILY}/two-targets",
                f"{said}, by chance {100 * chance:.0f} %: they are those of other samples",
                *say_where_made(evidence, stored[0]),
                where=flow.origin(stored[0], comparison.operation.line),
                confidence="likely",
                lasting=False,
            )


def stored_beside(flow: Flow, shape: tuple[int, ...]) -> list[int]:
    """Scores or probabilities (samples, classes), of data, that the loss puts beside the prediction; what a network
    computes may still have to be learned."""
    ops = [
        op for op in flow.operations if op.name in BESIDE and not flow.tail.isdisjoint((*op.reads, *op.makes))
    ]
    slots = (flow.tape.slots[slot] for slot in dict.fromkeys(slot for op in ops for slot in op.reads))
    alike = [
        s.index
        for s in slots
        if s.shape == shape and s.dtype.is_floating_point and s.index not in flow.tracked
    ]
    kept = [s for s in alike if any(leaf in flow.tape.memory_of for leaf in sources(flow, s)[0])]
    return [slot for slot in kept if not flow.is_learned(slot)]


def do_neighbours_agree(evidence: Evidence) -> Iterator[Verdict]:
    """Similar samples should have similar targets; if not, and nothing is learned, suspect the pairs."""
    flow = evidence.flow
    comparison = next(iter(flow.comparisons), None)
    if comparison is None or flow.is_learned(comparison.target):
        return
    slot = next((s for s in inputs_of(flow, comparison) if evidence.slot(s).dtype.is_floating_point), None)
    found = flow.values([slot, comparison.target]) if slot is not None else {}
    if slot is None or len(found) < 2:
        return
    x, y = found[slot], found[comparison.target]
    if y.numel() != x.shape[0] or x.dim() < 2:
        return
    if comparison.kind == "class" and len(y.unique()) == y.numel() > 2:
        return  # each its own: numbers of rows, of which no two can agree
    place = f"neighbours {x.shape[1:]} {comparison.operation.line}"  # of two networks, each has its own
    kept: list[tuple[Tensor, Tensor]] = evidence.memory.setdefault(place, [])
    if sum(len(samples) for samples, _ in kept) < MOST:
        few = slice(
            None, None, max(1, len(x) // MOST)
        )  # all pairs of a batch of many rows fit into no memory
        kept.append((columns_of(x[few]), y.reshape(-1)[few].double().cpu()))
    samples, answers = (torch.cat(part) for part in zip(*kept, strict=True))
    if len(samples) < FEWEST:
        if not evidence.memory.get("targets judged"):  # what the rows have shown needs no neighbours
            said = f"{len(samples)} of the {FEWEST} samples were seen that it takes to compare neighbours"
            yield undecided(FAMILY, said)
        return
    share, chance, z = agreement(samples, answers, comparison.kind != "value")
    said = f"nearest neighbours agree in {100 * share:.0f} % of {len(samples)} samples, by chance {100 * chance:.0f} %"
    if z > ALIKE:
        yield excluded(f"{FAMILY}/targets-independent-of-inputs", said)
    elif z < STRANGERS and evidence.step >= LATE and len(samples) >= ENOUGH:
        learned = share_learned(evidence, comparison)
        if learned is not None and learned < NOTHING:
            yield confirmed(
                f"{FAMILY}/targets-independent-of-inputs",
                said,
                *learned_line(evidence, learned, digits=1),
                *say_where_made(evidence, slot),
                where=flow.origin(comparison.target, comparison.operation.line),
                if_troubled=True,
                confidence="likely",
                lasting=False,
            )
