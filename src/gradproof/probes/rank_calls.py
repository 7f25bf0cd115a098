"""What only trainings of several ranks call: collectives, and a DistributedSampler that is never told its epoch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch

from gradproof.probes.guard import quietly
from gradproof.probes.names import user_line
from gradproof.probes.replacing import replace
from gradproof.record.flight import BETWEEN, COLLECTIVE
from gradproof.tape.living import Living

if TYPE_CHECKING:
    from gradproof.probes.session import Session


# that wait for other ranks; DDP's own are no calls of Python
WAITING = (
    *(
        "all_reduce",
        "broadcast",
        "barrier",
        "reduce",
        "gather",
        "scatter",
        "all_gather",
        "all_to_all",
        "all_to_all_single",
        "send",
        "recv",
    ),
    *("all_gather_object", "broadcast_object_list", "gather_object", "monitored_barrier"),
)


def collectives(session: Session, stack: ExitStack, chosen: Callable[[Any], bool]) -> None:
    """Noted in the flight recorder before and after: a rank that hangs stands in one of them."""
    if session.flight is None or not torch.distributed.is_available():
        return

    def noting(original: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            flight = session.flight
            if flight is None or torch.compiler.is_compiling():
                return original(*args, **kwargs)
            flight.note(session.step, COLLECTIVE, original.__name__)
            try:
                result = original(*args, **kwargs)
            except Exception as error:
                with quietly():
                    session.facts["collective_failed"] = {
                        "step": session.step,
                        "what": original.__name__,
                        "line": user_line(),
                        "text": " ".join(str(error).split())[:200],
                    }
                raise
            flight.note(session.step, BETWEEN)
            return result

        return call

    for name in WAITING:
        if hasattr(torch.distributed, name):
            replace(stack, torch.distributed, name, noting)


def sampler_epochs(session: Session, stack: ExitStack, chosen: Callable[[Any], bool]) -> None:
    """How often a shuffling sampler was asked for an order without having been told of another epoch."""
    if not torch.distributed.is_available():
        return
    sampler = torch.utils.data.distributed.DistributedSampler
    told: Living[bool] = Living()
    passes: Living[int] = Living()

    def set_epoch(original: Callable) -> Callable:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            told[self] = True
            session.facts.pop("sampler_epochs", None)
            return original(self, *args, **kwargs)

        return call

    def iterate(original: Callable) -> Callable:
        def call(self: Any) -> Any:
            with quietly():
                passes[self] = passes.get(self, 0) + 1
                if self.shuffle and self not in told and passes[self] > 1 and type(self) is sampler:
                    line = next(iter(session.lines.sites.get("sampler", [])), None) or user_line()
                    session.facts["sampler_epochs"] = {"passes": passes[self], "line": line}
            return original(self)

        return call

    replace(stack, sampler, "set_epoch", set_epoch)
    replace(stack, sampler, "__iter__", iterate)
