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
from gradproof.instruments.update import has_gradient, is_copy, named_parameters
from gradproof.tape.cuts import Cut, find_cuts, gradients_through
from gradproof.tape.execute import CannotReplay
from gradproof.tape.operations import BackwardCall, Operation, Slot, references
from gradproof.tape.replay import differentiate, replay_exactly


def is_a_path_cut(evidence: Evidence) -> Iterator[Verdict]:
    yield from causes_of(each(evidence, cuts_of_parameters, constant_derivatives))


TIMES = 2  # taped steps without a gradient before it is said: of two players, one waits while the other steps
REWRITTEN = RESHAPES | {"_to_copy", "expand", "slice"}
PASSED_ON = RESHAPES | {"expand", "cat", "stack", "clone", "detach", "_to_copy"}
CHOOSES_ROWS = ("embedding", "index", "index_select", "gather")
THROUGH_CHECKPOINTS = (
    "checkpoint(..., use_reentrant=False); or leave the first call as it is, without a checkpoint"
)
UNUSED = "it is not used by the loss"
NEARBY = 1e-4  # of a weight's size
PART = 0.2  # of a weight's rows: a gate of four has more; fewer may be units that are off
CHANGED = 1e-6  # of a gradient in float64
ROUNDED = 1e-11  # of a loss in float64: what changes less may be rounding


def cuts_of_parameters(evidence: Evidence) -> Iterator[Verdict]:
    """Whole parameters first, then rows of parameters, then what is cut on one of its ways."""
    loss_leaf = rewrapped_loss(evidence)
    if loss_leaf is not None:
        yield loss_leaf
        return
    waiting = without_gradient(evidence)
    cuts = [cut for cut in find_cuts(evidence.tape, waiting) if cut.how != UNUSED and cut.line is not None]
    if cuts:
        yield verdict_of(evidence, cuts)
        return
    yield from sampled_without_gradient(evidence)
    yield from cut_rows(evidence)
    yield from cut_between_modules(evidence)


def sampled_without_gradient(evidence: Evidence) -> Iterator[Verdict]:
    """A draw from a distribution that a network puts out, made without gradient, that a trained layer goes on with.

    An action is drawn like that, too, but its log-probability is asked for, and no layer is.
    """
    trained = set(evidence.tape.stepped)
    for operation in evidence.forward:
        parameters = [ref for ref in references(operation.args) if ref.tracked]
        if operation.name != "normal" or operation.grad_enabled or not parameters:
            continue
        drawn, asked, used = set(operation.makes), False, False
        for user in evidence.forward[evidence.forward.index(operation) + 1 :]:
            if not drawn & set(user.reads):
                continue
            if user.name in PASSED_ON:
                drawn.update(user.makes)
            asked |= user.name == "sub" and not user.module and user.grad_enabled
            used |= user.grad_enabled and bool(trained & set(user.reads))
        if used and not asked:
            yield confirmed(
                "detached-graph/sample",
                "a sample is drawn without gradient from a mean and deviation that are trained, and goes into a "
                "trained layer: nothing that this layer learns reaches what the sample was drawn from",
                where=place_of("", operation.line),
                confidence="likely",  # the tape shows who reads the sample, not whether that was meant
            )
            return


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
    named = named_parameters(evidence)
    held = held_by_whoever_steps(evidence, named)
    wanted = {n for n, p in named.items() if id(p) in held and p.requires_grad and not has_gradient(p)}
    reached = evidence.memory.setdefault("reached", set())
    reached.update(n for n, p in named.items() if has_gradient(p))
    count = evidence.memory.setdefault("waiting", {})
    written = {
        evidence.slot(slot).name
        for op in evidence.tape.operations
        if op.phase != "optimizer"
        for slot in op.writes
    }
    found = []
    for slot in evidence.tape.parameters:
        if slot.name not in wanted or slot.name in reached or slot.name in written:
            continue  # written by something else than an optimizer: an average of other weights
        count[slot.name] = count.get(slot.name, 0) + 1
        if count[slot.name] >= TIMES and not is_copy(evidence, named, slot.name):
            found.append(slot)
    return found


def held_by_whoever_steps(evidence: Evidence, named: dict[str, Tensor]) -> set[int]:
    """The parameters of the optimizers that stepped on this tape: the others wait for their turn."""
    stepped = {id(named[name]) for s in evidence.tape.stepped if (name := evidence.slot(s).name) in named}
    groups = [{id(p) for g in o.param_groups for p in g["params"]} for o in evidence.optimizers]
    if len(groups) > 1:
        groups = [group for group in groups if group & stepped]
    return set().union(*groups)


