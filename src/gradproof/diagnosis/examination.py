"""What was asked of the taped steps, and what was not: nothing is claimed that nobody asked."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from gradproof.errors import plain
from gradproof.record.run import Run
from gradproof.record.schema import DOES_NOT_APPLY, OUT_OF_REACH

NAMED = 3  # open questions that a sentence names


class Open(NamedTuple):
    """A question without an answer, and why."""

    question: str
    reason: str
    core: bool = False


@dataclass(frozen=True)
class Examination:
    """The questions of a run, counted by what became of them.

    >>> Examination(taped=5, asked=79, answered=79, core=26).complete
    True
    """

    taped: int = 0  # steps
    asked: int = 0  # questions, of at least one step
    answered: int = 0
    not_applicable: int = 0  # questions about what this training does not have
    undecided: tuple[Open, ...] = ()
    failed: tuple[Open, ...] = ()
    not_asked: tuple[Open, ...] = ()
    core: int = 0  # questions without whose answers nobody may say that nothing is wrong
    core_open: tuple[str, ...] = ()  # names of those that have none
    command: str = ""  # that asks the rest
    recorded: str = ""  # of a program that gradproof.h watches: what it has told, and what not

    @property
    def is_recorded(self) -> bool:
        """Whether the record says what was asked at all."""
        return self.core > 0

    @property
    def complete(self) -> bool:
        """Whether a step was examined, and all core questions were answered."""
        return self.taped > 0 and self.is_recorded and not self.core_open

    @property
    def conclusion(self) -> str:
        """What may be said of a run in which no problem was found."""
        if self.complete:
            return "Nothing is wrong that this record could show."
        if self.recorded:
            return (
                f"No problem was found in what was recorded ({self.recorded}). Whether forward and backward are right "
                "was not asked: gp_dump writes a step, `gradproof check-dump` compares it with a reference."
            )
        if not self.taped:
            return "No problem was found in the recorded numbers, but no step was taped: nothing was tested."
        steps = f"{self.taped} step{'s were' if self.taped > 1 else ' was'} taped"
        if not self.is_recorded and self.command:
            return f"No problem was found, but nothing was asked yet: {steps}; `{self.command}` asks."
        if not self.is_recorded:
            return f"No problem was found; {steps}, but the record does not say which questions were asked."
        names = [name.replace("_", " ") for name in self.core_open[:NAMED]]
        names += [f"{len(self.core_open) - NAMED} more"] if len(self.core_open) > NAMED else []
        one = len(self.core_open) == 1
        text = f"No problem was found, but {len(self.core_open)} of {self.core} core questions "
        text += f"{'is' if one else 'are'} open: {', '.join(names)}"
        return text + (f"; `{self.command}` asks {'it' if one else 'them'}." if self.command else ".")

    def __str__(self) -> str:
        """The count in one line: 62 questions of 5 steps: 3 undecided, 1 failed, 4 not asked."""
        if self.recorded:
            return f"the record alone: {self.recorded}; of the steps themselves, nothing"
        if not self.taped:
            return "nothing: no step was taped"
        steps = f"{self.taped} step{'s' if self.taped > 1 else ''}"
        if not self.is_recorded:
            failed = f"; {len(self.failed)} failed" if self.failed else ""
            return f"{steps} taped; which questions they were asked is not recorded{failed}"
        parts = [
            f"{count} {words}"
            for count, words in (
                (len(self.undecided), "undecided"),
                (len(self.failed), "failed"),
                (len(self.not_asked), "not asked"),
                (self.not_applicable, "without an object here"),
            )
            if count
        ]
        said = ", ".join(parts) or "all answered"
        return f"{self.asked} question{'' if self.asked == 1 else 's'} of {steps}: {said}"

    def as_data(self) -> dict[str, Any]:
        lists = {
            name: [each._asdict() for each in getattr(self, name)]
            for name in ("undecided", "failed", "not_asked")
        }
        said = {"complete": self.complete, "conclusion": self.conclusion, "summary": str(self)}
        return {**asdict(self), **lists, "core_open": list(self.core_open), **said}


def read_examination(run: Run) -> Examination:
    """What the examinations of a run have written about themselves; of an older run, what can still be told."""
    events = run.events
    specimens = {event.get("step") for event in events if event.get("event") == "specimen"}
    tables = [event for event in events if event.get("event") == "table"]
    listed = tables[-1].get("questions") or () if tables else ()
    questions = [each for each in listed if isinstance(each, dict) and "name" in each]
    again = f"gradproof examine {plain(str(run.path))}"
    recorded = int(run.info.get("cost", {}).get("taped_steps") or 0)
    if not questions:
        taped = len(specimens) or recorded
        failures = tuple(
            Open(event.get("experiment", ""), event.get("error", ""))
            for event in events
            if event.get("event") == "experiment_failed"
        )
        told = what_was_told(run) if run.by_hand else ""
        return Examination(taped=taped, failed=failures, command=again if specimens else "", recorded=told)
    heard = _by_question(events)
    steps = specimens | {event.get("step") for answers in heard.values() for event in answers}
    why_not = _why_not_reached(events)
    found: dict[str, list[Open]] = {state: [] for state in ("answered", "undecided", "failed", "not asked")}
    core_open, asked, without_object = [], 0, 0
    for question in questions:
        answers = heard.get(question["name"], [])
        state, reason = judge(answers, int(question.get("enough") or 1), why_not)
        asked += any(event.get("outcome") != "not asked" for event in answers)
        if state == "not asked" and reason.startswith(DOES_NOT_APPLY):
            without_object += 1
            continue
        core = bool(question.get("core"))
        found[state].append(Open(question.get("sentence") or question["name"], reason, core))
        if core and state != "answered":
            core_open.append(question["name"])
    return Examination(
        taped=len(steps) or recorded,  # nobody may have come to ask yet
        asked=asked,
        answered=len(found["answered"]),
        not_applicable=without_object,
        **{key: _core_first(found[key.replace("_", " ")]) for key in ("undecided", "failed", "not_asked")},
        core=sum(bool(question.get("core")) for question in questions),
        core_open=tuple(core_open),
        command=again if found["failed"] or any(map(can_be_asked, found["not asked"])) else "",
        recorded="",
    )


def can_be_asked(question: Open) -> bool:
    return not question.reason.startswith(OUT_OF_REACH)


KINDS = (
    ("weight", "weights"),
    ("gradient", "gradients"),
    ("update", "updates"),
    ("output", "activations"),
)


def what_was_told(run: Run) -> str:
    """How many tensors of each kind a program has named, and of which kinds none: losses, 29 weights; no updates."""
    counts = [(sum(tensor["kind"] == kind for tensor in run.tensors), words) for kind, words in KINDS]
    told = ", ".join(["losses", *(f"{count} {words}" for count, words in counts if count)])
    missing = ", ".join(f"no {words}" for count, words in counts if not count)
    return f"{told}; {missing}" if missing else told


def judge(answers: list[dict[str, Any]], enough: int, why_not: str) -> tuple[str, str]:
    """What became of one question, over all steps that it was asked of: a state, and the reason for it.

    What is confirmed or excluded is answered. Silence is an answer once enough steps were looked at. Otherwise the
    last word counts.
    """
    spoken = [event for event in answers if event.get("outcome") != "not asked"]
    if any(event.get("outcome") in ("confirmed", "excluded") for event in spoken):
        return "answered", ""
    if not spoken:
        return "not asked", (str(answers[-1].get("reason") or "") if answers else "") or why_not
    last = spoken[-1]
    reason = str(last.get("reason") or "")
    if last.get("outcome") in ("undecided", "failed"):
        return last["outcome"], reason
    silent = len({event.get("step") for event in spoken if event.get("outcome") == "nothing"})
    if silent < enough:
        return "undecided", f"it wants to see {enough} steps, and saw {silent}"
    return "answered", ""


def _by_question(events: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    heard: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        if event.get("event") == "asked":
            heard.setdefault(event.get("question", ""), []).append(event)
    return heard


def _why_not_reached(events: list[dict[str, Any]]) -> str:
    ends = [event for event in events if event.get("event") == "examination_ended"]
    lost = [event for event in events if event.get("event") == "examiner_lost"]
    if lost and not ends:
        last = lost[-1]
        asked = (
            f" while it asked {last['question']!r} of step {last.get('step')}" if last.get("question") else ""
        )
        return f"the examination was cut short by {last['signal']}{asked}"
    if not ends:
        return "the examination has not ended, or was cut short"
    limit = ends[-1].get("limit")
    return f"the limit of {limit:g} s came first" if isinstance(limit, int | float) else "it was not reached"


def _core_first(found: list[Open]) -> tuple[Open, ...]:
    return tuple(sorted(found, key=lambda each: not each.core))
