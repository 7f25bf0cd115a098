"""Tensors that are made of arrays outside PyTorch (torch.from_numpy): what they held, and whether they are one array.

Each torch.from_numpy gives a memory of its own to PyTorch, at the address of the array; a change that NumPy makes is
no operation of the step.
"""

from __future__ import annotations

import weakref
import zlib
from collections import Counter

import torch

from gradproof.tape.operations import OneArray, Tape
from gradproof.tape.tensors import storage_key

FEWEST = 6  # tensors that are put together
LARGEST = 1 << 22  # bytes of one
LOOKED_AT = 1 << 14  # bytes of it, evenly spread, where it has more


class Arrays:
    """What the memories made of arrays held when a step first read them."""

    def __init__(self) -> None:
        self.first_held: dict[int, int] = {}  # address of a storage -> what it held

    def note(self, tensor: torch.Tensor, key: int) -> None:
        if is_of_array(tensor):
            self.first_held.setdefault(key, content_of(tensor))

    def look(self, tape: Tape, operation: int, members: list[torch.Tensor]) -> None:
        """stack or cat of many tensors: are they one array under different names?"""
        if len(members) < FEWEST or not is_of_array(members[0]):
            return
        of_arrays = [tensor for tensor in members if is_of_array(tensor)]
        [(common, count)] = Counter(map(place_of, of_arrays)).most_common(1)
        same = {storage_key(tensor): tensor for tensor in of_arrays if place_of(tensor) == common}
        if len(same) < FEWEST or count < 0.9 * len(members):
            return  # one tensor that is repeated, or rows of one array
        member = next(iter(same.values()))
        now = content_of(member)
        changed = sum(self.first_held.get(key or 0, now) != now for key in same)
        tape.one_arrays[operation] = OneArray(count, len(members), changed, weakref.ref(member), now)


def is_of_array(tensor: torch.Tensor) -> bool:
    """Small, on the CPU, and of memory that is not PyTorch's own."""
    if tensor.device.type != "cpu" or storage_key(tensor) is None or tensor.numel() == 0:
        return False
    storage = tensor.untyped_storage()
    return not storage.resizable() and storage.nbytes() <= LARGEST


def place_of(tensor: torch.Tensor) -> tuple:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride()


def content_of(tensor: torch.Tensor) -> int:
    """A number for what the memory of a tensor holds."""
    held = torch.empty(0, dtype=torch.uint8, device="cpu").set_(tensor.untyped_storage()).numpy()
    step = len(held) // LOOKED_AT | 1  # odd: of numbers of several bytes, every byte has its turn
    return zlib.crc32(held[::step].tobytes())
