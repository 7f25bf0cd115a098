"""From a record to an answer: verdicts of experiments first, then what the symptoms suggest, ranked.

A confirmed experiment outranks any number of symptoms; without one, a cause is `likely` at best.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np

from gradproof.diagnosis.bad_numbers import describe_end
from gradproof.diagnosis.causes import BY_FAMILY
from gradproof.diagnosis.curves import largest_leap, share_of_steps_above, trains_well
from gradproof.diagnosis.examination import read_examination
from gradproof.diagnosis.findings import CONFIDENCES, LEVELS, Diagnosis, Exclusion, Finding, Symptom
from gradproof.diagnosis.fixes import trial_of_event
from gradproof.diagnosis.gains import placed_by_gain
from gradproof.diagnosis.outbursts import add_outburst
from gradproof.diagnosis.places import add_place, name_cells
from gradproof.diagnosis.said import add_witnesses
from gradproof.diagnosis.symptoms import SYMPTOMS
from gradproof.diagnosis.unseen import count_seen, find_unseen
from gradproof.diagnosis.verdicts import standing
from gradproof.errors import plain
from gradproof.record.run import Run
from gradproof.record.whole import open_whole

# A symptom that is itself the proof: the order of calls, or whose tensor it is, leaves no room for doubt.
PROOFS = (
    # the order of zero_grad, backward, unscale, clip and step
    "stale_gradient",
    "zeroed_before_step",
    "cleared_between_backwards",
    "late_clip",
    "clip_before_unscale",
    # which tensors a clip, an optimizer, a load were given
    "clip_misses_all",
    "not_in_optimizer",
    "loads_itself",
    "keys_do_not_fit",
    # what a module or a function was told at the call itself
    "validates_in_train_mode",
    "dropout_always_on",
    # numbers compared to the last bit, before and after, with nothing in between that may change them
    "loads_overwritten",
    "stored_data_changed",
    "statistics_left_behind",
    # the calls of a sampler
    "sampler_stays",
    # recorded steps replayed with each other's weights
    "turned_by_the_data",
    "one_tensor_spoilt",
)
# Read off the record as well, but with room for another meaning: likely. They are no consequences of another problem,
# and stay as grave as they are beside one that is proven.
RECORDED = (
    # a curve of learning rates: that it is so is certain, that it was not meant so is not
    "dies-early",
    "warmup-never-ends",
    "multiplied",
    # norms, not tensors, and 1e-4 apart; ranks that train apart for a while (local SGD, experts) are meant so
    "ranks_differ",
    "ranks_see_the_same",
    "ranks_set_up_differently",
    "ranks_add_up",
    "ranks_clip_apart",
    "one_rank_nonfinite",
    "sharded_late",
    "rank_lost",
    "ranks_hang",
    # a decay seen at the taped steps and taken for all others
    "average_too_slow",
    # shares of a way, between limits that somebody chose; slow weights go back on purpose
    "average_stays",
    # shares of samples: targets that are drawn anew (noise, mixtures) change, too
    "pairs_change",
    # a count against what independent shuffles would draw
    "few_rows_drawn",
    # zero, or the same to the last bit, at every measured step; a frozen part with a gradient may be meant
    "stays_zero",
    "no_layer_gradient",
    "never_moves",
    "begins_alike",
    "recurrence_never_used",
)


# A learning rate that trains well is a little too high early and a little too low late: not worth a word.
STEP_LENGTHS = ("lr-too-high", "lr-too-low")
NONFINITE = ("forward-nonfinite", "backward-nonfinite")
LENGTHS_AND_LIMITS = (*STEP_LENGTHS, "grad-clip-misuse")

WARMED_UP = 0.3  # of the highest rate of the run: what is less was on its way there, or on its way out
LONG_WAY_BACK = 0.2  # of a run, spent above the loss of guessing

# Symptoms that say: this training does not go well, whatever the reason.
TROUBLE = (
    "nonfinite", "loss_rising", "loss_not_improving", "loss_oscillating", "loss_hardly_falling", "nothing_learned",
)  # fmt: skip


def diagnose(run: Run | str | os.PathLike) -> Diagnosis:
    """What is wrong with a run, as far as its record tells; needs no torch.

    >>> gradproof.diagnose("runs/a").worst  # doctest: +SKIP
    'problem'
    """
    if not isinstance(run, Run):
        run = open_whole(run)
    symptoms = leave_to_its_rank([symptom for find in SYMPTOMS for symptom in find(run)])
    troubled = any(symptom.name in TROUBLE for symptom in symptoms)
    verdicts = last_verdicts(run)
    found = [finding_of_verdict(v, troubled) for v in verdicts if v["verdict"] == "confirmed"]
    if not troubled:
        found = [as_grave_as_the_way_back(as_grave_as_leaps(finding, run), run) for finding in found]
    if not troubled and trains_well(run):
        found = [f for f in found if not (f.family in STEP_LENGTHS and f.level == "note")]
    found = [as_grave_as_the_rate_then(finding, run) for finding in found]
    found = add_witnesses(found, run)
    excluded = [exclusion_of_verdict(v) for v in verdicts if v["verdict"] == "excluded"]
    recorded = {suspect for s in symptoms if s.name in RECORDED for suspect in s.suspects}
    found = add_suspicions(found, findings_of_symptoms(symptoms, excluded, len(run)), recorded)
    if cut_short(run):
        found = [as_a_run_that_goes_on(finding) for finding in found]
    in_trouble = {v.get("id") for v in verdicts if v["verdict"] == "confirmed" and v.get("if_troubled")}
    found = behind_a_rate_that_died(found, in_trouble & {f.id for f in found})
    found = fold_consequences(
        [add_outburst(add_place(placed_by_gain(finding, run), run), run) for finding in found]
    )
    examination = read_examination(run)
    diagnosis = Diagnosis(
        run=plain(str(run.path)),
        steps=len(run),
        causes=add_trials(rank(found), run),
        symptoms=tuple(sorted(symptoms, key=lambda s: LEVELS.index(s.level))),
        excluded=tuple(e for e in excluded if e.family not in {f.family for f in found}),
        cost=run.info.get("cost", {}),
        notes=(*run.notes, *find_unseen(run, examination)),
        damaged=bool(run.notes),
        ended="ended" in run.info,
        counted=count_seen(run, examination),
        next_steps=suggest_next(found, run) if troubled else (),
        examination=examination,
        failure=str(run.info.get("failure") or ""),
        raised=describe_end(run),
        script=script_of(run),
    )
    return name_cells(diagnosis, run.info.get("cells") or {})


def cut_short(run: Run) -> bool:
    """Whether the script had more steps to take when `--steps` or Ctrl-C ended it."""
    return "stopped_after" in run.info or run.info.get("exit_code") == 130


BY_LENGTH = (
    "lr-schedule-error/warmup-never-ends",
    "optimizer-config/momentum",
)  # held against the run's steps


def as_a_run_that_goes_on(finding: Finding) -> Finding:
    """Steps that are short, and lead down, are no fault of a run that had many more to take; nor is what takes many
    steps: a warm-up that had not ended, an average over more of them than were taken."""
    slow = finding.family == "lr-too-low" and finding.level == "warning" and finding.confidence != "proven"
    return replace(finding, level="note") if slow or finding.id in BY_LENGTH else finding


def script_of(run: Run) -> str:
    source, directory = (run.info.get("source") or {}).get("file"), run.info.get("directory")
    return os.path.join(directory, source) if source and directory else ""


def leave_to_its_rank(symptoms: list[Symptom]) -> list[Symptom]:
    """A NaN that came from another rank, with the averaged gradient, was not born in this one's backward."""
    came = min(
        (s.step for s in symptoms if s.name == "one_rank_nonfinite" and s.step is not None), default=None
    )
    if came is None:
        return symptoms
    return [
        replace(s, suspects=()) if s.name == "nonfinite" and s.step is not None and s.step >= came else s
        for s in symptoms
    ]


