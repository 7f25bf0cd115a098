"""By how much does a layer stretch the space around a sample? Its Jacobian's determinant, against what the layer says.

A normalising flow returns, beside what it makes of each sample, the logarithm of that determinant, and its loss adds
them up. The sample is moved along each of its features, and what the layer makes of it is measured.

    for stretch in find_stretches(evidence):
        stretch.said, stretch.measured      # a number a sample
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gradproof.instruments.evidence import Evidence
from gradproof.tape.operations import ModuleCall

WIDEST = 16  # features: each takes two replays
MOST = 8  # kinds of layers that are measured, one call of each
NUDGE = 1e-5  # of a feature; in float64
AGREES, ROUNDED = 1e-3, 1e-6  # of the number; and what differences leave of nothing


@dataclass(frozen=True)
class Stretch:
    """One layer's determinant: the logarithm that it returns for each sample, and the one that was measured."""

    call: ModuleCall
    slot: int  # of what it returns
    said: Tensor
    measured: Tensor

    @property
    def sign(self) -> int:
        """1 where it returns the logarithm, -1 where it returns that of the inverse, 0 where neither."""
        allowed = AGREES * self.measured.abs() + ROUNDED
        for sign in (1, -1):
            if bool(((self.said - sign * self.measured).abs() <= allowed).all()):
                return sign
        return 0


def find_stretches(evidence: Evidence) -> Iterator[Stretch]:
    """Of every kind of layer that returns a number for each sample beside what it makes of it; the innermost first."""
    seen: set[str] = set()
    for call in sorted(evidence.tape.modules, key=lambda call: call.last - call.first):
        slots = transformation(evidence, call)
        if slots is None or call.kind in seen or len(seen) >= MOST:
            continue
        seen.add(call.kind)
        source, image, number = slots
        measured = log_determinant(evidence, source, image)
        said = evidence.flow.values([number], dtype=torch.float64).get(number)
        if measured is not None and said is not None:
            yield Stretch(call, number, said.double().reshape(-1).expand(len(measured)), measured)


def transformation(evidence: Evidence, call: ModuleCall) -> tuple[int, int, int] | None:
    """(samples, what is made of them, a number for each), where a layer takes and returns just these."""
    makes = [slot for slot in call.outputs if evidence.slot(slot).dtype.is_floating_point]
    if len(makes) != 2:
        return None
    for source in call.inputs:
        shape = evidence.slot(source).shape
        if len(shape) != 2 or not 1 <= shape[1] <= WIDEST or shape[0] < 2:
            continue
        for image, number in (makes, makes[::-1]):
            fits = evidence.slot(number).shape in ((shape[0],), (shape[0], 1), (1,), ())
            if fits and evidence.slot(image).shape == shape and image != source:
                return source, image, number
    return None


def log_determinant(evidence: Evidence, source: int, image: int) -> Tensor | None:
    """Of each sample; None where it cannot be replayed, or a sample moves what is made of others."""
    flow = evidence.flow
    start = flow.values([source], dtype=torch.float64).get(source)
    if start is None:
        return None
    columns = []
    for feature in range(start.shape[1]):
        ends = []
        for way in (NUDGE, -NUDGE):
            moved = start.clone()
            moved[:, feature] += way
            ends.append(flow.values([image], {source: moved}, torch.float64).get(image))
        if ends[0] is None or ends[1] is None:
            return None
        columns.append((ends[0] - ends[1]) / (2 * NUDGE))
    return torch.linalg.slogdet(torch.stack(columns, -1)).logabsdet
