"""Are kernels right? Functions and operators that cannot be replayed are called again, here, and tried as black boxes.

They are called with what they were called with in the step: a kernel that is wrong in a layout which the training
never has is no reason why it does not train. What cannot be had in this process is said to be undecided.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from gradproof.check.findings import Fault, KernelCheck
from gradproof.check.kernel import find_call_faults
from gradproof.errors import UserError
from gradproof.experiments.verdict import Verdict, confirmed, excluded, undecided
from gradproof.instruments.evidence import Evidence
from gradproof.instruments.flow import place_of
from gradproof.tape.execute import CannotReplay, is_foreign
from gradproof.tape.operations import FunctionCall, Ref
from gradproof.tape.origin import CannotImport, bring_back, operator_called
from gradproof.tape.player import Player
from gradproof.tape.replay import replay_exactly

MOST = 1 << 22  # entries of one argument: a call that takes longer than the questions may
CALLS = 4  # different kernels of a step
IDS = {"gradient": "wrong-gradient/backward", "memory": "aliasing-or-inplace/never-written"}
BY_NAME = ("claim", "precision")  # of what it is called, which may be meant otherwise


def are_kernels_right(evidence: Evidence) -> Iterator[Verdict]:
    """Each kernel of the step once: the first that is wrong, or what each was found to be."""
    calls: dict[str, FunctionCall] = {}
    for call in (call for call in evidence.tape.functions if call.opaque):
        calls.setdefault(call.cls.__name__, call)
    right: dict[str, KernelCheck] = {}
    open_ = ""
    for name, call in list(calls.items())[:CALLS]:
        found = examine(evidence, call)
        if isinstance(found, str):
            open_ = open_ or f"{name}: {found}; gradproof check FILE.py:NAME --kernel tries it by hand"
        elif found.faults:
            yield verdict_on(call, found.faults[0])
            return
        else:
            right[name] = found
    if open_:
        yield undecided("wrong-gradient", open_)
    elif right:
        tried = dict.fromkeys(test for found in right.values() for test in found.tried)
        said = f"{', '.join(right)}, called again as in the step: nothing wrong ({', '.join(tried)})"
        yield excluded("wrong-gradient/kernel", said)


def verdict_on(call: FunctionCall, fault: Fault) -> Verdict:
    return confirmed(
        IDS.get(fault.kind, "wrong-gradient/kernel"),
        *filter(None, (fault.what, fault.evidence)),
        where=place_of(call.module, call.line),
        confidence="likely" if fault.kind in ("gradient", *BY_NAME) else "proven",
        if_troubled=fault.kind in BY_NAME,
        fix="correct the kernel and try it by itself: gradproof.check_kernel(kernel, *inputs)",
        lasting=False,
    )


def examine(evidence: Evidence, call: FunctionCall) -> KernelCheck | str:
    """What was found about the kernel of a call, or why it cannot be called here."""
    try:
        kernel = kernel_of(call)
        arguments = arguments_of(evidence, call)
        return find_call_faults(kernel, *arguments, name=call.cls.__name__)
    except (CannotImport, CannotReplay, UserError) as error:
        return str(error)


def kernel_of(call: FunctionCall) -> Any:
    """What was called: a class with `apply`, or an operator."""
    if not is_foreign(call.cls):
        return getattr(call.cls, "func", call.cls)
    found = bring_back(getattr(call.cls, "origin", None))
    return operator_called(call.cls.__name__) if getattr(call.cls, "namespace", "") else found


def arguments_of(evidence: Evidence, call: FunctionCall) -> list[Any]:
    """The arguments of the call, as they were: values, dtypes and strides."""
    values: dict[int, Tensor] = {}

    def look(player: Player) -> None:
        values.update({slot: player.value(slot).detach().clone() for slot in call.inputs})

    replay_exactly(evidence.tape, until=call.first + 1, at={call.first: [look]}, compare=False)
    for value in call.args:
        if is_foreign(value):
            raise CannotReplay(f"its argument {value!r} is an object of the training's own")
    arguments = [values[a.slot].to(call.dtypes[a.slot]) if isinstance(a, Ref) else a for a in call.args]
    if any(isinstance(a, Tensor) and a.numel() > MOST for a in arguments):
        raise CannotReplay("its arguments are too large to try it many times")
    return arguments