def last_verdicts(run: Run) -> list[dict[str, Any]]:
    """What each experiment said last about each family, and since when; what it called lasting stays said."""
    last: dict[tuple[str, str], list[dict[str, Any]]] = {}
    verdicts = (e for e in run.events if e.get("event") == "verdict" and e.get("family") in BY_FAMILY)
    for event in sorted(
        verdicts, key=lambda event: event.get("step") or 0
    ):  # the newest steps are asked first
        before = last.setdefault((event.get("experiment", ""), event["family"]), [])
        ids = [(said["verdict"], said.get("id")) for said in before]
        since = event.get("step")
        if ("confirmed", event.get("id")) in ids:
            known = before[ids.index(("confirmed", event.get("id")))]["since"]
            since = min((step for step in (known, since) if step is not None), default=None)
        before[:] = standing(before, {**event, "since": since})
    return [said for standing_ones in last.values() for said in standing_ones]


def exclusion_of_verdict(verdict: dict[str, Any]) -> Exclusion:
    return Exclusion(
        verdict["family"], verdict.get("reason", ""), verdict.get("about") or "", verdict.get("step")
    )


def finding_of_verdict(verdict: dict[str, Any], troubled: bool) -> Finding:
    """What an experiment has confirmed; what matters only in trouble is a note where there is none."""
    cause = BY_FAMILY[verdict["family"]]
    level = verdict.get("level", "problem")
    if verdict.get("if_troubled") and not troubled:
        level = "note"
    return Finding(
        family=cause.family,
        id=verdict.get("id") or cause.family,
        level=level,
        confidence=verdict.get("confidence")
        or "possible",  # a verdict that does not say how sure it is, is not sure
        evidence=tuple(verdict.get("evidence", ())),
        fix=verdict.get("fix") or cause.advice(verdict.get("id", "")),
        where=verdict.get("where"),
        step=verdict.get("since", verdict.get("step")),
        title=verdict.get("title") or cause.title,
        numbers=verdict.get("numbers") or {},
    )


