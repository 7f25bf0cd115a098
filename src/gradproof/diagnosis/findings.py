"""The words of a diagnosis: what is seen (symptom), what is concluded (finding), what it is not (exclusion)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

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


@dataclass(frozen=True)
class Exclusion:
    """A cause that was tested and is not it, with the number that says so.

    `id` names the one thing that was measured; without it the whole family was. `step` is the last step it speaks for.
    """

    family: str
    reason: str
    id: str = ""
    step: int | None = None

    def covers(self, suspect: str, step: int) -> bool:
        """Whether it clears a suspect at a step: what it measured, and no later than it measured it."""
        if self.step is not None and step > self.step:
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
    notes: tuple[str, ...] = ()
    next_steps: tuple[str, ...] = ()  # in trouble, with nothing proven: what would tell most

    @property
    def worst(self) -> str | None:
        """The gravest level among the causes; None for a healthy run."""
        return min((cause.level for cause in self.causes), key=LEVELS.index, default=None)

    def __str__(self) -> str:
        return "\n".join(map(str, self.causes)) or "nothing is wrong that this record could show"

    def as_data(self) -> dict[str, Any]:
        return {
            "run": self.run,
            "steps": self.steps,
            "causes": [cause.as_data() for cause in self.causes],
            "symptoms": [asdict(symptom) for symptom in self.symptoms],
            "excluded": [asdict(exclusion) for exclusion in self.excluded],
            "cost": self.cost,
            "notes": list(self.notes),
            "next_steps": list(self.next_steps),
        }
