"""Which steps are taped: as many as the allowance or the budget pays for, by a clock that the test turns."""

from types import SimpleNamespace

import pytest

from gradproof.probes import taping
from gradproof.probes.names import Names
from gradproof.tape.operations import Tape

STEP, RECORDING, EXAMINATION = 0.01, 0.02, 0.5  # seconds of a plain step, and what a tape adds


class Clock:
    def __init__(self):
        self.now = 0.0

    def process_time(self):
        return self.now

    perf_counter = process_time


class Simulation:
    """A training whose steps take as long as they are said to; `taped` holds the steps that were."""

    def __init__(self, monkeypatch, trouble=range(0), **options):
        self.clock, self.taped, self.trouble = Clock(), [], trouble
        monkeypatch.setattr(taping, "time", self.clock)
        recorder = SimpleNamespace(start=lambda **_: None, stop=Tape)
        monkeypatch.setattr(taping, "Recorder", lambda names: recorder)
        self.taping = taping.Taping(Names([]), self.examine, self.fail, **options)

    def examine(self, tape, step, thorough):
        self.taped.append(step)
        self.clock.now += EXAMINATION if thorough else 0.0

    def fail(self, error):
        raise error

    def run(self, steps):
        for step in range(steps):
            self.taping.trouble = step in self.trouble
            self.taping.begin(step, compiled=False)
            self.clock.now += STEP + (RECORDING if self.taping.active else 0.0)
            self.taping.end()
        return self


@pytest.mark.parametrize("budget", [0.001, 0.01, 0.05, 0.2])
def test_a_budget_that_was_asked_for_is_kept(budget, monkeypatch):
    done = Simulation(monkeypatch, budget=budget).run(20_000)
    assert set(done.taped) <= taping.LANDMARKS
    assert (
        0 < done.taping.spent <= budget * done.clock.now + EXAMINATION + RECORDING
    )  # at most the last one is owed
    real = (EXAMINATION + RECORDING) * len(done.taped)
    assert done.taping.spent == pytest.approx(real, rel=0.2)


def test_a_larger_budget_tapes_more_and_none_tapes_nothing(monkeypatch):
    counts = [len(Simulation(monkeypatch, budget=b).run(20_000).taped) for b in (0.0, 0.001, 0.05)]
    assert 0 == counts[0] < counts[1] < counts[2]


def test_trouble_does_not_overdraw_a_budget(monkeypatch):
    done = Simulation(monkeypatch, budget=0.01, trouble=range(500, 20_000)).run(20_000)
    assert set(done.taped) - taping.LANDMARKS
    assert done.taping.spent <= 0.01 * done.clock.now + EXAMINATION + RECORDING


def test_without_one_the_allowance_goes_first_then_landmarks_and_trouble(monkeypatch):
    done = Simulation(monkeypatch, trouble=range(5000, 5001)).run(20_000)
    early = [step for step in done.taped if step < 60]
    assert early == [step for step in range(60) if step not in taping.PLAIN_STEPS]
    late = [step for step in done.taped if step > 1000]
    assert late == [*sorted(s for s in taping.LANDMARKS if 1000 < s < 5000), 5000, 10_000]
    limit = taping.ALLOWANCE + taping.SHARE * done.clock.now + EXAMINATION + RECORDING
    assert done.taping.spent <= limit


def test_the_one_step_that_was_asked_for_is_taped_whatever_it_costs(monkeypatch):
    assert Simulation(monkeypatch, only=777, budget=0.0).run(1000).taped == [777]


@pytest.mark.parametrize("free, taped", [(40, True), (16, False)])
def test_a_gpu_that_is_nearly_full_is_left_alone(free, taped, monkeypatch):
    """10 GB held, 30 at the peak of a step, 12 reserved: a tape wants 25 beyond what is held."""
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        memory_allocated=lambda: 10,
        max_memory_allocated=lambda: 30,
        memory_reserved=lambda: 12,
        mem_get_info=lambda: (free, 80),
    )
    monkeypatch.setattr(taping.torch, "cuda", cuda)
    assert bool(Simulation(monkeypatch).run(5).taped) == taped


def test_a_sharded_model_is_left_alone(monkeypatch):
    """Rank 0 alone must not ask for values that the other ranks hold a part of."""
    done = Simulation(monkeypatch)
    shard = SimpleNamespace(to_local=None)
    monkeypatch.setattr(done.taping._names, "by_parameter", lambda: [shard])
    assert not done.run(5).taped


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
