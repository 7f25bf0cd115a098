"""Two or more runs side by side: curves, health, and what changed in code, arguments, versions and settings.

Plain functions of runs that return plain data, for the terminal and for the page; the first run is the one that
the others are compared with.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gradproof.diagnosis.findings import LEVELS, Diagnosis, Finding
from gradproof.diagnosis.ranking import diagnose
from gradproof.errors import plain
from gradproof.record.run import Run

MOST_TENSORS = 12


@dataclass(frozen=True)
class Health:
    """How one run did: its gravest level (None: nothing was found), its first cause, and its loss."""

    worst: str | None
    title: str
    where: str | None
    steps: int
    first_loss: float  # nan where no loss was measured
    last_loss: float
    best_loss: float
    complete: bool = False  # all was asked without which nobody may call it good


@dataclass(frozen=True)
class FindingRow:
    """One cause over all runs: its level in each, None where it was not found."""

    id: str
    levels: tuple[str | None, ...]
    where: tuple[str | None, ...]


@dataclass(frozen=True)
class Difference:
    """Something that is not the same in all runs; None where a run does not have it."""

    group: str  # code, arguments, versions, optimizer, model, surroundings
    what: str
    values: tuple[str | None, ...]


@dataclass(frozen=True)
class TensorDifference:
    """A tensor whose typical norm differs: the median over the measured steps of each run."""

    kind: str
    name: str
    values: tuple[float, ...]
    ratio: float  # of the largest to the smallest


@dataclass(frozen=True)
class Comparison:
    """Everything that `gradproof compare` says, in the order in which it says it."""

    labels: tuple[str, ...]
    paths: tuple[str, ...]
    health: tuple[Health, ...]
    findings: tuple[FindingRow, ...]
    differences: tuple[Difference, ...]
    apart_since: tuple[
        int | None, ...
    ]  # first step whose loss is not the first run's; None: the same throughout
    tensors: tuple[TensorDifference, ...]
    code: tuple[str, ...]  # unified diff of each script against the first run's; "" if equal or not recorded

    def as_data(self) -> dict[str, Any]:
        return asdict(self)


def compare_trainings(runs: Sequence[Run], diagnoses: Sequence[Diagnosis] = ()) -> Comparison:
    """Everything in which runs differ; diagnoses that are at hand already need not be made again."""
    found = list(diagnoses) or [diagnose(run) for run in runs]
    return Comparison(
        labels=tuple(label_runs([run.path for run in runs])),
        paths=tuple(plain(str(run.path)) for run in runs),
        health=tuple(summarise(run, each) for run, each in zip(runs, found, strict=True)),
        findings=tuple(list_findings(found)),
        differences=tuple(find_differences(runs)),
        apart_since=tuple(find_parting(runs[0], run) for run in runs),
        tensors=tuple(compare_tensors(runs)),
        code=tuple(diff_scripts(runs[0], run) for run in runs),
    )


def label_runs(paths: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell the runs apart; the same run twice gets a number."""
    parts = [path.absolute().parts for path in paths]
    deepest = max(map(len, parts))
    length = 1
    while length < deepest and len({each[-length:] for each in parts}) < len(set(parts)):
        length += 1
    labels = [plain("/".join(each[-length:])) for each in parts]
    twice = {label for label in labels if labels.count(label) > 1}
    return [f"{label} ({n})" if label in twice else label for n, label in enumerate(labels, 1)]


