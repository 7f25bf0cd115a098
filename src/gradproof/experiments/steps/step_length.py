"""Is the step too long or too short? The loss along the step that was really taken, on the batch it was taken for."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from gradproof.experiments.verdict import Verdict, confirmed, excluded, undecided
from gradproof.instruments.evidence import Evidence
from gradproof.instruments.flow import place_of
from gradproof.instruments.update import groups_of, ids_held
from gradproof.instruments.weights import take_apart

SHARES = (0.01, 0.1, 0.5, 1.0, 2.0)  # of the step: from its slope to whether it should go on
SHORTER = (1e-3, 1e-5)  # where the loss has risen: a hundredth of a monstrous step is too long, too
TENFOLD, HUNDREDFOLD, THOUSANDFOLD = FAR = (10.0, 100.0, 1000.0)  # as people raise a rate: tenfold at a time
# steps: a training that would lose half of its loss in so many is under way, be its rate low
HORIZON = 10_000
SMALL = 1e-3  # of a loss: a step that takes off more is not too short
PAYS = 1e-4  # of a loss, a hundred steps further on: ten times what is NOTICED
LINE = 5  # times as far down at ten times the step: half of what a line would fall
HARDLY_FALLEN = 0.8  # of the first losses is left: less, and a rate at which nothing bends may be right
RUGGED = 0.1  # of all that the loss does along the step, within a hundred-thousandth of it: no length is short enough
NOTICED = 1e-5  # of a loss: less may be rounding in float32


@dataclass(frozen=True)
class Probe:
    """The loss along one step: at its start, and at shares of its length."""

    step: int
    start: float
    losses: dict[float, float]

    @property
    def rises(self) -> bool:
        end = self.losses[1.0]
        return end > self.start + NOTICED * abs(self.start) + 1e-9 or not math.isfinite(end)

    @property
    def overshoots(self) -> bool:
        """Downhill at first, however short, and up again, above the start, at the end."""
        least = min(self.losses[share] for share in self.losses if share <= SHARES[0])
        return self.rises and not self.rugged and least < self.start - NOTICED * abs(self.start)

    @property
    def rugged(self) -> bool:
        """Up and down within the shortest share, as far as along the whole step."""
        changes = {
            share: abs(loss - self.start) for share, loss in self.losses.items() if math.isfinite(loss)
        }
        return changes.get(min(SHORTER), 0.0) > RUGGED * max(changes.values(), default=0.0)

    @property
    def best(self) -> float:
        """The share of the step at which this batch's loss is least."""
        finite = {share: loss for share, loss in self.losses.items() if math.isfinite(loss)}
        return min(finite, key=finite.__getitem__, default=min(self.losses))

    def __str__(self) -> str:
        text = ", ".join(f"{self.losses[share]:.4g} at {share:g}" for share in sorted(self.losses))
        return f"the loss along step {self.step} as it was taken: {self.start:.4g} at 0, {text}"


def is_the_step_too_long_or_short(evidence: Evidence) -> Iterator[Verdict]:
    """Too long: at half or more of the taped steps the loss falls for a small part of the step and has risen at its
    end. Too short: it still falls at a hundred times the step."""
    if not evidence.updates:
        yield undecided("lr-too-high", "the step changed no weight, so that there is no way to follow")
        return
    start = evidence.loss_at({})
    if not math.isfinite(start):
        said = f"the loss of step {evidence.step} is not finite, or could not be replayed"
        yield undecided("lr-too-high", said)
        return
    probe = Probe(evidence.step, start, {share: evidence.loss_at(evidence.moved(share)) for share in SHARES})
    if probe.rises:
        probe.losses.update({share: evidence.loss_at(evidence.moved(share)) for share in SHORTER})
    probes: list[Probe] = evidence.memory.setdefault("line probes", [])
    probes.append(probe)
    over = [p for p in probes if p.overshoots]
    if 2 * len(over) >= len(probes) and over:
        yield overshoots(evidence, over, len(probes))
    elif probe.rugged and probe.rises:
        said = "it varies as much within a hundred-thousandth of the step as along all of it: none is right"
        yield undecided("lr-too-high", f"{probe}: {said}")
    elif not any(p.rises for p in probes):
        reason = f"at {len(probes)} taped steps, each lowers the loss of its own batch"
        end = probe.losses[1.0]
        yield excluded("lr-too-high", f"{reason}: {start:.4g} to {end:.4g} at step {probe.step}")
    straight: list[float] = evidence.memory.setdefault("straight probes", [])
    short = 0 <= start - probe.losses[1.0] < SMALL * abs(start)
    losses = {share: evidence.loss_at(evidence.moved(share)) for share in FAR} if short else {}
    straight.append(straight_until(start, losses) if short else 0.0)
    if short:
        yield from is_far_better(evidence, start, losses)


