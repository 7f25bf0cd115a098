"""A rank that is killed is named with its step, wherever it dies; ranks that hang leave behind who is to blame."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import gradproof
from gradproof.diagnosis import lost_ranks
from gradproof.record import flight
from gradproof.record.flight import BACKWARD, COLLECTIVE, FLIGHT_FILE, FORWARD, SIZE, Recorder, read_flight
from gradproof.record.last_steps import (
    LARGEST,
    LAST_STEPS_FILE,
    STEPS,
    LastSteps,
    last_norms,
    read_last_steps,
)
from gradproof.record.prints import PRINTS_FILE, pack_row, pack_tensors
from gradproof.record.run import open_run
from gradproof.record.writer import RunWriter, map_ring
from gradproof.report.tensor import render_overview

SCRIPT = """
import os, signal, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WHO, STEP, WHERE = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo")

def come(step, where):
    if (dist.get_rank(), step, where) == (WHO, STEP, WHERE):
        os.kill(os.getpid(), signal.SIGKILL)

torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(30):
    come(step, "forward")
    x = torch.randn(8, 4)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.register_hook(lambda gradient: come(step, "backward"))
    loss.backward()
    come(step, "between")
    optimizer.step()
"""


def open_store():
    """Where two ranks meet; whoever asks keeps it as long as they live."""
    return torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def start_ranks(store, folder, command):
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    group |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    return [
        subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **group, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("who, step, where", [(1, 7, "backward"), (0, 3, "between"), (1, 5, "forward")])
def test_a_killed_rank_is_named_with_its_step(tmp_path, who, step, where):
    """Nobody else ends the ranks that are left: they hear of it from the process group."""
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [
        sys.executable,
        "-m",
        "gradproof",
        "run",
        "--no-experiments",
        "--quiet",
        "--out",
        "run",
        "train.py",
    ]
    store = open_store()
    ranks = start_ranks(store, tmp_path, [*command, str(who), str(step), where])
    try:
        said = [process.communicate(timeout=300)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert ranks[who].returncode == -signal.SIGKILL and ranks[1 - who].returncode == 1, said
    ends = [read_flight(tmp_path / name).beat for name in ("run", "run.rank1")]
    if time.time() - max(ends) < 6:  # as long as a rank may still be alive, nothing is said
        time.sleep(6)
    found = gradproof.diagnose(tmp_path / "run")
    named = [cause for cause in found.causes if cause.id == "distributed-desync/lost-rank"]
    assert named and named[0].step == step and f"rank {who} " in named[0].evidence[0], found.causes
    place = tmp_path / ("run", "run.rank1")[who]
    steps = last_norms(place, open_run(place).info)
    assert list(steps) == list(range(step)) and all(len(norms) >= 8 for norms in steps.values())
    assert f"from step 0 to {step - 1} the norm of its gradients went from" in named[0].evidence[0]
    shown = render_overview(open_run(place), 100, False)
    assert f"the last {step} steps, tensor by tensor" in shown and f"step {step - 1}: gradient" in shown


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_rank_may_be_killed_at_any_moment(tmp_path, monkeypatch):
    """The other ends as it does without us, the run opens, and the report says who died in which step.

    GRADPROOF_MOMENTS=50 for as many; each takes some seconds.
    """
    moments = os.environ.get("GRADPROOF_MOMENTS", "6")
    command = [
        sys.executable,
        str(Path(__file__).parent / "killed_ranks.py"),
        str(tmp_path / "killed"),
        moments,
    ]
    seed = os.environ.get("GRADPROOF_SEED", "0")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    answer = subprocess.run([*command, seed], env=environment, capture_output=True, text=True, timeout=1800)
    found = [json.loads(line) for line in answer.stdout.splitlines()]
    assert sum(moment["watched"] for moment in found) == int(moments), answer.stderr
    others = {
        watched: {m["codes"][1 - m["who"]] for m in found if m["watched"] == watched} for watched in (0, 1)
    }
    assert others[True] == others[False] == {1}, found
    later = time.time() + 60
    for module in (lost_ranks, flight):
        monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: later))
    for moment in (m for m in found if m["watched"]):
        causes = gradproof.diagnose(Path(moment["folder"]) / "run").causes
        named = [cause for cause in causes if cause.id == "distributed-desync/lost-rank"]
        assert named and f"rank {moment['who']} " in named[0].evidence[0], (moment, causes)
        # it counts a step as ended in its optimizer.step, the script behind that
        first, last = moment["steps"][0], moment["steps"][-1]
        assert first <= named[0].step <= last + 1, (moment, named)


@pytest.mark.parametrize("raises", [True, False])
def test_a_rank_that_died_before_its_first_backward_is_named_once_another_missed_it(tmp_path, clock, raises):
    for rank, name in enumerate(("run", "run.rank1")):
        writer = RunWriter(tmp_path / name, {"rank": rank, "world": 2})
        if rank == 0:
            raised = {"kind": "RuntimeError", "text": "Connection closed by peer", "line": "train.py:16"}
            writer.set_info(ended=time.time(), **({"raised": raised} if raises else {}))
        writer.close()
        os.utime(tmp_path / name / "run.json", (clock.now, clock.now))
    clock.now += 60
    named = [cause for cause in gradproof.diagnose(tmp_path / "run").causes if "lost-rank" in cause.id]
    assert bool(named) == raises
    if raises:
        assert "rank 1 ended without a word before its first backward" in named[0].evidence[0]


def test_the_last_steps_go_round_and_a_torn_one_is_left_out(tmp_path):
    ring = LastSteps(RunWriter(tmp_path, {}), [].append)
    for step in range(100):
        ring.keep(pack_tensors(step, [0, 1], np.array([1.0, float(step)])))
    ring.keep(pack_tensors(100, range(50), np.ones(50)))  # larger than its place
    found = read_last_steps(tmp_path)
    assert list(found) == list(range(100 - STEPS, 100)) and found[99] == {0: 1.0, 1: 99.0}
    file = tmp_path / LAST_STEPS_FILE
    data = bytearray(file.read_bytes())
    data[-1 - len(data) // 3] ^= 1
    file.write_bytes(data)
    assert len(read_last_steps(tmp_path)) in (STEPS - 1, STEPS)  # a record, or the room behind one
    file.write_bytes(data[: len(data) // 2 + 5])
    assert STEPS // 2 - 2 <= len(read_last_steps(tmp_path)) <= STEPS // 2 + 1
    file.write_bytes(b"x" * 3)
    assert read_last_steps(tmp_path) == {}


def test_where_the_last_steps_find_no_room_nothing_happens(tmp_path):
    complaints = []
    ring = LastSteps(RunWriter(tmp_path, {}), complaints.append)
    (tmp_path / LAST_STEPS_FILE).mkdir()
    ring.keep(pack_tensors(0, [0], np.ones(1)))
    assert read_last_steps(tmp_path) == {}
    large = LastSteps(RunWriter(tmp_path / "large", {}), complaints.append)
    large.keep(bytes(LARGEST))
    assert not (tmp_path / "large" / LAST_STEPS_FILE).exists() and len(complaints) == 1


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 256 KB, and a function that leaves so many bytes of it free."""
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "none", place], capture_output=True
    ).returncode:
        pytest.skip("nothing can be mounted here")

    def leave(free):
        filler = place / "filler"
        filler.unlink(missing_ok=True)
        found = os.statvfs(place)
        filler.write_bytes(bytes(found.f_bavail * found.f_frsize - free))
        return place

    yield leave
    subprocess.run(["umount", "-l", place], check=True)


