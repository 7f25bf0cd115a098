"""Do derivatives in the loss carry gradient? autograd.grad without create_graph makes a term of the loss a constant."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress

from gradproof.experiments.evidence import Evidence, Verdict, confirmed
from gradproof.experiments.nonfinite import place_of
from gradproof.tape.execute import CannotReplay
from gradproof.tape.operations import BackwardCall, Operation, references
from gradproof.tape.replay import replay_exactly

ADDS = ("add", "add_", "sub", "sub_", "rsub", "stack", "cat")


def do_derivatives_carry_gradient(evidence: Evidence) -> Iterator[Verdict]:
    """A residual or penalty made of ∂output/∂input that the loss adds to what the same network learns from."""
    flow = evidence.flow
    for call in evidence.tape.top_backwards:
        if call.inputs is None or call.create_graph:
            continue
        trained = set().union(*(weights_behind(evidence, root) for root in call.roots))
        of_weights = any(weights_behind(evidence, slot) for slot in call.inputs)
        if not trained or of_weights:
            continue  # nothing to learn from it; or how strongly a term pulls on weights, as GradNorm asks
        for op, term in met_by_gradient(evidence, call):
            others = [ref.slot for ref in references((op.args, op.kwargs)) if ref.tracked]
            behind = set().union(*(weights_behind(evidence, slot) for slot in others))
            # on its way into a network again (a perturbed input, a sampler) it is no part of the loss
            if flow.tail.isdisjoint(op.makes or op.writes) or not behind & trained:
                continue
            yield verdict_of(evidence, call, op, term)
            return


def verdict_of(evidence: Evidence, call: BackwardCall, op: Operation, term: int) -> Verdict:
    alone = math.prod(evidence.slot(term).shape) == 1
    value = value_of(evidence, term) if alone else None
    said = f", {value:.3g} at this step," if value is not None else ""
    what = "a term of the loss" + said if alone else "a part of what the loss compares"
    return confirmed(
        "detached-graph/derivative",
        "the derivative of the network's output is taken without create_graph=True: it carries no gradient",
        f"{what} is made of it and is a constant to the optimizer ({op.name} at {op.line})",
        where=place_of("", call.line),
        fix="torch.autograd.grad(..., create_graph=True)",
        confidence="proven" if alone else "likely",
        lasting=True,
    )


def met_by_gradient(evidence: Evidence, call: BackwardCall) -> Iterator[tuple[Operation, int]]:
    """Where what was made of a call's results, and carries no gradient, is added to what does: (operation, it)."""
    made = {slot for slot in call.results if slot is not None}
    for op in evidence.forward:
        if op.index < call.last:
            continue
        refs = list(references((op.args, op.kwargs)))
        mine = [ref.slot for ref in refs if ref.slot in made]
        if not mine:
            continue
        if not any(ref.tracked for ref in refs):
            made.update((*op.makes, *op.writes))
        elif op.name in ADDS:
            yield op, mine[0]


def weights_behind(evidence: Evidence, slot: int) -> set[int]:
    """The trained parameters that gradient from a slot reaches."""
    trained = set(evidence.tape.stepped)
    found: set[int] = set()
    waiting, seen = [slot], set()
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        if current in trained:
            found.add(current)
        maker = evidence.maker(current)
        if maker is None or maker.in_backward is not None:
            continue
        if maker.name == "detach" or (not maker.grad_enabled and maker.call is None):
            continue
        waiting += [ref.slot for ref in references((maker.args, maker.kwargs)) if ref.tracked]
    return found


def value_of(evidence: Evidence, term: int) -> float | None:
    """What a term was worth."""
    with suppress(CannotReplay, RuntimeError, KeyError):
        return float(replay_exactly(evidence.tape, keep=[term]).values[term])
    return None
