"""Which steps are taped: as many as the allowance or the budget pays for, by a clock that the test turns."""

import math
import random
import subprocess
import sys
from collections import deque
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from gradproof.probes import taping
from gradproof.probes.taping import Recent
from gradproof.tape import aside
from gradproof.tape.aside import Room
from gradproof.tape.operations import Tape

STEP, RECORDING, CAPTURE = 0.01, 0.02, 0.005  # seconds of a plain step, and what a tape adds


class Clock:
    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now


class Simulation:
    """A training whose steps take as long as they are said to; `taped` holds the steps that were."""

    def __init__(self, monkeypatch, trouble=range(0), weights=0, **options):
        self.clock, self.taped, self.landmarks, self.trouble = Clock(), [], [], trouble
        self.has_room = True
        monkeypatch.setattr(taping, "time", self.clock)
        monkeypatch.setattr(taping, "seconds_of_training", self.clock.perf_counter)
        monkeypatch.setattr(taping, "Recorder", FakeRecorder)
        monkeypatch.setattr(
            taping, "capture", lambda state, step, *args, **details: (step, details["landmark"])
        )
        names = SimpleNamespace(roots={}, parameters={torch.empty(weights, device="meta"): "w"})
        session = SimpleNamespace(
            names=names,
            facts={},
            losses=[],
            parameters=SimpleNamespace(optimizers=[]),
            fail=self.fail,
            own=None,
        )
        self.taping = taping.Taping(session, self, **options)

    def put(self, specimen):
        self.taped.append(specimen[0])
        self.landmarks.append(specimen[1])
        self.clock.now += CAPTURE

    def fail(self, error):
        raise error

    def run(self, steps, loss=None):
        for step in range(steps):
            self.taping.trouble = self.taping.trouble if loss else step in self.trouble
            self.taping.begin(step, compiled=False)
            self.clock.now += STEP + (RECORDING if self.taping.active else 0.0)
            self.taping.end()
            assert not self.taping.broken, self.taping.broken
            if loss:
                self.taping.row_written({"loss": loss(step)})
        return self


class FakeRecorder:
    def __init__(self, names, waits, compiled):
        self.state = SimpleNamespace(idle=False)
        self.tape = Tape(operations=[None])

    def start(self, inside_optimizer_hook):
        return self.tape

    def stop(self):
        return self.tape

    def copy_ahead(self, memories, room):
        pass

    def forget(self):
        pass


@pytest.mark.parametrize("budget", [0.001, 0.01, 0.05, 0.2])
def test_a_budget_that_was_asked_for_is_kept(budget, monkeypatch):
    done = Simulation(monkeypatch, budget=budget).run(20_000)
    assert set(done.taped) <= taping.LANDMARKS
    assert (
        0 < done.taping.spent <= budget * done.clock.now + CAPTURE + RECORDING
    )  # at most the last one is owed
    real = (CAPTURE + RECORDING) * len(done.taped)
    assert done.taping.spent == pytest.approx(real, rel=0.2)


def test_a_larger_budget_tapes_more_and_none_tapes_nothing(monkeypatch):
    counts = [len(Simulation(monkeypatch, budget=b).run(20_000).taped) for b in (0.0, 0.001, 0.05)]
    assert 0 == counts[0] < counts[1] < counts[2]


def test_trouble_does_not_overdraw_a_budget(monkeypatch):
    done = Simulation(monkeypatch, budget=0.01, trouble=range(500, 20_000)).run(20_000)
    assert set(done.taped) - taping.LANDMARKS
    assert done.taping.spent <= 0.01 * done.clock.now + CAPTURE + RECORDING


def test_without_one_the_allowance_goes_first_then_landmarks_and_trouble(monkeypatch):
    done = Simulation(monkeypatch, trouble=range(5000, 5001)).run(20_000)
    early = [step for step in done.taped if step < 18]
    assert early == [step for step in range(18) if step not in taping.PLAIN_STEPS]
    late = [step for step in done.taped if step > 2000]
    assert late == sorted({*(s for s in taping.LANDMARKS if 2000 < s < 20_000), 5000})
    assert all(after <= 1.13 * before + 1 for before, after in pairwise(late))  # never long ago


def test_something_is_left_for_the_landmarks_of_a_short_run(monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "STEP", 0.002)
    monkeypatch.setattr(sys.modules[__name__], "RECORDING", 0.06)
    assert {32, 100} <= set(Simulation(monkeypatch).run(330).taped)


