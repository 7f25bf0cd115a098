"""Does the beginning of a sequence reach its end? The first input of a recurrent layer is exchanged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradproof.experiments.evidence import Evidence, Verdict, confirmed
from gradproof.experiments.initial import place_of_start
from gradproof.experiments.nonfinite import place_of
from gradproof.tape.operations import ModuleCall
from gradproof.tape.replay import differentiate

FEWEST_TIMES = 6
UNHEARD = 1e-4  # of what exchanging the last input does
RESOLUTION = 1e-7  # of float32


@dataclass(frozen=True)
class Recurrence:
    """One pass of a layer over the time steps of a batch, and where its memory got its start."""

    call: ModuleCall
    axis: int  # of time
    where: str | None


def does_the_beginning_reach_the_end(evidence: Evidence) -> Iterator[Verdict]:
    """Of nn.RNN, nn.LSTM and nn.GRU, whose time steps are one operation, and of layers that loop over the time steps
    in their forward: only where the end alone is used."""
    seen: set[str] = set()
    for recurrence in (*fused(evidence), *looping(evidence)):
        if recurrence.call.path not in seen:
            seen.add(recurrence.call.path)
            yield from verdict_on(evidence, recurrence)


def fused(evidence: Evidence) -> Iterator[Recurrence]:
    modules = {
        path: module
        for model in evidence.models.values()
        for path, module in model.named_modules()
        if isinstance(module, nn.RNNBase) and not module.bidirectional
    }
    for call in evidence.tape.modules:
        module = modules.get(call.path)
        if module is None or len(call.outputs) < 2 or not call.inputs:
            continue
        shape = evidence.slot(call.inputs[0]).shape
        axis = 1 if module.batch_first else 0
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
        times = given.shape[1]
        if times < FEWEST_TIMES or given.shape[0] < 2:
            continue
        own = [
            op
            for op in evidence.tape.operations[call.first : call.last]
            if op.module == call.path and op.line
        ]
        lines = Counter((op.line, op.name) for op in own)
        (line, _), count = max(lines.items(), key=lambda item: item[1], default=((None, ""), 0))
        if count >= times - 1:
            yield Recurrence(call, 1, place_of(call.path, line))


def verdict_on(evidence: Evidence, recurrence: Recurrence) -> Iterator[Verdict]:
    call, axis = recurrence.call, recurrence.axis
    times = evidence.slot(call.inputs[0]).shape[axis]
    if not only_the_end_is_used(evidence, call.outputs[0], times, axis):
        return
    inputs = evidence.flow.values([call.inputs[0]])[call.inputs[0]]
    usual = last_output(evidence, call, inputs, axis)

    def influence(time: int) -> float:
        other = inputs.clone()
        other.select(axis, time).copy_(
            inputs.select(axis, time).roll(1, dims=0)
        )  # what another sample has there
        return float((last_output(evidence, call, other, axis) - usual).norm())

    late = influence(times - 1)
    early = max(influence(0), influence(1))
    if not late > 0 or early > UNHEARD * late:
        return
    share = early / late
    gain = max(share, RESOLUTION) ** (1 / (times - 1))
    heard = f"{share:.1g} times as much" if share > RESOLUTION else "nothing that float32 could show"
    yield confirmed(
        "vanishing-signal/time",
        f"exchanging the first of {times} inputs of {call.path} changes its last output by {heard} as exchanging the "
        "last one does",
        f"a factor of {'' if share > RESOLUTION else 'at most '}{gain:.3g} a time step",
        where=recurrence.where,
        fix="keep the state by default: an LSTM's forget-gate bias of 1 or more, orthogonal recurrent weights of gain "
        "1, decays near 1 (0.99 a step remembers 100 steps), or attention over all time steps",
        if_troubled=True,
    )


def only_the_end_is_used(evidence: Evidence, output: int, times: int, axis: int) -> bool:
    """The gradient at a layer's outputs (…, T, …) is all at their end, or there is none (the last state is used)."""
    found = differentiate(evidence.tape, gradients_at=[output]).slot_gradients.get(output)
    if found is None:
        return True
    axis = axis_of_time(found, times, axis)
    sizes = found.double().square().sum(dim=[dim for dim in range(found.dim()) if dim != axis])
    return bool(sizes[: len(sizes) // 2].sum() <= 1e-12 * sizes.sum())


def last_output(evidence: Evidence, call: ModuleCall, inputs: Tensor, axis: int) -> Tensor:
    found = evidence.flow.values([call.outputs[0]], {call.inputs[0]: inputs})[call.outputs[0]]
    times = inputs.shape[axis]
    return found.select(axis_of_time(found, times, axis), -1).to(torch.float64)


def axis_of_time(outputs: Tensor, times: int, axis: int) -> int:
    """PyTorch transposes outputs in place at the end of some layers: before that, time lies on the other axis."""
    return axis if outputs.shape[axis] == times else 1 - axis
