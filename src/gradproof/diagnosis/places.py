"""Gives each finding a place in the source: the line of the call that it is about, as the script made it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gradproof.diagnosis.findings import Diagnosis, Finding
from gradproof.record.run import Run
from gradproof.record.source import rename_cells

LINE = re.compile(r"\.py:\d+")

# the calls that a family is about, the most telling first; "optimizer" is the line that makes it
CALLS = {
    "zero-grad-error": ("zero_grad", "backward"),
    "grad-accumulation-error": ("step condition", "backward"),
    "grad-clip-misuse": ("clip", "step"),
    "param-not-updated": ("optimizer",),
    "lr-too-high": ("lr set", "optimizer"),
    "lr-too-low": ("lr set", "optimizer"),
    "lr-schedule-error": ("scheduler made", "lr set", "scheduler", "optimizer"),
    "optimizer-config": ("optimizer",),
    "low-precision-error": ("optimizer",),
    "data-order-or-sampling": ("loader", "forward"),
    "data-target-misaligned": ("loader", "forward"),
    "input-or-target-scale": ("loader", "forward"),
    "loss-mask-error": ("backward",),
    "loss-activation-mismatch": ("backward",),
    "loss-scale-or-sign": ("backward",),
    "distributed-desync": ("ddp", "init_process_group"),
    "weights-state-error": ("optimizer",),
    "forward-nonfinite": ("forward",),
    "backward-nonfinite": ("backward",),
    "detached-graph": ("backward",),
    "exploding-signal": ("forward",),
    "vanishing-signal": ("forward",),
}


# what is made elsewhere and used there: said beside the place
MADE = {
    "loss-activation-mismatch": ("criterion", "the criterion is made at"),
    "loss-mask-error": ("criterion", "the criterion is made at"),
    "axis-or-shape-error": ("criterion", "the criterion is made at"),
    "data-order-or-sampling": ("loader", "batches come from the loader made at"),
    "data-target-misaligned": ("loader", "batches come from the loader made at"),
    "input-or-target-scale": ("loader", "batches come from the loader made at"),
}


def name_cells(diagnosis: Diagnosis, cells: Mapping[str, str]) -> Diagnosis:
    """Of a notebook, whose kernel calls a cell's code /tmp/ipykernel_7/1234.py: places by the cell's own name."""
    if not cells:
        return diagnosis

    def renamed(text: str | None) -> Any:
        return text and rename_cells(text, cells)

    return replace(
        diagnosis,
        causes=tuple(
            replace(
                each,
                where=renamed(each.where),
                fix=renamed(each.fix),
                evidence=(*map(renamed, each.evidence),),
            )
            for each in diagnosis.causes
        ),
        symptoms=tuple(
            replace(each, where=renamed(each.where), evidence=renamed(each.evidence))
            for each in diagnosis.symptoms
        ),
        excluded=tuple(replace(each, reason=renamed(each.reason)) for each in diagnosis.excluded),
        raised=renamed(diagnosis.raised),
    )


def facts(run: Run, name: str) -> Any:
    return run.info.get("facts", {}).get(name)


def lines_of(run: Run, what: str) -> list[str]:
    """Every line at which the script was seen to do something, as file.py:line."""
    if what == "optimizer":
        made = [o["line"] for o in run.info.get("optimizers", []) if o.get("line")]
        return made or lines_of(run, "step")  # an update by hand is made nowhere: where it is done
    return (facts(run, "lines") or {}).get(what) or []


def line_of(run: Run, *wanted: str) -> str | None:
    """Where the script first does one of these things; the first of them that it does at all."""
    return next((lines[0] for what in wanted if (lines := lines_of(run, what))), None)


def add_place(finding: Finding, run: Run) -> Finding:
    """A finding with a line, where the script's calls have one for it: the module path stays in front."""
    what, words = MADE.get(finding.family, ("", ""))
    if (made := line_of(run, what)) and made not in (finding.where or ""):
        finding = replace(finding, evidence=(*finding.evidence, f"{words} {made}"))
    if finding.where and LINE.search(finding.where):
        return finding
    line = line_of(run, *CALLS.get(finding.family, ()))
    if line is None:
        return finding
    return replace(finding, where=f"{finding.where} ({line})" if finding.where else line)
