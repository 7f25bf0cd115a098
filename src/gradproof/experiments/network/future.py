"""Does it see the future? One token of a language model is changed, and the predictions before it are watched."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gradproof.experiments.network.samples import ATTENDS
from gradproof.experiments.verdict import Verdict, confirmed, excluded, undecided
from gradproof.instruments.evidence import Evidence
from gradproof.instruments.flow import SOFTMAXES
from gradproof.instruments.grids import COMMON, UNHEARD, Grid, find_grids
from gradproof.instruments.hearing import Confined, along, find_first_spread
from gradproof.tape.operations import Operation

MIXES_PLACES = {"view", "_unsafe_view", "reshape", "transpose", "permute"}
FAMILY = "attention-mask-error"
DEAF = 1e-9  # of the change of the token's own prediction: what float64 leaves of nothing
SEVERAL = 3  # texts that lie in one row: a token at the beginning of one has none before it
REMEMBERS = ("attention", "rnn", "lstm", "gru", "softmax")


def does_it_see_the_future(evidence: Evidence) -> Iterator[Verdict]:
    """A prediction of the next token must hear every token up to its own, and none behind it."""
    for grid in find_grids(evidence, by_hand=True):
        if grid.chance < COMMON and grid.is_of_next_tokens:
            yield from verdict_on(evidence, grid)
            return


def verdict_on(evidence: Evidence, grid: Grid) -> Iterator[Verdict]:
    heard = []  # of each token that was exchanged: what its own, an earlier and a later prediction hear
    for row, position in places_to_change(grid):
        found = grid.perturb(row, position)
        if found is None:
            said = "no token could be exchanged for another, or the prediction could not be replayed"
            yield undecided(FAMILY, said)
            return
        tokens, change = found
        here, others = change[row], torch.cat([change[:row], change[row + 1 :]])
        most, before, after, elsewhere = map(largest, (here, here[:position], here[position + 1 :], others))
        if not most > 0:
            yield undecided(FAMILY, f"changing token {position} changes no prediction at all")
            return
        coupled = elsewhere > UNHEARD * most
        if before > UNHEARD * most:
            confined = keeps_to_later_positions(grid, position)
            op = find_first_spread(evidence.flow, {grid.token_slot: tokens}, confined)
            if not coupled or (op is not None and op.name in (*ATTENDS, *SOFTMAXES)):
                yield sees(evidence, op, position, here)
                return
        if coupled:  # a question of samples, not of time
            said = f"changing token {position} of one sequence changes predictions of others, too"
            yield undecided(FAMILY, said)
            return
        heard.append((most, before, after))
    yield excluded(
        f"{FAMILY}/sees-the-future",
        f"changing token {position} moves its own prediction by {heard[0][0]:.1e}, earlier ones by at most "
        f"{max(before for _, before, _ in heard):.1e}",
    )
    if any(after > DEAF * most for most, _, after in heard):  # weights that have blown up may fall deaf later
        evidence.memory["hears what came before"] = True
        return
    memory = next((op for op in evidence.flow.operations if _is_memory(op)), None)
    if evidence.step >= 3 and memory is not None and "hears what came before" not in evidence.memory:
        yield confirmed(
            f"{FAMILY}/sees-nothing-before",
            f"changing token {position} changes its own prediction by {heard[0][0]:.2g} and no later one at all: "
            "each token is alone",
            at=memory,
            confidence="likely",
        )


def largest(change: Tensor) -> float:
    return float(change.max()) if change.numel() else 0.0


def places_to_change(grid: Grid) -> list[tuple[int, int]]:
    """The middle of a row; where a row may hold several texts, places of several rows that the loss counts."""
    if bool(grid.valid[0].all()):
        return [(0, grid.targets.shape[1] // 2)]
    counted = grid.valid.sum(1).argsort(descending=True)[:SEVERAL].tolist()
    found = []
    for number, row in enumerate(counted, 1):
        places = grid.valid[row].nonzero().flatten()
        found += [(row, int(places[len(places) * number // (len(counted) + 1)]))] if len(places) else []
    return found


def sees(evidence: Evidence, op: Operation | None, position: int, change: Tensor) -> Verdict:
    later, earlier, behind = map(largest, (change[position:], change[:position], change[position + 1 :]))
    line = (
        f"changing token {position} changes predictions before it by {earlier:.2g} "
        f"(its own and later ones by {later:.2g}): the answer can be read off the input"
    )
    if op is not None and (op.name in MIXES_PLACES or _is_wrong_axis(evidence, op)):
        return confirmed(
            f"axis-or-shape-error/{'softmax-axis' if op.name in SOFTMAXES else 'view-for-transpose'}",
            line,
            f"the change reaches earlier positions in {op.name}: it runs over the wrong axis",
            at=op,
            fix="transpose back before reshaping, or name the axis of the keys",
            confidence="proven",  # the token was changed
        )
    only = position + 1 < len(change) and behind <= UNHEARD * earlier
    return confirmed(
        f"{FAMILY}/sees-only-the-future" if only else f"{FAMILY}/sees-the-future",
        line,
        *([f"it passes to earlier positions in {op.name}"] if op is not None else []),
        at=op,
        fix="mask every position behind the query: torch.tril of ones, or is_causal=True",
        confidence="proven",  # the token was changed
    )


def _is_wrong_axis(evidence: Evidence, op: Operation) -> bool:
    """Of scores (…, queries, keys), a softmax over the queries."""
    rank = len(evidence.slot(op.makes[0]).shape)
    return op.name in SOFTMAXES and rank >= 2 and op.args[1] % rank == rank - 2


def keeps_to_later_positions(grid: Grid, position: int) -> Confined:
    """Whether some axis of time shows a change only from a position on."""
    rows, length = grid.tokens.shape
    lengths = {length, grid.targets.shape[1]}

    def confined(changed: Tensor) -> bool | None:
        known = False
        for dim, size in enumerate(changed.shape):
            time = next((t for t in lengths if size in (t, rows * t)), None)
            if time is None:
                continue
            known = True
            at = along(changed, [dim]).nonzero().flatten()
            places = (at % time, torch.div(at, size // time, rounding_mode="floor"))
            if any(int(place.min()) >= position for place in places):
                return True
        square = [dim for dim, size in enumerate(changed.shape) if size in lengths][-2:]
        if len(square) == 2 and not bool(along(changed, square)[:position, :position].any()):
            return True  # scores of queries and keys: each entry hears its own two tokens
        return False if known else None

    return confined


def _is_memory(op: Operation) -> bool:
    return bool(op.module) and any(word in op.name for word in REMEMBERS) and op.name != "_log_softmax"
