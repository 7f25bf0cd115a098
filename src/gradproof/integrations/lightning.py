"""Lightning: `Trainer(callbacks=[GradproofCallback()])` records `fit` as a run."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from gradproof.probes.watch import Monitor, default_path, watch


class GradproofCallback(Callback):
    """Watches from the first batch of `fit` to its end, normal or not; options are those of `gradproof.watch`."""

    def __init__(self, out: str | os.PathLike | None = None, **options: Any) -> None:
        self._out = out
        self._options = options
        self._watching = ExitStack()
        self._monitor: Monitor | None = None  # while it trains
        self.path: Path | None = None  # of the run

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end()
        out = self._out or default_path("lightning")
        watching = watch(pl_module, trainer.optimizers, out=out, **self._options)
        self._monitor = self._watching.enter_context(watching)
        self.path = self._monitor.path

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._monitor is not None and not trainer.sanity_checking and trainer.callback_metrics:
            self._monitor.log(**{key: float(value) for key, value in trainer.callback_metrics.items()})

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end()
        if trainer.is_global_zero:
            print(f"gradproof: next: gradproof diagnose {self.path}", file=sys.stderr)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._end()

    def _end(self) -> None:
        self._watching.close()
        self._monitor = None
