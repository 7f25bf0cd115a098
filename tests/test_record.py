"""The run on disk: what was written is read back, whatever happened to the process, the disk or the directory."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import killed
import numpy as np
import pytest
from killed import TRAINING

from gradproof.diagnosis.ranking import diagnose
from gradproof.errors import UserError
from gradproof.record.run import open_run
from gradproof.record.schema import FORMAT, STATISTICS, STATISTICS_FRAME
from gradproof.record.writer import RunWriter


def write_steps(path, steps=3):
    writer = RunWriter(path, {"command": ["train.py"]})
    for step in range(steps):
        numbers = np.array([writer.add_tensor("gradient", name, shape=[2, 3]) for name in ("a", "b")])
        rows = np.full((2, len(STATISTICS)), float(step))
        rows[1] += 100
        writer.write_frame(STATISTICS_FRAME, step, numbers, rows)
        writer.write_step({"step": step, "loss": 1.5 / (step + 1), "order": "zbs"})
    return writer


def test_what_was_written_reads_back(tmp_path):
    writer = write_steps(tmp_path / "run")
    writer.write_event("heard", family="lr-too-high", value=float("nan"))
    writer.close()
    run = open_run(tmp_path / "run")
    assert len(run) == 3 and run.notes == []
    np.testing.assert_allclose(run.steps["loss"], [1.5, 0.75, 0.5])
    assert list(run.steps["order"]) == ["zbs"] * 3
    table = run.table("gradient", "norm")
    assert table.names == ["a", "b"] and table.values.tolist() == [[0, 100], [1, 101], [2, 102]]
    steps, values = run.series("gradient", "b", "max")
    assert steps.tolist() == [0, 1, 2] and values.tolist() == [100, 101, 102]
    assert run.events[0]["value"] == "nan"


def test_nan_and_not_measured_are_told_apart(tmp_path):
    writer = RunWriter(tmp_path / "run", {})
    writer.write_step({"step": 0, "loss": float("nan"), "grad_norm": float("inf")})
    writer.write_step({"step": 1})
    writer.close()
    run = open_run(tmp_path / "run")
    assert run.seen["loss"].tolist() == [True, False]
    assert np.isnan(run.steps["loss"]).all() and run.steps["grad_norm"][0] == np.inf


def test_a_large_finite_number_does_not_become_inf(tmp_path):
    writer = RunWriter(tmp_path / "run", {})
    rows = np.full((1, len(STATISTICS)), 1e300)
    writer.write_frame(STATISTICS_FRAME, 0, np.array([writer.add_tensor("gradient", "a")]), rows)
    writer.close()
    assert np.isfinite(open_run(tmp_path / "run").table("gradient", "norm").values).all()


def test_run_json_is_standard_json(tmp_path):
    writer = RunWriter(tmp_path / "run", {"odd": float("inf"), "text": "</script>\n"})
    writer.close()
    json.loads(
        (tmp_path / "run" / "run.json").read_text(),
        parse_constant=lambda word: pytest.fail(f"{word} in JSON"),
    )


@pytest.mark.parametrize("cut", [1, 7, 20, 30])
def test_a_run_cut_at_any_byte_reads_what_is_whole(tmp_path, cut):
    write_steps(tmp_path / "run").close()
    for name in ("steps.csv", "tensors.bin"):
        file = tmp_path / "run" / name
        file.write_bytes(file.read_bytes()[:-cut])
    run = open_run(tmp_path / "run")
    assert len(run.table("gradient", "norm").steps) == 2
    assert len(run) >= 1
    assert any("cut off" in note for note in run.notes) and any(
        "no whole frame" in note for note in run.notes
    )


def test_frames_are_read_when_they_are_asked_for(tmp_path):
    writer = RunWriter(tmp_path / "run", {})
    numbers = np.array([writer.add_tensor("gradient", name) for name in ("a", "b")])
    for step in (0, 9, 5):  # the steps before trouble are written after it
        writer.write_frame(STATISTICS_FRAME, step, numbers, np.full((2, len(STATISTICS)), float(step)))
    writer.close()
    frames = open_run(tmp_path / "run").frames
    assert len(frames) == 3 and frames.steps.tolist() == [0, 5, 9]
    assert frames[-1].step == 9 and (frames[-1].values == 9).all()
    assert [frame.step for frame in frames[1:]] == [5, 9] == [frame.step for frame in frames][1:]
    assert frames[0].numbers is frames[1].numbers  # one array for all frames of the same tensors


def test_events_keep_what_looks_like_an_end_of_line(tmp_path):
    writer = RunWriter(tmp_path / "run", {})
    writer.write_event("note", text="one\u2028line\x85 and\nanother")
    writer.close()
    with open(tmp_path / "run" / "events.jsonl", "a") as stream:
        stream.write("5\n")  # JSON, but no event
    run = open_run(tmp_path / "run")
    assert [event["text"] for event in run.events] == ["one\\u2028line\\x85 and\nanother"]
    assert run.notes == ["events.jsonl: 1 damaged lines are left out"]


def test_a_flipped_bit_is_noticed(tmp_path):
    write_steps(tmp_path / "run").close()
    file = tmp_path / "run" / "tensors.bin"
    data = bytearray(file.read_bytes())
    data[60] ^= 4
    file.write_bytes(data)
    run = open_run(tmp_path / "run")
    assert run.table("gradient", "norm").steps.tolist() == [1, 2]
    assert "1 damaged frames" in run.notes[0]


def test_kill_loses_nothing_that_was_written(tmp_path):
    code = (
        "import sys, time\nfrom gradproof.record.writer import RunWriter\n"
        f"w = RunWriter({str(tmp_path / 'run')!r}, {{}})\n"
        "for step in range(10**9):\n    w.write_step({'step': step, 'loss': 1.0}); print(step, flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if int(line) > 200:
                break
        process.send_signal(signal.SIGKILL)
    assert len(open_run(tmp_path / "run")) >= 200


@pytest.mark.slow
def test_a_watched_training_that_is_killed_loses_no_row(tmp_path):
    """Before its first step, in the middle, and where its examination is waited for: twelve in all."""
    script, finds = tmp_path / "train.py", random.Random(0)
    script.write_text(TRAINING)
    moments = [0, 0, *(finds.randrange(1, 3000) for _ in range(8)), 40, 40]
    for number, moment in enumerate(moments):
        run, log = tmp_path / f"run{number}", tmp_path / f"log{number}"
        steps = 40 if moment == 40 else 10**9
        words = [sys.executable, "-m", "gradproof", "run", "--out", run, script, log, str(steps)]
        with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            while not (run / "run.json").exists() or (log.stat().st_size if log.exists() else 0) < moment:
                assert process.poll() is None
                time.sleep(0.01)
            process.kill()
        taken = log.stat().st_size if log.exists() else 0
        found = open_run(run)
        assert taken <= len(found) <= taken + 1 and found.notes == []
        first = str(diagnose(found)).splitlines()[0]
        assert len(found) or first == "No step was recorded: there is nothing to say about training."


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_killed_at_any_moment(tmp_path):
    """At the start, training, at the end, while it is examined; GRADPROOF_KILLS=300 is what was promised."""
    words = [sys.executable, killed.__file__, os.environ.get("GRADPROOF_KILLS", "20"), tmp_path]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_full_disk_is_one_warning(tmp_path):
    code = (
        "import resource, warnings\nfrom gradproof.record.writer import RunWriter\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))\n"  # a real write that really fails
        f"w = RunWriter({str(tmp_path / 'run')!r}, {{}})\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    for step in range(500): w.write_step({'step': step, 'loss': 1.0})\n"
        "w.close(); assert w.broken; print(len(caught), caught[0].message)\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.startswith("1 gradproof cannot write") and "training goes on" in out
    assert len(open_run(tmp_path / "run")) > 10


def test_an_unwritable_directory_is_one_warning(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="training goes on"):
        writer = RunWriter(tmp_path / "file" / "run", {})
    writer.write_step({"step": 0})
    writer.close()


def test_two_runs_never_share_a_directory(tmp_path):
    paths = {write_steps(tmp_path / "run", 1).path for _ in range(3)}
    assert {path.name for path in paths} == {"run", "run-2", "run-3"}


def test_a_growing_run_can_be_read(tmp_path):
    writer = write_steps(tmp_path / "run", 2)
    assert len(open_run(tmp_path / "run")) == 2
    writer.write_step({"step": 2})
    assert len(open_run(tmp_path / "run")) == 3


def test_bad_directories_get_one_sentence(tmp_path):
    with pytest.raises(UserError, match="there is no run at"):
        open_run(tmp_path / "missing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="is not a run directory"):
        open_run(tmp_path / "empty")
    write_steps(tmp_path / "runs" / "a").close()
    with pytest.raises(UserError, match="it holds the runs a"):
        open_run(tmp_path / "runs")
    newer = tmp_path / "newer"
    write_steps(newer).close()
    (newer / "run.json").write_text(json.dumps({"format": FORMAT + 1}))
    with pytest.raises(UserError, match="newer gradproof"):
        open_run(newer)
    (newer / "run.json").write_text("{")
    with pytest.raises(UserError, match="damaged"):
        open_run(newer)


def test_half_deleted_runs_read_what_is_left(tmp_path):
    write_steps(tmp_path / "run").close()
    os.remove(tmp_path / "run" / "steps.csv")
    run = open_run(tmp_path / "run")
    assert len(run) == 0 and "steps.csv is missing" in run.notes[0]
    write_steps(tmp_path / "other").close()
    os.remove(tmp_path / "other" / "tensors.bin")
    assert open_run(tmp_path / "other").table("gradient", "norm").values.shape == (0, 2)


def test_writing_is_fast(tmp_path):
    writer = RunWriter(tmp_path / "run", {})
    numbers = np.array([writer.add_tensor("gradient", f"layer{i}") for i in range(1000)])
    rows = np.random.default_rng(0).normal(size=(1000, len(STATISTICS)))
    start = time.process_time()
    for step in range(100):
        writer.write_frame(STATISTICS_FRAME, step, numbers, rows)
    assert (time.process_time() - start) / 100 < 2e-3
