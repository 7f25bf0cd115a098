"""The commands that help: explain, doctor."""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import os
import re
import shutil
import sys
from importlib import metadata
from pathlib import Path

from gradproof.errors import UserError

HERE = Path(__file__).parent.parent
PAGES = (HERE / "causes", HERE.parent.parent / "docs" / "causes")  # installed; in a checkout
EXTRAS = {
    "triton": "kernels on a GPU",
    "pyarrow": "gradproof export --to parquet",
    "tensorboard": "gradproof export --to tensorboard",
    "wandb": "gradproof export --to wandb",
    "tokenizers": "gradproof train with a tokenizer",
    "transformers": "the callback for the Hugging Face Trainer",
    "lightning": "the callback for Lightning",
    "accelerate": "watch_prepared for Accelerate",
    "IPython": "%load_ext gradproof, in a notebook",
}
OLDEST_TORCH = (2, 6)


def add_explain(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "explain",
        help="what a cause means, how it is told, and what to do: its page, in the terminal",
        description="Prints the page of a cause: a script that has it, what gradproof says about it, how it is mended, "
        "what raises the suspicion and what decides it. Without a name: all causes, a line each.",
        epilog="example: gradproof explain lr-too-high",
    )
    parser.add_argument("cause", nargs="?", help="a family (lr-too-high) or an id (lr-too-high/overshoot)")
    parser.set_defaults(function=explain)


def explain(args: argparse.Namespace) -> int:
    from gradproof.diagnosis.causes import BY_FAMILY, CAUSES
    from gradproof.report.text import wants_color

    if args.cause is None:
        width = max(len(cause.family) for cause in CAUSES)
        print("\n".join(f"{cause.family:<{width}}  {cause.title}" for cause in CAUSES))
        return 0
    family, _, what = args.cause.partition("/")
    if family not in BY_FAMILY:
        near = difflib.get_close_matches(family, BY_FAMILY, 3, 0.4)
        meant = f"did you mean {', '.join(near)}? " if near else ""
        raise UserError(f"there is no cause {family!r}; {meant}`gradproof explain` lists all of them")
    if advice := dict(BY_FAMILY[family].fixes).get(what):
        print(f"{args.cause}: {advice}\n")
    print(render_page(page_of(family), wants_color(sys.stdout)), end="")
    return 0


def page_of(family: str) -> str:
    for directory in PAGES:
        if (file := directory / f"{family}.md").is_file():
            return file.read_text(encoding="utf-8")
    raise UserError(f"the pages of causes are not installed ({PAGES[0]} is missing): install gradproof again")


def render_page(text: str, color: bool) -> str:
    """A page of Markdown as it reads in a terminal: headings bold, code indented, a link is its text.

    >>> render_page("# A\\n\\n```sh\\nls\\n```\\n[more](b.md)\\n", False)
    'A\\n\\n    ls\\nmore\\n'
    """
    lines, inside = [], False
    for line in text.splitlines():
        if line.startswith("```"):
            inside = not inside
        elif inside:
            lines.append(f"    {line}".rstrip())
        elif heading := re.match(r"#+ (.*)", line):
            lines.append(f"\033[1m{heading[1]}\033[0m" if color else heading[1])
        else:
            lines.append(re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", line))
    return "\n".join(lines) + "\n"


def add_doctor(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "doctor",
        help="what this installation can do, and what is missing for the rest",
        description="Looks at Python, PyTorch, GPU, compilers, browser, optional libraries and the place for "
        "runs, and says what each is needed for. Ends with exit code 1 if something needed is missing.",
        epilog="example: gradproof doctor",
    )
    parser.set_defaults(function=examine_installation)


def examine_installation(args: argparse.Namespace) -> int:
    import gradproof

    print(f"gradproof {gradproof.__version__}, Python {sys.version.split()[0]}, {HERE}\n")
    missing = 0
    for good, what, said in [*_torch(), *_tools(), *_extras(), _place()]:
        missing += good is False
        print(f"  {({True: 'ok', None: '–', False: '!!'})[good]:2}  {what:<14}{said}")
    print(
        "\n"
        + (
            "everything that is needed is here; – is optional"
            if not missing
            else "!! has to be repaired first"
        )
    )
    return 1 if missing else 0


Line = tuple["bool | None", str, str]  # good, needless, or missing; what; what is said


def _torch() -> list[Line]:
    try:
        import torch
    except Exception as error:  # a broken library fails in its own way
        return [
            (
                False,
                "torch",
                f"cannot be imported ({error}): pip install torch; diagnose and report work without",
            )
        ]
    version = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    oldest = ".".join(map(str, OLDEST_TORCH))
    said = torch.__version__ + (
        "" if version >= OLDEST_TORCH else f" is older than {oldest}: pip install -U torch"
    )
    lines: list[Line] = [(version >= OLDEST_TORCH, "torch", said)]
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        lines.append((True, "GPU", ", ".join(names)))
    else:
        why = "this PyTorch is built for the CPU alone" if torch.version.cuda is None else "no device is seen"
        lines.append((None, "GPU", f"none: {why}; trainings on the CPU are watched all the same"))
    return lines


def _tools() -> list[Line]:
    return [
        _tool(
            "C compiler", ("cc", "gcc", "clang"), "torch.compile, and trainers in C", "apt-get install gcc"
        ),
        _tool("nvcc", ("nvcc",), "trainers in CUDA", "the CUDA toolkit"),
        _tool("browser", ("chromium", "google-chrome", "firefox"), "the page (on any machine)", "a browser"),
    ]


def _tool(what: str, names: tuple[str, ...], use: str, install: str) -> Line:
    found = next(filter(None, map(shutil.which, names)), None)
    return (True, what, found) if found else (None, what, f"not found; needed for {use}: {install}")


def _extras() -> list[Line]:
    lines: list[Line] = []
    for needed in ("numpy", "safetensors"):
        there = importlib.util.find_spec(needed) is not None
        lines.append((there, needed, metadata.version(needed) if there else f"missing: pip install {needed}"))
    for name, use in EXTRAS.items():
        there = importlib.util.find_spec(name) is not None
        lines.append(
            (True if there else None, name, _version(name) if there else f"not installed; for {use}")
        )
    return lines


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "installed"


def _place() -> Line:
    place = Path("runs") if Path("runs").is_dir() else Path()
    free = shutil.disk_usage(place).free
    if not os.access(place, os.W_OK):
        return (
            False,
            "runs",
            f"{place.resolve()} cannot be written: give gradproof run another place with --out DIR",
        )
    enough = free > 1 << 30
    said = f"{place.resolve()}, {free / 1e9:.1f} GB free"
    return enough or None, "runs", said + ("" if enough else ": recorded steps may not fit, see --specimens")
