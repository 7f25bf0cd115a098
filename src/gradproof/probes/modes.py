"""Sees in which mode dropout and BatchNorm run while gradients are off: what a validation looks like from inside.

Global module hooks are there only inside `no_grad` and `inference_mode` blocks: training itself pays nothing.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm

from gradproof.probes.aside import is_recorded
from gradproof.probes.copies import line_outside_forward, look_at_copy, signature
from gradproof.probes.guard import quietly, raised_by_signal
from gradproof.probes.names import line_of, user_line
from gradproof.probes.session import Session
from gradproof.tape.frames import locals_of
from gradproof.tape.living import Living
from gradproof.tape.modes import unseen_by_modes

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

    @functools.wraps(original)
    def eval(self: nn.Module) -> nn.Module:
        session.facts["eval_line"] = user_line()
        return original(self)

    nn.Module.eval = eval  # type: ignore[method-assign,assignment]
    stack.callback(setattr, nn.Module, "eval", original)


def without_gradient(session: Session, stack: ExitStack, chosen: Callable[[Any], bool]) -> None:
    """Listens to mode-dependent modules, and to functional dropout, inside blocks without gradient."""
    begin, end = _listening(session)
    depth = 0
    stack.callback(end)

    def enter(original: Callable) -> Callable:
        @functools.wraps(original)
        def __enter__(self: Any) -> Any:
            # before and, on leaving, after the original: a signal must not find gradients off for good
            nonlocal depth
            try:
                if torch.is_grad_enabled():  # no block is open but one that a signal has cut short
                    depth = 0
                    end()
                depth += 1
                if depth == 1 and session.alive and not session.compiled and session.names.roots:
                    begin()
            except Exception as error:
                if raised_by_signal(error):
                    raise
                session.fail(error)
            return original(self)

        return __enter__

    def leave(original: Callable) -> Callable:
        @functools.wraps(original)
        def __exit__(self: Any, *error: Any) -> Any:
            nonlocal depth
            result = original(self, *error)
            depth = max(0, depth - 1)
            if depth == 0:
                end()
            return result

        return __exit__

    for block in (torch.no_grad, torch.inference_mode):
        for name, wrapper in (("__enter__", enter), ("__exit__", leave)):
            own = getattr(block, name)
            setattr(block, name, wrapper(own))
            stack.callback(setattr, block, name, own)


def _listening(session: Session) -> tuple[Callable[[], None], Callable[[], None]]:
    """How to begin it, and how to end it: all of it, also where a signal cut the beginning short."""
    seen = session.facts.setdefault("modes", {"train": [], "eval": [], "functional": {}})
    functional, attention = nn.functional.dropout, nn.functional.scaled_dot_product_attention
    running: list[nn.Module] = []  # the outermost of those that are called now

    def before(module: nn.Module, args: Any) -> None:
        if is_recorded():
            return
        if not running and not session.compiled:
            running.append(module)
            wrap_functions()
        if session.taping is not None and args and session.names.is_outermost(module):
            with quietly():
                _keep_evaluated(session, module, args[0])
        if not module.training and not torch.is_grad_enabled() and module._forward_pre_hooks:
            with quietly():
                _look_at_spectral_norm(session, module)
        if len(module._modules) and session.names.of_module(module) is None and not torch.is_grad_enabled():
            with quietly():
                _note_copy(session, module)
        if len(module._modules) and not module.training and not torch.is_grad_enabled():
            with quietly():
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

    def after(module: nn.Module, args: Any, result: Any) -> None:
        if running and running[0] is module:
            unwrap_functions()

    def note(frame: Any, owner: Any, p: float, **more: bool) -> None:
        """Of a module in eval mode: something drops there all the same."""
        if isinstance(owner, nn.Module) and not owner.training and not isinstance(owner, DROPOUTS):
            seen["functional"][line_of(frame)] = {
                "p": p,
                "module": session.names.of_module(owner) or "",
                **more,
            }

    @functools.wraps(functional)
    def dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        if training and p > 0 and not session.compiled:
            frame = sys._getframe(1)
            owner = _first_argument(frame)
            made = isinstance(owner, DROPOUTS) and session.names.of_module(owner) is None
            if made:  # by its forward, or kept where eval() does not find it: who calls it?
                frame, owner = _caller_of(frame, owner)
            note(frame, owner, p, made=made)
        return functional(input, p, training, inplace)

    @functools.wraps(attention)
    def attend(*args: Any, **named: Any) -> Any:
        p = named.get("dropout_p", args[4] if len(args) > 4 else 0.0)
        if isinstance(p, (int, float)) and p > 0:
            frame = sys._getframe(1)
            note(frame, _first_argument(frame), p, made=False, attention=True)
        return attention(*args, **named)

    def wrap_functions() -> None:
        """Only while a module runs: whoever scripts a model in between must find PyTorch's own functions."""
        nonlocal functional, attention
        if nn.functional.dropout is not dropout:
            functional, nn.functional.dropout = nn.functional.dropout, dropout
        own = nn.functional.scaled_dot_product_attention
        if own is not attend:
            attention, nn.functional.scaled_dot_product_attention = own, attend

    def unwrap_functions() -> None:
        running.clear()
        if nn.functional.dropout is dropout:
            nn.functional.dropout = functional
        if nn.functional.scaled_dot_product_attention is attend:
            nn.functional.scaled_dot_product_attention = attention

    def begin() -> None:
        nn.modules.module.register_module_forward_pre_hook(before)
        nn.modules.module.register_module_forward_hook(after, always_call=True)

    def end() -> None:
        known = nn.modules.module
        for hooks in (known._global_forward_pre_hooks, known._global_forward_hooks):
            for key in [key for key, hook in hooks.items() if hook in (before, after)]:
                hooks.pop(key, None)
                known._global_forward_hooks_always_called.pop(key, None)
        unwrap_functions()

    return begin, end


