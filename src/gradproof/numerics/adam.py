"""The direction of Adam's step, once for all who hold an update against the textbook's; NumPy's arrays or tensors."""

from __future__ import annotations

from typing import Any


def adam_direction(
    m: Any,
    v: Any,
    step: Any,
    betas: tuple[float, float],
    eps: float,
    corrected: tuple[bool, bool] = (True, True),
    eps_inside: bool = False,
    rooted: bool = True,
) -> Any:
    """m / (√v + ε) from the averages after a step, which is counted from 1; or with one thing wrong.

    >>> round(adam_direction(0.1, 0.001, 1, (0.9, 0.999), 0.0), 6)
    1.0
    """
    first = m / (1 - betas[0] ** step) if corrected[0] else m
    second = v / (1 - betas[1] ** step) if corrected[1] else v
    root = (second + eps) ** 0.5 if eps_inside else (second**0.5 if rooted else second) + eps
    return first / root
