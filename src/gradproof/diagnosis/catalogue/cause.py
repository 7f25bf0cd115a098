"""A family of causes: what it means, what decides it, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cause:
    """A family of causes. `fixes` holds advice for particular ids; `fix` is for all the others.

    raised_by: symptoms that raise the suspicion; experiments: functions that decide it on a tape (where there are
    none, the symptoms themselves are the proof); intervention: how `--verify` undoes it from outside.
    """

    family: str
    title: str
    decided_by: str
    fix: str
    fixes: tuple[tuple[str, str], ...] = ()
    raised_by: tuple[str, ...] = ()
    experiments: tuple[str, ...] = ()
    intervention: str = ""

    def advice(self, id: str) -> str:
        return dict(self.fixes).get(id.partition("/")[2], self.fix)
