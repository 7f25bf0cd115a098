"""What a run directory holds: its files, its columns, and the frame that carries one step's statistics."""

from __future__ import annotations

import json
import math
import struct
import zlib
from typing import Any

import numpy as np

FORMAT = 1  # a reader refuses what is newer

INFO_FILE = "run.json"
STEPS_FILE = "steps.csv"
FRAMES_FILE = "tensors.bin"
EVENTS_FILE = "events.jsonl"
EXAMINATION_FILE = (
    "examination.jsonl"  # events, too: written by whoever examines the taped steps, then or later
)
CUT_OFF_FILE = "cut_off"  # empty; made where a full disk lets nothing else be written
PROGRESS_FILE = "examination.json"  # how far it has come, for whoever waits

# What became of one question at one taped step, the `outcome` of an `asked` event. A question that has no object (the
# step has no tokens, no half precision) is "not asked", with a reason that begins with DOES_NOT_APPLY: it is not open.
# One that a rank's part of a step cannot answer begins with OUT_OF_REACH: it stays open, and nobody asks it again.
OUTCOMES = ("confirmed", "excluded", "undecided", "nothing", "failed", "not asked")
DOES_NOT_APPLY = "does not apply"
OUT_OF_REACH = "cannot be asked of one rank"

# One row of steps.csv. Empty means "not measured at this step"; nan and inf mean exactly that.
STEP_COLUMNS = (
    "step",  # one optimizer step (or one skipped by a GradScaler), counted from 0
    "seconds",  # since the run began
    "epoch",
    "batch",  # within the epoch
    "optimizer",  # which one stepped, when there are several
    "loss",  # what backward was called on, summed over the micro-batches of the step
    "lr",  # the largest of the parameter groups
    "grad_norm",  # what the optimizer saw
    "norm_before_clip",
    "clip_limit",
    "weight_norm",
    "update_norm",
    "cosine",  # between this gradient and the one before, on a sample of each tensor
    "backwards",  # micro-batches accumulated
    "loss_scale",
    "skipped",  # 1: the GradScaler found inf and did not step
    "depth",  # a place in DEPTHS: 0 bare, 1 light, 2 parameters, 3 optimizer, 4 all
    # what happened, in order: g gradients of an earlier step still there, z zero_grad, b backward, u unscale,
    # c clip norm, v clip value, s step, x step skipped, l scheduler
    "order",
)
TEXT_COLUMNS = ("order",)
WHOLE_COLUMNS = (
    "step",
    "epoch",
    "batch",
    "optimizer",
    "backwards",
    "skipped",
    "depth",
)  # 0, 1, 2, … or empty

# One row of a statistics frame. All but nan and inf are over the finite entries of the tensor.
STATISTICS = (
    "nan",
    "inf",
    "zero",
    "subnormal",
    "min",
    "max",
    "absmax",
    "mean",
    "std",
    "norm",
    "cosine",  # gradients: with the step before
    "eps_share",  # Adam's v: share of entries whose √v is below ε
    "dead",  # outputs: share of units that are the same for the whole batch
)
PERCENTILES = (1, 5, 25, 50, 75, 95, 99)
# The exponent histogram counts entries by binary exponent, two to a bin; the ends collect the rest.
EXPONENT_LOW, EXPONENT_BINS = -80, 64

KINDS = ("output", "output_gradient", "gradient", "weight", "update", "adam_m", "adam_v")

DEPTHS = ("bare", "light", "parameters", "optimizer", "all")

# A frame: magic, what it holds, step, rows, bytes of payload, CRC of payload; then the payload:
# rows × uint32 tensor numbers (run.json names them), then rows × columns of float32.
FRAME_HEADER = struct.Struct("<4sIQIII")
FRAME_MAGIC = b"GPf1"
STATISTICS_FRAME, DISTRIBUTION_FRAME = 1, 2
FRAME_COLUMNS = {
    STATISTICS_FRAME: len(STATISTICS),
    DISTRIBUTION_FRAME: len(PERCENTILES) + EXPONENT_BINS,
}


def pack_frame(content: int, step: int, numbers: np.ndarray, values: np.ndarray) -> bytes:
    """One step's statistics as bytes that can be appended and checked."""
    largest = np.finfo(np.float32).max
    finite = np.isfinite(values)
    values = np.where(
        finite, np.clip(values, -largest, largest), values
    )  # a finite 1e39 must not turn into inf
    payload = numbers.astype("<u4").tobytes() + values.astype("<f4").tobytes()
    header = FRAME_HEADER.pack(FRAME_MAGIC, content, step, len(numbers), len(payload), zlib.crc32(payload))
    return header + payload


def json_line(data: Any) -> str:
    """Data as one line of standard JSON: nan and inf become the strings "nan", "inf", "-inf"."""
    return json.dumps(_plain(data), allow_nan=False, ensure_ascii=False)


def _plain(data: Any) -> Any:
    if isinstance(data, dict):
        return {str(key): _plain(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_plain(value) for value in data]
    if isinstance(data, (np.generic, np.ndarray)):
        return _plain(data.tolist())
    if isinstance(data, float) and not math.isfinite(data):
        return str(data)
    if data is None or isinstance(data, (str, int, float, bool)):
        return data
    return str(data)
