"""Two ranks as two runs side by side: gradients not averaged, different weights, the same data; and in step."""

import numpy as np
import pytest

import gradproof
from gradproof.record.prints import (
    PRINTS_FILE,
    TENSOR_PRINTS_FILE,
    is_landmark,
    pack_row,
    pack_tensors,
    read_last_step,
    read_rows,
    read_tensors,
)
from gradproof.record.ranks import find_ranks, keep_steps, read_ranks, whole_of
from gradproof.record.run import Frame
from gradproof.record.schema import STATISTICS
from gradproof.record.whole import whole_frame
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


def write_prints(path, rank, world, rows, **info):
    """A rank that has written fingerprints; `rows` makes one of a step."""
    writer = RunWriter(path, {"rank": rank, "world": world, "ended": 1.0, **info})
    for step in range(60):
        made = {
            "loss": (1.0 + 0.1 * rank) / (step + 1),
            "gradient": 1.0,
            "weight": 4.0,
            "batch": step + 100 * rank,
            **rows(step),
        }
        writer.append(PRINTS_FILE, pack_row(step=step, **made))
        writer.write_step({"step": step, "loss": made["loss"], "order": "zbs"})
    writer.close()


def write_four(folder, odd, usual=lambda step: {}):
    """Four ranks, of which the last is another."""
    for rank in range(4):
        write_prints(folder / (f"run.rank{rank}" if rank else "run"), rank, 4, odd if rank == 3 else usual)
    return gradproof.diagnose(folder / "run").causes


def test_a_straggler_is_named(tmp_path):
    causes = write_four(
        tmp_path,
        lambda step: {"own": 0.3, "seconds": 0.5},
        lambda step: {"own": 0.02 + 0.01 * (step % 2), "seconds": 0.5},
    )
    assert [cause.id for cause in causes] == ["distributed-desync/straggler"] and causes[0].level == "warning"
    assert "rank 3 takes 300 ms" in causes[0].evidence[0]


@pytest.mark.parametrize(
    "own", [0.05, lambda step: 0.5 if step % 3 == 0 else 0.02], ids=["a little", "now and then"]
)
def test_a_rank_that_is_slow_a_little_or_now_and_then_is_none(tmp_path, own):
    slow = (lambda step: {"own": own, "seconds": 0.5}) if isinstance(own, float) else None
    odd = slow or (lambda step: {"own": own(step), "seconds": 0.5})
    assert not write_four(tmp_path, odd, lambda step: {"own": 0.02, "seconds": 0.5})


def test_of_several_ranks_the_odd_one_is_named(tmp_path):
    causes = write_four(tmp_path, lambda step: {"weight": 4.4 if step >= 40 else 4.0})
    assert causes[0].id == "distributed-desync/weights-drift" and causes[0].step == 40
    assert "rank 0 and rank 3" in causes[0].evidence[0]


def test_one_rank_of_several_that_runs_other_code(tmp_path):
    for rank in range(3):
        source = {"file": "train.py", "sha256": "b" if rank == 2 else "a"}
        write_prints(
            tmp_path / (f"run.rank{rank}" if rank else "run"), rank, 3, lambda step: {}, source=source
        )
    (cause,) = gradproof.diagnose(tmp_path / "run").causes
    assert cause.id == "distributed-desync/code" and "rank 0 and rank 2" in cause.evidence[0]


def test_the_ranks_of_a_second_run_are_its_own(tmp_path):
    """Whoever is given the name of a run that is there calls its ranks RUN-2 and RUN.rank1-2."""
    for _ in range(2):
        for rank, name in enumerate(("run", "run.rank1")):
            write_prints(tmp_path / name, rank, 2, lambda step: {})
    assert [path.name for path in find_ranks(tmp_path / "run").values()] == ["run", "run.rank1"]
    for name in ("run-2", "run.rank1-2"):
        assert [path.name for path in find_ranks(tmp_path / name).values()] == ["run-2", "run.rank1-2"]


