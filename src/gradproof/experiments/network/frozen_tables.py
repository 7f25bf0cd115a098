"""Is a table of random numbers frozen, or the layer that makes the scores?

Embedding.from_pretrained freezes what it is given, unless freeze=False is said. That is meant for tables that somebody
has trained. Handed random numbers, as an initialisation, it makes noise of them that stays. Whoever writes freeze=True,
or requires_grad_(False), has meant it: random features are never accused. The last layer is none: given to the
optimizer, frozen at random values, in a training that goes nowhere, it was frozen with the rest.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from gradproof.experiments.verdict import Verdict, confirmed
from gradproof.instruments.arms import find_handling, gradient_at, steps_within, train
from gradproof.instruments.evidence import Evidence
from gradproof.instruments.flow import VIEWS, with_line
from gradproof.instruments.update import at_work, ids_held, named_parameters

ID, LAST = "param-not-updated/frozen-table", "param-not-updated/frozen-last-layer"
FIRST = 8  # steps before it is asked
STEPS, FEWEST = 16, 8  # on one batch, with the tables and without
LONGEST = 1.5  # seconds for both trainings
TRIES = 2  # trainings: what does not show on two batches is not paid for again
FURTHER = 1.5  # times as far as without them
FALLS = 0.1  # of the loss, at least
STUCK = 0.5  # of the loss of the first steps
# of fewer rows, anything may be drawn; of so many rows and columns, what was learned shows, in little time
FEWEST_ROWS, MOST_ROWS, MOST_COLUMNS = 16, 4096, 256
SIGMAS = 5.0  # a sum of squares of what was drawn is beyond them less than once in a million


def is_a_random_table_frozen(evidence: Evidence) -> Iterator[Verdict]:
    """Tables frozen by default, or a frozen last layer, that look drawn; thawed, the batch is learned much further."""
    if evidence.step >= FIRST:
        tables = random_tables(evidence)
        verdict = of_tables(evidence, tables) if tables else of_last_layer(evidence)
        yield from () if verdict is None else (verdict,)


def of_tables(evidence: Evidence, tables: dict[str, dict[str, Any]]) -> Verdict | None:
    """A run whose loss has fallen well without them gets a warning: its table may stand for a trained one."""
    said = what_trainings_say(evidence, "frozen tables", list(tables))
    if said is None:
        return None
    named, names = named_parameters(evidence), list(tables)
    share = sum(named[name].numel() for name in names) / sum(p.numel() for p in named.values())
    sure = share_left(evidence) > STUCK and not any(entry["given"] for entry in tables.values())
    return confirmed(
        ID,
        f"{', '.join(names[:3])} hold random numbers (one mean, one spread, no column or row like another) and are "
        f"frozen: from_pretrained freezes unless freeze=False is given; that is {100 * share:.0f} % of the model",
        *said,
        where=with_line(names[0].rpartition(".")[0] or names[0], tables[names[0]]["line"]),
        fix="Embedding.from_pretrained(table, freeze=False) where the table is an initialisation, and give the "
        "optimizer its weight; freeze=True says that these numbers are wanted",
        level="problem" if sure else "warning",
        confidence="proven" if sure else "likely",
        lasting=False,
    )


def of_last_layer(evidence: Evidence) -> Verdict | None:
    name = random_last_layer(evidence) if share_left(evidence) > STUCK else ""
    said = what_trainings_say(evidence, "frozen last layer", [name]) if name else None
    if said is None:
        return None
    return confirmed(
        LAST,
        f"{name}, which makes the scores, holds random numbers and is frozen, though the optimizer was given it",
        *said,
        where=with_line(name, next(iter(evidence.facts.lines.get("requires_grad_", ())), "")),
        fix=f"set requires_grad = True for {name}, or load the weights that are to stay",
        confidence="proven",
        lasting=False,
    )


def random_tables(evidence: Evidence) -> dict[str, dict[str, Any]]:
    """name -> what is known of its making, of tables that are frozen by default and look drawn."""
    noted = evidence.facts.frozen_by_default
    named = named_parameters(evidence) if noted else {}
    frozen = {name: p.detach() for name, p in named.items() if name in noted and is_frozen(p)}
    return {name: noted[name] for name, table in frozen.items() if looks_drawn(table)}


def is_frozen(weight: Tensor) -> bool:
    return not weight.requires_grad and not weight.is_meta


def random_last_layer(evidence: Evidence) -> str:
    """The matrix that makes the scores, if it is frozen at random values and an optimizer that steps was given it."""
    named, flow, given = named_parameters(evidence), evidence.flow, ids_held(*at_work(evidence))
    read = [evidence.slot(flow.behind(s, VIEWS)).name for op in flow.layers[-1:] for s in op.reads]
    known = [(name, named[name]) for name in read if name in named and id(named[name]) in given]
    tall = {
        n: p.detach() if len(p) >= p.shape[1] else p.detach().mT
        for n, p in known
        if p.dim() == 2 and is_frozen(p)
    }
    return next((name for name, weight in tall.items() if looks_drawn(weight)), "")


def what_trainings_say(evidence: Evidence, which: str, names: list[str]) -> tuple[str, str] | None:
    """Of one batch, asked of few: what is not shown by them is not paid for again."""
    known = evidence.memory.setdefault(which, {"tries": 0, "said": None})
    if known["said"] is None and known["tries"] < TRIES:
        known["tries"] += 1
        known["said"] = learn_with_them(evidence, set(names))
    left = f"after {len(evidence.losses)} steps {100 * share_left(evidence):.0f} % of the first loss are left"
    return (known["said"], left) if known["said"] is not None else None


def learn_with_them(evidence: Evidence, names: set[str]) -> str | None:
    """Some steps on the batch alone, as it is and with the tables: what is to be said if these take it much further."""
    slots = [slot.index for slot in evidence.tape.leaves() if slot.name in names]
    handling = find_handling(evidence) if slots else None
    steps = steps_within(evidence, LONGEST, STEPS, slots) if handling is not None else 0
    if handling is None or steps < FEWEST:
        return None
    start, _ = gradient_at(evidence, {})
    without, within = (train(evidence, handling, steps, thawed=tables) for tables in ([], slots))
    if not start - within > max(FURTHER * (start - without), FALLS * abs(start)):
        return None
    return (
        f"{steps} steps on the batch of step {evidence.step} alone take the loss from {start:.4g} to {without:.4g} "
        f"as it is, and to {within:.4g} with them trained"
    )


def share_left(evidence: Evidence) -> float:
    """Of the loss of the first steps."""
    losses = list(evidence.losses)
    width = max(1, min(8, len(losses) // 2))
    first = statistics.median(losses[:width])
    return statistics.median(losses[-width:]) / first if first > 0 else math.nan


def looks_drawn(table: Tensor) -> bool:
    """Columns and rows of one mean and one spread and no correlation, as much and as little as chance gives."""
    rows = table[:MOST_ROWS, :MOST_COLUMNS].double()
    rows = rows[(rows != 0).any(1)]  # padding
    count, width = rows.shape
    spread = float(rows.std()) if count >= FEWEST_ROWS and width >= 2 else 0.0
    if not spread > 0 or not math.isfinite(spread):
        return False
    z = (rows - rows.mean()) / spread
    squares = z.square()
    flatness = float(squares.var())
    if not flatness > 0:
        return False
    sizes = (squares - squares.mean()) / math.sqrt(flatness)
    together = (z.mT @ z / math.sqrt(count)).triu(1).square().sum()
    return all(
        by_chance(float(total), freedom)
        for total, freedom in (
            (count * z.mean(0).square().sum(), width - 1),
            (count * sizes.mean(0).square().sum(), width - 1),
            (width * z.mean(1).square().sum(), count - 1),
            (width * sizes.mean(1).square().sum(), count - 1),
            (together, width * (width - 1) / 2),
        )
    )


def by_chance(total: float, freedom: float) -> bool:
    """Whether a sum of squares is what so many standard normal numbers give; its cube root is nearly normal."""
    nine = 2 / (9 * freedom)
    return abs((total / freedom) ** (1 / 3) - (1 - nine)) <= SIGMAS * math.sqrt(nine)
