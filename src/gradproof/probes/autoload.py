"""Watches processes that have no `gradproof run` in front of them: those that a watched script starts or forks.

Asked by GRADPROOF_RUN, which `gradproof run` sets for the processes of its script, or by the user with GRADPROOF=1. Who
is started anew comes here by `attach/sitecustomize.py`, when it has imported torch; who is forked, at once.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradproof import children

if TYPE_CHECKING:
    from gradproof.probes.lines import Lines
    from gradproof.probes.session import Session

HANDOVER = "GRADPROOF_RUN"
PROCESS = ".process"  # what a run's name goes on with where a process is no rank of a group


@contextmanager
def handed_over(
    run: Path,
    schedule: str | None,
    budget: float | None,
    experiments: bool = True,
    examine: float | None = None,
) -> Iterator[None]:
    """Inside, processes that this one starts are watched too, into directories beside its own run."""
    before = {name: os.environ.get(name) for name in (HANDOVER, "PYTHONPATH")}
    hand_over(run, {"schedule": schedule, "budget": budget, "experiments": experiments, "examine": examine})
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)  # a script may have cleared it
            if value is not None:
                os.environ[name] = value


def hand_over(run: Path, options: dict[str, Any]) -> None:
    """From here on, processes that this one starts are watched."""
    os.environ[HANDOVER] = json.dumps({"pid": os.getpid(), "run": str(run.absolute()), **options})
    entries = [children.ATTACH, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, entries)))


def find_child_runs(run: Path) -> list[Path]:
    """The runs of processes that a watched script started, those with steps: ranks in their order, then others."""
    found = []
    for path in run.parent.glob("*"):
        if not path.name.startswith((f"{run.name}.rank", f"{run.name}{PROCESS}")):
            continue
        kind, _, number = path.name.removeprefix(f"{run.name}.").replace("-", "").partition("rank")
        steps = path / "steps.csv"
        if steps.exists() and steps.read_bytes().count(b"\n") > 1:
            found.append(
                (bool(kind), int(number) if number.isdecimal() else 0, len(path.name), path.name, path)
            )
    return [path for *_, path in sorted(found)]


def attach_if_asked() -> None:
    """It waits for a training to begin, so that a DataLoader's worker is left alone."""
    try:
        if find_wish() is not None:
            wait_for_training()
    except Exception as error:  # an exception here would break `import torch`
        print(f"gradproof cannot watch process {os.getpid()}: {error}", file=sys.stderr)


def find_wish() -> dict[str, Any] | None:
    """What this process was asked to do; nothing if it is the one that asked."""
    if os.environ.get("GRADPROOF") == "0":
        return None
    if HANDOVER in os.environ:
        wish = json.loads(os.environ[HANDOVER])
        return None if wish["pid"] == os.getpid() else wish
    return {"run": None} if os.environ.get("GRADPROOF") == "1" else None


_left: list[tuple[Session, ExitStack]] = []  # who is watched here, and not in processes that this one forks
_hears_of_forks = False


@contextmanager
def left_to_forks(session: Session, hooks: ExitStack) -> Iterator[None]:
    """A process that is forked meanwhile has nothing of this session's, and may be watched by one of its own."""
    _leave_to_forks(session, hooks)
    try:
        yield
    finally:
        _left.clear()


def _leave_to_forks(session: Session, hooks: ExitStack) -> None:
    global _hears_of_forks
    _left[:] = [(session, hooks)]
    if not _hears_of_forks:
        os.register_at_fork(after_in_child=_begin_anew)
        _hears_of_forks = True


def _begin_anew() -> None:
    """Runs in a forked process, before anything of the script's does."""
    if not _left:
        return
    try:
        for session, hooks in _left:
            session.leave_to_parent()
            hooks.close()
        _left.clear()
    finally:
        attach_if_asked()


def wait_for_training() -> None:
    """Until an optimizer is made or backward called, only the lines are remembered at which things are made."""
    import torch
    from torch.optim import Optimizer

    from gradproof.probes.lines import Lines, makings
    from gradproof.probes.replacing import replace

    if getattr(torch.autograd.backward, "gradproof_waits", False):
        return
    lines, waiting = Lines(), ExitStack()

    def begin_now(optimizer: Optimizer | None) -> None:
        try:
            if (wish := find_wish()) is not None:
                begin(wish, optimizer, lines)
        except Exception as error:
            print(f"gradproof cannot watch process {os.getpid()}: {error}", file=sys.stderr)

    def made(original: Callable) -> Callable:
        def init(self: Optimizer, *args: Any, **kwargs: Any) -> None:
            waiting.close()
            original(self, *args, **kwargs)
            begin_now(self)

        return init

    def called(original: Callable) -> Callable:
        def backward(*args: Any, **kwargs: Any) -> Any:
            waiting.close()
            begin_now(None)
            return torch.autograd.backward(*args, **kwargs)

        backward.gradproof_waits = True  # type: ignore[attr-defined]
        return backward

    replace(waiting, Optimizer, "__init__", made)
    replace(waiting, torch.autograd, "backward", called)
    makings(lines, waiting)


def begin(wish: dict[str, Any], optimizer: Any, lines: Lines) -> None:
    """Open a run for this process and listen until its end; a rank, or a training of its own beside the others."""
    from multiprocessing.util import Finalize

    from gradproof.probes.distributed import rank_and_world
    from gradproof.probes.helper import LIMIT, Helper
    from gradproof.probes.hooks import attach
    from gradproof.probes.names import Names
    from gradproof.probes.own_updates import OwnUpdates
    from gradproof.probes.taping import begin_taping
    from gradproof.probes.watch import default_path, open_session

    rank, world = rank_and_world()
    label = Path(sys.argv[0]).stem.strip("-") or "python"
    beside = wish["run"] and wish["run"] + (f".rank{rank}" if world > 1 else PROCESS)
    session = open_session(
        beside or default_path(label),
        command=sys.argv,
        names=Names(),
        schedule=wish.get("schedule"),
        budget=wish.get("budget"),
        rank=rank if beside else None,
        lines=lines,
    )
    first = world > 1 or not beside or session.writer.path.name.endswith(PROCESS)
    if rank == 0 and wish.get("experiments", True):  # the other ranks would find the same
        begin_taping(session, wish.get("budget"))
        if (
            wish.get("examine", LIMIT) != 0 and first
        ):  # of a sweep the first; `gradproof examine` asks the others
            session.helper = Helper(session.writer.path, wish.get("examine", LIMIT))
    hooks = attach(session)
    _leave_to_forks(session, hooks)
    if not beside:
        hand_over(session.writer.path, {})
    if optimizer is None:
        session.own = OwnUpdates(session)
    else:
        session.optimizer_made(optimizer)
    # runs in children of multiprocessing, which leave without atexit, and in any other process
    Finalize(None, finish, args=(session, hooks, not beside), exitpriority=100)


def finish(session: Session, hooks: Any, report: bool) -> None:
    """The end of the process: the run is closed, and of an unaccompanied training rank 0 reports."""
    session.close()
    hooks.close()
    session.finish_examination()
    if report and session.rank == 0 and session.step:
        import subprocess

        sys.stdout.flush()
        command = [sys.executable, "-m", "gradproof", "diagnose", str(session.writer.path)]
        subprocess.run(command, stdout=sys.stderr.fileno(), env=children.environment())
