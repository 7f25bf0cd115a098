"""A family of causes: what it means, what decides it, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cause:
    """A family of causes. `fixes` holds advice for particular ids; `fix` is for all the others.

    raised_by: symptoms that raise the suspicion; intervention: how `--verify` undoes it from outside. What decides it
    on a tape stands in the table of questions; where nothing does, the symptoms themselves are the proof.

    explained_by: families which, found and set right, may well take it away. of_structure: read off the graph, the
    identity of tensors or the order of rows, not off how the loss behaves: where it is proven, steps were not taken
    along the loss that is watched, and their length is judged afterwards. keeps_gradient_out: what looks like a
    forgotten parameter may come of it. shortens_steps: which of its ids make steps short whatever the learning rate.
    """

    family: str
    title: str
    decided_by: str
    fix: str
    fixes: tuple[tuple[str, str], ...] = ()
    raised_by: tuple[str, ...] = ()
    intervention: str = ""
    explained_by: tuple[str, ...] = ()
    of_structure: bool = False
    keeps_gradient_out: bool = False
    shortens_steps: tuple[str, ...] = ()

    def advice(self, id: str) -> str:
        return dict(self.fixes).get(id.partition("/")[2], self.fix)
