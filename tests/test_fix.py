"""`gradproof fix`: the fix of a planted fault is the line that was changed; where it is not certain, there is none."""

import ast
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
from page_runs import RunMaker

from gradproof.ask import trial
from gradproof.cli import main
from gradproof.diagnosis.edits import EDITS, Script, compiles, edit_of
from gradproof.diagnosis.findings import Finding
from gradproof.faults.catalogue import FAULTS, plant
from gradproof.record.run import open_run

LOOP = """import torch

for step in range(9):
    loss = model(x).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def sites(text, **words):
    """Where the run saw what: every line that holds the word."""
    return {
        what: [f"train.py:{n}" for n, line in enumerate(text.splitlines(), 1) if word in line]
        for what, word in words.items()
    }


CALLS = {"backward": ".backward(", "step": "optimizer.step(", "clip": "clip_grad", "zero_grad": ".zero_grad("}


def edited(text, id, where=None, confidence="proven", **calls):
    run = SimpleNamespace(info={"facts": {"lines": sites(text, **{**CALLS, **calls})}})
    finding = Finding(id.partition("/")[0], id, "problem", confidence, (), "", where)
    new = EDITS[id](Script("train.py", text, ast.parse(text), run), finding)
    assert new is None or compiles(new)
    return new


@pytest.mark.parametrize("id", ["zero-grad-error/never-cleared", "zero-grad-error/stale"])
def test_a_missing_zero_grad_is_put_before_backward(id):
    broken = LOOP.replace("    optimizer.zero_grad()\n", "")
    assert edited(broken, id) == LOOP
    assert edited(LOOP, id) is None  # it is there: the finding must mean something else


def test_a_zero_grad_between_backward_and_step_is_moved():
    broken = LOOP.replace(
        "    optimizer.zero_grad()\n    loss.backward()\n", "    loss.backward()\n    optimizer.zero_grad()\n"
    )
    assert edited(broken, "zero-grad-error/before-step") == LOOP


SCALED = LOOP.replace("optimizer.step()", "scaler.step(optimizer)").replace(
    "loss.backward", "scaler.scale(loss).backward"
)


def test_with_a_scaler_its_optimizer_is_cleared():
    broken = SCALED.replace("    optimizer.zero_grad()\n", "")
    assert edited(broken, "zero-grad-error/never-cleared", step="scaler.step(") == SCALED


@pytest.mark.parametrize(
    "old, new",
    [
        ("    loss.backward()\n", "    loss.backward()\n    loss.backward()\n"),
        ("    optimizer.step()", "    if step % 4:\n        optimizer.step()"),
        ("optimizer.step()", "optimizer.step(closure)"),
        ("optimizer.step()", "optimizer.step(); n = 1"),
        ("optimizer.step()", "optimizers[0].step()"),
        ("    loss = ", "    if step % 4 == 0:\n        optimizer.zero_grad()\n    loss = "),
    ],
    ids=["two backwards", "a condition", "a closure", "two on a line", "no plain name", "cleared at times"],
)
def test_what_is_not_plain_is_left_to_its_author(old, new):
    plain = LOOP.replace("    optimizer.zero_grad()\n", "")
    assert edited(plain, "zero-grad-error/never-cleared", step=".step(") is not None
    assert edited(plain.replace(old, new), "zero-grad-error/never-cleared", step=".step(") is None


CLIPPED = LOOP.replace(
    "    optimizer.step()", "    torch.nn.utils.clip_grad_norm_(p, 1.0)  # the limit\n    optimizer.step()"
)


def test_a_clip_behind_the_step_is_moved_before_it():
    clip, step = CLIPPED.splitlines(keepends=True)[-2:]
    broken = CLIPPED.replace(clip + step, step + clip)
    assert edited(broken, "grad-clip-misuse/after-step") == CLIPPED
    apart = CLIPPED.replace(clip + step, step + "    log()\n" + clip)
    assert edited(apart, "grad-clip-misuse/after-step") is None


def test_unscaling_comes_before_the_clip():
    right = SCALED.replace(
        "    scaler.step", "    scaler.unscale_(optimizer)\n    clip_grad_norm_(p, 1.0)\n    scaler.step"
    )
    broken = right.replace("    scaler.unscale_(optimizer)\n", "")
    assert edited(broken, "grad-clip-misuse/before-unscale", step="scaler.step(") == right
    assert edited(right, "grad-clip-misuse/before-unscale", step="scaler.step(") is None


@pytest.mark.parametrize(
    "old, new",
    [
        ("F.softmax(self.out(x), dim=1)", "self.out(x)"),
        ("torch.softmax(a + b, -1) * 2", "(a + b) * 2"),
        ("(ä := self.out(x)).softmax(1)", "(ä := self.out(x))"),
        ("F.softmax(x, dim=1) + F.softmax(y, dim=1)", None),
        ("softmax(x)", None),
        ("F.softmax(*x)", None),
    ],
)
def test_the_second_softmax_goes(old, new):
    text = f"# ü\nx = 'ß'; y = {old}\n"
    found = edited(text, "loss-activation-mismatch/softmax-twice", where="head (train.py:2)")
    assert found == (None if new is None else f"# ü\nx = 'ß'; y = {new}\n")
    for place in ("other.py:2", "train.py:1", "my_train.py:2", None):
        assert edited(text, "loss-activation-mismatch/softmax-twice", where=place) is None
    assert edited(text, "loss-activation-mismatch/softmax-twice", "train.py:2", confidence="likely") is None


MODEL = """class Net(nn.Module):
    def forward(self, x):
        return F.dropout(self.a(x), 0.2{more})