def test_noise_early_on_leaves_room_for_what_goes_wrong_late(monkeypatch):
    noise = lambda step: 10.0 if 400 < step < 3000 and step % 40 == 0 else 1.0  # noqa: E731
    early = Simulation(monkeypatch).run(20_000, noise)
    both = Simulation(monkeypatch).run(20_000, lambda step: 10.0 if step == 15_000 else noise(step))
    assert set(both.taped) - set(early.taped) == {15_001}


def test_a_training_that_stays_in_trouble_has_nothing_more_to_show(monkeypatch):
    done = Simulation(monkeypatch).run(20_000, lambda step: math.nan if step > 5000 else 1.0)
    late = {s for s in taping.LANDMARKS if 5000 < s < 20_000}
    between = [s for s in done.taped if s > 5000 and s not in late]
    assert between[:3] == [5002, 5003, 5004] and len(between) == taping.MOST_TROUBLED
    assert {s for s in late if s > 8000} < set(done.taped)


def test_the_one_step_that_was_asked_for_is_taped_whatever_it_costs(monkeypatch):
    assert Simulation(monkeypatch, only=777, budget=0.0).run(1000).taped == [777]


@pytest.mark.parametrize("available, taped", [(1 << 20, True), (1 << 10, False)])
def test_a_host_without_memory_is_left_alone(available, taped, monkeypatch):
    monkeypatch.setattr(taping, "available_memory", lambda: available)
    assert bool(Simulation(monkeypatch, weights=1000).run(5).taped) == taped


def test_of_a_large_model_only_landmarks_are_taped(monkeypatch):
    done = Simulation(monkeypatch, weights=20 << 20).run(40)
    assert done.taped == [1, 3, 10, 32]


def test_a_shelf_that_is_full_is_not_waited_for(monkeypatch):
    done = Simulation(monkeypatch)
    done.has_room = False
    assert not done.run(20).taped


@pytest.mark.parametrize("flat", [True, False])
def test_a_model_with_one_flat_parameter_is_left_alone(monkeypatch, flat):
    """FSDP1 takes its memory away while a step runs; reading it would end the training."""
    done = Simulation(monkeypatch)
    part = SimpleNamespace(_is_flat_param=flat, numel=lambda: 1, element_size=lambda: 4)
    monkeypatch.setattr(done.taping._session.names, "parameters", [part])
    assert bool(done.run(5).taped) != flat
    assert ("FullyShardedDataParallel" in done.taping.refused) == flat


@pytest.mark.parametrize(
    "last, trouble",
    [
        ({"loss": 1.1, "grad_norm": 3.0}, False),
        ({"loss": 5.0}, True),
        ({"grad_norm": 50.0}, True),
        ({"loss": float("nan")}, True),
        ({"loss": 50.0, "optimizer": 1}, False),  # another player, of which nothing is known yet
    ],
)
def test_trouble_is_what_lies_far_above_the_last_steps(last, trouble, monkeypatch):
    watched = Simulation(monkeypatch).taping
    for step in range(10):
        watched.row_written({"loss": 1.0 + 0.1 * (step % 3), "grad_norm": 2.0, "optimizer": 0})
        assert not watched.trouble
    watched.row_written({"optimizer": 0, **last})
    assert watched.trouble == trouble


def test_a_landmark_waits_for_room_on_the_host(monkeypatch):
    """Fresh pages cost more than the copy: a large step is recorded when the pages are there, as that landmark."""
    memory = torch.empty(taping.LARGE, dtype=torch.uint8)
    monkeypatch.setattr(taping, "ahead_of", lambda tensors: {1: memory})
    simulation = Simulation(monkeypatch, weights=taping.LARGE)
    room = simulation.taping._room
    monkeypatch.setattr(room, "_make", lambda sizes: None)  # nothing comes of it
    assert simulation.run(2).taped == []
    room._at_work.join()
    room._free[memory.nbytes] = [memory]
    assert simulation.run(1).taped == [0], "step 1 of the first two, which is overdue"
    assert simulation.landmarks == [True]


def test_room_is_made_in_a_thread(monkeypatch):
    monkeypatch.setattr(aside.torch.cuda, "is_initialized", lambda: False)
    room = Room()
    assert not room.ready([1 << 20, 1 << 10])
    room._at_work.join()
    assert room.ready([1 << 20, 1 << 10])
    assert room.take(1 << 20).numel() == 1 << 20
    assert not room.ready([1 << 20]), "it was taken"
    room._at_work.join()


class FakeRuntime:
    """CUDA's own registry of host memory."""

    def __init__(self):
        self.known = {}

    def cudaHostRegister(self, address, size, flags):
        self.known[address] = size
        return 0

    def cudaHostUnregister(self, address):
        del self.known[address]


