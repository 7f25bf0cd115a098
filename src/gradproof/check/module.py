"""Which module's backward is wrong: each submodule on its real inputs, then the loss, then the whole."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from gradproof.check.behaviour import repeatable
from gradproof.check.culprit import Claim, scale_of
from gradproof.check.gradient import UNDECIDED_FROM, GradientMismatch, InputCheck, check_input, claim_at
from gradproof.check.slope import Line, measure
from gradproof.check.subject import Subject, subject_of_function, subject_of_module, widen
from gradproof.errors import UserError


@dataclass(frozen=True)
class ModuleLine:
    """One submodule's verdict."""

    path: str
    kind: str
    verdict: str  # right, wrong, undecided, or a reason why there was nothing to check
    error: float = 0.0
    allowed: float = 0.0


@dataclass(frozen=True)
class ModuleCheck:
    """A verdict for every submodule that ran, children before parents."""

    lines: tuple[ModuleLine, ...]
    dtype: str

    @property
    def decided(self) -> bool:
        return all(line.verdict != "undecided" for line in self.lines)

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [
            ("module", "kind", "count", "backward", f"error ({self.dtype})", "allowed")
        ]
        rows += [_say_group(group) for group in _grouped(self.lines)]
        widths = [max(len(row[k]) for row in rows) for k in range(6)]
        return "\n".join(
            "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows
        )


def _grouped(lines: Sequence[ModuleLine]) -> list[list[ModuleLine]]:
    """Lines that differ in a block's number only are one group, unless their verdicts differ."""
    groups: dict[tuple, list[ModuleLine]] = {}
    for line in lines:
        groups.setdefault((_with_stars(line.path), line.kind, line.verdict), []).append(line)
    return list(groups.values())


def _with_stars(path: str) -> str:
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", path)


def _say_group(group: list[ModuleLine]) -> tuple[str, ...]:
    first = group[0]
    path = first.path if len(group) == 1 else _with_stars(first.path)
    measured = first.verdict in ("right", "wrong", "undecided")
    numbers = (
        (f"{max(x.error for x in group):.1e}", f"{max(x.allowed for x in group):.1e}")
        if measured
        else ("", "")
    )
    return path, first.kind, str(len(group)), first.verdict, *numbers


def check_module(model: torch.nn.Module, batch: Any, loss_fn: Callable | None = None) -> ModuleCheck:
    """Raise `GradientMismatch` for the module whose backward is wrong, else say how surely all are right.

    With a loss, `batch` is `(inputs, targets)` and the whole is `loss_fn(model(inputs), targets)`; without
    one, `batch` is what the model is called with (a tuple as arguments, a dict as keywords). The model itself
    stays as it is: a float64 copy is checked where that runs, else a copy in its own dtype.

        check_module(model, (tokens, targets), loss_fn)
    """
    inputs, targets = _split(batch, loss_fn)
    model, inputs, calls, output = _run_copy(model, inputs)
    lines: list[ModuleLine] = []
    culprits: list[GradientMismatch] = []
    for path, subject in _subjects(model, inputs, calls, output, targets, loss_fn):
        kind = type(model.get_submodule(path)).__name__ if path in calls else ""
        line, mismatch = _check_one(path, kind, subject, lines)
        lines.append(line)
        culprits += [mismatch] if mismatch else []
    dtype = str(next((p.dtype for p in model.parameters()), torch.float64)).removeprefix("torch.")
    found = ModuleCheck(tuple(lines), dtype)
    if culprits:
        raise GradientMismatch(culprits[0].name, culprits[0].culprit, culprits[0].notes, table=str(found))
    return found


def _split(batch: Any, loss_fn: Callable | None) -> tuple[Any, Any]:
    if loss_fn is None:
        return batch, None
    if not (isinstance(batch, tuple | list) and len(batch) == 2):
        raise UserError(
            "with a loss_fn, batch must be (inputs, targets), for loss_fn(model(inputs), targets)"
        )
    return batch[0], batch[1]


def call_model(model: torch.nn.Module, inputs: Any) -> Any:
    """A tuple is the arguments, a dict the keywords, anything else the one argument."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)


def _run_copy(model: torch.nn.Module, inputs: Any) -> tuple[torch.nn.Module, Any, dict[str, tuple], Any]:
    """A copy of the model, in float64 if that runs, its inputs, each submodule's first call, the output."""
    wide = widen(inputs)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            twin = copy.deepcopy(model).double()
            return twin, wide, *_recorded(twin, wide)
    except Exception:  # whatever a float32-only kernel raises when it is handed float64
        own = copy.deepcopy(model)
        return own, inputs, *_recorded(own, inputs)


