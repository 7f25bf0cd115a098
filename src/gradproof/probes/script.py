"""Runs an unmodified training script as `python SCRIPT ARGS` would, watched from its first line to its last."""

from __future__ import annotations

import builtins
import importlib.util
import os
import signal
import sys
import traceback
import types
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradproof.errors import UserError, open_stderr_again
from gradproof.probes.helper import LIMIT

if TYPE_CHECKING:
    from gradproof.record.sink import Sink

OWN = str(Path(__file__).parents[1])
LONGEST_MESSAGE = 500  # characters of an exception


@dataclass(frozen=True)
class Program:
    """A script or module that can be executed as `__main__`."""

    name: str
    code: types.CodeType
    file: str
    first_path: str  # what Python puts first on sys.path
    spec: ModuleSpec | None = None


@dataclass(frozen=True)
class Outcome:
    """How a watched script ended."""

    path: Path  # of the run
    exit_code: int
    error: BaseException | None
    interrupted: bool
    steps: int
    backwards: int
    rank: int
    broken: str | None  # why the run could not be written, or why watching ended early
    printed: tuple[
        str, ...
    ] = ()  # what changed between the losses that a script without backward has printed
    elsewhere: int = 0  # processes that the script started and that trained, where it did not itself
    hangs: bool = False  # the disk with the run does not answer
    stepping: str = ""  # the optimizer whose step had begun, and not ended


def load_script(path: str) -> Program:
    """Compile a script file; UserError says in one sentence why it cannot be run."""
    file = Path(path)
    if not file.exists():
        near = sorted(p.name for p in file.parent.glob("*.py"))[:5] if file.parent.is_dir() else []
        hint = (
            f"; in {file.parent.resolve().name}/ there are {', '.join(near)}"
            if near
            else "; say where it is, as `python` would be told"
        )
        raise UserError(f"there is no script {path}{hint}")
    if file.is_dir():
        if (file / "__main__.py").exists():
            return load_script(str(file / "__main__.py"))
        raise UserError(f"{path} is a directory without a __main__.py; name the training script in it")
    try:
        # not with this file's own `from __future__` imports
        code = compile(file.read_bytes(), os.path.abspath(file), "exec", dont_inherit=True)
    except SyntaxError as error:
        raise UserError(
            f"{path} is not valid Python: {error.msg}, line {error.lineno}; repair that line first"
        ) from None
    except (ValueError, UnicodeDecodeError, OSError) as error:
        raise UserError(f"{path} cannot be read as Python: {error}") from None
    return Program(file.stem, code, str(file), str(file.resolve().parent))


def load_module(name: str) -> Program:
    """Find and compile `-m NAME`."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
        code = spec.loader.get_code(spec.name) if spec and spec.loader else None  # type: ignore[attr-defined]
    except (ImportError, ValueError, AttributeError):
        spec, code = None, None
    except SyntaxError as error:
        raise UserError(
            f"module {name} is not valid Python: {error.msg}, line {error.lineno}; repair that line first"
        ) from None
    if spec is None or code is None:
        raise UserError(
            f"there is no module {name} that could be run with -m from {os.getcwd()}; "
            f"start it where `python -m {name}` runs"
        )
    return Program(name, code, spec.origin or name, os.getcwd(), spec)


def execute(program: Program, arguments: Sequence[str]) -> tuple[int, BaseException | None]:
    """Run a program as `__main__`; its exit code, and the exception that ended it, shown as Python shows it."""
    main = types.ModuleType("__main__")
    main.__dict__.update(
        __file__=os.path.abspath(program.file), __builtins__=builtins, __spec__=program.spec, __cached__=None
    )
    if program.spec is not None:
        main.__package__ = program.spec.parent
    sys.modules["__main__"] = main
    sys.argv = [program.file, *arguments]
    sys.path[0] = program.first_path
    try:
        exec(program.code, main.__dict__)
    except SystemExit as stop:
        return exit_code_of(stop), None
    except BaseException as error:
        shown = error.__traceback__
        while shown is not None and shown.tb_frame.f_code.co_filename == __file__:
            shown = shown.tb_next
        sys.excepthook(type(error), error.with_traceback(shown), shown)
        return 130 if isinstance(error, KeyboardInterrupt) else 1, error
    return 0, None


def raised_by(error: BaseException | None) -> dict[str, Any]:
    """For the run: the exception that ended the script, and the innermost of the script's own lines that it came by."""
    if error is None or isinstance(error, KeyboardInterrupt):
        return {}
    from gradproof.probes.names import is_installed

    frames = traceback.extract_tb(error.__traceback__)
    lines = [f for f in frames if not is_installed(f.filename) and not f.filename.startswith(OWN)]
    place = f"{os.path.basename(lines[-1].filename)}:{lines[-1].lineno}" if lines else ""
    text = str(error).strip().partition("\n")[0][:LONGEST_MESSAGE]
    return {"raised": {"type": type(error).__name__, "text": text, "line": place}}


