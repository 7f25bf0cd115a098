"""Accelerate: `watch_prepared(accelerator, model, optimizer)` takes what `accelerator.prepare` gave back."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from gradproof.probes.watch import Monitor, default_path, watch

if TYPE_CHECKING:
    from accelerate import Accelerator


@contextmanager
def watch_prepared(
    accelerator: Accelerator,
    model: Any,
    optimizer: Any,  # or several
    *,
    out: str | os.PathLike | None = None,
    **options: Any,
) -> Iterator[Monitor]:
    """`gradproof.watch` of a prepared model and optimizer; steps that only accumulate are no steps of the run.

    >>> with watch_prepared(accelerator, model, optimizer, out="runs/a"):  # doctest: +SKIP
    ...     train()
    """
    wrapped = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
    # torch's own optimizers have the hooks; names are those of the model before DDP wrapped it
    inner = [getattr(each, "optimizer", each) for each in wrapped]
    with watch(
        accelerator.unwrap_model(model), inner, out=out or default_path("accelerate"), **options
    ) as monitor:
        yield monitor
        accelerator.wait_for_everyone()
