"""`gradproof.watch`: the watching of a loop, put together with the experiment that locates a NaN."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from gradproof.probes.session import Session
    from gradproof.probes.watch import Monitor


@contextmanager
def watch(
    model: nn.Module | Sequence[nn.Module] | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    out: str | os.PathLike | None = None,
    schedule: str | None = None,
    budget: float | None = None,
) -> Iterator[Monitor]:
    """Record the training inside the block as a run on disk; leaves no hook behind.

    >>> with gradproof.watch(model, optimizer, out="runs/a") as run:  # doctest: +SKIP
    ...     train()
    >>> print(gradproof.diagnose("runs/a"))  # doctest: +SKIP
    """
    from gradproof.probes.watch import watch as watch_plainly

    with watch_plainly(
        model, optimizer, out=out, schedule=schedule, budget=budget, examiner=LateExamination
    ) as monitor:
        yield monitor


class LateExamination:
    """The experiments, loaded when there is something to find."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._real: Any = None

    def __call__(self, tape: Any, step: int, thorough: bool) -> None:
        self._examination()(tape, step, thorough)

    def locate(self, tape: Any, step: int, again: Any = None) -> bool:
        return self._examination().locate(tape, step, again)

    def _examination(self) -> Any:
        if self._real is None:
            from gradproof.experiments.examination import Examination

            self._real = Examination(self._session)
        return self._real
