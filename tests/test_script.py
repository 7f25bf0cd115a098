"""`gradproof run`: any script, exactly as Python would run it, and one clear sentence when it cannot be."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gradproof.record.run import open_run

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))

TRAIN = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(STEPS):
    x = torch.randn(8, 4)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""


def python(*arguments, cwd, **options):
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, timeout=240, **options
    )


def gradproof(*arguments, cwd, **options):
    return python("-m", "gradproof", *arguments, cwd=cwd, **options)


def script(path, text, steps=5):
    path.write_text(text.replace("STEPS", str(steps)))
    return path.name


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_output_of_a_script_is_bit_identical(example, tmp_path):
    tail = "\nfor name, value in model.state_dict().items():\n    print(name, value.double().sum().item())"
    name = script(tmp_path / "train.py", example.read_text() + tail + "\nprint(torch.rand(3))")
    plain, watched = python(name, cwd=tmp_path), gradproof("run", "--out", "run", name, cwd=tmp_path)
    assert plain.returncode == watched.returncode == 0, watched.stderr
    assert plain.stdout == watched.stdout


def test_argv_cwd_main_and_imports_are_as_in_python(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "helper.py").write_text("VALUE = 7\n")
    text = (
        "import sys, os, pickle, inspect, helper\nclass A: pass\n"
        "assert isinstance(pickle.loads(pickle.dumps(A())), A)\n"
        "def f(): return 1\nassert 'return 1' in inspect.getsource(f)\n"
        "print(__name__, sys.argv, os.getcwd(), __file__, helper.VALUE, sys.path[0])\n"
    )
    (tmp_path / "sub" / "train.py").write_text(text + TRAIN.replace("STEPS", "2"))
    arguments = ["sub/train.py", "--lr", "3e-4", "--", "-m", "x", "--out", "y", "--json"]
    plain, watched = python(*arguments, cwd=tmp_path), gradproof("run", *arguments, cwd=tmp_path)
    assert plain.stdout and plain.stdout == watched.stdout, watched.stderr


@pytest.mark.slow
def test_modules_run_with_m(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "part.py").write_text("COUNT = 3\n")
    script(
        tmp_path / "package" / "train.py",
        "import sys\nfrom .part import COUNT as N\nprint(__name__, __package__, N, sys.argv[1:])\n" + TRAIN,
    )
    plain = python("-m", "package.train", "--a", "-b", cwd=tmp_path)
    watched = gradproof("run", "--out", "run", "-m", "package.train", "--a", "-b", cwd=tmp_path)
    assert plain.stdout and plain.stdout == watched.stdout, watched.stderr
    assert len(open_run(tmp_path / "run")) == 5


@pytest.mark.parametrize(
    "end, code, word",
    [
        ("import sys; sys.exit(7)", 7, ""),
        ("raise SystemExit('no disk')", 1, "no disk"),
        ("raise ValueError('odd')", 1, "ValueError: odd"),
    ],
)
def test_exit_codes_and_exceptions_pass_through(end, code, word, tmp_path):
    name = script(tmp_path / "train.py", TRAIN + end)
    plain, watched = python(name, cwd=tmp_path), gradproof("run", "--out", "run", name, cwd=tmp_path)
    assert plain.returncode == watched.returncode == code
    assert word in watched.stderr
    if "Traceback" in plain.stderr:
        trace = plain.stderr[plain.stderr.index("Traceback") :].strip()
        assert re.sub(r'File ".*?train.py"', "", trace) in re.sub(r'File ".*?train.py"', "", watched.stderr)
    assert "gradproof/" not in watched.stderr.replace(str(ROOT), "")
    assert len(open_run(tmp_path / "run")) == 5


def test_ctrl_c_passes_through_and_still_yields_the_report(tmp_path):
    name = script(tmp_path / "train.py", TRAIN + "print('ready', flush=True)\nimport time\ntime.sleep(60)")
    command = [sys.executable, "-m", "gradproof", "run", "--out", "run", "--json", "d.json", name]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in errors and "5 steps" in errors
    assert json.loads((tmp_path / "d.json").read_text())["steps"] == 5


def test_killed_runs_can_be_diagnosed(tmp_path):
    name = script(tmp_path / "train.py", TRAIN.replace("STEPS", "10**9"))
    command = [sys.executable, "-m", "gradproof", "run", "--out", "run", name]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL) as process:
        deadline = time.time() + 60
        steps = tmp_path / "run" / "steps.csv"
        while time.time() < deadline and not (steps.exists() and steps.stat().st_size > 5000):
            time.sleep(0.05)
        process.kill()
    run = open_run(tmp_path / "run")
    assert len(run) > 30
    answer = gradproof("diagnose", "run", cwd=tmp_path)
    assert answer.returncode == 0 and f"{len(run)} steps" in answer.stdout


@pytest.mark.parametrize(
    "name, text, sentence",
    [
        ("missing.py", None, "there is no script missing.py"),
        ("train.py", "def (:\n", "train.py is not valid Python"),
        ("train.py", "\0\1", "Python"),
        ("train.py", "print('hello')", "without training: backward was never called"),
        ("train.py", "import nowhere_to_be_found", "raised ModuleNotFoundError without training: mend what"),
        (
            "train.py",
            "raise SystemExit('a file is missing')",
            "ended without training: backward was never called",
        ),
        ("train.py", "raise KeyboardInterrupt", "was interrupted without training"),
        (
            "train.py",
            "import torch\nw = torch.ones(2, requires_grad=True)\n"
            "for _ in range(3):\n    w.square().sum().backward()",
            "nothing that got a gradient has changed since",
        ),
    ],
)
def test_scripts_that_cannot_be_watched_get_one_sentence(name, text, sentence, tmp_path):
    if text is not None:
        (tmp_path / name).write_text(text)
    answer = gradproof("run", "--out", "run", name, cwd=tmp_path)
    assert answer.returncode != 0 and sentence in answer.stderr
    assert "gradproof/" not in answer.stderr.replace(str(ROOT), "")  # no traceback of ours
    ours = [line for line in answer.stderr.splitlines() if line.startswith("gradproof:")]
    assert len(ours) == 1


LONG_STEP = """
import torch
w, calls = torch.ones(2, requires_grad=True), []
optimizer = torch.optim.LBFGS([w], max_iter=1000)
def closure():
    optimizer.zero_grad()
    loss = (w.exp() - 5).square().sum()
    loss.backward()
    calls.append(loss)
    if len(calls) == LAST:
        raise KeyboardInterrupt
    return loss
