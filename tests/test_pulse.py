"""What a training loses to its examination is read off its own steps."""

import json
import os
import subprocess
import sys

import pytest

from gradproof.examination.beside import Clock, GpuGuest
from gradproof.examination.pulse import FEWEST, Pulse
from gradproof.experiments.table import QUESTIONS
from gradproof.record.schema import INFO_FILE, STEP_COLUMNS, STEPS_FILE

BEGAN = 1000.0


def write(path, durations, depth=0):
    """A record whose steps took these seconds, one after the other."""
    path.mkdir(exist_ok=True)
    (path / INFO_FILE).write_text(json.dumps({"began": BEGAN}))
    rows, now = [",".join(STEP_COLUMNS)], 0.0
    for step, seconds in enumerate(durations):
        now += seconds
        cells = {"step": step, "seconds": f"{now:.6f}", "depth": depth}
        rows.append(",".join(str(cells.get(name, "")) for name in STEP_COLUMNS))
    (path / STEPS_FILE).write_text("\n".join(rows) + "\n")
    return Pulse(path)


@pytest.mark.parametrize("slower, lost", [(1.0, 0.0), (1.25, 2.0), (2.0, 5.0)])
def test_a_slower_step_is_time_lost(slower, lost, tmp_path):
    alone, beside = [0.1] * 100, [0.1 * slower] * round(100 / slower)
    pulse = write(tmp_path / "run", [*alone, *beside, *alone])
    pulse.was_asked(BEGAN + 10, BEGAN + 20)
    assert pulse.lost() == pytest.approx(lost, abs=0.01)


def test_nothing_known_is_all_lost_until_it_is(tmp_path):
    pulse = write(tmp_path / "run", [0.1] * (FEWEST - 1))
    pulse.was_asked(BEGAN, BEGAN + 3)
    assert pulse.lost() == 3
    write(tmp_path / "run", [0.1] * 300)
    assert pulse.lost() == 0


def test_steps_that_were_measured_whole_prove_nothing(tmp_path):
    pulse = write(tmp_path / "run", [0.1] * 300, depth=4)
    pulse.was_asked(BEGAN + 10, BEGAN + 20)
    assert pulse.lost() == 10


def test_nothing_was_asked_and_nothing_is_there(tmp_path):
    assert Pulse(tmp_path / "nowhere").lost() == 0
    (tmp_path / INFO_FILE).write_text("[]")
    (tmp_path / STEPS_FILE).write_bytes(b"\xff\xff,,,\nx\n")
    pulse = Pulse(tmp_path)
    pulse.was_asked(0, 1)
    assert pulse.lost() == 1


@pytest.mark.parametrize("slower, goes_on", [(1.0, True), (2.0, False)])
def test_a_guest_goes_on_only_where_the_training_loses_nothing(slower, goes_on, tmp_path):
    run = tmp_path / "run"
    write(run, [*[0.1] * 100, *[0.1 * slower] * 100])
    clock = Clock(run, os.getpid(), limit=None)
    assert clock.affords(0.5) and not clock.affords(5.0)  # as long as nothing is known
    clock.pulse.was_asked(BEGAN + 10, BEGAN + 10 + 10 * slower)
    assert clock.affords(5.0) == goes_on == clock.affords(0.5)


def test_a_guest_waits_no_longer_than_the_training(tmp_path):
    run = tmp_path / "run"
    write(run, [0.1] * 4)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    clock = Clock(run, gone.pid, limit=None)
    clock.pulse.was_asked(BEGAN, BEGAN + 100)
    assert not clock.affords(0.5)
    guest = GpuGuest(clock)
    guest.wait_for(QUESTIONS[0])
    guest.was_asked(100.0)
