"""What `gradproof train` prints while it trains: a bar at a terminal, else a line now and then."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import TextIO

from gradproof.lm.alignment import Alignment
from gradproof.lm.data import TokenData
from gradproof.lm.learner import Learner
from gradproof.lm.trainer import Job, Step

BAR = 24
LINES = 20  # of progress where there is no terminal


class TrainingLog:
    """Prints to a stream, or nothing where there is none (the ranks after the first)."""

    def __init__(self, job: Job, stream: TextIO | None) -> None:
        self.job, self.stream = job, stream
        self.live = stream is not None and stream.isatty()
        self.seconds, self.tokens = 0.0, 0
        self.smooth: float | None = None
        self.validation: float | None = None

    def alignment(self, found: Alignment) -> None:
        self._print(str(found))

    def duplicates(self, repeated: int) -> None:
        self._print(f"{repeated} of the first 100 batches repeat an earlier one")

    def begin(self, run: Path, data: TokenData, learner: Learner) -> None:
        job, tokenizer = self.job, data.tokenizer
        count = sum(math.prod(s) for s in learner.shapes.values())
        self._print(
            f"{job.model}, {count:,} parameters, on {learner.ranks.world} × {learner.ranks.device}; "
            f"{job.steps} steps of {job.batch} × {job.context} tokens, vocabulary {tokenizer.vocabulary}\n"
            f"{len(data.train):,} tokens to train on, {len(data.validation):,} to validate\n"
            f"run: {run}"
        )

    def step(self, step: Step) -> None:
        self.seconds += step.seconds
        self.tokens += step.tokens
        self.smooth = step.loss if self.smooth is None else 0.9 * self.smooth + 0.1 * step.loss
        if step.validation is not None:
            self.validation = step.validation
            self._wipe()
            self._print(f"step {step.step}: validation loss {step.validation:.4f}")
            self._print(render_sample(step.sample or ""))
        if self.live:
            self._write("\r\x1b[2K" + self.line(step)[: shutil.get_terminal_size().columns - 1])
        elif step.step % max(1, self.job.steps // LINES) == 0:
            self._print(self.line(step))

    def line(self, step: Step) -> str:
        """For example `step  120/1000 ###·····  loss 2.314 · gradient 0.81 · 9,120 tokens/s · 1:37 left`."""
        filled = BAR * step.step // self.job.steps
        speed = self.tokens / self.seconds
        left = (self.job.steps - step.step) * step.tokens / speed
        bar = f"{'#' * filled}{'·' * (BAR - filled)}"
        parts = [f"step {step.step:4d}/{self.job.steps} {bar}  loss {self.smooth:.3f}"]
        if self.validation is not None:
            parts.append(f"validation {self.validation:.3f}")
        parts += [f"gradient {step.gradient_norm:.2f}", f"{speed:,.0f} tokens/s"]
        parts.append(f"{int(left) // 60}:{int(left) % 60:02d} left")
        return " · ".join(parts)

    def end(self) -> None:
        self._wipe()

    def _wipe(self) -> None:
        if self.live:
            self._write("\r\x1b[2K")

    def _print(self, text: str) -> None:
        self._write(text + "\n")

    def _write(self, text: str) -> None:
        if self.stream is not None:
            self.stream.write(text)
            self.stream.flush()


def render_sample(text: str) -> str:
    """Indented, and with nothing in it that a terminal would obey."""
    kept = "".join(c if c.isprintable() or c == "\n" else "·" for c in text)
    return "\n".join(f"    | {line}" for line in kept.split("\n"))
