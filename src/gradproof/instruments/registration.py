"""Does a map lie on its image? Every shift of one against the other at once, by the Fourier transform, and every turn.

What a mask marks looks different from what it does not: where the two belong together, they correlate most as they lie.

    best_fits(images, masks)    # of each sample: how well it fits as it lies, at best, and how it is moved then
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

Turn = Callable[[Tensor], Tensor]
MIRRORS: dict[str, Turn] = {
    "mirrored along the width": lambda x: x.flip(-1),
    "mirrored along the height": lambda x: x.flip(-2),
    "turned by 180°": lambda x: x.flip(-1, -2),
}
QUARTERS: dict[str, Turn] = {  # of squares, or from one height and width to the other
    "turned by 90°": lambda x: x.rot90(1, (-2, -1)),
    "turned by 270°": lambda x: x.rot90(3, (-2, -1)),
    "transposed": lambda x: x.mT,
}
FAR = 64  # shifts that are tried


def turn_between(then: Tensor, now: Tensor) -> tuple[str, Turn] | None:
    """What makes one of the other, exactly: a mirror, a quarter turn or a shift along one axis."""
    turns = list((MIRRORS | QUARTERS).items()) if same_numbers(then, now) else []
    for axis, side in ((-1, "width"), (-2, "height")) if turns else ():
        shifts = range(1, min(then.shape[axis], FAR))
        turns += [
            (f"shifted by {n} along the {side}", partial(torch.roll, shifts=n, dims=axis)) for n in shifts
        ]
    return next(((name, turn) for name, turn in turns if torch.equal(turn(then), now)), None)


def same_numbers(one: Tensor, other: Tensor) -> bool:
    """In whatever order."""
    pair = [side.flatten().double().sort().values for side in (one, other)]
    return torch.equal(*pair)


@dataclass(frozen=True)
class Fit:
    """How well a map fits its image as it lies, and how well if it is moved."""

    here: float
    best: float
    down: int
    right: int
    turned: str = ""

    @property
    def moved(self) -> str:
        return self.turned or f"shifted by {self.down} and {self.right}"


def best_fits(images: Tensor, masks: Tensor) -> list[Fit]:
    """Of (B, C, H, W) and (B, H, W): by the channel that knows most of the mask."""
    height, width = masks.shape[-2:]
    x, m = centred(images.double()), centred(masks.double())[:, None]
    shifted = torch.fft.irfft2(torch.fft.rfft2(x) * torch.fft.rfft2(m).conj(), s=(height, width))
    shifted = shifted.abs().amax(1)
    best, at = shifted.flatten(1).max(1)
    fits = []
    for row in range(len(masks)):
        down, right = divmod(int(at[row]), width)
        down, right = (down + height // 2) % height - height // 2, (right + width // 2) % width - width // 2
        fit = Fit(float(shifted[row, 0, 0]), float(best[row]), down, right)
        square = {"transposed": QUARTERS["transposed"]} if height == width else {}
        for name, turn in (MIRRORS | square).items():
            found = float((x[row] * turn(m[row])).sum((-2, -1)).abs().max())
            if found >= fit.best:
                fit = Fit(fit.here, found, 0, 0, name)
        fits.append(fit)
    return fits


def centred(x: Tensor) -> Tensor:
    """Mean 0 and length 1 over height and width."""
    x = x - x.mean((-2, -1), keepdim=True)
    return x / x.square().sum((-2, -1), keepdim=True).sqrt().clamp(min=1e-12)
