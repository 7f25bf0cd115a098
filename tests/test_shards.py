"""A loss that leaps where a data file begins, and leaps and files that have nothing to do with each other."""

import numpy as np
import pytest

from gradproof.diagnosis.ranking import diagnose
from gradproof.diagnosis.shards import leaps_at_a_file
from gradproof.record.run import open_run
from gradproof.record.writer import RunWriter

STEPS = 2000
BAD = 1600  # where the ninth of ten shards begins


def curve(leaps):
    """Falls with noise, and goes up by so much at each of some steps."""
    loss = 1 + np.exp(-np.arange(STEPS) / 250) + 0.1 * np.random.default_rng(0).normal(size=STEPS)
    for step, rise in leaps.items():
        loss[step:] += rise
    return loss


def run_with(path, loss, opened):
    writer = RunWriter(path, {"facts": {"opened": opened}, "optimizers": [{"class": "Adam"}]})
    for step, value in enumerate(loss):
        writer.write_step({"step": step, "loss": float(value), "order": "zbs", "lr": 0.1, "optimizer": 0})
    writer.set_info(ended=1.0, exit_code=0)
    writer.close()
    return open_run(path)


SHARDS = {f"data/part-{n:03}.npy": 200 * n for n in range(10)}
PLANTED = {
    "a shard": (curve({BAD: 0.6}), SHARDS),
    "beside a second kind of file": (curve({BAD: 0.6}), {**SHARDS, "val.npy": 0, "vocabulary.json": 0}),
    "late by two steps, of a loader that reads ahead": (curve({BAD + 2: 0.6}), SHARDS),
}
HEALTHY = {
    "no leap": (curve({}), SHARDS),
    "a leap in the middle of a file": (curve({1500: 0.6}), SHARDS),
    "every file makes it leap": (curve({200 * n: 0.4 for n in range(4, 10)}), SHARDS),
    "a file at every step": (curve({BAD: 0.6}), {f"img_{n}.png": n for n in range(1400, 1800)}),
    "two files": (curve({BAD: 0.6}), {"train-1.npy": 0, "train-2.npy": BAD}),
    "a leap that is made good": (curve({BAD: 0.6, BAD + 100: -0.6}), SHARDS),
    "a NaN": (np.where(np.arange(STEPS) >= BAD, np.nan, curve({})), SHARDS),
}


@pytest.mark.parametrize("what", PLANTED)
def test_a_file_at_which_the_loss_leaps_is_named(tmp_path, what):
    (found,) = leaps_at_a_file(run_with(tmp_path / "run", *PLANTED[what]))
    assert found.where == "data/part-008.npy" and abs(found.step - BAD) <= 3
    assert "part-008.npy was opened (step 1600); at the 8 other files like it, it does not" in found.evidence


@pytest.mark.parametrize("what", HEALTHY)
def test_a_leap_or_a_file_alone_is_not(tmp_path, what):
    assert not list(leaps_at_a_file(run_with(tmp_path / "run", *HEALTHY[what])))


def test_it_is_said_with_what_to_do(tmp_path):
    run_with(tmp_path / "run", *PLANTED["a shard"])
    (found,) = [c for c in diagnose(tmp_path / "run").causes if c.family == "data-target-misaligned"]
    assert found.id.endswith("/from-a-file-on") and found.level == "warning" and "part-008" in found.where
    assert "hold this file against the one before it" in found.fix


@pytest.mark.parametrize("what, said", [("a leap in the middle of a file", True), ("no leap", False)])
def test_nobody_whose_loss_has_turned_is_told_that_all_is_well(tmp_path, what, said):
    run_with(tmp_path / "run", *HEALTHY[what])
    found = diagnose(tmp_path / "run")
    assert found.conclusion.startswith("The loss leaps at about step 1") == said
    assert ("why was not found" in found.conclusion) == said and bool(found.turned) == said


def test_a_loss_that_creeps_up_has_turned_too(tmp_path):
    rise = np.maximum(0, np.arange(STEPS) - 1200) / 800
    found = diagnose(run_with(tmp_path / "run", curve({}) + 0.5 * rise, SHARDS).path)
    assert "was least at about step " in found.conclusion


def run_with_rates(path, loss, rates, **verdict):
    writer = RunWriter(path, {"optimizers": [{"class": "Adam"}]})
    for step, (value, lr) in enumerate(zip(loss, rates, strict=True)):
        writer.write_step(
            {"step": step, "loss": float(value), "order": "zbs", "lr": float(lr), "optimizer": 0}
        )
    if verdict:
        writer.write_event("verdict", verdict="confirmed", experiment="how_long_is_the_step", **verdict)
    writer.set_info(ended=1.0, exit_code=0)
    writer.close()
    return {cause.id: cause for cause in diagnose(path).causes}


@pytest.mark.parametrize("decayed", [True, False])
def test_a_leap_at_a_rate_that_was_higher_before_is_not_laid_to_the_rate(tmp_path, decayed):
    loss = curve({1800: 3.0})
    rates = np.linspace(1e-3, 1e-5, STEPS) if decayed else np.full(STEPS, 1e-3)
    causes = run_with_rates(tmp_path / "run", loss, rates)
    assert ("lr-too-high/diverged" in causes) == (not decayed)
    found = diagnose(tmp_path / "run")
    assert found.turned.startswith("the loss leaps at about step 1")
    assert ("The loss leaps at about step 1" in found.conclusion) == decayed


@pytest.mark.parametrize("warming_up", [True, False])
def test_short_steps_of_a_warm_up_are_no_verdict_on_the_training(tmp_path, warming_up):
    rates = np.minimum(1.0, np.arange(1, STEPS + 1) / 300) * 1e-3 if warming_up else np.full(STEPS, 1e-6)
    said = {"family": "lr-too-low", "id": "lr-too-low/tiny-steps", "level": "warning", "confidence": "likely"}
    causes = run_with_rates(
        tmp_path / "run", curve({1800: 3.0}), rates, step=1, evidence=["it falls on"], **said
    )
    assert causes["lr-too-low/tiny-steps"].level == ("note" if warming_up else "warning")


@pytest.mark.parametrize("decayed", [True, False])
def test_nor_is_a_spike(tmp_path, decayed):
    loss = curve({})
    loss[1700] = 40.0
    rates = np.linspace(1e-3, 1e-5, STEPS) if decayed else np.full(STEPS, 1e-3)
    assert ("lr-too-high/spike" in run_with_rates(tmp_path / "run", loss, rates)) == (not decayed)
