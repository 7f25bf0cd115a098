"""What a loop hands in itself, for training code that has neither modules nor optimizers to listen to."""

from __future__ import annotations

from typing import Any

import torch

from gradproof.probes import tensors as measuring
from gradproof.probes.guard import guarded
from gradproof.probes.session import Session


@guarded
def end_step(session: Session, values: dict[str, Any]) -> None:
    """A row, and with it the end of the step."""
    session.current.row.update({key: _number(value) for key, value in values.items()})
    session.close_step()


@guarded
def note(session: Session, values: dict[str, float]) -> None:
    """Columns of the step that is under way."""
    session.current.row.update(values)


@guarded
@torch.no_grad()
def measure_tensors(session: Session, kind: str, named: dict[str, Any]) -> None:
    """Torch tensors, NumPy arrays, anything that torch.as_tensor takes."""
    session.current.measure(kind, {n: measuring.local(torch.as_tensor(t)) for n, t in named.items()})


def _number(value: Any) -> Any:
    return value if isinstance(value, (int, str)) else float(value)
