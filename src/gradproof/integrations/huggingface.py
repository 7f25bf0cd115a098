"""Hugging Face Trainer: `Trainer(..., callbacks=[GradproofCallback()])` records the training as a run."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from gradproof.probes.watch import Monitor, default_path, watch


class GradproofCallback(TrainerCallback):
    """Watches between the beginning and the end of `trainer.train()`; options are those of `gradproof.watch`.

    After a training that raised, watching ends with the next one, or when the callback is no longer held.
    """

    def __init__(self, out: str | os.PathLike | None = None, **options: Any) -> None:
        self._out = out
        self._options = options
        self._watching = ExitStack()
        self._monitor: Monitor | None = None  # while it trains
        self.path: Path | None = None  # of the run

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._end()
        optimizer = kwargs["optimizer"]
        optimizer = getattr(optimizer, "optimizer", optimizer)  # of what accelerate wraps, torch's own
        out = self._out or default_path("huggingface")
        watching = watch(kwargs["model"], optimizer, out=out, **self._options)
        self._monitor = self._watching.enter_context(watching)
        self.path = self._monitor.path

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        if self._monitor is not None and metrics:
            numbers = {key: value for key, value in metrics.items() if isinstance(value, (int, float))}
            self._monitor.log(**numbers)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._end()
        if state.is_world_process_zero:
            print(f"gradproof: next: gradproof diagnose {self.path}", file=sys.stderr)

    def _end(self) -> None:
        self._watching.close()
        self._monitor = None
