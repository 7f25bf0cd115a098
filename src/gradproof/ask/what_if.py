"""What if? Two trainings from one recorded step, on its batch: as it was, and with one thing changed."""

from __future__ import annotations

import math
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradproof.ask.answer import Answer, Row
from gradproof.ask.opened import Asked
from gradproof.ask.trial import SAME, try_patch
from gradproof.errors import UserError
from gradproof.instruments.arms import copied, is_known
from gradproof.instruments.evidence import Evidence
from gradproof.instruments.update import at_work
from gradproof.tape.replay import differentiate

MOST_STEPS = 500
EXAMINED = (
    "off"  # the two trainings are compared by their losses and what watching sees; `gradproof try` examines
)
DIFFERENT = 0.02  # of a loss
CHANGES = (
    "lr=3e-4, lr=0.1x, any setting of the optimizer (weight_decay=0, betas=0.9,0.99), clip=1, dtype=float64, "
    "input=0.1x"
)
CHANGE = re.compile(r"([A-Za-z_]\w*)=(\S+)")


@dataclass(frozen=True)
class Change:
    """`NAME=NUMBER`, `NAME=NUMBERx` (times what it was) or `NAME=WORD`."""

    name: str
    numbers: tuple[float, ...] = ()
    times: bool = False
    word: str = ""


def answer(asked: Asked) -> Answer:
    if asked.patch:
        return with_patch(asked)
    evidence = asked.evidence
    changes = [parse_change(text) for text in asked.change.split()]
    if not changes:
        raise UserError(
            f"what should be changed? --change takes {CHANGES}; --patch FILE a diff of the script"
        )
    optimizers = at_work(evidence)
    if not optimizers or not all(map(is_known, optimizers)):
        raise UserError("the optimizer is none of PyTorch's own, or needs a closure: it cannot be made again")
    if not 1 <= asked.steps <= MOST_STEPS:
        raise UserError(f"between 1 and {MOST_STEPS} steps can be trained, not {asked.steps}")
    own, changed = train(evidence, [], asked.steps), train(evidence, changes, asked.steps)
    before, after = settled(own), settled(changed)
    if math.isfinite(after) and (not math.isfinite(before) or after < before - DIFFERENT * abs(before)):
        word = "better"
    elif math.isfinite(before) and (not math.isfinite(after) or after > before + DIFFERENT * abs(before)):
        word = "worse"
    else:
        word = "no different"
    shown = sorted(
        {round(i * asked.steps / 8) for i in range(8)} | {asked.steps - 1} & set(range(asked.steps))
    )
    rows: list[Row] = [{"step": i, "as_it_was": own[i], "changed": changed[i]} for i in shown if i < len(own)]
    return Answer(
        "what-if",
        f"With {asked.change}, {asked.steps} steps on this batch end {word}: loss {after:.4g} instead of {before:.4g}.",
        "proven",
        numbers={"start": own[0], "as_it_was": before, "changed": after, "steps": asked.steps},
        rows=tuple(rows),
        not_looked_at=(
            "other batches: both train on the batch of this step alone, with its random numbers",
            "the optimizer's state: both begin with a fresh one",
        ),
        ask_next=(f"gradproof try RUN --patch fix.diff trains the script itself with {asked.change}",),
    )


def with_patch(asked: Asked) -> Answer:
    """The script itself from this step on, as it was and with a patch to it: what no recorded operation can show."""
    with tempfile.TemporaryDirectory(prefix="gradproof-what-if-") as folder:
        found = try_patch(
            asked.run, Path(asked.patch), Path(folder), asked.steps, begin=asked.step, examine=EXAMINED
        )
    curves = found.losses
    rows: list[Row] = [
        {"step": step, "as_it_was": was, "changed": now}
        for step, was, now in zip(curves["step"], curves["as_it_was"], curves["patched"], strict=True)
    ]
    return Answer(
        "what-if",
        f"With {Path(asked.patch).name}, {found.steps} steps of the script from here end "
        f"{'no different' if found.verdict == SAME else found.verdict}: {found.sentence}.",
        "proven",
        step=asked.step,
        numbers={"as_it_was": found.before, "changed": found.after, "steps": found.steps},
        rows=tuple(rows),
        not_looked_at=found.not_looked_at,
        ask_next=(f"gradproof try RUN --patch {asked.patch} --from {asked.step} examines both",),
    )