def test_a_full_disk_is_an_error_and_no_signal(small_disk):
    """A store into a mapped page for which there is no room would end the process."""
    place = small_disk(100_000) / "run"
    writer, complaints = RunWriter(place, {}), []
    small_disk(4096)
    with pytest.raises(OSError, match="No space left"):
        writer.open_ring(FLIGHT_FILE, SIZE)
    assert not (place / FLIGHT_FILE).exists()
    ring = LastSteps(writer, complaints.append)
    for step in range(40):
        ring.keep(pack_tensors(step, range(50), np.ones(50)))
    assert len(complaints) == 1 and read_last_steps(place) == {}
    small_disk(16384)
    Recorder(writer.open_ring(FLIGHT_FILE, SIZE)).note(3, BACKWARD)
    assert read_flight(place).events[-1].step == 3


def test_a_file_system_that_cannot_reserve_room_has_no_ring(tmp_path, monkeypatch):
    def cannot(*_):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", cannot)
    with pytest.raises(OSError, match="not supported"):
        record_in(tmp_path)
    monkeypatch.delattr(os, "posix_fallocate")  # as on a Mac
    record_in(tmp_path).note(3, BACKWARD)
    assert read_flight(tmp_path).events[-1].step == 3


@pytest.mark.slow
@pytest.mark.parametrize("free", [0, 40_000, 200_000])
def test_ranks_on_a_full_disk_train_to_their_end(tmp_path, small_disk, free):
    """With room for nothing, for a run without its rings, and for all of it."""
    (tmp_path / "train.py").write_text(SCRIPT)
    out = small_disk(free) / "run"
    command = [sys.executable, "-m", "gradproof", "run", "--no-experiments", "--quiet", "--out", str(out)]
    store = open_store()
    ranks = start_ranks(store, tmp_path, [*command, "train.py", "9", "0", "nowhere"])
    said = [process.communicate(timeout=300)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], said
    for sentence in ("keeps no last events", "the record ends here"):
        assert all(text.count(sentence) <= (free < 200_000) for text in said), said
    assert free == 200_000 or all("training goes on" in text for text in said), said


