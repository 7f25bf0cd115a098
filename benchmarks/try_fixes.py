"""What `gradproof try` says of every planted fault: of its true fix, and of a patch that has nothing to do with it.

    python benchmarks/try_fixes.py [--only REGEX] [--most 31] [--steps 100] [--results FILE] [--keep DIRECTORY]

A fault is an edit of a healthy script, so the true fix is the edit undone. The unrelated patches take turns: a remark,
a print, a variable that nobody reads, a random number drawn at the top, and one drawn after the script has
seeded, which shifts all that follow. The planted script is trained once, as `gradproof try` trains it, and held
against both patched ones; where so few steps show no finding, all three are trained to their end. The faults are taken
from the families in turn, one process at a time. Bar: the true fix is called fixed, the unrelated patch no difference,
in 95 % of them.

With `--results` every answer is a line of that file, and what is there already is not tried again: a run that was
ended goes on, and several processes may share the work (`--share 0/2 --within 300`). With `--keep` the trainings
stay, and a source is trained once: ten faults share their healthy twin, and after a change of what is
*said* of two runs everything is judged again in a minute (with `--results` of another name).
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import fcntl
import hashlib
import itertools
import json
import math
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from gradproof.ask.patching import apply_patch, parse_patch
from gradproof.ask.trial import FIXED, SAME, finding_of, judge, start
from gradproof.diagnosis.ranking import diagnose
from gradproof.errors import UserError
from gradproof.faults.catalogue import FAULTS
from gradproof.faults.fault import Fault, plant, read_script
from gradproof.record.run import Run
from gradproof.record.whole import open_whole

SCRIPT = Path("train.py")
WHOLE = 1_000_000  # steps: more than any of them takes
Row = dict[str, str]  # fault, patch, said, why
SEEDS = re.compile(r"^(\s*)torch\.manual_seed\(.*\)\s*$")


def remark(source: str) -> str:
    return "# a remark\n" + source


def printed(source: str) -> str:
    return behind_imports(source, 'print("hello")')


def variable(source: str) -> str:
    return behind_imports(source, "unused = 42")


def draw(source: str) -> str:
    return behind_imports(source, "import torch; torch.rand(3)")


def draw_after_seed(source: str) -> str:
    """Behind the first line that seeds; where there is none, at the top."""
    lines = source.splitlines(keepends=True)
    for place, line in enumerate(lines):
        if found := SEEDS.match(line):
            return "".join([*lines[: place + 1], f"{found[1]}torch.rand(3)\n", *lines[place + 1 :]])
    return draw(source)


UNRELATED: tuple[Callable[[str], str], ...] = (remark, printed, variable, draw, draw_after_seed)


def behind_imports(source: str, line: str) -> str:
    """A line in front of the first statement that is neither the docstring nor an import."""
    body = ast.parse(source).body[1 if ast.get_docstring(ast.parse(source)) is not None else 0 :]
    first = next(node for node in body if not isinstance(node, (ast.Import, ast.ImportFrom)))
    decorated = getattr(first, "decorator_list", [])
    place = min([first.lineno, *(decorator.lineno for decorator in decorated)]) - 1
    lines = source.splitlines(keepends=True)
    return "".join([*lines[:place], f"{line}\n", *lines[place:]])


def in_turn(faults: list[Fault]) -> list[Fault]:
    """The first of each family, then the second of each, and so on."""
    families: dict[str, list[Fault]] = {}
    for fault in faults:
        families.setdefault(fault.family, []).append(fault)
    rounds = itertools.zip_longest(*families.values())
    return [fault for each in rounds for fault in each if fault is not None]


def train(directory: Path, source: str, steps: int) -> Run:
    """A source's run, in a place that is named for what is trained; the one that is there, if it was finished."""
    place = directory / hashlib.sha256(f"{steps} {source}".encode()).hexdigest()[:16]
    with contextlib.suppress(FileExistsError):
        place.mkdir()
    with (place / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # who comes second waits for the one who trains it
        if not (place / "trained").exists():
            shutil.rmtree(place / "run", ignore_errors=True)
            (place / SCRIPT).write_text(source)
            start(place, SCRIPT, [], place / "run", steps, 600)
            (place / "trained").touch()
    return open_whole(place / "run")


def patched(source: str, wanted: str) -> str:
    """What comes of a source by the way that `gradproof try` goes: a diff, read and applied."""
    names = f"a/{SCRIPT}", f"b/{SCRIPT}"
    lines = difflib.unified_diff(source.splitlines(True), wanted.splitlines(True), *names)
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / SCRIPT).write_text(source)
        apply_patch(parse_patch("".join(lines)), Path(directory))
        return (Path(directory) / SCRIPT).read_text()