def read_curve(run: Run, column: str = "loss") -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of a column of steps.csv, where it was measured; NaN and Inf are kept."""
    seen = run.seen[column]
    return run.steps["step"][seen].astype(np.int64), run.steps[column][seen]


def summarise(run: Run, diagnosis: Diagnosis) -> Health:
    losses = read_curve(run)[1]
    window = max(1, len(losses) // 20)
    finite = losses[np.isfinite(losses)]
    first = diagnosis.causes[0] if diagnosis.causes else None
    return Health(
        worst=diagnosis.worst,
        title=first.title or first.id if first else "",
        where=first.where if first else None,
        steps=len(run),
        first_loss=float(losses[0]) if len(losses) else float("nan"),
        last_loss=float(np.median(losses[-window:]))
        if len(losses)
        else float("nan"),  # nan if a nan is in it
        best_loss=float(finite.min()) if len(finite) else float("nan"),
        complete=diagnosis.sure,
    )


def list_findings(diagnoses: Sequence[Diagnosis]) -> list[FindingRow]:
    """Causes of any of the runs, the gravest first; what all runs share comes after what tells them apart."""
    by_run: list[dict[str, Finding]] = [{} for _ in diagnoses]
    for mine, diagnosis in zip(by_run, diagnoses, strict=True):
        for cause in diagnosis.causes:
            mine.setdefault(cause.id, cause)
    rows = []
    for id in dict.fromkeys(id for mine in by_run for id in mine):
        found = [mine.get(id) for mine in by_run]
        rows.append(
            FindingRow(
                id,
                tuple(each.level if each else None for each in found),
                tuple(each.where if each else None for each in found),
            )
        )
    return sorted(rows, key=_gravity)


def _gravity(row: FindingRow) -> tuple[int, bool]:
    return min(LEVELS.index(level) for level in row.levels if level), len(set(row.levels)) == 1


def find_differences(runs: Sequence[Run]) -> Iterator[Difference]:
    """What run.json says differently: code, arguments, versions, optimizers, parameters, surroundings."""
    for group, describe in DESCRIPTIONS:
        described = [describe(run.info) for run in runs]
        for what in dict.fromkeys(key for each in described for key in each):
            values = tuple(each.get(what) for each in described)
            if len(set(values)) > 1:
                yield Difference(group, what, values)


def describe_code(info: dict[str, Any]) -> dict[str, str]:
    source = info.get("source") or {}
    named = {"script": source.get("file"), "text (sha256)": (source.get("sha256") or "")[:12]}
    commit = source.get("commit")
    return {key: value for key, value in {**named, "commit": commit and commit[:12]}.items() if value}


def describe_arguments(info: dict[str, Any]) -> dict[str, str]:
    """`--lr 3e-4`, `--lr=3e-4`, `lr=3e-4` and flags by name, other words by their place."""
    words = [str(word) for word in info.get("command", [])[1:]]
    found: dict[str, str] = {}
    place = 0
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if equals:
            found[name] = value
        elif word.startswith("-") and not _is_number(word):
            has_value = bool(words) and (not words[0].startswith("-") or _is_number(words[0]))
            found[word] = words.pop(0) if has_value else "given"
        else:
            place += 1
            found[f"word {place}"] = word
    return found


def describe_versions(info: dict[str, Any]) -> dict[str, str]:
    return {key: str(value) for key, value in (info.get("versions") or {}).items()}


def describe_optimizers(info: dict[str, Any]) -> dict[str, str]:
    """Class and settings, each group's own; where there is one group, without its number."""
    found: dict[str, str] = {}
    optimizers = info.get("optimizers", [])
    for optimizer in optimizers:
        name = f"{optimizer.get('name') or 'optimizer'} " if len(optimizers) > 1 else ""
        found[f"{name}class"] = str(optimizer.get("class"))
        groups = optimizer.get("groups", [])
        for number, group in enumerate(groups):
            label = f"{name}group {number} " if len(groups) > 1 else name
            found.update({f"{label}{key}": str(value) for key, value in group.items()})
    return found


def describe_parameters(info: dict[str, Any]) -> dict[str, str]:
    """Shape and dtype of every parameter, and whether it is trained."""
    return {
        p["name"]: f"{list(p.get('shape', ()))} {p.get('dtype', '')}"
        + ("" if p.get("trainable") else ", frozen")
        for p in info.get("parameters", [])
    }


def describe_surroundings(info: dict[str, Any]) -> dict[str, str]:
    named = {key: info.get(key) for key in ("fix", "world", "schedule", "exit_code", "failure")}
    return {key: str(value) for key, value in named.items() if value}  # an exit code of 0 is no news


DESCRIPTIONS = (
    ("code", describe_code),
    ("arguments", describe_arguments),
    ("versions", describe_versions),
    ("optimizer", describe_optimizers),
    ("model", describe_parameters),
    ("surroundings", describe_surroundings),
)


def find_parting(first: Run, other: Run) -> int | None:
    """The first step both have at which their losses differ by a bit."""
    ours, theirs = (dict(zip(*(c.tolist() for c in read_curve(run)), strict=True)) for run in (first, other))
    for step in sorted(ours.keys() & theirs.keys()):
        if ours[step] != theirs[step] and not (np.isnan(ours[step]) and np.isnan(theirs[step])):
            return step
    return None


def compare_tensors(runs: Sequence[Run]) -> list[TensorDifference]:
    """The tensors of all runs whose typical gradients and updates differ most, by twice at least."""
    found = []
    for kind in ("gradient", "update"):
        typical = [typical_norms(run, kind) for run in runs]
        for name in typical[0]:
            values = [each.get(name, float("nan")) for each in typical]
            low, high = min(values), max(values)
            if all(np.isfinite(values)) and low > 0 and high / low >= 2:
                found.append(TensorDifference(kind, name, tuple(values), high / low))
    return sorted(found, key=lambda each: -each.ratio)[:MOST_TENSORS]


def typical_norms(run: Run, kind: str) -> dict[str, float]:
    table = run.table(kind, "norm")
    columns = (column[np.isfinite(column)] for column in table.values.T)
    return {
        name: float(np.median(column))
        for name, column in zip(table.names, columns, strict=True)
        if len(column)
    }


def diff_scripts(first: Run, other: Run) -> str:
    """A unified diff of the two scripts as they were when they ran; empty if equal or not recorded."""
    before, after = first.script(), other.script()
    if before is None or after is None:
        return ""
    here, there = plain(str(first.path)), plain(str(other.path))
    return "\n".join(difflib.unified_diff(before, after, here, there, lineterm="", n=2))


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
