"""Keeps addresses from being used twice: what was known by one is not mistaken for what comes after it."""

from __future__ import annotations

from typing import Any

import torch


class Pins:
    """The content of what is pinned goes when the training lets go of it: only the address remains, a few bytes.

    >>> pins, known = Pins(), torch.zeros(3)
    >>> address = known._cdata
    >>> pins.tensor(known)
    >>> del known
    >>> address in [torch.zeros(3)._cdata for _ in range(9)]
    False
    """

    # no object for each storage: thousands of them would be looked through by Python's garbage collector
    def __init__(self) -> None:
        self._tensors: list[object] = []
        self._storages: list[Any] = []  # numbers
        # looked up now: when Python ends, torch may be gone before this is
        self._free = torch.UntypedStorage._free_weak_ref

    def tensor(self, tensor: torch.Tensor) -> None:
        self._tensors.append(torch._C._WeakTensorRef(tensor))  # type: ignore[attr-defined]

    def storage(self, storage: torch.UntypedStorage) -> None:
        self._storages.append(storage._weak_ref())

    def clear(self) -> None:
        self._tensors.clear()
        while self._storages:
            self._free(self._storages.pop())

    __del__ = clear
