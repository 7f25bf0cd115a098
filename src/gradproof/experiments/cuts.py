"""Is a path cut? Parameters that shape the loss, are meant to be trained, and get no gradient from it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gradproof.experiments.evidence import Evidence, Verdict, confirmed
from gradproof.experiments.nonfinite import place_of
from gradproof.experiments.owners import has_gradient, is_copy, named_parameters
from gradproof.tape.cuts import Cut, find_cuts
from gradproof.tape.operations import Operation, Slot, references

TIMES = 2  # taped steps without a gradient before it is said: of two players, one waits while the other steps
PASSED_ON = (
    "view",
    "reshape",
    "unsqueeze",
    "squeeze",
    "expand",
    "cat",
    "stack",
    "clone",
    "detach",
    "alias",
    "_to_copy",
)
CHOOSES_ROWS = ("embedding", "index", "index_select", "gather")
UNUSED = "it is not used by the loss"
NEARBY = 1e-4  # of a weight's size
ROUNDED = 1e-11  # of a loss in float64: what changes less may be rounding


def is_a_path_cut(evidence: Evidence) -> Iterator[Verdict]:
    """Whole parameters first, then rows of parameters, then what is cut on one of its ways."""
    loss_leaf = rewrapped_loss(evidence)
    if loss_leaf is not None:
        yield loss_leaf
        return
    waiting = without_gradient(evidence)
    cuts = [cut for cut in find_cuts(evidence.tape, waiting) if cut.how != UNUSED and cut.line is not None]
    if cuts:
        yield verdict_of(cuts)
        return
    yield from sampled_without_gradient(evidence)
    yield from cut_rows(evidence)
    yield from cut_between_modules(evidence)


def sampled_without_gradient(evidence: Evidence) -> Iterator[Verdict]:
    """A draw from a distribution that a network puts out, made without gradient, that a trained layer goes on with.

    An action is drawn like that, too, but its log-probability is asked for, and no layer is.
    """
    trained = set(evidence.tape.stepped)
    for operation in evidence.forward:
        parameters = [ref for ref in references(operation.args) if ref.tracked]
        if operation.name != "normal" or operation.grad_enabled or not parameters:
            continue
        drawn, asked, used = set(operation.makes), False, False
        for user in evidence.forward[evidence.forward.index(operation) + 1 :]:
            if not drawn & set(user.reads):
                continue
            if user.name in PASSED_ON:
                drawn.update(user.makes)
            asked |= user.name == "sub" and not user.module and user.grad_enabled
            used |= user.grad_enabled and bool(trained & set(user.reads))
        if used and not asked:
            yield confirmed(
                "detached-graph/sample",
                "a sample is drawn without gradient from a mean and deviation that are trained, and goes into a "
                "trained layer: nothing that this layer learns reaches what the sample was drawn from",
                where=place_of("", operation.line),
                fix="draw with rsample() instead of sample()",
                lasting=True,
            )
            return


def rewrapped_loss(evidence: Evidence) -> Verdict | None:
    """A loss without history: backward from it reaches nothing. One made before the tape began has a history."""
    for call in evidence.tape.top_backwards:
        for root in map(evidence.slot, call.roots):
            if call.accumulates and root.made_by is None and not root.followed:
                return confirmed(
                    "detached-graph/new-tensor",
                    "the loss is a new tensor without history: backward ends where it begins",
                    where=place_of("", call.line),
                    fix="call backward on what the loss function returned, not on torch.tensor(loss.item())",
                    lasting=True,
                )
    return None


def without_gradient(evidence: Evidence) -> list[Slot]:
    """Parameters that an optimizer holds and that got no gradient in any of the taped steps, several times seen."""
    named = named_parameters(evidence)
    held = held_by_whoever_steps(evidence, named)
    wanted = {n for n, p in named.items() if id(p) in held and p.requires_grad and not has_gradient(p)}
    reached = evidence.memory.setdefault("reached", set())
    reached.update(n for n, p in named.items() if has_gradient(p))
    count = evidence.memory.setdefault("waiting", {})
    written = {
        evidence.slot(slot).name
        for op in evidence.tape.operations
        if op.phase != "optimizer"
        for slot in op.writes
    }
    found = []
    for slot in evidence.tape.parameters:
        if slot.name not in wanted or slot.name in reached or slot.name in written:
            continue  # written by something else than an optimizer: an average of other weights
        count[slot.name] = count.get(slot.name, 0) + 1
        if count[slot.name] >= TIMES and not is_copy(evidence, named, slot.name):
            found.append(slot)
    return found


def held_by_whoever_steps(evidence: Evidence, named: dict[str, Tensor]) -> set[int]:
    """The parameters of the optimizers that stepped on this tape: the others wait for their turn."""
    stepped = {id(named[name]) for s in evidence.tape.stepped if (name := evidence.slot(s).name) in named}
    groups = [{id(p) for g in o.param_groups for p in g["params"]} for o in evidence.optimizers]
    if len(groups) > 1:
        groups = [group for group in groups if group & stepped]
    return set().union(*groups)


def verdict_of(cuts: list[Cut]) -> Verdict:
    first = cuts[0]
    names = [cut.parameter for cut in cuts if cut.line == first.line]
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return confirmed(
        "detached-graph/cut",
        f"{shown} shape the loss and get no gradient: {first.how}",
        f"at {first.line}",
        where=place_of(first.module, first.line),
        lasting=True,
    )


def cut_rows(evidence: Evidence) -> Iterator[Verdict]:
    """Rows of a weight without any gradient, and yet the loss changes with them: a part of a fused layer."""
    named = named_parameters(evidence)
    slots = {slot.name: slot for slot in evidence.tape.parameters}
    silent = evidence.memory.setdefault("silent rows", {})
    suspects: dict[str, Tensor] = {}
    chosen_from = {op.reads[0] for op in evidence.forward if op.name in CHOOSES_ROWS}
    asked = {slot for op in evidence.forward if not op.grad_enabled and op.call is None for slot in op.reads}
    for name, parameter in named.items():
        if name in slots and slots[name].index in chosen_from:
            continue  # a table: rows that were not looked up have no gradient
        if name in slots and slots[name].index in asked:
            continue  # a pass without gradient beside the one with it: a target, an action
        if name not in slots or parameter.grad is None or parameter.dim() != 2 or parameter.grad.is_sparse:
            continue
        rows = (parameter.grad == 0).all(dim=1)
        silent[name] = rows & silent[name] if name in silent else rows
        share = float(silent[name].float().mean())
        if 0.2 <= share < 1:
            suspects[name] = silent[name]
    for name, rows in suspects.items():
        if not shapes_the_loss(evidence, slots[name], rows):
            continue
        cut = find_cuts(evidence.tape, [slots[name]], in_part=True)[0]
        if cut.line is None:
            continue
        yield confirmed(
            "detached-graph/part-cut",
            f"{int(rows.sum())} of {len(rows)} rows of {name} shape the loss and never get a gradient",
            f"{cut.how}, at {cut.line}",
            where=place_of(cut.module, cut.line),
            lasting=True,
        )
        return


def shapes_the_loss(evidence: Evidence, parameter: Slot, rows: Tensor) -> bool:
    """Whether the loss has a slope along these rows of a weight, both ways; behind units that are off it has none."""
    value = evidence.tape.leaf_value(parameter.index).double()
    size = value.square().mean().sqrt()
    loss = evidence.loss_at({}, dtype=torch.float64)
    for way in (-1.0, 1.0):
        moved = value.clone()
        moved[rows] += way * NEARBY * (value[rows] + size)
        if not abs(evidence.loss_at({parameter.index: moved}, dtype=torch.float64) - loss) > ROUNDED * abs(
            loss
        ):
            return False
    return True


def cut_between_modules(evidence: Evidence) -> Iterator[Verdict]:
    """What one trained module made is cut and fed to another one: the first does not learn what the second wants.

    Heads on detached features are built so on purpose: a warning, unless the first module gets no gradient at all.
    """
    tape = evidence.tape
    trained = set(tape.stepped)
    if not trained or len([c for c in tape.top_backwards if c.accumulates]) != 1:
        return
    source: dict[int, str] = {}  # slot that depends on trained parameters -> module that made it
    cut: dict[int, tuple[str, Operation]] = {}
    for operation in evidence.forward:
        reads = operation.reads
        for slot in reads:
            if slot in cut and operation.module and operation.grad_enabled and trained & set(reads):
                made_in, at = cut[slot]
                if not related(made_in, operation.module):
                    yield confirmed(
                        "detached-graph/between-modules",
                        f"what {made_in} made reaches {operation.module} without a way back for the gradient",
                        f"{at.name} at {at.line} cuts it",
                        where=place_of(at.module, at.line),
                        level="warning",
                        confidence="likely",
                        lasting=True,
                    )
                    return
        origin = next((source[s] for s in reads if s in source), None)
        if origin is None and trained & set(reads):
            origin = operation.module
        broken = next((cut[s] for s in reads if s in cut), None)
        results = (*operation.makes, *operation.writes)
        # inside a hand-written function nothing is followed: its own backward leads past
        stops = operation.call is None and (operation.name == "detach" or not operation.grad_enabled)
        for slot in results:
            if not tape.slots[slot].dtype.is_floating_point:
                continue
            if broken is not None and not any(
                r.tracked for r in references((operation.args, operation.kwargs))
            ):
                cut[slot] = broken
            elif stops and origin:
                cut[slot] = (origin, operation)
            elif origin is not None:
                source[slot] = operation.module if trained & set(reads) else origin


def related(first: str, second: str) -> bool:
    """The same module, or one inside the other: a recurrence or a part of it."""
    top, other = first.split(".")[0], second.split(".")[0]
    return top == other or not top or not other
