"""Weights & Biases: a run of its own beside whatever the script logs, offline unless WANDB_MODE says otherwise."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gradproof.record.schema import STATISTICS
from gradproof.record.sink import charted

NORM = STATISTICS.index("norm")


class WandB:
    """Hears a run: `gradproof.watch(model, optimizer, sinks=[WandB()])`, then `wandb sync`."""

    def __init__(self, directory: str | os.PathLike | None = None, project: str = "gradproof") -> None:
        self.directory = Path(directory) if directory else None  # once it has begun: of the offline run
        self._project = project

    def begin(self, path: Path, info: Mapping[str, Any]) -> None:
        import wandb

        place = self.directory or path
        place.mkdir(parents=True, exist_ok=True)
        mode: Any = os.environ.get("WANDB_MODE", "offline")
        self._run = wandb.init(
            project=self._project,
            name=path.name,
            dir=str(place),
            mode=mode,
            config={key: info.get(key) for key in ("command", "versions", "source", "optimizers")},
            reinit="create_new",  # the script's own wandb.run stays as it is
            settings=wandb.Settings(console="off", silent=True, save_code=False),
        )
        self._run.define_metric("*", step_metric="step")
        self.directory = Path(self._run.dir).parent

    def step(self, row: Mapping[str, Any]) -> None:
        self._run.log({"step": int(row["step"]), **charted(row)})

    def tensors(self, step: int, names: Sequence[str], values: np.ndarray) -> None:
        self._run.log(
            {"step": step, **{f"norm/{n}": float(v[NORM]) for n, v in zip(names, values, strict=True)}}
        )

    def distributions(self, step: int, names: Sequence[str], values: np.ndarray) -> None:
        """Not sent: percentiles would be seven more charts a tensor."""

    def end(self) -> None:
        self._run.finish()
