"""`gradproof.watch`: the two-line way in, and the way in for training code that is no nn.Module."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gradproof import __version__
from gradproof.probes.by_hand import end_step, measure_tensors, note
from gradproof.probes.distributed import rank_and_world
from gradproof.probes.hooks import attach
from gradproof.probes.lines import Lines
from gradproof.probes.names import Names
from gradproof.probes.schedule import parse_schedule
from gradproof.probes.session import Session
from gradproof.probes.taping import begin_taping
from gradproof.record.sink import Sink
from gradproof.record.source import LARGEST_COPY, SCRIPT_COPY, describe_source
from gradproof.record.writer import RunWriter


class Monitor:
    """A run that is being written; `path` is its directory.

    With hooks attached everything is measured by itself. Without (`watch()`), a loop hands its numbers in:

        monitor.tensors("gradient", {"output": array})
        monitor.clip(before=7.9, after=1.0, limit=1.0)
        monitor.adam(m, v, update, parameter)
        monitor.log(loss=4.1, lr=3e-4, grad_norm=7.9)      # ends the step
    """

    def __init__(self, session: Session, hooked: bool) -> None:
        self._session = session
        self._hooked = hooked
        self.path: Path = session.writer.path

    @property
    def step(self) -> int:
        """The number of steps that have ended."""
        return self._session.step

    def log(self, **values: float) -> None:
        """End a step of a hand-written loop; in a hooked run, note values beside it."""
        if self._hooked:
            self._session.writer.write_event("log", step=self.step, **values)
        else:
            end_step(self._session, values)

    def tensors(self, kind: str, named: Mapping[str, Any]) -> None:
        """Measure tensors or arrays: kind is "gradient", "weight", "update", "output", "adam_m" or "adam_v"."""
        measure_tensors(self._session, kind, dict(named))

    def clip(self, before: float, after: float, limit: float) -> None:
        """Note that the gradient was clipped (or not: before equals after)."""
        self._session.clipped("norm", float(limit), torch.as_tensor(float(before)))
        note(self._session, {"grad_norm": float(after)})

    def adam(
        self,
        m: Mapping[str, Any],
        v: Mapping[str, Any],
        update: Mapping[str, Any] | None = None,
        param: Mapping[str, Any] | None = None,
    ) -> None:
        """Adam's moments by parameter name, and with them, if at hand, the update and the weights after it."""
        for kind, named in (("adam_m", m), ("adam_v", v), ("update", update), ("weight", param)):
            if named is not None:
                self.tensors(kind, named)


@contextmanager
def watch(
    model: nn.Module | Sequence[nn.Module] | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    out: str | os.PathLike | None = None,
    schedule: str | None = None,
    budget: float | None = None,
    sinks: Sequence[Sink] = (),
    experiments: bool = True,
) -> Iterator[Monitor]:
    """Record the training inside the block as a run on disk; leaves no hook behind. Sinks hear it, too.

    With `experiments`, some steps are taped and suspected causes tested on them, as in `gradproof run`.

    >>> with gradproof.watch(model, optimizer, out="runs/a") as run:  # doctest: +SKIP
    ...     train()
    >>> print(gradproof.diagnose("runs/a"))  # doctest: +SKIP
    """
    models = [model] if isinstance(model, nn.Module) else list(model or [])
    optimizers = (optimizer,) if isinstance(optimizer, Optimizer) else tuple(optimizer or ())
    session = open_session(
        out or default_path("watch"),
        command=sys.argv,
        names=Names(models or None),
        schedule=schedule,
        budget=budget,
        sinks=sinks,
    )
    hooked = bool(models or optimizers)
    if not hooked:
        yield from _without_hooks(session)
        return
    with attach(session, optimizers):
        if experiments and session.rank == 0:  # the other ranks would find the same
            begin_taping(session, budget)
        for compiled in filter(is_compiled, models):
            session.something_compiled(compiled)
        for each in optimizers:
            session.optimizer_made(each)
        try:
            yield Monitor(session, hooked=True)
        finally:
            session.close()


def _without_hooks(session: Session) -> Iterator[Monitor]:
    try:
        yield Monitor(session, hooked=False)
    finally:
        session.close()


def open_session(
    out: str | os.PathLike,
    *,
    command: Sequence[str],
    names: Names,
    schedule: str | None = None,
    budget: float | None = None,
    on_row: Any = None,
    rank: int | None = None,
    sinks: Sequence[Sink] = (),
    lines: Lines | None = None,
) -> Session:
    """A new run directory and the session that writes it; with a rank given, `out` is that rank's own.

    Sinks hear of rank 0 only.
    """
    rules = parse_schedule(schedule) if schedule else ()
    found, world = rank_and_world()
    path = Path(f"{out}.rank{found}") if found and rank is None else Path(out)
    rank = found if rank is None else rank
    source, script = describe_source(command[0] if command else None)
    info = {
        "command": list(command),
        "source": source,
        "directory": os.getcwd(),
        "began": time.time(),
        "rank": rank,
        "world": world,
        "schedule": schedule,
        "versions": versions(),
    }
    writer = RunWriter(path, info, sinks if rank == 0 else ())
    if 0 < len(script) <= LARGEST_COPY:
        writer.keep_file(SCRIPT_COPY, script)
    return Session(writer, names, rules=rules, budget=budget, rank=rank, on_row=on_row, lines=lines)


def default_path(label: str) -> Path:
    """runs/LABEL-DATE-TIME, below the working directory; the same for all ranks that one launcher started."""
    moment = time.time()
    if rank_and_world()[1] > 1:
        with suppress(OSError):
            moment = os.stat(f"/proc/{os.getppid()}").st_ctime
    return Path("runs") / f"{label}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(moment))}"


def versions() -> dict[str, Any]:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "cpu"
    return {
        "gradproof": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": device,
    }


def is_compiled(module: nn.Module) -> bool:
    return any(
        type(m).__name__ == "OptimizedModule" or getattr(m, "_compiled_call_impl", None) is not None
        for m in module.modules()
    )
