"""What PyTorch and NumPy said themselves: their warnings, at the lines of the script that caused them.

A library that warns knows the call, not what was meant: alone it raises a suspicion, beside a finding of the same
family it is a second witness. What says nothing about training (deprecations, speed) is kept in the record, not shown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from gradproof.diagnosis.findings import Finding, Symptom
from gradproof.diagnosis.places import facts
from gradproof.record.run import Run

# what they say, and which cause it points to
MEANINGS = (
    (r"Using a target size .* different to the input size", "axis-or-shape-error/broadcast-into-the-loss"),
    (r"Implicit dimension choice for (log_)?soft(max|min)", "axis-or-shape-error/softmax-axis"),
    (r"`lr_scheduler\.step\(\)` before `optimizer\.step\(\)`", "lr-schedule-error/steps-first"),
    (r"None of the inputs have requires_grad=True", "detached-graph/cut"),
    (r"To copy construct from a tensor, it is recommended", "detached-graph/new-tensor"),
    (r"\.grad attribute of a Tensor that is not a leaf", "param-not-updated/plain-tensor"),
    (r"optimizer contains a parameter group with duplicate parameters", "optimizer-config/held-twice"),
    (r"'mean' divides the total loss by both the batch size and the support", "loss-scale-or-sign/kl-mean"),
    (r"Error detected in \w+Backward\w*\. ", "backward-nonfinite"),
    (r"^(divide by zero|invalid value|overflow) encountered in", "forward-nonfinite/in-the-data"),
)


def libraries_said(run: Run) -> Iterator[Symptom]:
    """Warnings that are about training, each once, as the library put it."""
    for said in facts(run, "said") or ():
        id = next((id for pattern, id in MEANINGS if re.search(pattern, said["text"])), None)
        if id is not None:
            yield Symptom("libraries_said", "note", quoted(said), said["step"], said["line"] or None, (id,))


def add_witnesses(found: list[Finding], run: Run) -> list[Finding]:
    """To each finding that a measurement made, what a library said of the same family by itself."""
    words = [(symptom.suspects[0].partition("/")[0], str(symptom)) for symptom in libraries_said(run)]
    return [
        replace(f, evidence=(*f.evidence, *(text for family, text in words if family == f.family)))
        for f in found
    ]


def quoted(said: dict[str, Any]) -> str:
    times = f", {said['times']} times" if said["times"] > 1 else ""
    at = f" at {said['line']}" if said["line"] else ""
    first = re.split(r"(?<=[.!?])\s", said["text"], maxsplit=1)[0]
    return f"{said['who']} itself warns{at}{times}: {first}"
