"""A family of causes: what it means, what decides it, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cause:
    """A family of causes. `fixes` holds advice for particular ids; `fix` is for all the others.

    raised_by: symptoms that raise the suspicion; intervention: how `--verify` undoes it from outside. What decides it
    on a tape stands in the table of questions; where nothing does, the symptoms themselves are the proof.
    """

    family: str
    title: str
    decided_by: str
    fix: str
    fixes: tuple[tuple[str, str], ...] = ()
    raised_by: tuple[str, ...] = ()
    intervention: str = ""

    def advice(self, id: str) -> str:
        return dict(self.fixes).get(id.partition("/")[2], self.fix)
