"""The pytest fixtures `watched` and `trains_well`: a test that trains for some steps fails if the training is sick.

pytest finds it by itself where gradproof is installed. Imports nothing heavy: every pytest session loads this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def watched(tmp_path: Path) -> Callable:
    """`gradproof.watch` that ends with a diagnosis; `fail_on="warning"` is stricter than the default, "problem".

    def test_training_is_healthy(watched):
        with watched(model, optimizer):
            train(steps=50)
    """

    @contextmanager
    def watch_and_judge(
        model: Any = None, optimizer: Any = None, *, fail_on: str = "problem", **options: Any
    ) -> Iterator:
        from gradproof.diagnosis.findings import LEVELS
        from gradproof.diagnosis.ranking import diagnose
        from gradproof.probes.watch import watch
        from gradproof.report.text import render_text

        options.setdefault("out", tmp_path / "run")
        with watch(model, optimizer, **options) as monitor:
            yield monitor
        found = diagnose(monitor.path)
        if found.worst and LEVELS.index(found.worst) <= LEVELS.index(fail_on):
            pytest.fail(f"the training is sick\n{render_text(found)}", pytrace=False)

    return watch_and_judge


@pytest.fixture
def trains_well(tmp_path: Path) -> Callable:
    """A few whole steps, each replayed and questioned; `but=("start",)` names what need not hold here.

    Gradients are right, every parameter moves, samples are independent, the first loss is that of a guess, and the
    update is what the optimizer's rule says.

    def test_my_step(trains_well):
        trains_well(train_step, model, optimizer)  # train_step() returns its loss
    """

    def train_and_judge(
        step: Callable, model: Any, optimizer: Any, *, steps: int = 3, but: Sequence[str] = ()
    ) -> Path:
        from gradproof.testing import failed_expectations, record_steps

        run = record_steps(tmp_path / "recorded", step, model, optimizer, steps)
        failed = failed_expectations(run, but)
        if failed:
            pytest.fail("the training is not as it should be\n  " + "\n  ".join(failed), pytrace=False)
        return run

    return train_and_judge
