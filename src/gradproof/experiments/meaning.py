"""Does the optimizer do what was meant? What decay does to a step, which layers the rates belong to, what is frozen,
and whether weights that began as one are still tied."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from gradproof.experiments.evidence import Evidence, Verdict, confirmed
from gradproof.experiments.flow import VIEWS
from gradproof.experiments.owners import at_work, is_copy, line_of_optimizer, named_parameters

COUPLED = (
    "SGD",
    "Adam",
    "NAdam",
    "RAdam",
    "Adagrad",
    "RMSprop",
    "Adamax",
    "Adadelta",
)  # decay joins the gradient
OUTWEIGHS = 3.0  # times the gradient
TIMES = 3  # taped steps in which decay outweighs the loss
APART = 10.0  # between the rates of first and last layers
FAR_APART = 1000.0  # nobody means that
EARLY = 3


def does_the_optimizer_do_what_was_meant(evidence: Evidence) -> Iterator[Verdict]:
    for look in (decay_leads, rates_swapped, frozen_in_between, came_untied):
        found = look(evidence)
        if found is not None:
            yield found


def decay_leads(evidence: Evidence) -> Verdict | None:
    """Decay that is part of the gradient and larger than the loss's own: weights shrink, whatever the data say."""
    shares = []
    for optimizer in evidence.optimizers:
        for group in optimizer.param_groups if type(optimizer).__name__ in COUPLED else ():
            decay = float(group.get("weight_decay") or 0.0)
            if not decay or group.get("decoupled_weight_decay"):
                continue
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None or gradient.is_sparse or parameter.dim() < 2:
                    continue
                size = float(gradient.norm())
                shares.append((decay * float(parameter.detach().norm()) / max(size, 1e-30), decay))
    if not shares:
        return None
    share, decay = sorted(shares)[len(shares) // 2]
    count = evidence.memory.setdefault("decay leads", [0])
    count[0] = count[0] + 1 if share > OUTWEIGHS else 0
    if count[0] < TIMES:
        return None
    return confirmed(
        "optimizer-config/decay-share",
        f"weight decay {decay:g} pulls {share:.3g} times as hard as the loss's gradient (median over the matrices, "
        f"{count[0]} taped steps in a row)",
        where=line_of_optimizer(evidence) or None,
        fix=f"use a weight decay of about {decay / (10 * share):.1g}, or AdamW, which keeps it apart",
        if_troubled=True,
    )


def rates_swapped(evidence: Evidence) -> Verdict | None:
    """The last layer learns ten times slower than the first: the other way round from fine-tuning."""
    optimizers = at_work(evidence)
    rates = {id(p): float(g["lr"]) for o in optimizers for g in o.param_groups for p in g["params"]}
    if len(optimizers) != 1 or len(set(rates.values())) < 2:
        return None
    named = named_parameters(evidence)
    weights = {slot.index: slot.name for slot in evidence.tape.parameters}
    used = [
        weights[slot]
        for op in evidence.flow.layers
        for slot in (evidence.flow.behind(s, VIEWS) for s in op.reads)
        if slot in weights and len(evidence.slot(slot).shape) >= 2
    ]
    known = [(name, rates[id(named[name])]) for name in used if name in named and id(named[name]) in rates]
    if len(known) < 2:
        return None
    (first, before), (last, after) = known[0], known[-1]
    if not 0 < after * APART <= before:
        return None
    return confirmed(
        "optimizer-config/groups-swapped",
        f"{last}, the last layer, has a learning rate of {after:g}; {first}, the first, one of {before:g}",
        where=line_of_optimizer(evidence) or last,
        fix=f"swap them: {before:g} for {last}, {after:g} for {first}",
        level="warning",
        confidence="possible",
        if_troubled=after * FAR_APART > before,
    )


def frozen_in_between(evidence: Evidence) -> Verdict | None:
    """A frozen matrix with trained ones before and behind it, still at the random values that it was made with."""
    facts: dict[str, Any] = evidence.memory.get("facts", {})
    if any(load.get("fitting") for load in facts.get("loads", ())) or facts.get("optimizer_states", {}).get(
        "in_files"
    ):
        return None  # something was loaded: what is frozen may be what was learned before
    named = named_parameters(evidence)
    held = {id(p) for o in evidence.optimizers for g in o.param_groups for p in g["params"]}  # now or before
    weights = {slot.index: slot.name for slot in evidence.tape.parameters}
    order: dict[str, bool] = {}  # matrices in the order of use -> trained
    for op in evidence.flow.layers:
        for slot in (evidence.flow.behind(s, VIEWS) for s in op.reads):
            name = weights.get(slot) or evidence.slot(slot).name
            if name in named and named[name].dim() >= 2:
                order.setdefault(name, named[name].requires_grad or id(named[name]) in held)
    names = list(order)
    for place, name in enumerate(names):
        between = any(order[n] for n in names[:place]) and any(order[n] for n in names[place + 1 :])
        if not order[name] and between and not is_copy(evidence, named, name):
            line = next(iter(facts.get("lines", {}).get("requires_grad_", ())), "")
            return confirmed(
                "param-not-updated/frozen",
                f"{name} is frozen at its first values, with trained layers before and behind it; nothing was loaded",
                where=f"{name} ({line})" if line else name,
                fix=f"set requires_grad_(True) for {name}, or load the weights that are to stay",
                level="warning",
                confidence="possible",
                if_troubled=True,
            )
    return None


def came_untied(evidence: Evidence) -> Verdict | None:
    """An embedding and an output layer with the same first values and memory of their own: tied by a copy."""
    kept = evidence.memory.setdefault("tied at the start", {})
    if evidence.step <= EARLY and "pairs" not in kept:
        kept["pairs"] = equal_pairs(evidence)
    named = named_parameters(evidence)
    for table, output in kept.get("pairs", ()):
        if table not in named or output not in named:
            continue
        apart = float((named[table].detach() - named[output].detach()).norm() / named[table].detach().norm())
        if apart > 1e-3:
            return confirmed(
                "weights-state-error/untied",
                f"{output} began as a copy of {table} and is now {100 * apart:.2g} % away: two tensors, not one",
                where=output,
                fix=f"share the parameter itself: {output} = {table}, not its .data or a clone",
                level="warning",
                confidence="likely",
                lasting=True,
            )
    return None


def equal_pairs(evidence: Evidence) -> list[tuple[str, str]]:
    """(looked-up table, matrix) with bit-identical values before the step, both trained, neither constant."""
    tables = {op.reads[0] for op in evidence.forward if op.name == "embedding" and op.reads}
    slots = [
        slot for slot in evidence.tape.parameters if len(slot.shape) == 2 and slot.index in evidence.updates
    ]
    value = evidence.tape.leaf_value
    return [
        (one.name, two.name)
        for one in slots
        for two in slots
        if one.index in tables
        and two.index not in tables
        and one.shape == two.shape
        and one.storage != two.storage
        and differs_inside(value(one.index))
        and torch.equal(value(one.index), value(two.index))
    ]


def differs_inside(values: Tensor) -> bool:
    return bool((values != values.reshape(-1)[0]).any())
