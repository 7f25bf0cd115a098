"""Sees a script change its parameters, operation by operation, from the end of a backward to the next one.

It is there for a few updates only: at the start, to learn how many operations an update takes and at which lines, and
around steps that are taped, whose end is the last of those operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from gradproof.tape.operators import written_arguments
from gradproof.tape.tensors import storage_key, tensors_in


@dataclass(frozen=True)
class Touch:
    """An operation that writes into a parameter, or makes something of its shape of it."""

    tensor: int  # address of the tensor that was written or made
    storage: int
    writes: bool
    fresh: bool = False  # in memory of its own


class UpdateWatch(TorchDispatchMode):
    """Counts the touches of parameters; `on_touch` hears of each, with its number."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init__(
        self, parameters: Iterable[torch.Tensor], on_touch: Callable[[UpdateWatch, Touch], None]
    ) -> None:
        super().__init__()
        self.touches: list[Touch] = []
        self.open = True  # whether it still listens
        self._on_touch = on_touch
        self._touched: set[int] = set()
        self._shapes: set[torch.Size] = set()
        self._pins: list[Any] = []  # as long as they live, no address is used twice
        for parameter in parameters:
            self._shapes.add(parameter.shape)
            self._remember(parameter)
        self._parameters = frozenset(self._touched)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.open and torch._C._current_autograd_node() is None:
            touch = self._find_touch(func, args, kwargs, result)
            if touch is not None:
                self.touches.append(touch)
                self._on_touch(self, touch)
        return result

    def _find_touch(self, func: Any, args: tuple, kwargs: dict, result: Any) -> Touch | None:
        places = written_arguments(func)
        for position, key in places:
            for tensor in tensors_in(args[position] if position < len(args) else kwargs.get(key)):
                if storage_key(tensor) in self._touched:
                    return Touch(tensor._cdata, storage_key(tensor) or 0, True)
        if places or not any(storage_key(t) in self._touched for t in tensors_in((args, kwargs))):
            return None
        for tensor in tensors_in(result):
            if tensor.shape in self._shapes:
                fresh = self._remember(tensor)
                return Touch(tensor._cdata, storage_key(tensor) or 0, False, fresh)
        return None

    def _remember(self, tensor: torch.Tensor) -> bool:
        key = storage_key(tensor)
        if key is None or key in self._touched:
            return False
        self._touched.add(key)
        self._pins.append(StorageWeakRef(tensor.untyped_storage()))
        return True

    def last_touch_of(self, parameters: Iterable[torch.Tensor]) -> int:
        """How many touches there were when the last of these had its new value; 0 where none was seen to get one."""
        tensors = {p._cdata for p in parameters}
        storages = {storage_key(p) for p in parameters}
        return max(
            (
                number
                for number, touch in enumerate(self.touches, 1)
                if ((touch.writes or touch.fresh) and touch.storage in storages) or touch.tensor in tensors
            ),
            default=0,
        )

    def is_written(self, touch: Touch) -> bool:
        """Whether it writes into a parameter, and not into something made of one."""
        return touch.writes and touch.storage in self._parameters

    def made_at(self, tensor: torch.Tensor) -> int:
        """The number of the touch that made a tensor, or the memory that it has been given; 0 where none did."""
        key = storage_key(tensor)
        numbers = (
            number
            for number, touch in enumerate(self.touches, 1)
            if touch.tensor == tensor._cdata or (touch.fresh and touch.storage == key)
        )
        return max(numbers, default=0)

    def leave(self) -> bool:
        """Take the watch away, if nobody has put something of their own above it."""
        if _get_current_dispatch_mode() is not self:
            return False
        self.open = False
        self.__exit__(None, None, None)
        return True