def record_in(folder):
    return Recorder(map_ring(folder / FLIGHT_FILE, SIZE))


def write_rank(path, rank, events, lines="", orders=(), ended=False, seconds=0.1):
    """A rank that has ended some steps, and then did what `events` say."""
    writer = RunWriter(path, {"rank": rank, "world": 2})
    for step, order in enumerate(orders):
        writer.write_step({"step": step, "loss": 1.0, "order": order})
        writer.append(PRINTS_FILE, pack_row(step=step, loss=1.0 + rank, seconds=seconds))
    if ended:
        writer.set_info(ended=time.time())
    writer.close()
    recorder = record_in(path)
    for event in events:
        recorder.note(*event)
    if lines:
        recorder.stand_at(lines)
    return recorder


@pytest.fixture
def clock(monkeypatch):
    """Time goes on when it is told to."""

    class Clock:
        now = 1e9

        def time(self):
            return self.now

    made = Clock()
    monkeypatch.setattr(flight, "time", made)
    monkeypatch.setattr(lost_ranks, "time", made)
    return made


def test_the_recorder_goes_round_and_is_read_as_it_was_left(tmp_path, clock):
    recorder = record_in(tmp_path)
    for step in range(200):
        recorder.note(step, BACKWARD)
    recorder.note(200, COLLECTIVE, "all_reduce")
    clock.now += 30
    recorder.beat()
    recorder.stand_at("train.py:31 in forward")
    found = read_flight(tmp_path)
    assert found.process == os.getpid() and found.still == 30 and found.lines == "train.py:31 in forward"
    assert [event.step for event in found.events] == list(range(137, 201))
    assert str(found.events[-1]) == "step 200, in all_reduce"
    data = (tmp_path / "flight.bin").read_bytes()
    (tmp_path / "flight.bin").write_bytes(data[:-1])
    assert read_flight(tmp_path) is None


