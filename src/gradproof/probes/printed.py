"""What can be seen of a training that never calls backward: the losses that it prints, and what changes meanwhile.

Nothing tells where its steps end or what its gradients are: each printed loss is a row, and tensors and arrays that
have moved a little between two of them are named. The rest has to be said: `gradproof.watch(parameters=…)`.
"""

from __future__ import annotations

import builtins
import linecache
import re
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradproof.probes.guard import quietly
from gradproof.probes.names import own_frames
from gradproof.probes.paths import Path, walk
from gradproof.probes.replacing import replace
from gradproof.probes.session import Session

MOST_PRINTS = 2000
FEWEST_LOSSES = 5
MOST_COPIED = 1 << 22  # entries of all arrays together
A_LITTLE = 0.7  # of its size: a batch changes by more from one to the next, a parameter by less
WORD = re.compile(r"loss|cost|error|nll|mse|perplexity", re.I)
NUMBER = r"([-+]?(?:\d+\.?\d*(?:e[-+]?\d+)?|nan|inf))"
AFTER_WORD = re.compile(rf"(?:loss|cost|error|nll|mse|perplexity)[^\d\n]{{0,12}}?{NUMBER}(?!\w)", re.I)


class Printed:
    """Losses in the order in which they were printed, and what has changed between them."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self._then: dict[Path, np.ndarray] = {}
        self._little: dict[Path, int] = {}
        self._other: set[Path] = set()

    @property
    def names(self) -> list[str]:
        """What looks like parameters: changed by a little at nearly every look, and never by much."""
        looks = max(self._little.values(), default=0)
        often = [path for path, times in self._little.items() if times >= 3 and times > 0.8 * looks]
        arrays = [path for path in often if self._then.get(path, np.zeros(0)).size > 1]  # not the loss itself
        return [path.name for path in arrays if path not in self._other]

    @property
    def trains(self) -> bool:
        return len(self.losses) >= FEWEST_LOSSES and bool(self.names)

    def look(self, text: str, source: str) -> None:
        """A line was printed by a line of the script."""
        loss = find_loss(text, source)
        if loss is None or len(self.losses) >= MOST_PRINTS:
            return
        self.losses.append(loss)
        size, now = 0, {}
        for path, value in walk(own_frames()):
            if isinstance(value, (Tensor, np.ndarray)) and (array := as_array(value)) is not None:
                size += array.size
                if size > MOST_COPIED:
                    break
                now[path] = array
        for path, array in now.items():
            old = self._then.get(path)
            if old is not None and old.shape == array.shape:
                self._compare(path, old, array)
        self._then = now

    def _compare(self, path: Path, old: np.ndarray, new: np.ndarray) -> None:
        change, size = np.linalg.norm(new - old), max(np.linalg.norm(old), np.linalg.norm(new))
        if not change <= A_LITTLE * size:
            self._other.add(path)
        elif change > 0:
            self._little[path] = self._little.get(path, 0) + 1


def as_array(value: Any) -> np.ndarray | None:
    """A copy of floating-point numbers in the host's memory; None for anything else."""
    if isinstance(value, Tensor):
        strided = value.is_floating_point() and value.device.type == "cpu" and value.numel() <= MOST_COPIED
        value = value.detach().double().numpy() if strided else np.zeros(0)
    if value.dtype.kind != "f" or not 0 < value.size <= MOST_COPIED:
        return None
    return np.array(value, dtype=np.float64)


def find_loss(text: str, source: str) -> float | None:
    """The number after a word for a loss; or the last with a point, where the line that prints speaks of one.

    >>> find_loss("step 3 loss 0.52", "print(...)"), find_loss("3 0.52", "print(t, loss)"), find_loss("3", "print(t)")
    (0.52, 0.52, None)
    """
    found = AFTER_WORD.search(text)
    if found is not None:
        return float(found[1])
    numbers = [n for n in re.findall(NUMBER, text) if "." in n or n[-1].isalpha()]
    return float(numbers[-1]) if numbers and WORD.search(source) else None


def prints(session: Session, stack: ExitStack, chosen: Callable[[Any], bool]) -> None:
    """Listens as long as neither an optimizer was made nor backward called."""

    def wrapper(original: Callable) -> Callable:
        def noted(*args: Any, **kwargs: Any) -> None:
            original(*args, **kwargs)
            if torch.compiler.is_compiling() or session.own is None or session.counts["backward"] or not args:
                return
            with quietly():
                if all(isinstance(arg, (str, int, float)) for arg in args):
                    frame = next(own_frames(), None)
                    source = linecache.getline(frame.f_code.co_filename, frame.f_lineno) if frame else ""
                    session.line_printed(" ".join(map(str, args)), source)

        return noted

    replace(stack, builtins, "print", wrapper)
