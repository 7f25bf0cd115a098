"""Gives each finding a place in the source: the line of the call that it is about, as the script made it."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from gradproof.diagnosis.findings import Finding
from gradproof.record.run import Run

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


def facts(run: Run, name: str) -> Any:
    return run.info.get("facts", {}).get(name)


def lines_of(run: Run, what: str) -> list[str]:
    """Every line at which the script was seen to do something, as file.py:line."""
    if what == "optimizer":
        return [o["line"] for o in run.info.get("optimizers", []) if o.get("line")]
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
