"""Which file, and which row of it, a sample of the batch is: what the loaders said when they handed it out."""

from __future__ import annotations

from collections import Counter

from torch import Tensor

from gradproof.ask.answer import Row
from gradproof.instruments.evidence import Evidence
from gradproof.instruments.fetched import Fetched, slots_of


def loaders_of(evidence: Evidence) -> list[tuple[Fetched, bool]]:
    """Each loader's last batch, and whether this step computed with it."""
    return [
        (loader, bool(loader.samples and slots_of(evidence.flow, loader)))
        for loader in (Fetched(**facts) for facts in evidence.facts.fetched)
    ]


def place_of_sample(evidence: Evidence, sample: int, batch: int) -> str:
    """`shards/b.csv, row 17`; empty where no loader of this step handed out a batch of that size, or two did."""
    mine = [loader for loader, used in loaders_of(evidence) if used and len(loader.rows) == batch > sample]
    places = {written(loader, sample) for loader in mine}
    return places.pop() if len(places) == 1 else ""


def written(loader: Fetched, sample: int) -> str:
    row = loader.rows[sample]
    if sample >= len(loader.places):
        return f"row {row} of {loader.name or 'the data set'}"
    source, inner = loader.places[sample]
    return f"{loader.sources[source]}, row {inner}"


def by_source(evidence: Evidence) -> list[Row]:
    """The samples of this step, counted by the file or part that they lie in; then every loader that was seen."""
    rows: list[Row] = []
    known = loaders_of(evidence)
    for loader, used in known:
        counted = Counter(source for source, _ in loader.places) if used else {}
        for source, count in sorted(counted.items(), key=lambda entry: -entry[1]):
            inner = [number for which, number in loader.places if which == source]
            rows.append(
                {
                    "what": f"source {loader.sources[source]}",
                    "samples": count,
                    "rows": f"{min(inner)} to {max(inner)}" if count > 1 else str(inner[0]),
                    "twice": count - len(set(inner)),
                }
            )
    last = {(loader.line, loader.name, loader.length): (loader, used) for loader, used in known}  # epochs
    return rows + [described(loader, used) for loader, used in last.values()]


def last_opened(evidence: Evidence) -> list[Row]:
    """The files that were opened last before this step ended, the newest first: of shards, the one it was read from."""
    newest = list(evidence.facts.opened.items())[::-1]
    return [{"what": f"file {name}", "opened_at_step": step} for name, step in newest]


def described(loader: Fetched, used: bool) -> Row:
    return {
        "what": f"loader read at {loader.line or '?'}",
        "data_set": f"{loader.name or '?'} of {loader.length}",
        "split": loader.split or "not said",
        "in_this_step": used,
    }


def also_validated(evidence: Evidence, inputs: list[Tensor]) -> int:
    """Samples of those that validation was given, as far as they were kept, that are in this step's inputs, too."""
    found = 0
    for sample in (row for kept in evidence.facts.evaluated.values() for batch in kept for row in batch):
        alike = [x for x in inputs if x.dim() > 1 and x.shape[1:] == sample.shape and x.dtype == sample.dtype]
        found += any(bool((x == sample).flatten(1).all(1).any()) for x in alike)
    return found
