"""How a session hears of an event: in time that is counted, off the tape, and so that training never notices.

An error becomes one warning and ends the watching, never the training. A step that is passed over costs next to
nothing. What a handler leaves to be done afterwards runs when it has returned: a tape can only be cut where it runs.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import _disable_current_modes

# what a step that is passed over does not look at; the last two end it
STEP_EVENTS = frozenset(
    (
        *("zero_grad", "scaled", "backward_begins", "backward_ends", "unscaled", "clipped"),
        *("optimizer_begins", "before_update", "scheduler_stepped", "after_update", "skipped"),
    )
)


def guarded(method: Callable) -> Callable:
    """An event handler: never raises into training, is timed, does nothing in a forked worker."""

    @functools.wraps(method)
    def handler(session: Any, *args: Any) -> Any:
        if not session.alive or session.examining or os.getpid() != session.pid:
            return None
        if session.unseen and method.__name__ in STEP_EVENTS:
            return session.pass_over(method.__name__)
        start = time.perf_counter()
        try:
            if session.taping is None or not session.taping.active:
                return method(session, *args)
            with _disable_current_modes():  # what gradproof computes is no part of the step that is taped
                return method(session, *args)
        except Exception as error:
            session.fail(error)
            return None
        finally:
            session.own_seconds += time.perf_counter() - start
            if session.afterwards:
                _do_what_is_left(session)

    return handler


def _do_what_is_left(session: Any) -> None:
    session.examining = True
    try:
        while session.afterwards:
            session.afterwards.pop(0)()
    finally:
        session.examining = False
