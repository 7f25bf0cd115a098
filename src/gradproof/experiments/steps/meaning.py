"""Does the optimizer do what was meant? What decay does to a step and to the weights; which layers rates belong to."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import nn

from gradproof.experiments.verdict import Verdict, confirmed, excluded, first_of
from gradproof.instruments.evidence import Evidence
from gradproof.instruments.flow import VIEWS, place_of
from gradproof.instruments.update import (
    at_work,
    groups_of,
    line_of_optimizer,
    named_parameters,
    outweighs,
    shrinkage,
)

FAMILY = "optimizer-config"
# torch's optimizers whose decay joins the gradient
COUPLED = ("SGD", "Adam", "NAdam", "RAdam", "Adagrad", "RMSprop", "Adamax", "Adadelta")
OUTWEIGHS = 3.0  # times the gradient: at one they are in balance, as at the end of many trainings
# of its size at the first taped step: what is pruned or unused may go, half of all may not
NOTHING_LEFT = 0.05
FAST = 0.02  # of a weight, at every step: half of it is gone after 35
WINS, LITTLE = 1.0, 0.3  # times what a step adds: weights that lose more can only shrink
SAME = 0.01  # of what is taken off: that rate times decay comes so near is no chance
APART = 10.0  # between the rates of first and last layers: as fine-tuning has them, the other way round
FAR_APART = 1000.0  # nobody means that
USUAL = 0.5  # a decay up to here is not what is wrong with lr * decay


def does_the_optimizer_do_what_was_meant(evidence: Evidence) -> Iterator[Verdict]:
    yield from first_of(look(evidence) for look in (decay_has_won, decay_leads, shrinks, rates_swapped))


def decay_has_won(evidence: Evidence) -> Verdict | None:
    """Matrices of which next to nothing is left: by then decay and gradient are in balance, and neither tells.

    Adam makes of a decay in the gradient a step of full length, however small it is, wherever the loss says nothing: in
    all rows of a table that a batch does not look up.
    """
    sizes = {name: (float(p.detach().norm()), decay) for name, p, decay in decayed(evidence)}
    first: dict[str, float] = evidence.memory.setdefault("norms", {n: size for n, (size, _) in sizes.items()})
    left = sorted((size / first[name], decay) for name, (size, decay) in sizes.items() if first.get(name))
    share, decay = left[len(left) // 2] if left else (1.0, 0.0)
    if not share < NOTHING_LEFT:
        return None
    return confirmed(
        f"{FAMILY}/worn-away",
        f"of {len(left)} matrices that decay with {decay:g}, half have {100 * share:.2g} % or less of the size that "
        "they began with: decay, which is added to the gradient here, has worn them away",
        where=line_of_optimizer(evidence) or None,
        if_troubled=True,
        confidence="likely",
    )


def decayed(evidence: Evidence) -> Iterator[tuple[str, nn.Parameter, float]]:
    """The matrices whose decay is part of their gradient, by name; what gets none is not decayed either."""
    names = {id(parameter): name for name, parameter in named_parameters(evidence).items()}
    for number, optimizer in enumerate(evidence.optimizers):
        for group in optimizer.param_groups if type(optimizer).__name__ in COUPLED else ():
            decay = float(group.get("weight_decay") or 0.0)
            if decay and not group.get("decoupled_weight_decay"):
                for place, parameter in enumerate(group["params"]):
                    # of what no operation has read, the tape has no values
                    if parameter.dim() >= 2 and parameter.grad is not None and not parameter.is_meta:
                        yield names.get(id(parameter), f"{number}.{place}"), parameter, decay


def decay_leads(evidence: Evidence) -> Verdict | None:
    """Decay that is part of the gradient and larger than the loss's own: weights shrink, whatever the data say."""
    known = ((weight.detach(), weight.grad, decay) for _, weight, decay in decayed(evidence))
    dense = [(w, g, decay) for w, g, decay in known if g is not None and not g.is_sparse]
    pulls = ((decay * float(w.norm()) / max(float(g.norm()), 1e-30), decay) for w, g, decay in dense)
    shares = sorted(each for each in pulls if math.isfinite(each[0]))
    if not shares:
        return None
    share, decay = shares[len(shares) // 2]
    if share <= OUTWEIGHS:
        return excluded(f"{FAMILY}/decay-share", f"weight decay pulls {share:.2g} times as hard as the loss")
    return confirmed(
        f"{FAMILY}/decay-share",
        f"weight decay {decay:g} pulls {share:.3g} times as hard as the loss's gradient (median over the matrices)",
        where=line_of_optimizer(evidence) or None,
        fix=f"use a weight decay of about {decay / (10 * share):.1g}, or AdamW, which keeps it apart",
        if_troubled=True,
        confidence="likely",
        lasting=False,
    )


def shrinks(evidence: Evidence) -> Verdict | None:
    """A decay apart from the gradient is a factor just below one (1 - lr * decay, about 0.9999); one that takes some
    per cent at every step leaves only what the last dozens of steps have taught.

    One that forgets the rate goes on as before when the rate has fallen: longer than all that the step adds, it wins.
    Of AdamW's both have the rate, and a step adds a hundred times as much.
    """
    found = shrinkage(evidence)
    if not found:
        return None
    share, op, count = found[len(found) // 2].share, found[len(found) // 2].operation, len(found)
    gone = f"after {0.69 / share:.0f}"
    if share < FAST:
        times = sorted(outweighs(evidence, each) for each in found)[count // 2]
        taken = f"the decay takes {100 * share:.2g} % off the weights a step, {times:.2g} times what it adds"
        if times <= WINS:
            return excluded(f"{FAMILY}/shrinks", taken) if times < LITTLE else None
        said = f"{taken} ({count} matrices): half of them is gone {gone} such steps"
    else:
        settings = (
            (group.get("weight_decay") or 0.0, group.get("lr") or 0.0) for group in groups_of(evidence)
        )
        if any(decay <= USUAL and abs(share - rate * decay) < SAME * share for decay, rate in settings):
            return None  # the rate is what is too large
        said = f"the optimizer takes {100 * share:.3g} % off the weights at every step ({count} matrices): "
        said += f"half of what they have learned is gone {gone} steps"
    return confirmed(
        f"{FAMILY}/shrinks",
        said,
        where=place_of("", op.line) or line_of_optimizer(evidence) or None,
        if_troubled=share < FAST,
        confidence="likely",  # the factor is certain, that it was not meant is not
        lasting=False,
    )


def rates_swapped(evidence: Evidence) -> Verdict | None:
    """The last layer learns ten times slower than the first: the other way round from fine-tuning."""
    optimizers = at_work(evidence)
    groups = [g for o in optimizers for g in o.param_groups if g.get("lr") is not None]
    rates = {id(p): float(g["lr"]) for g in groups for p in g["params"]}
    if len(optimizers) != 1 or len(set(rates.values())) < 2:
        return None
    named, flow = named_parameters(evidence), evidence.flow
    used = [evidence.slot(flow.behind(slot, VIEWS)) for op in flow.layers for slot in op.reads]
    matrices = [slot.name for slot in used if slot.kind == "parameter" and len(slot.shape) >= 2]
    known = [
        (name, rates[id(named[name])]) for name in matrices if name in named and id(named[name]) in rates
    ]
    if len(known) < 2:
        return None
    (first, before), (last, after) = known[0], known[-1]
    if not 0 < after * APART <= before:
        return None
    return confirmed(
        f"{FAMILY}/groups-swapped",
        f"{last}, the last layer, has a learning rate of {after:g}; {first}, the first, one of {before:g}",
        where=line_of_optimizer(evidence) or last,
        fix=f"swap them: {before:g} for {last}, {after:g} for {first}",
        level="warning",
        confidence="possible",
        if_troubled=after * FAR_APART > before,
        lasting=False,
    )
