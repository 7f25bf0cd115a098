"""How much each module and operation enlarges what goes through it, while all is still finite.

gains = measure_gains(tape)
gains.odd_one                      # the block whose gain is furthest from that of its siblings
compare_gains(earlier, gains)      # the block whose gain has changed most since another step
measure_operation_gains(tape)      # the same, operation by operation, of the forward pass
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

import torch

from gradproof.tape.execute import CannotReplay
from gradproof.tape.operations import ModuleCall, Operation, Tape
from gradproof.tape.operators import is_view
from gradproof.tape.player import Player
from gradproof.tape.replay import forward_operations, replay_exactly


@dataclass(frozen=True)
class Gain:
    """|out| / |in| of one call of a module or operation, as root mean squares."""

    path: str
    kind: str
    call: int  # the n-th call of this module in the step: the time step of a recurrent cell
    forward: float
    backward: float  # |gradient at the input| / |gradient at the output|; NaN when no gradient passed
    line: str = ""
    number: int = -1  # of the call among all calls of the tape's modules

    def __str__(self) -> str:
        when = f" (call {self.call})" if self.call else ""
        back = "" if math.isnan(self.backward) else f", backward × {self.backward:.3g}"
        where = f", {self.line}" if self.line else ""
        return f"{self.path or self.kind}{when}: forward × {self.forward:.3g}{back}{where}"


@dataclass(frozen=True)
class Gains:
    """Every module's gain in one step, call by call."""

    modules: tuple[Gain, ...]

    @property
    def odd_one(self) -> Gain | None:
        """The module whose gain is furthest from its kind's median; normalisations only undo others."""
        candidates = [gain for gain in self.modules if "norm" not in gain.kind.lower()]
        return max(candidates, key=self._oddness, default=None)

    def _oddness(self, gain: Gain) -> float:
        siblings = [other for other in self.modules if other.kind == gain.kind]
        return sum(
            abs(_log(getattr(gain, way)) - median(_log(getattr(other, way)) for other in siblings))
            for way in ("forward", "backward")
        )

    def over_time(self, path: str) -> list[Gain]:
        """The calls of one module in order: a recurrent cell's gain by time step."""
        return [gain for gain in self.modules if gain.path == path]

    def __str__(self) -> str:
        odd = self.odd_one
        return f"gain furthest from its siblings: {odd}" if odd is not None else "no module was called"


@dataclass(frozen=True)
class GainChange:
    """The module whose gain changed most between two steps."""

    path: str
    way: str
    before: float
    after: float

    def __str__(self) -> str:
        return f"{self.way} gain of {self.path} went from {self.before:.3g} to {self.after:.3g}"


def measure_gains(tape: Tape) -> Gains:
    """Gains of all modules of a taped step, from one exact replay."""
    # (in, out or gradient, number of the call, slot) -> root mean square
    sizes: dict[tuple[str, int, int], float] = {}
    looks: dict[int, list] = {}
    for number, call in enumerate(tape.modules):
        looks.setdefault(call.first, []).append(_measure(sizes, "in", number, call.inputs))
        looks.setdefault(call.last, []).append(_measure(sizes, "out", number, call.outputs))
    for backward in tape.top_backwards:
        for at, slot, gradient in backward.received:
            looks.setdefault(at, []).append(_measure_gradient(sizes, slot, gradient))
    replay_exactly(tape, at=looks, compare=False)
    counts: Counter[str] = Counter()
    modules = []
    for number, call in enumerate(tape.modules):
        outputs = [tape.slots[slot] for slot in call.outputs]
        if not any(slot.shape and slot.followed for slot in outputs):
            continue  # a loss, or a validation between two steps
        gain = _module_gain(call, number, counts[call.path], sizes)
        counts[call.path] += 1
        if gain is not None:
            modules.append(gain)
    return Gains(tuple(modules))


def measure_operation_gains(tape: Tape) -> list[Gain]:
    """Gains of the operations of the forward pass, furthest from 1 first."""
    found: list[Gain] = []

    def after(player: Player, operation: Operation) -> None:
        gain = _operation_gain(tape, player, operation)
        if gain is not None:
            found.append(gain)

    player = Player(tape, None, None)
    player.play(forward_operations(tape, None), after=after)
    return sorted(found, key=lambda gain: -abs(_log(gain.forward)))


def compare_gains(before: Gains, after: Gains) -> GainChange | None:
    """Where the gain changed most: the place to look at when something explodes or dies out."""
    old = {(gain.path, gain.call): gain for gain in before.modules}
    changes = [
        GainChange(gain.path, way, getattr(old[key], way), getattr(gain, way))
        for gain in after.modules
        if "norm" not in gain.kind.lower()
        if (key := (gain.path, gain.call)) in old
        for way in ("forward", "backward")
    ]
    return max(changes, key=lambda change: abs(_log(change.after) - _log(change.before)), default=None)


def _measure(sizes: dict, what: str, number: int, slots: Iterable[int]):
    def look(player: Player) -> None:
        for slot in slots:
            try:
                sizes[(what, number, slot)] = _rms(player.value(slot))
            except CannotReplay:
                continue

    return look


def _measure_gradient(sizes: dict, slot: int, gradient: int):
    def look(player: Player) -> None:
        try:
            sizes[("gradient", 0, slot)] = _rms(player.value(gradient))
        except CannotReplay:
            return

    return look


def _module_gain(call: ModuleCall, number: int, nth: int, sizes: dict) -> Gain | None:
    size_in = max((sizes.get(("in", number, slot), 0.0) for slot in call.inputs), default=0.0)
    size_out = max((sizes.get(("out", number, slot), 0.0) for slot in call.outputs), default=0.0)
    if not size_in or not size_out:
        return None
    gradient_in = max((sizes.get(("gradient", 0, slot), 0.0) for slot in call.inputs), default=0.0)
    gradient_out = max((sizes.get(("gradient", 0, slot), 0.0) for slot in call.outputs), default=0.0)
    backward = gradient_in / gradient_out if gradient_in and gradient_out else math.nan
    return Gain(call.path, call.kind, nth, size_out / size_in, backward, number=number)


def _operation_gain(tape: Tape, player: Player, operation: Operation) -> Gain | None:
    if operation.phase != "forward" or is_view(operation.func):
        return None
    values = [player.env[s] for s in operation.reads if s in player.env and tape.slots[s].kind != "parameter"]
    made = [player.env[slot] for slot in operation.makes if slot in player.env]
    sizes_in = [size for value in values if value.dim() and (size := _rms(value)) > 0]
    sizes_out = [size for value in made if value.dim() and (size := _rms(value)) > 0]
    if not sizes_in or not sizes_out:
        return None
    gain = sizes_out[0] / max(sizes_in)
    return Gain(operation.module, operation.name, 0, gain, math.nan, str(operation.line))


def _rms(value: torch.Tensor) -> float:
    if not value.is_floating_point() or value.numel() == 0:
        return 0.0
    entries = value.coalesce().values() if value.is_sparse else value
    size = float(torch.linalg.vector_norm(entries, dtype=torch.float64)) / math.sqrt(value.numel())
    return size if math.isfinite(size) else 0.0


def _log(value: float) -> float:
    return math.log(value) if value > 0 and math.isfinite(value) else 0.0
