"""The commands for whoever debugs: ask, brief, checkpoint, agents, schema, mcp."""

from __future__ import annotations

import argparse
import gc
import sys
from pathlib import Path

from gradproof.errors import UserError, plain

SELDOM = (
    200_000  # new objects between two searches for cycles: most of an answer's are PyTorch's own, and stay
)


def add_ask(commands: argparse._SubParsersAction) -> None:
    from gradproof.ask.kinds import KINDS

    parser = commands.add_parser(
        "ask",
        help="one question about a recorded step, one answer",
        description="Asks one question of a run and its recorded steps. Without a question: what can be asked of this "
        "run, and what cannot and why. Answers are short; a long list ends in a cursor.",
        epilog="questions: "
        + " · ".join(f"{kind.name}: {kind.sentence}" for kind in KINDS)
        + " · and every question of the examination, by its name",
    )
    parser.add_argument("run", metavar="RUN", help="a run directory")
    parser.add_argument("question", metavar="QUESTION", nargs="?", default="", help="what to ask")
    parser.add_argument("--step", type=int, help="which recorded step (default: the last one)")
    parser.add_argument("--of", metavar="NAME|MODULE|FILE:LINE", default="", help="about what")
    parser.add_argument("--change", default="", help="for what-if: e.g. lr=0.1x or 'weight_decay=0 clip=1'")
    parser.add_argument(
        "--patch",
        metavar="FILE",
        default="",
        help="for what-if: a diff of the script, which is run from the step on",
    )
    parser.add_argument("--steps", type=int, default=24, help="for what-if: steps to train (default: 24)")
    parser.add_argument("--part", metavar="SLICE", default="", help="for tensor: e.g. 0:4,2")
    parser.add_argument(
        "--with",
        dest="other",
        metavar="RUN|STEP",
        default="",
        help="parting: the other run; swap, changed: an earlier step",
    )
    parser.add_argument("--cursor", type=int, default=0, help="where a long list goes on")
    parser.add_argument("--most", type=int, default=4000, help="characters of an answer (default: 4000)")
    parser.add_argument("--json", action="store_true", help="the same as data (schema gradproof/answer/1)")
    parser.set_defaults(function=ask, leaves_at_once=True)


def ask(args: argparse.Namespace) -> int:
    from gradproof.ask.memory import keep_freed_memory
    from gradproof.ask.opened import OpenedRun
    from gradproof.commands.watching import write_json

    keep_freed_memory()
    gc.set_threshold(SELDOM)
    found = OpenedRun(args.run).ask(
        args.question,
        step=args.step,
        of=args.of,
        change=args.change,
        part=args.part,
        other=args.other,
        steps=args.steps,
        patch=args.patch,
        cursor=args.cursor,
        most=args.most,
    )
    if args.json:
        write_json(found.as_data(), None)
    else:
        sys.stdout.write(str(found))
    return 0


def add_brief(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "brief",
        help="a run in at most 1,500 tokens, for whoever goes on with it",
        description="What was run, what is wrong, what was ruled out with numbers, what was not asked, and the lines "
        "concerned: all that a colleague or an agent needs to go on. Needs no torch.",
        epilog="example: gradproof brief runs/a",
    )
    parser.add_argument("run", metavar="RUN", help="a run directory")
    parser.set_defaults(function=brief)


def brief(args: argparse.Namespace) -> int:
    from gradproof.ask.brief import write_brief
    from gradproof.record.run import open_run

    sys.stdout.write(write_brief(open_run(args.run)))
    return 0


def add_checkpoint(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "checkpoint",
        help="the weights and optimizer state of a recorded step, as a file for torch.load",
        description="Writes what a recorded step began with: weights, buffers and optimizer state, for "
        "load_state_dict. For whoever has overwritten the last good checkpoint.",
        epilog="example: gradproof checkpoint runs/a --step 19500 --out good.pt",
    )
    parser.add_argument("run", metavar="RUN", help="a run directory")
    parser.add_argument("--step", type=int, help="which recorded step (default: the last one)")
    parser.add_argument("--out", metavar="FILE", required=True, help="the file; it must not be there yet")
    parser.set_defaults(function=checkpoint)


def checkpoint(args: argparse.Namespace) -> int:
    from gradproof.ask.checkpoint import write_checkpoint
    from gradproof.ask.opened import OpenedRun

    print(plain(write_checkpoint(OpenedRun(args.run).specimen(args.step), args.out)))
    return 0


def add_agents(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "agents",
        help="a page for a project's AGENTS.md: how to find out why a training does not train",
        description="Prints at most 60 lines for a coding agent, or a colleague: five moves, with the commands.",
        epilog="example: gradproof agents >> AGENTS.md · gradproof agents --skill .claude/skills",
    )
    parser.add_argument("--skill", metavar="DIR", help="write it as a skill instead: DIR/gradproof/SKILL.md")
    parser.set_defaults(function=agents)


def agents(args: argparse.Namespace) -> int:
    from gradproof.ask.handover import read_page, write_skill

    if args.skill:
        print(plain(str(write_skill(Path(args.skill)))))
    else:
        sys.stdout.write(read_page())
    return 0


def add_schema(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "schema",
        help="the JSON Schema of what --json writes",
        description="Prints the versioned JSON Schema of an output; without a name, their names.",
        epilog="example: gradproof schema answer",
    )
    parser.add_argument("name", metavar="NAME", nargs="?", help="e.g. answer or diagnosis")
    parser.set_defaults(function=schema)


def schema(args: argparse.Namespace) -> int:
    from gradproof.ask.handover import read_schema, schema_names

    print(read_schema(args.name) if args.name else "\n".join(schema_names()))
    return 0


def add_mcp(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "mcp",
        help="the same questions for coding agents, over the Model Context Protocol",
        description="Serves the runs of a directory over stdio: every question is a tool, every run a resource. Only "
        "reads, unless --allow-run names directories whose scripts may be run. Needs gradproof[mcp].",
        epilog="example: gradproof mcp runs · gradproof mcp runs --allow-run .",
    )
    parser.add_argument("directory", metavar="DIR", nargs="?", default="runs", help="of runs (default: runs)")
    parser.add_argument(
        "--allow-run",
        action="append",
        default=[],
        metavar="DIR",
        help="scripts in it may be run, and patched",
    )
    parser.set_defaults(function=mcp)


def mcp(args: argparse.Namespace) -> int:
    try:
        from gradproof.integrations.mcp import serve
    except ImportError as error:
        raise UserError(
            f"the mcp SDK (2 or later) is missing ({error}): pip install 'gradproof[mcp]'"
        ) from None
    serve(args.directory, args.allow_run)
    return 0
