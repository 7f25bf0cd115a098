"""Which way does it read? Neighbours in a text, a series or a picture know of each other; strangers do not.

A table that was viewed where it should have been transposed has the right shape, and neighbours where strangers belong.
The numbers still know: each is compared with the one that follows it in memory, over all samples of the batch.

    ties(batch, 1)                        # how much each number of a sample knows of the next one, from -1 to 1
    another_order(batch)                  # the shape that the numbers of a sample were in before they were viewed
    text_runs_along_the_batch(tokens)     # bits that neighbours of other rows, and of the same row, know of each other
"""

from __future__ import annotations

import math
from itertools import permutations

import torch
from torch import Tensor

FEWEST_SAMPLES = 12  # of fewer, strangers are alike by chance
TIED = 0.5  # neighbours of a series or a picture
APART = 0.35  # less, where one row has ended and another begins
UNBROKEN = 0.8  # of what neighbours inside of rows know: where a row has really ended, it is little
VARIES = 1e-6  # of the largest deviation: below, what varies is rounding
CHANNELS, SIDE = 4, 8  # of a picture: at most so many colours, at least so many pixels
KNOWN = 20.0  # standard errors of a correlation: one of a picture stands for many that are alike
FAR = 3.0  # times what pixels know of those that are said to be below them
MOST_NUMBERS = 1 << 22  # of a batch: enough of its samples are taken
SHUFFLES = 16  # to know a mean and, roughly, a deviation: SURE leaves room
SURE = 5.0  # standard deviations of what shuffled tokens know of each other
GOES_ON = 2.5  # deviations of one row that is shuffled: six chances in a thousand, on top of what SURE asks
BITS = 0.25  # letters of a text know 1.3 of the next one, words more
TIMES = 3.0  # more than along the row that the network reads
FEWEST_PAIRS = 200  # of tokens


def ties(batch: Tensor, lag: int) -> Tensor:
    """Of each number of a sample, the correlation with the one `lag` further on in memory; NaN if it never varies."""
    flat = batch.reshape(len(batch), -1).double()
    flat = flat - flat.mean(0)
    size = flat.square().mean(0).sqrt()
    flat = flat / size.where(size > VARIES * size.max().clamp(min=1e-30), torch.nan)
    return (flat[:, lag:] * flat[:, :-lag]).mean(0)