def parse_change(text: str) -> Change:
    """
    >>> parse_change("lr=0.1x")
    Change(name='lr', numbers=(0.1,), times=True, word='')
    """
    found = CHANGE.fullmatch(text)
    if found is None:
        raise UserError(f"a change is NAME=VALUE, not {text!r}: {CHANGES}")
    name, value = found.groups()
    times = value.endswith("x")
    try:
        return Change(name, tuple(float(part) for part in value.removesuffix("x").split(",")), times)
    except ValueError:
        return Change(name, word=value)


def train(evidence: Evidence, changes: list[Change], steps: int) -> list[float]:
    """The losses of some steps on this batch alone, from the weights before the step."""
    weights: dict[int, Tensor] = {}
    optimizers = [copied(optimizer, evidence, 1.0, weights) for optimizer in at_work(evidence)]
    clip, dtype, inputs = math.inf, None, {}
    for change in changes:
        if change.name == "clip" and change.numbers:
            clip = change.numbers[0]
        elif change.name == "dtype" and change.word in ("float64", "float32"):
            dtype = getattr(torch, change.word)
        elif change.name == "input" and change.times:
            inputs = scaled_inputs(evidence, change.numbers[0])
        else:
            change_setting(optimizers, change)
    losses = []
    for _ in range(steps):
        found = differentiate(evidence.tape, dtype=dtype, leaves={**inputs, **weights})
        losses.append(float(sum(loss.detach().double().sum() for loss in found.losses)))
        for slot, weight in weights.items():
            gradient = found.gradients.get(slot)
            weight.grad = None if gradient is None else gradient.to(weight.dtype)
        if math.isfinite(clip):
            torch.nn.utils.clip_grad_norm_(list(weights.values()), clip)
        for optimizer in optimizers:
            optimizer.step()
    return losses


def change_setting(optimizers: list[torch.optim.Optimizer], change: Change) -> None:
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    mine = [group for group in groups if change.name in group]
    if not mine or not change.numbers:
        known = sorted(
            {key for group in groups for key, value in group.items() if isinstance(value, (int, float))}
        )
        raise UserError(
            f"{change.name} cannot be changed; the optimizer has {', '.join(known)}; also {CHANGES}"
        )
    for group in mine:
        old: Any = group[change.name]
        if isinstance(old, (tuple, list)):
            new: Any = tuple(change.numbers)
            if len(new) != len(old):
                raise UserError(f"{change.name} has {len(old)} numbers, not {len(new)}")
        else:
            new = change.numbers[0] * float(old) if change.times else change.numbers[0]
        group[change.name] = bool(new) if isinstance(old, bool) else new


def scaled_inputs(evidence: Evidence, factor: float) -> dict[int, Tensor]:
    """The leaves behind the batch's real numbers, so many times larger."""
    leaves = {leaf for slot in evidence.flow.inputs for leaf in evidence.flow.ancestors(slot)}
    tape = evidence.tape
    found = {
        slot.index: factor * tape.leaf_value(slot.index)
        for slot in tape.inputs
        if slot.index in leaves and slot.dtype.is_floating_point and not slot.is_sparse
    }
    if not found:
        raise UserError("the batch has no real numbers that could be scaled")
    return found


def settled(losses: list[float]) -> float:
    """The middle of the last five; infinite where they ran away."""
    last = sorted(losses[-5:])
    return last[len(last) // 2] if math.isfinite(losses[-1]) else math.inf
