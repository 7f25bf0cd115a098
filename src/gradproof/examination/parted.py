"""Where the weights of one rank part from the others', the step before is done again from what both have recorded."""

from __future__ import annotations

from pathlib import Path

from gradproof.diagnosis.ranks import Parting, find_parting
from gradproof.examination.examiner import LONGEST_ANSWER, Asks, note, read_shelf
from gradproof.examination.process import WorkerLost
from gradproof.record.ranks import Ranks, read_ranks
from gradproof.record.run import open_run, read_events
from gradproof.record.schema import EXAMINATION_FILE


def do_again(run: Path, worker: Asks) -> None:
    """Memory or code, if two ranks part and both have taped the steps around it; written into the run."""
    ranks = read_ranks(run)
    parting = find_parting(ranks, open_run(run)) if ranks is not None else None
    if ranks is None or parting is None or was_done(run, parting):
        return
    pairs = steps_around(ranks, parting)
    if not pairs:
        return
    try:
        found = worker.ask(LONGEST_ANSWER, what="again", name=parting.name, pairs=pairs)
    except WorkerLost as lost:
        found = {"outcome": "undecided", "why": f"the step could not be done again: {lost}"}
    if "error" in found:
        found = {"outcome": "undecided", "why": f"the step could not be done again: {found['error']}"}
    note(run, "done again", step=parting.step, name=parting.name, **found)


def was_done(run: Path, parting: Parting) -> bool:
    return any(
        event["event"] == "done again" and (event["step"], event["name"]) == (parting.step, parting.name)
        for event in read_events(run / EXAMINATION_FILE, [])
    )


def steps_around(ranks: Ranks, parting: Parting) -> list[dict[str, list[str]]]:
    """By rank, the files of two steps that follow each other, or of the later one: first where the two ranks part.

    Of many weights, some are looked at in each step: what is seen at one may have been there at the one before.
    """
    shelves = {
        rank: {shelved.step: str(shelved.path) for shelved in read_shelf(ranks.paths[rank])}
        for rank in (parting.one, parting.other)
    }
    found = []
    for then in (parting.step, parting.step + 1, parting.step - 1):
        if all(then in shelf for shelf in shelves.values()):
            taped = all(then - 1 in shelf for shelf in shelves.values())
            steps = [then - 1, then] if taped else [then]
            found.append({str(rank): [shelf[step] for step in steps] for rank, shelf in shelves.items()})
    return found
