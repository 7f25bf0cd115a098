"""Numbers on their way from a device to the host: packed, sent once, read when they have arrived."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


class Reading:
    """The numbers of one step. `send` starts one copy for each device; nothing waits until `get`."""

    # until something is sent, as most steps send nothing
    _copies: Sequence[tuple[list[tuple[str, torch.Size]], Tensor]] = ()
    _arrivals: Sequence[torch.cuda.Event] = ()

    def __init__(self) -> None:
        self.parts: dict[torch.device, list[tuple[str, Tensor]]] = {}

    def add(self, key: str, tensor: Tensor) -> None:
        self.parts.setdefault(tensor.device, []).append((key, tensor.detach()))

    def send(self) -> None:
        copies, arrivals = [*self._copies], [*self._arrivals]
        for device, parts in self.parts.items():
            packed = torch.cat([tensor.reshape(-1).to(torch.float64) for _, tensor in parts])
            host = packed.to("cpu", non_blocking=True)  # the one transfer of the step
            copies.append(([(key, tensor.shape) for key, tensor in parts], host))
            if device.type == "cuda":
                arrival = torch.cuda.Event()
                arrival.record(torch.cuda.current_stream(device))
                arrivals.append(arrival)
        self._copies, self._arrivals = copies, arrivals
        self.parts.clear()

    def ready(self) -> bool:
        return all(arrival.query() for arrival in self._arrivals)

    def get(self) -> dict[str, np.ndarray]:
        """The numbers by key; waits for what has not arrived."""
        for arrival in self._arrivals:
            arrival.synchronize()
        found: dict[str, np.ndarray] = {}
        for layout, host in self._copies:
            values, start = host.numpy(), 0
            for key, shape in layout:
                size = math.prod(shape)
                found[key] = values[start : start + size].reshape(tuple(shape))
                start += size
        return found
