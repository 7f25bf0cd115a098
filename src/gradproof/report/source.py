"""The source around the line that a finding names, as it ran, and the fix as a diff where that is certain."""

from __future__ import annotations

import os
import re
from typing import Any

from gradproof.diagnosis.edits import edit_of
from gradproof.diagnosis.findings import Diagnosis, Finding
from gradproof.errors import plain
from gradproof.record.run import Run

AROUND = 4  # lines before and after
MOST_DIFF = 40  # lines
LONGEST = 300  # characters of a line
PLACE = re.compile(r"([\w.-]+\.py):(\d+)")


def pack_sources(run: Run, diagnosis: Diagnosis) -> list[dict[str, Any] | None]:
    """For each cause, in their order: where it is, the lines there, the fix; None where the script has no such line."""
    script, source = run.script() or [], str((run.info.get("source") or {}).get("file") or "")
    return [source_of(run, cause, script, source) for cause in diagnosis.causes]


def source_of(run: Run, cause: Finding, script: list[str], source: str) -> dict[str, Any] | None:
    found = PLACE.search(cause.where or "")
    if found is None:
        return None
    name, number = os.path.basename(source), int(found[2])
    if found[1] != name or not 0 < number <= len(script):
        return {"path": found[0], "first": number, "marked": number, "lines": [], "diff": []}
    first = max(1, number - AROUND)
    edit = edit_of(cause, run)
    return {
        "path": plain(f"{os.path.join(str(run.info.get('directory') or ''), source)}:{number}"),
        "first": first,
        "marked": number,
        "lines": [line[:LONGEST] for line in script[first - 1 : number + AROUND]],
        "diff": plain(edit.diff(name), lines=True).splitlines()[2:][:MOST_DIFF] if edit is not None else [],
    }
