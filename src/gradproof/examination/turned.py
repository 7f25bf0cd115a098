"""Where the loss has turned, or leapt: was it the data or the weights? Steps recorded before and after it say so."""

from __future__ import annotations

from pathlib import Path

from gradproof.diagnosis.curves import leap_to_look_into
from gradproof.errors import UserError
from gradproof.examination.examiner import LONGEST_ANSWER, Asks, Shelved, note, read_shelf
from gradproof.examination.process import WorkerLost
from gradproof.record.run import open_run, read_events
from gradproof.record.schema import EXAMINATION_FILE

SEVERAL = 3  # steps of each side: one batch may be an odd one
LARGE = 64 << 20  # bytes of a step: of large ones, one of each side
PASSING = 4  # steps from a spike on: later, the network may have learned to live with it
APART = 0.02  # of the run before the turn: where it begins is not known to the step


def swap_around_the_turn(run: Path, worker: Asks) -> None:
    """If the loss has turned, and steps before and after it were kept; written into the run."""
    leap = leap_to_look_into(open_run(run))
    if leap is None:
        return
    early, late = around(read_shelf(run), *leap)
    steps = [[shelved.step for shelved in side] for side in (early, late)]
    if not early or not late or was_done(run, steps):
        return
    paths = [[str(shelved.path) for shelved in side] for side in (early, late)]
    try:
        found = worker.ask(LONGEST_ANSWER, what="swap", early=paths[0], late=paths[1])
    except WorkerLost as lost:
        found = {"error": str(lost)}
    if "error" in found:
        found = {"blame": "", "why": f"the steps could not be replayed: {found['error']}"}
    note(run, "swapped", turned=leap[0], passing=leap[1], early=steps[0], late=steps[1], **found)


def around(
    shelf: list[Shelved], turned: int, passing: bool = False, several: int = SEVERAL
) -> tuple[list[Shelved], list[Shelved]]:
    """Some steps from before a turn, and some from after it: the nearest, and the last of all if it is for good."""
    count = 1 if any(shelved.bytes > LARGE for shelved in shelf) else several
    early = [shelved for shelved in shelf if shelved.step < (1 - APART) * turned][-count:]
    if passing:
        return early, [shelved for shelved in shelf if turned <= shelved.step < turned + PASSING][:count]
    late = [shelved for shelved in shelf if shelved.step > turned]
    return early, [*late[: count - 1], *late[count - 1 :][-1:]]


def was_done(run: Path, steps: list[list[int]]) -> bool:
    events = (event for event in read_events(run / EXAMINATION_FILE, []) if event["event"] == "swapped")
    return any([event["early"], event["late"]] == steps for event in events)


def steps_to_swap(
    shelf: list[Shelved],
    leap: tuple[int, bool] | None,
    late: int | None,
    early: str,
    several: int = SEVERAL,
) -> list[list[Shelved]]:
    """For who asks: around the turn, or the steps that are named; UserError says what is missing."""
    if early and not early.isdecimal():
        raise UserError(f"with which step? --with takes the number of a recorded one, not {early!r}")
    known = {shelved.step: shelved for shelved in shelf}
    listed = ", ".join(map(str, sorted(known))) or "none"
    if early or (late is not None and leap is None):
        for wanted in (late, int(early or -1)):
            if wanted not in known:
                raise UserError(
                    f"two recorded steps are exchanged: --step LATE --with EARLY; there are {listed}"
                )
        return [[known[int(early)]], [known[late]]]  # type: ignore[index]
    if leap is None:
        raise UserError(
            f"the loss does not turn: name two steps, --step LATE --with EARLY; there are {listed}"
        )
    sides = around(shelf, *leap, several)
    if not all(sides):
        raise UserError(f"the loss leaps at step {leap[0]}, and only one side of it was recorded: {listed}")
    return [sides[0], [known[late]] if late in known else sides[1]]
