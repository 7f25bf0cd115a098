"""Ranks that died or stand still: which one, in which step, and what the others wait for."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from gradproof.diagnosis.findings import Symptom
from gradproof.diagnosis.places import LINE
from gradproof.record.flight import BACKWARD, COLLECTIVE, PHASES, Flight, read_flight
from gradproof.record.last_steps import describe_last_steps, last_norms
from gradproof.record.ranks import Ranks
from gradproof.record.run import Run, open_run
from gradproof.record.schema import INFO_FILE

STILL, LONG = 10.0, 600.0  # seconds without an event that are a hang: all wait for others; one may be at work
SILENT = 5.0  # seconds without a beat after which a process is gone
APART = 0.15  # seconds between the last beats of two ranks, from which on one has ended before the other
MOST_RANKS = 256


def ranks_lost(ranks: Ranks, run: Run) -> Iterator[Symptom]:
    """Who waited in vain; where the record of a rank has no end: who stopped first, or who all others wait for."""
    if (apart := waited_in_vain(ranks)) is not None:
        yield apart
        return
    open_ended = [rank for rank, info in ranks.infos.items() if "ended" not in info][:MOST_RANKS]
    flights = {
        rank: flight for rank in open_ended if (flight := read_flight(ranks.paths[rank])) and flight.events
    }
    if not flights:
        yield from never_began(ranks, open_ended)
        return
    usual = np.nanmedian(ranks.tables["seconds"]) if np.isfinite(ranks.tables["seconds"]).any() else 0.0
    # while a rank is elsewhere (it evaluates, writes a checkpoint), others may wait for it for a good while
    limit = STILL if all(waits(flight) for flight in flights.values()) else LONG
    standing = {rank: flight for rank, flight in flights.items() if flight.still > max(limit, 20 * usual)}
    if len(standing) == len(ranks.numbers) or (
        standing and len(standing) < len(flights) == len(ranks.numbers)
    ):
        yield hang(ranks, flights, standing)
    elif time.time() - max(flight.beat for flight in flights.values()) > SILENT:
        yield from died(ranks, flights)


def waited_in_vain(ranks: Ranks) -> Symptom | None:
    """Ranks that raised in a collective while another stood in a different one, or in the same at another line."""
    failed = {
        rank: found
        for rank, info in ranks.infos.items()
        if (found := info.get("facts", {}).get("collective_failed"))
    }
    kinds = [(found["what"], found["line"]) for found in failed.values()]
    if len(set(kinds)) < 2:
        return None
    odd = min(failed, key=lambda rank: kinds.count((failed[rank]["what"], failed[rank]["line"])))
    said = [f"rank {rank} in {found['what']} at {found['line']}" for rank, found in sorted(failed.items())]
    text = "the ranks waited for each other in different collectives, until one gave up: " + "; ".join(
        said[:4]
    )
    text += f" ({failed[odd]['text'][:80]})"
    places = ", ".join(dict.fromkeys(found["line"] for found in failed.values()))
    return Symptom("ranks_hang", "problem", text, failed[odd]["step"], places, ("distributed-desync/hang",))


def never_began(ranks: Ranks, open_ended: list[int]) -> Iterator[Symptom]:
    """A rank that was gone before its first backward, while another raised for want of it."""
    raised = [(rank, info["raised"]) for rank, info in ranks.infos.items() if info.get("raised")]
    gone = [rank for rank in open_ended if time.time() - last_change(ranks.paths[rank]) > SILENT]
    if raised and gone:
        rank, error = raised[0]
        text = f"the process of rank {gone[0]} ended without a word before its first backward; "
        text += f"rank {rank} raised: {error.get('text', '')[:80]}"
        yield Symptom("rank_lost", "problem", text, 0, f"rank {gone[0]}", ("distributed-desync/lost-rank",))


def last_change(folder: Path) -> float:
    try:
        return (folder / INFO_FILE).stat().st_mtime
    except OSError:
        return math.inf


def died(ranks: Ranks, flights: dict[int, Flight]) -> Iterator[Symptom]:
    """The rank that was gone before the others, if one was."""
    order = sorted(flights, key=lambda rank: flights[rank].beat)
    first = order[0]
    others = len(ranks.numbers) - len(order)
    if len(order) > 1 and not others and flights[order[1]].beat - flights[first].beat < APART:
        return  # all were ended at once
    event = flights[first].events[-1]
    text = f"the process of rank {first} (number {flights[first].process}) ended without a word at {event}"
    if others:
        text += f"; {others} other ranks have recorded their own end"
        raised = [(rank, info["raised"]) for rank, info in ranks.infos.items() if info.get("raised")]
        text += f" (rank {raised[0][0]}: {raised[0][1].get('text', '')[:80]})" if raised else ""
    else:
        later = flights[order[-1]].beat - flights[first].beat
        text += f"; others were alive {later:.1f} s longer"
    told = describe_last_steps(last_norms(ranks.paths[first], ranks.infos[first]))
    text += f". Before that, {told}" if told else ""
    yield Symptom(
        "rank_lost", "problem", text, event.step, f"rank {first}", ("distributed-desync/lost-rank",)
    )


def hang(ranks: Ranks, flights: dict[int, Flight], standing: dict[int, Flight]) -> Symptom:
    """Who is behind: it never came to what the others wait for; or one that went ahead without it."""
    at = {rank: (flight.events[-1].step, len(flight.events)) for rank, flight in flights.items()}
    steps = [step for step, _ in at.values()]
    waiting = min(steps)
    said = [f"rank {rank} stands at {where(flight)}" for rank, flight in sorted(standing.items())]
    seconds = max(flight.still for flight in standing.values())
    text = (
        f"nothing has happened for {seconds:.0f} s: " + "; ".join(said[:4]) + (" …" if len(said) > 4 else "")
    )
    running = [rank for rank in flights if rank not in standing]
    ahead = [rank for rank, step in zip(at, steps, strict=True) if step > waiting]
    if running:
        text += f". They wait for rank {running[0]}, which is at {flights[running[0]].events[-1]}"
        odd = running[0]
    elif ahead and len(ahead) < len(flights):
        odd = ahead[0] if len(ahead) <= len(flights) // 2 else next(r for r in flights if r not in ahead)
        skipped = [rank for rank in ahead if skipped_backward(ranks, rank, waiting)]
        if skipped:
            odd = skipped[0]
            text += f". Rank {odd} skipped the backward of step {waiting}, in which the others wait for it"
        else:
            text += f". Rank {odd} is {'ahead of' if odd in ahead else 'behind'} the others"
    else:
        kinds = [(flight.events[-1].phase, flight.events[-1].what) for flight in flights.values()]
        rare = min(range(len(kinds)), key=lambda i: kinds.count(kinds[i]))
        odd = list(flights)[rare]
        if kinds.count(kinds[rare]) < len(kinds):
            text += f". Rank {odd} is the one elsewhere"
    line = LINE.search(flights[odd].lines)
    place = flights[odd].lines.split(" in ")[0] if line else None
    return Symptom("ranks_hang", "problem", text, waiting, place, ("distributed-desync/hang",))


def waits(flight: Flight) -> bool:
    """Whether the last that is known of a rank is a call that waits for others."""
    return flight.events[-1].phase in (PHASES[BACKWARD], PHASES[COLLECTIVE])


def where(flight: Flight) -> str:
    return f"{flight.events[-1]}" + (f" ({flight.lines})" if flight.lines else "")


def skipped_backward(ranks: Ranks, rank: int, step: int) -> bool:
    run = open_run(ranks.paths[rank])
    rows = run.steps["order"][run.steps["step"] == step]
    return len(rows) > 0 and "b" not in str(rows[0])