def verdict_of(evidence: Evidence, cuts: list[Cut]) -> Verdict:
    """Proven where the float64 replay that goes on past the cut brings a gradient to what has none."""
    first = cuts[0]
    here = [cut.parameter for cut in cuts if cut.line == first.line]
    shown = ", ".join(here[:3]) + (f" and {len(here) - 3} more" if len(here) > 3 else "")
    verbs = ("shapes", "gets") if len(here) == 1 else ("shape", "get")
    lines = [f"{shown} {verbs[0]} the loss and {verbs[1]} no gradient: {first.how}", f"at {first.line}"]
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
    if cut.operation is None:
        return None
    sizes = {
        evidence.slot(slot).name: float(torch.linalg.vector_norm(gradient))
        for slot, gradient in gradients_through(evidence.tape, cut.operation).items()
    }
    found = max(((name, sizes.get(name, 0.0)) for name in names), key=lambda pair: pair[1])
    return found if 0 < found[1] < float("inf") else None


def cut_rows(evidence: Evidence) -> Iterator[Verdict]:
    """Rows of a weight without any gradient, and yet the loss changes with them: a part of a fused layer."""
    named = named_parameters(evidence)
    slots = {slot.name: slot for slot in evidence.tape.parameters}
    silent = evidence.memory.setdefault("silent rows", {})
    suspects: dict[str, Tensor] = {}
    behind = weights_behind(evidence)
    chosen_from = {behind.get(op.reads[0]) for op in evidence.forward if op.name in CHOOSES_ROWS}
    uses = Counter(
        slot
        for op in evidence.forward
        if op.name not in REWRITTEN
        for slot in {behind[s] for s in op.reads if s in behind}
    )
    once = max(1, sum(call.accumulates for call in evidence.tape.top_backwards))
    for name, parameter in named.items():
        if name in slots and slots[name].index in chosen_from:
            continue  # a table: rows that were not looked up have no gradient
        if name in slots and uses[slots[name].index] > once:
            continue  # units that are off in one pass may be on in another, whose gradient is not wanted: a target
        if name not in slots or parameter.grad is None or parameter.dim() != 2 or parameter.grad.is_sparse:
            continue
        rows = (parameter.grad == 0).all(dim=1)
        silent[name] = rows & silent[name] if name in silent else rows
        share = float(silent[name].float().mean())
        if PART <= share < 1:
            suspects[name] = silent[name]
    for name, rows in suspects.items():
        if not shapes_the_loss(evidence, slots[name], rows):
            continue
        cut = find_cuts(evidence.tape, [slots[name]], in_part=True)[0]
        if cut.line is None:
            continue
        yield confirmed(
            "detached-graph/part-cut",
            f"{int(rows.sum())} of {len(rows)} rows of {name} shape the loss and never get a gradient",
            f"{cut.how}, at {cut.line}",
            where=place_of(cut.module, cut.line),
            confidence="proven",  # the rows were moved, and the loss with them
        )
        return


def shapes_the_loss(evidence: Evidence, parameter: Slot, rows: Tensor) -> bool:
    """Whether the loss has a slope along these rows of a weight, both ways; behind units that are off it has none."""
    value = evidence.tape.leaf_value(parameter.index).double()
    size = value.square().mean().sqrt()
    loss = evidence.loss_at({}, dtype=torch.float64)
    for way in (-1.0, 1.0):
        moved = value.clone()
        moved[rows] += way * NEARBY * (value[rows] + size)
        if not abs(evidence.loss_at({parameter.index: moved}, dtype=torch.float64) - loss) > ROUNDED * abs(
            loss
        ):
            return False
    return True


