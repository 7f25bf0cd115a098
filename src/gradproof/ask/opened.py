"""A run that can be asked: `gradproof.open("runs/a").ask("gradient", step=10, of="head.weight")`.

Without a question it says what can be asked, and what cannot and why. Opening needs no torch; answers that look into a
recorded step do.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gradproof.ask.answer import Answer, Row, bounded
from gradproof.ask.kinds import BY_NAME, KINDS, Kind, find
from gradproof.errors import UserError
from gradproof.record.run import Run, open_run
from gradproof.tape.label import find_damage, find_specimens

if TYPE_CHECKING:
    from gradproof.instruments.evidence import Evidence

SEVERAL = 8  # steps that a question of the examination may look back at


@dataclass(frozen=True)
class Asked:
    """What a question gets: the run, one of its steps, and what exactly is meant."""

    run: Run
    step: int | None
    open_step: Callable[[int | None], Evidence]
    of: str = ""
    change: str = ""
    part: str = ""  # of a tensor: "0:4,2"
    other: str = ""  # a second run
    steps: int = 24  # to train, of a what-if
    patch: str = ""  # of a what-if: a diff of the script; it is run, so only who may run scripts passes one

    @property
    def evidence(self) -> Evidence:
        """Of the step that is asked about; loaded once."""
        return self.open_step(self.step)


class OpenedRun:
    """A run, and the steps of it that have been looked into so far: the next question about the same one is quick."""

    def __init__(self, path: str | os.PathLike) -> None:
        self.run = open_run(path)
        self._evidence: tuple[int, Evidence] | None = None

    @property
    def path(self) -> Path:
        return self.run.path

    @property
    def steps(self) -> list[int]:
        """The steps that can be looked into."""
        return [int(path.name.partition("-")[2]) for path in find_specimens(self.path)]

    def ask(
        self,
        question: str = "",
        *,
        step: int | None = None,
        of: str = "",
        change: str = "",
        part: str = "",
        other: str = "",
        steps: int = 24,
        patch: str = "",
        cursor: int = 0,
        most: int = 4_000,
    ) -> Answer:
        """The answer to a question; UserError says in one sentence why there is none."""
        began = time.perf_counter()
        name = question.strip().lower().replace("_", "-")
        try:
            if not name:
                found = self.what_can_be_asked()
            elif name in BY_NAME:
                asked = Asked(self.run, step, self._open, of, change, part, other, steps, patch)
                found = self._answer(BY_NAME[name], asked)
            else:
                found = self._examine(question.strip(), step)
        except UserError:
            raise
        except Exception as error:  # what is replayed was recorded elsewhere, and may be anything
            said = (str(error).splitlines() or [""])[0][:300]
            raise UserError(f"{name} could not be answered: {type(error).__name__}: {said}") from error
        following = tuple(text.replace(" RUN", f" {shlex.quote(str(self.path))}") for text in found.ask_next)
        found = replace(
            found, run=str(self.path), ask_next=following, seconds=round(time.perf_counter() - began, 3)
        )
        return bounded(found, max(0, cursor), most)

    def _answer(self, kind: Kind, asked: Asked) -> Answer:
        if kind.needs == "specimen":
            asked = replace(asked, step=self._choose(asked.step))
        found = find(kind)(asked)
        return replace(found, step=asked.step if found.step is None else found.step, of=asked.of)

    def _choose(self, step: int | None) -> int:
        """The step that was named, or the last one that was recorded."""
        known = self.steps
        if not known:
            raise UserError(
                f"{self.path} has no recorded step to look into: none was taped, or they were not kept; "
                "`gradproof run --until STEP train.py` records one"
            )
        if step is not None and step not in known:
            near = sorted(sorted(known, key=lambda other: abs(other - step))[:8])
            raise UserError(
                f"step {step} of {self.path} was not recorded; near it there are {', '.join(map(str, near))}"
            )
        return known[-1] if step is None else step

    def _open(self, step: int | None) -> Evidence:
        from gradproof.instruments.evidence import Evidence
        from gradproof.tape.specimen import load

        step = self._choose(step)
        if self._evidence is None or self._evidence[0] != step:
            self._evidence = None  # the one before goes first: two may be too much
            path = self._file(step)
            self._evidence = step, Evidence(load(path), directory=None)
        return self._evidence[1]

    def specimen(self, step: int | None = None) -> Path:
        """The file of a recorded step; the last one where none is named."""
        return self._file(self._choose(step))

    def _file(self, step: int) -> Path:
        return next(path for path in find_specimens(self.path) if path.name == f"step-{step:08d}")

    # -- what can be asked ---------------------------------------------------------------------------------------

    def what_can_be_asked(self) -> Answer:
        steps = self.steps
        damage = find_damage(self._file(steps[-1])) if steps else ""
        rows = [row_of(kind, len(steps), damage) for kind in KINDS]
        rows += self._examined()
        open_ones = sum(row["possible"] for row in rows[: len(KINDS)])
        recorded = f"{len(steps)} recorded steps ({shown(steps)})" if steps else "no recorded step"
        return Answer(
            "",
            f"{open_ones} of {len(KINDS)} kinds of question can be asked of this run: it has {recorded}.",
            "measured",
            rows=tuple(rows),
            numbers={"steps": len(self.run), "recorded_steps": len(steps)},
            not_looked_at=tuple(self.run.notes),
            ask_next=("gradproof ask RUN gradient", "gradproof brief RUN"),
        )

    def _examined(self) -> list[Row]:
        """The questions of the examination: a name of the table is a question, too."""
        from gradproof.experiments.table import QUESTIONS

        return [
            {"question": q.name, "what": q.sentence, "cost": q.cost, "possible": bool(self.steps)}
            for q in QUESTIONS
        ]

    def _examine(self, name: str, step: int | None) -> Answer:
        """A question of the examination's table, asked once more, here."""
        from gradproof.experiments.table import BY_NAME as TABLE
        from gradproof.experiments.table import EVERY

        name = name.replace("-", "_")
        if name not in TABLE:
            raise UserError(
                f"there is no question {name!r}; there are {', '.join(BY_NAME)}, and those of "
                f"`gradproof ask {self.path}`"
            )
        from gradproof.ask.examined import answer_of
        from gradproof.examination.worker import Worker

        question, last = TABLE[name], self._choose(step)
        known = [other for other in self.steps if other <= last]
        if step is None and question.steps != EVERY:  # of the first steps, as an examination asks it
            known = known[: max(question.steps, question.enough)]
        known = known[-SEVERAL:]
        said = Worker().ask(name, [str(self._file(other)) for other in known])
        return replace(answer_of(question, said, known), step=known[-1])


def row_of(kind: Kind, recorded: int, damage: str) -> Row:
    row: Row = {"question": kind.name, "what": kind.sentence, "cost": kind.cost}
    wanted = {"specimen": 1, "two steps": 2}.get(kind.needs, 0)
    why = damage if wanted else ""
    if not why and recorded < wanted:
        why = "only one step was recorded" if recorded else "no step was recorded"
    row["possible"] = not why
    if kind.of:
        row["of"] = kind.of
    if why:
        row["why_not"] = why
    return row


def shown(steps: list[int]) -> str:
    """
    >>> shown([0, 1, 2, 3, 10, 30])
    '0, 1, 2 … 30'
    """
    if len(steps) <= 5:
        return ", ".join(map(str, steps))
    return f"{', '.join(map(str, steps[:3]))} … {steps[-1]}"


def open(path: str | os.PathLike) -> OpenedRun:
    """A run directory that can be asked; raises UserError where there is no run to read."""
    return OpenedRun(path)