def try_fault(fault: Fault, unrelated: Callable[[str], str], steps: int, directory: Path) -> Iterator[Row]:
    """What is said of both patches."""
    sick = plant(fault)
    patches = {"fix": read_script(fault.script), unrelated.__name__: unrelated(sick)}
    for name, wanted in patches.items():
        try:
            before = train(directory, sick, steps)
            if (
                was := finding_of(diagnose(before))
            ) is None:  # as for whoever has the run: of its whole length
                steps = WHOLE
                was = finding_of(diagnose(before := train(directory, sick, steps)))
            after = train(directory, patched(sick, wanted), steps)
            found = judge(before, after, was, [str(SCRIPT)], [])
            said, why = found.verdict, f"{was.id if was else 'nothing found'}; {found.sentence}"
            why += "".join(f"; new: {each}" for each in found.new_findings)
            why += "".join(f"; {each}" for each in found.not_looked_at)
        except UserError as error:
            said, why = "could not be tried", str(error)
        yield {"fault": f"{fault.family}: {fault.name}", "patch": name, "said": said, "why": why}


def is_right(row: Row) -> bool:
    return row["said"] == (FIXED if row["patch"] == "fix" else SAME)


def read_results(file: Path | None) -> list[Row]:
    if file is None or not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="faults whose name or cause matches")
    parser.add_argument("--most", type=int, default=len(FAULTS), help="how many of them")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--results", type=Path, help="answers are appended here, and not asked for again")
    parser.add_argument("--keep", type=Path, help="the trainings stay here, and are used again")
    parser.add_argument("--share", default="0/1", help="of several processes: 1/3 is the second of three")
    parser.add_argument("--within", type=float, default=math.inf, help="begin no fault after so many seconds")
    args = parser.parse_args()
    numbered = list(enumerate(in_turn(list(FAULTS))))
    chosen = [
        (number, fault) for number, fault in numbered if re.search(args.only, f"{fault.name} {fault.id}")
    ][: args.most]
    share, shares = map(int, args.share.split("/"))
    there = {row["fault"] for row in read_results(args.results)}
    rows: list[Row] = []
    started = time.perf_counter()
    with contextlib.ExitStack() as stack:
        directory = args.keep or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="gradproof-try-"))
        )
        directory.mkdir(parents=True, exist_ok=True)
        for number, fault in chosen[share::shares]:
            if f"{fault.family}: {fault.name}" in there or time.perf_counter() - started > args.within:
                continue
            began = time.perf_counter()
            new = list(try_fault(fault, UNRELATED[number % len(UNRELATED)], args.steps, directory))
            rows += new
            if args.results:
                with args.results.open("a") as file:
                    file.writelines(json.dumps(row) + "\n" for row in new)
            print(f"{fault.name}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    show(read_results(args.results) if args.results else rows, args.steps)


def show(rows: list[Row], steps: int) -> None:
    print(f"| fault | patch | said | |\n|---|---|---|---|   ({steps} steps)")
    for row in rows:
        cross = "" if is_right(row) else " ✗"
        print(f"| {row['fault']} | {row['patch']} | {row['said']}{cross} | {row['why']} |")
    for kind, these in (
        ("fix", [row for row in rows if row["patch"] == "fix"]),
        ("unrelated", [row for row in rows if row["patch"] != "fix"]),
    ):
        if these:
            right = sum(map(is_right, these))
            print(f"{kind}: {right} of {len(these)}, {right / len(these):.0%}")


if __name__ == "__main__":
    main()
