"""`gradproof try` and `gradproof check-run`: what a patch is called, and that only the copies are touched."""

import difflib
import json
import math

import pytest
from page_runs import RunMaker
from test_handover import valid

from gradproof.ask.patching import apply_patch, parse_patch
from gradproof.ask.trial import compare, copy_directory, find_program, judge, put_script_back
from gradproof.cli import main
from gradproof.diagnosis.findings import Diagnosis, Finding
from gradproof.errors import UserError
from gradproof.record.run import open_run
from gradproof.report.sarif import as_sarif

HEALTHY = """import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(200):
    x = torch.randn(16, 4)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
SICK = HEALTHY.replace("keepdim=True", "")


def diff(old, new, name="train.py"):
    lines = difflib.unified_diff(old.splitlines(True), new.splitlines(True), f"a/{name}", f"b/{name}")
    return "".join(lines)


# -- patches -----------------------------------------------------------------------------------------------------


def applied(tmp_path, patch, **files):
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text)
    apply_patch(parse_patch(patch), tmp_path)
    return {file.name: file.read_text() for file in tmp_path.iterdir()}


def test_a_patch_is_applied_as_patch_would(tmp_path):
    assert applied(tmp_path, diff(SICK, HEALTHY), train=SICK) == {"train.py": HEALTHY}
    moved = "# one\n# two\n" + SICK  # the lines have moved down since
    assert applied(tmp_path, diff(SICK, HEALTHY), train=moved)["train.py"] == "# one\n# two\n" + HEALTHY
    new = "--- /dev/null\n+++ b/more.py\n@@ -0,0 +1,2 @@\n+a = 1\n+b = 2\n"
    assert applied(tmp_path, new, train=SICK)["more.py"] == "a = 1\nb = 2\n"
    gone = "--- a/more.py\n+++ /dev/null\n@@ -1,2 +0,0 @@\n-a = 1\n-b = 2\n"
    assert "more.py" not in applied(tmp_path, gone, train=SICK)


def test_every_change_of_many_is_found(tmp_path):
    old = "".join(f"line {i}\n" for i in range(60))
    new = old.replace("line 7\n", "").replace("line 30\n", "line 30\nmore\n").replace("line 59", "end")
    assert applied(tmp_path, diff(old, new), train=old)["train.py"] == new


@pytest.mark.parametrize(
    "patch, why",
    [
        ("nothing of the kind", "no change that could be read"),
        (diff(SICK, HEALTHY, "other.py"), "not there"),
        (diff(SICK, HEALTHY).replace("+++ b/train.py", "+++ ../train.py"), "outside"),
        (
            diff(SICK, HEALTHY).replace("a/train.py", "/etc/passwd").replace("b/train.py", "/etc/passwd"),
            "outside",
        ),
        (diff(SICK.replace("lr=0.1", "lr=0.2"), HEALTHY), "does not fit"),
        (diff(SICK, HEALTHY).rsplit("\n", 4)[0], "cut off"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(tmp_path, patch, why):
    (tmp_path / "train.py").write_text(SICK)
    with pytest.raises(UserError, match=why):
        apply_patch(parse_patch(patch), tmp_path)
    assert (tmp_path / "train.py").read_text() == SICK and not (tmp_path.parent / "train.py").exists()


def test_no_link_is_written_through(tmp_path):
    mine, theirs = tmp_path / "copy", tmp_path / "theirs.py"
    mine.mkdir()
    theirs.write_text(SICK)
    (mine / "train.py").symlink_to(theirs)
    with pytest.raises(UserError, match="a link"):
        apply_patch(parse_patch(diff(SICK, HEALTHY)), mine)
    assert theirs.read_text() == SICK


# -- verdicts ----------------------------------------------------------------------------------------------------


def made(path, losses, *causes):
    run = RunMaker(path)
    for step, loss in enumerate(losses):
        run.step(step, loss=loss, measured=False)
    for family in causes:
        facts = {"verdict": "confirmed", "id": f"{family}/what", "confidence": "proven", "step": 0}
        run.writer.write_event("verdict", family=family, experiment="planted", **facts)
    if not causes:
        facts = {"verdict": "excluded", "reason": "it agrees", "step": 0, "experiment": "planted"}
        run.writer.write_event("verdict", family="wrong-gradient", **facts)
    return open_run(run.end())


def falling(to, noise=0.0, length=60):
    wave = [noise * math.sin(37.0 * step) for step in range(length)]
    return [to + (2 - to) * 0.9**step + wave[step] for step in range(length)]


NAN = [1.0] * 10 + [math.nan] * 50
WRONG = ("wrong-gradient",)


@pytest.mark.parametrize(
    "before, after, word",
    [
        ((falling(0.5), *WRONG), (falling(0.4),), "fixed"),
        ((falling(0.5), *WRONG), (falling(0.5),), "fixed"),
        ((falling(0.5), *WRONG), (falling(0.5), *WRONG), "no difference"),
        ((falling(0.5), *WRONG), (falling(0.3), *WRONG), "better"),
        ((falling(0.5), *WRONG), (falling(0.9), *WRONG), "worse"),
        ((falling(0.5),), (falling(0.5),), "no difference"),
        ((falling(0.5, 0.05),), (falling(0.505, 0.06),), "no difference"),
        ((falling(0.5),), (NAN,), "worse"),
        ((NAN, *WRONG), (falling(0.5),), "fixed"),
        ((NAN, *WRONG), (falling(0.5), *WRONG), "better"),  # the finding is still there: not fixed
        ((NAN, *WRONG), (falling(2.0, 0.1), *WRONG), "no difference"),  # no NaN yet, and nothing is learned
        ((falling(0.5), *WRONG), (falling(0.5), "dead-activation"), "worse"),  # one cause for another
    ],
)
def test_one_word_for_what_a_patch_did(tmp_path, before, after, word):
    runs = made(tmp_path / "before", *before), made(tmp_path / "after", *after)
    found = judge(*runs, None, ["train.py"], [])
    assert found.verdict == word, found
    assert len(found.losses["step"]) == 10 and word in str(found)
    valid(json.loads(json.dumps(found.as_data()).replace("NaN", '"nan"')), "trial")


def test_a_finding_that_nobody_asked_about_is_not_gone(tmp_path):
    runs = made(tmp_path / "before", falling(0.5), *WRONG), made(tmp_path / "after", falling(0.5), "bad-init")
    found = judge(*runs, None, ["train.py"], [])
    assert found.verdict != "fixed" and any("was not asked" in note for note in found.not_looked_at)


def test_noise_is_no_difference():
    assert (
        compare(*map(pytest.importorskip("numpy").array, (falling(0.5, 0.2), falling(0.52, 0.2))))
        == "no difference"
    )


# -- copies ------------------------------------------------------------------------------------------------------


def test_a_copy_leaves_out_runs_and_environments(tmp_path):
    for name in ("train.py", "data/x.bin", ".git/HEAD", "runs/a/run.json", "env/pyvenv.cfg", "env/lib.py"):
        file = tmp_path / "project" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x")
    copy_directory(tmp_path / "project", tmp_path / "copy", links=False)
    copied = {str(f.relative_to(tmp_path / "copy")) for f in (tmp_path / "copy").rglob("*") if f.is_file()}
    assert copied == {"train.py", "data/x.bin"}


def test_what_is_too_much_is_not_copied(tmp_path, monkeypatch):
    from gradproof.ask import trial

    monkeypatch.setattr(trial, "MOST_COPIED", 100)
    monkeypatch.setattr(trial, "SHARED", 50)
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "big.bin").write_text("x" * 200)
    with pytest.raises(UserError, match="--links"):
        copy_directory(tmp_path / "project", tmp_path / "copy", links=False)
    copy_directory(tmp_path / "project", tmp_path / "linked", links=True)
    assert (tmp_path / "linked" / "big.bin").is_symlink()


def test_the_script_is_the_one_that_ran(tmp_path):
    run = RunMaker(tmp_path / "run", command=["train.py", "--lr", "1"], directory=str(tmp_path))
    run.writer.append("script.py.txt", SICK.encode())
    opened = open_run(run.end())
    script = tmp_path / "train.py"
    with pytest.raises(UserError, match="not there any more"):
        find_program(opened)
    script.write_text(HEALTHY)  # worked on since
    directory, name, arguments = find_program(opened)
    assert (directory, str(name), arguments) == (tmp_path, "train.py", ["--lr", "1"])
    assert "changed since" in put_script_back(opened, script)[0] and script.read_text() == SICK
    assert put_script_back(opened, script) == []


def test_a_seed_gives_a_script_the_same_random_numbers():
    import random

    import numpy as np
    import torch

    from gradproof.commands.watching import sow

    def drawn():
        sow(3)
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    assert drawn() == drawn()
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


# -- SARIF -------------------------------------------------------------------------------------------------------


def test_findings_stand_at_their_lines():
    causes = (
        Finding("a", "a/b", "problem", "proven", ("seen at model.py:7",), "fix it", title="A"),
        Finding("c", "c/d", "warning", "likely", ("no line",), "fix it", where="head (train.py:12)"),
        Finding("e", "e/f", "note", "possible", ("\x1b[31m",), "fix it"),
    )
    data = as_sarif(Diagnosis("run", 3, causes), "src/train.py")
    results = data["runs"][0]["results"]
    places = [r["locations"][0]["physicalLocation"] for r in results]
    assert [(p["artifactLocation"]["uri"], p["region"]["startLine"]) for p in places] == [
        ("src/model.py", 7),
        ("src/train.py", 12),
        ("src/train.py", 1),
    ]
    assert [r["level"] for r in results] == ["error", "warning", "note"] and "\x1b" not in json.dumps(data)
    assert {r["ruleId"] for r in results} == {
        rule["id"] for rule in data["runs"][0]["tool"]["driver"]["rules"]
    }
    assert as_sarif(Diagnosis("run", 3), "train.py")["runs"][0]["results"] == []


# -- the commands, with real trainings ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.helper
def test_a_true_fix_and_an_unrelated_patch(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SICK)
    assert main(["check-run", "train.py", "--until", "20", "--out", "sick", "--sarif", "found.sarif"]) == 1
    results = json.loads((tmp_path / "found.sarif").read_text())["runs"][0]["results"]
    assert results[0]["ruleId"].startswith("axis-or-shape-error")
    assert results[0]["locations"][0]["physicalLocation"]["region"]["startLine"] == 9
    (tmp_path / "fix.diff").write_text(diff(SICK, HEALTHY))
    capsys.readouterr()
    assert main(["try", "sick", "--patch", "fix.diff", "--steps", "20", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "fixed" and found["finding"].startswith("axis-or-shape-error")
    valid(found, "trial")
    (tmp_path / "other.diff").write_text(diff(SICK, "# a remark\n" + SICK))
    assert main(["try", "sick", "--patch", "other.diff", "--steps", "20"]) == 1
    assert capsys.readouterr().out.startswith("no difference")
    assert (tmp_path / "train.py").read_text() == SICK  # the original is as it was


@pytest.mark.slow
def test_the_exit_codes_of_check_run(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "well.py").write_text(HEALTHY)
    assert main(["check-run", "well.py", "--until", "12", "--json", "found.json"]) == 0
    valid(json.loads((tmp_path / "found.json").read_text()), "diagnosis")
    (tmp_path / "broken.py").write_text(HEALTHY + "raise RuntimeError('at the end')\n".replace("\n", "\n"))
    assert main(["check-run", "broken.py", "--until", "900"]) == 2
    assert "did not train to the end" in capfd.readouterr().err
    (tmp_path / "nothing.py").write_text("print(1)\n")
    assert main(["check-run", "nothing.py"]) == 2
    assert main(["check-run", "missing.py"]) == 2
