"""Is only one side augmented? Maps that come back with their image turned, and masks that lie beside what they mark.

Only where targets are maps over the image: a label stays the same whatever way its image is turned.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from gradproof.experiments.verdict import Verdict, confirmed, each, excluded, first_of
from gradproof.instruments.evidence import Evidence
from gradproof.instruments.flow import place_of
from gradproof.instruments.registration import Fit, best_fits
from gradproof.instruments.source import forward_line, read, say_where_made
from gradproof.tape.operations import Line

ID = "data-target-misaligned/one-side-augmented"
MOST_SAMPLES, MOST_NUMBERS = 2000, 8_000_000  # remembered: 32 MB of float32, and enough of them come back
FEWEST = 4  # samples that came back wrongly
SHARE = 0.1  # of all that came back
SMALLEST = 4  # height and width
FAR = 64  # shifts that are tried
FITS = 0.6  # correlation of a mask with its image: less may be chance, of so many places
LITTLE = 0.5  # of the best fit
NEAR = 2  # pixels: masks are drawn with a free hand
ELSEWHERE, HARDLY = 0.3, 0.05  # of the masks that fit anywhere: more than chance moves, and no more than it
MOST_FITS = 64  # samples of a step
MARKS = 32  # classes of a mask
CALLS = ("flip", "rot90", "roll", "rotate", "transpose", "::-1")

Turn = Callable[[Tensor], Tensor]
TURNS: tuple[tuple[str, Turn], ...] = (
    ("mirrored along the width", lambda x: x.flip(-1)),
    ("mirrored along the height", lambda x: x.flip(-2)),
    ("turned by 180°", lambda x: x.flip(-1, -2)),
    ("turned by 90°", lambda x: x.rot90(1, (-2, -1))),
    ("turned by 270°", lambda x: x.rot90(3, (-2, -1))),
    ("transposed", lambda x: x.mT),
)


Key = tuple[int, int]  # of the side that stays as it is, and of the other's numbers in whatever order


@dataclass
class Kept:
    """First sights of samples, by their images and by their maps, and what came back."""

    by_image: dict[Key, tuple[Tensor, Tensor]] = field(default_factory=dict)
    by_map: dict[Key, tuple[Tensor, Tensor]] = field(default_factory=dict)
    numbers: int = 0
    from_loader: bool = False
    back: int = 0
    wrong: int = 0
    how: str = ""


def is_one_side_augmented(evidence: Evidence) -> Iterator[Verdict]:
    """What was done to an image must be done to its map: seen in samples that come back, or in where a map lies."""
    pair = image_and_map(evidence)
    if pair is not None:
        yield from first_of(
            each(evidence, partial(came_back_turned, pair=pair), partial(lies_elsewhere, pair=pair))
        )


def came_back_turned(evidence: Evidence, pair: list[int]) -> Iterator[Verdict]:
    """The same map with its image mirrored, or the other way round."""
    kept: Kept = evidence.memory.setdefault("one side", Kept())
    before = kept.wrong
    look_at_loader(kept, evidence, pair)
    if not kept.from_loader:
        look_at_batch(kept, evidence, pair)
    if kept.wrong > before and kept.wrong >= FEWEST and kept.wrong >= SHARE * kept.back:
        yield confirmed(
            ID,
            f"of {kept.back} samples that came back, {kept.wrong} had one side changed: the last one {kept.how}",
            *say_where_made(evidence, pair[0]),
            where=place_of("", augmenting_line(forward_line(evidence))) or evidence.flow.origin(pair[0]),
            fix="draw the transformation once, and apply it to image and target alike",
            confidence="proven",  # the same to the last bit, turned
        )
    elif kept.back >= 32 and not kept.wrong:
        yield excluded(
            ID, f"{kept.back} samples came back, none with only its image or only its target turned"
        )


def lies_elsewhere(evidence: Evidence, pair: list[int]) -> Iterator[Verdict]:
    """Masks that fit their images well if they are moved, each in its own way, and hardly as they lie."""
    values = evidence.flow.values(pair)
    image, target = (values.get(slot) for slot in pair)
    if image is None or target is None or image.dim() != 4:
        return
    masks = masks_of(target.detach().cpu(), image.detach().cpu())
    if masks is None:
        return
    counts = evidence.memory.setdefault("maps that lie elsewhere", {"fits": 0, "elsewhere": 0})
    fits = [fit for fit in best_fits(image.detach().cpu()[:MOST_FITS], masks[:MOST_FITS]) if fit.best >= FITS]
    moved = [fit for fit in fits if is_elsewhere(fit)]
    counts["fits"] += len(fits)
    counts["elsewhere"] += len(moved)
    seen, wrong = counts["fits"], counts["elsewhere"]
    if wrong >= 2 * FEWEST and wrong >= ELSEWHERE * seen and moved:
        example = max(moved, key=lambda fit: fit.best - fit.here)
        yield confirmed(
            ID,
            f"of {seen} masks that fit their image somewhere, {wrong} do not where they lie: one has a correlation of "
            f"{example.best:.2f} with its image if it is {example.moved}, and of {example.here:.2f} as it lies",
            *say_where_made(evidence, pair[0]),
            where=place_of("", augmenting_line(forward_line(evidence))) or evidence.flow.origin(pair[0]),
            fix="apply the same transformation, with the same numbers in the same order, to image and target",
            confidence="likely",  # a fit is what looks like one
        )
    elif seen >= 32 and wrong < HARDLY * seen:
        yield excluded(ID, f"{seen - wrong} of {seen} masks fit their image best where they lie")


def masks_of(target: Tensor, image: Tensor) -> Tensor | None:
    """(B, H, W) of what is marked; None of maps that are pictures themselves, such as the next one of a film."""
    flat = target if target.dim() == 3 else target[:, 0] if target.shape[1] == 1 else None
    if flat is None or flat.shape[-2:] != image.shape[-2:] or len(torch.unique(image[:1])) <= 2:
        return None
    marks = torch.unique(flat)
    if len(marks) < 2 or len(marks) > MARKS or not torch.equal(marks, marks.round()):
        return None
    return flat != torch.mode(flat.flatten()).values


def is_elsewhere(fit: Fit) -> bool:
    far = bool(fit.turned) or max(abs(fit.down), abs(fit.right)) > NEAR
    return far and fit.here <= LITTLE * fit.best


def look_at_loader(kept: Kept, evidence: Evidence, pair: list[int]) -> None:
    """Samples that a loader has handed out twice, by their numbers: also those of steps that were not taped."""
    shapes = [evidence.slot(slot).shape[1:] for slot in pair]
    for then, now in evidence.facts.came_back:
        if [tuple(value.shape) for value in then] == shapes:
            kept.from_loader = True
            compare(kept, (then[0], then[1]), now[0], now[1])


def look_at_batch(kept: Kept, evidence: Evidence, pair: list[int]) -> None:
    """The samples of this step, against those of the steps before."""
    values = evidence.flow.values(pair)
    if len(values) < 2:
        return
    images, maps = (values[slot].detach().cpu() for slot in pair)
    image_keys, image_numbers = keys(images)
    map_keys, map_numbers = keys(maps)
    by_image = zip(image_keys, map_numbers, strict=True)
    by_map = zip(map_keys, image_numbers, strict=True)
    for image, map, key, map_key in zip(images, maps, by_image, by_map, strict=True):
        known = kept.by_image.get(key) or kept.by_map.get(map_key)
        size = image.numel() + map.numel()
        if known is not None:
            compare(kept, known, image, map)
        elif len(kept.by_image) < MOST_SAMPLES and kept.numbers + size <= MOST_NUMBERS:
            kept.numbers += size
            kept.by_image[key] = kept.by_map[map_key] = (image.clone(), map.clone())


def compare(kept: Kept, then: tuple[Tensor, Tensor], image: Tensor, map: Tensor) -> None:
    """A sample and how it was first seen: both sides the same, or one of them turned."""
    same_image, same_map = torch.equal(then[0], image), torch.equal(then[1], map)
    if same_image and same_map:
        kept.back += 1
    elif same_map:
        kept.back += judge(kept, then[0], image, map, "its image {} and not its target")
    elif same_image:
        kept.back += judge(kept, then[1], map, image, "its target {} and not its image")
    else:
        kept.back += kept.from_loader


def image_and_map(evidence: Evidence) -> list[int] | None:
    """The slots of a batch of images and of targets over the same height and width."""
    flow, slots = evidence.flow, evidence.tape.slots
    targets = [c.target for c in flow.comparisons]
    targets += [leaf.index for leaf in evidence.tape.inputs if leaf.index in flow.towards_loss - flow.body]
    for image in flow.inputs:
        shape = slots[image].shape
        if len(shape) < 3 or min(shape[-2:]) < SMALLEST or not slots[image].dtype.is_floating_point:
            continue
        for target in targets:
            other = slots[target].shape
            if target != image and len(other) >= 3 and other[0] == shape[0] and other[-2:] == shape[-2:]:
                return [image, target]
    return None


def keys(batch: Tensor) -> tuple[list[int], list[int]]:
    """For each sample a number of its entries in their order, and one of them in any: sums of bits modulo 2^64."""
    rows = batch.contiguous().reshape(len(batch), -1)
    bits = rows.float().view(torch.int32).long() if rows.is_floating_point() else rows.long()
    bits = bits * 2_654_435_761 + 1_013_904_223
    weights = torch.arange(1, bits.shape[1] + 1, device=bits.device) * 2_654_435_761 + 1_013_904_223
    return (bits * (weights * weights)).sum(1).tolist(), (bits * bits * bits).sum(1).tolist()


def judge(kept: Kept, then: Tensor, now: Tensor, stayed: Tensor, text: str) -> bool:
    """Whether this is the sample seen before, with one side turned; the other must not look the same when turned."""
    found = next(turns_between(then, now), None)
    if found is None or is_scrambled_copy(now, stayed):
        return False
    name, turn = found
    if is_even(then) or torch.equal(turn(stayed), stayed):
        return False
    kept.wrong += 1
    kept.how = text.format(name)
    return True


def turns_between(then: Tensor, now: Tensor) -> Iterator[tuple[str, Turn]]:
    """What makes one of the other, exactly."""
    if not torch.equal(then.flatten().sort().values, now.flatten().sort().values):
        return
    for name, turn in TURNS:
        turned = turn(then)
        if turned.shape == now.shape and torch.equal(turned, now):
            yield name, turn
    for axis, side in ((-1, "width"), (-2, "height")):
        for by in range(1, min(then.shape[axis], FAR)):
            if torch.equal(then.roll(by, axis), now):
                yield f"shifted by {by} along the {side}", partial(torch.roll, shifts=by, dims=axis)


def is_even(value: Tensor) -> bool:
    """A map of one value tells nothing."""
    return bool((value == value.flatten()[0]).all())


def is_scrambled_copy(one: Tensor, other: Tensor) -> bool:
    """The same numbers in another order: to put them back may be the task."""
    if one.numel() != other.numel():
        return False
    return torch.equal(one.flatten().double().sort().values, other.flatten().double().sort().values)


def augmenting_line(line: Line | None) -> Line | None:
    """The first line of the file that mirrors, turns or shifts something."""
    if line is None:
        return None
    nodes = [n for n in ast.walk(read(line.file).tree) if isinstance(n, (ast.Call, ast.Subscript))]
    numbers = [n.lineno for n in nodes if any(word in called(n) for word in CALLS)]
    return Line(line.file, min(numbers), line.function) if numbers else None


def called(node: ast.Call | ast.Subscript) -> str:
    return ast.unparse(node.func if isinstance(node, ast.Call) else node.slice)
