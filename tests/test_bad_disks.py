"""Disks that are full, slow, read-only or gone, and a million steps: training goes on, what was written is read."""

import contextlib
import errno
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
import warnings

import numpy as np
import pytest
import torch

import gradproof
from gradproof.record import disk, thinner
from gradproof.record import writer as writing
from gradproof.record.flight import BACKWARD, FLIGHT_FILE, SIZE, Recorder, read_flight
from gradproof.record.run import Frame, open_run
from gradproof.record.schema import DISTRIBUTION_FRAME, FRAME_COLUMNS, STATISTICS, STATISTICS_FRAME
from gradproof.record.thinner import Thinning, louder
from gradproof.record.writer import RunWriter

NORM, NAN = STATISTICS.index("norm"), STATISTICS.index("nan")


def frame(writer, step, norm=1.0, nan=0.0, tensors=8):
    numbers = np.array([writer.add_tensor("gradient", f"layer{n}") for n in range(tensors)])
    values = np.zeros((tensors, len(STATISTICS)))
    values[:, NORM], values[3, NAN] = norm, nan
    writer.write_frame(STATISTICS_FRAME, step, numbers, values)


def train(out=None, before=lambda: None, **options):
    """A small training, watched if it has a place to write to; `before` is called ahead of step 20. Its weights."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradproof.watch(model, optimizer, out=out, **options) if out else contextlib.nullcontext():
        for step in range(40):
            if step == 20:
                before()
            x = torch.randn(8, 4)
            optimizer.zero_grad()
            ((model(x) - x.sum(1, keepdim=True)) ** 2).mean().backward()
            optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def thin_file(file):
    """All of it at once; its new size."""
    thinning = Thinning(file)
    while not thinning.go_on(1 << 20):
        pass
    return thinning.written


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# bad disks -----------------------------------------------------------------------------------------------------


def full(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


def read_only(*_, **__):
    raise OSError(errno.EROFS, "Read-only file system")


@pytest.mark.parametrize("broken", [full, read_only])
def test_a_disk_that_takes_no_more_is_one_warning(tmp_path, monkeypatch, broken):
    plain = train()

    def break_disk():
        monkeypatch.setattr(writing.os, "write", broken)
        monkeypatch.setattr(disk, "replace_file", broken)
        monkeypatch.setattr("gradproof.probes.shelf.save", broken)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        watched = train(tmp_path / "run", break_disk)
    monkeypatch.undo()
    said = [str(each.message) for each in caught if "gradproof" in str(each.message)]
    assert len(said) == 1 and "training goes on" in said[0]
    assert same(plain, watched) and len(open_run(tmp_path / "run")) == 20
    assert gradproof.diagnose(tmp_path / "run").stopped.startswith("Watching stopped early")


@pytest.mark.parametrize("end", ["deleted", "moved"])
def test_a_directory_that_goes_away_is_one_warning(tmp_path, end):
    plain, run = train(), tmp_path / "run"

    def go_away():
        shutil.rmtree(run) if end == "deleted" else run.rename(tmp_path / "elsewhere")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        watched = train(run, go_away, experiments=False)
    said = [str(each.message) for each in caught if "gradproof" in str(each.message)]
    assert len(said) == 1 and "training goes on" in said[0]
    assert same(plain, watched) and not run.exists()
    if end == "moved":
        found = open_run(tmp_path / "elsewhere")
        assert len(found) >= 20 and found.notes == []


def test_a_disk_that_keeps_training_waiting_is_left_to_a_thread(tmp_path, monkeypatch):
    now, write, threads = [0.0], os.write, set()

    def slowly(descriptor, data):
        now[0] += 0.5
        threads.add(threading.current_thread().name)
        return write(descriptor, data)

    monkeypatch.setattr(writing.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(disk.os, "write", slowly)
    writer = RunWriter(tmp_path / "run", {})
    for step in range(100):
        writer.write_step({"step": step, "loss": 1.0})
    writer.close()
    assert "gradproof-disk" in threads and writer.broken is None and len(open_run(tmp_path / "run")) == 100
    monkeypatch.setattr(disk.os, "write", write)
    well = RunWriter(tmp_path / "well", {})
    for step in range(100):
        now[0] += 100.0  # steps may take their time
        well.write_step({"step": step, "loss": 1.0})
    assert not well.may_hang
    well.close()


@pytest.fixture
def dying_disk(monkeypatch):
    """A network's disk, and a function that has it die: whatever is asked of it then does not return."""
    monkeypatch.setattr(writing, "is_local", lambda path: False)
    monkeypatch.setattr(writing, "MOST_WAITED", 0.2)
    back, write = threading.Event(), os.write

    def never(descriptor, data):
        back.wait()
        return write(descriptor, data)

    yield lambda: monkeypatch.setattr(disk.os, "write", never)
    back.set()


