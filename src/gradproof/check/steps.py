"""An optimizer's step as a black box: layouts of parameters and gradients, and the textbook's step in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradproof.check.blackbox import layouts_for, place, same_bits
from gradproof.check.claims import EXPLAINED
from gradproof.check.culprit import scale_of
from gradproof.check.findings import Fault, KernelCheck
from gradproof.check.textbook import Call, Formula, adam, fitting, said_by
from gradproof.errors import UserError

STEPS = 3
SHAPES = ((4, 6), (7,), (33, 5), (2, 3, 4, 4))


@dataclass(frozen=True)
class Stepper:
    """Makes an optimizer over fresh parameters and takes a few steps with it."""

    name: str
    make: Callable[[list[Tensor]], torch.optim.Optimizer]
    starts: tuple[Tensor, ...]
    gradients: tuple[tuple[Tensor, ...], ...]  # step -> one for each parameter

    def walk(self, parameter: str = "as given", gradient: str = "as given", which: int = -1) -> list[Tensor]:
        """The parameters after some steps, one of them (and its gradient) laid out otherwise."""
        views = [place(x, parameter if k == which else "as given").view for k, x in enumerate(self.starts)]
        parameters = [torch.nn.Parameter(x) for x in views]
        optimizer = self.make(list(parameters))
        for gradients in self.gradients:
            for k, (p, g) in enumerate(zip(parameters, gradients, strict=True)):
                p.grad = place(g, gradient if k == which else "as given").view
            optimizer.step()
        return [p.detach().clone(memory_format=torch.contiguous_format) for p in parameters]


def find_step_faults(optimizer: Any, parameters: Sequence[Tensor], name: str | None) -> KernelCheck:
    """What is wrong with an optimizer's step: the class with its defaults, or one that was made with its settings."""
    cls = optimizer if isinstance(optimizer, type) else type(optimizer)
    given: dict = {} if isinstance(optimizer, type) else _settings(optimizer)
    starts = tuple(x.detach() for x in parameters) or _drawn(SHAPES, 0)
    gradients = tuple(_drawn([x.shape for x in starts], 1 + k, starts) for k in range(STEPS))
    stepper = Stepper(name or cls.__name__, lambda ps: cls(ps, **given), starts, gradients)
    check = KernelCheck(stepper.name)
    try:
        first = stepper.walk()
    except TypeError as error:
        raise UserError(
            f"{cls.__name__} cannot be made from parameters alone ({error}); pass one that was made, "
            f"e.g. {cls.__name__}(parameters, lr=1e-3)"
        ) from error
    check.add(_moves(stepper, first))
    check.add(_repeats(stepper, first))
    if not check.faults:
        check.add(_layouts(stepper, first, check))
    if not check.faults:
        check.add(_textbook(stepper, first, _numbers_of(cls, given, starts), check))
    check.tried += ["twice", "layouts of parameters and of gradients", f"{STEPS} steps"]
    return check


