"""Remembers where the script does what: the line that makes the optimizer, calls backward, wraps the model in DDP.

Each call site is kept once, and after the first calls of a kind nobody looks any more.
"""

from __future__ import annotations

import ast
import functools
import linecache
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch

from gradproof.probes.guard import quietly
from gradproof.probes.names import line_of, own_frames
from gradproof.tape.living import Living

MOST_SITES = 6  # of one kind
MOST_LOOKS = 64  # calls of one kind that are looked at

# `lr = 0.1 * 0.99**step`, `self.lr *= 0.5`, inside of a loop or function
SETS_OWN_LR = re.compile(r"""^\s+(\w+\.)*(lr|learning_rate|step_size|alpha|eta|rate)\s*[-+*/]?=(?!=)""")
SETS_LR = re.compile(r"""\[\s*["']lr["']\s*\]\s*[-+*/]?=(?!=)""")


class Lines:
    """Call sites by what is called there, first seen first: {"backward": ["train.py:41"]}."""

    def __init__(self) -> None:
        self.sites: dict[str, list[str]] = {}
        self.initialised: Living[str] = Living()  # where the script itself gave a parameter its first values
        self._looks: dict[str, int] = {}
        self.enough: set[str] = set()  # what nobody looks for any more
        self._places: dict[str, tuple[str, int]] = {}  # site -> whole path of its file, number of the line

    def note(self, what: str, callers: int = 0) -> None:
        """Remember the line of the user's code that is running, and who called the function it stands in."""
        if what not in self.enough:
            looks = self._looks[what] = self._looks.get(what, 0) + 1
            if looks >= MOST_LOOKS:
                self.enough.add(what)
            with quietly():  # a place is not worth a training
                self._look(what, callers)

    def _look(self, what: str, callers: int) -> None:
        frames = own_frames()
        frame = next(frames, None)
        if frame is None:
            return
        site = line_of(frame)
        self._places[site] = (frame.f_code.co_filename, frame.f_lineno)
        for _, caller in zip(range(callers), frames, strict=False):
            site += f", called at {line_of(caller)}"
        found = self.sites.setdefault(what, [])
        if site not in found and len(found) < MOST_SITES:
            found.append(site)

    def find_lines(self, what: str, pattern: re.Pattern[str]) -> Iterator[str]:
        """Every line that matches, in the files in which something is done."""
        sites = [self._places[site] for site in self.sites.get(what, ()) if site in self._places]
        for file in dict.fromkeys(file for file, _ in sites):
            for number, text in enumerate(linecache.getlines(file), 1):
                if pattern.search(text.partition("#")[0]):
                    yield f"{file.rsplit('/', 1)[-1]}:{number}"

    def read_source(self, accumulates: bool, own_updates: bool = False) -> None:
        """What the source tells beside the calls: where lr is set by hand, and what decides on a step."""
        if "step" not in self.sites:
            return
        steps = [self._places[site] for site in self.sites["step"] if site in self._places]
        for file, number in steps:
            short = file.rsplit("/", 1)[-1]
            if accumulates and (condition := find_condition(file, number)) is not None:
                self.sites.setdefault("step condition", []).append(f"{short}:{condition}")
            by_hand = not {"scheduler", "scheduler made", "lr set"} & self.sites.keys()
            if by_hand and (set_at := list(lines_that_set_lr(short, linecache.getlines(file)))):
                self.sites["lr set"] = set_at[:MOST_SITES]
        if own_updates and "lr set" not in self.sites:
            sets = list(self.find_lines("step", SETS_OWN_LR))
            self.sites |= {"lr set": sets[-MOST_SITES:]} if sets else {}


def lines_that_set_lr(file: str, source: list[str]) -> Iterator[str]:
    """`group["lr"] = lr`, and with it the line above that computes what is assigned."""
    for number, text in enumerate(source, 1):
        found = SETS_LR.search(text)
        if found is None:
            continue
        value = text[found.end() :].strip()
        made = re.compile(rf"\s*{re.escape(value)}\s*=(?!=)")
        above = [
            n for n, line in enumerate(source[: number - 1], 1) if value.isidentifier() and made.match(line)
        ]
        yield f"{file}:{number}" + (f", computed at {file}:{above[-1]}" if above else "")


def find_condition(file: str, number: int) -> int | None:
    """The innermost `if` around a line, inside of the function that the line is in."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return None
    found: int | None = None
    for node in ast.walk(tree):  # outer nodes come first
        last = getattr(node, "end_lineno", None)
        if last is None or not node.lineno <= number <= last:  # type: ignore[attr-defined]
            continue
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found = None
        elif isinstance(node, ast.If) and number > node.lineno and not _is_main(node):
            found = node.lineno
    return found


def _is_main(node: ast.If) -> bool:
    return "__name__" in ast.dump(node.test)


def makings(lines: Lines, stack: ExitStack) -> None:
    """Notes where loaders, samplers and DDP wrappers are made, seeds are set and ranks are brought together."""
    for owner, name, what, callers in _things_made():
        original = vars(owner).get(name)
        if original is not None:
            setattr(owner, name, _noting(original, lines, what, callers))
            stack.callback(setattr, owner, name, original)
    initialisings(lines, stack)


def initialisings(lines: Lines, stack: ExitStack) -> None:
    """Notes which line of the script gave which parameter its first values, by torch.nn.init."""

    def wrapper(original: Callable) -> Callable:
        @functools.wraps(original)
        def call(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1)
            with quietly():
                if not caller.f_globals["__name__"].startswith("torch."):
                    lines.initialised[tensor] = line_of(caller)
            return original(tensor, *args, **kwargs)

        return call

    for name, original in list(vars(torch.nn.init).items()):
        if name.endswith("_") and not name.startswith("_") and callable(original):
            setattr(torch.nn.init, name, wrapper(original))
            stack.callback(setattr, torch.nn.init, name, original)


def _noting(original: Callable, lines: Lines, what: str, callers: int) -> Callable:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            lines.note(what, callers)
        return original(*args, **kwargs)

    return call


def _things_made() -> Iterator[tuple[Any, str, str, int]]:
    """(owner, attribute, what it is called here, how many callers to name)"""
    yield torch.utils.data.DataLoader, "__init__", "loader", 0
    yield torch.nn.modules.loss._Loss, "__init__", "criterion", 0
    yield torch, "manual_seed", "manual_seed", 0
    yield torch.nn.Module, "requires_grad_", "requires_grad_", 0
    yield torch.optim.lr_scheduler.LRScheduler, "__init__", "scheduler made", 0
    yield torch.optim.lr_scheduler.ReduceLROnPlateau, "__init__", "scheduler made", 0
    if not torch.distributed.is_available():
        return
    yield torch.utils.data.distributed.DistributedSampler, "__init__", "sampler", 0
    yield torch.nn.parallel.DistributedDataParallel, "__init__", "ddp", 0
    yield torch.nn.parallel.DistributedDataParallel, "no_sync", "no_sync", 0
    for name in ("init_process_group", "all_reduce", "broadcast"):
        yield torch.distributed, name, name, 1
    # isend and irecv stay as they are: torch itself asks whether it was given these very functions
    for name in ("send", "recv", "batch_isend_irecv", "all_to_all", "all_to_all_single"):
        yield torch.distributed, name, name, 0
    for name in ("all_reduce", "broadcast"):  # `from torch.distributed import all_reduce` came before
        original = getattr(torch.distributed, name)
        for key, module in list(sys.modules.items()):
            if key.partition(".")[0] != "torch" and getattr(module, "__dict__", {}).get(name) is original:
                yield module, name, name, 1