def test_a_disk_that_never_answers_again_is_one_warning(tmp_path, dying_disk):
    plain, written = train(), []

    def die():
        while len(written) < 15:  # what the thread has had time for
            written[:] = (tmp_path / "run" / "steps.csv").read_text().splitlines()
        dying_disk()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        watched = train(tmp_path / "run", die, experiments=False)
    said = [str(each.message) for each in caught if "gradproof" in str(each.message)]
    assert len(said) == 1 and "does not answer" in said[0] and "training goes on" in said[0]
    assert same(plain, watched)
    found = open_run(tmp_path / "run")
    assert 14 <= len(found) <= 20 and found.notes == []


@pytest.fixture
def freezing_disk(tmp_path):
    """A disk of its own, and a function that freezes it: who writes to it then waits, in the kernel, for ever."""
    place, image = tmp_path / "disk", tmp_path / "image"
    place.mkdir()
    image.write_bytes(bytes(8 << 20))
    for command in (["mkfs.ext4", "-q", image], ["mount", "-o", "loop", image, place]):
        if not shutil.which(command[0]) or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("nothing can be mounted here")
    yield place, lambda: subprocess.run(["fsfreeze", "-f", place], check=True)
    subprocess.run(["fsfreeze", "-u", place], capture_output=True)
    subprocess.run(["umount", "-l", place], check=True)


def test_a_disk_that_freezes_for_ever_is_one_warning(freezing_disk, monkeypatch):
    """The kernel's own waiting, and the rings of a rank among what is written."""
    monkeypatch.setattr(writing, "is_local", lambda path: False)
    monkeypatch.setattr(writing, "MOST_WAITED", 1.0)
    place, freeze = freezing_disk
    plain = train()

    def die():
        while len((place / "run" / "steps.csv").read_text().splitlines()) < 15:
            time.sleep(0.01)
        freeze()

    began = time.monotonic()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        watched = train(place / "run", die, experiments=False)
    assert time.monotonic() - began < 60
    said = [str(each.message) for each in caught if "gradproof" in str(each.message)]
    assert len(said) == 1 and "does not answer" in said[0] and "training goes on" in said[0]
    assert same(plain, watched) and 14 <= len(open_run(place / "run")) <= 21


SCRIPT_THAT_FREEZES = """
import subprocess, sys, time, torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(40):
    if step == 20:
        time.sleep(1)  # what was written is on the disk by then
        subprocess.run(["fsfreeze", "-f", sys.argv[1]], check=True)
    optimizer.zero_grad()
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
print("trained to the end", flush=True)
"""
COMMAND_ON_A_STRANGE_DISK = """
import sys
from gradproof.record import writer
writer.is_local, writer.MOST_WAITED = lambda path: False, 1.0
from gradproof.cli import main
code = main(sys.argv[1:])
print("left with", code, flush=True)
"""


