"""Where does the signal grow or die? Its size along blocks and along time, both ways; who hears the beginning."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor, nn

from gradproof.experiments.network.initial import EARLY, place_of_start
from gradproof.experiments.verdict import Verdict, causes_of, confirmed, each, excluded, undecided
from gradproof.instruments.evidence import Evidence
from gradproof.instruments.flow import place_of
from gradproof.instruments.walk import ahead, anything
from gradproof.instruments.weights import pull
from gradproof.tape.execute import CannotReplay
from gradproof.tape.gain import Gain, measure_gains
from gradproof.tape.operations import ModuleCall
from gradproof.tape.replay import Replay, differentiate

FEWEST_BLOCKS, FEWEST_TIMES = 4, 6  # of fewer, one odd link makes the trend
MOST_CHAINS = 4  # that are followed, the outermost first
GROWS = 1e2  # forward, from the first block to the last
EXPLODES = 1e3  # backward, from the last block to the first
DIES = 1e-6  # either way: beside what did not fade, float32 hardly sees the rest
LOST = 1e-10  # backward, at the start: a thousandth of float32's last digit, and no training brings it back
FADES = 1e-2  # forward and backward, where every block takes its part of it
PART = 0.25  # a block: PyTorch's own start of a linear layer and a rectifier keeps 0.4 of the signal
UNHEARD = 1e-4  # of a change
SMALL = 1e-3  # of a link's own size
MOST_LINKS = 64  # each is kept with its gradient: of a long chain, as many show how it goes
# no layer of a network that learns enlarges a small change so much: an LSTM over hundreds of steps stays below 100
MULTIPLIES = 1e4
TINY = 1e-10  # of an input: what it becomes must stay small in float64
MOST_SUSPECTS = 3  # each is replayed twice in float64
RESOLUTION = 1e-7  # of float32
HOW = {"blocks": "depth", "time steps": "time"}
RECURRENT = ("rnn", "lstm", "gru")


def where_does_the_signal_go(evidence: Evidence) -> Iterator[Verdict]:
    yield from causes_of(each(evidence, along_chains, from_beginning_to_end))


# along blocks and time steps --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chain:
    """Modules that the signal passes one after another: blocks of a stack, or one cell at each time step."""

    name: str
    kind: str  # blocks or time steps
    paths: tuple[str, ...]
    slots: tuple[int, ...]


def along_chains(evidence: Evidence) -> Iterator[Verdict]:
    """The first chain along which the signal or its gradient changes by orders of magnitude, or one module that does
    so alone: a recurrence whose time steps are one operation, trained or not."""
    multiplied = does_a_module_multiply(evidence)
    if multiplied is not None:
        yield multiplied
        return
    chains = find_chains(evidence)
    if not chains:
        return
    slots = [slot for chain in chains for slot in chain.slots]
    found = differentiate(evidence.tape, keep=slots, gradients_at=slots)
    known = [chain for chain in chains if len(sizes(chain.slots, found.values)) > 1]
    odd = next(filter(None, (judge(evidence, chain, found) for chain in known)), None)
    if odd is not None:
        yield odd
        return
    if not known:
        yield undecided("vanishing-signal", "the outputs of the blocks could not be replayed")
    for how, chain in {HOW[chain.kind]: chain for chain in known[::-1]}.items():
        forward = sizes(chain.slots, found.values)
        if not all(map(math.isfinite, forward)):
            yield undecided("exploding-signal", f"the outputs of {chain.name} are not finite at this step")
            continue
        yield excluded(f"exploding-signal/{how}", say_sizes(chain, forward))
        yield excluded(f"vanishing-signal/{how}", say_sizes(chain, forward))


def find_chains(evidence: Evidence) -> list[Chain]:
    """Numbered modules of one kind in a first pass, and modules whose output comes back to them at a later call."""
    stacks: dict[str, dict[str, int]] = {}
    calls: dict[str, list[int]] = {}
    for call in evidence.tape.modules:
        made = evidence.slot(call.outputs[0]) if call.outputs else None
        if made is None or not made.dtype.is_floating_point or not made.followed:
            continue  # a validation between two steps
        calls.setdefault(call.path, []).append(made.index)
        if re.search(r"\d", call.path):  # blocks.0, blocks.1, …, or fc1, fc2, …
            name = re.sub(r"\d+", "*", call.path)
            stacks.setdefault(f"{name}:{call.kind}", {}).setdefault(call.path, made.index)
    chains = []
    for name, links in stacks.items():
        first, title = next(iter(links)), name.split(":")[0].removesuffix(".*")
        title = title.replace("*", f"{first} and its like", name[0] == "*")
        if len(links) >= FEWEST_BLOCKS:
            chains.append(Chain(title, "blocks", tuple(links), tuple(links.values())))
    for path, slots in sorted(calls.items(), key=lambda item: item[0].count(".")):
        if len(slots) >= FEWEST_TIMES:
            chains.append(Chain(path, "time steps", (path,) * len(slots), tuple(slots)))
    return [thin(chain) for chain in chains if leads_on(evidence, chain)][:MOST_CHAINS]


def leads_on(evidence: Evidence, chain: Chain) -> bool:
    """Whether what its first link makes comes to its last."""
    reached = ahead(evidence.flow, chain.slots[:1], anything)
    return any(chain.slots[-1] in (*op.makes, *op.writes) for op in reached)


def thin(chain: Chain) -> Chain:
    """At most so many links, evenly spread, the first and the last among them."""
    last, most = len(chain.slots) - 1, MOST_LINKS - 1
    places = range(last + 1) if last <= most else [round(i * last / most) for i in range(MOST_LINKS)]
    paths, slots = tuple(chain.paths[i] for i in places), tuple(chain.slots[i] for i in places)
    return replace(chain, paths=paths, slots=slots)


def say_sizes(chain: Chain, forward: list[float]) -> str:
    said = f"along {len(chain.slots)} {chain.kind} of {chain.name} "
    return f"{said}the signal goes from {forward[0]:.2g} to {forward[-1]:.2g}"


def judge(evidence: Evidence, chain: Chain, found: Replay) -> Verdict | None:
    forward, backward = (sizes(chain.slots, values) for values in (found.values, found.slot_gradients))
    steps = len(chain.slots) - 1
    growth = forward[-1] / forward[0] if forward[0] > 0 else math.nan
    # exactly nothing is a gate that is shut, or units that are off; what dies out leaves a trail that grows smaller
    trail = [size for size in backward if size > 0]
    flow = trail[0] / trail[-1] if len(trail) > 1 and backward[-1] > 0 else math.nan
    blocks = chain.kind == "blocks"
    fades = blocks and max(growth, flow) < min(FADES, PART**steps)
    if growth > GROWS or flow > EXPLODES:
        what, gain, place = "exploding", max(x for x in (growth, flow) if x == x), worst_link(chain, forward)
        troubled = not (growth > 10 * GROWS and flow > EXPLODES)  # both at once is no matter of scale
    elif flow < DIES or growth < DIES or fades:
        what, gain, place = "vanishing", min(x for x in (growth, flow) if x == x), chain.name
        # what begins late is what training did to it: steps that were too long, units that died
        troubled = not blocks or not flow < LOST or evidence.step > EARLY
    else:
        return None
    numbers = say_sizes(chain, forward)
    if len(backward) > 1:
        numbers += f", its gradient from {backward[-1]:.2g} at the end to {backward[0]:.2g} at the beginning"
    pushed = what_arrives_of_a_push(evidence, chain.slots[0], chain.slots[-1])
    arrives = f"a small change of the first one's output is {pushed:.2g} times as large at the last"
    return confirmed(
        f"{what}-signal/{HOW[chain.kind]}",
        numbers,
        f"a factor of {gain ** (1 / steps):.3g} a {chain.kind.removesuffix('s')}",
        *([arrives] if math.isfinite(pushed) else []),
        where=place_in(evidence, chain, place),
        if_troubled=troubled,
        confidence="proven" if (pushed > GROWS if what == "exploding" else pushed < UNHEARD) else "likely",
        lasting=False,
    )


def what_arrives_of_a_push(
    evidence: Evidence, first: int, last: int, share: float = SMALL, dtype: torch.dtype | None = None
) -> float:
    """Each entry of a slot is changed by a share of its size: how many times as large the change of a later one is.

    Of its own size, as rounding would: scores that a mask has set to -1e9 are not what the others are measured by.
    """
    try:
        before = evidence.flow.values([first, last], dtype=dtype)
        noise = torch.randn(before[first].shape, generator=torch.Generator().manual_seed(0)).to(before[first])
        noise *= share * before[first]
        after = evidence.flow.values([last], {first: before[first] + noise}, dtype=dtype)
        changes = sizes((first, last), {first: noise, last: after[last].double() - before[last].double()})
    except (CannotReplay, KeyError, RuntimeError):
        return math.nan
    return changes[1] / changes[0] if changes[0] > 0 else math.nan


def place_in(evidence: Evidence, chain: Chain, link: str) -> str:
    """Of a recurrence, the weight that what comes back is multiplied with, and the line that gave it its values."""
    weight = recurrent_weight(evidence, chain) if chain.kind == "time steps" else ""
    return place_of_start(evidence, weight) if weight else link


def recurrent_weight(evidence: Evidence, chain: Chain) -> str:
    """The matrix that meets the last call's output on its way to this call's."""
    for op in ahead(evidence.flow, chain.slots[:1], anything):
        read = (evidence.slot(evidence.flow.behind(slot, ("t",))) for slot in op.reads)
        met = [slot.name for slot in read if slot.kind == "parameter" and len(slot.shape) == 2]
        if met or chain.slots[1] in op.makes:
            return met[0] if met else ""
    return ""


def sizes(slots: tuple[int, ...], values: dict) -> list[float]:
    """Root mean square at each slot that is known, in order."""
    return [float(values[s].double().square().mean().sqrt()) for s in slots if s in values]


def worst_link(chain: Chain, forward: list[float]) -> str:
    if len(forward) != len(chain.paths):
        return chain.name
    ratios = [b / a if a > 0 else 0.0 for a, b in pairwise(forward)]
    return chain.paths[max(range(len(ratios)), key=ratios.__getitem__) + 1]


# one module -------------------------------------------------------------------------------------------------


def does_a_module_multiply(evidence: Evidence) -> Verdict | None:
    """The innermost module that makes gradients far larger, and of which a tiny change of its input shows the same."""
    suspects = [gain for gain in measure_gains(evidence.tape).modules if may_multiply(evidence, gain)]
    for gain in sorted(suspects, key=lambda gain: -gain.path.count("."))[:MOST_SUSPECTS]:
        call = evidence.tape.modules[gain.number]
        arrives = what_arrives_of_a_push(evidence, call.inputs[0], call.outputs[0], TINY, torch.float64)
        pushed = arrives / gain.forward  # of their own sizes
        inside = evidence.tape.operations[call.first : call.last]
        if pushed > MULTIPLIES:
            return confirmed(
                f"exploding-signal/{'time' if is_recurrent(evidence, call) else 'depth'}",
                f"what goes back through {call.path or call.kind} is {gain.backward:.2g} times as large before it as "
                "behind it",
                f"changing its input by {TINY:.0e} of its size changes its output by {pushed * TINY:.2g} of its own: "
                f"{pushed:.1g} times as much",
                "whatever stands before it gets gradients of that size: their norms do not say where it comes from",
                where=place_of(call.path or call.kind, next((op.line for op in inside if op.line), None)),
                fix="bound what it does to a small change: recurrent weights whose largest singular value is below 1, "
                "fewer time steps between what is trained and the loss, or a loss before it",
                confidence="proven",  # its input was changed
            )
    return None


def may_multiply(evidence: Evidence, gain: Gain) -> bool:
    """By its gradients, in parts of what they belong to: what only rescales counts for nothing."""
    call = evidence.tape.modules[gain.number]
    given, made = evidence.slot(call.inputs[0]), evidence.slot(call.outputs[0])
    share = gain.backward / gain.forward * math.prod(given.shape) / max(1, math.prod(made.shape))
    return share > MULTIPLIES and given.dtype.is_floating_point and made.dtype.is_floating_point


def is_recurrent(evidence: Evidence, call: ModuleCall) -> bool:
    """A recurrent layer of PyTorch's own, or one matrix that is used again and again."""
    inside = evidence.tape.operations[call.first : call.last]
    if any(word in op.name for op in inside for word in RECURRENT):
        return True
    used = Counter(slot for op in inside if "mm" in op.name for slot in dict.fromkeys(op.reads))
    return max(used.values(), default=0) >= FEWEST_TIMES


