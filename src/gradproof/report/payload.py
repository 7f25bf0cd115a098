"""Everything the page shows of a run: facts as plain data, curves and histories as packed columns.

Thinned to a size that can be mailed; what was not recorded is left out, and the page says so.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from gradproof.diagnosis.findings import Diagnosis
from gradproof.diagnosis.fixes import trial_of_event
from gradproof.diagnosis.ranking import diagnose, last_verdicts
from gradproof.diagnosis.series import Track, spikes, tracks
from gradproof.errors import plain
from gradproof.record.run import Run
from gradproof.record.schema import (
    EXPONENT_BINS,
    EXPONENT_LOW,
    PERCENTILES,
    STATISTICS,
    STEPS_FILE,
    json_line,
)
from gradproof.report.columns import Columns
from gradproof.report.ranks import pack_ranks
from gradproof.report.source import pack_sources
from gradproof.report.thinning import DETAILS, EXTRA, smooth, thin_curve, thin_tensors

POINTS = 4000  # of a curve
FINE, COARSE, SAMPLES = (
    800,
    200,
    24,
)  # stretches of a history, of its details, and exponent histograms, at most
# values for all tensors together, of which a compressed one takes about a byte and a quarter
FINE_VALUES, DETAIL_VALUES, SAMPLE_VALUES = 440_000, 360_000, 500_000
WINDOWS = 50  # a smoothed curve averages over a fiftieth of the run

# column of steps.csv -> what the page calls it
CURVES = {
    "loss": "loss",
    "lr": "learning rate",
    "norm_before_clip": "before the clip",
    "grad_norm": "what the optimizer saw",
    "clip_limit": "limit",
    "cosine": "cosine with the step before",
    "loss_scale": "loss scale",
}

# event -> level and words of its mark
MARKED = {
    "first_nonfinite": ("problem", "first non-finite value"),
    "watching_failed": ("warning", "watching ended here"),
}


def pack_run(run: Run, diagnosis: Diagnosis | None = None, share: float = 1.0) -> dict[str, str]:
    """A run for the page, as text that JSON and HTML can carry; `share` of the room is its own.

    >>> sorted(pack_run(open_run("runs/a")))  # doctest: +SKIP
    ['columns', 'facts']
    """
    columns = Columns()
    facts = json_line(gather_facts(run, diagnosis or diagnose(run), columns, share))
    return {
        "facts": base64.b64encode(zlib.compress(facts.encode(), 9)).decode("ascii"),
        "columns": columns.packed(),
    }


def gather_facts(run: Run, diagnosis: Diagnosis, columns: Columns, share: float = 1.0) -> dict[str, Any]:
    """What the page knows of a run; arrays are references into `columns`."""
    found = list(tracks(run))
    return {
        "name": name_of(run),
        "path": plain(str(run.path)),
        "steps": len(run),
        "status": describe_status(run),
        "diagnosis": diagnosis.as_data(),
        "sources": pack_sources(run, diagnosis),
        "trials": [vars(trial_of_event(e)) for e in run.events if e.get("event") == "trial"],
        "curves": [
            *(curve for track in found for curve in curves_of_track(run, track, columns, share)),
            *noted_curves(run, columns, share),
        ],
        "spikes": [
            {"step": s, "value": v, "usual": u} for t in found for s, v, u in spikes(t.loss, t.steps)[:200]
        ],
        "ranks": pack_ranks(run.ranks),
        "marks": list(find_marks(run, diagnosis)),
        "tensors": run.tensors,
        "order": order_of_execution(run),
        **pack_tensors(run, columns, share),
        "distributions": pack_distributions(run, columns, share),
        "verdicts": last_verdicts(run),
        "shadow": next((e for e in reversed(run.events) if e.get("event") == "shadow"), None),
        "alignment": find_alignment(run),
        "notes": list(
            dict.fromkeys([*run.notes, *diagnosis.notes, *find_repeated_steps(run)])
        ),  # after all has been read
        "info": {
            key: value for key, value in run.info.items() if key not in ("tensors", "statistics", "prints")
        },
    }


def name_of(run: Run) -> str:
    """The name of its directory; `gradproof train` has many that are called NAME/record."""
    path = run.path.absolute()
    return plain(f"{path.parent.name}/record" if path.name == "record" else path.name)


def describe_status(run: Run) -> dict[str, Any]:
    """When it began, whether its end was recorded, and when something was written last."""
    file = run.path / STEPS_FILE
    seconds = run.steps["seconds"]
    return {
        "began": run.info.get("began"),
        "ended": run.info.get("ended"),
        "exit_code": run.info.get("exit_code"),
        "failure": run.info.get("failure"),
        "written": file.stat().st_mtime if file.exists() else None,
        "seconds": float(seconds[-1]) if len(seconds) else None,
    }


def find_repeated_steps(run: Run) -> Iterator[str]:
    """A step number that does not come after the one before: more than one process wrote here."""
    again = int((np.diff(run.steps["step"]) <= 0).sum())
    if again:
        yield (
            f"{STEPS_FILE}: {again} rows do not come after the row before them: two processes wrote into this "
            "directory, or one went on from an earlier step; all rows are shown"
        )


def curves_of_track(run: Run, track: Track, columns: Columns, share: float) -> Iterator[dict[str, Any]]:
    """The curves of one optimizer, each where it was measured."""
    most = int(POINTS * share)
    rows = track.rows[np.argsort(track.steps, kind="stable")]

    def curve(id: str, label: str, steps: np.ndarray, values: np.ndarray) -> dict[str, Any]:
        return {"id": id, "label": label, "track": track.label, **pack_curve(columns, steps, values, most)}

    def column(name: str) -> tuple[np.ndarray, np.ndarray]:
        here = rows[run.seen[name][rows]]
        return run.steps["step"][here], run.steps[name][here]

    for id, label in CURVES.items():
        steps, values = column(id)
        if len(values):
            yield curve(id, label, steps, values)
    steps, values = column("loss")
    window = len(values) // WINDOWS
    if window > 1:
        yield curve("loss_smooth", f"mean of {window} steps", steps, smooth(values, window))
    steps, before = column("norm_before_clip")
    if len(before):
        limit = run.steps["clip_limit"][rows[run.seen["norm_before_clip"][rows]]]
        clipped = np.where(np.isfinite(before), before > limit, True).astype(float)
        yield curve(
            "clip_rate", "share of steps clipped", steps, smooth(clipped, max(10, len(before) // WINDOWS))
        )
    both = rows[run.seen["update_norm"][rows] & run.seen["weight_norm"][rows]]
    if len(both):
        with np.errstate(all="ignore"):
            ratio = run.steps["update_norm"][both] / run.steps["weight_norm"][both]
        yield curve("update_ratio", "update / weight", run.steps["step"][both], ratio)


def noted_curves(run: Run, columns: Columns, share: float) -> Iterator[dict[str, Any]]:
    """What the script itself noted with monitor.log."""
    noted: dict[str, list[tuple[float, float]]] = {}
    for event in run.events:
        if event.get("event") == "log" and isinstance(event.get("step"), (int, float)):
            for key, value in event.items():
                if key not in ("event", "time", "step") and _is_number(value):
                    noted.setdefault(key, []).append((event["step"], float(value)))
    for key, points in noted.items():
        steps, values = np.array(points).T
        yield {
            "id": "noted",
            "label": key,
            "track": "",
            **pack_curve(columns, steps, values, int(POINTS * share)),
        }


def pack_curve(columns: Columns, steps: np.ndarray, values: np.ndarray, most: int) -> dict[str, Any]:
    kept_steps, kept = thin_curve(steps, values, most)
    return {"steps": columns.add(kept_steps, "d4"), "values": columns.add(kept, "f4"), "of": len(values)}


def find_marks(run: Run, diagnosis: Diagnosis) -> Iterator[dict[str, Any]]:
    """Moments worth a mark on every curve."""
    for cause in diagnosis.causes:
        if cause.step is not None and cause.level != "note":
            yield {"step": cause.step, "level": cause.level, "text": cause.id}
    for event in run.events:
        level, text = MARKED.get(event.get("event", ""), ("", ""))
        if text and isinstance(event.get("step"), int):
            yield {"step": event["step"], "level": level, "text": text}
    for step in run.steps["step"][np.nan_to_num(run.steps["skipped"]) > 0][:200]:
        yield {"step": int(step), "level": "note", "text": "step skipped by the GradScaler"}


def order_of_execution(run: Run) -> list[int]:
    """Numbers of all tensors, in the order in which the forward pass comes by; parameters stand at their module."""
    outputs = [tensor["name"] for tensor in run.tensors if tensor["kind"] == "output"]
    ends = {name: place for place, name in enumerate(outputs)}
    begins: dict[str, int] = {}  # a module with parts begins with the first of them
    for place, name in enumerate(outputs):
        for end in [*(i for i, letter in enumerate(name) if letter == "."), len(name)]:
            begins.setdefault(name[:end], place)
    last: dict[str, int] = {}

    def position(number: int) -> tuple[int, int]:
        kind, name = run.tensors[number]["kind"], run.tensors[number]["name"]
        is_output = kind.startswith("output")
        found = ends.get(name) if is_output else begins.get(name.rpartition(".")[0])
        last[kind] = last.get(kind, -1) if found is None else found
        return last[kind], number

    return [number for _, number in sorted(map(position, range(len(run.tensors))))]


def pack_tensors(run: Run, columns: Columns, share: float) -> dict[str, Any]:
    """Histories of all tensors, in as many stretches as there is room for."""
    count = max(1, len(run.tensors))
    frames = len(run.frames)
    fine = max(8, min(FINE, int(share * FINE_VALUES) // (2 * count)))
    coarse = max(8, min(COARSE, int(share * DETAIL_VALUES) // (len(DETAILS) * count)))
    history, details, last = thin_tensors(run, fine, coarse)
    return {
        "history": {
            "frames": frames,
            "first": columns.add(history.first, "d4"),
            "last": columns.add(history.last, "d4"),
            "high": columns.add(history.high, "h2"),
            "low": columns.add(history.low, "h2") if frames > fine else None,
            "bad": columns.add(history.bad, "u1"),
        },
        "details": {
            "names": DETAILS,
            "extra": EXTRA,
            "first": columns.add(details.first, "d4"),
            "last": columns.add(details.last, "d4"),
            "values": columns.add(details.values, "h2"),
        },
        "last": {
            "names": STATISTICS,
            "step": columns.add(last.step, "d4"),
            "values": columns.add(last.values, "f4"),
        },
    }


def pack_distributions(run: Run, columns: Columns, share: float) -> dict[str, Any] | None:
    """Percentiles and exponent counts of the sampled steps; counts as a byte, the root of their share."""
    count, found = len(run.tensors), run.distributions
    if not len(found) or not count:
        return None
    most = max(2, min(SAMPLES, int(share * SAMPLE_VALUES) // (EXPONENT_BINS * count)))
    chosen = np.unique(np.linspace(0, len(found) - 1, most).round().astype(int))
    exponents = np.zeros((count, len(chosen), EXPONENT_BINS), dtype=np.uint8)
    percentiles = np.full((count, len(chosen), len(PERCENTILES)), np.nan, dtype=np.float32)
    steps = []
    for place, index in enumerate(chosen):
        frame = found[int(index)]
        known = frame.numbers < count
        counts = frame.values[known, len(PERCENTILES) :]
        shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
        exponents[frame.numbers[known], place] = np.ceil(255 * np.sqrt(shares))
        percentiles[frame.numbers[known], place] = frame.values[known, : len(PERCENTILES)]
        steps.append(frame.step)
    return {
        "steps": columns.add(np.array(steps), "d4"),
        "low": EXPONENT_LOW,
        "bins": EXPONENT_BINS,
        "exponents": columns.add(exponents, "u1"),
        "percentages": PERCENTILES,
        "percentiles": columns.add(percentiles, "h2"),
    }


def find_alignment(run: Run) -> dict[str, Any] | None:
    """How often targets are the input so many positions ahead, as the last look at them said."""
    for event in reversed(run.events):
        numbers = event.get("numbers")
        if event.get("experiment") == "do_targets_line_up" and isinstance(numbers, dict) and numbers:
            return {
                "step": event.get("step"),
                "shares": [[int(lag.removeprefix("lag ")), float(value)] for lag, value in numbers.items()],
                "where": event.get("where"),
            }
    return None


def _is_number(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    return isinstance(value, (int, float)) or value in ("nan", "inf", "-inf")
