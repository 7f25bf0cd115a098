"""Copies of what a step is about to overwrite, in the host's memory: a tape must not hold an accelerator's.

Weights and the optimizer's state do not change until the update. So their way to the host begins with the step, on a
stream of its own, while the forward and backward passes are recorded. What they arrive in is made ready in the steps
before: fresh pages cost ten times the copy, and pages that the GPU knows take it three times as fast, without holding
up the training's own launches.
"""

from __future__ import annotations

import ctypes
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Iterable

import torch

from gradproof.tape.tensors import nbytes, storage_key

SMALL = 1 << 20  # bytes: what is smaller goes together with others; larger memory has its pages to itself
AT_A_TIME = 256 << 20  # bytes that the GPU is told of between two steps: 11 ms on an H200
SLICE = 64 << 20  # bytes that are touched between two looks at whether it is still wanted


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in the host's memory."""
    return tensor.detach().to("cpu", copy=True)


class Room:
    """Host memory whose pages are there already, and known to the GPU.

    Pages are touched in a thread. CUDA is called between two steps only, by the training's own thread: while a graph
    is captured, a call from any other thread would spoil it.
    """

    def __init__(self) -> None:
        self._touched: deque[torch.Tensor] = deque()  # to be made known to the GPU
        self._free: dict[int, list[torch.Tensor]] = {}  # by size
        self._known: dict[int, torch.Tensor] = {}  # to the GPU, by address
        self._filled: deque[int] = deque()  # that the GPU need not know any longer
        self._at_work: threading.Thread | None = None
        self._wanted = True
        self._none_left = False

    @property
    def busy(self) -> bool:
        return bool(self._touched) or (self._at_work is not None and self._at_work.is_alive())

    @property
    def has_work(self) -> bool:
        """Whether there is something for `tend`."""
        return bool(self._filled or self._touched)

    def ready(self, sizes: Iterable[int]) -> bool:
        """Whether there is room for memories of these sizes; where there is not, it is being made from here on."""
        if self.busy or self._none_left:
            return not self.busy
        missing = Counter(sizes)
        missing.subtract({size: len(free) for size, free in self._free.items()})
        wanted = list((+missing).elements())
        if wanted:
            # no daemon: one that still runs when Python ends is torn out of PyTorch's code, which aborts the process
            self._at_work = threading.Thread(target=self._make, args=(wanted,), name="gradproof-room")
            self._at_work.start()
        return not wanted

    def tend(self, most: int = AT_A_TIME) -> None:
        """Between two steps: tell the GPU of some pages that are there now, and of some that it may forget."""
        told = 0
        while told < most and (self._filled or self._touched):
            if self._filled:
                address = self._filled.popleft()
                told += nbytes(self._known.pop(address))
                torch.cuda.cudart().cudaHostUnregister(address)
                continue
            memory = self._touched.popleft()
            told += nbytes(memory)
            if int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), nbytes(memory), 1)) == 0:
                self._known[memory.data_ptr()] = memory  # the others are copied to as well, more slowly
            self._keep(memory)

    def take(self, size: int) -> torch.Tensor:
        """Bytes on the host; fresh ones, where none were made ready."""
        free = self._free.get(size)
        return free.pop() if free else torch.empty(size, dtype=torch.uint8, device="cpu")

    def let_go(self) -> None:
        """What was taken has been filled: it is to be memory like any other."""
        free = {memory.data_ptr() for held in self._free.values() for memory in held}
        self._filled = deque(address for address in self._known if address not in free)

    def clear(self) -> None:
        """Nothing is wanted any more; what is being made is left as it is."""
        self._wanted = False
        if self._at_work is not None:
            self._at_work.join()
        self._touched.clear()
        self._free.clear()
        self.let_go()
        while self._filled:
            self.tend()
        self._wanted = True

    def _keep(self, memory: torch.Tensor) -> None:
        self._free.setdefault(nbytes(memory), []).append(memory)

    def _make(self, sizes: list[int]) -> None:
        for size in sizes:
            try:
                memory = torch.empty(size, dtype=torch.uint8, device="cpu")
            except RuntimeError:  # the host has no more to give: who takes from here on sees for themselves
                self._none_left = True
                return
            for start in range(0, size, SLICE):
                if not (self._wanted and threading.main_thread().is_alive()):
                    return
                ctypes.memset(
                    memory.data_ptr() + start, 0, min(SLICE, size - start)
                )  # in one thread, beside others
            if size >= SMALL and torch.cuda.is_initialized():
                self._touched.append(memory)
            else:
                self._keep(memory)


def ahead_of(tensors: Iterable[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Those memories that are on a GPU, each once, by storage."""
    found: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        key = storage_key(tensor)
        if key is None or key in found or tensor.device.type != "cuda" or not nbytes(tensor):
            continue
        found[key] = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
    return found


class Ahead:
    """Memories on their way to the host since the step began, by storage."""

    def __init__(self, flats: dict[int, torch.Tensor], room: Room | None = None) -> None:
        self._room = room or Room()
        self._coming: dict[int, torch.Tensor] = {}
        self._sources: list[torch.Tensor] = []  # alive until they have arrived
        self._arrived: list[torch.cuda.Event] = []
        together: dict[torch.device, dict[int, torch.Tensor]] = defaultdict(dict)
        for key, flat in flats.items():
            together[flat.device][key] = flat
        for device, some in together.items():
            self._begin(device, some)

    def _begin(self, device: torch.device, flats: dict[int, torch.Tensor]) -> None:
        goals: list[torch.Tensor] = []
        alike: dict[torch.dtype, list[int]] = defaultdict(list)
        with torch.no_grad(), torch.cuda.device(device):
            for key, flat in flats.items():
                if nbytes(flat) < SMALL:
                    alike[flat.dtype].append(key)
                    continue
                self._sources.append(flat.view(torch.uint8))
                goals.append(self._room.take(nbytes(flat)))
                self._coming[key] = goals[-1].view(flat.dtype)
            for keys in alike.values():
                self._sources.append(torch.cat([flats[key] for key in keys]))
                goals.append(torch.empty_like(self._sources[-1], device="cpu"))
                self._coming.update(
                    zip(keys, goals[-1].split([flats[key].numel() for key in keys]), strict=True)
                )
            stream, arrived = torch.cuda.Stream(device), torch.cuda.Event()
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                torch._foreach_copy_(goals, self._sources[-len(goals) :], non_blocking=True)
                arrived.record(stream)
            self._arrived.append(arrived)

    def take(self, key: int | None) -> torch.Tensor | None:
        """The copy of a storage, when all are here; None where none is on its way."""
        coming = self._coming.pop(key, None) if key is not None else None
        if coming is None:
            return None
        self._wait()
        whole = coming.untyped_storage().nbytes() == nbytes(coming)
        return coming if whole else coming.clone()  # a memory of its own

    def _wait(self) -> None:
        for arrived in self._arrived:
            arrived.synchronize()
        self._arrived.clear()

    def close(self) -> None:
        self._wait()
        self._coming.clear()
        self._sources.clear()
        self._room.let_go()
