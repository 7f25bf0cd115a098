"""`gradproof examine`: which questions, of which steps, for how long; and what it says of what it cannot read."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from test_examination import HalfTanh, examine, regression
from test_helper import PLANTED, SOURCE, wait_for

from gradproof.cli import main
from gradproof.examination.process import CUT_OFF

pytestmark = pytest.mark.timeout(240)
FEW = ("do_shapes_meet", "is_the_gradient_right", "is_it_in_train_mode")
ONLY = [word for name in FEW for word in ("--only", name)]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A run with a wrong backward that nobody has examined."""
    path = tmp_path_factory.mktemp("recorded") / "run"
    examine(path, lambda: regression(steps=5, function=HalfTanh.apply), questions=["nothing of the kind"])
    (path / "examination.jsonl").unlink()
    return path


@pytest.fixture
def run(recorded, tmp_path):
    return shutil.copytree(recorded, tmp_path / "run")


def events(run, kind="asked"):
    lines = (run / "examination.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def asked(run):
    return [(e["question"], e["step"]) for e in events(run) if e["outcome"] != "not asked"]


def verdicts(run):
    found = [{k: v for k, v in e.items() if k != "time"} for e in events(run, "verdict")]
    return sorted(found, key=lambda event: json.dumps(event, sort_keys=True))


@pytest.mark.filterwarnings("ignore")
def test_steps_questions_resuming_and_asking_again(run, capsys):
    assert main(["examine", str(run), *ONLY, "--step", "1", "--device", "cpu"]) == 0
    first = asked(run)
    assert set(first) == {(name, 1) for name in FEW} and len(first) == len(set(first))
    said = capsys.readouterr().out
    assert "HalfTanh" in said
    assert main(["examine", str(run), *ONLY]) == 0
    whole = asked(run)
    assert whole[: len(first)] == first and len(whole) == len(set(whole)) > len(first)
    assert main(["examine", str(run), *ONLY]) == 0
    assert asked(run) == whole  # nothing is asked twice
    assert main(["examine", str(run), *ONLY, "--again", "--step", "1"]) == 0
    assert set(asked(run)[len(whole) :]) == set(first)


def test_two_jobs_say_what_one_says(run, recorded, tmp_path, capsys):
    other = shutil.copytree(recorded, tmp_path / "other")
    assert main(["examine", str(run), *ONLY]) == 0
    assert main(["examine", str(other), *ONLY, "--jobs", "2"]) == 0
    assert verdicts(run) == verdicts(other) and verdicts(run)
    assert sorted(asked(run)) == sorted(asked(other))


def test_no_time_asks_nothing_and_says_so(run, capsys):
    assert main(["examine", str(run), *ONLY, "--within", "0s"]) == 0
    assert not asked(run)
    assert {e["reason"] for e in events(run)} == {"the time that was given (0 s) was over"}
    assert {e["question"] for e in events(run)} == set(FEW)
    assert "not asked" in capsys.readouterr().out


def test_what_does_not_exist_is_named(run, capsys):
    for words, reason in (
        (["--step", "77"], "step 77"),
        (["--only", "nonsense"], "there is no question 'nonsense'"),
        (["--within", "soon"], "a time is written like"),
        (["--jobs", "0", "--step", "77"], "step 77"),
    ):
        assert main(["examine", str(run), *words]) == 2
        captured = capsys.readouterr()
        assert reason in captured.err and "Traceback" not in captured.err and not captured.out
    assert not (run / "examination.jsonl").exists() or not asked(run)


def test_a_run_without_specimens_is_named(run, capsys):
    shutil.rmtree(run / "specimens")
    assert main(["examine", str(run)]) == 2
    assert "has no specimens" in capsys.readouterr().err


DAMAGES = {
    "truncated tensors": lambda path: os.truncate(path / "tensors.safetensors", 100),
    "truncated JSON": lambda path: os.truncate(path / "tape.json", 100),
    "no label": lambda path: (path / "label.json").unlink(),
    "a label that is none": lambda path: (path / "label.json").write_text("{"),
    "another format": lambda path: (path / "label.json").write_text(
        json.dumps({**json.loads((path / "label.json").read_text()), "gradproof": 99})
    ),
    "empty": lambda path: [file.unlink() for file in path.iterdir()],
}


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_specimen_is_said_in_one_line_and_passed_over(what, run, capsys):
    DAMAGES[what](run / "specimens" / "step-00000000")
    assert main(["examine", str(run), *ONLY]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "step-00000000" in line]
    assert len(said) == 1 and "Traceback" not in said[0]
    assert 0 not in {step for _, step in asked(run)} and (FEW[0], 1) in asked(run)
    assert not [e for e in events(run) if e["outcome"] == "failed"]


def test_strange_things_on_the_shelf_are_passed_over(run, capsys):
    shelf = run / "specimens"
    (shelf / "step-text").write_text("hello")
    (shelf / "step-00000099").symlink_to("/nonexistent")
    assert main(["examine", str(run), *ONLY, "--step", "1"]) == 0
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_nothing_but_damaged_specimens_is_nothing_to_examine(run, capsys):
    for path in (run / "specimens").iterdir():
        os.truncate(path / "tape.json", 100)
    assert main(["examine", str(run)]) == 2
    assert "can be read" in capsys.readouterr().err


def start(run, *words, **environment):
    site = run.parent / "site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(PLANTED)
    path = os.pathsep.join([str(site), SOURCE])
    known = {**os.environ, "PYTHONPATH": path, "ASKED": " ".join(FEW), **environment}
    command = [sys.executable, "-m", "gradproof", "examine", str(run), *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=known)


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_interrupted_it_keeps_what_it_knows_and_goes_on_later(jobs, run, capsys):
    process = start(run, "--jobs", jobs, PLANT="hang")
    wait_for(lambda: (run / "examination.jsonl").exists() and asked(run))
    time.sleep(0.5)
    assert main(["examine", str(run)]) == 2  # two at a time
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1 and "is being examined by another process" in said
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert time.monotonic() - began < 15
    assert process.returncode == 0 and "Traceback" not in err, err
    assert out.startswith("gradproof · ")
    known = [key for key in asked(run) if key[0] != "do_shapes_meet"]
    assert known
    reasons = {e["reason"] for e in events(run) if e["outcome"] == "not asked"}
    assert reasons <= {"it was interrupted", CUT_OFF}
    assert main(["examine", str(run), *ONLY]) == 0
    assert all(asked(run).count(key) == 1 for key in known)