@pytest.mark.slow
def test_a_run_on_a_disk_that_freezes_ends(tmp_path, freezing_disk):
    """Specimens, examination and the diagnosis at the end wait no longer than they say."""
    place, _ = freezing_disk
    (tmp_path / "train.py").write_text(SCRIPT_THAT_FREEZES)
    command = [sys.executable, "-c", COMMAND_ON_A_STRANGE_DISK, "run", "--quiet", "--out", place / "run"]
    process = subprocess.Popen(
        [*command, tmp_path / "train.py", place],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tmp_path,
    )
    said = []
    thaw = threading.Timer(200, subprocess.run, [["fsfreeze", "-u", place]])
    thaw.start()
    began = time.monotonic()
    for line in process.stdout:
        said.append(line)
        if line.startswith("left with"):
            break
    took = time.monotonic() - began
    thaw.cancel()
    subprocess.run(["fsfreeze", "-u", place], capture_output=True)
    process.stdout.close()
    process.wait(60)
    text = "".join(said)
    assert "trained to the end" in text and "left with 0" in text and took < 180, (took, text)
    assert text.count("training goes on") == 1, text
    assert len(open_run(place / "run")) >= 19


def test_rings_on_a_disk_that_may_hang_are_left_to_the_thread(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "is_local", lambda path: False)
    writer = RunWriter(tmp_path / "run", {})
    recorder = Recorder(writer.open_ring(FLIGHT_FILE, SIZE))
    for step in range(100):
        recorder.note(step, BACKWARD)
    writer.close()
    assert read_flight(tmp_path / "run").events[-1].step == 99


def test_a_disk_far_behind_is_given_up_before_memory_is_full(tmp_path, monkeypatch, dying_disk):
    monkeypatch.setattr(disk, "MOST_WAITING", 10_000)
    writer = RunWriter(tmp_path / "run", {})
    dying_disk()
    with pytest.warns(UserWarning, match="does not answer") as caught:
        for step in range(2000):
            writer.write_step({"step": step, "loss": 1.0})
    assert len(caught) == 1
    writer.close()


def test_a_network_disk_that_answers_loses_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "is_local", lambda path: False)
    train(tmp_path / "run", experiments=False)
    run = open_run(tmp_path / "run")
    assert len(run) == 40 and run.notes == [] and "ended" in run.info


def test_which_disks_are_this_machines_own(tmp_path):
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "21 1 8:1 / / rw - ext4 /dev/sda rw\n"
        "22 21 0:9 / /data rw,relatime shared:1 - nfs4 server:/x rw\n"
        "23 22 0:9 / /data/here rw - tmpfs none rw\n"
        "24 21 0:9 / /my\\040home rw - fuse.sshfs me@there rw\n"
        "25 21 0:9 / /bucket rw - fuse.unheard-of me@there rw\n"
    )
    places = ("/data/runs/a", "/my home/run", "/bucket/run", "/data/here/run", "/database/run", "/tmp/run")
    assert [disk.is_local(place, mounts) for place in places] == [False] * 3 + [True] * 3
    assert disk.is_local(tmp_path, tmp_path / "none")


def test_a_clock_that_jumps_changes_nothing(tmp_path, monkeypatch):
    plain, clock = train(), time.time

    def jump():
        monkeypatch.setattr(time, "time", lambda: clock() - 10 * 365 * 86400)

    watched = train(tmp_path / "run", jump, experiments=False)
    run = open_run(tmp_path / "run")
    assert same(plain, watched) and len(run) == 40 and run.notes == []
    assert (np.diff(run.steps["seconds"]) >= 0).all() and "ended" in run.info


# a bound -------------------------------------------------------------------------------------------------------


def test_old_frames_are_thinned_and_the_loud_ones_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(thinner, "LIMIT", 40_000)
    writer = RunWriter(tmp_path / "run", {})
    for step in range(2000):
        frame(writer, step, norm=1e3 if step == 100 else 1.0, nan=5.0 if step == 151 else 0.0)
        assert (tmp_path / "run" / "tensors.bin").stat().st_size <= 40_000
        writer.write_step({"step": step, "loss": 1.0})
    writer.close()
    run = open_run(tmp_path / "run")
    steps = run.frames.steps.tolist()
    assert run.notes == [] and run.info["thinned"] > 3
    assert steps[0] == 0 and {100, 151, 1999} <= set(steps) and steps == sorted(set(steps))
    assert len([step for step in steps if step >= 1985]) == 15  # what is recent is whole
    assert any("thinned" in note for note in gradproof.diagnose(tmp_path / "run").notes)