def _recorded(model: torch.nn.Module, inputs: Any) -> tuple[dict[str, tuple], Any]:
    calls: dict[str, tuple] = {}
    entered: dict[str, tuple] = {}

    def copies(tree: Any) -> Any:
        return tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, tree)

    with ExitStack() as hooks, torch.no_grad():
        for path, module in model.named_modules():

            def enter(_: Any, args: tuple, kwargs: dict, path: str = path) -> None:
                entered.setdefault(
                    path, (copies(args), copies(kwargs))
                )  # before an in-place module writes into it

            def leave(*_: Any, path: str = path) -> None:
                calls.setdefault(path, entered[path])  # in order of completion: children before parents

            hooks.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(leave).remove)
        output = call_model(model, inputs)
    return calls, output


def _subjects(
    model: torch.nn.Module, inputs: Any, calls: dict, output: Any, targets: Any, loss_fn: Callable | None
) -> Iterator[tuple[str, Subject | str]]:
    """Every submodule, then the loss on the model's real output, then the whole; or why not."""
    for path, (args, kwargs) in calls.items():
        if path:
            yield path, _subject_or_reason(subject_of_module, model.get_submodule(path), args, kwargs, path)
    if loss_fn is None:
        args, kwargs = calls[""]
        yield "whole model", _subject_or_reason(subject_of_module, model, args, kwargs, "whole model")
        return
    targets = widen(targets) if any(p.dtype == torch.float64 for p in model.parameters()) else targets
    yield (
        "loss",
        _subject_or_reason(subject_of_function, lambda output: loss_fn(output, targets), (output,), "loss"),
    )
    whole = _WithLoss(model, loss_fn, targets)
    yield "whole model", _subject_or_reason(subject_of_module, whole, (inputs,), {}, "whole model")


class _WithLoss(torch.nn.Module):
    def __init__(self, model: torch.nn.Module, loss_fn: Callable, targets: Any):
        super().__init__()
        self.model, self.loss_fn, self.targets = model, loss_fn, targets

    def forward(self, inputs: Any) -> Any:
        return self.loss_fn(call_model(self.model, inputs), self.targets)


def _subject_or_reason(build: Callable[..., Subject], *args: Any) -> Subject | str:
    try:
        return build(*args)
    except UserError:
        return "nothing to differentiate"


def _check_one(
    path: str, kind: str, subject: Subject | str, before: Sequence[ModuleLine]
) -> tuple[ModuleLine, GradientMismatch | None]:
    if isinstance(subject, str):
        return ModuleLine(path, kind, subject), None
    try:
        claim = claim_at(repeatable(subject), subject.point)
    except UserError:
        return ModuleLine(path, kind, "not connected"), None
    slopes = [measure(line) for line in _lines(claim)]
    worst = max(slopes, key=lambda slope: slope.error / max(slope.resolution, 1e-300))
    error, allowed = worst.error, max(slope.resolution for slope in slopes)
    if all(slope.agrees for slope in slopes):
        verdict = "right" if allowed <= UNDECIDED_FROM else "undecided"
        return ModuleLine(path, kind, verdict, error, allowed), None
    inside = _wrong_inside(path, before)
    if inside:
        return ModuleLine(path, kind, f"contains {inside}", error, allowed), None
    return _find_wrong_input(path, kind, claim)


def _lines(claim: Claim) -> list[Line]:
    """One line over all of a module's parameters and one over all its inputs."""
    lines = []
    for chosen in (True, False):
        directions: list[Tensor | None] = [
            _direction(k, x) if (k < claim.subject.parameters) is chosen else None
            for k, x in enumerate(claim.point)
        ]
        if any(v is not None for v in directions):
            lines.append(Line(claim.subject, claim.point, directions, claim.cotangents, claim.gradients))
    return lines


def _direction(k: int, x: Tensor) -> Tensor:
    generator = torch.Generator(x.device).manual_seed(k)
    # drawn in float32: at 124 million parameters drawing is what takes the time
    return torch.randn(x.shape, generator=generator, device=x.device).to(x.dtype).mul_(scale_of(x))


def _wrong_inside(path: str, before: Sequence[ModuleLine]) -> str | None:
    prefix = "" if path == "whole model" else f"{path}."
    return next((x.path for x in before if x.verdict == "wrong" and x.path.startswith(prefix)), None)


def _find_wrong_input(path: str, kind: str, claim: Claim) -> tuple[ModuleLine, GradientMismatch | None]:
    """Input by input, with kinks stepped around: the culprit, or the news that nothing is wrong after all."""
    checks: list[InputCheck] = []
    notes: list[str] = []
    try:
        for which in range(len(claim.point)):
            checks.append(check_input(claim, which, notes))
    except GradientMismatch as mismatch:
        return ModuleLine(path, kind, "wrong", mismatch.culprit.error, mismatch.culprit.allowed), mismatch
    verdict = "right" if all(check.decided for check in checks) else "undecided"
    error, allowed = max(check.error for check in checks), max(check.allowed for check in checks)
    return ModuleLine(path, kind, verdict, error, allowed), None
