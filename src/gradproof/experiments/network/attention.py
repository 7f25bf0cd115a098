"""Where does attention look? Along the keys, at words and not at padding, in the order of the tokens, at several keys.

Interleaved tokens (s0, a0, s1, a1, …) under a causal mask that was made for streams one behind the other (s0, s1, …,
a0, a1, …) see tokens of the future and miss some of the past; and the other way round.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor

from gradproof.experiments.verdict import Verdict, causes_of, confirmed, each, excluded
from gradproof.instruments.evidence import Evidence
from gradproof.instruments.flow import SOFTMAXES, Flow, place_of
from gradproof.instruments.grids import find_padding
from gradproof.instruments.hearing import exchange
from gradproof.instruments.source import read
from gradproof.instruments.walk import anything, back
from gradproof.tape.attention import attention_weights
from gradproof.tape.operations import Line, Operation, Ref
from gradproof.tape.operators import FUSED_ATTENTION

FAMILY = "attention-mask-error"
LOOKS = FUSED_ATTENTION | SOFTMAXES
KEEPS_AXES = {
    "view", "_unsafe_view", "expand", "clone", "native_dropout", "_to_copy", "mul", "div", "bernoulli_",
}  # fmt: skip
MASKS = {"masked_fill", "masked_fill_", "add", "add_", "where", "sub"}
ONLY, SOME = 0.99, 1e-3  # of the attention, on padding: a mask the wrong way round; more than rounding
FEWEST_STEPS = 3  # of time: two do not tell an order
BY_STEP, BY_STREAM = "step by step", "stream by stream"
TRIANGLES, TILES = ("tril", "triu"), ("repeat", "tile", "kron", "repeat_interleave", "block_diag", "cat")
MASKED = -1e4  # a score that is meant as minus infinity
LARGE = 50.0  # e^50 to one: next to such a score no other key counts, nor gets a gradient
ONE_KEY = 0.99  # of the weight on a single key
FEWEST_KEYS = 8  # among which a query can choose
ALONE = 0.95  # of the queries, each on one key: some heads look at one place by nature, not all
EARLY = 10  # steps: later, a head that looks at one place may have learned to
TOGETHER = 0.01  # of a mask's number: what scores of usual size add to it is less
FEW = 0.01  # of the queries: a row here and there that sees nothing harms nobody
MOST = 50  # softmaxes that are looked at
FAR = 8  # operations between a softmax and the product with the values
NEAR = 4  # between a softmax and its mask


def where_does_attention_look(evidence: Evidence) -> Iterator[Verdict]:
    looks = (
        is_the_softmax_over_what_is_summed, is_padding_attended, is_the_mask_tiled_like_the_tokens, is_there_a_choice,
    )  # fmt: skip
    found = each(evidence, *looks)
    masks = [verdict.id for verdict in found if verdict.family == FAMILY and verdict.id]
    # who sees nothing but padding has no key where that is hidden, too
    yield from causes_of(v for v in found if v.id != f"{FAMILY}/all-masked-row" or masks == [v.id])


# axis and padding -------------------------------------------------------------------------------------------


def is_the_softmax_over_what_is_summed(evidence: Evidence) -> Verdict | None:
    """Weights that are summed over keys have to be normalised over keys."""
    for op in evidence.flow.operations:
        if op.name not in SOFTMAXES:
            continue
        shape = evidence.slot(op.makes[0]).shape
        summed = _summed_axis(evidence.flow, op.makes[0])
        if summed is not None and len(shape) >= 3 and (op.args[1] - summed) % len(shape):
            return confirmed(
                "axis-or-shape-error/softmax-axis",
                f"the softmax runs over axis {op.args[1]} of {list(shape)}, "
                f"but the product that follows sums over axis {summed}: no weights that add up to 1",
                at=op,
                fix=f"softmax(dim={summed})",
                confidence="proven",  # the axis that each was given
            )
    return None


def _summed_axis(flow: Flow, slot: int) -> int | None:
    """−1 or −2: which axis of a matrix the next matrix product sums over; None when it cannot be followed."""
    axes, flipped = flow.tape.slots[slot].shape[-2:], False
    for _ in range(FAR):
        following = [op for op in flow.readers(slot) if op.name != "detach"]
        if len(following) != 1:
            return None
        op = following[0]
        if op.name in ("bmm", "mm"):
            left = isinstance(op.args[0], Ref) and op.args[0].slot == slot
            return -1 if left != flipped else -2
        if op.name in ("transpose", "t") and set(op.args[1:] or (-2, -1)) == {-2, -1}:
            flipped, axes = not flipped, axes[::-1]
        elif op.name not in KEEPS_AXES or flow.tape.slots[op.makes[0]].shape[-2:] != axes:
            return None
        slot = op.makes[0]
    return None


def is_padding_attended(evidence: Evidence) -> Verdict | None:
    """The weight that real queries give to padded keys."""
    flow, padding = evidence.flow, padded_batches(evidence)
    seen: list[tuple[float, float, Operation]] = []
    for op in (op for op in flow.operations if padding and op.name in LOOKS):
        behind = flow.ancestors(op.makes[0])  # of another micro-batch the padding lies elsewhere
        for is_pad in (is_pad for slot, is_pad in padding.items() if slot in behind):
            if op.name in FUSED_ATTENTION or evidence.slot(op.makes[0]).shape[-1:] == is_pad.shape[1:]:
                weights = weights_of(flow, op)
                mass = mass_on(weights, is_pad) if weights is not None else None
                seen += [(mass, float(is_pad.double().mean()), op)] if mass is not None else []
    if not seen:
        return None
    mass, share, op = max(seen, key=lambda entry: entry[0])
    if mass <= SOME:
        return excluded(f"{FAMILY}/padding-attended", f"padding gets {100 * mass:.2g} % of the attention")
    only = mass > ONLY
    before = islice(back(flow, op.reads[0], anything), NEAR)
    mask = next((maker for maker in before if maker.name in MASKS), op)
    return confirmed(
        f"{FAMILY}/only-padding-attended" if only else f"{FAMILY}/padding-attended",
        f"in rows with padding, real positions give {100 * mass:.3g} % of their attention to it "
        f"({100 * share:.0f} % of all keys)",
        where=place_of(op.module, mask.line),
        level="problem" if only else "warning",
        confidence="likely",  # padding is what looks like padding
        lasting=only,
    )


def padded_batches(evidence: Evidence) -> dict[int, Tensor]:
    """Token slots whose rows are padded, with the places of the padding."""
    flow = evidence.flow
    slots = [op.args[1].slot for op in flow.operations if op.name == "embedding"]
    slots = [slot for slot in dict.fromkeys(slots) if len(evidence.slot(slot).shape) == 2]
    found = {}
    for slot, tokens in flow.values(slots).items() if slots else ():
        pad = find_padding(tokens)
        if pad is not None:
            found[slot] = tokens == pad
    return found


def weights_of(flow: Flow, op: Operation) -> Tensor | None:
    """Attention weights (…, queries, keys) of a softmax, or of a fused attention, by its formula."""
    if op.name in SOFTMAXES:
        return flow.values([op.makes[0]]).get(op.makes[0])
    found = flow.values(op.reads)
    if any(slot not in found for slot in op.reads):
        return None
    wide = {slot: value.double() if value.is_floating_point() else value for slot, value in found.items()}
    args = tuple(wide[arg.slot] if isinstance(arg, Ref) else arg for arg in op.args)
    named = {name: wide[arg.slot] if isinstance(arg, Ref) else arg for name, arg in op.kwargs.items()}
    return attention_weights(op.func, args, named)[0]


def mass_on(weights: Tensor, is_pad: Tensor) -> float | None:
    """The mean weight on padded keys, of real queries in rows that have padding."""
    rows, keys = is_pad.shape
    if weights.shape[-1] != keys or weights.dim() < 3 or weights.shape[0] % rows:
        return None
    queries = weights.shape[-2]
    per_row = torch.nan_to_num(weights.double()).reshape(rows, -1, queries, keys).mean(1)  # (B, Tq, Tk)
    mass = (per_row * is_pad[:, None, :]).sum(-1)
    chosen = is_pad.any(1)[:, None].expand(rows, queries)
    if queries == keys:
        chosen = chosen & ~is_pad
    return float(mass[chosen].mean()) if bool(chosen.any()) else None


# the order of a mask ----------------------------------------------------------------------------------------


def is_the_mask_tiled_like_the_tokens(evidence: Evidence) -> Verdict | None:
    """The first attention over several tokens a time step: how its mask counts time, and how its tokens lie."""
    flow = evidence.flow
    op, steps = next(attentions(evidence), (None, 0))
    weights = weights_of(flow, op) if op is not None else None
    if op is None or weights is None:
        return None
    seen = (torch.nan_to_num(weights) > 0).reshape(-1, *weights.shape[-2:]).any(0).cpu()
    masked = order_of_mask(seen, steps)
    lies = order_of_tokens(flow, op, steps) if masked else None
    if masked is None or lies is None:
        return None
    if masked != lies:
        return judge_tiles(op, seen, steps, masked, lies)
    said = f"tokens and mask lie {lies}, {len(seen) // steps} tokens a time step"
    return excluded(f"{FAMILY}/tiled-in-another-order", said)


def attentions(evidence: Evidence) -> Iterator[tuple[Operation, int]]:
    """Attentions of as many queries as keys, several for each time step of the inputs."""
    flow = evidence.flow
    lengths = {evidence.slot(s).shape[1] for s in flow.inputs if len(evidence.slot(s).shape) >= 2}
    for op in (op for op in flow.operations if op.name in LOOKS):
        shape = evidence.slot(op.reads[0]).shape
        size = shape[-2] if len(shape) >= 3 else 0
        if op.name in SOFTMAXES and size != shape[-1]:
            continue
        fitting = (n for n in sorted(lengths) if n >= FEWEST_STEPS and size >= 2 * n and size % n == 0)
        yield from ((op, steps) for steps in fitting)


def times_of(tokens: int, steps: int, order: str) -> Tensor:
    """The time step of each token.

    >>> times_of(6, 3, BY_STEP).tolist(), times_of(6, 3, BY_STREAM).tolist()
    ([0, 0, 1, 1, 2, 2], [0, 1, 2, 0, 1, 2])
    """
    numbers = torch.arange(tokens)
    return numbers.div(tokens // steps, rounding_mode="floor") if order == BY_STEP else numbers % steps


def order_of_mask(seen: Tensor, steps: int) -> str | None:
    """In which order a query sees the keys of earlier time steps, with or without its own."""
    for order in (BY_STEP, BY_STREAM):
        time = times_of(len(seen), steps, order)
        if any(torch.equal(seen, sees(time[:, None], time)) for sees in (torch.ge, torch.gt)):
            return order
    return None


def order_of_tokens(flow: Flow, op: Operation, steps: int) -> str | None:
    """Which tokens move when one time step of all inputs is changed, before anything is attended to: of scores,
    those that a token has with itself tell."""
    slots, step = [s for s in flow.inputs if flow.tape.slots[s].shape[1:2] == (steps,)], steps // 2
    end = op.reads[0]
    before = flow.values([end]).get(end)
    after = flow.values([end], exchange(flow, slots, 1, step, step - 1)).get(end)
    if before is None or after is None:
        return None
    changed = before != after
    own = (
        changed.diagonal(dim1=-2, dim2=-1).movedim(-1, 0) if op.name in SOFTMAXES else changed.movedim(-2, 0)
    )
    moved = own.reshape(len(own), -1).any(1).cpu()
    orders = (
        order
        for order in (BY_STEP, BY_STREAM)
        if torch.equal(moved, times_of(len(moved), steps, order) == step)
    )
    return next(orders, None)


def judge_tiles(op: Operation, seen: Tensor, steps: int, masked: str, lies: str) -> Verdict:
    size, time = len(seen), times_of(len(seen), steps, lies)
    each, later = size // steps, time[None, :] > time[:, None]
    future, missed = int((seen & later).sum()), int((~seen & later.T).sum())
    fix = (
        f"torch.ones({size}, {size}).tril(), or repeat_interleave({each}) of the mask of {steps} steps along both axes"
        if lies == BY_STEP
        else f"repeat({each}, {each}) of the mask of {steps} steps, or interleave: stack(streams, 2).flatten(1, 2)"
    )
    return confirmed(
        f"{FAMILY}/tiled-in-another-order",
        f"the {size} tokens lie {lies} ({each} for each of {steps}), but the causal mask is tiled {masked}",
        f"{future} of {int(later.sum())} tokens of later steps are seen, {missed} of earlier steps are not",
        where=place_of(op.module, tiling_line(op.line) or op.line),
        fix=fix,
        confidence="proven",  # a time step was changed
    )


def tiling_line(line: Line | None) -> Line | None:
    """The line of the same file that tiles a triangle, if there is just one function that does."""
    if line is None:
        return None
    source = read(line.file)
    calls = [(getattr(n.func, "attr", ""), n) for n in ast.walk(source.tree) if isinstance(n, ast.Call)]
    scopes = {source.scope_of(n) for name, n in calls if name in TRIANGLES}
    tiled = [n for name, n in calls if name in TILES and source.scope_of(n) in scopes]
    alone = len({source.scope_of(n) for n in tiled}) == 1
    return Line(line.file, tiled[0].lineno, line.function) if alone else None


# scores -----------------------------------------------------------------------------------------------------


def is_there_a_choice(evidence: Evidence) -> Verdict | None:
    """The first softmax over keys that leaves no choice, or has none to choose from."""
    flow = evidence.flow
    softmaxes = [op for op in flow.operations if op.name in SOFTMAXES and is_over_keys(evidence, op)][:MOST]
    values = flow.values([op.reads[0] for op in softmaxes]) if softmaxes else {}
    known = [(op, values[op.reads[0]].double()) for op in softmaxes if op.reads[0] in values]
    said = (judge(evidence, op, scores) for judge in (saturated, sees_nothing) for op, scores in known)
    return next((verdict for verdict in said if verdict is not None), None)


def is_over_keys(evidence: Evidence, op: Operation) -> bool:
    """Scores (…, queries, keys) inside a module, over their last axis; not the classes of an output."""
    shape = evidence.slot(op.makes[0]).shape
    over_last = op.args[1] % max(1, len(shape)) == len(shape) - 1
    return bool(op.module) and len(shape) >= 3 and over_last and shape[-1] >= 2


def saturated(evidence: Evidence, op: Operation, scores: Tensor) -> Verdict | None:
    open_keys = scores > MASKED
    several = open_keys.sum(-1) >= FEWEST_KEYS
    if not bool(several.any()):
        return None
    rows = scores.masked_fill(~open_keys, -torch.inf)[several]
    top, second = rows.topk(2, dim=-1).values.unbind(-1)
    weights = rows.softmax(-1)
    alone = float((weights.amax(-1) > ONE_KEY).double().mean())
    gap = float((top - second).median())
    if alone < ALONE or gap < LARGE or evidence.step > EARLY:
        return None
    spread = float(rows[rows > -torch.inf].std())
    return confirmed(
        "exploding-signal/attention-scores",
        f"{100 * alone:.0f} % of the queries put all their weight on one key: scores have a standard deviation of "
        f"{spread:.3g}, the best is {gap:.3g} ahead of the next (e^{gap:.0f} to one)",
        at=op,
        if_troubled=True,
        confidence="likely",
    )


def sees_nothing(evidence: Evidence, op: Operation, scores: Tensor) -> Verdict | None:
    """Real queries all of whose keys are masked with a large negative number: their weights are equal, not zero."""
    finite = torch.isfinite(scores)
    most = scores.masked_fill(~finite, -torch.inf).amax(-1)
    least = scores.masked_fill(~finite, torch.inf).amin(-1)
    # (…, queries); all −inf would be a NaN, and scores that have grown to such numbers lie far apart
    hidden = finite.any(-1) & (most <= MASKED) & (most - least < TOGETHER * most.abs())
    rows = hidden.reshape(-1, hidden.shape[-1])
    for is_pad in padded_batches(evidence).values():
        heads, left = divmod(len(rows), len(is_pad))
        if rows.shape[1] == is_pad.shape[1] and not left:
            rows = rows & ~is_pad.repeat_interleave(heads, dim=0)  # padding may see nothing
    share = float(rows.double().mean())
    if share < FEW:
        return None
    return confirmed(
        f"{FAMILY}/all-masked-row",
        f"{100 * share:.0f} % of the queries have every key masked: with a finite mask they attend to all keys alike",
        at=op,
        level="warning",
        confidence="likely",
        if_troubled=True,
    )
