"""Where a script keeps a tensor: the way from one of its variables to it, found once and followed again later.

A tensor that is replaced (`W = W - lr * dW`, `params = {...}`) is found again where the old one was.
"""

from __future__ import annotations

import heapq
import itertools
import linecache
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import FrameType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradproof.tape.frames import locals_of

MOST_LOOKS = 50_000  # values that are looked at in one search
LONGEST = 10_000  # entries of a list or dict that is looked into
IN_A_LIST = 4  # what a place in a list weighs: `layers.0.weight` says more than `parameters.3`
MANY = 100  # entries that weigh as much as a step further away: long lists hold data, not parameters
LATE = 3  # what a variable of a loop weighs: it holds the last entry of something by accident
FOREIGN = ("torch", "numpy", "builtins", "gradproof")
PLAIN = (str, bytes, int, float, complex, bool, type(None), range, type, ModuleType, FunctionType, Tensor)


@dataclass(frozen=True)
class Path:
    """A variable, and the keys and attributes that lead from it to a tensor or array."""

    root: str
    keys: tuple[tuple[str, Any], ...] = ()  # ("item", key) or ("attribute", name)

    @property
    def name(self) -> str:
        """
        >>> Path("self", (("attribute", "params"), ("item", "W1"))).name
        'params.W1'
        """
        parts = [str(key) for _, key in self.keys]
        return ".".join(parts if self.root == "self" and parts else [self.root, *parts])

    def follow(self, scopes: Iterable[dict[str, Any]]) -> Any:
        """What lies there now; None where the way ends."""
        for scope in scopes:
            if self.root in scope:
                return _walk(scope[self.root], self.keys)
        return None


def _walk(value: Any, keys: tuple[tuple[str, Any], ...]) -> Any:
    for how, key in keys:
        try:
            value = vars(value).get(key) if how == "attribute" else value[key]
        except (TypeError, KeyError, IndexError):
            return None
    return value


def scopes_of(frames: Iterable[FrameType]) -> list[dict[str, Any]]:
    """The variables of functions that are running, innermost first, then those of their modules."""
    return [scope for scope, _ in scopes_and_files(frames)]


def scopes_and_files(frames: Iterable[FrameType]) -> list[tuple[dict[str, Any], str]]:
    inner: list[tuple[dict[str, Any], str]] = []
    outer: dict[int, tuple[dict[str, Any], str]] = {}
    for frame in frames:
        file = frame.f_code.co_filename
        if frame.f_code.co_name != "<module>":
            inner.append((locals_of(frame), file))
        outer.setdefault(id(frame.f_globals), (frame.f_globals, file))
    return [*inner, *outer.values()]


def find_paths(wanted: set[int], frames: Iterable[FrameType]) -> dict[int, Path]:
    """The best way to each of the objects with these ids: the one that reads most like a name."""
    found: dict[int, Path] = {}
    for path, value in walk(frames):
        if id(value) in wanted:
            found.setdefault(id(value), path)
            if len(found) == len(wanted):
                break
    return found


def walk(frames: Iterable[FrameType]) -> Iterator[tuple[Path, Any]]:
    """Everything that can be reached from the variables of some functions, what reads most like a name first."""
    count = itertools.count()
    waiting: list[tuple[int, int, Path, Any]] = []
    for scope, file in scopes_and_files(frames):
        passing = loop_variables(file)
        for name, value in list(scope.items()):
            if not name.startswith("_"):
                weight = LATE + IN_A_LIST if name in passing else 1
                heapq.heappush(waiting, (weight, next(count), Path(name), value))
    seen: set[int] = set()
    while waiting and next(count) < MOST_LOOKS:
        weight, _, path, value = heapq.heappop(waiting)
        yield path, value
        if id(value) in seen or isinstance(value, (*PLAIN, np.ndarray)):
            continue
        seen.add(id(value))
        further = 1 + (len(value) // MANY if isinstance(value, (dict, list, tuple)) else 0)
        for key, inner in _inside(value):
            more = IN_A_LIST if isinstance(key[1], int) and isinstance(inner, (Tensor, np.ndarray)) else 0
            more += further
            heapq.heappush(waiting, (weight + more, next(count), Path(path.root, (*path.keys, key)), inner))


def _inside(value: Any) -> Iterator[tuple[tuple[str, Any], Any]]:
    """Entries of a list or dict, and attributes of an object whose class is the script's own."""
    if isinstance(value, dict):
        if len(value) <= LONGEST:
            yield from ((("item", k), v) for k, v in list(value.items()) if isinstance(k, (str, int)))
    elif isinstance(value, (list, tuple)):
        if len(value) <= LONGEST:
            yield from ((("item", i), v) for i, v in enumerate(value))
    elif isinstance(value, nn.Module) or type(value).__module__.partition(".")[0] not in FOREIGN:
        own = getattr(value, "__dict__", None)
        if isinstance(own, dict):
            yield from ((("attribute", name), v) for name, v in list(own.items()))


_passing: dict[str, set[str]] = {}


def loop_variables(file: str) -> set[str]:
    """Names that a file gives to what a `for` goes through."""
    if file not in _passing:
        targets = re.findall(r"\bfor\s+(.+?)\s+in\b", "".join(linecache.getlines(file)))
        _passing[file] = {name for target in targets for name in re.findall(r"\w+", target)}
    return _passing[file]


def is_parameter(value: Any) -> bool:
    """What can be trained: a tensor of floating-point numbers."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def leaves_behind(roots: Iterable[Any]) -> list[Tensor]:
    """The leaves that a backward from these roots brings gradients to, in the order in which they are met."""
    waiting = [root.grad_fn for root in roots if isinstance(root, Tensor) and root.grad_fn is not None]
    seen: set[Any] = set(waiting)
    found: dict[int, Tensor] = {}
    while waiting:
        node = waiting.pop()
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor):
            found.setdefault(id(variable), variable)
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                waiting.append(child)
    return list(found.values())
