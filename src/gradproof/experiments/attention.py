"""Where does attention look? Whether padding is attended to, and whether the softmax runs over what is summed."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from gradproof.experiments.evidence import Evidence, Verdict, confirmed, excluded
from gradproof.experiments.flow import Flow
from gradproof.experiments.grids import find_padding
from gradproof.experiments.nonfinite import place_of
from gradproof.tape.operations import Operation, Ref
from gradproof.tape.operators import FUSED_ATTENTION, argument

SOFTMAXES = {"_softmax", "_safe_softmax"}
KEEPS_AXES = {
    "view",
    "_unsafe_view",
    "expand",
    "clone",
    "native_dropout",
    "_to_copy",
    "mul",
    "div",
    "bernoulli_",
}
MASKS = {"masked_fill", "masked_fill_", "add", "add_", "where", "sub"}


def where_does_attention_look(evidence: Evidence) -> Iterator[Verdict]:
    yield from is_the_softmax_over_what_is_summed(evidence)
    yield from is_padding_attended(evidence)


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
                lasting=True,
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
        for is_pad in padding.values():
            shape = evidence.slot(op.makes[0]).shape if op.makes else ()
            if op.name in FUSED_ATTENTION or (
                op.name in SOFTMAXES and shape and shape[-1] == is_pad.shape[1]
            ):
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
    if mass > 0.99:
        yield confirmed(
            "attention-mask-error/only-padding-attended",
            line,
            where=place_of(op.module, place.line),
            fix="invert the mask: hide the padding, not the tokens",
            lasting=True,
        )
    elif mass > 1e-3:
        yield confirmed(
            "attention-mask-error/padding-attended",
            line,
            where=place_of(op.module, place.line),
            fix="hide the padded keys: scores.masked_fill(is_padding[:, None, None, :], -inf)",
            level="warning",
            confidence="likely",
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
