"""What any model must be able to do before a long run is started: each expectation is a function and a line.

The model itself is not touched: every test trains or probes a copy of its own, with fixed seeds.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradproof.check.module import call_model
from gradproof.numerics.difference import Difference, difference

LEARNT = 0.1  # of the starting loss: what is left when something has been learnt


@dataclass(frozen=True)
class Expectation:
    """One line of the table; `passed` is None where the expectation does not apply to this model."""

    name: str
    passed: bool | None
    evidence: str

    def __str__(self) -> str:
        verdict = {True: "passed", False: "FAILED", None: "–"}[self.passed]
        return f"{self.name:<44} {verdict:<7} {self.evidence}"


@dataclass(frozen=True)
class ModelCheck:
    """All expectations of one model."""

    lines: tuple[Expectation, ...]

    @property
    def passed(self) -> bool:
        return all(line.passed is not False for line in self.lines)

    def __str__(self) -> str:
        return "\n".join(map(str, self.lines))


class ModelFault(AssertionError):
    """A model that fails an expectation; `check` has the whole table."""

    def __init__(self, check: ModelCheck):
        self.check = check
        failed = [line.name for line in check.lines if line.passed is False]
        super().__init__(f"the model fails: {', '.join(failed)}\n{check}")


@dataclass(frozen=True)
class Trial:
    """A model, a batch and a loss, as the expectations get them."""

    model: nn.Module
    inputs: Any
    targets: Any
    loss_fn: Callable
    steps: int
    lr: float

    def fresh(self) -> nn.Module:
        return copy.deepcopy(self.model)

    def loss(self, model: nn.Module, inputs: Any = None, targets: Any = None) -> Tensor:
        inputs, targets = (self.inputs, self.targets) if inputs is None else (inputs, targets)
        return self.loss_fn(call_model(model, inputs), targets)

    def output(self, inputs: Any = None) -> Tensor:
        """The output in eval mode, where dropout and batch statistics do not disturb."""
        with torch.no_grad():
            return call_model(self.fresh().eval(), self.inputs if inputs is None else inputs)

    @property
    def classes(self) -> int | None:
        """How many classes the output chooses from, or None where targets are no classes."""
        integral = isinstance(self.targets, Tensor) and not self.targets.is_floating_point()
        out = self.output()
        return out.shape[-1] if integral and isinstance(out, Tensor) and out.dim() > 1 else None

    @property
    def is_token_model(self) -> bool:
        """Tokens (B, T) in, as many classes for each out: (B, T, V)."""
        x = self.inputs
        tokens = isinstance(x, Tensor) and x.dim() == 2 and not x.is_floating_point()
        return tokens and self.classes is not None and self.output().shape[:2] == x.shape


def cross_entropy(output: Tensor, targets: Tensor) -> Tensor:
    """The default loss: cross-entropy over the last axis."""
    return F.cross_entropy(output.reshape(-1, output.shape[-1]), targets.reshape(-1))


def check_model(
    model: nn.Module, batch: Any, loss_fn: Callable = cross_entropy, *, steps: int = 200, lr: float = 3e-3
) -> ModelCheck:
    """Raise `ModelFault` if a model fails what any model must be able to do, else return the table.

    `batch` is `(inputs, targets)`; the loss is `loss_fn(model(inputs), targets)`.

        check_model(model, (tokens[:, :-1], tokens[:, 1:]))
    """
    inputs, targets = batch
    trial = Trial(copy.deepcopy(model), inputs, targets, loss_fn, steps, lr)
    lines = []
    with torch.random.fork_rng(), torch.enable_grad():
        for expectation in EXPECTATIONS:
            torch.manual_seed(0)
            lines.append(expectation(trial))
    found = ModelCheck(tuple(lines))
    if not found.passed:
        raise ModelFault(found)
    return found


def initial_loss(trial: Trial) -> Expectation:
    """A model that knows nothing yet gives every class the same chance: ln V, or the labels' entropy."""
    name = "loss at initialisation is ln V"
    if trial.classes is None:
        return Expectation(name, None, "the targets are not classes")
    with torch.no_grad():
        loss = float(trial.loss(trial.fresh().eval()))
    shares = trial.targets[trial.targets >= 0].flatten().bincount(minlength=trial.classes).double()
    entropy = float(torch.special.entr(shares / shares.sum()).sum())
    uniform = math.log(trial.classes)
    near = min(abs(loss - uniform), abs(loss - entropy)) <= 0.2 * uniform
    return Expectation(
        name, near, f"{loss:.3f}; ln {trial.classes} = {uniform:.3f}, labels' entropy {entropy:.3f}"
    )


def overfit_one_batch(trial: Trial) -> Expectation:
    """A handful of examples can be learnt by heart."""
    return _learns("overfits one batch", trial, trial.inputs, trial.targets)


def next_letter(trial: Trial) -> Expectation:
    """A B C → B C D: each token is followed by the next one of the alphabet."""
    name = "learns A B C → B C D"
    if not trial.is_token_model:
        return Expectation(name, None, "not a model of tokens")
    inputs = _alphabet(trial)
    return _learns(name, trial, inputs, (inputs + 1) % (trial.classes or 1))


def copy_tokens(trial: Trial) -> Expectation:
    """The simplest way through the whole model: say what was read."""
    name = "learns to copy its input"
    if not trial.is_token_model:
        return Expectation(name, None, "not a model of tokens")
    inputs = _alphabet(trial)
    return _learns(name, trial, inputs, inputs)