# from the beginning to the end ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recurrence:
    """One pass of a layer over the time steps of a batch, and where its memory got its start."""

    call: ModuleCall
    axis: int  # of time
    where: str | None


def from_beginning_to_end(evidence: Evidence) -> Iterator[Verdict]:
    """Of nn.RNN, nn.LSTM and nn.GRU, whose time steps are one operation, and of layers that loop over the time steps
    in their forward: only where the end alone is used."""
    seen: set[str] = set()
    for recurrence in (*fused(evidence), *looping(evidence)):
        if recurrence.call.path not in seen:
            seen.add(recurrence.call.path)
            yield from judge_echo(evidence, recurrence)


def fused(evidence: Evidence) -> Iterator[Recurrence]:
    for call in evidence.tape.modules:
        module = evidence.modules.get(call.path)
        if (
            not isinstance(module, nn.RNNBase)
            or module.bidirectional
            or len(call.outputs) < 2
            or not call.inputs
        ):
            continue
        shape, axis = evidence.slot(call.inputs[0]).shape, 1 if module.batch_first else 0
        if len(shape) == 3 and shape[axis] >= FEWEST_TIMES and shape[1 - axis] > 1:
            yield Recurrence(call, axis, place_of_start(evidence, f"{call.path}.weight_hh_l0"))


