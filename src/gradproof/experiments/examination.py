"""Runs the experiments on taped steps of a training, and writes their verdicts into the run.

An experiment is a generator of verdicts; one that fails says nothing and is noted. The list is at the end.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from gradproof.experiments.evidence import Evidence, Verdict
from gradproof.experiments.gradient import is_the_gradient_right
from gradproof.experiments.nonfinite import where_was_it_born
from gradproof.experiments.step_length import is_the_step_too_long_or_short
from gradproof.record.writer import RunWriter

Experiment = Callable[[Evidence], Iterator[Verdict]]

# glances look at every taped step and must be quick; experiments run at landmarks and in trouble
GLANCES: tuple[Experiment, ...] = (where_was_it_born,)
EXPERIMENTS: tuple[Experiment, ...] = (is_the_gradient_right, is_the_step_too_long_or_short)


class Examination:
    """All experiments of one training; `memory` is theirs to keep between steps."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self._writer: RunWriter = session.writer
        self._memory: dict[str, Any] = {}
        self._said: dict[tuple[str, str], dict[str, Any]] = {}
        self._failed: set[str] = set()
        self.seconds: dict[str, float] = {}

    def __call__(self, tape: Any, step: int, thorough: bool) -> None:
        session = self._session
        evidence = Evidence(
            tape, step, dict(session.names.roots), session.optimizers, session.losses, self._memory
        )
        for experiment in (*GLANCES, *(EXPERIMENTS if thorough else ())):
            self._run(experiment, evidence)

    def _run(self, experiment: Experiment, evidence: Evidence) -> None:
        name = experiment.__name__
        if name in self._failed:
            return
        start = time.perf_counter()
        try:
            for verdict in experiment(evidence):
                self._say(name, evidence.step, verdict)
        except Exception as error:
            self._failed.add(name)
            place = traceback.extract_tb(error.__traceback__)[-1]
            self._writer.write_event(
                "experiment_failed",
                experiment=name,
                step=evidence.step,
                error=f"{type(error).__name__}: {error}",
                place=f"{place.filename.rsplit('/', 1)[-1]}:{place.lineno}",
            )
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def _say(self, experiment: str, step: int, verdict: Verdict) -> None:
        key = (experiment, verdict.family)
        before = self._said.get(key)
        if before is not None and before["verdict"] == "confirmed" and before["lasting"]:
            return
        facts = asdict(verdict)
        if before == facts:
            return
        self._said[key] = facts
        self._writer.write_event("verdict", experiment=experiment, step=step, **facts)
