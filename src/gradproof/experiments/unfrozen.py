"""Is what was unfrozen trained? Parameters that were frozen, get gradients now, and are in no optimizer that steps."""

from __future__ import annotations

from collections.abc import Iterator

from gradproof.experiments.evidence import Evidence, Verdict, confirmed
from gradproof.experiments.owners import line_of_optimizer, named_parameters


def is_what_was_unfrozen_trained(evidence: Evidence) -> Iterator[Verdict]:
    """Whoever sets requires_grad back to True means to train: an optimizer that was made while it was False, of the
    parameters that required a gradient then, has never heard of them."""
    known = evidence.memory.setdefault("unfrozen", {"frozen": set(), "stepped": set()})
    named, slots = named_parameters(evidence), evidence.tape.slots
    known["stepped"].update(slots[slot].name for slot in evidence.tape.stepped)
    contributed = {slots[s].name for call in evidence.tape.backwards for _, s, _ in call.contributions}
    wanting = known["frozen"] & contributed - known["stepped"]
    lost = [name for name, p in named.items() if name in wanting and p.requires_grad]
    frozen = {name for name, p in named.items() if not p.requires_grad}
    known["frozen"] |= frozen
    known["stepped"] -= frozen  # by an optimizer of an earlier stage
    if lost:
        shown = ", ".join(lost[:3]) + (f" and {len(lost) - 3} more" if len(lost) > 3 else "")
        line = line_of_optimizer(evidence)
        yield confirmed(
            "param-not-updated/unfrozen",
            f"{shown} were frozen, require a gradient since, and get one at step {evidence.step}; no optimizer "
            "has changed them since",
            where=f"{lost[0]} ({line})" if line else lost[0],
            fix='after unfreezing, optimizer.add_param_group({"params": ...}), or make the optimizer of all parameters '
            "from the start: frozen ones have no gradient and are passed over",
            lasting=True,
        )
