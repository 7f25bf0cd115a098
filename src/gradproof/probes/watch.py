"""`gradproof.watch`: the two-line way in, and the way in for training code that is no nn.Module."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from gradproof import __version__
from gradproof.probes.by_hand import Handed, Named, end_step, measure_tensors, named, note, wants_gradient
from gradproof.probes.distributed import rank_and_world
from gradproof.probes.helper import LIMIT, Helper
from gradproof.probes.hooks import attach
from gradproof.probes.lines import Lines
from gradproof.probes.names import Names
from gradproof.probes.own_updates import OwnUpdates
from gradproof.probes.schedule import parse_schedule
from gradproof.probes.session import Session
from gradproof.probes.taping import begin_taping
from gradproof.record.sink import Sink
from gradproof.record.source import LARGEST_COPY, SCRIPT_COPY, describe_source
from gradproof.record.writer import RunWriter


class Stage(Protocol):
    """Who shows a watched block where it runs: a notebook. None of these may raise."""

    def script(self) -> tuple[str, str]: ...  # what the running cell is called, and its text
    def begins(self) -> dict[str, str]: ...  # the file name of each cell's code -> what the cell is called
    def examines(self, progress: dict[str, Any]) -> None: ...
    def ended(self, run: Path) -> None: ...


stage: Stage | None = None  # set by `%load_ext gradproof`


class Step(int):
    """How many steps have ended. Called, it ends one: `monitor.step(loss=4.1, gradients={"W1": dW1})`."""

    def __new__(cls, monitor: Monitor) -> Step:
        made = super().__new__(cls, monitor._session.step)
        made._monitor = monitor
        return made

    _monitor: Monitor

    def __call__(self, loss: Any, gradients: Named | None = None, **values: float) -> None:
        self._monitor.end_step(loss, gradients, values)


class Monitor:
    """A run that is being written; `path` is its directory.

    With hooks attached everything is measured by itself. Without (`watch()`), a loop hands its numbers in:

        monitor.tensors("gradient", {"output": array})
        monitor.clip(before=7.9, after=1.0, limit=1.0)
        monitor.adam(m, v, update, parameter)
        monitor.log(loss=4.1, lr=3e-4, grad_norm=7.9)      # ends the step

    With `watch(parameters=P)`, a loop that computes its gradients itself hands in those, after its update:

        monitor.step(loss=4.1, gradients={"W1": dW1, "b1": db1})
    """

    def __init__(self, session: Session, hooked: bool, handed: Handed | None = None) -> None:
        self._session = session
        self._hooked = hooked
        self._handed = handed
        self.path: Path = session.writer.path

    @property
    def step(self) -> Step:
        """The number of steps that have ended; called with a loss, it ends one."""
        return Step(self)

    def end_step(self, loss: Any, gradients: Named | None, values: Mapping[str, Any]) -> None:
        """What calling `step` does."""
        if self._handed is not None:
            self._handed.step(loss, gradients, values)
        elif self._hooked:  # the step is seen by itself
            self._session.writer.write_event("log", step=self._session.step, loss=float(loss), **values)
        else:
            end_step(self._session, {"loss": loss, **values})

    def log(self, **values: float) -> None:
        """End a step of a hand-written loop; in a hooked run, note values beside it."""
        if self._hooked:
            self._session.writer.write_event("log", **{"step": self.step, **values})
        else:
            end_step(self._session, values)

    def note_end(self, **facts: Any) -> None:
        """What ended the training, for the run."""
        self._session.writer.set_info(**facts)

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
        for kind, given in (("adam_m", m), ("adam_v", v), ("update", update), ("weight", param)):
            if given is not None:
                self.tensors(kind, given)


@contextmanager
def watch(
    model: nn.Module | Sequence[nn.Module] | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    parameters: Named | None = None,
    out: str | os.PathLike | None = None,
    schedule: str | None = None,
    budget: float | None = None,
    sinks: Sequence[Sink] = (),
    experiments: bool = True,
) -> Iterator[Monitor]:
    """Record the training inside the block as a run on disk; leaves no hook behind. Sinks hear it, too.

    `parameters`, a dict or list of tensors or arrays, are what a loop without an optimizer changes itself.

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
        script=stage.script() if stage is not None else None,
    )
    by_backward = parameters is not None and wants_gradient(parameters)
    if not (models or optimizers or by_backward):
        yield from _without_hooks(session, parameters)
        return
    if not optimizers:
        session.own = OwnUpdates(session)
        if by_backward:
            session.own.name_given(named(parameters or {}))
    yield from _with_hooks(session, models, optimizers, budget, experiments)


@contextmanager
def watch_everything(
    script: tuple[str, str], out: str | os.PathLike, examine: float | None
) -> Iterator[Monitor]:
    """Whatever trains inside the block, as `gradproof run` watches a script; `script` is its name and its text."""
    session = open_session(out, command=[], names=Names(), script=script)
    session.own = OwnUpdates(session)
    yield from _with_hooks(session, [], (), None, True, examine)


def _with_hooks(
    session: Session,
    models: Sequence[nn.Module],
    optimizers: tuple[Optimizer, ...],
    budget: float | None,
    experiments: bool,
    examine: float | None = LIMIT,
) -> Iterator[Monitor]:
    with _on_stage(session) as show, attach(session, optimizers):
        if experiments and session.rank == 0:  # the other ranks would find the same
            begin_taping(session, budget)
            session.helper = Helper(session.writer.path, examine) if examine != 0 else None
        for compiled in filter(is_compiled, models):
            session.something_compiled(compiled)
        for each in optimizers:
            session.optimizer_made(each)
        try:
            yield Monitor(session, hooked=True)
        finally:
            session.close()
            session.finish_examination(show)


def _without_hooks(session: Session, parameters: Named | None) -> Iterator[Monitor]:
    with _on_stage(session):
        try:
            handed = Handed(session, parameters) if parameters is not None else None
            yield Monitor(session, hooked=False, handed=handed)
        finally:
            session.close()


@contextmanager
def _on_stage(session: Session) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Tells a notebook, where there is one, of a block; gives what shows how the examination after it comes on."""
    here = stage
    if here is None:
        yield lambda progress: None
        return
    session.cells = here.begins()
    session.writer.set_info(cells=session.cells)
    try:
        yield here.examines
    finally:
        here.ended(session.writer.path)


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
    script: tuple[str, str] | None = None,
) -> Session:
    """A new run directory and the session that writes it; with a rank given, `out` is that rank's own.

    Sinks hear of rank 0 only. `script` is the name and the text of what runs, where that is no file.
    """
    rules = parse_schedule(schedule) if schedule else ()
    found, world = rank_and_world()
    path = Path(f"{out}.rank{found}") if found and rank is None else Path(out)
    path = path.absolute()  # at once: a script may change its directory
    rank = found if rank is None else rank
    if script is not None:
        command, source, text = [script[0]], {"file": script[0]}, script[1].encode()
    else:
        source, text = describe_source(command[0] if command else None)
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
    if 0 < len(text) <= LARGEST_COPY:
        writer.append(SCRIPT_COPY, text)
    return Session(
        writer, names, rules=rules, budget=budget, rank=rank, world=world, on_row=on_row, lines=lines
    )


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
