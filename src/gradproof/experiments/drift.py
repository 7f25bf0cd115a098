"""Do stored data drift? `x = data[i:j]; x += noise` writes into the data, and does so again in every epoch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor

from gradproof.experiments.evidence import Evidence, Verdict, confirmed
from gradproof.experiments.nonfinite import place_of
from gradproof.tape.operations import Operation

ID = "aliasing-or-inplace/stored-data-changed"
# what goes by the old value; a buffer that is overwritten may be meant so
ALTERS = ("add_", "sub_", "mul_", "div_", "masked_fill_", "clamp_", "clamp_min_")
CUTS = (
    "slice",
    "select",
    "view",
    "alias",
    "unsqueeze",
    "squeeze",
    "detach",
    "narrow",
    "transpose",
    "unbind",
    "split",
)
TIMES = 3  # cuts that were written to a second time
LOOK_AT = 4096  # entries of the data, to know them again
SAME = 0.3  # of these unchanged from one taped step to the next: the same data


@dataclass
class Data:
    """What is known of one tensor that batches are cut from."""

    entries: Tensor
    cuts: dict[tuple, int] = field(default_factory=dict)  # which part -> steps at which it was written to


def do_stored_data_drift(evidence: Evidence) -> Iterator[Verdict]:
    """A batch that is a view of the data, changed in place on its way into the model, at more than one step each."""
    known: dict[tuple, Data] = evidence.memory.setdefault("drift", {})
    done: set[int] = set()
    for op, leaf, cut in writes_into_data(evidence):
        if leaf in done:
            continue
        done.add(leaf)
        shape = evidence.slot(leaf).shape
        entries = evidence.tape.leaf_value(leaf).flatten()
        entries = entries[:: max(1, len(entries) // LOOK_AT)].clone()
        data = known.get(shape)
        if data is None or float((data.entries == entries).double().mean()) < SAME:
            data = known[shape] = Data(entries)
        data.entries = entries
        data.cuts[cut] = data.cuts.get(cut, 0) + 1
        twice = sum(times > 1 for times in data.cuts.values())
        if twice >= TIMES:
            yield confirmed(
                ID,
                f"{op.name} changes a part of the {list(shape)} that batches are cut from, on its way into the model; "
                f"{twice} parts were changed at two or more of the taped steps: the data drift away",
                where=place_of(op.module, op.line),
                fix="copy what is changed: x = data[i:j].clone(), or x = x + noise in place of x += noise",
                lasting=True,
            )
            return


def writes_into_data(evidence: Evidence) -> Iterator[tuple[Operation, int, tuple]]:
    """(operation, the data, which part of them) where a part of a leaf is changed and then given to the model."""
    flow, tape = evidence.flow, evidence.tape
    storages = {
        leaf.storage: leaf.index for leaf in tape.inputs if leaf.shape and leaf.index in tape.memory_of
    }
    writers = [op for op in evidence.forward if op.name in ALTERS and not op.module and op.writes]
    writers = [op for op in writers if evidence.slot(op.writes[0]).storage in storages]
    if not writers:
        return
    given = {evidence.slot(s).storage for slot in flow.inputs for s in flow.ancestors(slot)}
    for op in writers:
        slot = evidence.slot(op.writes[0])
        leaf = flow.behind(slot.index, CUTS)
        whole = evidence.slot(leaf).shape
        if (
            leaf != storages[slot.storage]
            or slot.storage not in given
            or not whole[0] > slot_rows(slot.shape, whole)
        ):
            continue
        if not is_written_by_the_network(evidence, slot.storage):
            yield op, leaf, cut_of(evidence, slot.index, leaf)


def is_written_by_the_network(evidence: Evidence, storage: int) -> bool:
    """What a network computed and keeps: a memory, a state, prototypes that follow it."""
    flow = evidence.flow
    for op in evidence.forward:
        if any(evidence.slot(s).storage == storage for s in op.writes):
            others = [s for s in op.reads if evidence.slot(s).storage != storage]
            if any(not flow.weights.isdisjoint(flow.ancestors(other)) for other in others):
                return True
    return False


def slot_rows(shape: tuple[int, ...], whole: tuple[int, ...]) -> int:
    """How many rows of the whole a part has; one that lost an axis is a single row."""
    return shape[0] if len(shape) == len(whole) else 1


def cut_of(evidence: Evidence, slot: int, leaf: int) -> tuple:
    """The numbers of all cuts between a part and the whole."""
    found: list = []
    while slot != leaf:
        maker = evidence.flow.maker(slot)
        if maker is None:
            break
        found.append(tuple(arg for arg in maker.args[1:] if isinstance(arg, (int, list, tuple))))
        slot = maker.reads[0]
    return tuple(map(str, found))
