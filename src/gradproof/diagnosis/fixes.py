"""Which fixes can be tried from outside, and what trying them showed: data only, applied by probes/interventions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gradproof.diagnosis.findings import Finding
from gradproof.diagnosis.series import trend
from gradproof.record.run import Run


@dataclass(frozen=True)
class Intervention:
    """A change that `gradproof run --fix NAME=VALUE` makes to a script from outside."""

    name: str
    value: float
    words: str


def find_intervention(finding: Finding, run: Run) -> Intervention | None:
    """What would undo a cause, where that can be done without touching the script."""
    what = finding.id.partition("/")[2]
    by_family = {
        "lr-too-high": Intervention("lr", finding.numbers.get("lr_factor", 0.1), "the learning rate lowered"),
        "lr-too-low": Intervention("lr", finding.numbers.get("lr_factor", 30.0), "the learning rate raised"),
        "zero-grad-error": Intervention(
            "zero_grad", 1, "gradients cleared before the first backward of each step"
        ),
        "param-not-updated": Intervention(
            "all_parameters", 1, "the missing parameters given to the optimizer"
        ),
        "wrong-gradient": Intervention(
            "autograd", 1, "autograd's own backward in place of the hand-written one"
        ),
        "train-eval-mode-error": Intervention("train_mode", 1, "model.train() before each training step"),
        "lr-schedule-error": Intervention("constant_lr", 1, "the learning rate held at its first value"),
        "exploding-signal": Intervention("clip", 1.0, "gradients clipped to a norm of 1"),
        "low-precision-error": Intervention("float32", 1, "autocast and half precision switched off"),
        "grad-clip-misuse": Intervention("clip_before_step", 1, "the clip moved between backward and step"),
    }
    by_id = {
        ("optimizer-config", "eps"): Intervention("eps", 1e-8, "Adam's eps set to 1e-8"),
        ("optimizer-config", "weight-decay"): Intervention("weight_decay", 0.01, "weight decay set to 0.01"),
        ("grad-clip-misuse", "limit-too-small"): Intervention("no_clip", 1, "clipping switched off"),
    }
    return by_id.get((finding.family, what)) or by_family.get(finding.family)


@dataclass(frozen=True)
class Trial:
    """The same script without and with a fix, compared at the same step."""

    id: str
    words: str
    step: int
    before: float
    after: float
    helped: bool

    def __str__(self) -> str:
        verb = "tried, and it works" if self.helped else "tried, and it does not help"
        return f"{verb}: with {self.words}, loss at step {self.step}: {self.before:.4g} → {self.after:.4g}"


def compare_runs(id: str, words: str, plain: Run, fixed: Run) -> Trial:
    """Losses around the last step that both runs have; NaN is worse than any number."""
    last = min(len(plain), len(fixed))
    window = max(1, last // 10)
    before = float(np.median(plain.steps["loss"][last - window : last])) if last else float("nan")
    after = float(np.median(fixed.steps["loss"][last - window : last])) if last else float("nan")
    found = trend(fixed.steps["loss"][:last])
    learned = found is not None and found.fell
    better = np.isfinite(after) and (not np.isfinite(before) or after < before - 0.02 * abs(before))
    return Trial(id, words, last - 1, before, after, bool(better and (learned or not np.isfinite(before))))


def trial_of_event(event: dict[str, Any]) -> Trial:
    fields = ("id", "words", "step", "before", "after", "helped")
    values = {key: event[key] for key in fields}
    return Trial(**{**values, "before": float(values["before"]), "after": float(values["after"])})
