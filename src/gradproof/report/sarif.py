"""Findings as SARIF 2.1.0, so that they stand at their lines in code review."""

from __future__ import annotations

import re
from typing import Any

from gradproof import __version__
from gradproof.diagnosis.findings import Diagnosis, Finding
from gradproof.errors import plain

LEVEL = {"problem": "error", "warning": "warning", "note": "note"}
LINE = re.compile(r"([\w./\\-]+\.py):(\d+)")
SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def as_sarif(found: Diagnosis, script: str) -> dict[str, Any]:
    """`script` is where a finding without a line of its own stands, and whose folder short names are below."""
    rules = {cause.id: rule_of(cause) for cause in found.causes}
    return {
        "$schema": SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {"name": "gradproof", "version": __version__, "rules": list(rules.values())}
                },
                "results": [result_of(cause, script) for cause in found.causes],
            }
        ],
    }


def rule_of(cause: Finding) -> dict[str, Any]:
    return {
        "id": cause.id,
        "shortDescription": {"text": plain(cause.title or cause.id)},
        "help": {"text": f"gradproof explain {cause.id}"},
    }


def result_of(cause: Finding, script: str) -> dict[str, Any]:
    parts = [f"{cause.title or cause.id} ({cause.confidence})", *cause.evidence[:3], f"To do: {cause.fix}"]
    file, line = place_of(cause, script)
    return {
        "ruleId": cause.id,
        "level": LEVEL[cause.level],
        "message": {"text": plain("\n".join(parts), lines=True)},
        "locations": [
            {
                "physicalLocation": {
                    "artifactLocation": {"uri": file.replace("\\", "/")},
                    "region": {"startLine": line},
                }
            }
        ],
        "properties": {"confidence": cause.confidence, "where": cause.where, "step": cause.step},
    }


def place_of(cause: Finding, script: str) -> tuple[str, int]:
    """The first line that a finding names; of the script itself by the path that it was called by."""
    for text in (cause.where or "", *cause.evidence, cause.fix):
        for file, number in LINE.findall(text):
            name = script.replace("\\", "/").rsplit("/", 1)
            if file == name[-1]:
                return script, int(number)
            folder = f"{name[0]}/" if len(name) > 1 else ""
            return file if "/" in file else f"{folder}{file}", int(number)
    return script, 1
