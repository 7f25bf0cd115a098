"""Where else a run may go: a sink hears what the writer writes, while it trains or when a run is exported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from gradproof.errors import warn
from gradproof.record.run import Run
from gradproof.record.schema import PERCENTILES, STEP_COLUMNS, TEXT_COLUMNS

# what is worth a chart: the other columns say when and how a step was taken
CHARTED = (
    *("loss", "lr", "grad_norm", "norm_before_clip", "clip_limit", "weight_norm", "update_norm", "cosine"),
    *("loss_scale", "skipped"),
)


class Sink(Protocol):
    """What a run can be told to. Tensors are named `kind/name`; a step's tensors come before its row."""

    def begin(self, path: Path, info: Mapping[str, Any]) -> None:
        """A run at `path` begins; `info` is what run.json says."""

    def step(self, row: Mapping[str, Any]) -> None:
        """One row of steps.csv."""

    def tensors(self, step: int, names: Sequence[str], values: np.ndarray) -> None:
        """Statistics of some tensors: `values[i]` are those of `names[i]`, in the order of STATISTICS."""

    def distributions(self, step: int, names: Sequence[str], values: np.ndarray) -> None:
        """Percentiles of some tensors, in the order of PERCENTILES."""

    def end(self) -> None:
        """The run has ended."""


class Sinks:
    """Tells every sink; one that raises is told nothing more, and said so once: training must not suffer."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self.listening = list(sinks)

    def tell(self, event: str, *args: Any) -> None:
        for sink in list(self.listening):
            try:
                getattr(sink, event)(*args)
            except Exception as error:
                self.listening.remove(sink)
                name = type(sink).__name__
                reason = f"{type(error).__name__}: {error}"
                warn(f"gradproof: {name} failed ({reason}); the run itself goes on", stacklevel=5)


def charted(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row that are worth a chart and were measured, by column."""
    return {name: float(row[name]) for name in CHARTED if row.get(name) is not None}


def replay_run(run: Run, sink: Sink) -> None:
    """Tell a sink a whole recorded run, as it would have heard it live."""
    names = [f"{tensor['kind']}/{tensor['name']}" for tensor in run.tensors]
    frames: dict[int, list[tuple[str, Any]]] = {}
    for event, found in (("tensors", run.frames), ("distributions", run.distributions)):
        for frame in found:
            frames.setdefault(frame.step, []).append((event, frame))
    sink.begin(run.path, run.info)
    columns = [name for name in STEP_COLUMNS if name not in TEXT_COLUMNS]
    for place, step in enumerate(run.steps["step"]):
        for event, frame in frames.pop(int(step), ()):
            values = frame.values if event == "tensors" else frame.values[:, : len(PERCENTILES)]
            getattr(sink, event)(frame.step, [names[number] for number in frame.numbers], values)
        sink.step({name: run.steps[name][place] for name in columns if run.seen[name][place]})
    sink.end()