def _alphabet(trial: Trial) -> Tensor:
    """Rows of consecutive tokens, each from another start; few letters, so that they are soon known."""
    batch, time = trial.inputs.shape
    letters = min(trial.classes or 1, 16)
    start = torch.randint(letters, (batch, 1), device=trial.inputs.device)
    return (start + torch.arange(time, device=trial.inputs.device)) % letters


def _learns(name: str, trial: Trial, inputs: Any, targets: Any) -> Expectation:
    model = trial.fresh().train()
    optimizer = torch.optim.Adam(model.parameters(), lr=trial.lr)
    first = last = math.nan
    for step in range(trial.steps):
        loss = trial.loss(model, inputs, targets)
        last = float(loss.detach())
        first = last if step == 0 else first
        if not math.isfinite(last) or last <= LEARNT * first:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return Expectation(
        name, last <= LEARNT * first, f"loss {first:.3f} → {last:.3f} in {step + 1} steps of Adam"
    )


def causality(trial: Trial) -> Expectation:
    """No output may depend on a later input."""
    name = "no output depends on a later input"
    if not trial.is_token_model or trial.inputs.shape[1] < 2:
        return Expectation(name, None, "not a model of tokens")
    time = trial.inputs.shape[1]
    before = trial.output()
    for cut in sorted({1, time // 2, time - 1}):
        changed = trial.inputs.clone()
        changed[:, cut:] = (changed[:, cut:] + 1) % (trial.classes or 1)
        apart = _apart(trial.output(changed)[:, :cut], before[:, :cut])
        if not apart.ok:
            row, position, *_ = apart.place
            evidence = (
                f"changing inputs from {cut} on changes output {position} of row {row} by {apart.error:.2g}"
            )
            return Expectation(name, False, evidence)
    return Expectation(name, True, f"later inputs changed at 3 places of {time}, earlier outputs stay")


def batch_permutation(trial: Trial) -> Expectation:
    """The order of the examples in a batch changes nothing."""
    name = "examples of a batch do not see each other"
    x = trial.inputs
    if not isinstance(x, Tensor) or x.dim() < 1 or x.shape[0] < 2:
        return Expectation(name, None, "no batch of two or more")
    order = torch.arange(x.shape[0], device=x.device).roll(1)
    permuted, straight = trial.output(x[order]), trial.output()
    if straight.shape[0] != x.shape[0]:
        return Expectation(name, False, f"{x.shape[0]} examples in, {straight.shape[0]} out")
    apart = _apart(permuted, straight[order])
    alone = _apart(trial.output(x[:1]), straight[:1])
    worst = apart if not apart.ok else alone
    evidence = "permuted, and one alone: the same outputs"
    if not worst.ok:
        what = "permuting the others" if worst is apart else "leaving out the others"
        evidence = f"{what} changes an output by {worst.error:.2g}"
    return Expectation(name, worst.ok, evidence)


def _apart(value: Tensor, reference: Tensor) -> Difference:
    eps = torch.finfo(reference.dtype).eps
    largest = float(reference.double().abs().max())
    return difference(value, reference, absolute=256 * eps * largest)


def weights_change(trial: Trial) -> Expectation:
    """One step moves every parameter."""
    model = trial.fresh().train()
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.Adam(model.parameters(), lr=trial.lr)
    trial.loss(model).backward()
    optimizer.step()
    after = dict(model.named_parameters())
    still = [name for name, old in before.items() if difference(after[name], old).ok]
    evidence = f"{len(before)} of {len(before)} moved" if not still else _listed(still, "did not move")
    return Expectation("a step changes every parameter", not still, evidence)


def zero_grad(trial: Trial) -> Expectation:
    """After zero_grad a second backward gives the first one's gradients, not twice as much."""
    model = trial.fresh().eval()
    gradients = []
    for _ in range(2):
        model.zero_grad()
        trial.loss(model).backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    left = [n for n, g in gradients[0].items() if not _apart(gradients[1][n], g).ok]
    evidence = "the same gradients twice" if not left else _listed(left, "differ the second time")
    return Expectation("zero_grad zeroes", not left, evidence)


def accumulation(trial: Trial) -> Expectation:
    """The gradients of k micro-batches are those of the whole batch."""
    name = "micro-batches add up to the batch"
    x, y = trial.inputs, trial.targets
    if not (
        isinstance(x, Tensor) and isinstance(y, Tensor) and x.shape[:1] == y.shape[:1] and len(x) % 2 == 0
    ):
        return Expectation(name, None, "no batch that can be halved")
    whole = _gradients(trial, [(x, y)], 1.0)
    halves = list(zip(x.chunk(2), y.chunk(2), strict=True))
    for share, words in (
        (0.5, "two halves, each divided by 2"),
        (1.0, "two halves, added: the loss is a sum"),
    ):
        parts = _gradients(trial, halves, share)
        off = [n for n, g in whole.items() if not _near(parts[n], g)]
        if not off:
            return Expectation(name, True, words)
    return Expectation(name, False, _listed(off, "differ from the whole batch's"))


def _near(value: Tensor, reference: Tensor) -> bool:
    eps = torch.finfo(reference.dtype).eps
    return difference(value, reference, absolute=1e3 * eps * float(reference.abs().max())).ok


def _gradients(trial: Trial, batches: Iterable[tuple[Any, Any]], share: float) -> dict[str, Tensor]:
    model = trial.fresh().eval()
    for inputs, targets in batches:
        (share * trial.loss(model, inputs, targets)).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def _listed(names: list[str], words: str) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"{', '.join(names[:4])}{more} {words}"


EXPECTATIONS = (
    initial_loss, causality, batch_permutation, weights_change, zero_grad, accumulation, overfit_one_batch,
    next_letter, copy_tokens,
)  # fmt: skip
