"""What an experiment answers: confirmed, excluded or undecided, of which cause, with the numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from gradproof.instruments.evidence import Evidence
from gradproof.instruments.flow import place_of
from gradproof.tape.operations import Operation

CONFIRMED, EXCLUDED, UNDECIDED = "confirmed", "excluded", "undecided"


@dataclass(frozen=True)
class Verdict:
    """The answer of an experiment about one cause.

    What an experiment says of a family at a later step replaces what it said before, unless that was confirmed and
    `lasting`. `if_troubled` means: a problem only in a run that shows trouble (a loss that does not fall, NaN); a
    note in one that trains well. `fix` is said where the numbers of this step belong into it; otherwise the
    catalogue of causes knows it.
    """

    verdict: str
    family: str
    id: str = ""
    evidence: tuple[str, ...] = ()
    reason: str = ""  # for an exclusion: the number that excludes
    about: str = ""  # for an exclusion: the id that it is about; empty if the whole family is
    where: str | None = None
    fix: str = ""
    level: str = "problem"
    confidence: str = ""  # of a confirmation: proven, likely or possible
    if_troubled: bool = False
    lasting: bool = False
    # what a fix from outside or the page needs to know
    numbers: dict[str, float] = field(default_factory=dict)


def confirmed(
    id: str,
    *evidence: str,
    confidence: str,
    lasting: bool = True,
    at: Operation | None = None,
    **details: Any,
) -> Verdict:
    """This is it. Proven: an intervention was replayed, float64 disagrees, or the tensors and calls themselves show it.

    What a statistic, a share or a look at values and names suggests is likely, or only possible. It is lasting, unless
    a later step may show that it was a passing thing. `at`: the operation whose module and line are the place.
    """
    family = id.partition("/")[0]
    if at is not None:
        details.setdefault("where", place_of(at.module, at.line))
    return Verdict(CONFIRMED, family, id, tuple(evidence), confidence=confidence, lasting=lasting, **details)


def excluded(id: str, reason: str, **details: Any) -> Verdict:
    """Not this: a whole family, or (family/what) the one thing that was measured."""
    family, _, what = id.partition("/")
    return Verdict(EXCLUDED, family, about=id if what else "", reason=reason, **details)


def undecided(family: str, reason: str) -> Verdict:
    return Verdict(UNDECIDED, family, reason=reason)


def first_of(found: Iterable[Verdict | None]) -> Iterator[Verdict]:
    """One of several verdicts on one family, where the later ones follow from it: confirmed before excluded.

    All of them are asked: some remember the step.
    """
    yield from list(causes_of(found))[:1]


def each(
    evidence: Evidence, *looks: Callable[[Evidence], Verdict | Iterable[Verdict] | None]
) -> list[Verdict]:
    """What each of several looks says. One that fails does not take along what another has confirmed."""
    said: list[Verdict] = []
    failed: Exception | None = None
    for look in looks:
        try:
            found = look(evidence)
            said += [found] if isinstance(found, Verdict) else found or ()
        except Exception as error:
            failed = failed or error
    if failed is not None and not any(verdict.verdict == CONFIRMED for verdict in said):
        raise failed
    return said


def causes_of(found: Iterable[Verdict | None]) -> Iterator[Verdict]:
    """Of several looks every cause that is confirmed, once; of families without one, the first that is excluded, or
    undecided."""
    said = [verdict for verdict in found if verdict is not None]
    chosen: dict[str, Verdict] = {}
    for kind in (CONFIRMED, EXCLUDED, UNDECIDED):
        known = {verdict.family for verdict in chosen.values()}
        for verdict in said:
            if verdict.verdict == kind and verdict.family not in known:
                chosen.setdefault(verdict.id or verdict.family, verdict)
    yield from chosen.values()
