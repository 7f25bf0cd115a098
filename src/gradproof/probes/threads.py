"""Which thread trains: of two that train at once, the first is watched and the other is left alone.

A training may go on in another thread: when the first has ended, or when the same optimizer steps there. Threads that
autograd starts belong to whoever called backward.
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
    """The thread whose events are heard; `others` are those that step optimizers of their own meanwhile."""

    def __init__(self) -> None:
        self.others: set[int] = set()
        self._thread: Callable[[], threading.Thread | None] = lambda: None  # weakly: it may hold a model
        self.ident = -1
        self._stepping = self._has_stepped = False
        self._lock = threading.Lock()

    def elsewhere(self) -> bool:
        """Whether this is another thread than the one that is watched."""
        return self.ident != -1 and threading.get_ident() != self.ident and not inside_autograd()

    def hears(self, event: str, args: tuple, session: Any) -> bool:
        """Whether an event is one of the training that is watched."""
        if threading.get_ident() != self.ident and not self._takes_over(event, args, session):
            return False
        if event == "optimizer_begins":
            self._stepping = self._has_stepped = True
        elif event in ("after_update", "skipped"):
            self._stepping = False
        return True

    def _takes_over(self, event: str, args: tuple, session: Any) -> bool:
        """An event from a thread that was not heard so far."""
        if event in FROM_ANYWHERE or inside_autograd():
            return True
        with self._lock:
            thread = self._thread()
            if thread is None or not thread.is_alive():
                if event in ("backward_begins", "optimizer_begins"):
                    self._claim()
                return True
            if event == "optimizer_made":
                return not self._has_stepped
            known = bool(args) and event in STEPS and session.parameters.knows(args[0])
            if event == "optimizer_begins" and not self._stepping and (known or not self._has_stepped):
                self._claim()
                session.drop_step()
                return True
            if event in ("after_update", "skipped") and not known:
                self.others.add(threading.get_ident())
            return False

    def _claim(self) -> None:
        self._thread, self.ident = weakref.ref(threading.current_thread()), threading.get_ident()


def inside_autograd() -> bool:
    """Autograd works for a GPU in threads of its own, which Python did not start."""
    return isinstance(threading.current_thread(), threading._DummyThread)
