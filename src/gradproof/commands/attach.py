"""The command that says what has to be on PYTHONPATH for GRADPROOF=1 to be heard: attach."""

from __future__ import annotations

import argparse

from gradproof.children import ATTACH


def add_attach(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "attach",
        help="the folder that makes GRADPROOF=1 work, for a command that cannot be changed",
        description="Prints a folder. Where it is on PYTHONPATH and GRADPROOF=1 is set, every Python process that "
        "trains is watched, whoever starts it; where GRADPROOF=1 is not set, nothing happens.",
        epilog='example: GRADPROOF=1 PYTHONPATH="$(gradproof attach)" torchrun train.py',
    )
    parser.set_defaults(function=print_folder)


def print_folder(args: argparse.Namespace) -> int:
    print(ATTACH)
    return 0
