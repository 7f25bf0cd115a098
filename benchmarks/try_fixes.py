"""What `gradproof try` says of every planted fault: of its true fix, and of a patch that has nothing to do with it.

    python benchmarks/try_fixes.py [--only REGEX] [--most 31] [--steps 100]

A fault is an edit of a healthy script, so the true fix is the edit undone. The unrelated patches take turns: a remark,
a print, a variable that nobody reads, a random number drawn at the top, and one drawn after the script has
seeded, which shifts all that follow. The planted script is trained once, as `gradproof try` trains it, and held
against both patched ones. The faults are taken from the families in turn, one process at a time. Bar: the true fix is
called fixed, the unrelated patch no difference, in 95 % of them.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import itertools
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from gradproof.ask.patching import apply_patch, parse_patch
from gradproof.ask.trial import FIXED, SAME, finding_of, judge, start
from gradproof.diagnosis.ranking import diagnose
from gradproof.errors import UserError
from gradproof.faults.catalogue import FAULTS
from gradproof.faults.fault import Fault, plant, read_script
from gradproof.record.run import Run, open_run

SCRIPT = Path("train.py")
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


def train(place: Path, source: str, steps: int) -> Run:
    place.mkdir()
    (place / SCRIPT).write_text(source)
    start(place, SCRIPT, [], place / "run", steps, 600)
    return open_run(place / "run")


def patched(source: str, wanted: str) -> str:
    """What comes of a source by the way that `gradproof try` goes: a diff, read and applied."""
    names = f"a/{SCRIPT}", f"b/{SCRIPT}"
    lines = difflib.unified_diff(source.splitlines(True), wanted.splitlines(True), *names)
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / SCRIPT).write_text(source)
        apply_patch(parse_patch("".join(lines)), Path(directory))
        return (Path(directory) / SCRIPT).read_text()


def try_fault(fault: Fault, unrelated: Callable[[str], str], steps: int) -> Iterator[tuple[str, str, str]]:
    """(which patch, verdict, sentence) of both patches."""
    sick = plant(fault)
    patches = {"fix": read_script(fault.script), unrelated.__name__: unrelated(sick)}
    with tempfile.TemporaryDirectory(prefix="gradproof-try-") as directory:
        before = train(Path(directory) / "original", sick, steps)
        was = finding_of(diagnose(before))
        for name, wanted in patches.items():
            try:
                after = train(Path(directory) / name, patched(sick, wanted), steps)
                found = judge(before, after, was, [str(SCRIPT)], [])
                yield name, found.verdict, f"{was.id if was else 'nothing found'}; {found.sentence}"
            except UserError as error:
                yield name, "could not be tried", str(error)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="faults whose name or cause matches")
    parser.add_argument("--most", type=int, default=len(FAULTS), help="how many of them")
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    chosen = [fault for fault in FAULTS if re.search(args.only, f"{fault.name} {fault.id}")]
    right: Counter[str] = Counter()
    tried: Counter[str] = Counter()
    print(f"| fault | patch | said | |\n|---|---|---|---|   ({args.steps} steps)")
    for number, fault in enumerate(in_turn(chosen)[: args.most]):
        began = time.perf_counter()
        for name, verdict, sentence in try_fault(fault, UNRELATED[number % len(UNRELATED)], args.steps):
            kind = "fix" if name == "fix" else "unrelated"
            ok = verdict == (FIXED if name == "fix" else SAME)
            tried[kind] += 1
            right[kind] += ok
            print(f"| {fault.family}: {fault.name} | {name} | {verdict}{'' if ok else ' ✗'} | {sentence} |")
        print(f"{time.perf_counter() - began:.0f} s", file=sys.stderr)
        sys.stdout.flush()
    for kind, count in tried.items():
        print(f"{kind}: {right[kind]} of {count}, {right[kind] / count:.0%}")


if __name__ == "__main__":
    main()
