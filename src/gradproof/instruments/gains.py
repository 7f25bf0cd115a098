"""The gain of each module at a taped step, as plain numbers for the run: their history says where something grew."""

from __future__ import annotations

import math
from statistics import fmean
from typing import Any

from gradproof.tape.gain import Gain, measure_gains
from gradproof.tape.operations import Tape

MOST_MODULES = 400  # of a very deep model the first ones: what a run keeps of a step stays small
TIMES = 8  # places along the calls of a recurrent module


def gains_by_module(tape: Tape) -> dict[str, dict[str, Any]]:
    """Path -> forward and backward gain, over all calls of a module; of one that is called often, also along them."""
    calls: dict[str, list[Gain]] = {}
    for gain in measure_gains(tape).modules:
        if gain.path and "norm" not in gain.kind.lower():  # normalisations only undo what others do
            calls.setdefault(gain.path, []).append(gain)
    found: dict[str, dict[str, Any]] = {}
    for path, gains in list(calls.items())[:MOST_MODULES]:
        found[path] = {
            way: _typical([getattr(gain, way) for gain in gains]) for way in ("forward", "backward")
        }
        if len(gains) >= TIMES:
            places = [round(i * (len(gains) - 1) / (TIMES - 1)) for i in range(TIMES)]
            found[path]["along"] = [_rounded(gains[place].forward) for place in places]
    return found


def _typical(gains: list[float]) -> float | None:
    """The geometric mean of the gains that are known."""
    logs = [math.log(gain) for gain in gains if gain > 0 and math.isfinite(gain)]
    return _rounded(math.exp(fmean(logs))) if logs else None


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
