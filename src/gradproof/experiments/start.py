"""Where does the loss stand at the start? A network that knows nothing should lose what guessing loses."""

from __future__ import annotations

import math
from collections.abc import Iterator

from gradproof.experiments.evidence import Evidence, Verdict, confirmed
from gradproof.experiments.flow import VIEWS
from gradproof.experiments.nonfinite import place_of

EARLY = 3


def where_does_the_loss_start(evidence: Evidence) -> Iterator[Verdict]:
    """A cross-entropy far above ln(classes) at the first steps: the scores start too large."""
    if evidence.step > EARLY:
        return
    flow = evidence.flow
    for comparison in flow.comparisons:
        maker = flow.maker(flow.behind(comparison.prediction, VIEWS))
        if comparison.kind != "class" or maker is None or maker.name != "_log_softmax":
            continue
        scores = maker.reads[0]
        found = flow.outcome([scores, comparison.prediction, comparison.target])
        if len(found) < 3 or found[comparison.prediction].dim() != 2:
            continue
        log_probs, target = found[comparison.prediction].double(), found[comparison.target].reshape(-1)
        valid = (target >= 0) & (target < log_probs.shape[1])
        if not bool(valid.any()) or log_probs.shape[0] == log_probs.shape[1]:
            continue  # all pairs of a batch: sharp by its temperature
        loss = float(-log_probs[valid].gather(1, target[valid][:, None]).mean())
        guess, size = math.log(log_probs.shape[1]), float(found[scores].double().std())
        began = evidence.losses[0] if evidence.step > 0 and evidence.losses else loss
        if began <= 2 * guess + 1:
            return  # it was well at the start: what came after is the first steps' doing
        if loss > 2 * guess + 1 and size > 2:
            last = flow.maker(flow.behind(scores, VIEWS))
            yield confirmed(
                "bad-init/loss-at-start",
                f"at step {evidence.step} the loss is {loss:.3g}; guessing among {log_probs.shape[1]} classes loses "
                f"{guess:.3g}. The scores have a standard deviation of {size:.3g}",
                where=place_of(last.module, last.line) if last is not None else None,
                fix=f"make the last layer's weights {size:.2g} times smaller at the start",
                if_troubled=True,
                confidence="likely",
                lasting=True,
            )
            return
