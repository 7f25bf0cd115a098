"""What leaves its course in a record, and when; and runs in which nothing does."""

import numpy as np
import pytest

from gradproof.ask.opened import open as open_run_to_ask
from gradproof.diagnosis.course import find_departures
from gradproof.record.run import open_run
from gradproof.record.schema import STATISTICS, STATISTICS_FRAME
from gradproof.record.writer import RunWriter

STEPS, BREAK, EVERY = 2000, 1500, 5
TENSORS = [
    {"kind": "weight", "name": "a.weight", "shape": [8, 8], "dtype": "float32"},
    {"kind": "gradient", "name": "a.weight", "shape": [8, 8], "dtype": "float32"},
    {"kind": "adam_v", "name": "a.weight", "shape": [8, 8], "dtype": "float32"},
]


def write(path, loss=None, lr=None, **changed):
    """A run that goes well; `changed`: the factor by which a statistic of a tensor is another, step by step."""
    noise = np.random.default_rng(1).normal(size=(4, STEPS))
    t = np.arange(STEPS)
    loss = 1 + np.exp(-t / 300) + 0.1 * noise[0] if loss is None else loss
    lr = np.full(STEPS, 1e-3) if lr is None else lr
    writer = RunWriter(path, {"tensors": TENSORS, "optimizers": [{"class": "Adam"}]})
    walk = np.cumsum(noise[1]) / 2000  # weights wander
    sizes = {
        "weight": 3 + 0.2 * np.sqrt(t / STEPS) + walk,
        "gradient": np.exp(0.4 * noise[2]),
        "adam_v": np.exp(0.1 * noise[3]),
    }
    for step in range(STEPS):
        writer.write_step(
            {"step": step, "loss": float(loss[step]), "order": "zbs", "lr": float(lr[step]), "optimizer": 0}
        )
        if step % EVERY == 0:
            values = np.zeros((len(TENSORS), len(STATISTICS)), dtype=np.float32)
            for row, tensor in enumerate(TENSORS):
                size = sizes[tensor["kind"]][step] * changed.get(tensor["kind"], lambda step: 1.0)(step)
                values[row, STATISTICS.index("norm")] = size
                values[row, STATISTICS.index("absmax")] = 0.1 * size
            writer.write_frame(STATISTICS_FRAME, step, np.arange(len(TENSORS)), values)
    writer.set_info(ended=1.0, exit_code=0)
    writer.close()
    return open_run(path)


def leap(factor):
    return lambda step: factor if step >= BREAK else 1.0


def fade(step):
    return 0.99 ** max(0, step - BREAK)


T = np.arange(STEPS)
CURVE = 1 + np.exp(-T / 300) + 0.1 * np.random.default_rng(0).normal(size=STEPS)
PLANTED = {
    "a weight that leaps": ({"weight": leap(40.0)}, "weight a.weight", True),
    "a gradient that dies out": ({"gradient": fade}, "gradient a.weight", False),
    "what Adam remembers": ({"adam_v": leap(1e6)}, "adam v a.weight", True),
    "the loss": ({"loss": CURVE + (T >= BREAK)}, "loss", True),
    "the rate": ({"lr": np.where(T < BREAK, 1e-3, 1e-2)}, "lr", True),
}
HEALTHY = {
    "as it is": {},
    "a cosine": {"lr": 5e-4 * (1 + np.cos(np.pi * T / STEPS)) + 1e-6},
    "one odd step": {"loss": np.where(T == BREAK, 9.0, CURVE)},
    "a warm-up": {"lr": 1e-3 * np.minimum(1, T / 400)},
    "weights that grow": {"weight": lambda step: 1 + step / STEPS},
}


@pytest.mark.parametrize("what", PLANTED)
def test_what_leaves_its_course_is_named_with_its_step(tmp_path, what):
    changed, name, leaps = PLANTED[what]
    found = find_departures(write(tmp_path / "run", **changed))
    assert [each.what for each in found] == [name] and found[0].leaps == leaps
    near = 20 if leaps else 120  # what fades is seen when it has faded
    assert BREAK - near <= found[0].last <= found[0].step <= BREAK + near


@pytest.mark.parametrize("what", HEALTHY)
def test_what_is_on_its_course_is_not(tmp_path, what):
    assert find_departures(write(tmp_path / "run", **HEALTHY[what])) == []


def test_the_first_to_leave_it_comes_first(tmp_path):
    run = write(tmp_path / "run", weight=leap(40.0), loss=CURVE + (T >= BREAK + 100))
    assert [each.what for each in find_departures(run)] == ["weight a.weight", "loss"]
    answer = open_run_to_ask(tmp_path / "run").ask("course")
    assert answer.rows[0]["what"].endswith("of weight a.weight") and answer.confidence == "measured"
    assert "leaps between steps 1495 and 1500" in answer.sentence
    (mine,) = open_run_to_ask(tmp_path / "run").ask("course", of="loss").rows
    assert mine["off_it_since"] == BREAK + 100


def test_a_run_of_a_few_steps_has_no_course(tmp_path):
    writer = RunWriter(tmp_path / "run", {})
    writer.write_step({"step": 0, "loss": 1.0, "order": "zbs"})
    writer.close()
    assert find_departures(open_run(tmp_path / "run")) == []
    assert "No series leaves its course" in open_run_to_ask(tmp_path / "run").ask("course").sentence
