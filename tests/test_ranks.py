"""Two ranks as two runs side by side: gradients not averaged, different weights, the same data; and in step."""

import pytest

import gradproof
from gradproof.record.writer import RunWriter


def write(path, rank, gradient=1.0, weight=10.0, loss=1.0):
    writer = RunWriter(path, {"rank": rank, "world": 2})
    for step in range(12):
        writer.write_step(
            {
                "step": step,
                "loss": loss / (step + 1),
                "grad_norm": gradient / (step + 1),
                "weight_norm": weight,
                "order": "zbs",
                "lr": 0.1,
            }
        )
    writer.close()


@pytest.mark.parametrize(
    "other, what",
    [
        ({"gradient": 1.3, "loss": 1.1}, "gradients-not-averaged"),
        ({"weight": 11.0, "loss": 1.1}, "initial-weights"),
        ({}, "same-data"),
        ({"loss": 1.1}, ""),
    ],
)
@pytest.mark.parametrize("first", ["run", "run.rank0"])
def test_ranks(tmp_path, other, what, first):
    write(tmp_path / first, 0)
    write(tmp_path / "run.rank1", 1, **other)
    causes = [c.id for c in gradproof.diagnose(tmp_path / first).causes if c.family == "distributed-desync"]
    assert causes == ([f"distributed-desync/{what}"] if what else [])


def test_one_rank_alone_is_silent(tmp_path):
    write(tmp_path / "run", 0)
    assert not [c for c in gradproof.diagnose(tmp_path / "run").causes if c.family == "distributed-desync"]
