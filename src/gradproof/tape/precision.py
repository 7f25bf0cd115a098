"""How many digits of a forward pass are left, operation by operation, and where most are lost."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from gradproof.tape.operations import Line, Operation, Tape
from gradproof.tape.pattern import relative_error
from gradproof.tape.player import Player
from gradproof.tape.replay import forward_operations


@dataclass(frozen=True)
class DigitLoss:
    """One operation: digits right in its arguments and in its result."""

    operator: str
    module: str
    line: Line | None
    before: float
    after: float

    @property
    def lost(self) -> float:
        return self.before - self.after

    def __str__(self) -> str:
        where = f" in {self.module}" if self.module else ""
        return f"{self.operator}{where} keeps {self.after:.1f} of {self.before:.1f} digits, {self.line}"


def find_digit_losses(tape: Tape, most: int = 5) -> list[DigitLoss]:
    """The operations of the forward that lose most digits against float64, worst first."""
    own, precise = Player(tape, None, None), Player(tape, torch.float64, None)
    errors: dict[int, float] = {}
    found: list[DigitLoss] = []

    def after(player: Player, operation: Operation) -> None:
        precise.step(operation)
        known = [errors[slot] for slot in operation.reads if slot in errors]
        for slot in operation.makes:
            if (
                not tape.slots[slot].dtype.is_floating_point
                or slot not in player.env
                or slot not in precise.env
            ):
                continue
            errors[slot] = _error(player.env[slot], precise.env[slot])
            rounding = torch.finfo(tape.slots[slot].dtype).eps  # one rounding is no loss
            before, now = _digits(max([rounding, *known])), _digits(errors[slot])
            if before - now > 0.5:
                found.append(DigitLoss(operation.name, operation.module, operation.line, before, now))

    operations = forward_operations(tape, None)
    own.play(operations, after=after)
    return sorted(found, key=lambda loss: -loss.lost)[:most]


def _error(mine: torch.Tensor, truth: torch.Tensor) -> float:
    error = relative_error(mine, truth)
    return error if error == error else math.inf


def _digits(error: float) -> float:
    return 16.0 if error <= 1e-16 else max(0.0, -math.log10(min(error, 1.0)))
