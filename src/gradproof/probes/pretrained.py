"""Sees embeddings that are made of a table by from_pretrained, which freezes them unless it is told not to."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradproof.probes.guard import quietly
from gradproof.probes.names import line_of, own_frames
from gradproof.probes.session import Session
from gradproof.tape.frames import locals_of
from gradproof.tape.modes import unseen_by_modes

MOST = 64  # embeddings that are remembered


def frozen_by_default(session: Session, stack: ExitStack, chosen: Callable[[Any], bool]) -> None:
    """Notes the tables that are frozen although nobody has written `freeze`, where, and whether others hold them."""
    found: list[dict[str, Any]] = []
    session.facts["_frozen_by_default"] = found
    for kind in (nn.Embedding, nn.EmbeddingBag):
        original = vars(kind)["from_pretrained"]
        kind.from_pretrained = classmethod(listening(original.__func__, found))  # type: ignore[assignment]
        stack.callback(setattr, kind, "from_pretrained", original)


def listening(original: Callable, found: list[dict[str, Any]]) -> Callable:
    @functools.wraps(original)
    def from_pretrained(cls: type, *args: Any, **kwargs: Any) -> Any:
        made = original(cls, *args, **kwargs)
        if "freeze" not in kwargs and len(args) < 2 and len(found) < MOST:
            with quietly(), unseen_by_modes():  # a look is not worth a training
                frames = list(own_frames())
                given = any(is_same(value, made.weight) for value in values_from_outside(frames))
                line = line_of(frames[0]) if frames else ""
                found.append({"weight": weakref.ref(made.weight), "line": line, "given": given})
        return made

    return from_pretrained


def values_from_outside(frames: list[FrameType]) -> Iterator[Any]:
    """What the function that makes the embedding was given, and what those hold that called it."""
    for frame in frames[:1]:
        given = inspect.getargs(frame.f_code)
        names = {*given.args, given.varargs, given.varkw}
        yield from (value for name, value in locals_of(frame).items() if name in names)
    for frame in frames[1:]:
        yield from locals_of(frame).values()


def is_same(value: Any, table: Tensor) -> bool:
    """Whether an array or a tensor holds the numbers of a table."""
    if not isinstance(value, (Tensor, np.ndarray)) or tuple(value.shape) != tuple(table.shape):
        return False
    other = torch.as_tensor(value).detach().to(table)
    return torch.equal(other, table.detach())