def test_a_run_whose_ranks_were_started_by_its_script_shows_the_first(tmp_path):
    RunWriter(tmp_path / "run", {"rank": 0, "world": 1}).close()
    for rank in range(2):
        write_prints(tmp_path / f"run.rank{rank}", rank, 2, lambda step: {})
    found = gradproof.diagnose(tmp_path / "run")
    assert found.steps == 60 and found.counted.startswith("2 ranks, 60 steps")


def test_fingerprints_are_read_as_far_as_they_are_whole(tmp_path):
    file = tmp_path / PRINTS_FILE
    rows = [pack_row(step=step, loss=0.5) for step in range(5)]
    file.write_bytes(b"".join(rows) + rows[0][:-3])
    assert read_rows(file)["step"].tolist() == [0, 1, 2, 3, 4] and read_last_step(file) == 4
    assert read_rows(file)["loss"].tolist() == [0.5] * 5 and np.isnan(read_rows(file)["weight"]).all()
    file.write_bytes(rows[0] + b"x" * len(rows[0]) + rows[2])
    assert read_rows(file)["step"].tolist() == [0, 2]
    assert len(read_rows(tmp_path / "nothing")) == 0 and read_last_step(tmp_path / "nothing") is None
    tensors = tmp_path / TENSOR_PRINTS_FILE
    record = pack_tensors(3, [0, 2], np.array([1.5, 2.5]))
    tensors.write_bytes(record + record[:-1] + b"!")
    assert read_tensors(tensors) == {3: {0: 1.5, 2: 2.5}}


def test_landmarks_and_kept_steps_become_rare():
    marks = [step for step in range(10_000) if is_landmark(step)]
    assert marks[:64] == list(range(64)) and len(marks) < 64 + 33 * 8
    kept = keep_steps(10_000, 400)
    assert kept[:100].tolist() == list(range(100)) and kept[-1] == 9_999 and len(kept) <= 400


def test_shards_add_up_and_copies_do_not():
    assert whole_of([(9.0, 2), (16.0, 2)]) == 5.0
    assert whole_of([(25.0, 2)], holders=2) == 5.0  # one of them holds nothing
    assert whole_of([(25.0, 0), (25.0, 0)]) == 5.0
    assert whole_of([(9.0, 2), (16.0, 2), (9.0, 2), (16.0, 2)]) == 5.0  # two ranks hold each part


class Part:
    """What one rank has measured of its half of the one tensor there is: nothing at any step but the third."""

    def __init__(self, **measured):
        self.row = [measured.get(name, np.nan) for name in STATISTICS]

    def read(self, step, rows):
        return np.array([self.row if step == 3 else [np.nan] * len(STATISTICS)])


def put_together(*parts, step=3):
    held = {0: np.array([[5.0, 5.0], [1.0, 1.0]])}  # five entries on each of two ranks
    frame = Frame(step, np.array([0]), np.array([parts[0].row], dtype=np.float32))
    return whole_frame(frame, np.array([True]), held, list(parts))


def test_of_a_sharded_tensor_with_a_nan_the_whole_is_not_left_out():
    counts = {"inf": 0, "zero": 0, "subnormal": 0}
    good, bad = Part(nan=0, norm=3.0, **counts), Part(nan=2, **counts)
    assert put_together(good, bad).values[0, STATISTICS.index("nan")] == 2
    light = put_together(Part(norm=3.0), Part(norm=4.0))
    assert light.values[0, STATISTICS.index("norm")] == 5.0
    assert not len(put_together(good, good, step=4).numbers), "a step at which nobody measured it"


def test_a_stretch_of_many_steps_is_read_whole(tmp_path):
    for rank, name in enumerate(("run", "run.rank1")):
        write_prints(tmp_path / name, rank, 2, lambda step: {"lr": float(step)})
    part = read_ranks(tmp_path / "run").narrow(10, 12)
    assert part.steps.tolist() == [10, 11, 12] and part.tables["lr"].tolist() == [[10.0, 11.0, 12.0]] * 2
