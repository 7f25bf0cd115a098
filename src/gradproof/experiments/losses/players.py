"""Do the two players of a GAN want different things? What each of their steps asks of the discriminator for fakes."""

from __future__ import annotations

from collections.abc import Iterator

from gradproof.experiments.verdict import Verdict, confirmed, excluded
from gradproof.instruments.evidence import Evidence
from gradproof.instruments.flow import VIEWS, Comparison, place_of

FAMILY = "loss-scale-or-sign"


def do_the_players_disagree(evidence: Evidence) -> Iterator[Verdict]:
    """The judge learns to call fakes one thing, the maker must learn to have them called the other."""
    if len(evidence.optimizers) < 2:
        return
    seen: dict[str, float] = evidence.memory.setdefault("what fakes are called", {})
    where = None
    stepped = {evidence.slot(slot).name for slot in evidence.tape.stepped}
    for comparison in evidence.flow.comparisons:
        label = constant_label(evidence, comparison)
        if label is None:
            continue
        behind, last = parameters_behind(evidence, comparison)
        if last & stepped:
            if behind - stepped:  # what the judge judges was made by weights that do not step
                seen["judge"] = label
        elif stepped and last:
            seen["maker"] = label
            where = comparison.operation.line
    if len(seen) < 2 or where is None:
        return
    if (seen["judge"] > 0.5) == (seen["maker"] > 0.5):
        yield confirmed(
            f"{FAMILY}/players-agree",
            f"the discriminator is trained to answer {seen['judge']:g} for fakes, and the generator to make it answer "
            f"{seen['maker']:g}: both pull the same way",
            where=place_of("", where),
            fix=f"train the generator with the label {1 - round(seen['judge'])}",
            confidence="proven",  # what each step asks of whose weights
        )
    else:
        text = f"fakes are called {seen['judge']:g} by the discriminator's loss, {seen['maker']:g} by the generator's"
        yield excluded(f"{FAMILY}/players-agree", text)


def constant_label(evidence: Evidence, comparison: Comparison) -> float | None:
    """The one number that a yes-or-no loss wants of all samples."""
    target = evidence.flow.value(comparison.target) if comparison.kind == "binary" else None
    if target is None or not target.numel() or bool((target != target.reshape(-1)[0]).any()):
        return None
    return float(target.reshape(-1)[0])


def parameters_behind(evidence: Evidence, comparison: Comparison) -> tuple[set[str], set[str]]:
    """The parameters a prediction was made with, and those of its last layer."""
    flow = evidence.flow
    behind = flow.ancestors(comparison.prediction)
    names = {slot.index: slot.name for slot in evidence.tape.parameters if slot.index in behind}
    last = next((op for op in reversed(flow.layers) if not behind.isdisjoint(op.makes)), None)
    used = {flow.behind(slot, VIEWS) for slot in last.reads} if last is not None else set()
    return set(names.values()), {names[slot] for slot in used if slot in names}
