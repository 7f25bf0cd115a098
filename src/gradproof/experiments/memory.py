"""Do two things share memory? Stacks of one buffer, targets changed with the inputs; and averages that go astray."""

from __future__ import annotations

from collections.abc import Iterator

from gradproof.experiments.evidence import Evidence, Verdict, confirmed
from gradproof.experiments.nonfinite import place_of
from gradproof.tape.operations import Line, Operation, references

FEWEST = 6  # members of a stack that are one and the same memory
STACKS = ("stack", "cat")
VIEWS = ("view", "alias", "detach", "unsqueeze", "squeeze", "t", "_unsafe_view")
COMPARES = ("sub", "rsub", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy")
CHANGES = (
    "mul_",
    "add_",
    "sub_",
    "div_",
    "index_put_",
    "masked_fill_",
    "copy_",
    "clamp_",
    "scatter_",
    "bernoulli_",
)


def do_two_things_share_memory(evidence: Evidence) -> Iterator[Verdict]:
    """One verdict: a stack of one buffer is proof; a target changed in place together with the input, a warning."""
    for look in (stack_of_one_buffer, target_changed_with_input):
        found = look(evidence)
        if found is not None:
            yield found
            return


def stack_of_one_buffer(evidence: Evidence) -> Verdict | None:
    """torch.stack of many entries that are the same memory: all show what was written last."""
    tape = evidence.tape
    views = {slot: (id(memory), view) for memory in tape.memories for slot, view in memory.views.items()}
    for operation in evidence.forward:
        if operation.name not in STACKS:
            continue
        members = [ref.slot for ref in references(operation.args[0])]
        if len(members) < FEWEST:
            continue
        places = [place_in_memory(evidence, views, slot) for slot in members]
        same = max(places.count(place) for place in set(places))
        first = origin(evidence, members[0])
        rewritten = [
            op for op in evidence.forward if op.index < operation.index and is_written(evidence, op, first)
        ]
        outside = tape.slots[first].made_by is None and tape.slots[first].kind in ("input", "outside")
        outside = outside and not is_repeated_here(evidence, members)
        if same >= 0.9 * len(members) and (len(rewritten) >= 2 or outside):
            written = rewritten[-1].line if rewritten else operation.line
            given = handed_out(evidence, first, operation)
            return confirmed(
                "aliasing-or-inplace/one-buffer",
                f"{same} of the {len(members)} tensors that {operation.name} puts together are one memory: "
                "all hold what was written last",
                f"put together at {operation.line}" + (f", last written at {written}" if rewritten else ""),
                where=place_of(operation.module, given or written),
                fix="keep a clone() of what changes later",
                if_troubled=len(set(members)) == 1
                and len(rewritten) < 2,  # one sample may be meant many times
                lasting=True,
            )
    return None


def is_repeated_here(evidence: Evidence, members: list[int]) -> bool:
    """Views that this step itself makes of one batch, to have it several times."""
    makers = [maker for slot in members if (maker := evidence.maker(slot)) is not None]
    return any(maker.name != "alias" for maker in makers)


def handed_out(evidence: Evidence, first: int, stack: Operation) -> Line | None:
    """The line that makes a view of the buffer to be kept: there a clone() is missing."""
    storage = evidence.slot(first).storage
    views = [
        op
        for op in evidence.forward
        if op.name in VIEWS and op.line not in (None, stack.line) and not op.module and op.index < stack.index
    ]
    kept = [op for op in views if any(evidence.slot(made).storage == storage for made in op.makes)]
    return kept[-1].line if kept and storage >= 0 else None


def place_in_memory(evidence: Evidence, views: dict[int, tuple], slot: int) -> tuple:
    """Which memory, and which part of it: rows of one buffer are not the same place."""
    maker = evidence.maker(slot)
    if maker is None:
        return views.get(slot, (slot,))
    if maker.name == "alias" and len(maker.args) == 4:  # recorded where a view had been made before the step
        return (*views.get(origin(evidence, slot), (slot,))[:1], maker.args[1:])
    if maker.name in VIEWS and maker.reads:
        return place_in_memory(evidence, views, maker.reads[0])
    return (slot,)


def origin(evidence: Evidence, slot: int) -> int:
    """The slot whose memory a view looks at."""
    while True:
        maker = evidence.maker(slot)
        if maker is None or not maker.reads or maker.name not in VIEWS:
            return slot
        slot = maker.reads[0]


def is_written(evidence: Evidence, operation: Operation, slot: int) -> bool:
    storage = evidence.slot(slot).storage
    return storage >= 0 and any(evidence.slot(w).storage == storage for w in operation.writes)


def target_changed_with_input(evidence: Evidence) -> Verdict | None:
    """An operation in place whose result goes into the model, on memory that the loss compares with afterwards."""
    targets = {evidence.slot(origin(evidence, slot)).storage for slot in compared_with(evidence)} - {-1}
    for operation in evidence.forward:
        if operation.name not in CHANGES or operation.module:
            continue
        for written in operation.writes:
            storage = evidence.slot(written).storage
            if storage in targets and goes_into_model(evidence, operation, written, storage):
                return confirmed(
                    "aliasing-or-inplace/target-changed",
                    f"{operation.name} changes in place what the loss compares with, and the model gets the result too",
                    where=place_of(operation.module, operation.line),
                    fix=f"use the operation without the underscore ({operation.name.rstrip('_')}), or clone() first",
                    level="warning",
                    confidence="likely",
                    lasting=True,
                )
    return None


def compared_with(evidence: Evidence) -> Iterator[int]:
    """What the loss compares predictions with: the operand without gradient, outside of all modules."""
    for operation in evidence.forward:
        if operation.name in COMPARES and not operation.module:
            refs = list(references(operation.args))
            if len(refs) == 2 and refs[0].tracked != refs[1].tracked:
                yield refs[refs[0].tracked].slot


def goes_into_model(evidence: Evidence, change: Operation, written: int, storage: int) -> bool:
    """Whether the changed memory is read on a way into a module, too."""
    reach = {written}
    for operation in evidence.forward:
        if operation.index <= change.index:
            continue
        reads = set(operation.reads)
        if not reads & reach and not any(evidence.slot(s).storage == storage for s in reads):
            continue
        if operation.module:
            return True
        if not any(ref.tracked for ref in references((operation.args, operation.kwargs))):
            reach.update(operation.makes)
    return False


def does_the_average_follow(evidence: Evidence) -> Iterator[Verdict]:
    """Averaged weights whose size stays far from that of the weights they average."""
    tape = evidence.tape
    parameters = {slot.index for slot in tape.parameters}
    followed: dict[int, int] = {}
    lines: dict[int, Operation] = {}
    for operation in tape.operations:
        if operation.phase == "optimizer" or operation.in_backward is not None:
            continue
        sources = [s for s in operation.reads if s in parameters and s not in operation.writes]
        for slot in operation.writes:
            if slot in parameters and len(sources) == 1 and operation.name in ("add_", "lerp_"):
                followed[slot], lines[slot] = sources[0], operation
    if not followed:
        return
    ratios = []
    for slow, fast in followed.items():
        here, there = (tape.leaf_value(s).double().norm() for s in (slow, fast))
        if float(there) > 0 and evidence.slot(slow).shape == evidence.slot(fast).shape:
            ratios.append(float(here / there))
    if not ratios:
        return
    ratio = sorted(ratios)[len(ratios) // 2]
    history = evidence.memory.setdefault("averages", [])
    history.append(ratio)
    # an average that begins at zero grows towards its weights; one that stays away, or leaves, is wrong
    far = not 0.3 < ratio < 3
    if len(history) >= 2 and far and abs(history[-1] - 1) >= 0.9 * abs(history[-2] - 1):
        first = next(iter(lines.values()))
        yield confirmed(
            "weights-state-error/average",
            f"the averaged weights have {ratio:.2g} times the size of those they average, and do not come nearer",
            where=place_of(first.module, first.line),
            fix="average = decay * average + (1 - decay) * weights",
        )
