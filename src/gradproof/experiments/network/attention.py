"""Where does attention look? Along the keys, at words and not at padding, in the order of the tokens, at several keys.

Interleaved tokens (s0, a0, s1, a1, …) under a causal mask that was made for streams one behind the other (s0, s1, …,
a0, a1, …) see tokens of the future and miss some of the past; and the other way round.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from gradproof.experiments.verdict import Verdict, causes_of, confirmed, each, excluded
from gradproof.instruments.evidence import Evidence
from gradproof.instruments.flow import Flow, place_of
from gradproof.instruments.grids import find_padding
from gradproof.instruments.hearing import exchange
from gradproof.instruments.source import read
from gradproof.tape.operations import Line, Operation, Ref
from gradproof.tape.operators import FUSED_ATTENTION, argument

FAMILY = "attention-mask-error"
SOFTMAXES = {"_softmax", "_safe_softmax"}
PRODUCTS = ("bmm", "mm", "baddbmm", "matmul")
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


def where_does_attention_look(evidence: Evidence) -> Iterator[Verdict]:
    looks = (
        is_the_softmax_over_what_is_summed, is_padding_attended, is_the_mask_tiled_like_the_tokens, is_there_a_choice,
    )  # fmt: skip
    found = each(evidence, *looks)
    masks = [verdict.id for verdict in found if verdict.family == FAMILY and verdict.id]
    # who sees nothing but padding has no key where that is hidden, too
    yield from causes_of(v for v in found if v.id != f"{FAMILY}/all-masked-row" or masks == [v.id])


# axis and padding -------------------------------------------------------------------------------------------


def is_the_softmax_over_what_is_summed(evidence: Evidence) -> Iterator[Verdict]:
    """Weights that are summed over keys have to be normalised over keys."""
    flow = evidence.flow
    readers: dict[int, list[Operation]] = {}
    for op in flow.operations:
        for slot in op.reads:
            readers.setdefault(slot, []).append(op)
    for op in flow.operations:
        if op.name not in SOFTMAXES:
            continue
        rank = len(evidence.slot(op.makes[0]).shape)
        summed = _summed_axis(evidence, op.makes[0], readers)
        if summed is not None and rank >= 3 and op.args[1] % rank != rank + summed:
            yield confirmed(
                "axis-or-shape-error/softmax-axis",
                f"the softmax runs over axis {op.args[1]} of {list(evidence.slot(op.makes[0]).shape)}, "
                f"but the product that follows sums over axis {summed}: no weights that add up to 1",
                where=place_of(op.module, op.line),
                fix=f"softmax(dim={summed})",
                confidence="proven",  # the axis that each was given
            )
            return


def _summed_axis(evidence: Evidence, slot: int, readers: dict[int, list[Operation]]) -> int | None:
    """−1 or −2: which axis of a matrix the next matrix product sums over; None when it cannot be followed."""
    axes = evidence.slot(slot).shape[-2:]
    flipped = False
    for _ in range(8):
        following = [op for op in readers.get(slot, ()) if op.name != "detach"]
        if len(following) != 1:
            return None
        op = following[0]
        if op.name in ("bmm", "mm"):
            left = isinstance(op.args[0], Ref) and op.args[0].slot == slot
            return -1 if left != flipped else -2
        if op.name in ("transpose", "t") and set(op.args[1:] or (-2, -1)) == {-2, -1}:
            flipped, axes = not flipped, axes[::-1]
        elif op.name not in KEEPS_AXES or evidence.slot(op.makes[0]).shape[-2:] != axes:
            return None
        slot = op.makes[0]
    return None


def is_padding_attended(evidence: Evidence) -> Iterator[Verdict]:
    """The weight that real queries give to padded keys."""
    flow = evidence.flow
    worst: tuple[float, float, Operation] | None = None
    padding = padded_batches(evidence)
    if not padding:
        return
    for op in flow.operations:
        if op.name not in FUSED_ATTENTION and op.name not in SOFTMAXES:
            continue
        behind = flow.ancestors(op.makes[0])  # of another micro-batch the padding lies elsewhere
        for is_pad in (is_pad for slot, is_pad in padding.items() if slot in behind):
            if op.name in FUSED_ATTENTION or evidence.slot(op.makes[0]).shape[-1:] == is_pad.shape[1:]:
                weights = weights_of(flow, op)
                mass = mass_on(weights, is_pad) if weights is not None else None
                if mass is not None and (worst is None or mass > worst[0]):
                    worst = (mass, float(is_pad.double().mean()), op)
    if worst is None:
        return
    mass, share, op = worst
    place = _mask_before(flow, op) or op
    line = (
        f"in rows with padding, real positions give {100 * mass:.3g} % of their attention to it "
        f"({100 * share:.0f} % of all keys)"
    )
    if mass > ONLY:
        yield confirmed(
            "attention-mask-error/only-padding-attended",
            line,
            where=place_of(op.module, place.line),
            confidence="likely",  # padding is what looks like padding
        )
    elif mass > SOME:
        yield confirmed(
            "attention-mask-error/padding-attended",
            line,
            where=place_of(op.module, place.line),
            level="warning",
            confidence="likely",
            lasting=False,
        )
    else:
        yield excluded(
            "attention-mask-error/padding-attended", f"padding gets {100 * mass:.2g} % of the attention"
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
    refs = [arg.slot for arg in op.args[:2] if isinstance(arg, Ref)]
    mask = argument(op.func, op.args, op.kwargs, "attn_mask")
    mask = mask if mask is not None else argument(op.func, op.args, op.kwargs, "attn_bias")
    wanted = refs + ([mask.slot] if isinstance(mask, Ref) else [])
    found = flow.values(wanted)
    if len(refs) != 2 or any(slot not in found for slot in wanted):
        return None
    q, k = found[refs[0]].double(), found[refs[1]].double()
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if isinstance(mask, Ref):
        bias = found[mask.slot]
        scores = scores.masked_fill(~bias, -math.inf) if bias.dtype == torch.bool else scores + bias.double()
    if argument(op.func, op.args, op.kwargs, "is_causal", False):
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    return scores.softmax(-1)


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


def _mask_before(flow: Flow, op: Operation) -> Operation | None:
    """The operation that put the mask on the scores, a few steps before the softmax."""
    slot = op.reads[0]
    for _ in range(4):
        maker = flow.maker(slot)
        if maker is None or not maker.reads:
            return None
        if maker.name in MASKS:
            return maker
        slot = maker.reads[0]
    return None


# the order of a mask ----------------------------------------------------------------------------------------


def is_the_mask_tiled_like_the_tokens(evidence: Evidence) -> Iterator[Verdict]:
    """The first attention over several tokens a time step: how its mask counts time, and how its tokens lie."""
    flow = evidence.flow
    for op, steps in attentions(evidence):
        weights = weights_of(flow, op)
        if weights is None:
            return
        seen = (torch.nan_to_num(weights) > 0).flatten(0, -3).any(0) if weights.dim() > 2 else weights > 0
        masked = order_of_mask(seen, steps)
        lies = order_of_tokens(flow, op, steps) if masked else None
        if masked is None or lies is None:
            return
        if masked == lies:
            yield excluded(
                f"{FAMILY}/tiled-in-another-order",
                f"tokens and mask lie {lies}, {len(seen) // steps} tokens a time step",
            )
            return
        yield judge_tiles(op, seen, steps, masked, lies)
        return


def attentions(evidence: Evidence) -> Iterator[tuple[Operation, int]]:
    """Attentions of as many queries as keys, several for each time step of the inputs."""
    flow = evidence.flow
    lengths = {evidence.slot(s).shape[1] for s in flow.inputs if len(evidence.slot(s).shape) >= 2}
    for op in flow.operations:
        if op.name not in FUSED_ATTENTION and op.name not in SOFTMAXES:
            continue
        shape = evidence.slot(op.reads[0]).shape
        size = shape[-2] if len(shape) >= 3 else 0
        if op.name in SOFTMAXES and size != shape[-1]:
            continue
        for steps in sorted(lengths):
            if steps >= FEWEST_STEPS and size >= 2 * steps and size % steps == 0:
                yield op, steps


def order_of_mask(seen: Tensor, steps: int) -> str | None:
    """Whether a query sees the keys of its own and earlier time steps, counted in one of two ways."""
    each = len(seen) // steps
    if seen.shape != (each * steps, each * steps):
        return None
    by_step = seen.reshape(steps, each, steps, each).permute(1, 3, 0, 2)
    by_stream = seen.reshape(each, steps, each, steps).permute(0, 2, 1, 3)
    for name, tiles in ((BY_STEP, by_step), (BY_STREAM, by_stream)):
        if bool((tiles == tiles[0, 0]).all()) and is_causal(tiles[0, 0]):
            return name
    return None


def is_causal(seen: Tensor) -> bool:
    lower = torch.ones_like(seen).tril()
    return torch.equal(seen, lower) or torch.equal(seen, lower.tril(-1))


def order_of_tokens(flow: Flow, op: Operation, steps: int) -> str | None:
    """Which tokens move when one time step of all inputs is changed, before anything is attended to."""
    slots = [s for s in flow.inputs if flow.tape.slots[s].shape[1:2] == (steps,)]
    step, queries = steps // 2, queries_of(flow, op)
    if queries is None:
        return None
    leaves = exchange(flow, slots, 1, step, step - 1)
    before, after = flow.values([queries]).get(queries), flow.values([queries], leaves).get(queries)
    if before is None or after is None:
        return None
    moved = (before != after).movedim(-2, 0).flatten(1).any(1).cpu()  # (…, L, d)
    numbers, each = torch.arange(len(moved)), len(moved) // steps
    places = {
        BY_STEP: torch.div(numbers, each, rounding_mode="floor") == step,
        BY_STREAM: numbers % steps == step,
    }
    return next((name for name, place in places.items() if torch.equal(moved, place)), None)


def queries_of(flow: Flow, op: Operation) -> int | None:
    """What a fused attention reads first; of a softmax, the first factor of the product that made its scores."""
    if op.name not in SOFTMAXES:
        return op.reads[0]
    size = flow.tape.slots[op.reads[0]].shape[-1]
    slot: int | None = op.reads[0]
    for _ in range(8):
        maker = flow.maker(slot) if slot is not None else None
        if maker is None:
            return None
        if maker.name in PRODUCTS:
            queries = maker.reads[-2]
            return queries if flow.tape.slots[queries].shape[-2:-1] == (size,) else None
        square = [s for s in maker.reads if flow.tape.slots[s].shape[-2:] == (size, size)]
        slot = next((s for s in square if s in flow.tracked), None)
    return None


def judge_tiles(op: Operation, seen: Tensor, steps: int, masked: str, lies: str) -> Verdict:
    size = len(seen)
    each, numbers = size // steps, torch.arange(size)
    time = torch.div(numbers, each, rounding_mode="floor") if lies == BY_STEP else numbers % steps
    later = time[None, :] > time[:, None]
    seen = seen.cpu()
    future, missed = int((seen & later).sum()), int((~seen & (time[None, :] < time[:, None])).sum())
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
    calls = [
        n for n in ast.walk(source.tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)
    ]
    scopes = {source.scope_of(n) for n in calls if n.func.attr in TRIANGLES}  # type: ignore[attr-defined]
    tiled = [n for n in calls if n.func.attr in TILES and source.scope_of(n) in scopes]  # type: ignore[attr-defined]
    if len({source.scope_of(n) for n in tiled}) != 1:
        return None
    return Line(line.file, tiled[0].lineno, line.function)


# scores -----------------------------------------------------------------------------------------------------


def is_there_a_choice(evidence: Evidence) -> Iterator[Verdict]:
    """The first softmax over keys that leaves no choice, or has none to choose from."""
    flow = evidence.flow
    softmaxes = [op for op in flow.operations if op.name in SOFTMAXES and is_over_keys(evidence, op)][:MOST]
    if not softmaxes:
        return
    values = flow.values([op.reads[0] for op in softmaxes])
    for judge in (saturated, sees_nothing):
        for op in softmaxes:
            scores = values.get(op.reads[0])
            verdict = judge(evidence, op, scores.double()) if scores is not None else None
            if verdict is not None:
                yield verdict
                return


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
        where=place_of(op.module, op.line),
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
        if (
            rows.shape[1] == is_pad.shape[1] and rows.shape[0] % is_pad.shape[0] == 0
        ):  # padding may see nothing
            rows = rows & ~is_pad.repeat_interleave(rows.shape[0] // is_pad.shape[0], dim=0)
    share = float(rows.double().mean())
    if share < FEW:
        return None
    return confirmed(
        f"{FAMILY}/all-masked-row",
        f"{100 * share:.0f} % of the queries have every key masked: with a finite mask they attend to all keys alike",
        where=place_of(op.module, op.line),
        level="warning",
        confidence="likely",
        if_troubled=True,
    )
