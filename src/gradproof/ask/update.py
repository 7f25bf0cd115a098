"""Is the update what the rule says? The optimizer's own step in float64, from its state and the gradients it saw."""

from __future__ import annotations

import inspect
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from gradproof.ask.answer import Answer, Row
from gradproof.ask.opened import Asked
from gradproof.ask.spots import below, relative
from gradproof.errors import UserError
from gradproof.instruments.arms import is_known
from gradproof.instruments.evidence import Evidence
from gradproof.instruments.update import at_work, is_by_hand, named_parameters

ALLOWED = 1e-3  # of a change: what float32 leaves of it where a weight is a thousand times larger
ONE_BY_ONE = {"foreach": False, "fused": None, "capturable": False}
HALF = (torch.float16, torch.bfloat16)
PART = 1 << 18  # entries: what a rule needs of so many stays in the processor's cache
BY_ENTRY = {
    "SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD",
}  # rules that look at no other entry of a parameter  # fmt: skip


def answer(asked: Asked) -> Answer:
    evidence = asked.evidence
    if not evidence.updates:
        raise UserError(
            f"step {evidence.step} changed no parameter: the record ends before the update, or none was made"
        )
    if is_by_hand(evidence):
        raise UserError("the script changes its parameters itself: ask is_the_update_the_textbooks instead")
    wanted = [slot for slot in evidence.updates if below(evidence.slot(slot).name, asked.of)]
    if not wanted:
        raise UserError(f"step {evidence.step} changed nothing called {asked.of!r}")
    rows, skipped = judged_by_rule(evidence, wanted)
    wrong = sum(row["verdict"] == "differs" for row in rows)
    rows.sort(key=lambda row: (row["verdict"] != "differs", -row["off"] if row["off"] is not None else 1.0))
    judged = [row for row in rows if row["off"] is not None]
    if not judged:
        sentence, sure = "No change could be compared with a rule.", "undecided"
    elif wrong:
        sentence = f"No: {wrong} of {len(judged)} changes are not what the rule makes of state and gradient."
        sure = "proven"
    else:
        sentence, sure = f"Yes: {len(judged)} changes are what the rule says.", "proven"
    settings = {
        f"{type(o).__name__} group {i}": {
            k: v for k, v in g.items() if isinstance(v, (int, float)) and v is not None
        }
        for o in at_work(evidence)
        for i, g in enumerate(o.param_groups[:3])
    }
    lines = [getattr(o, "line", "") for o in at_work(evidence)]
    return Answer(
        "update",
        sentence,
        sure,
        numbers=settings,
        place=next((line for line in lines if line), None),
        rows=tuple(rows),
        not_looked_at=tuple(skipped),
        ask_next=(
            "gradproof ask RUN what-if --change lr=0.1x",
            "gradproof ask RUN does_the_optimizer_do_what_was_meant",
        ),
    )


def judged_by_rule(evidence: Evidence, wanted: list[int]) -> tuple[list[Row], list[str]]:
    """The change of each slot beside what its optimizer's rule makes of it; and what was left out."""
    rows: dict[int, Row] = {}
    skipped = []
    slots = {evidence.slot(slot).name: slot for slot in wanted}
    slot_of = {id(p): slots[name] for name, p in named_parameters(evidence).items() if name in slots}
    for optimizer in at_work(evidence):
        if not is_known(optimizer):
            skipped.append(f"{type(optimizer).__name__} is none of PyTorch's own: its rule is not known")
            continue
        try:
            for group, parameter in [(g, p) for g in optimizer.param_groups for p in g["params"]]:
                slot = slot_of.get(id(parameter))
                if slot is not None and slot in evidence.aftermath.gradients:
                    right = step_in_float64(optimizer, group, parameter, evidence, slot)
                    rows[slot] = judge(evidence, slot, right)
        except (RuntimeError, TypeError, ValueError, KeyError) as error:
            skipped.append(f"{type(optimizer).__name__} could not be made again: {error}")
    return [rows.get(slot) or judge(evidence, slot, None) for slot in wanted], skipped


