"""Is only one side augmented? Maps that come back with their image turned, and masks that lie beside what they mark.

Only where targets are maps over the image: a label stays the same whatever way its image is turned.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from gradproof.experiments.verdict import Verdict, confirmed, each, excluded, first_of
from gradproof.instruments.evidence import Evidence
from gradproof.instruments.flow import place_of
from gradproof.instruments.ledger import fingerprints
from gradproof.instruments.registration import Fit, best_fits, same_numbers, turn_between
from gradproof.instruments.source import forward_line, read, say_where_made
from gradproof.tape.operations import Line

ID = "data-target-misaligned/one-side-augmented"
MOST_SAMPLES, MOST_NUMBERS = 2000, 8_000_000  # remembered: 32 MB of float32, and enough of them come back
FEWEST, ENOUGH = 4, 32  # samples that came back wrongly; and that came back, or fit, to say that none does
SHARE = 0.1  # of all that came back
SMALLEST = 4  # height and width
FITS = 0.6  # correlation of a mask with its image: less may be chance, of so many places
LITTLE = 0.5  # of the best fit
NEAR = 2  # pixels: masks are drawn with a free hand
ELSEWHERE, HARDLY = 0.3, 0.05  # of the masks that fit anywhere: more than chance moves, and no more than it
MOST_FITS = 64  # samples of a step
MARKS = 32  # classes of a mask
CALLS = ("flip", "rot90", "roll", "rotate", "transpose", "::-1")

Sample = tuple[Tensor, Tensor]  # an image and its map


def is_one_side_augmented(evidence: Evidence) -> Iterator[Verdict]:
    """What was done to an image must be done to its map: seen in samples that come back, or in where a map lies."""
    pair = image_and_map(evidence)
    if pair is not None:
        looks = (partial(came_back_turned, pair=pair), partial(lies_elsewhere, pair=pair))
        yield from first_of(each(evidence, *looks))


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


def one_sided(evidence: Evidence, pair: list[int], said: str, fix: str, sure: bool) -> Verdict:
    line = forward_line(evidence)
    return confirmed(
        ID,
        said,
        *say_where_made(evidence, pair[0]),
        where=place_of("", augmenting_line(line)) or evidence.flow.origin(pair[0]),
        fix=fix,
        confidence="proven" if sure else "likely",
    )


def augmenting_line(line: Line | None) -> Line | None:
    """The first line of the file that mirrors, turns or shifts something."""
    if line is None:
        return None
    nodes = [n for n in ast.walk(read(line.file).tree) if isinstance(n, (ast.Call, ast.Subscript))]
    texts = [(n.lineno, ast.unparse(n.func if isinstance(n, ast.Call) else n.slice)) for n in nodes]
    numbers = [number for number, text in texts if any(word in text for word in CALLS)]
    return Line(line.file, min(numbers), line.function) if numbers else None


# what came back ---------------------------------------------------------------------------------------------


@dataclass
class Kept:
    """First sights of samples, by one side and the other's numbers in whatever order; and what came back."""

    seen: dict[tuple[str, float, float], Sample] = field(default_factory=dict)
    numbers: int = 0
    from_loader: bool = False
    back: int = 0
    wrong: int = 0


def came_back_turned(evidence: Evidence, pair: list[int]) -> Iterator[Verdict]:
    """The same map with its image mirrored, or the other way round."""
    kept: Kept = evidence.memory.setdefault("one side", Kept())
    how = ""
    for then, now in of_the_loader(kept, evidence, pair) or of_the_batch(kept, evidence, pair):
        turned = what_was_turned(then, now)
        same = all(map(torch.equal, then, now))
        kept.wrong += bool(turned)
        kept.back += bool(turned) or same or (kept.from_loader and not any(map(torch.equal, then, now)))
        how = turned or how
    if how and kept.wrong >= FEWEST and kept.wrong >= SHARE * kept.back:
        said = f"of {kept.back} samples that came back, {kept.wrong} had one side changed: the last one {how}"
        fix = "draw the transformation once, and apply it to image and target alike"
        yield one_sided(evidence, pair, said, fix, sure=True)  # the same to the last bit, turned
    elif kept.back >= ENOUGH and not kept.wrong:
        said = f"{kept.back} samples came back, none with only its image or only its target turned"
        yield excluded(ID, said)


