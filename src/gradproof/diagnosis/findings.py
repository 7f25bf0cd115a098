"""The words of a diagnosis: what is seen (symptom), what is concluded (finding), what it is not (exclusion)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from gradproof.diagnosis.examination import Examination

LEVELS = ("problem", "warning", "note")
CONFIDENCES = ("proven", "likely", "possible")


@dataclass(frozen=True)
class Symptom:
    """Something that can be seen in the record. `suspects` are cause ids that could explain it, likeliest first."""

    name: str
    level: str
    evidence: str
    step: int | None = None
    where: str | None = None
    suspects: tuple[str, ...] = ()

    def __str__(self) -> str:
        step = f" (step {self.step})" if self.step is not None else ""
        return f"{self.evidence}{step}"


@dataclass(frozen=True)
class Finding:
    """A cause: what it is, how sure, where, since when, how we know, what to change."""

    family: str
    id: str
    level: str
    confidence: str
    evidence: tuple[str, ...]
    fix: str
    where: str | None = None
    step: int | None = None
    title: str = ""
    numbers: dict[str, float] = field(default_factory=dict)  # what a fix needs to know
    tried: str = ""  # what trying the fix showed

    def __str__(self) -> str:
        place = f", at {self.where}" if self.where else ""
        return f"{self.level}: {self.title or self.id}{place} ({self.confidence})"

    def as_data(self) -> dict[str, Any]:
        return {**asdict(self), "evidence": list(self.evidence)}


# A taped step speaks for the steps up to the next landmark at least: landmarks are a factor of √10 apart at most.
SPEAKS_FOR = 4


@dataclass(frozen=True)
class Exclusion:
    """A cause that was tested and is not it, with the number that says so.

    `id` names the one thing that was measured; without it the whole family was. `step` is the one it was measured at.
    """

    family: str
    reason: str
    id: str = ""
    step: int | None = None

    def covers(self, suspect: str, step: int) -> bool:
        """Whether it clears a suspect at a step: what it measured, and not long after it was measured."""
        if self.step is not None and step > SPEAKS_FOR * (self.step + 1):
            return False
        return suspect == self.id if self.id else suspect.partition("/")[0] == self.family


@dataclass(frozen=True)
class Diagnosis:
    """Ranked causes first; then everything that was seen, and what it is not."""

    run: str
    steps: int
    causes: tuple[Finding, ...] = ()
    symptoms: tuple[Symptom, ...] = ()
    excluded: tuple[Exclusion, ...] = ()
    cost: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # what could not be read, and what was not seen
    damaged: bool = False  # a part of the record could not be read
    counted: str = ""  # how much was seen: N steps: M watched, K taped, Q questions asked
    next_steps: tuple[str, ...] = ()  # in trouble, with nothing proven: what would tell most
    examination: Examination = field(default_factory=Examination)
    ended: bool = True  # the end of the training is recorded
    failure: str = ""  # what made the watch stop before the training did
    raised: str = ""  # the exception that ended the script, and where
    script: str = ""  # the whole path of what was run, on the machine where it ran

    @property
    def worst(self) -> str | None:
        """The gravest level among the causes; None for a healthy run."""
        return min((cause.level for cause in self.causes), key=LEVELS.index, default=None)

    @property
    def stopped(self) -> str:
        """The first thing to know of a watch or a script that stopped early; empty for any other."""
        seen = (
            f"after {self.steps} step{'' if self.steps == 1 else 's'}"
            if self.steps
            else "before the first step"
        )
        if self.failure:
            return f"Watching stopped early, {seen} ({self.failure}): what came after was not seen."
        return f"The script was ended {seen} by {self.raised}." if self.raised else ""

    @property
    def conclusion(self) -> str:
        """The gravest finding in a sentence; without one what may be said, never more than was recorded and asked."""
        if not self.steps:
            return "No step was recorded: there is nothing to say about training."
        if self.worst in ("problem", "warning"):
            return f"{self.causes[0]}."
        if self.failure or (self.raised and self.examination.complete):
            return "No problem was found until then."
        if self.damaged and self.examination.complete:
            return "No problem was found in what could be read of the record."
        if not self.ended and self.examination.complete:
            return "Nothing is wrong so far that this record could show; no end of the training is recorded."
        if self.turned:  # nobody whose loss has left its course is told that all is well
            said = f"{self.turned[0].upper()}{self.turned[1:]}; why was not found."
            return f"{said} {self.examination.conclusion}"
        return self.examination.conclusion

    @property
    def turned(self) -> str:
        """Where the loss has left its course for good, as a sentence."""
        return next((s.evidence for s in self.symptoms if s.name == "loss_turned"), "")

    @property
    def sure(self) -> bool:
        """Whether nothing stands between this and "nothing is wrong"."""
        fine = bool(self.steps) and not self.stopped and not self.damaged and not self.turned
        return fine and self.worst in (None, "note") and self.examination.complete

    def __str__(self) -> str:
        lines = [self.stopped, *map(str, self.causes)] if self.causes else [self.stopped, self.conclusion]
        return "\n".join(line for line in lines if line)

    def as_data(self) -> dict[str, Any]:
        return {
            "run": self.run,
            "steps": self.steps,
            "causes": [cause.as_data() for cause in self.causes],
            "symptoms": [asdict(symptom) for symptom in self.symptoms],
            "excluded": [asdict(exclusion) for exclusion in self.excluded],
            "cost": self.cost,
            "notes": list(self.notes),
            "counted": self.counted,
            "next_steps": list(self.next_steps),
            "examination": {**self.examination.as_data(), "conclusion": self.conclusion},
            "failure": self.failure,
            "raised": self.raised,
            "stopped": self.stopped,
            "conclusion": self.conclusion,
            "sure": self.sure,
        }
