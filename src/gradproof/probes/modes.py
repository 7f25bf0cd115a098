"""Sees in which mode dropout and BatchNorm run while gradients are off: what a validation looks like from inside.

A global module hook is there only inside `no_grad` and `inference_mode` blocks: training itself pays nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from gradproof.probes.copies import line_outside_forward, look_at_copy, signature
from gradproof.probes.names import line_of, user_line
from gradproof.probes.session import Session
from gradproof.tape.frames import locals_of

DROPOUTS = (nn.modules.dropout._DropoutNd,)
BATCH_NORMS = (nn.modules.batchnorm._BatchNorm,)
MOST_EVALUATIONS = 4  # places of the script that evaluate, whose first samples are kept
MOST_SAMPLES = 500
MOST_NUMBERS = 4_000_000
MOST_COPIES = 100  # modules outside of what trains
MOST_STEPS = 2000  # step numbers that are kept of each kind


def evals(session: Session, stack: ExitStack, chosen: Callable[[Any], bool]) -> None:
    """Where eval() was last called: the line that a forgotten train() has to answer."""
    original = nn.Module.eval

    def eval(self: nn.Module) -> nn.Module:
        session.facts["eval_line"] = user_line()
        return original(self)

    nn.Module.eval = eval  # type: ignore[method-assign,assignment]
    stack.callback(setattr, nn.Module, "eval", original)


def without_gradient(session: Session, stack: ExitStack, chosen: Callable[[Any], bool]) -> None:
    """Listens to mode-dependent modules, and to functional dropout, inside blocks without gradient."""
    seen = session.facts.setdefault("modes", {"train": [], "eval": [], "functional": {}})
    open_blocks: list[Any] = []  # ends of the listening, one for each open block

    def enter(original: Callable) -> Callable:
        def __enter__(self: Any) -> Any:
            result = original(self)
            try:
                first = (
                    not open_blocks and session.alive and not session.compiled and bool(session.names.roots)
                )
                open_blocks.append(_listen(session, seen) if first else None)
            except Exception as error:
                session.fail(error)
            return result

        return __enter__

    def leave(original: Callable) -> Callable:
        def __exit__(self: Any, *error: Any) -> Any:
            end = open_blocks.pop() if open_blocks else None
            if end is not None:
                end()
            return original(self, *error)

        return __exit__

    for block in (torch.no_grad, torch.inference_mode):
        for name, wrapper in (("__enter__", enter), ("__exit__", leave)):
            own = getattr(block, name)
            setattr(block, name, wrapper(own))
            stack.callback(setattr, block, name, own)


def _listen(session: Session, seen: dict[str, Any]) -> Callable[[], None]:
    """From here until the returned function is called."""

    def before(module: nn.Module, args: Any) -> None:
        if session.taping is not None and args and session.names.is_outermost(module):
            with suppress(Exception):
                _keep_evaluated(session, module, args[0])
        if len(module._modules) and session.names.of_module(module) is None and not torch.is_grad_enabled():
            with suppress(Exception):
                _note_copy(session, module)
        if len(module._modules) and not module.training and not torch.is_grad_enabled():
            with suppress(Exception):
                look_at_copy(session, module)
        if (isinstance(module, DROPOUTS) and module.p > 0) or isinstance(module, BATCH_NORMS):
            name = session.names.of_module(module)
            if name is None or torch.is_grad_enabled():
                return
            if isinstance(module, BATCH_NORMS) and not module.track_running_stats:
                return
            steps = seen["train" if module.training else "eval"]
            if (not steps or steps[-1] != session.step) and len(steps) < MOST_STEPS:
                steps.append(session.step)
            if module.training and "module" not in seen:
                seen.update(module=name, kind=type(module).__name__, line=line_outside_forward())

    functional = nn.functional.dropout

    def dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        if training and p > 0:
            frame = sys._getframe(1)
            owner = locals_of(frame).get("self")
            made = False
            if isinstance(owner, DROPOUTS) and session.names.of_module(owner) is None:
                made = True  # by its forward, or kept where eval() does not find it: who calls it?
                frame, owner = _caller_of(frame, owner)
            if isinstance(owner, nn.Module) and not owner.training and not isinstance(owner, DROPOUTS):
                facts = {"p": p, "module": session.names.of_module(owner) or "", "made": made}
                seen["functional"][line_of(frame)] = facts
        return functional(input, p, training, inplace)

    handle = nn.modules.module.register_module_forward_pre_hook(before)
    nn.functional.dropout = dropout

    def end() -> None:
        handle.remove()
        nn.functional.dropout = functional

    return end


def _caller_of(frame: Any, module: nn.Module) -> tuple[Any, Any]:
    """The frame and the self of the method that called a module, whose own frames and PyTorch's lie in between."""
    while frame is not None and locals_of(frame).get("self") is module:
        frame = frame.f_back
    return frame, None if frame is None else locals_of(frame).get("self")


def _note_copy(session: Session, module: nn.Module) -> None:
    """A model that is no part of what trains, called without gradient: by the shapes of its parameters, and where."""
    known = session.facts.setdefault("_foreign", {})
    if id(module) not in known:
        if len(known) >= MOST_COPIES:
            return
        several = len(list(module.parameters())) > 1
        known[id(module)] = (module, signature(module) if several else "")
    key = known[id(module)][1]
    seen = session.facts.setdefault("copies_called", {})
    if key in seen:
        facts = seen[key]
        facts["times"] += facts["step"] != session.step
        facts["step"] = session.step
    elif key:
        seen[key] = {"times": 1, "step": session.step, "line": line_outside_forward()}


def _keep_evaluated(session: Session, module: nn.Module, batch: Any) -> None:
    """Some samples that a model in eval mode is given, by the line that gives them: has it trained on those?"""
    kept = session.facts.setdefault("_evaluated", {})
    whole = isinstance(batch, Tensor) and batch.dim() >= 2 and type(batch) in (Tensor, nn.Parameter)
    if module.training or torch.is_grad_enabled() or not whole or len(kept) >= MOST_EVALUATIONS:
        return
    step, rows = kept.setdefault(line_outside_forward(), (session.step, []))
    held = sum(len(tensor) for tensor in rows)
    # of its first validation only: the next one has the same samples again
    if (
        step == session.step
        and held < MOST_SAMPLES
        and batch.numel() // max(1, len(batch)) * MOST_SAMPLES < MOST_NUMBERS
    ):
        with _disable_current_modes():  # no part of the step that is taped
            rows.append(batch.detach()[: MOST_SAMPLES - held].clone())
