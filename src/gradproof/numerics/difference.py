"""The package's one comparison of two tensors: the worst place, both values there, and how many disagree."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradproof.errors import UserError


@dataclass(frozen=True)
class Difference:
    """Where two tensors are farthest apart, measured against what was allowed there."""

    place: tuple[int, ...]  # of the worst entry; () when there are no entries
    value: complex
    reference: complex
    error: float  # |value - reference| at the worst place; inf where either is NaN
    allowed: float  # at the worst place
    disagree: int  # entries whose error is over what is allowed
    total: int
    nans: int  # entries that are NaN in either tensor
    largest: float  # largest finite |reference|: the scale of the tensor

    @property
    def ok(self) -> bool:
        return self.disagree == 0

    @property
    def relative(self) -> float:
        """The worst entry's error relative to its own reference."""
        return _ratio(self.error, abs(self.reference))

    @property
    def relative_to_largest(self) -> float:
        """The worst entry's error relative to the largest reference entry."""
        return _ratio(self.error, self.largest)

    def __str__(self) -> str:
        if not self.total:
            return "both are empty"
        nans = f", {self.nans} NaN" if self.nans else ""
        return (
            f"{self.disagree} of {self.total} entries disagree{nans}; the worst is at {self.place}:\n"
            f"  value          {_number(self.value)}\n"
            f"  reference      {_number(self.reference)}\n"
            f"  error          {self.error:.3g}, {self.allowed:.3g} allowed\n"
            f"  relative error {self.relative:.3g}"
        )


def difference(
    value: Tensor, reference: Tensor, *, relative: float = 0.0, absolute: float | Tensor = 0.0
) -> Difference:
    """Compare in float64, allowing `absolute + relative * |reference|` at each entry; NaN is never near.

    `absolute` may be a tensor that broadcasts, e.g. 2e-6 of each row's largest entry:
    `difference(dx, exact, absolute=2e-6 * exact.abs().amax(-1, keepdim=True))`.
    """
    if value.shape != reference.shape:
        raise UserError(f"cannot compare shapes {tuple(value.shape)} and {tuple(reference.shape)}")
    wide = torch.complex128 if value.is_complex() or reference.is_complex() else torch.float64
    value = value.detach().to(reference.device, wide)
    reference = reference.detach().to(wide)
    if not value.numel():
        return Difference((), 0.0, 0.0, 0.0, 0.0, 0, 0, 0, 0.0)
    nan = value.isnan() | reference.isnan()
    error = (value - reference).abs()
    error = torch.where(value == reference, 0.0, error)  # inf - inf is NaN, yet they agree
    error = error.nan_to_num(nan=torch.inf, posinf=torch.inf)
    size = reference.abs()
    allowed = (absolute + relative * size).nan_to_num(nan=0.0, posinf=0.0).expand_as(error)
    # how far over; where nothing is allowed, any error is infinitely far, and the largest error is the worst
    over = torch.where(error <= allowed, error / allowed.clamp_min(1e-300), error / allowed)
    worst = _index_of_largest(over, error)
    finite = torch.where(size.isfinite(), size, 0.0)
    place = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), error.shape))
    return Difference(
        place=place,
        value=value[place].item(),
        reference=reference[place].item(),
        error=error[place].item(),
        allowed=allowed[place].item(),
        disagree=int((~(error <= allowed)).sum()),
        total=error.numel(),
        nans=int(nan.sum()),
        largest=finite.max().item(),
    )


def _index_of_largest(over: Tensor, error: Tensor) -> int:
    """The entry with the largest `over`; among equals the one with the largest error."""
    tied = over == over.max()
    return int(torch.where(tied, error, -1.0).argmax())


def _ratio(part: float, whole: float) -> float:
    if part == 0:
        return 0.0
    return part / whole if whole else float("inf")


def _number(x: complex) -> str:
    return f"{x:.9g}"
