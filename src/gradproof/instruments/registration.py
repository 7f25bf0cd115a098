"""Does a map lie on its image? Every shift of one against the other at once, by the Fourier transform, and every turn.

What a mask marks looks different from what it does not: where the two belong together, they correlate most as they lie.

    best_fits(images, masks)    # of each sample: how well it fits as it lies, at best, and how it is moved then
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TURNS = {
    "mirrored along the width": lambda x: x.flip(-1),
    "mirrored along the height": lambda x: x.flip(-2),
    "turned by 180°": lambda x: x.flip(-1, -2),
    "transposed": lambda x: x.mT,
}


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
        for name, turn in TURNS.items() if height == width else list(TURNS.items())[:3]:
            found = float((x[row] * turn(m[row])).sum((-2, -1)).abs().max())
            if found >= fit.best:
                fit = Fit(fit.here, found, 0, 0, name)
        fits.append(fit)
    return fits


def centred(x: Tensor) -> Tensor:
    """Mean 0 and length 1 over height and width."""
    x = x - x.mean((-2, -1), keepdim=True)
    return x / x.square().sum((-2, -1), keepdim=True).sqrt().clamp(min=1e-12)
