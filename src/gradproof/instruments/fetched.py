"""What the loaders handed out, and where on the tape it is: which file and row a sample of the step comes from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradproof.instruments.flow import Flow
from gradproof.instruments.rows import chain_behind

NUMBERS = 2048  # of a batch, as the probe keeps them


@dataclass(frozen=True)
class Fetched:
    """What a loader handed out last."""

    rows: tuple[int, ...]
    length: int  # of its data set
    samples: tuple[tuple[tuple[int, ...], Tensor], ...]  # shape and some numbers of each tensor
    line: str
    name: str = ""
    split: str = ""
    sources: tuple[str, ...] = ()
    places: tuple[tuple[int, int], ...] = ()


def slots_of(flow: Flow, fetched: Fetched) -> set[int]:
    """Where on the tape a loader's batch is: what networks and comparisons are given, and what that was made from."""
    ends = [*flow.inputs, *(c.target for c in flow.comparisons)]
    chains = list(dict.fromkeys(slot for end in ends for slot in chain_behind(flow, end)))
    shapes = {shape for shape, _ in fetched.samples}
    near = [slot for slot in chains if tuple(flow.tape.slots[slot].shape) in shapes]
    found = set()
    for slot, value in flow.values(near).items() if near else ():
        numbers = value.detach().reshape(-1)
        numbers = numbers[:: max(1, len(numbers) // NUMBERS)].double().cpu()
        if any(shape == tuple(value.shape) and torch.equal(kept, numbers) for shape, kept in fetched.samples):
            found.add(slot)
    return found
