"""The first number that is not finite: where it was seen, and whether it had grown before."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gradproof.diagnosis.findings import Symptom
from gradproof.diagnosis.series import first_nonfinite
from gradproof.record.run import Run
from gradproof.record.schema import STATISTICS

NAN, INF = (STATISTICS.index(name) for name in ("nan", "inf"))


def nonfinite(run: Run) -> Iterator[Symptom]:
    """The first tensor that stops being finite. Everything after it is a consequence."""
    steps, counts = run.steps, ~harmlessly_skipped(run)
    loss = first_nonfinite(steps["loss"], run.seen["loss"] & counts)
    norm = first_nonfinite(steps["grad_norm"], run.seen["grad_norm"] & counts)
    rows = [row for row in (loss, norm) if row is not None]
    if not rows:
        return
    row = min(rows)
    step = int(steps["step"][row])
    forward = loss == row
    value = steps["loss"][row] if forward else steps["grad_norm"][row]
    text = f"the loss is {value}" if forward else f"the gradient is {value}"
    if not forward and np.isfinite(steps["loss"][row]):
        text = f"the loss is still {steps['loss'][row]:.4g}, the gradient {value}"
    place = find_first_nonfinite_tensor(run, step)
    where = None
    if place is not None:
        where = f"{place[0]} of {place[1]}"
        text += f"; first seen in the {where}: {place[2]}"
    family = "forward-nonfinite" if forward else "backward-nonfinite"
    suspects: tuple[str, ...] = (
        f"{family}/unlocated",
        "lr-too-high/diverged",
        "low-precision-error/overflow",
    )
    if grew_before(run, row):
        suspects = ("lr-too-high/diverged", "exploding-signal/growing", f"{family}/unlocated")
    yield Symptom("nonfinite", "problem", text, step, where, suspects)


def anomaly(run: Run) -> Iterator[Symptom]:
    """torch.autograd.detect_anomaly has ended the script: the step that it saw was never finished."""
    raised = run.info.get("raised")
    if not isinstance(raised, dict):
        return
    text = str(raised.get("text", ""))
    if "returned nan values in its" in text:
        step = int(run.steps["step"][-1]) + 1 if len(run) else 0
        line = str(raised.get("line", "")) or None
        said = f"PyTorch's anomaly detection ended the script: {text}"
        yield Symptom("nonfinite", "problem", said, step, line, ("backward-nonfinite/unlocated",))


def describe_end(run: Run) -> str:
    """`RuntimeError at train.py:12: …` of a script that an exception has ended."""
    raised = run.info.get("raised")
    if not isinstance(raised, dict) or not raised.get("type"):
        return ""
    place = f" at {raised['line']}" if raised.get("line") else ""
    return f"{raised['type']}{place}" + (f": {raised['text']}" if raised.get("text") else "")


def harmlessly_skipped(run: Run) -> np.ndarray:
    """Rows that a GradScaler skipped and after which training went on: no weight has seen them."""
    skipped = np.nan_to_num(run.steps["skipped"]) > 0
    taken = np.flatnonzero(~skipped)
    return skipped & (np.arange(len(skipped)) < (taken[-1] if len(taken) else 0))


def find_first_nonfinite_tensor(run: Run, step: int) -> tuple[str, str, str] | None:
    """Kind, name and counts of the tensor that was not finite first, in execution order, at this step.

    What was not finite at an earlier step already did no harm there: −inf in a mask, a branch nobody takes.
    """
    harmless: set[int] = set()
    for frame in run.frames:
        bad = frame.numbers[(frame.values[:, NAN] > 0) | (frame.values[:, INF] > 0)]
        if frame.step < step:
            harmless.update(bad.tolist())
            continue
        new = [int(number) for number in bad if number not in harmless]
        if frame.step > step:
            return None
        if new:
            number = first_in_execution(run, new)
            return describe_nonfinite(run, number, frame.values[frame.numbers == number][0])
    return None


def first_in_execution(run: Run, numbers: list[int]) -> int:
    """Outputs and their gradients are recorded as they happen; of parameters, the last gets its gradient first."""
    gradients = [number for number in numbers if run.tensors[number]["kind"] == "gradient"]
    return gradients[-1] if gradients and numbers[0] == gradients[0] else numbers[0]


def describe_nonfinite(run: Run, number: int, values: np.ndarray) -> tuple[str, str, str]:
    tensor = run.tensors[number]
    size = int(np.prod(tensor["shape"])) if "shape" in tensor else None
    counts = ", ".join(f"{int(values[c])} {word}" for c, word in ((NAN, "NaN"), (INF, "Inf")) if values[c])
    return tensor["kind"].replace("_", " "), tensor["name"], counts + (f" of {size}" if size else "")


def steps_skipped(run: Run) -> Iterator[Symptom]:
    """A GradScaler that skips more steps than it takes; its first few skips only find the scale."""
    skipped = np.nan_to_num(run.steps["skipped"]) > 0
    if len(skipped) < 20 or skipped[10:].mean() < 0.5:
        return
    scale = run.steps["loss_scale"][np.isfinite(run.steps["loss_scale"])]
    text = f"the GradScaler skipped {int(skipped.sum())} of {len(skipped)} steps"
    text += f"; its scale has fallen to {scale[-1]:g}" if len(scale) else ""
    suspects = ("low-precision-error/overflow", "forward-nonfinite/unlocated")
    yield Symptom("steps_skipped", "problem", text, int(np.flatnonzero(skipped)[0]), None, suspects)


def grew_before(run: Run, row: int) -> bool:
    """The loss or the gradient had grown tenfold over its best before it stopped being finite."""
    for column in ("loss", "grad_norm"):
        before = run.steps[column][max(0, row - 50) : row]
        before = before[np.isfinite(before)]
        if (
            len(before) >= 3
            and abs(before[-1]) > 10 * np.median(np.abs(before[: max(1, len(before) // 2)])) + 1e-12
        ):
            return True
    return False
