"""Is a mask tiled in the order of the tokens? Several tokens a time step can lie step by step, or stream by stream.

Interleaved tokens (s0, a0, s1, a1, …) under a causal mask that was made for streams one behind the other (s0, s1, …,
a0, a1, …) see tokens of the future and miss some of the past; and the other way round.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import torch
from torch import Tensor

from gradproof.experiments.attention import SOFTMAXES, weights_of
from gradproof.experiments.evidence import Evidence, Verdict, confirmed, excluded
from gradproof.experiments.flow import Flow
from gradproof.experiments.nonfinite import place_of
from gradproof.experiments.provenance import read
from gradproof.tape.operations import Line, Operation
from gradproof.tape.operators import FUSED_ATTENTION

ID = "attention-mask-error/tiled-in-another-order"
FEWEST = 3  # time steps
PRODUCTS = ("bmm", "mm", "baddbmm", "matmul")
BY_STEP, BY_STREAM = "step by step", "stream by stream"
TRIANGLES, TILES = ("tril", "triu"), ("repeat", "tile", "kron", "repeat_interleave", "block_diag", "cat")


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
            yield excluded(ID, f"tokens and mask lie {lies}, {len(seen) // steps} tokens a time step")
            return
        yield verdict_on(op, seen, steps, masked, lies)
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
            if steps >= FEWEST and size >= 2 * steps and size % steps == 0:
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
    step, leaves = steps // 2, {}
    for slot, value in flow.values(slots).items():
        leaves[slot] = value.clone()
        leaves[slot][:, step] = value[:, step - 1]
    queries = queries_of(flow, op)
    if queries is None:
        return None
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


def verdict_on(op: Operation, seen: Tensor, steps: int, masked: str, lies: str) -> Verdict:
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
        ID,
        f"the {size} tokens lie {lies} ({each} for each of {steps}), but the causal mask is tiled {masked}",
        f"{future} of {int(later.sum())} tokens of later steps are seen, {missed} of earlier steps are not",
        where=place_of(op.module, tiling_line(op.line) or op.line),
        fix=fix,
        lasting=True,
    )


def tiling_line(line: Line | None) -> Line | None:
    """The line of the same file that tiles a triangle, if there is just one function that does."""
    if line is None:
        return None
    try:
        source = read(line.file)
    except (SyntaxError, ValueError, RecursionError):
        return None
    calls = [
        n for n in ast.walk(source.tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)
    ]
    scopes = {source.scope_of(n) for n in calls if n.func.attr in TRIANGLES}  # type: ignore[attr-defined]
    tiled = [n for n in calls if n.func.attr in TILES and source.scope_of(n) in scopes]  # type: ignore[attr-defined]
    if len({source.scope_of(n) for n in tiled}) != 1:
        return None
    return Line(line.file, tiled[0].lineno, line.function)
