"""Notebooks: after `%load_ext gradproof`, a cell with `%%gradproof` or `gradproof.watch` in it shows its verdict below.

The page comes with it, in a frame that may run its own script and nothing else: no network, no reach into the notebook.
"""

from __future__ import annotations

import argparse
import ast
import html
import linecache
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from gradproof.errors import UserError, plain, warn

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

LARGEST_PAGE = 4_000_000  # characters that a notebook is given to keep; a larger page is named
PERIOD = 0.5  # seconds between two looks at an examination
FRAME = (
    '<iframe sandbox="allow-scripts" srcdoc="{page}" title="gradproof" loading="lazy" '
    'style="width: 100%; height: 640px; border: 1px solid #8884; border-radius: 6px"></iframe>'
)


class Verdict:
    """What is shown of a run: text for a terminal, and for a notebook the same with the page."""

    def __init__(self, run: Path) -> None:
        from gradproof.diagnosis.ranking import diagnose
        from gradproof.record.whole import open_whole
        from gradproof.report.html import render_page
        from gradproof.report.text import render_text

        opened = open_whole(run)
        found = diagnose(opened)
        self.run = opened.path
        self.headline = str(found)
        self.text = render_text(found)
        self.page = render_page([opened], [found])

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        where = html.escape(plain(str(self.run)))
        page = (
            FRAME.format(page=html.escape(self.page))
            if len(self.page) <= LARGEST_PAGE
            else f"<p>The page is too large for a notebook: <code>gradproof report {where}</code></p>"
        )
        return (
            f"<div><strong style='white-space: pre-wrap'>{html.escape(self.headline)}</strong>"
            f"<details><summary>as text · {where}</summary><pre>{html.escape(self.text)}</pre></details>"
            f"{page}</div>"
        )


class Progress:
    """The line that stands in the place of the verdict until that is known."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


class Notebook:
    """One kernel: what its cells are called, and where each watched block of them is shown."""

    def __init__(self, shell: InteractiveShell) -> None:
        self.shell = shell
        self._handle: Any = None
        self._looked = 0.0

    def script(self) -> tuple[str, str]:
        """The cell that runs: its name, and its text."""
        numbers = self._numbers()
        number = self._running(numbers)
        file = next((file for file, its in numbers.items() if its == number), "")
        return name_of(number), "".join(linecache.getlines(file))

    def begins(self) -> dict[str, str]:
        """What the cells that have run so far are called: functions may come from any of them."""
        self._handle = None
        return {Path(file).name: name_of(number) for file, number in self._numbers().items()}

    def examines(self, progress: dict[str, Any]) -> None:
        with quietly():
            if "left" not in progress or time.monotonic() - self._looked < PERIOD:
                return
            self._looked = time.monotonic()
            asked, left = progress.get("asked", 0), progress.get("left", 0)
            self._show(
                Progress(f"gradproof · examining: {asked} of {asked + left} (interrupt to skip the rest)")
            )

    def ended(self, run: Path) -> None:
        with quietly():
            self._show(Verdict(run))
        self._handle = None

    def _show(self, what: object) -> None:
        from IPython.display import display

        if self._handle is None:
            self._handle = display(what, display_id=True)
        else:
            self._handle.update(what)

    def _numbers(self) -> dict[str, int]:
        """The file name that the kernel has given to a cell's code -> the cell's number."""
        return dict(getattr(self.shell.compile, "_filename_map", {}))

    def _running(self, numbers: dict[str, int]) -> int:
        return max(numbers.values(), default=self.shell.execution_count)

    # the cell magic --------------------------------------------------------------------------------------------

    def watch_cell(self, line: str, cell: str) -> None:
        """Run a cell as it is, and watch whatever trains in it: `%%gradproof [--out DIR] [--examine TIME]`."""
        from IPython.core.error import UsageError

        from gradproof.commands.examining import parse_examine
        from gradproof.probes.script import raised_by
        from gradproof.probes.watch import default_path, watch_everything

        try:
            chosen = parse_line(line)
            examine = parse_examine(chosen.examine)
        except UserError as error:
            raise UsageError(str(error)) from None
        number = self._running(self._numbers())
        execute = self._compile(cell, number)
        script = (name_of(number), f"%%gradproof {line}\n{cell}")
        out = chosen.out or default_path(f"cell-{number}")
        with watch_everything(script, out, examine) as monitor:
            try:
                execute()
            except BaseException as error:
                monitor.note_end(**raised_by(error))
                raise

    def _compile(self, cell: str, number: int) -> Callable[[], None]:
        """What runs a cell's code in the notebook's variables; the value of its last line is shown, as ever."""
        shell = self.shell
        text = "\n" + shell.transform_cell(cell)  # lines as the cell counts them, the magic's own included
        file = shell.compile.cache(text, number, raw_code=cell)
        tree = shell.compile.ast_parse(text, filename=file)
        last = [tree.body.pop()] if tree.body and isinstance(tree.body[-1], ast.Expr) else []
        codes = [shell.compile(tree, file, "exec")]
        codes += [shell.compile(ast.Interactive(last), file, "single")] if last else []

        def execute() -> None:
            for code in codes:
                exec(code, shell.user_global_ns, shell.user_ns)

        return execute


def name_of(number: int) -> str:
    return f"cell-{number}.py"  # .py: so ends every place in a source


@contextmanager
def quietly() -> Iterator[None]:
    """What cannot be shown is not worth a training: one warning, and it goes on."""
    try:
        yield
    except Exception as error:
        warn(f"gradproof could not show its verdict: {type(error).__name__}: {error}", stacklevel=4)


class Options(argparse.ArgumentParser):
    """Of the magic: what is wrong with them is said in the cell, and ends nothing."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; for example: %%gradproof --out runs/mine --examine 30s")


def parse_line(line: str) -> argparse.Namespace:
    parser = Options(prog="%%gradproof", add_help=False)
    parser.add_argument("--out")
    parser.add_argument("--examine", default="30s")
    return parser.parse_args(shlex.split(line))


def load(shell: InteractiveShell) -> None:
    """What `%load_ext gradproof` does; done again, it does nothing new."""
    from gradproof.probes import watch

    watch.stage = notebook = Notebook(shell)
    shell.register_magic_function(notebook.watch_cell, "cell", "gradproof")


def unload(shell: InteractiveShell) -> None:
    from gradproof.probes import watch

    watch.stage = None
    shell.magics_manager.magics["cell"].pop("gradproof", None)