def of_the_loader(kept: Kept, evidence: Evidence, pair: list[int]) -> list[tuple[Sample, Sample]]:
    """Samples that a loader has handed out twice, by their numbers: also those of steps that were not taped."""
    shapes = [evidence.slot(slot).shape[1:] for slot in pair]
    back = [(then, now) for then, now in evidence.facts.came_back if [tuple(v.shape) for v in then] == shapes]
    kept.from_loader = kept.from_loader or bool(back)
    return [((then[0], then[1]), (now[0], now[1])) for then, now in back]


def of_the_batch(kept: Kept, evidence: Evidence, pair: list[int]) -> list[tuple[Sample, Sample]]:
    """The samples of this step that are among those of the steps before."""
    values = evidence.flow.values(pair) if not kept.from_loader else {}
    if len(values) < 2:
        return []
    images, maps = (values[slot].detach().cpu() for slot in pair)
    in_order, sorted_ = (
        [fingerprints(f(side)) for side in (images, maps)] for f in (Tensor.double, in_any_order)
    )
    found = []
    for number, (image, map) in enumerate(zip(images, maps, strict=True)):
        keys = [
            (side, float(in_order[at][number]), float(sorted_[1 - at][number]))
            for at, side in enumerate(("image", "map"))
        ]
        known = kept.seen.get(keys[0]) or kept.seen.get(keys[1])
        size = image.numel() + map.numel()
        if known is not None:
            found.append((known, (image, map)))
        elif len(kept.seen) < 2 * MOST_SAMPLES and kept.numbers + size <= MOST_NUMBERS:
            kept.numbers += size
            kept.seen |= dict.fromkeys(keys, (image.clone(), map.clone()))
    return found


def in_any_order(batch: Tensor) -> Tensor:
    return batch.reshape(len(batch), -1).double().sort(1).values


def what_was_turned(then: Sample, now: Sample) -> str:
    """Of a sample that was seen before, the one side that is turned; the other must not look the same when turned."""
    for side, text in enumerate(("its image {} and not its target", "its target {} and not its image")):
        stayed = now[1 - side]
        if not torch.equal(then[1 - side], stayed) or torch.equal(then[side], now[side]):
            continue
        found = turn_between(then[side], now[side])
        # the same numbers in another order: to put them back may be the task; a map of one value tells nothing
        if (
            found is None
            or same_numbers(now[side], stayed)
            or bool((then[side] == then[side].flatten()[0]).all())
        ):
            return ""
        name, turn = found
        return "" if torch.equal(turn(stayed), stayed) else text.format(name)
    return ""


# where a mask lies ------------------------------------------------------------------------------------------


def lies_elsewhere(evidence: Evidence, pair: list[int]) -> Iterator[Verdict]:
    """Masks that fit their images well if they are moved, each in its own way, and hardly as they lie."""
    found = evidence.flow.values(pair)
    values = [found[slot].detach().cpu() for slot in pair if slot in found]
    masks = masks_of(values[1], values[0]) if len(values) == 2 and values[0].dim() == 4 else None
    if masks is None:
        return
    counts = evidence.memory.setdefault("maps that lie elsewhere", {"fits": 0, "elsewhere": 0})
    fits = [fit for fit in best_fits(values[0][:MOST_FITS], masks[:MOST_FITS]) if fit.best >= FITS]
    moved = [fit for fit in fits if is_elsewhere(fit)]
    counts["fits"] += len(fits)
    counts["elsewhere"] += len(moved)
    seen, wrong = counts["fits"], counts["elsewhere"]
    if wrong >= 2 * FEWEST and wrong >= ELSEWHERE * seen and moved:
        example = max(moved, key=lambda fit: fit.best - fit.here)
        said = f"of {seen} masks that fit their image somewhere, {wrong} do not where they lie: one has a correlation "
        said += f"of {example.best:.2f} with its image if it is {example.moved}, and of {example.here:.2f} as it lies"
        fix = "apply the same transformation, with the same numbers in the same order, to image and target"
        yield one_sided(evidence, pair, said, fix, sure=False)  # a fit is what looks like one
    elif seen >= ENOUGH and wrong < HARDLY * seen:
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