def as_grave_as_leaps(finding: Finding, run: Run) -> Finding:
    """Steps that overshoot by much are worth a warning where the loss has leapt above its start, and are the problem
    where it has leapt far. A single one, at the start of a training that no other tape was made of, is neither rare
    nor lasting."""
    if (
        finding.id != "lr-too-high/overshoot"
        or finding.level != "note"
        or finding.numbers.get("rise", 0.0) < 0.02
    ):
        return finding
    leap = largest_leap(run)
    several = finding.numbers.get("steps", 2) > 1
    return replace(finding, level="problem" if leap > 10 else "warning" if leap > 1.3 and several else "note")


def as_grave_as_the_way_back(finding: Finding, run: Run) -> Finding:
    """A start from which a good part of the run only finds back to the loss of guessing is the problem."""
    if finding.family != "bad-init" or finding.level != "note" or "guess" not in finding.numbers:
        return finding
    share = share_of_steps_above(run, finding.numbers["guess"])
    if share < LONG_WAY_BACK:
        return finding
    said = f"{100 * share:.0f} % of the {len(run)} steps went by before the loss was down at that of guessing"
    return replace(finding, level="problem", evidence=(*finding.evidence, said))


def as_grave_as_the_rate_then(finding: Finding, run: Run) -> Finding:
    """Steps that were too short while the rate was still warming up say nothing about the training."""
    if finding.id != "lr-too-low/tiny-steps" or finding.step is None:
        return finding
    then, rates = run.steps["lr"][run.steps["step"] == finding.step], run.steps["lr"]
    grew = len(then) and np.isfinite(rates).any() and then[0] < WARMED_UP * np.nanmax(rates)
    return replace(finding, level="note") if grew else finding


def add_suspicions(
    proven: list[Finding], suspected: list[Finding], recorded: Collection[str] = ()
) -> list[Finding]:
    """What the symptoms suggest, behind what is proven: beside a proven problem it is a consequence, not a cause.

    `recorded` are ids that are no consequences: they were read off the record, not off how training went.
    """
    known = {finding.family for finding in proven}
    fresh = [finding for finding in suspected if finding.family not in known]
    if not known.isdisjoint(NONFINITE):  # it is known where it was born
        fresh = [finding for finding in fresh if not finding.id.endswith("/unlocated")]
    if any(finding.level == "problem" and finding.confidence == "proven" for finding in [*proven, *fresh]):
        # how long steps are is judged when it is set right; until then, "raise" and "lower" are no advice
        fresh = [f for f in fresh if f.confidence != "possible" or f.family not in LENGTHS_AND_LIMITS]
        fresh = [
            replace(f, level="warning")
            if f.level == "problem" and f.confidence != "proven" and f.id not in recorded
            else f
            for f in fresh
        ]
    return [*proven, *fresh]


def behind_a_rate_that_died(found: list[Finding], in_trouble: Collection[str | None]) -> list[Finding]:
    """What is a problem only because training is in trouble, where the trouble is that it has stopped: a warning."""
    if not any(f.family == "lr-schedule-error" and f.level == "problem" for f in found):
        return found
    return [replace(f, level="warning") if f.id in in_trouble and f.level == "problem" else f for f in found]


