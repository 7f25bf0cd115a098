"""What the page costs at 1,000 tensors × 20,000 steps: making the report, opening it, zooming in it, following a run.

    python benchmarks/page.py [--steps 20000] [--tensors 1000] [--keep DIR]

The run is synthetic (every statistic of every tensor at every step, 1 GB), the page is opened in Chromium.
"""

from __future__ import annotations

import math
import time
from pathlib import Path

import numpy as np

from gradproof.record.schema import (
    DISTRIBUTION_FRAME,
    EXPONENT_BINS,
    KINDS,
    PERCENTILES,
    STATISTICS,
    STATISTICS_FRAME,
)
from gradproof.record.writer import RunWriter

OF_A_BLOCK = ("norm1", "attention.qkv", "attention.out", "norm2", "mlp.up", "mlp.gelu", "mlp.down")


def write_large_run(path: Path, tensors: int = 1000, steps: int = 20_000, seed: int = 0) -> Path:
    """A run that trains for a while, spikes at three quarters, and recovers; one tensor has a NaN for ten steps."""
    rng = np.random.default_rng(seed)
    info = {
        "command": ["synthetic.py"],
        "began": time.time() - steps,
        "ended": time.time(),
        "versions": {"gradproof": "benchmark"},
    }
    writer = RunWriter(path, info)
    per_kind = math.ceil(tensors / len(KINDS))
    names = [f"blocks.{i // len(OF_A_BLOCK)}.{OF_A_BLOCK[i % len(OF_A_BLOCK)]}" for i in range(per_kind)]
    keys = [(kind, name) for kind in KINDS for name in names][:tensors]
    numbers = np.array(
        [
            writer.add_tensor(kind, name if kind.startswith("output") else f"{name}.weight", shape=[256, 256])
            for kind, name in keys
        ]
    )
    level = rng.normal(0, 2, (tensors, 1))
    column = {name: place for place, name in enumerate(STATISTICS)}
    values = np.zeros((tensors, len(STATISTICS)))
    for step in range(steps):
        swell = 6 * math.exp(-(((step - 0.75 * steps) / (0.02 * steps)) ** 2))
        norm = np.exp(level[:, 0] - step / steps + swell + 0.2 * rng.standard_normal(tensors))
        values[:] = norm[:, None] / 256
        values[:, column["norm"]] = norm
        values[:, column["absmax"]] = norm / 50
        values[:, [column["nan"], column["inf"], column["zero"], column["subnormal"]]] = 0
        values[:, [column["cosine"], column["eps_share"], column["dead"]]] = 0.01
        if 0.8 * steps <= step < 0.8 * steps + 10:
            values[tensors // 3, column["nan"]] = 7
        writer.write_frame(STATISTICS_FRAME, step, numbers, values)
        if step % max(1, steps // 40) == 0:
            counts = rng.poisson(20, (tensors, EXPONENT_BINS)) * (np.arange(EXPONENT_BINS) % 40 > 20)
            spread = np.sort(rng.normal(0, 1, (tensors, len(PERCENTILES))), axis=1)
            writer.write_frame(DISTRIBUTION_FRAME, step, numbers, np.hstack([spread, counts]))
        loss = 4 * math.exp(-3 * step / steps) + 0.1 * rng.standard_normal() + 0.2 * swell
        before = float(np.exp(0.3 * rng.standard_normal() + swell))
        writer.write_step(
            {
                "step": step,
                "seconds": 0.5 * step,
                "optimizer": 0,
                "loss": loss,
                "lr": 3e-4 * min(1, step / 200),
                "norm_before_clip": before,
                "clip_limit": 1.0,
                "grad_norm": min(before, 1.0),
                "weight_norm": 80.0,
                "update_norm": 0.02,
                "backwards": 1,
                "depth": 4,
                "order": "zbcs",
            }
        )
    writer.close()
    return writer.path
