"""The commands that look at recorded runs in a terminal or hand them on: show, compare, export."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from gradproof.errors import UserError, plain

if TYPE_CHECKING:
    from gradproof.integrations.tensorboard import TensorBoard
    from gradproof.integrations.wandb import WandB

SINKS = ("tensorboard", "wandb")
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
        write_json({"schema": "gradproof/comparison/1", **found.as_data()}, None)
    else:
        print(render_comparison(found, runs, terminal_width(), wants_color()), end="")
    return 0


def add_export(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "export",
        help="a run as CSV or Parquet tables, or for TensorBoard or W&B",
        description="Writes a run for other tools. csv and parquet: two tables, steps and tensors. tensorboard: an "
        "event file with loss, learning rate, norms and distributions. wandb: an offline run with the scalars.",
        epilog="example: gradproof export runs/a --to tensorboard && tensorboard --logdir runs/a",
    )
    parser.add_argument("run", metavar="RUN", help="a run directory")
    parser.add_argument("--to", required=True, choices=("csv", "parquet", *SINKS), help="for which of them")
    parser.add_argument(
        "--out", metavar="DIR", help="where to (default: in the run, under the format's name)"
    )
    parser.set_defaults(function=export)


def export(args: argparse.Namespace) -> int:
    from gradproof.files import refuse_links
    from gradproof.record.export import write_csv, write_parquet
    from gradproof.record.run import open_run
    from gradproof.record.sink import replay_run

    run = open_run(args.run)
    out = Path(args.out) if args.out else run.path / args.to
    try:
        if not args.out:
            refuse_links(out)  # in a run, which may come from elsewhere
        if args.to in SINKS:
            sink = make_sink(args.to, args.out)
            replay_run(run, sink)
            out = sink.directory or out
        else:
            (write_csv if args.to == "csv" else write_parquet)(run, out)
    except OSError as error:
        raise UserError(f"cannot write to {out}: {error}; choose another place with --out") from None
    for note in run.notes:
        print(f"gradproof: {note}", file=sys.stderr)
    print(f"{len(run)} steps, {len(run.tensors)} tensors at {len(run.frames)} of them: {plain(str(out))}")
    print(f"next: {NEXT[args.to].format(out=plain(str(out)))}")
    return 0


NEXT = {
    "csv": "python -c \"import pandas; print(pandas.read_csv('{out}/tensors.csv').groupby('kind').norm.describe())\"",
    "parquet": "duckdb -c \"select name, max(norm) from '{out}/tensors.parquet' group by name order by 2 desc\"",
    "tensorboard": "tensorboard --logdir {out}",
    "wandb": "wandb sync {out}",
}


def make_sink(name: str, out: str | None = None) -> TensorBoard | WandB:
    """The sink of a name, for a run that is going to train or is to be exported to `out`."""
    if name == "tensorboard":
        from gradproof.integrations.tensorboard import TensorBoard

        return TensorBoard(out)
    from importlib.util import find_spec

    from gradproof.integrations.wandb import WandB

    if find_spec("wandb") is None:
        raise UserError("W&B is not installed: pip install 'gradproof[wandb]'")
    return WandB(out)


def terminal_width() -> int:
    return min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)
