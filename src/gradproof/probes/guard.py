"""How a session hears of an event: in time that is counted, off the tape, and so that training never notices.

An error of ours becomes one warning and ends the watching, never the training. A step that is passed over costs next to
nothing. What a handler leaves to be done afterwards runs when it has returned: a tape can only be cut where it runs.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
from collections.abc import Callable
from threading import get_ident
from types import FrameType
from typing import Any

import torch

from gradproof.probes.aside import is_recorded
from gradproof.tape.modes import without_trace

# what a step that is passed over does not look at
STEP_EVENTS = frozenset(
    (
        *("zero_grad", "scaled", "backward_begins", "backward_ends", "unscaled", "clipped"),
        *("optimizer_begins", "before_update", "scheduler_stepped", "after_update", "skipped"),
        *("replay_begins", "replay_ends"),
    )
)

ENDS = frozenset(("after_update", "skipped"))

pid = os.getpid()  # asked once in each process: it is a call of the system, and there are some events a step


def _note_pid() -> None:
    global pid
    pid = os.getpid()


os.register_at_fork(after_in_child=_note_pid)

# looked up once: between the kernels of a tiny step every name is far away
_clock, _follows, _follow = time.perf_counter, torch.is_grad_enabled, torch._C._set_grad_enabled
_dispatch_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack


def guarded(method: Callable) -> Callable:
    """An event handler: never raises into training, is timed, does nothing in a forked worker."""

    event = method.__name__
    of_step, begins, ends = event in STEP_EVENTS, event == "optimizer_begins", event in ENDS

    @functools.wraps(method)
    def handler(session: Any, *args: Any) -> Any:
        if not session.alive or session.examining or pid != session.pid:
            return None
        if is_recorded():
            return session.graphs.note(event, args)
        owner = session.owner
        if owner.ident != get_ident() and not owner.hears(event, args, session):
            return session.another_thread_trains()
        if begins:
            owner.stepping = owner.has_stepped = True
        elif ends:
            owner.stepping = False
        if of_step and session.unseen:
            return session.pass_over(event)
        start, followed, off = _clock(), _follows(), False
        try:
            # no part of a step that is taped, or that the script itself looks into
            if _dispatch_modes() or _function_modes():
                return without_trace(method, session, *args)
            off = True
            _follow(False)
            return method(session, *args)
        except Exception as error:
            if raised_by_signal(error):
                session.drop_step()
                raise
            session.fail(error)
            return None
        finally:
            if off:  # and no call before it: behind each a signal handler may raise
                _follow(followed)
            session.own_seconds += _clock() - start
            if session.afterwards:
                _do_what_is_left(session)

    return handler


def noted(method: Callable) -> Callable:
    """As `guarded`, for what only writes something down: no tensor is touched, and it is too short to be timed."""

    event = method.__name__

    @functools.wraps(method)
    def handler(session: Any) -> Any:
        if not session.alive or session.examining or pid != session.pid:
            return None
        if is_recorded():
            return session.graphs.note(event, ())
        owner = session.owner
        if owner.ident != get_ident() and not owner.hears(event, (), session):
            return session.another_thread_trains()
        try:
            return session.pass_over(event) if session.unseen else method(session)
        except Exception as error:
            if raised_by_signal(error):
                session.drop_step()
                raise
            session.fail(error)
            return None

    return handler


_HANDLERS = tuple(kind(lambda session: None).__code__ for kind in (guarded, noted))  # of all of them


def inside_handler() -> bool:
    """Whether one is at work: the garbage collector may run, and tell us who has died, between any two of our lines."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code not in _HANDLERS:
        frame = frame.f_back
    return frame is not None


def _do_what_is_left(session: Any) -> None:
    session.examining = True
    try:
        while session.afterwards:
            session.afterwards.pop(0)()
    finally:
        session.examining = False


class quietly:
    """A look that is not worth a training: what goes wrong in it is forgotten, unless it is the script's own."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        return isinstance(error, Exception) and not raised_by_signal(error)


def raised_by_signal(error: BaseException) -> bool:
    """Whether the script's own signal handler, which may run between any two of our lines, has raised this.

    A handler is called with the frame that it interrupts; nobody else's function is given the frame of its caller.
    """
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    codes = {getattr(handler, "__code__", None) for handler in handlers} - {None}
    outer, trace = None, error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        if outer is not None and not _is_ours(frame) and (frame.f_code in codes or _is_given(frame, outer)):
            return True
        outer, trace = frame, trace.tb_next
    return False


def _is_given(frame: FrameType, outer: FrameType) -> bool:
    values = list(frame.f_locals.values())
    return any(value is outer for value in values) or any(
        item is outer for value in values if type(value) is tuple for item in value
    )


def _is_ours(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__", "").partition(".")[0] in ("gradproof", "torch")
