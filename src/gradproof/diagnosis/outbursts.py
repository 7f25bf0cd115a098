"""Gradients that burst out, and nothing in the script that clips them: said beside steps that are too long."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from gradproof.diagnosis.findings import Finding
from gradproof.diagnosis.places import line_of
from gradproof.diagnosis.series import spikes, tracks
from gradproof.record.run import Run

BURST = 20.0  # times the middle gradient norm of the run
NEAR = 1  # steps between a gradient that bursts and a loss that leaps
CLIPS = {"c", "v"}  # in the order of a step's calls


def add_outburst(finding: Finding, run: Run) -> Finding:
    """Steps too long now and then are a matter of single gradients: which one, and where a clip would stand."""
    if finding.family != "lr-too-high" or any(CLIPS & set(order) for order in run.steps["order"]):
        return finding
    found = largest_outburst(run)
    line = line_of(run, "backward")
    if found is None or line is None:
        return finding
    step, norm, usual = found
    said = (
        f"the gradient norm bursts to {norm:.3g} at step {step}, where the loss leaps ({usual:.2g} in the middle of "
        f"the run), and nothing clips it after backward at {line}"
    )
    advice = f"clip_grad_norm_(parameters, {usual:.1g}) between backward ({line}) and step"
    return replace(finding, evidence=(*finding.evidence, said), fix=f"{finding.fix}; or put {advice}")


def largest_outburst(run: Run) -> tuple[int, float, float] | None:
    """(step, gradient norm, the usual one) of the largest gradient where the loss leaps far above what it was."""
    found = []
    for track in tracks(run):
        norms = run.steps["grad_norm"][track.rows]
        known = norms[np.isfinite(norms)]
        usual = float(np.median(known)) if len(known) >= 20 else 0.0
        leaps = np.array([step for step, _, _ in spikes(track.loss, track.steps)])
        for step, norm in zip(track.steps, norms, strict=True):
            if usual > 0 and norm > BURST * usual and (np.abs(leaps - step) <= NEAR).any():
                found.append((int(step), float(norm), usual))
    return max(found, key=lambda burst: burst[1], default=None)
