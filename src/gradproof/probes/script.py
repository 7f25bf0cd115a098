"""Runs an unmodified training script as `python SCRIPT ARGS` would, watched from its first line to its last."""

from __future__ import annotations

import builtins
import importlib.util
import os
import signal
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import TYPE_CHECKING

from gradproof.errors import UserError

if TYPE_CHECKING:
    from gradproof.record.sink import Sink


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
    elsewhere: int = 0  # processes that the script started and that trained, where it did not itself


def load_script(path: str) -> Program:
    """Compile a script file; UserError says in one sentence why it cannot be run."""
    file = Path(path)
    if not file.exists():
        near = sorted(p.name for p in file.parent.glob("*.py"))[:5] if file.parent.is_dir() else []
        hint = f"; in {file.parent.resolve().name}/ there are {', '.join(near)}" if near else ""
        raise UserError(f"there is no script {path}{hint}")
    if file.is_dir():
        if (file / "__main__.py").exists():
            return load_script(str(file / "__main__.py"))
        raise UserError(f"{path} is a directory without a __main__.py; name the training script in it")
    try:
        code = compile(file.read_bytes(), os.path.abspath(file), "exec")
    except SyntaxError as error:
        raise UserError(f"{path} is not valid Python: {error.msg}, line {error.lineno}") from None
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
        raise UserError(f"module {name} is not valid Python: {error.msg}, line {error.lineno}") from None
    if spec is None or code is None:
        raise UserError(f"there is no module {name} that could be run with -m from {os.getcwd()}")
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
    fix: tuple[str, float] | None = None,
    stop_after: int | None = None,
    until: int | None = None,
    sinks: Sequence[Sink] = (),
    on_open: Callable[[Path], None] | None = None,
) -> Outcome:
    """Watch a program from start to end; whatever happens in it, the run is closed and readable afterwards."""
    from gradproof.probes.autoload import find_child_runs, handed_over
    from gradproof.probes.hooks import attach
    from gradproof.probes.interventions import intervene
    from gradproof.probes.names import Names
    from gradproof.probes.progress import progress_line
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
    if experiments:
        begin_taping(session, budget, only=until)
    session.stop_after = stop_after if until is None else until + 1
    if fix is not None:
        session.writer.set_info(fix=f"{fix[0]}={fix[1]:g}")
    if on_open is not None and session.rank == 0:
        on_open(session.writer.path)
    with attach(session) as stack, handed_over(session.writer.path, schedule, budget, experiments):
        if fix is not None:
            intervene(stack, *fix)
        exit_code, error = execute(program, arguments)
        wipe()
        session.writer.set_info(script=program.file, exit_code=exit_code)
        session.close()
    children = find_child_runs(session.writer.path) if session.step == 0 else []
    return Outcome(
        children[0] if children else session.writer.path,
        exit_code,
        error,
        isinstance(error, KeyboardInterrupt),
        session.step,
        session.counts["backward"],
        session.rank,
        session.writer.broken or session.failure,
        len(children),
    )


def die_by_interrupt() -> None:
    """End as Python ends on Ctrl-C, so that a shell or launcher sees the signal."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