def test_a_short_run_is_not_thinned(tmp_path):
    writer = RunWriter(tmp_path / "run", {})
    for step in range(50):
        frame(writer, step)
    writer.close()
    run = open_run(tmp_path / "run")
    assert len(run.frames) == 50 and "thinned" not in run.info


def test_light_and_whole_frames_are_thinned_each_among_themselves(tmp_path):
    writer = RunWriter(tmp_path / "run", {})
    for step in range(100):
        frame(writer, step, tensors=8 if step % 5 == 0 else 3 + 1)
        if step % 10 == 0:
            values = np.zeros((1, FRAME_COLUMNS[DISTRIBUTION_FRAME]))
            writer.write_frame(DISTRIBUTION_FRAME, step, np.array([0]), values)
    writer.close()
    file = tmp_path / "run" / "tensors.bin"
    before = file.stat().st_size
    assert thin_file(file) == file.stat().st_size < 0.7 * before
    run = open_run(tmp_path / "run")
    sizes = [len(each.numbers) for each in run.frames]
    assert run.notes == [] and sizes.count(8) in range(11, 15) and len(run.distributions) in range(6, 9)


def test_who_reads_while_it_is_thinned_reads_what_was_there(tmp_path):
    writer = RunWriter(tmp_path / "run", {})
    for step in range(40):
        frame(writer, step, norm=float(step))
    run = open_run(tmp_path / "run")
    assert len(run.frames) == 40
    thin_file(tmp_path / "run" / "tensors.bin")
    assert run.table("gradient", "norm").values[:, 0].tolist() == list(range(40))
    assert len(open_run(tmp_path / "run").frames) < 30


def test_frames_of_which_no_two_are_alike_end(tmp_path, monkeypatch):
    """A model that grows at every step: there is nothing to thin, and still a bound."""
    monkeypatch.setattr(thinner, "LIMIT", 40_000)
    writer = RunWriter(tmp_path / "run", {})
    for step in range(200):
        frame(writer, step, tensors=5 + step)
    writer.close()
    assert (tmp_path / "run" / "tensors.bin").stat().st_size <= 40_000
    assert any("was full" in note for note in gradproof.diagnose(tmp_path / "run").notes)


@pytest.mark.parametrize("kind", ["nan", "norm"])
def test_the_louder_of_two(kind):
    quiet, loud = np.ones((2, len(STATISTICS))), np.ones((2, len(STATISTICS)))
    for values in (quiet, loud):
        values[:, [NAN, STATISTICS.index("inf")]] = 0
    loud[1, NAN if kind == "nan" else NORM] = 7
    one, other = Frame(1, np.arange(2), quiet), Frame(2, np.arange(2), loud)
    assert louder(one, other) is other and louder(other, one) is other and louder(one, one) is one


def usage():
    with open("/proc/self/statm") as stream:
        return int(stream.read().split()[1]) * resource.getpagesize(), len(os.listdir("/proc/self/fd"))


@pytest.mark.slow
def test_a_million_steps_cost_what_the_first_ones_did(tmp_path, monkeypatch):
    """Rows of every step and frames of every tenth, through the writer that trainings have."""
    monkeypatch.setattr(thinner, "LIMIT", 8 << 20)
    writer = RunWriter(tmp_path / "run", {})
    took, seen = [], []
    for part in range(10):
        began = time.process_time()
        for step in range(100_000 * part, 100_000 * (part + 1)):
            if step % 10 == 0:
                frame(writer, step)
            writer.write_step({"step": step, "loss": 1.0, "lr": 0.1, "seconds": 0.001 * step, "order": "zbs"})
        took.append(time.process_time() - began)
        seen.append(usage())
    writer.close()
    memory, descriptors = zip(*seen, strict=True)
    assert memory[-1] - memory[0] < 20e6 and descriptors[-1] <= descriptors[0]
    assert np.median(took[5:]) < 1.5 * np.median(took[:5])
    size = sum(file.stat().st_size for file in (tmp_path / "run").iterdir())
    assert size < (8 << 20) + 100 * 1_000_000  # tensors.bin, and a row a step
    began = time.process_time()
    assert len(open_run(tmp_path / "run")) == 1_000_000
    assert time.process_time() - began < 30