def looping(evidence: Evidence) -> Iterator[Recurrence]:
    """Modules from (B, T, …) to (B, T, …) in whose own forward one line is run as often as there are time steps."""
    for call in evidence.tape.modules:
        if not call.inputs or not call.outputs or not call.path:
            continue
        given, made = evidence.slot(call.inputs[0]), evidence.slot(call.outputs[0])
        if len(given.shape) < 3 or given.shape[:2] != made.shape[:2] or not given.dtype.is_floating_point:
            continue
        inside = (op for op in evidence.tape.operations[call.first : call.last] if op.module == call.path)
        lines = Counter((op.line, op.name) for op in inside if op.line)
        (line, _), count = max(lines.items(), key=lambda item: item[1], default=((None, ""), 0))
        if given.shape[0] >= 2 and given.shape[1] >= FEWEST_TIMES and count >= given.shape[1] - 1:
            yield Recurrence(call, 1, place_of(call.path, line))


def judge_echo(evidence: Evidence, recurrence: Recurrence) -> Iterator[Verdict]:
    call, axis = recurrence.call, recurrence.axis
    times = evidence.slot(call.inputs[0]).shape[axis]
    if not only_the_end_is_used(evidence, call.outputs[0], times, axis):
        return
    inputs = evidence.flow.values([call.inputs[0]])[call.inputs[0]]
    usual = last_output(evidence, call, inputs, axis)

    def influence(time: int) -> float:
        other = inputs.clone()  # with what another sample has there
        other.select(axis, time).copy_(inputs.select(axis, time).roll(1, dims=0))
        return float((last_output(evidence, call, other, axis) - usual).norm())

    late = influence(times - 1)
    early = max(influence(0), influence(1))
    if not late > 0:
        said = f"exchanging the last input of {call.path} does not change its last output"
        yield undecided("vanishing-signal", said)
        return
    share = early / late
    if share > UNHEARD:
        said = f"exchanging the first of {times} inputs of {call.path} changes its last output by {share:.2g} times "
        yield excluded("vanishing-signal/time", f"{said}what exchanging the last one does")
        return
    gain = max(share, RESOLUTION) ** (1 / (times - 1))
    heard = f"{share:.1g} times as much" if share > RESOLUTION else "nothing that float32 could show"
    yield confirmed(
        "vanishing-signal/time",
        f"exchanging the first of {times} inputs of {call.path} changes its last output by {heard} as exchanging the "
        "last one does",
        f"a factor of {'' if share > RESOLUTION else 'at most '}{gain:.3g} a time step",
        where=recurrence.where,
        if_troubled=True,
        confidence="proven",  # each input was exchanged
        lasting=False,
    )


def only_the_end_is_used(evidence: Evidence, output: int, times: int, axis: int) -> bool:
    """The gradient at a layer's outputs (…, T, …) is all at their end, or there is none (the last state is used)."""
    found = pull(evidence, output)
    if found is None:
        return True
    axis = axis_of_time(found, times, axis)
    sizes = found.double().square().sum(dim=[dim for dim in range(found.dim()) if dim != axis])
    return bool(sizes[: len(sizes) // 2].sum() <= 1e-12 * sizes.sum())  # of squares: what rounding leaves


def last_output(evidence: Evidence, call: ModuleCall, inputs: Tensor, axis: int) -> Tensor:
    found = evidence.flow.values([call.outputs[0]], {call.inputs[0]: inputs})[call.outputs[0]]
    times = inputs.shape[axis]
    return found.select(axis_of_time(found, times, axis), -1).to(torch.float64)


def axis_of_time(outputs: Tensor, times: int, axis: int) -> int:
    """PyTorch transposes outputs in place at the end of some layers: before that, time lies on the other axis."""
    return axis if outputs.shape[axis] == times else 1 - axis
