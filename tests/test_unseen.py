"""A report says what was not seen: in its first lines, and under `notes` for programs."""

import errno
import json

import numpy as np
import pytest
from examined import write_examination

from gradproof.cli import main
from gradproof.diagnosis.ranking import diagnose
from gradproof.record import writer as writing
from gradproof.record.run import open_run
from gradproof.record.writer import RunWriter
from gradproof.report.text import render_text

COST = {"own_seconds": 1.0, "share": 0.02, "budget": 0.02, "steps": 100, "bare_steps": 20, "unseen_steps": 40}


def write_run(path, steps=60, bare=0, **info):
    """A run whose loss falls, and whose end is recorded unless it is told otherwise."""
    writer = RunWriter(path, {"ended": 1.0, **info})
    for step, loss in enumerate(2.0 * 0.97 ** np.arange(steps)):
        writer.write_step(
            {"step": step, "loss": float(loss), "order": "zbs", "depth": 0 if step < bare else 4}
        )
    writer.close()
    return writer.path


def first_lines(path):
    return render_text(diagnose(path)).split("\n\n")[0].replace("\n", " ")


def test_the_headline_counts(tmp_path):
    path = write_run(tmp_path / "run", bare=12)
    write_examination(path)
    said = first_lines(path)
    asked = diagnose(path).examination.asked
    assert (
        f"60 steps: 60 watched (12 by loss and learning rate alone), 6 taped, {asked} questions asked" in said
    )
    assert "note" not in said and "Nothing is wrong that this record could show." in said
    assert diagnose(path).as_data()["counted"].startswith("60 steps: 60 watched")


def test_a_budget_that_was_spent_is_said(tmp_path):
    path = write_run(tmp_path / "run", cost=COST)
    assert "100 steps: 60 watched" in first_lines(path)
    assert "note: 40 of 100 steps were not looked at, to keep to the budget of 2 %" in first_lines(path)
    assert diagnose(write_run(tmp_path / "well", cost={**COST, "unseen_steps": 0, "steps": 60})).notes == ()


def test_a_question_that_failed_is_said(tmp_path, capsys):
    path = write_run(tmp_path / "run")
    write_examination(path, is_the_gradient_right=("failed", "ValueError: no"))
    assert (
        "note: 1 question has failed: Is every gradient the derivative of the loss? (ValueError: no)"
        in first_lines(path)
    )
    assert main(["diagnose", str(path), "--json"]) == 0
    assert any("has failed" in note for note in json.loads(capsys.readouterr().out)["notes"])


@pytest.mark.parametrize(
    ("taping", "said"),
    [
        ({"broken": "ValueError: no"}, "taping ended early: ValueError: no"),
        ({"refused": "too large"}, "no step was taped: too large"),
        ({"specimens": {"broken": "No space left"}}, "not every taped step could be kept: No space left"),
    ],
)
def test_taping_that_failed_is_said(tmp_path, taping, said):
    assert said in first_lines(write_run(tmp_path / "run", taping=taping))
    sound = {"broken": None, "refused": "", "specimens": {"broken": ""}}
    assert diagnose(write_run(tmp_path / "well", taping=sound)).notes == ()


def test_two_threads_of_which_one_is_watched_are_said(tmp_path):
    assert "2 threads train, and only the first is watched" in first_lines(
        write_run(tmp_path / "run", threads=2)
    )
    assert diagnose(write_run(tmp_path / "well", threads=1)).notes == ()


def test_damage_is_said_and_nothing_is_called_well(tmp_path):
    path = write_run(tmp_path / "run")
    write_examination(path)
    with open(path / "steps.csv", "a") as stream:
        stream.write("60,what" + "," * 17 + "\n")
    said = first_lines(path)
    assert "note: steps.csv: 1 damaged rows are left out" in said
    assert "No problem was found in what could be read" in said and not diagnose(path).sure


def test_a_run_without_an_end_is_well_so_far(tmp_path):
    path = write_run(tmp_path / "run", ended=None)
    info = json.loads((path / "run.json").read_text())
    del info["ended"]
    (path / "run.json").write_text(json.dumps(info))
    write_examination(path)
    assert "Nothing is wrong so far" in first_lines(path) and "no end" in first_lines(path)


@pytest.mark.parametrize("nothing_fits", [False, True])
def test_a_full_disk_is_the_headline(tmp_path, monkeypatch, nothing_fits):
    """Also where not even run.json could be written again."""

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    writer = RunWriter(tmp_path / "run", {})
    for step in range(60):
        writer.write_step({"step": step, "loss": 2.0 * 0.97**step, "order": "zbs", "depth": 4})
    monkeypatch.setattr(writing.os, "write", full)
    if nothing_fits:
        monkeypatch.setattr("gradproof.record.disk.replace_file", full)
    with pytest.warns(UserWarning, match="No space left") as caught:
        for step in range(60, 70):
            writer.write_step({"step": step, "loss": float("nan"), "order": "zbs"})
        writer.set_info(ended=2.0)
        writer.close()
    assert len(caught) == 1
    monkeypatch.undo()
    write_examination(writer.path)
    said = first_lines(writer.path)
    assert "Watching stopped early, after 60 steps" in said and "what came after was not seen" in said
    assert "Nothing is wrong" not in said and len(open_run(writer.path)) == 60
