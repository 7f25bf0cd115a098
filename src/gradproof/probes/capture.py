"""Makes a specimen of a step that has just been taped: what only the live training can tell is looked up here, once.

Everything is copied: a specimen holds nothing of the training alive.
"""

from __future__ import annotations

import gc
import linecache
import os
import platform
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gradproof.probes import optimizer as optim
from gradproof.probes.names import clean, find_variable, is_installed, join, user_frames
from gradproof.tape.frames import locals_of
from gradproof.tape.living import Living
from gradproof.tape.operations import Tape
from gradproof.tape.replica import Recording, files_of, line_that_sets
from gradproof.tape.roles import find_unknown_parameters, reaches_unread
from gradproof.tape.shards import GATHERED, PARTS
from gradproof.tape.specimen import Facts, Specimen
from gradproof.tape.state import State

DEEPEST = 16  # autograd nodes between a tensor that is kept and the Parameter that it was made of
LARGEST_SOURCE = 1 << 20  # bytes of one file


def capture(
    state: State,
    step: int,
    models: Mapping[str, nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    losses: Iterable[float] = (),
    facts: Mapping[str, Any] | None = None,
    **details: Any,
) -> Specimen:
    """The specimen of a step whose recorder has stopped; `facts` are what the session's listeners gathered."""
    known = facts or {}
    tape = state.tape
    whole = {id(p): name for name, p in named_parameters(models)} if state.sharded else {}

    def slot_of(tensor: Tensor) -> int | None:
        slot = state.slot_of.get(tensor._cdata)
        if slot is None and hasattr(tensor, "to_local"):  # its part, or what was gathered, stands for it
            return tape.leaf_named.get(whole.get(id(tensor)) or state.name_of_parameter(tensor) or "")
        return slot if slot is not None and tape.slots[slot].made_by is None else None

    recording = Recording(slot_of)
    roots = {name: recording.module(model) for name, model in models.items()}
    made: Living[str] = known.get("_optimizers_made", Living())
    cleared = known.get("_cleared", ())
    order = list(map(id, made))
    in_order = sorted(optimizers, key=lambda o: order.index(id(o)) if o in made else len(order))
    records = [recording.optimizer(o, made.get(o, ""), o in cleared, tape.stepped) for o in in_order]
    return Specimen(
        step=step,
        tape=tape,
        tensors=recording.tensors,
        modules=recording.modules,
        roots=roots,
        optimizer_records=records,
        losses=list(losses),
        facts=replace(
            facts_of(known, tape, models, optimizers),
            waiting=waiting_for_a_turn(tape, slot_of, optimizers),
            sharded=(PARTS if state.uses_parts else GATHERED) if state.sharded else "",
        ),
        sources=sources_of(tape, recording),
        environment=environment(),
        **details,
    )


def waiting_for_a_turn(
    tape: Tape, slot_of: Callable[[Tensor], int | None], stepped: Sequence[torch.optim.Optimizer]
) -> list[str]:
    """What optimizers hold that were made and have not stepped so far: a critic is often trained some steps ahead."""
    made = [o for o in list(optim.MADE_WITH) if not any(o is other for other in stepped)]
    slots = (slot_of(p) for o in made for g in o.param_groups for p in g["params"])
    return [tape.slots[slot].name for slot in slots if slot is not None]


def facts_of(
    known: Mapping[str, Any],
    tape: Tape,
    models: Mapping[str, nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
) -> Facts:
    named = dict(named_parameters(models))
    ids = {id(parameter): name for name, parameter in named.items()}
    unknown = find_unknown_parameters(tape, set(named))
    held = {id(p) for o in optimizers for g in o.param_groups for p in g["params"]}
    return Facts(
        lines={what: list(sites) for what, sites in known.get("lines", {}).items()},
        eval_line=known.get("eval_line", ""),
        loads=list(known.get("loads", ())),
        optimizer_states=dict(known.get("optimizer_states", {})),
        initialised={
            ids[id(parameter)]: line
            for parameter, line in known.get("_initialised", {}).items()
            if id(parameter) in ids
        },
        frozen_by_default={
            ids[id(weight)]: {"line": entry["line"], "given": entry["given"]}
            for entry in known.get("_frozen_by_default", ())
            if (weight := entry["weight"]()) is not None and id(weight) in ids
        },
        evaluated={line: list(rows) for line, (_, rows) in known.get("_evaluated", {}).items()},
        fetched=[dict(vars(fetched)) for fetched in known.get("_fetched", {}).values()],
        opened=dict(known.get("_opened", {})),
        came_back=list(known.get("_came_back", ())),
        samplers=list(known.get("_samplers", ())),
        orders=list(known.get("_orders", ())),
        ordered_targets=list(known.get("_ordered_targets", ())),
        tables=list(known.get("_tables", ())),
        stepped_tables=list(known.get("_stepped_tables", ())),
        holders=list(plain_holders(models)),
        strangers=list(find_strangers(set(ids), held)) if unknown else [],
        converted=list(converted_parameters(models, set(ids) | held))
        if reaches_unread(tape, set(named))
        else [],
        arrays_changed=bool(known.get("_arrays_changed")),
        own_updates=dict(known.get("_own_updates", {})),
    )


# what is seen once is handed over once: with the next landmark, which is asked everything; what comes back, at once
WITH_A_LANDMARK = ("_samplers", "_orders", "_ordered_targets", "_tables", "_stepped_tables")
WITH_ANY_STEP = ("_came_back",)


def handed_over(facts: dict[str, Any], landmark: bool) -> dict[str, Any]:
    """The facts that go with a specimen; what goes once is taken away from the others."""
    gone = (*WITH_ANY_STEP, *(WITH_A_LANDMARK if landmark else ()))
    kept_back = () if landmark else WITH_A_LANDMARK
    found = {name: value for name, value in facts.items() if name not in kept_back}
    for name in gone:
        if isinstance(facts.get(name), list):
            found[name] = list(facts[name])
            facts[name].clear()
    return found


def named_parameters(models: Mapping[str, nn.Module]) -> Iterator[tuple[str, Tensor]]:
    for prefix, root in models.items():
        for name, parameter in root.named_parameters():
            yield join(prefix, clean(name)), parameter


def plain_holders(models: Mapping[str, nn.Module]) -> Iterator[dict[str, Any]]:
    """Lists and dicts of modules that are attributes of a module: path, kind, and where the class sets them."""
    for prefix, root in models.items():
        for path, module in root.named_modules():
            for name, value in list(vars(module).items()):
                if name.startswith("_") or not isinstance(value, (list, tuple, dict)):
                    continue
                members = list(value.values() if isinstance(value, dict) else value)[:64]
                if any(isinstance(member, (nn.Module, nn.Parameter)) for member in members):
                    whole = ".".join(part for part in (prefix, path, name) if part)
                    yield {
                        "path": whole,
                        "kind": type(value).__name__,
                        "line": line_that_sets(type(module), name),
                    }


def has_gradient(parameter: Tensor) -> bool:
    gradient = parameter.grad
    return gradient is not None and (gradient.is_sparse or bool((gradient != 0).any()))


def find_strangers(known: set[int], held: set[int]) -> Iterator[dict[str, Any]]:
    """Models with gradients whose parameters nobody knows or holds, as the script names them."""
    modules = [obj for obj in gc.get_objects() if issubclass(type(obj), nn.Module)]
    modules = [module for module in modules if "gradproof_skeleton" not in module.__dict__]
    inner = {id(child) for module in modules for child in module.__dict__.get("_modules", {}).values()}
    for module in modules:
        own = [p for p in module.parameters() if has_gradient(p)] if id(module) not in inner else []
        if own and not any(id(p) in known or id(p) in held for p in own):
            yield {
                "name": find_variable(module, user_frames()) or type(module).__name__,
                "training": module.training,
                "shapes": [tuple(p.shape) for p in own],
            }


def converted_parameters(models: Mapping[str, nn.Module], known: set[int]) -> Iterator[dict[str, Any]]:
    """Plain tensors that modules and functions keep, each made of one nn.Parameter with a gradient that nobody has."""
    owned = {
        id(p)
        for m in gc.get_objects()
        if issubclass(type(m), nn.Module)
        for p in m.__dict__.get("_parameters", {}).values()
    }
    for name, tensor, line in kept_tensors(models):
        parameter = only_parameter_behind(tensor)
        if parameter is None or id(parameter) in known | owned or not has_gradient(parameter):
            continue
        node = tensor.grad_fn
        yield {
            "name": name,
            "shape": list(tensor.shape),
            "how": node.name().partition("Backward")[0] if node is not None else "",
            "line": line,
            "size": float(parameter.detach().double().norm()),
            "gradient": float(parameter.grad.norm()) if parameter.grad is not None else 0.0,
        }


def kept_tensors(models: Mapping[str, nn.Module]) -> Iterator[tuple[str, Tensor, str]]:
    """(name, tensor, line) of tensors with a history that modules keep as attributes, and scripts as variables."""
    for prefix, root in models.items():
        for path, module in root.named_modules():
            for name, tensor in tensors_among(vars(module)):
                whole = ".".join(part for part in (prefix, path, name) if part)
                yield whole, tensor, line_that_sets(type(module), name)
    for frame in user_frames():
        for name, tensor in (*tensors_among(locals_of(frame)), *tensors_among(frame.f_globals)):
            yield name, tensor, line_that_wraps(frame.f_code.co_filename, name)


def tensors_among(values: dict[str, Any]) -> list[tuple[str, Tensor]]:
    """Tensors that carry history, and those in lists and dicts, each with the name that holds it."""
    found = []
    for name, value in list(values.items()):
        if name.startswith("__") or name in ("_parameters", "_buffers", "_modules"):
            continue
        if isinstance(value, dict):
            members = list(value.values())
        else:
            members = list(value[:64]) if isinstance(value, (list, tuple)) else [value]
        found += [(name, m) for m in members[:64] if isinstance(m, Tensor) and m.grad_fn is not None]
    return found


def only_parameter_behind(tensor: Tensor) -> nn.Parameter | None:
    """The one nn.Parameter that a short history leads to; None where it leads to more, or to anything else."""
    leaves: dict[int, Tensor] = {}
    waiting: list[Any] = [tensor.grad_fn]
    nodes = 0
    while waiting:
        node = waiting.pop()
        nodes += 1
        if nodes > DEEPEST:
            return None
        if hasattr(node, "variable"):
            leaves[id(node.variable)] = node.variable
        waiting += [child for child, _ in node.next_functions if child is not None]
    (leaf,) = leaves.values() if len(leaves) == 1 else (None,)
    return leaf if isinstance(leaf, nn.Parameter) else None


def line_that_wraps(file: str, name: str) -> str:
    """The line of a script that gives a variable a Parameter."""
    made = re.compile(rf"\b{re.escape(name)}\b[^=]*=.*Parameter\(")
    number = next((i for i, text in enumerate(linecache.getlines(file), 1) if made.search(text)), None)
    return f"{os.path.basename(file)}:{number}" if number is not None else ""


def sources_of(tape: Tape, recording: Recording) -> dict[str, str]:
    """The script's own files that lines of the step stand in; libraries are left where they are."""
    files = {operation.line.file for operation in tape.operations if operation.line is not None}
    files |= {call.line.file for call in tape.backwards if call.line is not None}
    found = {}
    for file in sorted(files | files_of(recording.modules)):
        text = "".join(linecache.getlines(file)) if not is_installed(file) else ""
        if 0 < len(text) <= LARGEST_SOURCE:
            found[file] = text
    return found


def environment() -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_initialized() else "cpu",
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul": torch.get_float32_matmul_precision(),
    }
