"""What was chosen, and how likely it was: log-probabilities of classes and actions in a loss, and what weighs them."""

from __future__ import annotations

import math
from collections.abc import Callable

from gradproof.instruments.flow import VIEWS, Comparison, Flow
from gradproof.instruments.rows import sources
from gradproof.tape.operations import Operation, Ref

PICKS = {"gather", "index"}
JOINS = VIEWS | {"stack", "cat"}
PASSED = JOINS | PICKS | {"neg", "mul", "div", "exp", "log", "sub", "minimum", "clamp", "clamp_min"}
PROBABILITIES = ("_softmax", "_log_softmax", "logsumexp")
MOST = 80  # operations that are looked through, backwards

# of an operation and a mark that was set on the way to it: where to go on, and whether this is it
Look = Callable[[Operation, bool], list[tuple[int, bool]] | bool]


def policy_terms(flow: Flow) -> list[tuple[int, int, Operation]]:
    """Products of the log-probability of something chosen, or of its ratio to an old one, with a weight: (it, weight,
    operation)."""
    found = []
    for op in flow.operations:
        for made, weight in both_ways(op):
            same = flow.tape.slots[made].shape == flow.tape.slots[weight].shape
            if same and made in flow.tail and weight not in flow.tracked and is_of_choice(flow, made):
                found.append((made, weight, op))
    return found


def both_ways(op: Operation) -> list[tuple[int, int]]:
    """The two tensors of a product, each before the other."""
    refs = [arg.slot for arg in op.args[:2] if isinstance(arg, Ref)] if op.name == "mul" else []
    return [(refs[0], refs[1]), (refs[1], refs[0])] if len(refs) == 2 else []


def weighs_choices(flow: Flow) -> bool:
    """Whether somewhere in the loss what was picked of a softmax, or the density of what was done, is multiplied with
    numbers that are no mask."""
    for op in flow.operations:
        if op.name != "mul" or flow.tail.isdisjoint(op.makes):
            continue
        alone = (
            [op.reads[0]] if len(op.reads) == 1 else []
        )  # times a number of the script's: the return of one action
        if any(math.prod(flow.tape.slots[s].shape) == 1 and is_chosen(flow, s) for s in alone):
            return True
        for made, weight in both_ways(op):
            if weight in flow.tracked or not is_chosen(flow, made):
                continue
            value = flow.value(weight)
            if value is not None and not bool(((value == 0) | (value == 1)).all()):
                return True
    return False


def is_return(flow: Flow, comparison: Comparison) -> bool:
    """Whether values are compared with numbers from outside plus what a network makes of them, r + γ V(s'): as values
    grow, so do their errors."""
    sum_of_two = flow.follow(comparison.target, {"add"})
    if comparison.kind != "value" or sum_of_two is None or len(sum_of_two.reads) != 2:
        return False
    return sum(flow.is_learned(slot) for slot in sum_of_two.reads) == 1


def is_turned(flow: Flow, weight: int) -> bool:
    """Whether a weight is the negative of what it was: -advantage * ratio is what -(advantage * ratio) is."""
    turned = False
    for op in flow.chain(weight):
        if op.name in ("neg", "mul", "div") and len(op.reads) == 1:
            turned = turned != is_negative(op)
        elif op.name not in VIEWS:
            break
    return turned


def is_drawn(flow: Flow, pick: Operation) -> bool:
    """Whether what is picked was drawn in this step from probabilities; labels may be drawn from nothing."""
    drawn = (index for slot in pick.reads[1:] for index in sources(flow, slot)[1])
    return any(flow.tape.operations[index].name == "multinomial" for index in drawn)


# log-probabilities --------------------------------------------------------------------------------------------


def is_chosen(flow: Flow, slot: int) -> bool:
    return slot in flow.tracked and (is_picked(flow, slot) or is_of_choice(flow, slot))


def is_of_choice(flow: Flow, slot: int) -> bool:
    """A log-probability, or exp(log-probability - old one)."""
    if flow.follow(slot, {"exp"}) is None:
        return is_log_probability(flow, slot)
    ratio = flow.follow(slot, {"exp"}, {"sub"})
    return ratio is not None and is_log_probability(flow, ratio.reads[0])


def is_log_probability(flow: Flow, slot: int) -> bool:
    return is_of_classes(flow, slot) or is_log_density(flow, slot)


def is_of_classes(flow: Flow, slot: int) -> bool:
    """Picked out of a log_softmax, of the log of a softmax, or of scores less their logsumexp."""
    pick = flow.follow(slot, PICKS, through=JOINS)
    if pick is None:
        return False
    scores = pick.reads[0]
    less = flow.follow(scores, {"sub"})
    if less is not None and len(less.reads) == 2:
        return flow.follow(less.reads[1], {"logsumexp"}) is not None
    if flow.follow(scores, {"log"}) is None:
        return flow.follow(scores, {"_log_softmax"}) is not None
    # the log of probabilities that were clamped and made to sum to 1, as torch.distributions does
    return flow.follow(scores, {"_softmax"}, through=VIEWS | {"log", "clamp", "div"}) is not None


def is_picked(flow: Flow, slot: int) -> bool:
    """Whether it is made of one entry of a softmax."""

    def look(op: Operation, picked: bool) -> list[tuple[int, bool]] | bool:
        if op.name in PROBABILITIES:
            return picked
        tracked = [read for read in op.reads if read in flow.tracked] if op.name in PASSED else []
        return [(read, picked or op.name in PICKS) for read in tracked]

    return is_found(flow, slot, look)


def is_log_density(flow: Flow, slot: int) -> bool:
    """A normal distribution's: less the square of what was done, which is data, less what a network expects."""

    def look(op: Operation, turned: bool) -> list[tuple[int, bool]] | bool:
        if op.name == "pow" and op.args[1] == 2:
            less = flow.follow(op.reads[0], {"sub"}, through=VIEWS | {"div", "mul"})
            of_data = less is not None and sum(s in flow.tracked for s in less.reads) == 1 < len(less.reads)
            return turned and of_data
        if op.name in VIEWS or op.name in ("neg", "mul", "div"):
            return [(op.reads[0], turned != is_negative(op))]
        summed = op.reads if op.name in ("sum", "add", "sub") else []
        return [(read, turned != (op.name == "sub" and n > 0)) for n, read in enumerate(summed)]

    return is_found(flow, slot, look)


def is_found(flow: Flow, slot: int, look: Look) -> bool:
    """Backwards from a slot, along all the ways that `look` goes on."""
    waiting = [(slot, False)]
    for _ in range(MOST):
        here, mark = waiting.pop() if waiting else (-1, False)
        op = flow.maker(here) if here >= 0 else None
        said = look(op, mark) if op is not None and op.reads else False
        if said is True:
            return True
        waiting += said or []
    return False


def is_negative(op: Operation) -> bool:
    """Turns the sign, by itself or by a number."""
    return op.name == "neg" or any(isinstance(arg, (int, float)) and arg < 0 for arg in op.args)
