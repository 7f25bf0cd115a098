"""Which positions count? The gradient at each position of a sequence, against where it is padded or masked."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gradproof.experiments.evidence import Evidence, Verdict, confirmed, excluded
from gradproof.experiments.flow import VIEWS
from gradproof.experiments.grids import Grid, find_grids, find_padding
from gradproof.experiments.nonfinite import place_of
from gradproof.experiments.terms import take_apart
from gradproof.tape.replay import differentiate

FAMILY = "loss-mask-error"
SHARE = 0.1  # of the positions that count being padding: more than a slip


def which_positions_count(evidence: Evidence) -> Iterator[Verdict]:
    """Padding that is learned, text that is not, and a mask the wrong way round."""
    for grid in find_grids(evidence):
        if grid.time_first and grid.share_at(1) < 0.98:
            continue
        pad = find_padding(grid.tokens)
        if pad is None:
            pad = find_padding(grid.targets, front=False)
        counts = positions_that_count(grid)
        if counts is None or not bool(counts.any()):
            continue
        found = list(verdict_on(grid, pad, counts))
        yield from found
        if found:
            return


def verdict_on(grid: Grid, pad: int | None, counts: Tensor) -> Iterator[Verdict]:
    where = place_of("", grid.comparison.operation.line)
    length = grid.targets.shape[1]
    tokens = grid.tokens[:, :length]
    hidden = masked_token(tokens, counts)
    if hidden is not None and float(((grid.targets == tokens) & counts).sum()) >= 0.98 * float(counts.sum()):
        yield confirmed(
            f"{FAMILY}/inverted",
            f"the positions replaced by token {hidden} are the only ones that do not count; "
            "everywhere else the target is the input itself",
            where=grid.evidence.flow.origin(grid.comparison.target, grid.comparison.operation.line),
            fix="let the masked positions count and ignore the others",
            lasting=True,
        )
        return
    if rest_left_out(grid, pad, counts):
        yield confirmed(
            f"{FAMILY}/rest-left-out",
            "in every row the loss counts from the first token on and ends before the text does: what comes last, as a "
            "rule the answer, is never learned",
            where=grid.evidence.flow.origin(grid.comparison.target, grid.comparison.operation.line),
            fix="ignore the prompt and let the answer count: labels[:prompt_length] = -100",
            level="warning",
            confidence="likely",
            lasting=True,
        )
        return
    if pad is None:
        return
    # a target may be the padding token; a tag of another vocabulary is padding where its token is
    is_pad = grid.targets == pad if grid.classes >= grid.vocabulary else tokens == pad
    learned = is_pad & counts
    if grid.classes >= grid.vocabulary:  # the first may be the end of the text: many use one token for both
        learned[:, 1:] &= is_pad[:, :-1]
    share = float(learned.sum()) / float(counts.sum())
    text = f"{100 * share:.0f} % of the positions that count in the loss are padding (token {pad})"
    ignored = f"ignore_index is {grid.ignored}"
    if share > SHARE and is_pad.any():
        real = float((counts & ~is_pad).sum()) / max(1.0, float((~is_pad & grid.valid).sum()))
        lost = grid.valid.logical_not() & ~is_pad
        other = f"; {int(lost.sum())} real positions do not count" if bool(lost.any()) else ""
        id = "inverted" if real < 0.02 else "padding-counts"
        yield confirmed(
            f"{FAMILY}/{id}",
            f"{text} ({ignored}){other}",
            where=where,
            fix=f"cross_entropy(..., ignore_index={pad}), or multiply by the mask and divide by its sum",
            lasting=True,
        )
    else:
        yield excluded(f"{FAMILY}/padding-counts", f"{text} ({ignored})")


def rest_left_out(grid: Grid, pad: int | None, counts: Tensor) -> bool:
    """Of next tokens, only those at the beginning of each row count, though the text goes on for two more at least."""
    if grid.share_at(1) < 0.98:
        return False
    length = grid.targets.shape[1]
    tokens = grid.tokens
    real = torch.ones_like(tokens, dtype=torch.bool) if pad is None else tokens != pad
    followed = real[:, :length] & torch.nn.functional.pad(real, (0, length))[:, 1 : length + 1]
    ends = counts.long().cumsum(1) == counts.sum(1, keepdim=True)  # from the last position that counts on
    behind = (followed & ends & ~counts).sum(1)
    begins = counts[:, 0] & (counts.long().diff(dim=1) <= 0).all(1)
    return bool((behind >= 2).double().mean() > 0.9) and bool(begins.double().mean() > 0.9)


def is_the_mean_over_what_counts(evidence: Evidence) -> Iterator[Verdict]:
    """Errors multiplied by a mask, then averaged over all positions, masked ones included."""
    flow = evidence.flow
    for root in evidence.tape.loss_slots:
        for term in take_apart(flow, root):
            made = flow.maker(flow.behind(term.operation.reads[0], VIEWS))
            if not term.mean or made is None or made.name not in ("mul", "masked_fill"):
                continue
            mask = next((slot for slot in made.reads[::-1] if slot not in flow.tracked), None)
            value = flow.values([mask]).get(mask) if mask is not None else None
            if value is None or value.numel() < 8 or not bool(((value == 0) | (value == 1)).all()):
                continue
            share = float(value.double().mean())
            share = 1 - share if made.name == "masked_fill" else share
            if 0 < share < 0.9:
                yield confirmed(
                    f"{FAMILY}/mean-over-all",
                    f"the mask lets {100 * share:.0f} % of the positions count, but the mean divides by all of them: "
                    f"the loss is {1 / share:.2g} times too small, and differs with the padding",
                    where=place_of("", term.operation.line),
                    fix="(loss * mask).sum() / mask.sum()",
                    level="problem" if share < 0.5 else "warning",
                    confidence="likely",
                )
                return


def positions_that_count(grid: Grid) -> Tensor | None:
    """Where the loss has a gradient with respect to the prediction."""
    slot = grid.comparison.prediction
    gradient = differentiate(grid.evidence.tape, gradients_at=[slot]).slot_gradients.get(slot)
    if gradient is None:
        return None
    return grid.by_position(gradient.abs().amax(1)) > 0


def masked_token(tokens: Tensor, counts: Tensor) -> int | None:
    """The one token that stands at every position that does not count, and nowhere else."""
    hidden, seen = tokens[~counts], tokens[counts]
    if hidden.numel() < 4 or not seen.numel():
        return None
    token = int(torch.mode(hidden).values)
    alone = float((hidden == token).double().mean()) > 0.9 and not bool((seen == token).any())
    return token if alone and token != find_padding(tokens) else None