def fold_consequences(found: list[Finding]) -> list[Finding]:
    """A NaN that is born in the very operation that is proven wrong in another way is what that mistake did."""
    kept = []
    for finding in found:
        same = [
            f
            for f in found
            if f.where == finding.where and f.family not in NONFINITE and f.level == "problem"
        ]
        if finding.family in NONFINITE and finding.where and any(f.confidence == "proven" for f in same):
            continue
        born = [f for f in found if f.family in NONFINITE and f.where and f.where == finding.where]
        if finding in same and finding.confidence == "proven" and born:
            finding = replace(finding, evidence=(*finding.evidence, f"consequence: {born[0].evidence[0]}"))
        kept.append(finding)
    return kept


def suggest_next(found: list[Finding], run: Run) -> tuple[str, ...]:
    """Where a training is in trouble and nothing is proven: the two experiments that would tell most."""
    if any(f.level == "problem" and f.confidence == "proven" for f in found):
        return ()
    if run.by_hand:
        return (
            '`gp_dump(run, "step.safetensors")` between backward and update, then `gradproof check-dump '
            "step.safetensors --against reference.py:loss`: is this step's forward right, is its backward?",
        )
    wanted = []
    located = [f for f in found if f.id.endswith("/unlocated") and f.step is not None]
    if located:
        wanted.append(
            f"`gradproof run --until {located[0].step} SCRIPT`: tapes the step of the first NaN or Inf"
        )
    if not run.info.get("cost", {}).get("taped_steps"):
        wanted.append(
            "`gradproof run SCRIPT` with experiments: no step of this run was taped, nothing was tested"
        )
    for finding in rank(found):
        if BY_FAMILY[finding.family].intervention and finding.level != "note":
            wanted.append(f"`gradproof run --verify SCRIPT`: tries the fix of {finding.id} from outside")
            break
    wanted.append(about_one_batch(run))
    return tuple(wanted[:2])


def about_one_batch(run: Run) -> str:
    """Whether the fault is more likely in model and loss, or in the data: a network that learns cannot but learn one
    batch by heart."""
    tried = run.info.get("facts", {}).get("one_batch")
    if tried is None:
        return "`gradproof.sanity.check_model`: can this model learn one batch at all?"
    numbers = f"{tried['start']:.4g} to {tried['end']:.4g} in {tried['steps']} steps"
    if tried["end"] < 0.5 * tried["start"]:
        return f"look at the data first: one batch alone is learned ({numbers}), so model and loss can learn"
    return f"look at model and loss first: not even one batch is learned by heart ({numbers}) at this rate or a tenth"


def add_trials(causes: tuple[Finding, ...], run: Run) -> tuple[Finding, ...]:
    """Say with each cause what trying its fix has shown; a fix that did not help is not recommended."""
    trials = {event["id"]: trial_of_event(event) for event in run.events if event.get("event") == "trial"}
    return tuple(replace(c, tried=str(trials[c.id])) if c.id in trials else c for c in causes)


def findings_of_symptoms(symptoms: list[Symptom], excluded: list[Exclusion], steps: int) -> list[Finding]:
    """One finding for each cause that the symptoms suggest; symptoms of one cause become its evidence."""
    evidence: dict[str, list[Symptom]] = {}
    for symptom in symptoms:
        last = steps if symptom.step is None else symptom.step
        suspects = [s for s in symptom.suspects if not any(e.covers(s, last) for e in excluded)]
        if suspects:
            evidence.setdefault(suspects[0], []).append(symptom)
    return [finding_of_suspicion(id, seen) for id, seen in evidence.items()]


def finding_of_suspicion(id: str, seen: list[Symptom]) -> Finding:
    family = id.partition("/")[0]
    cause = BY_FAMILY[family]
    level = min((symptom.level for symptom in seen), key=LEVELS.index)
    fix = cause.advice(id)
    step = next((symptom.step for symptom in seen if symptom.step is not None), None)
    if id.endswith("/unlocated") and step is not None:  # the step was not taped: a second run can tape it
        fix = f"`gradproof run --until {step} SCRIPT` tapes that step and names the operation; then {fix}"
    if any(symptom.name in PROOFS for symptom in seen):
        confidence = "proven"
    else:
        sure = len(seen) > 1 or level == "problem" or any(symptom.name in RECORDED for symptom in seen)
        confidence = "likely" if sure else "possible"
    return Finding(
        family=family,
        id=id,
        level=level,
        confidence=confidence,
        evidence=tuple(str(symptom) for symptom in seen),
        fix=fix,
        where=next((symptom.where for symptom in seen if symptom.where), None),
        step=step,
        title=cause.title,
    )


