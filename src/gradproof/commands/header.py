"""The command that says where gradproof.h is: header."""

from __future__ import annotations

import argparse
from pathlib import Path

HEADER = Path(__file__).parent.parent / "include" / "gradproof.h"


def add_header(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "header",
        help="where gradproof.h is, for a trainer in C, C++ or CUDA",
        description="Prints the path of gradproof.h: one header that writes a run, or one step as a dump, from C, C++ "
        "or CUDA.",
        epilog='example: cc -I"$(dirname "$(gradproof header)")" train.c -lm',
    )
    parser.set_defaults(function=print_header)


def print_header(args: argparse.Namespace) -> int:
    print(HEADER)
    return 0