def test_a_rank_that_skipped_a_backward_is_named(tmp_path, clock):
    """DDP waits in the backward of step 8 for the rank that went on without one."""
    first = write_rank(tmp_path / "run", 0, [(8, BACKWARD)], "train.py:20 in main", ["zbs"] * 8)
    second = write_rank(
        tmp_path / "run.rank1", 1, [(8, FORWARD), (9, BACKWARD)], "train.py:20 in main", ["zbs"] * 8 + ["zs"]
    )
    clock.now += 40
    for recorder in (first, second):
        recorder.beat()
    cause = gradproof.diagnose(tmp_path / "run").causes[0]
    assert cause.id == "distributed-desync/hang" and cause.step == 8 and cause.where == "train.py:20"
    assert "Rank 1 skipped the backward of step 8" in cause.evidence[0]


def test_ranks_in_different_collectives_are_told_apart(tmp_path, clock):
    first = write_rank(tmp_path / "run", 0, [(3, COLLECTIVE, "barrier")], "train.py:9 in save", ["zbs"] * 3)
    second = write_rank(tmp_path / "run.rank1", 1, [(3, BACKWARD)], "train.py:5 in main", ["zbs"] * 3)
    clock.now += 40
    for recorder in (first, second):
        recorder.beat()
    cause = gradproof.diagnose(tmp_path / "run").causes[0]
    assert cause.id == "distributed-desync/hang" and "in barrier (train.py:9 in save)" in cause.evidence[0]
    assert "rank 1 stands at step 3, in backward (train.py:5 in main)" in cause.evidence[0]


def test_ranks_that_wait_for_one_at_work_are_no_hang(tmp_path, clock):
    """Rank 0 evaluates or writes a checkpoint, and rank 1 waits for it at a barrier."""
    orders = ["zbs"] * 6
    first = write_rank(tmp_path / "run", 0, [(6, FORWARD)], orders=orders)
    second = write_rank(tmp_path / "run.rank1", 1, [(6, COLLECTIVE, "barrier")], orders=orders)
    clock.now += 300
    for recorder in (first, second):
        recorder.beat()
    assert not gradproof.diagnose(tmp_path / "run").causes
    clock.now += 600
    for recorder in (first, second):
        recorder.beat()
    assert gradproof.diagnose(tmp_path / "run").causes[0].id == "distributed-desync/hang"


@pytest.mark.parametrize("seconds, waited", [(0.1, 2), (5.0, 40)], ids=["a moment", "long steps"])
def test_ranks_that_train_are_left_alone(tmp_path, clock, seconds, waited):
    orders = ["zbs"] * 6
    first = write_rank(tmp_path / "run", 0, [(6, BACKWARD)], orders=orders, seconds=seconds)
    second = write_rank(tmp_path / "run.rank1", 1, [(6, BACKWARD)], orders=orders, seconds=seconds)
    clock.now += waited
    for recorder in (first, second):
        recorder.beat()
    assert not gradproof.diagnose(tmp_path / "run").causes


@pytest.mark.parametrize("later, named", [(0.05, False), (2.0, True)], ids=["all at once", "one first"])
def test_the_rank_that_is_gone_first_is_the_lost_one(tmp_path, clock, later, named):
    first = write_rank(tmp_path / "run", 0, [(6, BACKWARD)], orders=["zbs"] * 6)
    second = write_rank(tmp_path / "run.rank1", 1, [(6, FORWARD)], orders=["zbs"] * 6)
    second.beat()
    clock.now += later
    first.beat()
    clock.now += 60
    causes = gradproof.diagnose(tmp_path / "run").causes
    assert [cause.id for cause in causes] == (["distributed-desync/lost-rank"] if named else [])
    assert not named or "rank 1 " in causes[0].evidence[0]


def test_ranks_that_have_ended_are_not_lost(tmp_path, clock):
    for rank, name in enumerate(("run", "run.rank1")):
        write_rank(tmp_path / name, rank, [(6, BACKWARD)], orders=["zbs"] * 6, ended=True)
    clock.now += 60
    assert not gradproof.diagnose(tmp_path / "run").causes