def exit_code_of(stop: SystemExit) -> int:
    if stop.code is None or isinstance(stop.code, int):
        return stop.code or 0
    print(stop.code, file=sys.stderr)
    return 1


def run_program(
    program: Program,
    arguments: Sequence[str],
    *,
    out: str | None = None,
    schedule: str | None = None,
    budget: float | None = None,
    quiet: bool = False,
    experiments: bool = True,
    examine: float | None = LIMIT,
    specimens: int | None = None,
    fix: tuple[str, float] | None = None,
    stop_after: int | None = None,
    until: int | None = None,
    sinks: Sequence[Sink] = (),
    on_open: Callable[[Path], None] | None = None,
) -> Outcome:
    """Watch a program from start to end; whatever happens in it, the run is closed and readable afterwards."""
    from gradproof.kernels.warm import hash_beside
    from gradproof.probes.autoload import find_child_runs, handed_over, left_to_forks
    from gradproof.probes.helper import Helper
    from gradproof.probes.hooks import attach
    from gradproof.probes.interventions import intervene
    from gradproof.probes.names import Names
    from gradproof.probes.own_updates import OwnUpdates
    from gradproof.probes.printed import Printed
    from gradproof.probes.progress import examination_line, progress_line
    from gradproof.probes.taping import begin_taping
    from gradproof.probes.watch import default_path, open_session

    show, wipe = progress_line()
    session = open_session(
        out or default_path(program.name),
        command=[program.file, *arguments],
        names=Names(),
        schedule=schedule,
        budget=budget,
        on_row=None if quiet else show,
        sinks=sinks,
    )
    session.own, session.printed = OwnUpdates(session), Printed()
    if experiments:
        begin_taping(session, budget, only=until, limit=specimens)
        if examine != 0 and session.rank == 0:
            session.helper = Helper(session.writer.path, examine)
    session.stop_after = stop_after if until is None else until + 1
    if fix is not None:
        session.writer.set_info(fix=f"{fix[0]}={fix[1]:g}")
    if on_open is not None and session.rank == 0:
        on_open(session.writer.path)
    handover = handed_over(session.writer.path, schedule, budget, experiments, examine)
    hash_beside()
    with attach(session) as stack, handover, left_to_forks(session, stack), ExitStack() as fixed:
        if fix is not None:
            intervene(fixed, *fix)
        exit_code, error = execute(program, arguments)
        if os.getpid() != session.pid:  # forked by the script, and at its end: what follows is the parent's
            raise SystemExit(exit_code)
        open_stderr_again()
        wipe()
        session.writer.set_info(script=program.file, exit_code=exit_code, **raised_by(error))
        session.close()
    session.finish_examination(examination_line() if not quiet else lambda progress: None)
    wipe()
    hangs = session.writer.broken is not None and session.writer.may_hang
    children = find_child_runs(session.writer.path) if session.step == 0 and not hangs else []
    return Outcome(
        seen_from_here(children[0] if children else session.writer.path),
        exit_code,
        error,
        isinstance(error, KeyboardInterrupt),
        session.step,
        session.counts["backward"],
        session.rank,
        session.writer.broken or session.failure,
        tuple(session.facts.get("printed", {}).get("changed", ())),
        len(children),
        hangs,
        session.stepping,
    )


def seen_from_here(path: Path) -> Path:
    """The short form of a path below the working directory; a script may have left the one it was started in."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def die_by_interrupt() -> None:
    """End as Python ends on Ctrl-C, so that a shell or launcher sees the signal."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