def overshoots(evidence: Evidence, over: list[Probe], count: int) -> Verdict:
    rate, share = largest_lr(evidence), min(p.best for p in over)
    rise = sorted(p.losses[1.0] / p.start - 1 for p in over)[len(over) // 2]
    return confirmed(
        "lr-too-high/overshoot",
        f"{len(over)} of {count} taped steps overshoot",
        *map(str, over[-2:]),
        *say_what_is_summed(evidence),
        if_troubled=True,
        fix=f"lower the learning rate: about {say_rate(share, rate)}, and warm it up",
        numbers={
            "lr_factor": min(share, 0.5),
            "rise": rise if math.isfinite(rise) else 1e9,
            "steps": len(over),
        },
        confidence="proven",  # the loss along the step, replayed
        lasting=False,
    )


def say_what_is_summed(evidence: Evidence) -> list[str]:
    """A loss that adds up where others average makes every step so many times longer: worth knowing beside this."""
    batch = evidence.slot(evidence.flow.inputs[0]).shape[0] if evidence.flow.inputs else 1
    for root in evidence.tape.loss_slots:
        for term in take_apart(evidence.flow, root):
            if batch > 1 and term.operand[:1] == (batch,) and not term.is_averaged_over(batch):
                place = place_of("", term.operation.line)
                return [
                    f"the loss is a sum over {batch} samples ({place}): their mean makes the step {batch} times shorter"
                ]
    return []


def largest_lr(evidence: Evidence) -> float:
    """NaN where a script that changes its parameters itself keeps it to itself."""
    rates = (group["lr"] for group in groups_of(evidence) if group.get("lr") is not None)
    return max(map(float, rates), default=math.nan)


def say_rate(factor: float, rate: float) -> str:
    """
    >>> say_rate(0.1, 0.5), say_rate(0.1, math.nan)
    ('5.0e-02 instead of 5.0e-01', '0.1 times what it is')
    """
    return f"{factor * rate:.1e} instead of {rate:.1e}" if rate > 0 else f"{factor:g} times what it is"


def straight_until(start: float, losses: dict[float, float]) -> float:
    """How many times the step can be followed while the loss falls as a line does, and to no impossible value."""
    falls = [start - losses[share] for share in FAR]
    if not (losses[HUNDREDFOLD] >= 0 and 0 < LINE * falls[0] < falls[1]):
        return 0.0
    return THOUSANDFOLD if losses[THOUSANDFOLD] >= 0 and LINE * falls[1] < falls[2] else HUNDREDFOLD


def is_far_better(evidence: Evidence, start: float, losses: dict[float, float]) -> Iterator[Verdict]:
    """Whether the same direction, followed much further, keeps paying."""
    if not losses[HUNDREDFOLD] < min(start - PAYS * abs(start), losses[TENFOLD]):
        return
    text = ", ".join(f"{losses[share]:.4g} at {share:g}" for share in FAR)
    best = min(FAR, key=lambda share: losses[share])
    under_way = (start - losses[TENFOLD]) / TENFOLD * HORIZON > 0.5 * abs(start)
    yield confirmed(
        "lr-too-low/tiny-steps",
        f"the loss along the step, followed further: {start:.4g} at 0, {text}",
        if_troubled=not crawls_everywhere(evidence),
        fix=f"raise the learning rate tenfold at a time: {say_rate(10, largest_lr(evidence))}, then further",
        numbers={"lr_factor": min(best / 3, 100.0)},
        level="warning" if under_way else "problem",
        confidence="likely" if under_way else "proven",  # the loss along the step, replayed
        lasting=False,
    )


def crawls_everywhere(evidence: Evidence) -> bool:
    """No taped step, early or late, felt the loss's curvature at a hundred times its length, and the loss has hardly
    fallen; or at a thousand times, and half of it or more is left. A rate that warms up, is decayed, or suits a run
    near its end does not look so from first to last. Players that take turns have losses of their own, and each stands
    where the other holds it."""
    if take_turns(evidence):
        return False
    straight, losses = evidence.memory["straight probes"], [x for x in evidence.losses if math.isfinite(x)]
    if len(straight) < 4 or len(losses) < 20 or not sum(losses[:5]) > 0:
        return False
    left = sum(losses[-5:]) / sum(losses[:5])
    return min(straight) >= (HUNDREDFOLD if left > HARDLY_FALLEN else THOUSANDFOLD) and left > 0.5


def take_turns(evidence: Evidence) -> bool:
    """Whether an optimizer of this training changed nothing in this step, in which another did."""
    owned = [ids_held(optimizer) for optimizer in evidence.optimizers]
    slots = evidence.specimen.skeletons.by_slot()  # of what is known by now: the optimizers' own
    moved = {id(slots[slot]) for slot in evidence.tape.stepped if slot in slots}
    return bool(moved) and any(mine and not mine & moved for mine in owned)
