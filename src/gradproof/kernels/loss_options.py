"""What a cross-entropy may be asked for besides logits and targets, and the check of all its inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradproof.errors import UserError

REDUCTIONS = ("mean", "sum", "none")
LOGIT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class LossOptions:
    """The loss of a valid position with target y, class weights w (1 without) and ε = label_smoothing:

    (1 - ε) w[y] (lse - x[y])  +  ε/V Σ w[k] (lse - x[k])  +  z_loss lse²

    of x = softcap tanh(logits / softcap), or of the logits themselves.

    The mean divides by the sum of w[y] over the valid positions, which without weights is their number.
    """

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float = 0.0  # 0: none
    reduction: str = "mean"

    def __post_init__(self) -> None:
        if self.reduction not in REDUCTIONS:
            raise UserError(f"reduction is {self.reduction!r}; it must be one of {', '.join(REDUCTIONS)}")
        if not 0 <= self.label_smoothing <= 1:
            raise UserError(f"label_smoothing is {self.label_smoothing}; it must be between 0 and 1")
        if not self.softcap >= 0:
            raise UserError(f"softcap is {self.softcap}; it must be positive")


def check_loss_inputs(
    logits_shape: torch.Size, dtype: torch.dtype, targets: Tensor, mask: Tensor | None, weight: Tensor | None
) -> None:
    """Raise for what can be seen without reading a value; logits_shape is (..., V)."""
    if dtype not in LOGIT_DTYPES:
        names = ", ".join(str(known).removeprefix("torch.") for known in LOGIT_DTYPES)
        raise UserError(f"logits are {dtype}; cross_entropy takes {names}: convert them with logits.float()")
    if targets.dtype not in (torch.int64, torch.int32):
        raise UserError(f"targets are {targets.dtype}; they are class numbers, int64 or int32")
    if len(logits_shape) == 0 or logits_shape[-1] == 0:
        raise UserError(f"logits have shape {tuple(logits_shape)}; the last dimension is the vocabulary")
    if logits_shape[:-1] != targets.shape:
        raise UserError(
            f"logits have shape {tuple(logits_shape)} and targets {tuple(targets.shape)}; targets must have "
            f"shape {tuple(logits_shape[:-1])}, one class number for each row of logits"
        )
    if mask is not None and mask.shape != targets.shape:
        raise UserError(
            f"mask has shape {tuple(mask.shape)}, targets {tuple(targets.shape)}; they must agree"
        )
    if weight is not None and weight.shape != logits_shape[-1:]:
        raise UserError(
            f"weight has shape {tuple(weight.shape)}; it needs one entry for each of the "
            f"{logits_shape[-1]} classes"
        )


def valid_positions(targets: Tensor, mask: Tensor | None, ignore_index: int) -> Tensor:
    """Where a target counts in the loss."""
    valid = targets != ignore_index
    return valid if mask is None else valid & mask.bool()


def check_targets_in_range(targets: Tensor, valid: Tensor, classes: int) -> None:
    """Raise for the first valid target that is no class, with its position and value. It reads: it waits."""
    outside = valid & ((targets < 0) | (targets >= classes))
    if not outside.any():
        return
    places = outside.nonzero()
    first = tuple(places[0].tolist())
    raise UserError(
        f"target {targets[first].item()} at position {first} is not one of the {classes} classes "
        f"0 to {classes - 1}; {len(places)} of {targets.numel()} targets are out of range. "
        "Positions that must not count need mask=False or ignore_index."
    )