"""


def test_dropout_follows_the_model_s_mode():
    id = "train-eval-mode-error/functional-dropout"
    assert edited(MODEL.format(more=""), id) == MODEL.format(more=", training=self.training")
    assert edited(MODEL.format(more=", training=True"), id) is None
    assert edited("y = F.dropout(x)\n", id) is None  # there is no model whose mode it could follow
    assert edited(MODEL.format(more="") + "\ny = F.dropout(x)\n", id) is None


# of a run ------------------------------------------------------------------------------------------------------


def run_of(path, script, **facts):
    """A run as its finding leaves it: stale gradients at every step, and the lines where it was seen."""
    maker = RunMaker(
        path, command=["train.py"], directory=str(path.parent), source={"file": "train.py"}, **facts
    )
    (path.parent / "train.py").write_text(script)
    maker.writer.append("script.py.txt", script.encode())
    maker.writer.set_info(facts={"lines": sites(script, **CALLS)})
    for step in range(12):
        maker.step(step, order="gbs" if step else "bs", loss=1.0)
    return maker.end()


BROKEN = LOOP.replace("    optimizer.zero_grad()\n", "")


def test_it_is_shown_and_nothing_is_changed(tmp_path, capsys):
    run = run_of(tmp_path / "run", BROKEN)
    assert main(["fix", str(run), "--diff"]) == 0
    said = capsys.readouterr().out
    assert "+    optimizer.zero_grad()\n" in said and "--- a/train.py" in said
    assert (tmp_path / "train.py").read_text() == BROKEN and not (run / "fix.diff").exists()


def test_without_a_certain_fix_there_is_advice_in_words(tmp_path, capsys):
    run = run_of(tmp_path / "run", BROKEN.replace("loss.backward()", "loss.backward(); n = 1"))
    assert main(["fix", str(run)]) == 1
    said = capsys.readouterr().out
    assert "No finding has a fix that could be written in one way only" in said
    assert "zero-grad-error/never-cleared: call optimizer.zero_grad()" in said and "@@" not in said


def test_a_script_that_was_not_kept_or_cannot_be_put_back_has_no_fix(tmp_path):
    for name, text in (
        ("crlf", BROKEN.replace("\n", "\r\n")),
        ("no Python", BROKEN + "this is no Python\n"),
        ("deep", BROKEN + "-" * 100_000 + "1\n"),
    ):
        run = open_run(run_of(tmp_path / name, text))
        finding = Finding("zero-grad-error", "zero-grad-error/never-cleared", "problem", "proven", (), "")
        assert edit_of(finding, run) is None
    (run.path / "script.py.txt").unlink()
    assert edit_of(finding, run) is None


def test_the_page_has_the_source_and_the_fix(tmp_path):
    from page_runs import Tab, open_browser

    run = run_of(tmp_path / "run", BROKEN)
    assert main(["report", str(run), "-o", str(tmp_path / "page.html")]) == 0
    with open_browser() as browser:
        tab = Tab(browser, (tmp_path / "page.html").as_uri())
        assert tab.text("#verdict .source .marked").strip() == "loss.backward()"
        assert tab.ask("document.querySelector('#verdict .source .marked').value") == 5
        assert tab.text("#verdict .source .added").strip() == "+    optimizer.zero_grad()"
        assert f"gradproof fix {run}" in tab.text("#verdict .source")
        tab.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        tab.page.click("#verdict .source .copy")
        tab.page.wait_for_selector("text=copied")
        assert tab.ask("navigator.clipboard.readText()") == f"{tmp_path / 'train.py'}:5"
        tab.ask("void (navigator.clipboard.writeText = () => Promise.reject(new Error('no')))")
        tab.ask("void (document.querySelector('#verdict .copy').textContent = 'again')")
        tab.page.click("#verdict .source .copy")  # where that is refused, in the old way
        tab.page.wait_for_selector("text=copied")
        assert tab.ask("navigator.clipboard.readText()") == f"{tmp_path / 'train.py'}:5"
        assert not tab.errors


SMALL = """import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(30):
    x = torch.randn(16, 4)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_a_fix_is_tried_on_copies_and_written_in_place_when_it_helps(tmp_path, capsys, monkeypatch):
    script = tmp_path / "train.py"
    script.write_text(SMALL)
    command = [
        sys.executable,
        "-m",
        "gradproof",
        "run",
        "--quiet",
        "--examine",
        "off",
        "--out",
        "runs/a",
        "train.py",
    ]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trial, "EXAMINE", "off")  # the calls of every step are proof enough
    assert main(["fix", "runs/a", "--steps", "12", "--in-place"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^fixed: .*zero-grad-error/.* is gone", said, re.M), said
    assert script.read_text() == SMALL.replace("    loss.b", "    optimizer.zero_grad()\n    loss.b")
    assert main(["fix", "runs/a", "--diff"]) == 0  # of the script as it ran
    script.write_text(SMALL + "# worked on\n")
    from gradproof.commands.fixing import change
    from gradproof.diagnosis.edits import find_edit
    from gradproof.diagnosis.ranking import diagnose
    from gradproof.errors import UserError

    run = open_run("runs/a")
    with pytest.raises(UserError, match="has changed since"):
        change(script, find_edit(diagnose(run), run), run)


@pytest.mark.parametrize(
    "name, id, calls, place",
    [
        ("spirals_mlp-never-cleared", "zero-grad-error/stale", {}, None),
        ("house_prices-cleared-before-step", "zero-grad-error/before-step", {}, None),
        ("recall_rnn-after-step", "grad-clip-misuse/after-step", {"step": "opt.step("}, None),
        ("mixer_amp-before-unscale", "grad-clip-misuse/before-unscale", {"step": "scaler.step("}, None),
        (
            "spirals_mlp-softmax-before-cross-entropy",
            "loss-activation-mismatch/softmax-twice",
            {},
            "F.softmax(",
        ),
        ("spirals_mlp-dropout-always-on", "train-eval-mode-error/functional-dropout", {}, None),
    ],
)
def test_every_kind_of_edit_mends_a_fault_of_the_catalogue(name, id, calls, place):
    """The script without its fault, or one that does the same."""
    fault = next(fault for fault in FAULTS if fault.name == name)
    broken = plant(fault)
    where = sites(broken, at=place)["at"][0] if place else None
    mended = edited(broken, id, where, **calls)
    assert mended is not None
    if name != "spirals_mlp-dropout-always-on":  # there nn.Dropout stood, which says the same otherwise
        for old, _ in fault.edits:
            statements = [line.strip() for line in old.splitlines()]
            assert all(line in mended for line in statements)
    else:
        assert mended.count("training=self.training)") == 2


# places in the terminal ----------------------------------------------------------------------------------------


def test_places_are_links_where_a_terminal_can_follow_them(tmp_path):
    from gradproof.diagnosis.ranking import diagnose
    from gradproof.report.text import render_text

    run = run_of(tmp_path / "a run", BROKEN)
    found = diagnose(run)
    text, linked = render_text(found), render_text(found, color=True)
    links = re.findall(r"\x1b\]8;;(file://[^\x1b]*)\x1b\\(.*?)\x1b\]8;;\x1b\\", linked)
    assert links and {shown for _, shown in links} == {"train.py:5"}
    assert all(re.fullmatch(r"file://[\w.%-]+(/[\w.%/-]+)/train\.py#5", address) for address, _ in links)
    assert re.sub(r"\x1b\]8;;.*?\x1b\\|\x1b\[[\d;]*m", "", linked) == text
    (tmp_path / "train.py").unlink()  # another machine: there is nothing to open
    assert "\x1b]8" not in render_text(found, color=True) and "\x1b" not in text


def test_links_are_for_terminals_alone(tmp_path):
    run = run_of(tmp_path / "run", BROKEN)
    environment = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
    command = [sys.executable, "-m", "gradproof", "diagnose", str(run)]
    assert "\x1b]8;;file://" in at_terminal(command, {**environment, "TERM": "xterm-256color"})
    for quiet in ({"TERM": "dumb"}, {"TERM": "xterm-256color", "NO_COLOR": "1"}):
        assert "\x1b" not in at_terminal(command, {**environment, **quiet})
    piped = subprocess.run(
        command, env={**environment, "TERM": "xterm-256color"}, capture_output=True, text=True
    )
    assert "train.py:5" in piped.stdout and "\x1b" not in piped.stdout


def at_terminal(command, environment):
    """What a command writes where its output is a terminal."""
    ours, theirs = os.openpty()
    with subprocess.Popen(command, stdout=theirs, stderr=subprocess.DEVNULL, env=environment) as process:
        os.close(theirs)
        said = b""
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # so Linux says that the other end is closed
                break
            if not part:
                break
            said += part
    os.close(ours)
    assert process.returncode == 0
    return said.decode()
