"""For test suites: assertions for gradients and for a few steps of training, and hypothesis strategies for tensors.

from hypothesis import given
from gradproof.testing import assert_gradient_matches, tensors

@given(tensors(min_dims=2))
def test_my_softmax(x):
    assert_gradient_matches(my_softmax, x)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gradproof.check.gradient import GradientCheck, check_gradient

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy

LAYOUTS = ("contiguous", "transposed", "strided", "offset")


def assert_gradient_matches(fn: Callable, *inputs: Any, order: int = 1) -> GradientCheck:
    """Fail unless the gradient is right; a check that could not decide has proved nothing and fails too."""
    __tracebackhide__ = True
    found = check_gradient(fn, *inputs, order=order)
    if not found.decided:
        raise AssertionError(str(found))
    return found


def shapes(min_dims: int = 1, max_dims: int = 3, max_size: int = 6) -> SearchStrategy[tuple[int, ...]]:
    """Shapes of small tensors, axes of size 1 among them."""
    from hypothesis import strategies as st

    return st.lists(st.integers(1, max_size), min_size=min_dims, max_size=max_dims).map(tuple)


def dtypes(*allowed: torch.dtype) -> SearchStrategy[torch.dtype]:
    """Floating-point dtypes: float64 and float32 unless others are given."""
    from hypothesis import strategies as st

    return st.sampled_from(allowed or (torch.float64, torch.float32))


def tensors(
    min_dims: int = 1,
    max_dims: int = 3,
    max_size: int = 6,
    allowed_dtypes: Sequence[torch.dtype] = (torch.float64, torch.float32),
    low: float = -3.0,
    high: float = 3.0,
) -> SearchStrategy[Tensor]:
    """Tensors between two bounds, in every memory layout that a kernel may be handed."""
    from hypothesis import strategies as st

    @st.composite
    def draw_tensor(draw: DrawFn) -> Tensor:
        shape = draw(shapes(min_dims, max_dims, max_size))
        generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
        values = torch.rand(shape, generator=generator, dtype=torch.float64) * (high - low) + low
        return in_layout(values.to(draw(dtypes(*allowed_dtypes))), draw(st.sampled_from(LAYOUTS)))

    return draw_tensor()


def in_layout(x: Tensor, layout: str) -> Tensor:
    """The same numbers, differently laid out in memory."""
    if layout == "transposed":
        return x.mT.contiguous().mT if x.dim() > 1 else x
    if layout == "strided":
        wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)
        wide[..., ::2] = x
        return wide[..., ::2]
    if layout == "offset":
        return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
    return x


def record_steps(
    path: str | os.PathLike, step: Callable[[], Any], model: nn.Module, optimizer: Any, steps: int = 3
) -> Path:
    """A run of some whole steps, each of them recorded: `gradproof.open(path).ask("gradient")` can be asked of it.

    `step()` clears the gradients, computes the loss, calls backward, steps the optimizer and returns the loss.
    """
    from gradproof.probes.capture import capture
    from gradproof.record.writer import RunWriter
    from gradproof.tape.record import Recorder
    from gradproof.tape.specimen import save

    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    writer = RunWriter(path, {"command": [step.__name__]})
    losses: list[float] = []
    for number in range(steps):
        recorder = Recorder(names)
        recorder.start()
        try:
            loss = step()
        finally:
            tape = recorder.stop()
        if loss is None:
            raise TypeError("step() has to return its loss")
        losses.append(float(torch.as_tensor(loss).detach()))
        if tape.broken:
            raise AssertionError(f"step {number} could not be recorded: {tape.broken}")
        save(capture(recorder.state, number, {"": model}, [optimizer], losses), writer.path / "specimens")
        writer.write_step({"step": number, "loss": losses[-1], "optimizer": 0, "backwards": 1})
    writer.close()
    return writer.path


# what a few recorded steps are asked -> the words in which the answer is a failure; see ask/kinds.py
EXPECTATIONS = {
    "gradients": "every gradient is the derivative of the loss",
    "movement": "every parameter moves",
    "independence": "a prediction hears its own sample alone",
    "start": "the first loss is that of a guess",
    "update": "the update is what the optimizer's rule says",
}


def failed_expectations(run: str | os.PathLike, but: Sequence[str] = ()) -> list[str]:
    """Of a run by `record_steps`, what is not as any training should be; `but` names what need not hold."""
    from gradproof.ask.opened import OpenedRun
    from gradproof.errors import UserError

    unknown = set(but) - set(EXPECTATIONS)
    if unknown:
        raise ValueError(
            f"there is no expectation {sorted(unknown)[0]!r}; there are {', '.join(EXPECTATIONS)}"
        )
    opened = OpenedRun(run)
    found: list[str] = []

    def expect(name: str, question: str, holds: Callable[[Any], bool], step: int | None = None) -> None:
        if name in but:
            return
        try:
            answer = opened.ask(question, step=step)
        except UserError as error:  # what was not looked at has not passed
            found.append(f"{EXPECTATIONS[name]}: {error}; but=[{name!r}] leaves it out")
            return
        if not holds(answer):
            found.append(f"{EXPECTATIONS[name]}: {answer.sentence}")

    expect("gradients", "gradient", is_proven)
    expect("independence", "hears", lambda answer: "hear each other" not in answer.sentence)
    expect("update", "update", is_proven)
    expect("start", "where_does_it_start", is_not_confirmed, 0)
    expect("movement", "does_the_optimizer_hold_everything", is_not_confirmed)
    if "movement" not in but:
        still = sorted(unmoved(opened))
        found += [f"{EXPECTATIONS['movement']}: {', '.join(still[:6])} did not, in any step"] if still else []
    return found


def is_proven(answer: Any) -> bool:
    """Said to be so: what could not be judged is not enough."""
    return answer.sentence.startswith("Yes")


def is_not_confirmed(answer: Any) -> bool:
    return all(row["verdict"] != "confirmed" for row in answer.rows)


def unmoved(opened: Any) -> set[str]:
    """Parameters that want a gradient and that no recorded step has changed."""
    from gradproof.instruments.evidence import Evidence
    from gradproof.tape.label import find_specimens
    from gradproof.tape.specimen import load

    still: set[str] | None = None
    for path in find_specimens(opened.path):
        evidence = Evidence(load(path))
        wanted = {n for m in evidence.models.values() for n, p in m.named_parameters() if p.requires_grad}
        moved = {evidence.slot(slot).name for slot, change in evidence.updates.items() if bool(change.any())}
        still = wanted - moved if still is None else still - moved
    return still or set()
