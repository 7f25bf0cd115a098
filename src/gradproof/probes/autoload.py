"""Watches processes that have no `gradproof run` in front of them: PyTorch calls `attach_if_asked` at `import torch`.

Asked by GRADPROOF_RUN, which `gradproof run` sets for the processes that its script starts (a DDP training by
torch.multiprocessing.spawn), or by the user with `GRADPROOF=1 python train.py`. Not asked, it imports nothing.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from gradproof.probes.lines import Lines
    from gradproof.probes.session import Session

HANDOVER = "GRADPROOF_RUN"


@contextmanager
def handed_over(
    run: Path, schedule: str | None, budget: float | None, experiments: bool = True
) -> Iterator[None]:
    """Inside, processes that this one starts are watched too, into directories beside its own run."""
    wish = {"pid": os.getpid(), "run": str(run.absolute()), "schedule": schedule, "budget": budget}
    wish["experiments"] = experiments
    before = os.environ.get(HANDOVER)
    os.environ[HANDOVER] = json.dumps(wish)
    try:
        yield
    finally:
        os.environ.pop(HANDOVER)
        if before is not None:
            os.environ[HANDOVER] = before


def find_child_runs(run: Path) -> list[Path]:
    """The runs of processes that a watched script started, those with steps, in the order of their ranks."""
    found = []
    for path in run.parent.glob("*.rank*"):
        name, _, rank = path.name.rpartition(".rank")
        steps = path / "steps.csv"
        if name == run.name and rank.isdecimal() and steps.exists() and steps.read_bytes().count(b"\n") > 1:
            found.append((int(rank), path))
    return [path for _, path in sorted(found)]


def attach_if_asked() -> None:
    """The entry point. It waits for the first optimizer, so that a DataLoader's worker is left alone."""
    try:
        if find_wish() is not None:
            wait_for_optimizer()
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


def wait_for_optimizer() -> None:
    """Until then, only the lines are remembered at which the script makes its loaders, wrappers and groups."""
    from contextlib import ExitStack

    from torch.optim import Optimizer

    from gradproof.probes.lines import Lines, makings

    original = Optimizer.__init__
    if getattr(original, "gradproof_waits", False):
        return

    lines, waiting = Lines(), ExitStack()

    def init(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        Optimizer.__init__ = original  # type: ignore[method-assign]
        waiting.close()
        original(self, *args, **kwargs)
        try:
            if (wish := find_wish()) is not None:
                begin(wish, self, lines)
        except Exception as error:
            print(f"gradproof cannot watch process {os.getpid()}: {error}", file=sys.stderr)

    init.gradproof_waits = True  # type: ignore[attr-defined]
    init.__wrapped__ = original  # type: ignore[attr-defined]
    Optimizer.__init__ = init  # type: ignore[method-assign]
    makings(lines, waiting)


def begin(wish: dict[str, Any], optimizer: Optimizer, lines: Lines) -> None:
    """Open a run for this process and listen until its end."""
    from multiprocessing.util import Finalize

    from gradproof.probes.hooks import attach
    from gradproof.probes.names import Names
    from gradproof.probes.taping import begin_taping
    from gradproof.probes.watch import default_path, open_session

    number = process_number()
    label = Path(sys.argv[0]).stem.strip("-") or "python"
    out = f"{wish['run']}.rank{number}" if wish["run"] else default_path(label)
    session = open_session(
        out,
        command=sys.argv,
        names=Names(),
        schedule=wish.get("schedule"),
        budget=wish.get("budget"),
        rank=number if wish["run"] else None,
        lines=lines,
    )
    if number == 0 and wish.get("experiments", True):  # the other ranks would find the same
        begin_taping(session, wish.get("budget"))
    hooks = attach(session)
    session.optimizer_made(optimizer)
    # runs in children of multiprocessing, which leave without atexit, and in any other process
    Finalize(None, finish, args=(session, hooks, not wish["run"]), exitpriority=100)


def finish(session: Session, hooks: Any, report: bool) -> None:
    """The end of the process: the run is closed, and of an unaccompanied training rank 0 reports."""
    session.close()
    hooks.close()
    if report and session.rank == 0 and session.step:
        import subprocess

        sys.stdout.flush()
        command = [sys.executable, "-m", "gradproof", "diagnose", str(session.writer.path)]
        subprocess.run(command, stdout=sys.stderr.fileno(), env={**os.environ, "GRADPROOF": "0"})


def process_number() -> int:
    """The rank, where there are ranks; else the how-manieth child of its parent this is, from 0."""
    from multiprocessing import current_process

    from gradproof.probes.distributed import rank_and_world

    rank, world = rank_and_world()
    identity = getattr(current_process(), "_identity", ())
    return rank if world > 1 or not identity else identity[-1] - 1