def _look_at_spectral_norm(session: Session, module: nn.Module) -> None:
    """At the first evaluation of a module: the largest stretch that its weight is divided by, against what it is.

    Its two vectors begin at random, and only passes in train mode turn them.
    """
    norm = next((h for h in module._forward_pre_hooks.values() if isinstance(h, SpectralNorm)), None)
    known = session.facts.setdefault("_spectral_norms", Living())
    if norm is None or module in known or len(known) >= MOST_COPIES:
        return
    known[module] = True
    with unseen_by_modes(), torch.no_grad():
        weight, u, v = (getattr(module, f"{norm.name}_{part}").detach() for part in ("orig", "u", "v"))
        if weight.numel() > MOST_NUMBERS or weight.device.type != "cpu":
            return  # a GPU would be waited for, and a graph that is being captured would be lost
        matrix = norm.reshape_weight_to_matrix(weight).double()
        used = float((u.double() @ matrix @ v.double()).abs())
        share = used / max(float(torch.linalg.matrix_norm(matrix, 2)), 1e-300)
    first = session.facts.setdefault("spectral_norm", {"share": 1.0})
    if share < first["share"]:
        name = session.names.of_module(module) or type(module).__name__
        first.update(share=share, module=name, line=line_outside_forward(), step=session.step)


def _first_argument(frame: Any) -> Any:
    """What a method calls `self`, whatever its name."""
    names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
    return locals_of(frame).get(names[0]) if names else None


def _caller_of(frame: Any, module: nn.Module) -> tuple[Any, Any]:
    """The frame and the self of the method that called a module, whose own frames and PyTorch's lie in between."""
    while frame is not None and (
        frame.f_code.co_filename == nn.modules.module.__file__ or _first_argument(frame) is module
    ):
        frame = frame.f_back
    return frame, None if frame is None else _first_argument(frame)


def _note_copy(session: Session, module: nn.Module) -> None:
    """A model that is no part of what trains, called without gradient: by the shapes of its parameters, and where."""
    known = session.facts.setdefault("_foreign", Living())
    if module not in known:
        if len(known) >= MOST_COPIES:
            return
        several = len(list(module.parameters())) > 1
        known[module] = signature(module) if several else ""
    key = known[module]
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
        with unseen_by_modes():  # no part of the step that is taped
            rows.append(batch.detach()[: MOST_SAMPLES - held].clone())
