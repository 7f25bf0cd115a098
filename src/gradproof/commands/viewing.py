"""The commands that show a run: report, live."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from gradproof.errors import UserError, plain
from gradproof.files import replace_file

if TYPE_CHECKING:
    import subprocess

    from gradproof.diagnosis.findings import Diagnosis
    from gradproof.report.live import LiveServer

SMALL = 64_000_000  # bytes of a run up to which its page is written unasked, in well under half a second


def add_report(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "report",
        help="a run as one self-contained page, or as text",
        description="Writes a run as one HTML file: the diagnosis, curves, a heat map step × layer, every tensor. It "
        "needs no network and no server, and can be mailed. Several runs become their comparison. Needs no torch.",
        epilog="example: gradproof report runs/a -o a.html · gradproof report runs/a runs/b",
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="a run directory; several are compared")
    parser.add_argument(
        "-o", "--out", metavar="FILE", help="where to (default: report.html in the first run)"
    )
    parser.add_argument("--text", action="store_true", help="print the diagnosis instead")
    parser.set_defaults(function=report)


def report(args: argparse.Namespace) -> int:
    if args.text:
        from gradproof.diagnosis.ranking import diagnose
        from gradproof.report.text import render_text, wants_color

        print("\n".join(render_text(diagnose(run), wants_color()) for run in args.runs), end="")
        return 0
    file = write_report(args.runs, args.out)
    print(f"{plain(str(file))}  ({file.stat().st_size / 1e6:.2f} MB)")
    return 0


def write_report(runs: list[str], out: str | None = None) -> Path:
    """The page of runs, as a file."""
    from gradproof.record.whole import open_whole
    from gradproof.report.html import render_page

    opened = [open_whole(run) for run in runs]
    file = Path(out) if out else opened[0].path / ("report.html" if len(runs) == 1 else "comparison.html")
    page = render_page(opened)
    try:
        if out:
            file.write_text(page, encoding="utf-8")
        else:  # into a run, which may hold a link of that name
            replace_file(file, page.encode())
    except OSError as error:
        raise UserError(f"cannot write {file}: {error}; choose another place with -o") from None
    return file


def offer_page(found: Diagnosis, run: Path) -> str:
    """The page of a run that has just ended: written if that is quick, else the command that writes it."""
    from gradproof.record.whole import open_whole
    from gradproof.report.html import render_page

    try:
        if sum(file.stat().st_size for file in run.iterdir() if file.is_file()) <= SMALL:
            replace_file(run / "report.html", render_page([open_whole(run)], [found]).encode())
            return f"page: {run / 'report.html'}"
    except Exception as error:  # the diagnosis has been said; a script's end must not turn into a traceback
        return f"page: could not be written ({type(error).__name__}: {error})"
    return f"page: gradproof report {run}"


def add_live(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "live",
        help="the page while it trains, in a browser",
        description="Serves the page of a run, or of all runs in a directory, and keeps it up to date while they grow. "
        "Only reads files; this machine only, unless a token guards it. Needs no torch.",
        epilog="example: gradproof live runs",
    )
    parser.add_argument("path", metavar="RUN|DIR", nargs="?", default="runs", help="default: runs")
    parser.add_argument("--host", default="127.0.0.1", help="address to serve at; another needs --token")
    parser.add_argument("--port", type=int, default=8737, help="default: 8737; 0 takes a free one")
    parser.add_argument("--token", metavar="WORD", help="who opens the page must know it; `auto` makes one")
    # for `gradproof run --live`: whoever holds the other end of the pipe is gone when it closes
    parser.add_argument("--until-stdin-ends", action="store_true", help=argparse.SUPPRESS)
    parser.set_defaults(function=live)


def live(args: argparse.Namespace) -> int:
    import threading

    from gradproof.report.live import LiveServer, Runs

    server = LiveServer(Runs(args.path), args.host, args.port, args.token)
    if args.until_stdin_ends:
        threading.Thread(target=shut_down_with_stdin, args=(server,), daemon=True).start()
    print(f"{server.url}  (Ctrl-C ends it)", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print(file=sys.stderr)
    finally:
        server.stopping.set()
        server.server_close()
    return 0


def shut_down_with_stdin(server: LiveServer) -> None:
    sys.stdin.read()
    server.shutdown()


@contextmanager
def served_beside() -> Iterator[LivePage]:
    """A page that a process of its own serves: training shares neither its interpreter nor its time with it."""
    page = LivePage()
    try:
        yield page
    finally:
        page.close()


class LivePage:
    """`open` starts serving a run; `close` ends it, and so does the end of this process, whatever ends it."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[str] | None = None
        self.url = ""

    def open(self, path: Path) -> None:
        import subprocess

        command = [sys.executable, "-m", "gradproof", "live", str(path), "--port", "0", "--until-stdin-ends"]
        self._server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if hasattr(os, "setpriority"):
            os.setpriority(os.PRIO_PROCESS, self._server.pid, 10)
        assert self._server.stdout is not None
        self.url = self._server.stdout.readline().split(" ")[0].strip()
        print(
            f"gradproof: live page at {self.url}" if self.url else "gradproof: no live page", file=sys.stderr
        )

    def wait_for_reader(self) -> None:
        """At a terminal, the page stays until Ctrl-C; a batch job ends when its script does."""
        if not self.url or sys.stdin is None or not sys.stdin.isatty():
            return
        print(f"gradproof: the page stays at {self.url} until Ctrl-C", file=sys.stderr)
        try:
            if self._server is not None:
                self._server.wait()
        except KeyboardInterrupt:
            print(file=sys.stderr)

    def close(self) -> None:
        import subprocess

        if self._server is None:
            return
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.close()
        try:
            self._server.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
        self._server.stdout.close()
