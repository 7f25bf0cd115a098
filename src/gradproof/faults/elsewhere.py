"""Runs a script that knows nothing of it on another device, or in other numbers.

The script's text stays as it is. New tensors are made on the device, forward passes are under autocast (with a
GradScaler for fp16), or the models are compiled once an optimizer holds their parameters. What cannot be moved like
this is said by `why_not`; what fails on the way fails as the script would.

    python -m gradproof.faults.elsewhere cuda bf16 run --out run train.py
"""

from __future__ import annotations

import functools
import gc
import runpy
import sys
from typing import Any

PRECISIONS = ("bf16", "fp16", "compiled")

# what a script says, in what case it cannot be moved (a device, a precision, or any), and why not
NOT_MOVED = (
    ("mp.spawn", "any", "it starts processes, which a move from outside does not reach"),
    ("autocast(", "cuda", "its autocast and its GradScaler name the CPU"),
    ("autocast(", "bf16", "it chooses its precision itself"),
    ("autocast(", "fp16", "it chooses its precision itself"),
    ("LBFGS(", "fp16", "a GradScaler takes no closure"),
    ("pack_padded_sequence(", "cuda", "the lengths of its sequences have to be on the CPU"),
    ("utils import clip_grad", "fp16", "its clip cannot be told to unscale first"),
)


def why_not(source: str, device: str, precision: str) -> str:
    """Why a script cannot be run there; empty if it can.

    >>> why_not("torch.optim.LBFGS(p)", "cuda", "fp16")
    'a GradScaler takes no closure'
    """
    cases = {device, precision, "any"} if (device, precision) != ("cpu", "") else set()
    return next((reason for text, case, reason in NOT_MOVED if case in cases and text in source), "")


def move_to(device: str) -> None:
    """From here on, tensors and generators are made on this device, and arrays are taken from it and put there.

    What gradproof itself makes stays where it wants it: this is about the script. `torch.set_default_device` would
    move both.
    """
    import numpy
    import torch
    from torch.utils._device import _device_constructors

    for make in _device_constructors():
        name = str(getattr(make, "__name__", ""))
        if getattr(torch, name, None) is make:
            setattr(torch, name, _made_on(device, make))
    generator, from_numpy, to_numpy = torch.Generator, torch.from_numpy, torch.Tensor.numpy

    class OnDevice(type):
        def __call__(cls, device: Any = device) -> Any:
            return generator(device)

        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, generator)

    def numpy_of(tensor: torch.Tensor, **options: Any) -> numpy.ndarray:
        return to_numpy(tensor.cpu(), **options)

    def array_of(tensor: torch.Tensor, dtype: Any = None, copy: Any = None) -> numpy.ndarray:
        return numpy.asarray(to_numpy(tensor.detach().cpu()), dtype)

    torch.Generator = OnDevice("Generator", (), {})  # type: ignore[misc, assignment]
    torch.from_numpy = lambda ndarray: from_numpy(ndarray).to(device)
    torch.Tensor.numpy = numpy_of  # type: ignore[method-assign, assignment]
    torch.Tensor.__array__ = array_of  # type: ignore[method-assign]


def _made_on(device: str, make: Any) -> Any:
    import torch

    @functools.wraps(make)
    def made(*args: Any, **options: Any) -> Any:
        compiling = (
            torch.compiler.is_compiling()
        )  # a frame would end the graph, and nothing of ours is compiled
        if compiling or not sys._getframe(1).f_globals.get("__name__", "").startswith("gradproof."):
            options["device"] = options.get("device") or device
        return make(*args, **options)

    return made


def cast_to(device: str, dtype: Any) -> None:
    """Everything but backward under autocast. Without its cache, which would keep the weights of the first step."""
    import torch

    torch.autocast(device, dtype=dtype, cache_enabled=False).__enter__()
    for owner, name in ((torch.Tensor, "backward"), (torch.autograd, "backward"), (torch.autograd, "grad")):
        setattr(owner, name, _without_autocast(getattr(owner, name), device))


def _without_autocast(function: Any, device: str) -> Any:
    import torch

    @functools.wraps(function)
    def called(*args: Any, **options: Any) -> Any:
        with torch.autocast(device, enabled=False):
            return function(*args, **options)

    return called


def scale_losses(device: str) -> None:
    """A GradScaler around every backward, clip and step, from the first optimizer on.

    Not earlier: whoever watches the script has to see the calls as if they stood in it.
    """
    import torch

    scaler = torch.amp.GradScaler(device, init_scale=2.0**12)
    optimizers: list[Any] = []

    def scaled(backward: Any) -> Any:
        @functools.wraps(backward)
        def called(loss: torch.Tensor, *args: Any, **options: Any) -> None:
            backward(scaler.scale(loss), *args, **options)

        return called

    def unscale(optimizer: Any) -> None:
        state = scaler._per_optimizer_states[id(optimizer)]["stage"]
        held = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if state.value == 0 and held and scaler._scale is not None:
            scaler.unscale_(optimizer)

    def after_unscale(clip: Any) -> Any:
        @functools.wraps(clip)
        def called(parameters: Any, *args: Any, **options: Any) -> Any:
            given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            chosen = {id(p) for p in given}
            for optimizer in optimizers:
                if any(id(p) in chosen for group in optimizer.param_groups for p in group["params"]):
                    unscale(optimizer)
            return clip(given, *args, **options)

        return called

    def begin() -> None:
        torch.Tensor.backward = scaled(torch.Tensor.backward)  # type: ignore[method-assign]
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            setattr(torch.nn.utils, name, after_unscale(getattr(torch.nn.utils, name)))

    def take(optimizer: Any) -> None:
        if not optimizers:
            begin()
        optimizers.append(optimizer)
        step = optimizer.step
        inside: list[bool] = []

        @functools.wraps(step)
        def stepped(*args: Any, **options: Any) -> Any:
            held = any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
            if inside or not held or scaler._scale is None:
                return step(*args, **options)
            inside.append(True)
            try:
                scaler.step(optimizer, *args, **options)
                scaler.update()
            finally:
                inside.clear()

        optimizer.step = stepped

    _after_each_optimizer(take)


def compile_models() -> None:
    """Each model is compiled, in place, when an optimizer is made of its parameters."""
    _after_each_optimizer(lambda optimizer: [model.compile() for model in models_of(optimizer)])


def models_of(optimizer: Any) -> list[Any]:
    """The modules that hold an optimizer's parameters and are part of no other."""
    import torch

    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    # by its type: isinstance would wake objects that stand for others
    modules = [found for found in gc.get_objects() if issubclass(type(found), torch.nn.Module)]
    parts = {id(child) for module in modules for child in module.children()}
    return [m for m in modules if id(m) not in parts and any(id(p) in held for p in m.parameters())]


def _after_each_optimizer(take: Any) -> None:
    import torch

    begin = torch.optim.Optimizer.__init__

    @functools.wraps(begin)
    def begun(optimizer: Any, *args: Any, **options: Any) -> None:
        begin(optimizer, *args, **options)
        take(optimizer)

    torch.optim.Optimizer.__init__ = begun  # type: ignore[method-assign, assignment]


def main() -> None:
    device, precision, *words = sys.argv[1:]
    import torch

    if device != "cpu":
        move_to(device)
    if precision in ("bf16", "fp16"):
        cast_to(device, {"bf16": torch.bfloat16, "fp16": torch.float16}[precision])
    if precision == "fp16":
        scale_losses(device)
    if precision == "compiled":
        compile_models()
    sys.argv = ["gradproof", *words]
    runpy.run_module("gradproof", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
