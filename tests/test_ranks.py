"""Two ranks as two runs side by side: gradients not averaged, different weights, the same data; and in step."""

import pytest

import gradproof
from gradproof.record.writer import RunWriter


def write(path, rank, gradient=1.0, weight=10.0, loss=1.0, lines=None):
    writer = RunWriter(path, {"rank": rank, "world": 2, "facts": {"lines": lines or {}}})
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


WRAPPED = {"ddp": ["a.py:3"], "forward": ["a.py:7"], "backward": ["a.py:8"]}


@pytest.mark.parametrize(
    "lines, where",
    [
        (WRAPPED, "a.py:7"),  # around the wrapper
        (WRAPPED | {"no_sync": ["a.py:6"]}, "a.py:6"),
        (WRAPPED | {"synchronised forward": ["a.py:7"]}, "a.py:3"),
        ({"all_reduce": ["a.py:5, called at a.py:9"], "backward": ["a.py:8"]}, "a.py:5, called at a.py:9"),
        ({"backward": ["a.py:8"]}, "a.py:8"),  # nothing averages at all
    ],
)
def test_gradients_that_are_not_averaged_have_a_line(tmp_path, lines, where):
    write(tmp_path / "run", 0, lines=lines)
    write(tmp_path / "run.rank1", 1, gradient=1.3)
    assert gradproof.diagnose(tmp_path / "run").causes[0].where == where


@pytest.mark.parametrize(
    "other, lines, where",
    [
        ({"weight": 11.0, "loss": 1.1}, {"manual_seed": ["a.py:2"]}, "a.py:2"),
        ({}, {"sampler": ["a.py:4"], "loader": ["a.py:5"]}, "a.py:4"),
        ({}, {"loader": ["a.py:5"]}, "a.py:5"),
    ],
)
def test_other_slips_of_ranks_have_a_line(tmp_path, other, lines, where):
    write(tmp_path / "run", 0, lines=lines)
    write(tmp_path / "run.rank1", 1, **other)
    assert gradproof.diagnose(tmp_path / "run").causes[0].where == where
