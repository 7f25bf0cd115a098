"""The one line that lives in the terminal while a watched script trains."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

PERIOD = 0.5  # seconds between two looks


def progress_line() -> tuple[Callable[[dict[str, Any]], None], Callable[[], None]]:
    """Two functions: one shows a row of the run, one wipes the line away; both silent unless at a terminal."""
    terminal = sys.stderr if sys.stderr.isatty() else None
    clips: deque[bool] = deque(maxlen=100)
    last = 0.0

    def show(row: dict[str, Any]) -> None:
        nonlocal last
        if row.get("clip_limit") is not None:
            clips.append(row.get("norm_before_clip", 0.0) > row["clip_limit"])
        now = time.monotonic()
        if terminal is None or now - last < PERIOD:
            return
        last = now
        terminal.write(f"\r\x1b[2K\x1b[2m{render_progress(row, clips)}\x1b[0m\r")
        terminal.flush()

    def wipe() -> None:
        if terminal is not None:
            terminal.write("\r\x1b[2K")
            terminal.flush()

    return show, wipe


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
