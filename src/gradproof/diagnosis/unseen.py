"""What a record does not hold: steps that nobody looked at, tapes that failed, questions that were lost."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gradproof.diagnosis.examination import Examination
from gradproof.record.run import Run
from gradproof.record.schema import FRAMES_FILE, INFO_FILE


def count_seen(run: Run, examination: Examination) -> str:
    """300 steps: 300 watched (130 by loss and learning rate alone), 5 taped, 79 questions asked."""
    taken, bare = steps_taken(run), bare_steps(run)
    text = f"{count_ranks(run)}{taken} step{'' if taken == 1 else 's'}"
    if not len(run):
        return text
    alone = f" ({bare} by loss and learning rate alone)" if bare else ""
    asked = f"{examination.asked} question{'' if examination.asked == 1 else 's'} asked"
    return f"{text}: {len(run)} watched{alone}, {examination.taped} taped, {asked}"


def count_ranks(run: Run) -> str:
    """Of a training of several: how many there are, and how many of them have left a record."""
    if run.ranks is None:
        return ""
    found, world = len(run.ranks.numbers), run.ranks.world
    return f"{world} ranks, " if found >= world else f"{found} of {world} ranks, "


def steps_taken(run: Run) -> int:
    """By the training, as far as is known: those that were passed over have no row."""
    return max(len(run), run.info.get("cost", {}).get("steps", 0))


def bare_steps(run: Run) -> int:
    """Rows of which nothing but the loss and the learning rate was measured."""
    return int((run.seen["depth"] & (run.steps["depth"] == 0)).sum()) if np.any(run.seen["depth"]) else 0


def find_unseen(run: Run, examination: Examination) -> Iterator[str]:
    """A sentence for each thing that was not seen, the gravest first."""
    if run.info.get("threads", 1) > 1:
        yield f"{run.info['threads']} threads train, and only the first is watched"
    taken, cost = steps_taken(run), run.info.get("cost", {})
    if passed := cost.get("unseen_steps", 0):
        yield f"{passed} of {taken} steps were not looked at{of_budget(cost)}"
    taping = run.info.get("taping", {})
    if taping.get("broken"):
        yield f"taping ended early: {taping['broken']}"
    if taping.get("refused"):
        yield f"no step was taped: {taping['refused']}"
    specimens = taping.get("specimens")
    if isinstance(specimens, dict) and specimens.get("broken"):
        yield f"not every taped step could be kept: {specimens['broken']}"
    if run.info.get("thinned"):
        yield f"the statistics of older steps were thinned {run.info['thinned']} times, to keep {FRAMES_FILE} small"
    if run.info.get("frames_ended"):
        yield f"no tensor was measured after step {run.info['frames_ended']}: {FRAMES_FILE} was full"
    groups = sum(o.get("groups_left_out", 0) for o in run.info.get("optimizers", ()))
    left_out = {what: run.info.get(f"{what}_left_out", 0) for what in ("tensors", "parameters", "optimizers")}
    for what, more in {**left_out, "parameter groups": groups}.items():
        if more:
            yield f"{more} more {what} were there than have room in {INFO_FILE}; of those nothing is said"
    if examination.failed:
        one = len(examination.failed) == 1
        first = examination.failed[0]
        reason = f" ({first.reason[:120]})" if first.reason else ""
        more = "" if one else f" and {len(examination.failed) - 1} more"
        yield f"{len(examination.failed)} question{' has' if one else 's have'} failed: {first.question}{reason}{more}"


def of_budget(cost: dict) -> str:
    return f", to keep to the budget of {100 * cost['budget']:g} %" if cost.get("budget") else ""