def step_in_float64(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor, evidence: Evidence, slot: int
) -> Tensor:
    """The change of one parameter: a rule looks at no other, and a large model does not fit twice."""
    weight = evidence.tape.leaf_value(slot).detach()
    gradient, state = evidence.aftermath.gradients[slot], optimizer.state.get(parameter, {})
    if type(optimizer).__name__ not in BY_ENTRY or weight.numel() <= PART or not weight.is_contiguous():
        return change_of(optimizer, group, weight, gradient, state)
    change = torch.empty(weight.shape, dtype=torch.float64, device=weight.device)
    for first in range(0, weight.numel(), PART):
        part = slice(first, first + PART)
        its_state = {k: v.reshape(-1)[part] if is_like(v, weight) else v for k, v in state.items()}
        its_weight, its_gradient, its_change = (t.reshape(-1)[part] for t in (weight, gradient, change))
        its_change.copy_(change_of(optimizer, group, its_weight, its_gradient, its_state))
    return change


def is_like(value: Any, weight: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == weight.shape


def change_of(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    weight: Tensor,
    gradient: Tensor,
    state: dict[str, Any],
) -> Tensor:
    copy = weight.to(torch.float64, copy=True).requires_grad_()
    copy.grad = gradient.double()
    alone = {**group, "params": [copy], **{k: v for k, v in ONE_BY_ONE.items() if k in group}}
    try:
        step_bare(type(optimizer), alone, copy, state_before(state, weight), optimizer.defaults)
    except AttributeError:  # one that keeps something of its own from when it was made
        make: Any = type(optimizer)
        made = make([alone])
        with torch.no_grad():
            copy.copy_(weight)
        made.state[copy] = state_before(state, weight)
        made.step()
    return copy.detach().sub_(weight)


def step_bare(
    kind: type[torch.optim.Optimizer],
    group: dict[str, Any],
    parameter: Tensor,
    state: dict[str, Any],
    defaults: dict[str, Any],
) -> None:
    """The rule alone: what PyTorch wraps around making an optimizer and its step imports its compiler, for seconds."""
    made = kind.__new__(kind)
    made.defaults, made.param_groups = dict(defaults), [group]
    made.state = defaultdict(dict, {parameter: state})
    with torch.no_grad():
        inspect.unwrap(kind.step)(made)


def state_before(state: dict[str, Any], parameter: Tensor) -> dict[str, Any]:
    """What the rule starts from, in float64; at the first step nothing, for its tensors are made in that very step."""
    kept = any(isinstance(value, Tensor) and value.dim() for value in state.values())
    if not kept and parameter.dim():
        return {}
    return {key: in_float64(value) for key, value in state.items()}


def in_float64(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return (
            torch.tensor(float(value))
            if isinstance(value, (int, float)) and not isinstance(value, bool)
            else value
        )
    return (
        value.detach().to(torch.float64, copy=True)
        if value.is_floating_point() and value.dim()
        else value.detach().clone()
    )


def judge(evidence: Evidence, slot: int, right: Tensor | None) -> Row:
    change, weight = evidence.updates[slot], evidence.tape.leaf_value(slot)
    row: Row = {"parameter": evidence.slot(slot).name, "change": length(change)}
    whole = length(weight)
    row["of_the_weight"] = relative(row["change"], whole)
    if right is None or right.shape != change.shape:
        return {**row, "rule": None, "off": None, "verdict": "not compared"}
    # a change is the difference of two rounded weights: what their last digit takes away is nobody's fault
    eps = torch.finfo(change.dtype).eps
    rounding = 2 * eps * whole + 1e-30
    size, apart = length(right), length(right.sub_(change))
    off = relative(max(0.0, apart - rounding), size)
    ok = off <= ALLOWED or (evidence.slot(slot).dtype in HALF and apart <= rounding)
    return {**row, "rule": size, "off": off, "verdict": "as the rule" if ok else "differs"}


def length(tensor: Tensor) -> float:
    """Its norm, summed up in float64."""
    real = tensor.abs() if tensor.is_complex() else tensor
    return float(torch.linalg.vector_norm(real, dtype=torch.float64))
