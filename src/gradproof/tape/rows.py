"""From a bad element back to the batch: which rows, positions and tokens it depends on."""

from __future__ import annotations

import torch

from gradproof.tape.execute import CannotReplay
from gradproof.tape.halving import MOST_ROWS, find_bad_rows
from gradproof.tape.operations import Operation, Tape
from gradproof.tape.pattern import ranges
from gradproof.tape.player import Player


def trace_rows(tape: Tape, operation: Operation, origin: Operation, slot: int, bad: torch.Tensor) -> str:
    """The batch rows behind a bad result: by following it back, by its shape, else by replacing rows."""
    try:
        found = _trace(tape, origin, bad)
    except (CannotReplay, RuntimeError, IndexError):
        found = ""
    return found or _by_shape(tape, bad) or _by_halving(tape, operation, slot)


def _by_halving(tape: Tape, operation: Operation, slot: int) -> str:
    try:
        rows, leaves = find_bad_rows(tape, operation, slot)
    except (CannotReplay, RuntimeError, IndexError):
        return ""
    if not rows:
        return ""
    largest = max(leaves, key=lambda leaf: len(leaf.shape))
    return f"batch row {ranges(rows)} of {largest}: with good rows in its place the result is finite"


def _by_shape(tape: Tape, bad: torch.Tensor) -> str:
    """The place of the bad elements, where their shape is the batch's."""
    for slot in tape.inputs:
        if not slot.shape or slot.shape[0] < 2 or bad.dim() == 0:
            continue
        batch, time = slot.shape[0], slot.shape[1] if len(slot.shape) > 1 else 1
        first = bad.reshape(bad.shape[0], -1).any(1).nonzero().flatten().tolist()
        if bad.shape[0] == batch and len(first) <= MOST_ROWS and len(first) < batch:
            text = f"batch row {ranges(first)}"
            if bad.dim() > 1 and bad.shape[1] == time > 1:
                at = bad[first[0]].reshape(time, -1).any(1).nonzero().flatten().tolist()
                text += f", position {ranges(at)}" if len(at) < time else ""
            return text
        if bad.shape[0] == batch * time and time > 1 and len(first) <= MOST_ROWS:
            rows = sorted({index // time for index in first})
            at = sorted({index % time for index in first})
            return f"batch row {ranges(rows)}, position {ranges(at)}"
    return ""


def _trace(tape: Tape, origin: Operation, bad: torch.Tensor) -> str:
    sources: dict[
        int, tuple[torch.Tensor, int | None]
    ] = {}  # slot -> (tensor to differentiate by, its indices' slot)
    player = Player(tape, None, None, autograd=True, follow_cuts=True)
    for slot in tape.inputs:
        if slot.dtype.is_floating_point and slot.shape:
            player.env[slot.index] = player.value(slot.index).detach().requires_grad_()
            sources[slot.index] = (player.env[slot.index], None)

    def after(player: Player, operation: Operation) -> None:
        if operation.name == "embedding" and operation.makes[0] in player.env:
            value = player.env[operation.makes[0]]
            if value.requires_grad:
                sources[operation.makes[0]] = (value, operation.reads[1])

    forward = [op for op in tape.operations[: origin.index] if op.in_backward is None]
    with player.saving.hooks():
        player.play(forward, after=after, keep_for=origin)
        operands = [player.value(slot) for slot in origin.reads if tape.slots[slot].dtype.is_floating_point]
        chosen = [(o, _elements(o, bad)) for o in operands if o.requires_grad]
        total = sum(
            (o[mask].sum() for o, mask in chosen if mask is not None), torch.zeros((), dtype=torch.float64)
        )
        if not total.requires_grad or not sources:
            return ""
        found = torch.autograd.grad(total, [tensor for tensor, _ in sources.values()], allow_unused=True)
    for (index, (_, indices)), gradient in zip(sources.items(), found, strict=True):
        text = _describe(tape, index, indices, gradient) if gradient is not None else ""
        if text:
            return text
    return ""


def _elements(operand: torch.Tensor, bad: torch.Tensor) -> torch.Tensor | None:
    """Which elements of an operand belong to the bad results: the same ones, or the same leading rows."""
    if operand.shape == bad.shape:
        return bad
    if operand.dim() and bad.dim() and operand.shape[0] == bad.shape[0]:
        keep = 0
        while keep < min(operand.dim(), bad.dim()) and operand.shape[keep] == bad.shape[keep]:
            keep += 1
        rows = bad.reshape(*bad.shape[:keep], -1).any(-1)
        return rows.reshape(*rows.shape, *([1] * (operand.dim() - keep))).expand(operand.shape)
    if bad.dim() == 0 or bad.numel() == 1:
        return torch.ones_like(operand, dtype=torch.bool)
    try:
        return operand.new_ones(operand.shape, dtype=torch.bool) & bad.any().reshape(())
    except RuntimeError:
        return None


def _describe(tape: Tape, slot: int, indices: int | None, gradient: torch.Tensor) -> str:
    touched = gradient != 0  # NaN counts
    if gradient.dim() == 0 or not bool(touched.any()):
        return ""
    rows = touched.reshape(touched.shape[0], -1).any(1).nonzero().flatten().tolist()
    if len(rows) >= touched.shape[0] or len(rows) > MOST_ROWS:
        return ""
    if indices is None:
        return f"batch row {ranges(rows)} of {tape.slots[slot]}"
    text = f"batch row {ranges(rows)} of {tape.slots[indices]}"
    if touched.dim() >= 3:
        positions = touched[rows[0]].reshape(touched.shape[1], -1).any(1).nonzero().flatten().tolist()
        text += f", positions {ranges(positions)}" if len(positions) < touched.shape[1] else ""
        tokens = _tokens(tape, indices, rows[0], positions)
        text += f", token {tokens}" if tokens else ""
    return text


def _tokens(tape: Tape, indices: int, row: int, positions: list[int]) -> str:
    if len(positions) > MOST_ROWS or tape.slots[indices].made_by is not None:
        return ""
    return ", ".join(str(int(tape.leaf_value(indices)[row, position])) for position in positions)
