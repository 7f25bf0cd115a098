"""A run as two flat tables for spreadsheets, pandas and duckdb: steps, and tensors with a row a tensor and step."""

from __future__ import annotations

import csv
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gradproof.errors import UserError
from gradproof.files import has_file, open_file, refuse_links
from gradproof.record.run import Run
from gradproof.record.schema import STATISTICS, STEP_COLUMNS, STEPS_FILE, WHOLE_COLUMNS

ROWS_AT_ONCE = 200_000  # of the tensors' table in memory


def write_csv(run: Run, out: Path) -> None:
    """steps.csv as it is, and tensors.csv; an empty cell was not measured, nan and inf mean exactly that."""
    out.mkdir(parents=True, exist_ok=True)
    refuse_links(out / STEPS_FILE, out / "tensors.csv")
    if has_file(run.path / STEPS_FILE):
        with open_file(run.path / STEPS_FILE) as source, open(out / STEPS_FILE, "wb") as copy:
            shutil.copyfileobj(source, copy)
    with open(out / "tensors.csv", "w", newline="", encoding="utf-8") as stream:
        table = csv.writer(stream)
        table.writerow(["step", "kind", "name", *STATISTICS])
        for rows in tensor_rows(run):
            columns = [rows[name].tolist() for name in ("step", "kind", "name")]
            numbers = [[_cell(value) for value in rows[name].tolist()] for name in STATISTICS]
            table.writerows(zip(*columns, *numbers, strict=True))


def write_parquet(run: Run, out: Path) -> None:
    """steps.parquet and tensors.parquet; null was not measured."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise UserError("Parquet needs pyarrow: pip install 'gradproof[parquet]'") from None
    out.mkdir(parents=True, exist_ok=True)
    refuse_links(out / "steps.parquet", out / "tensors.parquet")
    columns = {}
    for name in STEP_COLUMNS:
        values, empty = run.steps[name], ~run.seen[name]
        if name in WHOLE_COLUMNS:
            values = np.where(empty, 0, values).astype(np.int64)
        columns[name] = pa.array(values, mask=empty)
    pq.write_table(pa.table(columns), out / "steps.parquet", compression="zstd")
    text = pa.dictionary(pa.int32(), pa.string())
    schema = pa.schema(
        [("step", pa.int64()), ("kind", text), ("name", text), *((name, pa.float32()) for name in STATISTICS)]
    )
    with pq.ParquetWriter(out / "tensors.parquet", schema, compression="zstd") as writer:
        for rows in tensor_rows(run):
            made = {n: pa.array(rows[n], mask=np.isnan(rows[n])) for n in STATISTICS}
            for name in ("kind", "name"):
                made[name] = pa.array(rows[name], pa.string()).dictionary_encode()
            writer.write_table(
                pa.table({**made, "step": pa.array(rows["step"])}).select(schema.names).cast(schema)
            )


def tensor_rows(run: Run) -> Iterator[dict[str, Any]]:
    """The statistics frames as columns, so many rows at a time."""
    kinds, names = (
        np.array([tensor[key] for tensor in run.tensors], dtype=object) for key in ("kind", "name")
    )
    batch: list = []
    for place, frame in enumerate(run.frames, 1):
        batch.append(frame)
        if sum(len(f.numbers) for f in batch) < ROWS_AT_ONCE and place < len(run.frames):
            continue
        numbers = np.concatenate([f.numbers for f in batch])
        values = np.concatenate([f.values for f in batch])
        yield {
            "step": np.concatenate([np.full(len(f.numbers), f.step, dtype=np.int64) for f in batch]),
            "kind": kinds[numbers],
            "name": names[numbers],
            **{statistic: values[:, column] for column, statistic in enumerate(STATISTICS)},
        }
        batch = []


def _cell(value: float) -> str:
    return "" if value != value else f"{value:.9g}"