def rank(findings: list[Finding]) -> tuple[Finding, ...]:
    """Gravest first, causes before what they explain, surest first, earliest first; one finding a family and place."""
    findings = [as_grave_as_short_steps(finding, findings) for finding in findings]
    findings = [as_grave_as_overshooting(finding, findings) for finding in findings]
    findings = [as_grave_as_suspicions(finding, findings) for finding in findings]
    best: dict[tuple[str, str | None], Finding] = {}
    for finding in sorted(findings, key=lambda finding: _weight(finding, findings)):
        best.setdefault((finding.family, finding.where), finding)
    return tuple(best.values())


AT_THE_START = 3  # steps: what is so by then was not made so by training


def as_grave_as_short_steps(finding: Finding, others: list[Finding]) -> Finding:
    """What shortens steps, where steps are proven to be far too short, is the problem itself."""
    short = any(
        f.family == "lr-too-low" and f.level == "problem" and f.confidence == "proven" for f in others
    )
    family, _, what = finding.id.partition("/")
    return (
        replace(finding, level="problem") if short and what in BY_FAMILY[family].shortens_steps else finding
    )


def as_grave_as_overshooting(finding: Finding, others: list[Finding]) -> Finding:
    """A signal that explodes from the first steps on makes any step overshoot: it is no lesser matter than that."""
    if finding.family != "exploding-signal" or finding.confidence != "proven" or finding.step is None:
        return finding
    later = [f for f in others if f.id == "lr-too-high/overshoot" and first(finding, f)]
    level = min((f.level for f in (finding, *later)), key=LEVELS.index)
    return replace(finding, level=level)


def as_grave_as_suspicions(finding: Finding, others: list[Finding]) -> Finding:
    """A signal proven to explode from the first steps on is no lesser matter than parameters that only seem forgotten.

    How far it was seen to grow is a matter of how many steps a busy machine let us look at; that it grows is not.
    """
    if finding.family != "exploding-signal" or finding.confidence != "proven" or finding.level != "note":
        return finding
    forgotten = any(
        f.family == "param-not-updated" and f.confidence != "proven" and f.level == "warning" for f in others
    )
    early = finding.step is not None and finding.step <= AT_THE_START
    return replace(finding, level="warning") if early and forgotten else finding


def is_explained(finding: Finding, others: list[Finding]) -> bool:
    """Whether another finding, no less grave, is behind this one; any problem makes steps look too short."""
    graver = [
        f
        for f in others
        if f.family != finding.family and LEVELS.index(f.level) <= LEVELS.index(finding.level)
    ]
    if finding.family == "exploding-signal" and finding.confidence == "proven":
        return False  # measured from block to block, not seen to grow in training
    if finding.family == "vanishing-signal" and (finding.step is None or finding.step <= AT_THE_START):
        graver = [f for f in graver if f.family != "lr-too-high"]
    if finding.family == "lr-too-low":
        return any(not BY_FAMILY[f.family].explained_by for f in graver)
    if finding.family == "param-not-updated" and finding.confidence != "proven":
        return any(BY_FAMILY[f.family].keeps_gradient_out for f in graver)
    if finding.family == "lr-too-high" and any(
        BY_FAMILY[f.family].of_structure and f.confidence == "proven" for f in graver
    ):
        return True
    # a signal explains the steps only where it exploded before they overshot
    graver = [
        f
        for f in graver
        if f.family != "exploding-signal" or (f.confidence == "proven" and first(f, finding))
    ]
    return any(f.family in BY_FAMILY[finding.family].explained_by for f in graver)


def first(one: Finding, other: Finding) -> bool:
    return one.step is not None and other.step is not None and one.step <= other.step


def _weight(finding: Finding, others: list[Finding]) -> tuple[int, bool, int, float, int]:
    step = float("inf") if finding.step is None else finding.step
    explained = is_explained(finding, others)
    family = READ_FIRST.index(finding.family) if finding.family in READ_FIRST else len(READ_FIRST)
    return LEVELS.index(finding.level), explained, CONFIDENCES.index(finding.confidence), step, family


# Of findings that are alike in everything else, first those of how the step is put together, then of what it is fed.
READ_FIRST = (
    "grad-accumulation-error",
    "zero-grad-error",
    "aliasing-or-inplace",
    "axis-or-shape-error",
    "param-not-updated",
    "detached-graph",
    "wrong-gradient",
    "lr-too-high",
    "lr-too-low",
    "loss-activation-mismatch",
    "data-target-misaligned",
    "attention-mask-error",
    "loss-mask-error",
    "loss-scale-or-sign",
    "input-or-target-scale",
)
