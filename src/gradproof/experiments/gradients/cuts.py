"""Is a path cut? Parameters that shape the loss, are meant to be trained, and get no gradient from it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

import torch
from torch import Tensor

from gradproof.experiments.verdict import Verdict, causes_of, confirmed, each
from gradproof.instruments.evidence import Evidence
from gradproof.instruments.flow import RESHAPES, place_of
from gradproof.instruments.update import at_work, has_gradient, ids_held, is_copy, named_parameters, shown
from gradproof.instruments.walk import ahead, behind, tracked
from gradproof.tape.cuts import Cut, find_cuts, gradients_through
from gradproof.tape.execute import CannotReplay
from gradproof.tape.operations import BackwardCall, Operation, Slot
from gradproof.tape.replay import differentiate, replay_exactly

TIMES = 2  # taped steps without a gradient before it is said: of two players, one waits while the other steps
REWRITTEN = RESHAPES | {"_to_copy", "expand", "slice"}
PASSED_ON = RESHAPES | {"expand", "cat", "stack", "clone", "detach", "_to_copy"}
CHOOSES_ROWS = ("embedding", "index", "index_select", "gather")
ADDS = ("add", "add_", "sub", "sub_", "rsub", "stack", "cat")
THROUGH_CHECKPOINTS = "checkpoint(..., use_reentrant=False); or the first call as it is, without a checkpoint"
UNUSED = "it is not used by the loss"
NEARBY = 1e-4  # of a weight's size
PART = 0.2  # of a weight's rows: a gate of four has more; fewer may be units that are off
CHANGED = 1e-6  # of a gradient in float64
ROUNDED = 1e-11  # of a loss in float64: what changes less may be rounding


def is_a_path_cut(evidence: Evidence) -> Iterator[Verdict]:
    yield from causes_of(each(evidence, cuts_of_parameters, constant_derivatives))


def cuts_of_parameters(evidence: Evidence) -> Iterator[Verdict]:
    """Whole parameters first, then rows of parameters, then what is cut on one of its ways."""
    loss_leaf = rewrapped_loss(evidence)
    waiting = without_gradient(evidence) if loss_leaf is None else []
    cuts = [cut for cut in find_cuts(evidence.tape, waiting) if cut.how != UNUSED and cut.line is not None]
    if loss_leaf is not None or cuts:
        yield loss_leaf or verdict_of(evidence, cuts)
        return
    looks = (sampled_without_gradient, cut_rows, cut_between_modules)
    yield from filter(None, (look(evidence) for look in looks))


def sampled_without_gradient(evidence: Evidence) -> Verdict | None:
    """A draw from a distribution that a network puts out, made without gradient, that a trained layer goes on with.

    An action is drawn like that, too, but its log-probability is asked for, and no layer is.
    """
    trained = set(evidence.tape.stepped)
    for op in evidence.forward:
        if op.name != "normal" or op.grad_enabled or not tracked(op):
            continue
        readers = [user for user in ahead(evidence.flow, op.makes, PASSED_ON) if user.grad_enabled]
        asked = any(user.name == "sub" and not user.module for user in readers)
        if not asked and any(not trained.isdisjoint(user.reads) for user in readers):
            return confirmed(
                "detached-graph/sample",
                "a sample is drawn without gradient from a mean and deviation that are trained, and goes into a "
                "trained layer: nothing that this layer learns reaches what the sample was drawn from",
                where=place_of("", op.line),
                confidence="likely",  # the tape shows who reads the sample, not whether that was meant
            )
    return None


def rewrapped_loss(evidence: Evidence) -> Verdict | None:
    """A loss without history: backward from it reaches nothing. One made before the tape began has a history."""
    for call in evidence.tape.top_backwards:
        for root in map(evidence.slot, call.roots):
            if call.accumulates and root.made_by is None and not root.followed:
                return confirmed(
                    "detached-graph/new-tensor",
                    "the loss is a new tensor without history: backward ends where it begins",
                    where=place_of("", call.line),
                    confidence="proven",  # the tensor that backward was called on has no node
                )
    return None


def without_gradient(evidence: Evidence) -> list[Slot]:
    """Parameters that an optimizer holds and that got no gradient in any of the taped steps, several times seen."""
    named, tape = named_parameters(evidence), evidence.tape
    # of several optimizers those that stepped on this tape: the others wait for their turn
    held = ids_held(*(at_work(evidence) if len(evidence.optimizers) > 1 else evidence.optimizers))
    wanted = {n for n, p in named.items() if id(p) in held and p.requires_grad and not has_gradient(p)}
    reached = evidence.memory.setdefault("reached", set())
    reached.update(n for n, p in named.items() if has_gradient(p))
    # by something else than an optimizer: an average of other weights
    written = {evidence.slot(s).name for op in tape.operations if op.phase != "optimizer" for s in op.writes}
    count = evidence.memory.setdefault("waiting", Counter())
    waiting = [slot for slot in tape.parameters if slot.name in wanted - reached - written]
    count.update(slot.name for slot in waiting)
    return [s for s in waiting if count[s.name] >= TIMES and not is_copy(evidence, named, s.name)]


def verdict_of(evidence: Evidence, cuts: list[Cut]) -> Verdict:
    """Proven where the float64 replay that goes on past the cut brings a gradient to what has none."""
    first = cuts[0]
    here = [cut.parameter for cut in cuts if cut.line == first.line]
    verbs = ("shapes", "gets") if len(here) == 1 else ("shape", "get")
    lines = [f"{shown(here)} {verbs[0]} the loss and {verbs[1]} no gradient: {first.how}", f"at {first.line}"]
    reached = brought_past(evidence, first, here)
    if reached:
        lines.append(f"with the cut followed in float64, {reached[0]} gets a gradient of {reached[1]:.1e}")
    return confirmed(
        "detached-graph/cut",
        *lines,
        where=place_of(first.module, first.line),
        fix=THROUGH_CHECKPOINTS if "CheckpointFunction" in first.how else "",
        confidence="proven" if reached else "likely",
    )


def brought_past(evidence: Evidence, cut: Cut, names: list[str]) -> tuple[str, float] | None:
    """(parameter, size) of the largest gradient that comes to these parameters once the cut is followed."""
    through = gradients_through(evidence.tape, cut.operation) if cut.operation is not None else {}
    sizes = [(evidence.slot(slot).name, float(torch.linalg.vector_norm(g))) for slot, g in through.items()]
    found = max((each for each in sizes if each[0] in names), key=lambda each: each[1], default=("", 0.0))
    return found if 0 < found[1] < math.inf else None


def cut_rows(evidence: Evidence) -> Verdict | None:
    """Rows of a weight without any gradient, and yet the loss changes with them: a part of a fused layer."""
    silent = evidence.memory.setdefault("silent rows", {})
    once = max(1, sum(call.accumulates for call in evidence.tape.top_backwards))
    slots = {slot.name: slot for slot in evidence.tape.parameters}
    suspects, behind = [], weights_behind(evidence)
    # of tables, rows that were not looked up have no gradient
    tables = {behind.get(op.reads[0]) for op in evidence.forward if op.name in CHOOSES_ROWS}
    users = (op for op in evidence.forward if op.name not in REWRITTEN)
    uses = Counter(weight for op in users for weight in {behind[s] for s in op.reads if s in behind})
    for name, parameter in named_parameters(evidence).items():
        slot, gradient = slots.get(name), parameter.grad
        if slot is None or gradient is None or parameter.dim() != 2 or gradient.is_sparse:
            continue
        # units that are off in one pass may be on in another, whose gradient is not wanted: a target
        if slot.index in tables or uses[slot.index] > once:
            continue
        rows = (gradient == 0).all(dim=1)
        silent[name] = rows & silent[name] if name in silent else rows
        if PART <= float(silent[name].float().mean()) < 1:
            suspects.append((slot, silent[name]))
    for slot, rows in suspects:
        cut = find_cuts(evidence.tape, [slot], in_part=True)[0]
        if cut.line is not None and shapes_the_loss(evidence, slot, rows):
            return confirmed(
                "detached-graph/part-cut",
                f"{int(rows.sum())} of {len(rows)} rows of {slot.name} shape the loss and never get a gradient",
                f"{cut.how}, at {cut.line}",
                where=place_of(cut.module, cut.line),
                confidence="proven",  # the rows were moved, and the loss with them
            )
    return None


def shapes_the_loss(evidence: Evidence, parameter: Slot, rows: Tensor) -> bool:
    """Whether the loss has a slope along these rows of a weight, both ways; behind units that are off it has none."""
    value = evidence.tape.leaf_value(parameter.index).double()
    size, loss = value.square().mean().sqrt(), evidence.loss_at({}, dtype=torch.float64)

    def moves(way: float) -> bool:
        moved = value.clone()
        moved[rows] += way * NEARBY * (value[rows] + size)
        there = evidence.loss_at({parameter.index: moved}, dtype=torch.float64)
        return abs(there - loss) > ROUNDED * abs(loss)

    return moves(-1.0) and moves(1.0)


def cut_between_modules(evidence: Evidence) -> Verdict | None:
    """What one trained module made is cut and fed to another one: the first does not learn what the second wants.

    Heads on detached features are built so on purpose, and so is a pass without gradient from its beginning on: a
    warning at most, and none unless a replay in float64 that goes on past the cut changes a gradient.
    """
    trained = set(evidence.tape.stepped)
    if not trained or sum(call.accumulates for call in evidence.tape.top_backwards) != 1:
        return None
    asked: set[int] = set()
    for made_in, operation, at in crossings(evidence, trained):
        changed = gradient_changed_by(evidence, at) if at.index not in asked else None
        asked.add(at.index)
        if changed is not None:
            return confirmed(
                "detached-graph/between-modules",
                f"what {made_in} made reaches {operation.module} without a way back for the gradient",
                f"{at.name} at {at.line} cuts it",
                f"with the cut followed in float64, the gradient of {changed[0]} changes by {changed[1]:.0%}",
                at=at,
                level="warning",
                confidence="likely",
            )
    return None


def crossings(evidence: Evidence, trained: set[int]) -> Iterator[tuple[str, Operation, Operation]]:
    """(module, operation, cut): an operation with trained weights that reads, cut, what another module made."""
    weights = {slot for slot, parameter in weights_behind(evidence).items() if parameter in trained}
    source: dict[int, str] = {}  # slot that depends on trained parameters -> module that made it
    cut: dict[int, tuple[str, Operation]] = {}
    for op in evidence.forward:
        if op.makes and weights.issuperset(op.makes):
            continue  # a cast of a weight
        uses = not weights.isdisjoint(op.reads)
        carried = set(tracked(op)) - weights  # autograd itself goes on from these
        broken = [cut[slot] for slot in op.reads if slot in cut and slot not in carried]
        if op.module and op.grad_enabled and uses:
            yield from ((made_in, op, at) for made_in, at in broken if not related(made_in, op.module))
        origin = next((source[slot] for slot in op.reads if slot in source), None)
        origin = op.module if origin is None and uses and op.grad_enabled else origin
        # inside a hand-written function nothing is followed: its own backward leads past
        stops = op.call is None and (op.name == "detach" or not op.grad_enabled)
        for slot in (*op.makes, *op.writes):
            if not evidence.slot(slot).dtype.is_floating_point:
                continue
            if broken and not carried and not uses:
                cut[slot] = broken[0]
            elif stops and origin:
                cut[slot] = (origin, op)
            elif origin is not None:
                source[slot] = op.module if uses else origin


def weights_behind(evidence: Evidence) -> dict[int, int]:
    """slot -> parameter: itself, its casts and transposes, which autocast keeps from one call to the next."""
    behind = {slot.index: slot.index for slot in evidence.tape.parameters}
    for operation in evidence.forward:
        if operation.name in REWRITTEN and operation.reads and operation.reads[0] in behind:
            behind.update(dict.fromkeys(operation.makes, behind[operation.reads[0]]))
    return behind


def gradient_changed_by(evidence: Evidence, cut: Operation) -> tuple[str, float] | None:
    """(parameter, relative change) of the gradient that changes most when the replay goes on past a cut."""
    before = differentiate(evidence.tape, torch.float64).gradients
    shares = {}
    for slot, gradient in gradients_through(evidence.tape, cut.index).items():
        size = float(torch.linalg.vector_norm(gradient))
        change = float(torch.linalg.vector_norm(gradient - before[slot])) if slot in before else size
        shares[evidence.slot(slot).name] = change / size if size > 0 else 0.0
    real = {name: share for name, share in shares.items() if CHANGED < share < math.inf}
    return max(real.items(), key=lambda each: each[1], default=None)


def related(first: str, second: str) -> bool:
    """The same module, or one inside the other: a recurrence or a part of it."""
    top, other = first.split(".")[0], second.split(".")[0]
    return top == other or not top or not other


# derivatives ------------------------------------------------------------------------------------------------


def constant_derivatives(evidence: Evidence) -> Verdict | None:
    """A residual or penalty made of ∂output/∂input that the loss adds to what the same network learns from."""
    for call in evidence.tape.top_backwards:
        if call.inputs is None or call.create_graph:
            continue
        trained = trained_behind(evidence, call.roots)
        if not trained or trained_behind(evidence, call.inputs):
            continue  # nothing to learn from it; or how strongly a term pulls on weights, as GradNorm asks
        for op, term in met_by_gradient(evidence, call):
            # on its way into a network again (a perturbed input, a sampler) it is no part of the loss
            in_the_loss = not evidence.flow.tail.isdisjoint(op.makes or op.writes)
            if in_the_loss and trained & trained_behind(evidence, tracked(op)):
                return verdict_on_derivative(evidence, call, op, term)
    return None


def verdict_on_derivative(evidence: Evidence, call: BackwardCall, op: Operation, term: int) -> Verdict:
    alone = math.prod(evidence.slot(term).shape) == 1
    value = value_of(evidence, term) if alone else None
    said = f", {value:.3g} at this step," if value is not None else ""
    what = "a term of the loss" + said if alone else "a part of what the loss compares"
    return confirmed(
        "detached-graph/derivative",
        "the derivative of the network's output is taken without create_graph=True: it carries no gradient",
        f"{what} is made of it and is a constant to the optimizer ({op.name} at {op.line})",
        where=place_of("", call.line),
        confidence="proven" if alone else "likely",
    )


def met_by_gradient(evidence: Evidence, call: BackwardCall) -> Iterator[tuple[Operation, int]]:
    """Where what was made of a call's results, and carries no gradient, is added to what does: (operation, it)."""
    made = {slot for slot in call.results if slot is not None}
    for op in evidence.forward:
        mine = [slot for slot in op.reads if slot in made] if op.index >= call.last else []
        if mine and not tracked(op):
            made.update((*op.makes, *op.writes))
        elif mine and op.name in ADDS:
            yield op, mine[0]


def trained_behind(evidence: Evidence, slots: list[int]) -> set[int]:
    """The trained parameters that gradient from some slots reaches."""

    def onwards(op: Operation) -> list[int]:
        stops = op.name == "detach" or (not op.grad_enabled and op.call is None)
        return tracked(op) if op.in_backward is None and not stops else []

    reached = [slot for op in behind(evidence.flow, slots, onwards) for slot in onwards(op)]
    return {*slots, *reached} & set(evidence.tape.stepped)


def value_of(evidence: Evidence, term: int) -> float | None:
    """What a term was worth."""
    with suppress(CannotReplay, RuntimeError, KeyError):
        return float(replay_exactly(evidence.tape, keep=[term], compare=False).values[term])
    return None
