"""Writes docs/causes/: one page a family of causes, from the catalogue, the code that looks for it, and its example.

    python docs/make_causes.py [FAMILY ...]

An example (examples/causes/FAMILY.py) is a broken script; `code  # fix: other code` says how to mend it, and a line
that is only `# fix: code` is missing from it. What gradproof says about it is what it said when this was last run.
"""

from __future__ import annotations

import ast
import difflib
import functools
import multiprocessing
import re
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
EXAMPLES, PAGES, SOURCE = ROOT / "examples" / "causes", ROOT / "docs" / "causes", ROOT / "src" / "gradproof"
MARK = re.compile(r"^(\s*)(.*?)(?:  )?# fix:(?: (.*))?$")


def split_example(text: str) -> tuple[str, str, str]:
    """The prose, the broken script and the mended one."""
    prose = ast.get_docstring(ast.parse(text)) or ""
    code = text[text.index('"""', 3) + 3 :].lstrip("\n")
    broken, fixed = [], []
    for line in code.splitlines():
        mark = MARK.match(line)
        if mark is None:
            broken.append(line)
            fixed.append(line)
            continue
        indent, old, new = mark.groups()
        broken += [indent + old] if old else []
        fixed += [indent + new] if new else []
    return " ".join(prose.split()), "\n".join(broken) + "\n", "\n".join(fixed) + "\n"


def diagnose_script(name: str, code: str):
    """What `gradproof run` finds in a script, in a process of its own that has torch already."""
    import torch

    # where a GPU has been used, a forked process cannot run backward
    context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "fork")
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, f"{name}.py")
        file.write_text(code)
        child = context.Process(target=_run, args=(file,))
        child.start()
        child.join()
        from gradproof.diagnosis.ranking import diagnose

        found = sorted(Path(directory).glob("run.rank*")) or [Path(directory, "run")]
        return diagnose(found[0])


def _run(file: Path) -> None:
    import os

    import torch

    from gradproof.probes import script

    torch.set_num_threads(1)
    os.chdir(file.parent)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    # to its end, however busy the machine is: a page says what is found, not what is found in half a minute
    script.run_program(script.load_script(file.name), [], out="run", quiet=True, examine=None)


def symptoms_of(family: str) -> list[str]:
    """What the symptoms that may lead to a family say they look for."""
    from gradproof.diagnosis.ranks import CHECKS
    from gradproof.diagnosis.symptoms import SYMPTOMS

    names = {find.__name__ for find in (*SYMPTOMS, *CHECKS)}
    found = []
    for file in sorted((SOURCE / "diagnosis").glob("*.py")):
        functions = {name: (summary, text) for name, summary, text in functions_of(file)}
        for name in functions.keys() & names:
            if family in "".join(reached(name, functions)):
                found.append(functions[name][0])
    return sorted(found)


def reached(name: str, functions: dict[str, tuple[str, str]]) -> list[str]:
    """The source of a function and of those in its file that it calls."""
    seen, waiting = set(), [name]
    while waiting:
        name = waiting.pop()
        seen.add(name)
        waiting += [other for other in functions if f"{other}(" in functions[name][1] and other not in seen]
    return [functions[name][1] for name in seen]


def questions_of(family: str) -> list[str]:
    """The questions that can confirm or exclude a family, in the order in which they are asked."""
    from gradproof.experiments.table import QUESTIONS

    return [f"`{q.name}`: {q.sentence}" for q in QUESTIONS if family in q.families]


@functools.cache
def functions_of(file: Path) -> list[tuple[str, str, str]]:
    """Name, first sentence of the docstring, and source of each function in a file."""
    text = file.read_text()
    nodes = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    return [
        (
            node.name,
            " ".join((ast.get_docstring(node) or node.name).split("\n\n")[0].split()),
            ast.unparse(node),
        )
        for node in nodes
    ]


def render_finding(diagnosis) -> str:
    """The first finding as the terminal shows it, without the temporary directory."""
    from gradproof.report.text import render_text

    temporary = re.compile(r"(?<=\s)/\S+?/(?=(run/\S+/)?[\w-]+\.py)")
    return temporary.sub("", render_text(diagnosis).split("\n\n")[1])


def render_page(family: str, said: str) -> str:
    """The page of a family, with what gradproof said about its example."""
    from gradproof.diagnosis.causes import BY_FAMILY

    cause = BY_FAMILY[family]
    prose, broken, fixed = split_example((EXAMPLES / f"{family}.py").read_text())
    diff = list(difflib.unified_diff(broken.splitlines(), fixed.splitlines(), lineterm="", n=1))[3:]
    parts = [
        f"# {family}",
        f"{cause.title[0].upper()}{cause.title[1:]}.",
        prose,
        "## Broken",
        f"```python\n{broken}```",
        f"`gradproof run` says about it (the script is `examples/causes/{family}.py`):",
        f"```text\n{said}\n```",
        "## Fixed",
        "```diff\n" + "\n".join(line for line in diff if not line.startswith("@@")) + "\n```",
        "## What raises the suspicion",
        bullets(symptoms_of(family)) or "Nothing in the recorded numbers alone; only the experiment sees it.",
        "## What decides it",
        f"{cause.decided_by[0].upper()}{cause.decided_by[1:]}.",
        bullets(questions_of(family)),
        "## What to do",
        f"{cause.fix[0].upper()}{cause.fix[1:]}.",
        bullets([f"`{family}/{what}`: {advice}" for what, advice in cause.fixes]),
        trial_of(family),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def trial_of(family: str) -> str:
    """What `gradproof run --verify` can try for a family."""
    from gradproof.diagnosis.findings import Finding
    from gradproof.diagnosis.fixes import find_intervention

    intervention = find_intervention(Finding(family, family, "problem", "proven", (), ""), None)
    return f"`gradproof run --verify` tries it from outside: {intervention.words}." if intervention else ""


def bullets(lines: list[str]) -> str:
    return "\n".join(f"- {line}" for line in dict.fromkeys(lines))


def render_index() -> str:
    """The table of all families."""
    from gradproof.diagnosis.causes import CAUSES

    rows = [
        f"| [{cause.family}]({cause.family}.md) | {cause.title} | {cause.decided_by} |" for cause in CAUSES
    ]
    head = ["| family | what is wrong | what decides it |", "|---|---|---|"]
    return "\n".join(["# Causes", "", INTRODUCTION, "", *head, *rows]) + "\n"


INTRODUCTION = """Every finding belongs to one of these families and has an id of its own, `family/what`. Each page
shows a short script that is broken in this way, what gradproof says about it, and the change that mends it."""


def said_on(page: Path) -> str:
    """What gradproof said when the page was made."""
    return page.read_text().split("```text\n")[1].split("\n```")[0]


def main(families: list[str]) -> None:
    import gradproof.instruments.evidence
    import gradproof.probes.watch  # noqa: F401  before the fork
    from gradproof.diagnosis.causes import CAUSES

    PAGES.mkdir(exist_ok=True)
    for family in families or [cause.family for cause in CAUSES]:
        _, broken, _ = split_example((EXAMPLES / f"{family}.py").read_text())
        found = diagnose_script(family, broken)
        (PAGES / f"{family}.md").write_text(render_page(family, render_finding(found)))
        print(f"{family}: {found.causes[0].id}")
    (PAGES / "index.md").write_text(render_index())


if __name__ == "__main__":
    main(sys.argv[1:])