def test_the_gpu_knows_room_until_it_was_filled(monkeypatch):
    runtime, room = FakeRuntime(), Room()
    monkeypatch.setattr(aside.torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(aside.torch.cuda, "cudart", lambda: runtime)
    room.ready([1 << 20, 1 << 21, 1 << 10])
    room._at_work.join()
    assert not runtime.known and room.busy, (
        "no call of CUDA in a thread: it would spoil a graph that is captured"
    )
    room.tend(most=1)
    assert len(runtime.known) == 1, "some at a time"
    room.tend()
    assert sorted(runtime.known.values()) == [1 << 20, 1 << 21], "small memory has no pages of its own"
    taken = room.take(1 << 20)
    room.let_go()
    assert taken.data_ptr() in runtime.known
    room.tend()
    assert list(runtime.known.values()) == [1 << 21] and taken.data_ptr() not in runtime.known
    room.clear()
    assert not runtime.known
    assert not room.ready([1 << 20]), "and it can be used again"
    room.clear()


def test_a_script_that_ends_while_room_is_made_ends_well():
    program = """
from gradproof.tape.aside import Room
room = Room()
room.ready([64 << 20] * 200)
"""
    done = subprocess.run([sys.executable, "-c", program], timeout=60, capture_output=True)
    assert done.returncode == 0 and not done.stderr


def test_no_room_at_all_is_no_reason_to_wait(monkeypatch):
    room = Room()

    def refuses(*args, **kwargs):
        raise RuntimeError("not enough memory")

    monkeypatch.setattr(aside.torch, "empty", refuses)
    assert not room.ready([1 << 20])
    room._at_work.join()
    assert room.ready([1 << 20])


def test_a_loss_that_creeps_up_is_trouble_now_and_then():
    draw = random.Random(0)
    course = [1 + math.exp(-step / 300) + draw.gauss(0, 0.05) for step in range(5000)]
    calm, creeps = Recent(), Recent()
    assert not any(calm.stands_out(loss, 4.0) for loss in course)
    seen = [n for n, loss in enumerate(course) if creeps.stands_out(loss + max(0, n - 4000) / 1000, 4.0)]
    assert 2 <= len(seen) <= 12 and 4000 < seen[0] < 4500


@pytest.mark.parametrize("kind", ["wide", "negative", "around zero", "a step"])
def test_what_stands_out_is_what_is_far_above_the_others(kind):
    """Sorting is spared where the answer is known: it is the same answer."""
    draw, recent, values = random.Random(kind), Recent(), deque(maxlen=20)
    recent._have_crept = lambda ordered: False  # of the last 20 alone
    for number in range(2000):
        value = {
            "wide": 10 ** draw.uniform(-2, 2),
            "negative": -(10 ** draw.uniform(-2, 2)),
            "around zero": draw.uniform(-3, 5),
            "a step": (1.0 if number % 50 < 40 else 6.0) * draw.uniform(0.5, 2),
        }[kind]
        value = draw.choice((math.nan, math.inf, 0.0)) if draw.random() < 0.01 else value
        ordered = sorted(values)
        usual = ordered[len(values) // 2] if len(values) >= 5 else math.inf
        wanted = not math.isfinite(value) or abs(value) > 4 * abs(usual) + 1e-12
        if len(ordered) == 20:
            wanted |= value > usual + max(4 * (ordered[17] - ordered[2]), 0.1 * abs(usual))
            window = [*values, value][-20:]
            wanted |= min(window[-5:]) > max(max(window[:-5]), usual + 0.05 * abs(usual))
        assert recent.stands_out(value, 4.0) == wanted
        if math.isfinite(value):
            values.append(value)


@pytest.mark.parametrize("kind", ["one backward", "taking turns"])
def test_of_two_optimizers_on_one_backward_the_whole_step_is_taped(kind, tmp_path):
    import gradproof
    from gradproof.examination.examiner import read_shelf
    from gradproof.tape.specimen import load

    torch.manual_seed(0)
    tables, dense, x = torch.nn.Embedding(9, 4), torch.nn.Linear(4, 1), torch.arange(9)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.01) for part in (tables, dense)]
    with gradproof.watch(torch.nn.ModuleList([tables, dense]), out=tmp_path / "run"):
        for _ in range(20):
            for optimizer in optimizers:
                if kind == "taking turns" or optimizer is optimizers[0]:
                    dense(tables(x)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    steps = [shelved.step for shelved in read_shelf(tmp_path / "run")]
    specimens = [load(shelved.path) for shelved in read_shelf(tmp_path / "run")]
    assert len(steps) > 5 and all(specimen.tape.loss_slots for specimen in specimens)
    assert {step % 2 for step in steps} == ({0} if kind == "one backward" else {0, 1})
