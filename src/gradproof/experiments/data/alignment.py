"""Do the targets line up? For token sequences: how many positions the targets are ahead of the inputs."""

from __future__ import annotations

from collections.abc import Iterator

from gradproof.experiments.verdict import Verdict, confirmed, excluded
from gradproof.instruments.evidence import Evidence
from gradproof.instruments.flow import VIEWS
from gradproof.instruments.grids import COMMON, EXACT, UNHEARD, Grid, find_grids

LAGS = range(-3, 4)  # 1 is right; 0, 2 and -1 are the usual slips, and nobody slips much further
DIRECT = 5.0  # a token's own prediction moves that many times as much as the others: it can be copied


def do_targets_line_up(evidence: Evidence) -> Iterator[Verdict]:
    """Next-token prediction wants targets exactly one ahead: at 0 the answer is given away, at 2 a token is skipped."""
    aligned, odd = None, []
    for grid in find_grids(evidence, by_hand=True):
        if grid.chance > COMMON:
            continue
        shares = {lag: grid.share_at(lag) for lag in LAGS}
        if shares[1] >= EXACT:
            aligned = grid
        elif max(shares.values()) >= EXACT:
            odd.append((grid, shares))
    if aligned is not None:
        share = aligned.share_at(1)
        text = f"{100 * share:.3g} % of the targets are the next token"
        lags = name_lags({l: aligned.share_at(l) for l in LAGS})
        yield excluded("data-target-misaligned/shift", text, numbers=lags)
        return
    for grid, shares in odd:
        yield from verdict_on(grid, shares)
        return


def verdict_on(grid: Grid, shares: dict[int, float]) -> Iterator[Verdict]:
    exact = [lag for lag in LAGS if shares[lag] >= EXACT]
    where = where_cut(grid)
    text = ", ".join(f"{100 * shares[lag]:.0f} % at {lag:+d}" for lag in LAGS)
    line = f"targets that equal the input token so many positions ahead: {text}"
    numbers = name_lags(shares)
    if 0 in exact and grid.is_whole and can_copy(grid):
        causal = is_causal(grid)
        yield confirmed(
            "data-target-misaligned/no-shift",
            line,
            "each target is the token that its own prediction was made from: copying solves it",
            where=where,
            level="problem" if causal else "warning",  # an encoder may be asked to copy
            numbers=numbers,
            confidence="proven" if causal else "likely",  # its token was changed, and its prediction followed
        )
    elif exact and min(exact) > 1:
        yield confirmed(
            "data-target-misaligned/double-shift",
            line,
            f"the targets are {min(exact)} positions ahead of the inputs: the token between is never predicted",
            where=where,
            numbers=numbers,
            confidence="likely",  # equal tokens, counted
        )
    elif exact and max(exact) < 0:
        yield confirmed(
            "data-target-misaligned/targets-behind",
            line,
            f"the targets lie {-max(exact)} positions behind the inputs: they have been seen already",
            where=where,
            level="warning",
            confidence="likely",
            numbers=numbers,
        )


def where_cut(grid: Grid) -> str | None:
    """Where the targets were made; the tokens, where both are cut out of one tensor and the targets in the loss."""
    flow, target = grid.evidence.flow, grid.comparison.target
    if flow.behind(target, VIEWS) == flow.behind(grid.token_slot, VIEWS) != grid.token_slot:
        return flow.origin(grid.token_slot)
    return flow.origin(target, grid.comparison.operation.line)


def name_lags(shares: dict[int, float]) -> dict[str, float]:
    """The table as the run keeps it."""
    return {f"lag {lag}": round(share, 4) for lag, share in shares.items()}


def is_causal(grid: Grid) -> bool:
    """Whether a changed token moves no earlier prediction."""
    row, middle = grid.inside
    found = grid.perturb(row, middle)
    if found is None or not middle:
        return False
    change = found[1][row]
    return float(change[:middle].max()) <= UNHEARD * float(change[middle])


def can_copy(grid: Grid) -> bool:
    """Whether a token's own prediction hears it much more than the rest: not so through a bottleneck."""
    row, middle = grid.inside
    found = grid.perturb(row, middle)
    if found is None:
        return False
    change = found[1][row]
    before = float(change[:middle].max()) if middle else 0.0
    counted = grid.valid[row].clone()
    counted[middle] = False
    others = float(change[counted].median()) if bool(counted.any()) else 0.0
    own = float(change[middle])
    return own > 0 and (before <= UNHEARD * own or own >= DIRECT * others)
