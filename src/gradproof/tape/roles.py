"""Which leaves of a tape feed the model, and which are what the loss compares with."""

from __future__ import annotations

from dataclasses import dataclass

from gradproof.tape.operations import Operation, Ref, Slot, Tape

LOSSES = {  # operator -> place of its target among the arguments
    "nll_loss_forward": 1, "nll_loss2d_forward": 1, "nll_loss_nd": 1, "mse_loss": 1, "l1_loss": 1,
    "huber_loss": 1,
    "smooth_l1_loss": 1, "binary_cross_entropy": 1, "binary_cross_entropy_with_logits": 1,
    "soft_margin_loss": 1,
    "multi_margin_loss": 1, "multilabel_margin_loss_forward": 1, "_ctc_loss": 1, "cross_entropy_loss": 1,
    "gather": 2,
}  # fmt: skip
LOOKS_THROUGH = {
    "view", "_unsafe_view", "slice", "select", "reshape", "_to_copy", "unsqueeze", "squeeze", "transpose",
    "permute", "t",
    "expand", "detach", "alias", "clone", "split", "chunk", "unbind", "index", "lift_fresh", "contiguous",
    "where",
    "masked_fill", "clamp_min", "ne", "eq", "constant_pad_nd", "cat",
}  # fmt: skip


@dataclass(frozen=True)
class Roles:
    """Inputs and targets: the leaves themselves, and the slots that embeddings and losses really read."""

    inputs: tuple[Slot, ...]
    targets: tuple[Slot, ...]
    token_slots: tuple[int, ...]  # what embeddings look up
    target_slots: tuple[int, ...]  # what losses compare with
    prediction_slots: tuple[int, ...]  # what losses compare


def find_roles(tape: Tape) -> Roles:
    """Follows every input leaf through views and casts to the operations that use it."""
    learned = _depends_on_parameters(tape)
    inputs, targets = [], []
    tokens: dict[int, None] = {}
    wanted: dict[int, None] = {}
    predictions: dict[int, None] = {}
    for leaf in tape.inputs:
        if 0 in leaf.shape:
            continue  # an empty cache
        reach = {leaf.index}
        fed = compared = False
        for operation in tape.operations:
            if operation.in_backward is not None or reach.isdisjoint(operation.reads):
                continue
            target = _target(operation, reach, learned)
            if target is not None:
                compared = True
                wanted[target[0]] = None
                predictions[target[1]] = None
            elif operation.name in LOOKS_THROUGH:
                reach.update(operation.makes)
            else:
                fed = True
                if operation.name == "embedding":
                    tokens.update({slot: None for slot in operation.reads if slot in reach})
        inputs += [leaf] if fed or not compared else []
        targets += [leaf] if compared else []
    return Roles(tuple(inputs), tuple(targets), tuple(tokens), tuple(wanted), tuple(predictions))


def _target(operation: Operation, reach: set[int], learned: set[int]) -> tuple[int, int] | None:
    """(target, prediction) when an operation compares one of these slots with something learned."""
    refs = [arg for arg in operation.args if isinstance(arg, Ref)]
    if operation.name in LOSSES:
        place = LOSSES[operation.name]
        arg = operation.args[place] if place < len(operation.args) else None
        if isinstance(arg, Ref) and arg.slot in reach and refs[0].slot in learned:
            return arg.slot, refs[0].slot
        return None
    if operation.name in ("sub", "rsub") and len(refs) == 2 and not operation.module:
        for mine, other in ((refs[0].slot, refs[1].slot), (refs[1].slot, refs[0].slot)):
            if mine in reach and other in learned and other not in reach:
                return mine, other
    return None


def _depends_on_parameters(tape: Tape) -> set[int]:
    found = {slot.index for slot in tape.parameters}
    for operation in tape.operations:
        if operation.in_backward is None and not found.isdisjoint(operation.reads):
            found.update((*operation.makes, *operation.writes))
    return found


def find_unknown_parameters(tape: Tape, known: set[str]) -> dict[str, str]:
    """Parameters on the tape that a module reads, that got a gradient, and that no model lists: name -> place."""
    got = {slot for call in tape.backwards for _, slot, _ in call.contributions} - set(tape.stepped)
    wanted = {s.index: s.name for s in tape.parameters if s.index in got and s.name not in known}
    found: dict[str, str] = {}
    for operation in tape.operations if wanted else ():
        if operation.phase == "forward":
            for slot in wanted.keys() & set(operation.reads):
                name = wanted.pop(slot)
                if operation.module:
                    found[name] = operation.module
    return found


def reaches_unread(tape: Tape, known: set[str]) -> bool:
    """Whether a gradient reached a leaf of no known name that no operation of the step reads."""
    calls = [call for call in tape.backwards if call.accumulates]
    got = {slot for call in calls for _, slot, _ in call.contributions if tape.slots[slot].name not in known}
    forward = (op for op in tape.operations if op.phase == "forward" and op.in_backward is None)
    return bool(got) and bool(got.difference(*(op.reads for op in forward)))
