"""The commands that show a run: report, live."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from gradproof.errors import UserError


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
    print(f"{file}  ({file.stat().st_size / 1e6:.2f} MB)")
    return 0


def write_report(runs: list[str], out: str | None = None) -> Path:
    """The page of runs, as a file."""
    from gradproof.record.run import open_run
    from gradproof.report.html import render_page

    opened = [open_run(run) for run in runs]
    file = Path(out) if out else opened[0].path / ("report.html" if len(runs) == 1 else "comparison.html")
    try:
        file.write_text(render_page(opened), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {file}: {error}; choose another place with -o") from None
    return file


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
    parser.set_defaults(function=live)


def live(args: argparse.Namespace) -> int:
    from gradproof.report.live import LiveServer, Runs

    server = LiveServer(Runs(args.path), args.host, args.port, args.token)
    print(f"{server.url}  (Ctrl-C ends it)", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print(file=sys.stderr)
    finally:
        server.stopping.set()
        server.server_close()
    return 0
