"""Does a view stand where a transpose was meant? Shapes before and after tell: the numbers stay, the axes change."""

from __future__ import annotations

from collections.abc import Iterator

from gradproof.experiments.evidence import Evidence, Verdict, confirmed
from gradproof.experiments.nonfinite import place_of

Shape = tuple[int, ...]


def is_a_view_in_place_of_a_transpose(evidence: Evidence) -> Iterator[Verdict]:
    """[T, B, C].view(B, T, C), heads split or joined without a transpose, [layers, B, H].view(B, layers * H)."""
    kinds = {call.path or call.kind: call.kind for call in evidence.tape.modules}
    for op in evidence.flow.operations:
        if op.name not in ("view", "_unsafe_view") or op.line is None or not op.makes:
            continue
        if kinds.get(op.module) == "MultiheadAttention":
            continue  # folds heads into the batch, and unfolds them as it folded
        before, after = evidence.slot(op.reads[0]).shape, evidence.slot(op.makes[0]).shape
        if scrambles(before, after) and op.makes[0] in evidence.flow.tracked | data_slots(evidence):
            yield confirmed(
                "axis-or-shape-error/view-for-transpose",
                f"view makes {list(after)} of {list(before)} without moving a number: rows of different axes are mixed",
                where=place_of(op.module, op.line),
                fix="transpose or permute to the new order of axes first, then reshape",
                lasting=True,
            )
            return


def data_slots(evidence: Evidence) -> set[int]:
    """What the first layers read."""
    return {slot for op in evidence.flow.layers for slot in op.reads}


def scrambles(before: Shape, after: Shape) -> bool:
    """Whether a reshape of one into the other puts an axis where another was."""
    before, after = tuple(n for n in before if n != 1), tuple(n for n in after if n != 1)
    if len(before) == len(after):
        return before != after and sorted(before) == sorted(after)
    return _folds(before, after) or _folds(after, before)


def _folds(parts: Shape, whole: Shape) -> bool:
    """(…, h, t, d) against (…, t, h·d), where (…, h·t, d) or (…, h, t·d) would keep the order."""
    if len(parts) != len(whole) + 1 or len(whole) < 2:
        return False
    h, t, d = parts[-3:]
    return parts[:-3] == whole[:-2] and whole[-2:] == (t, h * d) and h != t
