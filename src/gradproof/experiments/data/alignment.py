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
    known = [grid for grid in find_grids(evidence, by_hand=True) if grid.chance <= COMMON]
    aligned = [grid for grid in known if grid.share_at(1) >= EXACT]
    if aligned:
        shares = {lag: aligned[-1].share_at(lag) for lag in LAGS}
        said = f"{100 * shares[1]:.3g} % of the targets are the next token"
        yield excluded("data-target-misaligned/shift", said, numbers=name_lags(shares))
        return
    for grid in known:
        shares = {lag: grid.share_at(lag) for lag in LAGS}
        exact = [lag for lag in LAGS if shares[lag] >= EXACT]
        if exact:
            yield from verdict_on(grid, shares, exact)
            return


def verdict_on(grid: Grid, shares: dict[int, float], exact: list[int]) -> Iterator[Verdict]:
    level = "problem"
    copied, causal = can_copy(grid) if 0 in exact and grid.is_whole else (False, False)
    if copied:
        what, said = (
            "no-shift",
            "each target is the token that its own prediction was made from: copying solves it",
        )
        level = "problem" if causal else "warning"  # an encoder may be asked to copy
    elif min(exact) > 1:
        what, said = "double-shift", f"the targets are {min(exact)} positions ahead of the inputs"
        said += ": the token between is never predicted"
    elif max(exact) < 0:
        what, said, level = (
            "targets-behind",
            f"the targets lie {-max(exact)} positions behind the inputs",
            "warning",
        )
        said += ": they have been seen already"
    else:
        return
    lags = ", ".join(f"{100 * shares[lag]:.0f} % at {lag:+d}" for lag in LAGS)
    yield confirmed(
        f"data-target-misaligned/{what}",
        f"targets that equal the input token so many positions ahead: {lags}",
        said,
        where=where_cut(grid),
        level=level,
        confidence="proven"
        if copied and causal
        else "likely",  # changed, and its prediction followed; or counted
        numbers=name_lags(shares),
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


def can_copy(grid: Grid) -> tuple[bool, bool]:
    """Whether a token's own prediction hears it much more than the rest, not so through a bottleneck; and whether a
    changed token moves no earlier prediction."""
    row, middle = grid.inside
    found = grid.perturb(row, middle)
    if found is None:
        return False, False
    change = found[1][row]
    own, before = float(change[middle]), float(change[:middle].max()) if middle else 0.0
    counted = grid.valid[row].clone()
    counted[middle] = False
    others = float(change[counted].median()) if bool(counted.any()) else 0.0
    unheard = before <= UNHEARD * own
    return own > 0 and (unheard or own >= DIRECT * others), bool(middle) and unheard
