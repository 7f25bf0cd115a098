"""From a record to an answer: verdicts of experiments first, then what the symptoms suggest, ranked.

A confirmed experiment outranks any number of symptoms; without one, a cause is `likely` at best.
"""

from __future__ import annotations

import os
from typing import Any

from gradproof.diagnosis.causes import BY_FAMILY
from gradproof.diagnosis.findings import CONFIDENCES, LEVELS, Diagnosis, Exclusion, Finding, Symptom
from gradproof.diagnosis.symptoms import SYMPTOMS
from gradproof.record.run import Run, open_run

# A symptom that is itself the proof: the order of calls and the optimizer's tensors leave no room for doubt.
PROOFS = ("stale_gradient", "zeroed_before_step", "late_clip", "clip_before_unscale", "not_in_optimizer")


def diagnose(run: Run | str | os.PathLike) -> Diagnosis:
    """What is wrong with a run, as far as its record tells; needs no torch.

    >>> gradproof.diagnose("runs/a").worst  # doctest: +SKIP
    'problem'
    """
    if not isinstance(run, Run):
        run = open_run(run)
    symptoms = [symptom for find in SYMPTOMS for symptom in find(run)]
    verdicts = [event for event in run.events if event.get("event") == "verdict"]
    found = [finding_of_verdict(v) for v in verdicts if v["verdict"] == "confirmed"]
    excluded = {
        v["family"]: Exclusion(v["family"], v.get("reason", ""))
        for v in verdicts
        if v["verdict"] == "excluded"
    }
    found += findings_of_symptoms(symptoms, set(excluded))
    return Diagnosis(
        run=str(run.path),
        steps=len(run),
        causes=rank(found),
        symptoms=tuple(sorted(symptoms, key=lambda s: LEVELS.index(s.level))),
        excluded=tuple(e for family, e in excluded.items() if family not in {f.family for f in found}),
        cost=run.info.get("cost", {}),
        notes=tuple(run.notes),
    )


def finding_of_verdict(verdict: dict[str, Any]) -> Finding:
    """What an experiment has confirmed."""
    cause = BY_FAMILY[verdict["family"]]
    return Finding(
        family=cause.family,
        id=verdict["id"],
        level=verdict.get("level", "problem"),
        confidence=verdict.get("confidence", "proven"),
        evidence=tuple(verdict.get("evidence", ())),
        fix=verdict.get("fix") or cause.advice(verdict["id"]),
        where=verdict.get("where"),
        step=verdict.get("step"),
        title=verdict.get("title") or cause.title,
    )


def findings_of_symptoms(symptoms: list[Symptom], excluded: set[str]) -> list[Finding]:
    """One finding for each cause that the symptoms suggest; symptoms of one cause become its evidence."""
    evidence: dict[str, list[Symptom]] = {}
    for symptom in symptoms:
        suspects = [s for s in symptom.suspects if s.partition("/")[0] not in excluded]
        if suspects:
            evidence.setdefault(suspects[0], []).append(symptom)
    return [finding_of_suspicion(id, seen) for id, seen in evidence.items()]


def finding_of_suspicion(id: str, seen: list[Symptom]) -> Finding:
    family = id.partition("/")[0]
    cause = BY_FAMILY[family]
    level = min((symptom.level for symptom in seen), key=LEVELS.index)
    if any(symptom.name in PROOFS for symptom in seen):
        confidence = "proven"
    else:
        confidence = "likely" if len(seen) > 1 or level == "problem" else "possible"
    return Finding(
        family=family,
        id=id,
        level=level,
        confidence=confidence,
        evidence=tuple(str(symptom) for symptom in seen),
        fix=cause.advice(id),
        where=next((symptom.where for symptom in seen if symptom.where), None),
        step=next((symptom.step for symptom in seen if symptom.step is not None), None),
        title=cause.title,
    )


def rank(findings: list[Finding]) -> tuple[Finding, ...]:
    """Gravest first, surest first, earliest first; one finding a family and place."""
    best: dict[tuple[str, str | None], Finding] = {}
    order = sorted(findings, key=_weight)
    for finding in order:
        best.setdefault((finding.family, finding.where), finding)
    return tuple(best.values())


def _weight(finding: Finding) -> tuple[int, int, float]:
    step = float("inf") if finding.step is None else finding.step
    return LEVELS.index(finding.level), CONFIDENCES.index(finding.confidence), step
