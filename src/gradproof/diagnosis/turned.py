"""What came of exchanging data and weights around a turn of the loss: which of the two turned it, and which tensor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gradproof.diagnosis.findings import Symptom
from gradproof.record.run import Run


def last_swap(run: Run) -> dict[str, Any] | None:
    """The last exchange that was made, if it says anything."""
    found = [event for event in run.events if event.get("event") == "swapped" and event.get("losses")]
    return found[-1] if found else None


def say_swap(found: dict[str, Any]) -> str:
    """`the batches of steps 3001, 3002 lose 9.8 with their own weights and 10.2 with those of step 2633 …: …`"""
    losses = found["losses"]
    early, late = (", ".join(map(str, found[side])) for side in ("early", "late"))
    meaning = {
        "data": "it is the data",
        "weights": "it is the weights",
        "both": "each of the two raises it alone",
        "neither": "neither of the two raises it alone: it is how they go together, or what the step does",
    }.get(found["blame"], "not decided")
    return (
        f"the batches of steps {late} lose {losses['late_as_it_was']:.4g} with their own weights, "
        f"{losses['late_batch_early_weights']:.4g} with those of steps {early}; the batches of those lose "
        f"{losses['early_as_it_was']:.4g} with their own, {losses['early_batch_late_weights']:.4g} with the late ones: "
        f"{meaning}"
    )


def is_of_its_batch(run: Run, step: int) -> bool:
    """Whether a spike is one for other weights, too: no step was too long, the batch is an odd one."""
    found = last_swap(run)
    return found is not None and found["blame"] == "data" and found.get("turned") == step


def turned_by(run: Run) -> Iterator[Symptom]:
    """The data, as a warning, for harder ones may come by design; one tensor that alone brings it back is a problem."""
    found = last_swap(run)
    if found is None:
        return
    step = found.get("turned")
    if found["blame"] == "data" and found.get("passing"):
        yield Symptom("odd_batch", "note", say_swap(found), step)
    elif found["blame"] == "data":
        suspects = ("data-order-or-sampling/changed-on-the-way",)
        text = "; ".join([say_swap(found), *(found.get("changed") or [])[:2]])
        yield Symptom("turned_by_the_data", "warning", text, step, None, suspects)
    elif found["blame"] == "weights":
        back = found.get("put_back") or []
        said = [f"{each['part']} put back takes {100 * each['share']:.0f} % of it away" for each in back[:3]]
        if "moved" in found:
            steps = f"steps {found['early'][-1]} to {found['late'][0]}"
            explained = f"its updates explain at most {found['explained']:.3g}"
            said.append(f"from {steps} it went {found['moved']:.3g} far, of which {explained}")
        if written := found.get("written"):
            said.append(f"the script writes into it at {written}")
        text = "; ".join([say_swap(found), *said])
        spoilt = found.get("spoilt") or ""
        if spoilt:
            suspects = ("weights-state-error/one-tensor-spoilt",)
            yield Symptom("one_tensor_spoilt", "problem", text, step, spoilt, suspects)
        else:
            yield Symptom("turned_by_the_weights", "note", text, step)
