"""The update, replayed: who holds each parameter, who stepped, by which operations, and how much the decay took."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradproof.instruments.evidence import Evidence
from gradproof.tape.operations import Operation, Tape

BY_HAND = "UpdatesByHand"  # what stands for the optimizer of a script that changes its parameters itself
WRAPPERS = ("_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


@dataclass(frozen=True)
class Update:
    """The operations between the gradients and the end of the step, by the memory that they write and read."""

    tape: Tape
    operations: list[Operation]
    parameters: dict[int, int]  # memory of a parameter -> its slot
    gradients: dict[int, int]  # memory of a gradient -> its parameter

    def storage(self, slot: int) -> int:
        """The memory of a slot; of one without, something of its own."""
        return storage_of(self.tape, slot)

    @property
    def line(self) -> str:
        """Where parameters get their new values."""
        writes = (op for op in self.operations if any(self.storage(s) in self.parameters for s in op.writes))
        return next((line_of(op) for op in writes if op.line is not None), "")


def read_update(tape: Tape) -> Update:
    operations = [op for op in tape.operations if op.phase == "optimizer"]
    parameters = {storage_of(tape, slot.index): slot.index for slot in tape.parameters}
    gradients = {storage_of(tape, grad): parameter for parameter, (_, grad) in tape.final_gradients.items()}
    return Update(tape, operations, parameters, gradients)


def storage_of(tape: Tape, slot: int) -> int:
    found = tape.slots[slot].storage
    return found if found >= 0 else -2 - slot


def line_of(op: Operation) -> str:
    return f"{op.line.file.rsplit('/', 1)[-1]}:{op.line.number}" if op.line is not None else ""


@dataclass(frozen=True)
class Shrinkage:
    """A matrix that the update multiplies with a number below one."""

    share: float  # that this takes off
    operation: Operation
    parameter: int  # its slot


def shrinkage(evidence: Evidence) -> list[Shrinkage]:
    """Of each matrix that is multiplied so, what that takes off; the smallest first."""
    update, found = read_update(evidence.tape), []
    stepped = {
        update.storage(slot): slot for slot in evidence.tape.stepped if len(evidence.slot(slot).shape) >= 2
    }
    for op in update.operations:
        factor = op.args[1] if op.name in ("mul_", "_foreach_mul_") and len(op.args) > 1 else None
        if isinstance(factor, float) and 0 < factor < 1:
            written = [update.storage(slot) for slot in op.writes]
            found += [Shrinkage(1 - factor, op, stepped[memory]) for memory in written if memory in stepped]
    return sorted(found, key=lambda each: each.share)


def outweighs(evidence: Evidence, each: Shrinkage) -> float:
    """How many times as long as the rest of the update what is taken off is."""
    change = evidence.updates.get(each.parameter)
    if change is None:
        return 0.0
    taken = each.share * evidence.tape.leaf_value(each.parameter).double()
    return float(taken.norm() / (change.double() + taken).norm().clamp_min(1e-300))


# who --------------------------------------------------------------------------------------------------------


def named_parameters(evidence: Evidence) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for prefix, root in evidence.models.items():
        for name, parameter in root.named_parameters():
            clean = ".".join(part for part in name.split(".") if part not in WRAPPERS)
            found[f"{prefix}.{clean}" if prefix else clean] = parameter
    if is_by_hand(evidence):
        for slot, tensor in evidence.specimen.skeletons.by_slot().items():
            if evidence.slot(slot).kind == "parameter":
                found.setdefault(evidence.slot(slot).name, tensor)
    return found


def is_by_hand(evidence: Evidence) -> bool:
    return any(record.kind == BY_HAND for record in evidence.specimen.optimizer_records)


def groups_of(evidence: Evidence) -> list[dict[str, Any]]:
    """All parameter groups of all optimizers."""
    return [group for optimizer in evidence.optimizers for group in optimizer.param_groups]


def held(evidence: Evidence) -> list[Tensor]:
    """What optimizers hold."""
    return [parameter for group in groups_of(evidence) for parameter in group["params"]]


def ids_held(*optimizers: torch.optim.Optimizer) -> set[int]:
    """The identities of the tensors that some optimizers hold."""
    return {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}


def at_work(evidence: Evidence) -> list[torch.optim.Optimizer]:
    """The optimizers that stepped on this tape."""
    named = named_parameters(evidence)
    stepped = {id(named[name]) for s in evidence.tape.stepped if (name := evidence.slot(s).name) in named}
    return [optimizer for optimizer in evidence.optimizers if ids_held(optimizer) & stepped]


def doubles(evidence: Evidence) -> list[torch.optim.Optimizer]:
    """Optimizers that were made later and hold tensors of an earlier one."""
    made = evidence.optimizers  # in the order in which they were made
    return [each for place, each in enumerate(made) if ids_held(each) & ids_held(*made[:place])]


def line_of_optimizer(evidence: Evidence) -> str:
    """Where the optimizer was made; of several, one that holds what another holds already, or one that stepped."""
    ordered = (*doubles(evidence), *at_work(evidence), *evidence.optimizers)
    return next((o.line for o in ordered if o.line), "")


def has_gradient(parameter: Tensor) -> bool:
    gradient = parameter.grad
    return gradient is not None and (gradient.is_sparse or bool((gradient != 0).any()))


def is_copy(evidence: Evidence, named: dict[str, Tensor], name: str) -> bool:
    """A teacher or target network: another part with the same names and shapes is trained, and this one follows it."""
    part, known = name.partition(".")[0], set(map(id, held(evidence)))
    mine = shapes_of(named, part)
    others = {other.partition(".")[0] for other, parameter in named.items() if id(parameter) in known}
    return len(mine) >= 2 and any(other != part and shapes_of(named, other) == mine for other in others)


def shapes_of(named: dict[str, Tensor], part: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes below a part with layers of its own; empty for a single layer."""
    found = {n[len(part) + 1 :]: tuple(p.shape) for n, p in named.items() if n.startswith(f"{part}.")}
    return found if any("." in name for name in found) else {}


def shown(names: list[str]) -> str:
    """
    >>> shown(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