def _settings(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What it was made with, as far as its class takes it back."""
    import inspect

    known = inspect.signature(type(optimizer).__init__).parameters
    return {key: value for key, value in optimizer.defaults.items() if key in known}


def _drawn(shapes: Sequence, seed: int, like: Sequence[Tensor] | None = None) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=generator) for shape in shapes]
    return tuple(x.to(y) for x, y in zip(made, like, strict=True)) if like is not None else tuple(made)


def _room(stepper: Stepper, k: int, after: Tensor) -> float:
    """What rounding may do to a parameter in a few steps, and no more than a thousandth of its way."""
    eps = torch.finfo(after.dtype).eps
    return 16 * STEPS * eps * (scale_of(stepper.starts[k]) + scale_of(after))


def _said(stepper: Stepper, k: int) -> str:
    return f"a parameter of shape {tuple(stepper.starts[k].shape)}"


def _moves(stepper: Stepper, first: list[Tensor]) -> Iterator[Fault]:
    still = [k for k, x in enumerate(first) if same_bits(x, stepper.starts[k])]
    if len(still) == len(first):
        yield Fault("step", f"{stepper.name}.step() does nothing", f"{STEPS} steps changed no parameter")
    elif still:
        yield Fault("step", f"{stepper.name}.step() does nothing for {_said(stepper, still[0])}")
    for k, x in enumerate(first):
        left = x == stepper.starts[k]
        if k not in still and x.numel() > 3 and bool(left.flatten()[-1]):
            text = f"{int(left.sum())} of {left.numel()} entries"
            yield Fault("step", f"{stepper.name}.step() leaves {text} of {_said(stepper, k)} as they were")
            return


def _repeats(stepper: Stepper, first: list[Tensor]) -> Iterator[Fault]:
    for k, (a, b) in enumerate(zip(stepper.walk(), first, strict=True)):
        apart = float((a.double() - b.double()).abs().max())
        if not apart <= _room(stepper, k, b):
            what = f"{stepper.name} takes another step from the same start with the same gradients"
            yield Fault("repeat", what, f"{apart:.2g} apart for {_said(stepper, k)}")
            return


def _layouts(stepper: Stepper, first: list[Tensor], check: KernelCheck) -> Iterator[Fault]:
    for k, start in enumerate(stepper.starts):
        for layout in layouts_for(start):
            for of, layouts in (("parameter", (layout, layout)), ("gradient", ("as given", layout))):
                try:
                    after = stepper.walk(*layouts, which=k)
                except Exception as error:
                    check.refused.append(f"a {of} that is {layout}: {str(error)[:120]}")
                    continue
                if same_bits(after[k], start):
                    yield Fault(
                        "layout",
                        f"{stepper.name}.step() does nothing for a {of} that is not contiguous ({layout})",
                    )
                    return
                apart = float((after[k].double() - first[k].double()).abs().max())
                if not apart <= _room(stepper, k, first[k]):
                    yield Fault(
                        "layout",
                        f"{stepper.name}.step() is wrong for a {of} that is {layout}",
                        f"{_said(stepper, k)} ends {apart:.2g} away from where the contiguous one does",
                    )
                    return


def _numbers_of(cls: type, given: dict, starts: Sequence[Tensor]) -> dict[str, float]:
    """Learning rate, decay and the like, of the optimizer's own defaults."""
    made = cls([torch.nn.Parameter(starts[0].clone())], **given)
    numbers: dict[str, float] = {}
    for key, value in made.param_groups[0].items():
        if key == "betas":
            numbers |= {"beta1": float(value[0]), "beta2": float(value[1])}
        elif isinstance(value, (int, float)):
            numbers[key] = value
    return numbers


def _textbook(
    stepper: Stepper, first: list[Tensor], numbers: dict[str, float], check: KernelCheck
) -> Iterator[Fault]:
    """The same steps by the textbook in float64, and by each of the mistakes it may have."""
    books, plain = said_by(stepper.name)
    decay_in_gradient = "adam" in stepper.name.lower() and "adamw" not in stepper.name.lower()
    momentum = numbers.get("momentum", 0.0)
    named = {n: stepper.starts[0].double() for n in ("p", "g", "m", "v")}
    for book, readings in fitting(books, Call([], [], numbers, named)):
        if book.name == "SGD with momentum" and not momentum:
            continue
        if book.name == "AdamW" and decay_in_gradient:
            readings = [("", lambda c: adam(c, decoupled=False)), *readings]
        errors = [(words, _distance(stepper, first, numbers, formula)) for words, formula in readings]
        allowed = _allowed(stepper, first)
        if any(error <= allowed for words, error in errors if not words):
            check.notes.append(f"recognised as {book.name}")
            return
        for words, error in errors:
            if words and error <= max(allowed, EXPLAINED):
                off = min(e for w, e in errors if not w)
                yield Fault(
                    "claim",
                    f"{stepper.name}.step() {words}",
                    f"{off:.1e} of the way off {book.name} in float64",
                )
                return
        if plain:
            off = min(error for words, error in errors if not words)
            check.notes.append(
                f"its step is not that of {book.name} ({off:.1e} of the way off), and no known mistake"
            )
        return


def _allowed(stepper: Stepper, first: list[Tensor]) -> float:
    """Relative to the way that was gone."""
    rooms = [
        _room(stepper, k, x) / (scale_of(x.double() - stepper.starts[k].double()))
        for k, x in enumerate(first)
    ]
    return max(1e-4, *rooms)


def _distance(stepper: Stepper, first: list[Tensor], numbers: dict[str, float], formula: Formula) -> float:
    """How far from the textbook's way the parameters end, relative to its length."""
    worst = 0.0
    for k, start in enumerate(stepper.starts):
        named = {
            "p": start.double(),
            "m": torch.zeros_like(start.double()),
            "v": torch.zeros_like(start.double()),
        }
        for t, gradients in enumerate(stepper.gradients):
            named["g"] = gradients[k].double()
            try:
                made = formula(
                    Call([], [], {**numbers, "t": t + 1, "mu": numbers.get("momentum", 0.0)}, named)
                )
            except ZeroDivisionError:
                return float("inf")
            named |= made
        way = named["p"] - start.double()
        off = first[k].double() - named["p"]
        if not bool(off.isfinite().all()):
            return float("inf")
        worst = max(worst, float(off.abs().max()) / (scale_of(way) if bool(way.any()) else 1e-30))
    return worst
