"""The one line that lives in the terminal while a watched script trains."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TextIO

PERIOD = 0.5  # seconds between two looks


def progress_line() -> tuple[Callable[[dict[str, Any]], None], Callable[[], None]]:
    """Two functions: one shows a row of the run, one wipes the line away; both silent unless at a terminal."""
    terminal = sys.stderr if sys.stderr is not None and sys.stderr.isatty() else None
    clips: deque[bool] = deque(maxlen=100)
    last = 0.0

    def show(row: dict[str, Any]) -> None:
        nonlocal last
        if terminal is None:
            return
        if row.get("clip_limit") is not None:
            clips.append(row.get("norm_before_clip", 0.0) > row["clip_limit"])
        now = time.monotonic()
        if now - last < PERIOD:
            return
        last = now
        write(terminal, f"\r\x1b[2K\x1b[2m{render_progress(row, clips)}\x1b[0m\r")

    def wipe() -> None:
        if terminal is not None:
            write(terminal, "\r\x1b[2K")

    return show, wipe


def write(terminal: TextIO, text: str) -> None:
    """A script may have closed it meanwhile."""
    with suppress(ValueError, OSError):
        terminal.write(text)
        terminal.flush()


def examination_line() -> Callable[[dict[str, Any]], None]:
    """Shows how far the examination has come, at a terminal."""
    terminal = sys.stderr if sys.stderr is not None and sys.stderr.isatty() else None

    def show(progress: dict[str, Any]) -> None:
        if terminal is not None and "left" in progress:
            write(terminal, f"\r\x1b[2K\x1b[2m{render_examination(progress)}\x1b[0m\r")

    return show


def render_examination(progress: dict[str, Any]) -> str:
    """For example `gradproof · examining step 10 · [########............] 61 of 158 · Is the gradient right?`."""
    asked, left = progress.get("asked", 0), progress.get("left", 0)
    done = int(20 * asked / max(1, asked + left))
    bar = "#" * done + "." * (20 - done)
    text = f"gradproof · examining step {progress.get('step', '?')} · [{bar}] {asked} of {asked + left} · "
    return (text + progress.get("question", ""))[:110] + " (Ctrl-C skips)"


def render_progress(row: dict[str, Any], clips: deque[bool]) -> str:
    """For example `gradproof · step 120 · loss 3.91 · gradient 7.9 · clipped 100 % · finite`."""
    parts = ["gradproof", f"step {row['step']}"]
    if row.get("loss") is not None:
        parts.append(f"loss {row['loss']:.4g}")
    if row.get("grad_norm") is not None:
        parts.append(f"gradient {row['grad_norm']:.3g}")
    if clips:
        parts.append(f"clipped {100 * sum(clips) / len(clips):.0f} %")
    values = [row.get("loss"), row.get("grad_norm")]
    parts.append("finite" if all(v is None or math.isfinite(v) for v in values) else "NOT FINITE")
    return " · ".join(parts)
