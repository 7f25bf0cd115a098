"""The commands that look at recorded runs in a terminal or hand them on: show, compare, export."""

from __future__ import annotations

import argparse
import shutil

from gradproof.errors import UserError

WIDTH = 100  # columns, where the terminal does not say


def add_show(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "show",
        help="a loss or a tensor's statistics over the steps, plotted in the terminal",
        description="Plots what a run recorded. NAME is a tensor, a part of its name, a regular expression, or a "
        "column of steps.csv such as loss, lr or grad_norm. Without NAME: the loss, and the names that there are.",
        epilog="example: gradproof show runs/a 'blocks.*weight' --statistic absmax",
    )
    parser.add_argument("run", metavar="RUN", help="a run directory")
    parser.add_argument("name", metavar="NAME", nargs="?", help="a tensor, a pattern or a column")
    parser.add_argument("--statistic", default="norm", help="norm (the default), absmax, std, nan, …")
    parser.set_defaults(function=show)


def show(args: argparse.Namespace) -> int:
    from gradproof.record.run import open_run
    from gradproof.record.schema import STATISTICS
    from gradproof.report.tensor import render_overview, render_shown
    from gradproof.report.text import wants_color

    if args.statistic not in STATISTICS:
        raise UserError(f"there is no statistic {args.statistic!r}; there are {', '.join(STATISTICS)}")
    run = open_run(args.run)
    look = (terminal_width(), wants_color())
    print(
        render_overview(run, *look)
        if args.name is None
        else render_shown(run, args.name, args.statistic, *look)
    )
    return 0


def add_compare(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "compare",
        help="two or more runs over each other: losses, findings, and what changed between them",
        description="Plots the losses over each other and lists what differs: findings, arguments, versions, "
        "optimizer settings, shapes, norms, and the script itself.",
        epilog="example: gradproof compare runs/before runs/after",
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="run directories; the first is the reference")
    parser.add_argument("--json", action="store_true", help="the same as data")
    parser.set_defaults(function=compare)


def compare(args: argparse.Namespace) -> int:
    from gradproof.commands.watching import write_json
    from gradproof.record.run import open_run
    from gradproof.report.comparison import compare_trainings
    from gradproof.report.comparison_text import render_comparison
    from gradproof.report.text import wants_color

    if len(args.runs) < 2:
        raise UserError(f"one run has nothing to be compared with; gradproof show {args.runs[0]} plots it")
    runs = [open_run(path) for path in args.runs]
    found = compare_trainings(runs)
    if args.json:
        write_json(found.as_data(), None)
    else:
        print(render_comparison(found, runs, terminal_width(), wants_color()), end="")
    return 0


def terminal_width() -> int:
    return min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)