def cut_between_modules(evidence: Evidence) -> Iterator[Verdict]:
    """What one trained module made is cut and fed to another one: the first does not learn what the second wants.

    Heads on detached features are built so on purpose, and so is a pass without gradient from its beginning on: a
    warning at most, and none unless a replay in float64 that goes on past the cut changes a gradient.
    """
    tape = evidence.tape
    trained = set(tape.stepped)
    if not trained or len([c for c in tape.top_backwards if c.accumulates]) != 1:
        return
    asked: set[int] = set()
    for made_in, operation, at in crossings(evidence, trained):
        if at.index in asked:
            continue
        asked.add(at.index)
        changed = gradient_changed_by(evidence, at)
        if changed is None:
            continue
        yield confirmed(
            "detached-graph/between-modules",
            f"what {made_in} made reaches {operation.module} without a way back for the gradient",
            f"{at.name} at {at.line} cuts it",
            f"with the cut followed in float64, the gradient of {changed[0]} changes by {changed[1]:.0%}",
            where=place_of(at.module, at.line),
            level="warning",
            confidence="likely",
        )
        return


def crossings(evidence: Evidence, trained: set[int]) -> Iterator[tuple[str, Operation, Operation]]:
    """(module, operation, cut): an operation with trained weights that reads, cut, what another module made."""
    tape = evidence.tape
    behind = weights_behind(evidence)
    weights = {slot for slot, parameter in behind.items() if parameter in trained}
    source: dict[int, str] = {}  # slot that depends on trained parameters -> module that made it
    cut: dict[int, tuple[str, Operation]] = {}
    for operation in evidence.forward:
        refs = list(references((operation.args, operation.kwargs)))
        reads = [ref.slot for ref in refs]
        if operation.makes and weights.issuperset(operation.makes):
            continue  # a cast of a weight
        uses = not weights.isdisjoint(reads)
        carried = {ref.slot for ref in refs if ref.tracked} - weights  # autograd itself goes on from these
        for slot in reads:
            if slot in cut and slot not in carried and operation.module and operation.grad_enabled and uses:
                made_in, at = cut[slot]
                if not related(made_in, operation.module):
                    yield made_in, operation, at
        origin = next((source[s] for s in reads if s in source), None)
        if origin is None and uses and operation.grad_enabled:
            origin = operation.module
        broken = next((cut[s] for s in reads if s in cut and s not in carried), None)
        results = (*operation.makes, *operation.writes)
        # inside a hand-written function nothing is followed: its own backward leads past
        stops = operation.call is None and (operation.name == "detach" or not operation.grad_enabled)
        for slot in results:
            if not tape.slots[slot].dtype.is_floating_point:
                continue
            if broken is not None and not carried and not uses:
                cut[slot] = broken
            elif stops and origin:
                cut[slot] = (origin, operation)
            elif origin is not None:
                source[slot] = operation.module if uses else origin


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
    worst: tuple[str, float] | None = None
    for slot, gradient in gradients_through(evidence.tape, cut.index).items():
        size = float(torch.linalg.vector_norm(gradient))
        was = before.get(slot)
        change = size if was is None else float(torch.linalg.vector_norm(gradient - was))
        share = change / size if size > 0 else 0.0
        if CHANGED < share < float("inf") and (worst is None or share > worst[1]):
            worst = (evidence.slot(slot).name, share)
    return worst


def related(first: str, second: str) -> bool:
    """The same module, or one inside the other: a recurrence or a part of it."""
    top, other = first.split(".")[0], second.split(".")[0]
    return top == other or not top or not other


# derivatives ------------------------------------------------------------------------------------------------

ADDS = ("add", "add_", "sub", "sub_", "rsub", "stack", "cat")


def constant_derivatives(evidence: Evidence) -> Iterator[Verdict]:
    """A residual or penalty made of ∂output/∂input that the loss adds to what the same network learns from."""
    flow = evidence.flow
    for call in evidence.tape.top_backwards:
        if call.inputs is None or call.create_graph:
            continue
        trained = set().union(*(trained_behind(evidence, root) for root in call.roots))
        of_weights = any(trained_behind(evidence, slot) for slot in call.inputs)
        if not trained or of_weights:
            continue  # nothing to learn from it; or how strongly a term pulls on weights, as GradNorm asks
        for op, term in met_by_gradient(evidence, call):
            others = [ref.slot for ref in references((op.args, op.kwargs)) if ref.tracked]
            behind = set().union(*(trained_behind(evidence, slot) for slot in others))
            # on its way into a network again (a perturbed input, a sampler) it is no part of the loss
            if flow.tail.isdisjoint(op.makes or op.writes) or not behind & trained:
                continue
            yield verdict_on_derivative(evidence, call, op, term)
            return


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


def trained_behind(evidence: Evidence, slot: int) -> set[int]:
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
        return float(replay_exactly(evidence.tape, keep=[term], compare=False).values[term])
    return None
