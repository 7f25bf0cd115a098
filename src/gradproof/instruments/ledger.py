"""The ledger of the data: of each step's batch one number a sample, one for its answer, and what was drawn for it.

batches = remember_batch(evidence)      # those of this kind so far, this one the last
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from gradproof.instruments.evidence import Evidence
from gradproof.instruments.flow import ALIASES, Comparison
from gradproof.instruments.rows import PICKS
from gradproof.tape.operations import Line
from gradproof.tape.operators import is_random

MOST = 64  # steps remembered
GAP = 1.2  # times the last step remembered, once there are MOST: a dozen for every tenfold of the training
COLUMNS = 4096  # of a sample that its fingerprint looks at
LOOK_AT = 20_000  # rows of the data that are counted
NUMBERS = 16  # random ones: of fewer, what comes again may be chance
WHOLE = ALIASES - {"slice", "select"}


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
    random: dict[str, Draw]
    answers: np.ndarray | None = None  # one number for each sample's target
    labels: np.ndarray | None = None
    classes: int = 0
    ids: np.ndarray | None = None  # of inputs that are one number a sample
    beside: list[np.ndarray] = field(
        default_factory=list
    )  # one number a sample of all else that the loss is given


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
    compared = next((c for c in flow.comparisons if c.kind == "class"), next(iter(flow.comparisons), None))
    values = flow.values([slot, *others[:3]])  # a rollout has many inputs
    if slot not in values or not size:
        return None
    value, prints = values[slot], fingerprints(values[slot])
    for other in others[:3]:
        if other in values and values[other].numel() % size == 0:
            prints = prints + math.pi * fingerprints(values[other].reshape(size, -1))
    kind = kind_of(evidence, slot, compared.target if compared is not None else None)
    known: list[Batch] = [batch for batch in evidence.memory["batches"] if batch.kind == kind]
    batch = Batch(
        step=evidence.step,
        kind=kind,
        prints=prints,
        held=known[-1].held if known else count_samples(evidence, slot),
        where=flow.origin(slot),
        alone=len(evidence.optimizers) == 1,
        rows=how_chosen(evidence, slot),
        random=random_numbers(evidence),
        beside=all_beside(evidence, [slot, *others], size),
    )
    if value.dim() == 1 and not value.is_floating_point():
        batch.ids = value.double().cpu().numpy()
    if compared is not None:
        note_answers(evidence, batch, compared, size)
    return batch


def note_answers(evidence: Evidence, batch: Batch, compared: Comparison, size: int) -> None:
    """The targets, where they come from data, and do not just name the rows, as those of a contrastive loss do."""
    flow, data = evidence.flow, {leaf.index for leaf in evidence.tape.inputs}
    answer = flow.value(compared.target) if not data.isdisjoint(flow.ancestors(compared.target)) else None
    if answer is None or are_rows_of_the_batch(answer):
        return
    if answer.dim() and answer.shape[0] == size:
        batch.answers = fingerprints(answer)
    if compared.kind == "class" and answer.numel() == size:
        batch.labels = answer.reshape(-1).cpu().numpy()
        batch.classes = evidence.slot(compared.prediction).shape[1]


def kind_of(evidence: Evidence, slot: int, target: int | None) -> str:
    """Types and axes of the largest input and the target, by what and where they are compared, and what is trained:
    players that take turns on the same samples want something else of them each."""
    flow = evidence.flow
    tensors = [evidence.slot(each) for each in (slot, target) if each is not None]
    forms = [f"{tensor.dtype} {len(tensor.shape)}" for tensor in tensors]
    compared = [f"{c.operation.name} at {c.operation.line}" for c in flow.comparisons if c.target == target]
    first = [evidence.slot(s).name for op in flow.layers[:1] for s in flow.reads(op) if s in flow.weights]
    return ", ".join([*forms, *compared[:1], *first])


def are_rows_of_the_batch(answer: Tensor) -> bool:
    rows = answer.detach().reshape(-1).sort().values.cpu()
    whole = not rows.is_floating_point() and len(rows) > 2
    return whole and bool((rows == torch.arange(len(rows))).all())


def how_chosen(evidence: Evidence, slot: int) -> str:
    """Whether a step drew its rows (by an index made in it, or one by one), cut a slice, or used a fixed index.

    A fixed index is what training on a fixed part of the data looks like.
    """
    flow = evidence.flow
    maker = flow.maker(flow.behind(slot, WHOLE))
    if maker is None:
        return "fixed"
    if maker.name in ("slice", "select"):
        return "cut"
    picked = maker.name.startswith(PICKS) and len(maker.reads) > 1
    return "fixed" if picked and flow.maker(flow.behind(maker.reads[1], WHOLE)) is None else "drawn"


def count_samples(evidence: Evidence, slot: int) -> int:
    """Different samples in the largest tensor that a batch was cut from: its rows, or windows of a series."""
    tape, shape = evidence.tape, evidence.slot(slot).shape
    if evidence.slot(slot).made_by is None:
        return 0
    behind = evidence.flow.ancestors(slot)
    # of a large data set, only the batch is on the tape
    leaves = [s for s in tape.inputs if s.index in behind and s.index in tape.memory_of and s.shape]
    tables = [s for s in leaves if s.shape[1:] == shape[1:] and s.shape[0] > shape[0]]
    series = [s for s in leaves if len(s.shape) == 1 and len(shape) == 2 and s.shape[0] > 2 * shape[1]]
    largest = max(tables or series, key=lambda leaf: leaf.shape[0], default=None)
    if largest is None:
        return 0
    value = tape.leaf_value(largest.index)
    if not tables:
        value = value[: len(value) // shape[1] * shape[1]].reshape(-1, shape[1])
    return len(np.unique(fingerprints(value[:LOOK_AT])))


def fingerprints(value: Tensor) -> np.ndarray:
    """One number a sample that another sample is all but sure not to have."""
    rows = value.reshape(value.shape[0], -1)
    rows = rows[:, :: max(1, rows.shape[1] // COLUMNS)].double()
    weights = torch.cos(torch.arange(1, rows.shape[1] + 1, dtype=torch.float64, device=rows.device) ** 2)
    return torch.nan_to_num(rows @ weights).cpu().numpy()


def all_beside(evidence: Evidence, inputs: list[int], size: int) -> list[np.ndarray]:
    """Of all leaves of the loss that have a row for each sample, and are not what the inputs are made from."""
    tape, flow = evidence.tape, evidence.flow
    behind = {s for slot in inputs for s in flow.ancestors(slot)}
    leaves = [s.index for s in tape.inputs if s.shape[:1] == (size,) and s.index in tape.memory_of]
    wanted = (leaf for leaf in leaves if leaf in flow.towards_loss and leaf not in behind)
    return [fingerprints(tape.leaf_value(leaf)) for leaf in wanted]


def random_numbers(evidence: Evidence) -> dict[str, Draw]:
    """A fingerprint of everything random that the loss of this step depends on, by operation and line."""
    found: dict[str, Draw] = {}
    for op in evidence.flow.operations:
        if op.frozen is None or op.line is None or not is_random(op.func, op.args, op.kwargs):
            continue
        for value in op.frozen:
            if isinstance(value, Tensor) and value.numel() >= NUMBERS:
                key = f"{op.name} {op.line.file}:{op.line.number} {tuple(value.shape)}"
                print = float(fingerprints(value.reshape(1, -1))[0])
                found.setdefault(key, Draw(print, tuple(value.shape), op.line))
    return found