optimizer.step(closure)
"""


@pytest.mark.parametrize(
    "last, said", [(4, "within its first step of LBFGS still, after 4 backward"), (0, "")]
)
def test_a_step_that_has_not_ended_is_said_to_go_on(last, said, tmp_path):
    """The whole training may be one step of L-BFGS."""
    (tmp_path / "train.py").write_text(LONG_STEP.replace("LAST", str(last)))
    answer = gradproof("run", "--out", "run", "train.py", cwd=tmp_path)
    ours = [line for line in answer.stderr.splitlines() if line.startswith("gradproof:")]
    assert said in answer.stderr and len(ours) == bool(said) and len(open_run(tmp_path / "run")) == (not said)


def test_no_script_and_bad_options_are_explained(tmp_path):
    assert "which script?" in gradproof("run", cwd=tmp_path).stderr
    name = script(tmp_path / "train.py", TRAIN)
    assert "every 10th step" in gradproof("run", "--schedule", "now and then", name, cwd=tmp_path).stderr
    assert "share of the wall time" in gradproof("run", "--budget", "lots", name, cwd=tmp_path).stderr


@pytest.mark.slow
def test_json_and_exit_codes_for_ci(tmp_path):
    broken = TRAIN.replace("optimizer.zero_grad(); ", "")
    name = script(tmp_path / "train.py", broken, steps=20)
    answer = gradproof("run", "--out", "run", "--json", "d.json", "--quiet", name, cwd=tmp_path)
    assert answer.returncode == 0 and answer.stdout == ""
    data = json.loads((tmp_path / "d.json").read_text())
    first = data["causes"][0]
    assert set(first) >= {"family", "id", "level", "confidence", "where", "step", "evidence", "fix"}
    assert (first["family"], first["level"], first["confidence"]) == ("zero-grad-error", "problem", "proven")
    assert {"symptoms", "excluded"} <= set(data)
    printed = gradproof("diagnose", "run", "--json", cwd=tmp_path)
    assert json.loads(printed.stdout)["causes"] == data["causes"]
    assert gradproof("diagnose", "run", "--fail-on", "problem", cwd=tmp_path).returncode == 1
    script(tmp_path / "well.py", TRAIN, steps=20)
    gradproof("run", "--out", "well", "well.py", cwd=tmp_path)
    assert gradproof("diagnose", "well", "--fail-on", "warning", cwd=tmp_path).returncode == 0


@pytest.mark.slow
def test_diagnose_needs_no_torch(tmp_path):
    name = script(tmp_path / "train.py", TRAIN)
    gradproof("run", "--out", "run", name, cwd=tmp_path)
    code = (
        "import sys; sys.modules['torch'] = None\nfrom gradproof.cli import main\n"
        "raise SystemExit(main(['diagnose', 'run']))"
    )
    answer = python("-c", code, cwd=tmp_path)
    assert answer.returncode == 0 and "5 steps" in answer.stdout, answer.stderr


def test_gradproof_can_be_switched_off(tmp_path):
    name = script(tmp_path / "train.py", TRAIN)
    answer = gradproof("run", "--out", "run", name, cwd=tmp_path, env={**os.environ, "GRADPROOF": "0"})
    assert answer.returncode == 0 and not (tmp_path / "run").exists()


def test_an_unwritable_run_directory_does_not_stop_training(tmp_path):
    (tmp_path / "file").write_text("")
    name = script(tmp_path / "train.py", TRAIN + "print('done')")
    answer = gradproof("run", "--out", "file/run", name, cwd=tmp_path)
    assert answer.returncode == 0 and answer.stdout == "done\n"
    assert answer.stderr.count("training goes on") == 1 and "Traceback" not in answer.stderr


@pytest.mark.slow
def test_every_rank_of_torchrun_is_watched(tmp_path):
    text = TRAIN.replace("torch.manual_seed(0)", "import os; torch.manual_seed(int(os.environ['RANK']))")
    name = script(tmp_path / "train.py", text)
    answer = python(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "gradproof", "run", "--out", "run", name),
        cwd=tmp_path,
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stderr.count("watching took") == 1  # rank 0 reports
    runs = [open_run(tmp_path / path) for path in ("run", "run.rank1")]
    assert [run.info["rank"] for run in runs] == [0, 1] and all(len(run) == 5 for run in runs)
    assert runs[0].steps["loss"].tolist() != runs[1].steps["loss"].tolist()


def test_a_script_has_no_future_imports_but_its_own(tmp_path):
    """Under `from __future__ import annotations` a dataclass would find strings where the script has written types."""
    text = "import dataclasses\n@dataclasses.dataclass\nclass C:\n    lr: float = 0.1\n"
    text += "print([field.type for field in dataclasses.fields(C)])\n" + TRAIN
    plain = script(tmp_path / "plain.py", text)
    future = script(tmp_path / "future.py", "from __future__ import annotations\n" + text)
    for name, shown in ((plain, "[<class 'float'>]\n"), (future, "['float']\n")):
        assert gradproof("run", "--no-experiments", name, cwd=tmp_path).stdout == shown


def test_a_script_that_changes_its_directory(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    name = script(tmp_path / "train.py", "import os; os.chdir('elsewhere')\n" + TRAIN, steps=6)
    answer = gradproof("run", "--no-experiments", "--json", "d.json", name, cwd=tmp_path)
    assert answer.returncode == 0 and "cannot write" not in answer.stderr
    (found,) = (tmp_path / "runs").iterdir()
    assert len(open_run(found)) == 6 and (tmp_path / "d.json").exists()
    assert str(found) in answer.stderr, "where the script has gone, a relative path would lead nowhere"
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_script_that_stays_is_told_the_short_path(tmp_path):
    name = script(tmp_path / "train.py", TRAIN)
    answer = gradproof("run", "--no-experiments", "--out", "runs/a", name, cwd=tmp_path)
    assert "runs/a" in answer.stderr and str(tmp_path) not in answer.stderr


@pytest.mark.parametrize("end", ["sys.stderr = None", "sys.stderr.close()"])
def test_a_script_that_has_no_stderr(end, tmp_path):
    """Its exit code and its stdout stay its own; the report goes where stderr went."""
    name = script(tmp_path / "train.py", f"import sys; {end}\n{TRAIN}print(loss.item())")
    answer = gradproof("run", "--no-experiments", "--out", "run", name, cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert len(answer.stdout.splitlines()) == 1 and "gradproof" not in answer.stdout
    assert "5 steps" in answer.stderr


ANOMALY = """
import torch
torch.manual_seed(0)
torch.autograd.set_detect_anomaly(True)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(9):
    x = torch.randn(8, 4)
    out = model(x)
    loss = out.square().mean()
    if step == 6:
        loss = loss + (out - out).sum().sqrt()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_an_exception_that_ends_a_script_is_the_headline(tmp_path):
    """The step that raised was never finished: its record alone would look healthy."""
    name = script(tmp_path / "train.py", TRAIN + "raise ValueError('no more data')")
    answer = gradproof("run", "--no-experiments", "--json", "d.json", name, cwd=tmp_path)
    assert answer.returncode == 1
    said = "The script was ended after 5 steps by ValueError at train.py:10: no more data."
    assert said in " ".join(answer.stderr.split())
    assert json.loads((tmp_path / "d.json").read_text())["raised"].startswith("ValueError at train.py:10")


def test_what_anomaly_detection_said_is_evidence(tmp_path):
    name = script(tmp_path / "train.py", ANOMALY)
    answer = gradproof("run", "--no-experiments", "--json", "d.json", name, cwd=tmp_path)
    assert answer.returncode == 1
    first = json.loads((tmp_path / "d.json").read_text())["causes"][0]
    assert first["id"].startswith("backward-nonfinite") and first["step"] == 6
    assert "returned nan values" in first["evidence"][0] and first["where"] == "train.py:14"