def another_order(batch: Tensor) -> tuple[tuple[int, ...], float, float] | None:
    """(the shape that the samples were in, how tied the ends of rows are as they lie, and as they lay) if it shows.

    Rows that go on in the next row, and break off where rows of the same axes in another order would end. What was
    viewed may have been turned since: channels first, or last.
    """
    batch = batch[: max(1, MOST_NUMBERS // max(1, batch[:1].numel()))].squeeze()
    if len(batch) < FEWEST_SAMPLES or not 3 <= batch.dim() <= 4 or not batch.is_floating_point():
        return None
    turned = (batch, batch.movedim(1, -1), batch.movedim(-1, 1))
    found = next((found for each in turned if (found := _another_order(each)) is not None), None)
    return found or _viewed_picture(batch)


def _viewed_picture(batch: Tensor) -> tuple[tuple[int, ...], float, float] | None:
    """Pictures whose channels lay last, viewed as if they lay first: however noisy they are, a pixel knows of the pixel
    beside it and of the one below, and here of those that would be there if the channels lay last."""
    if batch.dim() != 4 or not 2 <= batch.shape[1] <= CHANNELS or min(batch.shape[2:]) < SIDE:
        return None
    channels, height, width = batch.shape[1:]
    # as they lay, twice; and below, as they lie
    beside, below, viewed = (_known_at(batch, lag) for lag in (channels, width * channels, width))
    error = 1 / math.sqrt(len(batch) * channels * height * width)
    if min(beside, below) > max(KNOWN * error, FAR * abs(viewed)):
        return (height, width, channels), min(beside, below), viewed
    return None


def _known_at(batch: Tensor, lag: int) -> float:
    tied = ties(batch, lag)
    tied = tied[tied.isfinite()]
    return float(tied.mean()) if len(tied) else 0.0


def _another_order(batch: Tensor) -> tuple[tuple[int, ...], float, float] | None:
    shape = tuple(batch.shape[1:])
    next_ones = ties(batch, 1)
    for before in dict.fromkeys(permutations(shape)):
        if before == shape:
            continue
        *_, row, side_by_side = before
        found = _compare(next_ones, shape[-1], side_by_side, 1)
        if found is None and side_by_side < shape[-1]:
            # features or channels that lie side by side: the next number of the same one is that many further on
            found = _compare(
                ties(batch, side_by_side), shape[-1], row * side_by_side, side_by_side, next_ones
            )
        if found is not None:
            return before, *found
    return None


def _compare(
    tied: Tensor, length: int, other: int, lag: int, else_tied: Tensor | None = None
) -> tuple[float, float] | None:
    """How tied numbers are over the ends of rows of one length, and where rows of the other length would end.

    Where no such row ends within a sample, `else_tied` is what must be less.
    """
    first = torch.arange(len(tied), device=tied.device)
    ends = first // length != (first + lag) // length
    breaks = first // other != (first + lag) // other
    whole = tied.isfinite()
    inside, over, at = (tied[whole & chosen] for chosen in (~ends & ~breaks, ends & ~breaks, breaks))
    if len(at) == 0 and else_tied is not None:
        at = else_tied[else_tied.isfinite()]
    if min(len(inside), len(over), len(at)) == 0:
        return None
    within, over_ends, at_breaks = (float(part.mean()) for part in (inside, over, at))
    if within >= TIED and over_ends >= max(TIED, UNBROKEN * within) and at_breaks <= over_ends - APART:
        return over_ends, at_breaks
    return None


def text_runs_along_the_batch(tokens: Tensor) -> tuple[float, float] | None:
    """Of (rows, positions): bits that a token knows of the one in the next row, and of the one behind it, if the text
    runs from row to row and goes on from the last row to the first at the next position."""
    down = known(tokens[:-1].flatten(), tokens[1:].flatten())
    along = known(tokens[:, :-1].flatten(), tokens[:, 1:].flatten())
    if down is None or along is None or down[1] < SURE or down[0] < BITS:
        return None
    if down[0] < TIMES * along[0] or not _goes_on(tokens):
        return None
    return down[0], along[0]


def known(first: Tensor, second: Tensor) -> tuple[float, float] | None:
    """Bits that tokens know of those beside them, more than of any others, and in how many standard deviations.

    Equal ones are left out: copies of one row, or rows that begin alike, are no text.
    """
    different = first != second
    first, second = first[different], second[different]
    if len(first) < FEWEST_PAIRS:
        return None
    generator = torch.Generator().manual_seed(0)
    found = _shared_bits(first, second)
    others = torch.tensor(
        [
            _shared_bits(first, second[torch.randperm(len(second), generator=generator)])
            for _ in range(SHUFFLES)
        ]
    )
    gain = found - float(others.mean())
    return gain, gain / max(float(others.std()), 1e-9)


def _shared_bits(first: Tensor, second: Tensor) -> float:
    """Mutual information; what shuffled tokens share only because they are few is taken off by who asks."""
    pairs = first.long() * (int(second.max()) + 1) + second.long()
    return _entropy(first) + _entropy(second) - _entropy(pairs)


def _entropy(values: Tensor) -> float:
    _, counts = torch.unique(values, return_counts=True)
    shares = counts.double() / counts.sum()
    return float(-(shares * shares.log2()).sum())


def _goes_on(tokens: Tensor) -> bool:
    """Whether the last row is followed by the first one at the next position, as rows follow each other."""
    size = int(tokens.max()) + 1
    values, counts = torch.unique(
        tokens[:-1].flatten().long() * size + tokens[1:].flatten().long(), return_counts=True
    )
    seen = dict(zip(values.tolist(), counts.tolist(), strict=True))

    def likeness(first: Tensor, second: Tensor) -> float:
        pairs = first.long() * size + second.long()
        return sum(math.log1p(seen.get(pair, 0)) for pair in pairs.tolist()) / len(pairs)

    last, first = tokens[-1, :-1], tokens[0, 1:]
    generator = torch.Generator().manual_seed(0)
    others = torch.tensor(
        [likeness(last, first[torch.randperm(len(first), generator=generator)]) for _ in range(64)]
    )
    return likeness(last, first) > float(others.mean()) + GOES_ON * float(others.std())
