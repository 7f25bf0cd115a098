"""Which thread trains: of two that train at once, the first is watched and the other is left alone.

A training may go on in another thread: when the first has ended, or when the same optimizer steps there. A thread that
trained beside the first is never heard, not even when the first has ended: its steps would stand among the other's.
Threads that autograd starts belong to whoever called backward.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

FROM_ANYWHERE = frozenset(("epoch_begins", "something_compiled", "_close_guarded"))
STEPS = frozenset(
    ("optimizer_begins", "before_update", "after_update", "skipped")
)  # of the optimizer they name


class Owner:
    """The thread whose events are heard; `others` counts those that step optimizers of their own meanwhile."""

    def __init__(self) -> None:
        self.others = 0
        self._beside: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._thread: Callable[[], threading.Thread | None] = lambda: None  # weakly: it may hold a model
        self.ident = -1
        self.stepping = self.has_stepped = False  # the watched one: at this moment, and ever
        self._lock = threading.Lock()

    def elsewhere(self) -> bool:
        """Whether this is another thread than the one that is watched."""
        return self.ident != -1 and threading.get_ident() != self.ident and not inside_autograd()

    def hears(self, event: str, args: tuple, session: Any) -> bool:
        """Whether an event is one of the training that is watched."""
        return threading.get_ident() == self.ident or self._takes_over(event, args, session)

    def _takes_over(self, event: str, args: tuple, session: Any) -> bool:
        """An event from a thread that was not heard so far."""
        if event in FROM_ANYWHERE or inside_autograd():
            return True
        with self._lock:
            thread = self._thread()
            if thread is None or not thread.is_alive():
                if threading.current_thread() in self._beside:
                    return False
                if event in ("backward_begins", "optimizer_begins"):
                    self._claim()
                return True
            if event == "optimizer_made":
                return not self.has_stepped
            known = bool(args) and event in STEPS and session.parameters.knows(args[0])
            if event == "optimizer_begins" and not self.stepping and (known or not self.has_stepped):
                self._claim()
                session.drop_step()
                return True
            if event in ("after_update", "skipped") and not known:
                self.others += threading.current_thread() not in self._beside
                self._beside.add(threading.current_thread())
            return False

    def _claim(self) -> None:
        self._thread, self.ident = weakref.ref(threading.current_thread()), threading.get_ident()


def inside_autograd() -> bool:
    """Autograd works for a GPU in threads of its own, which Python did not start."""
    return isinstance(threading.current_thread(), threading._DummyThread)
