"""The cases of the documentation: each script is diagnosed as its page says, and mended it is silent."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import gradproof

CASES = Path(__file__).parent.parent / "examples" / "cases"


def line_of(script, piece):
    text = (CASES / script).read_text().splitlines()
    return next(number for number, line in enumerate(text, 1) if piece in line)


def diagnose(script, tmp_path, *args):
    command = [sys.executable, "-m", "gradproof", "run", "--quiet", "--examine", "all", "--json", "said.json"]
    subprocess.run(
        [*command, "--out", "run", str(CASES / script), *args], cwd=tmp_path, check=True, capture_output=True
    )
    return json.loads((tmp_path / "said.json").read_text())


def losses_of(script, *args):
    said = subprocess.run(
        [sys.executable, str(CASES / script), *args], check=True, capture_output=True, text=True
    ).stdout
    return [float(line.split("loss ")[1].split()[0]) for line in said.splitlines()]


FOUND = {
    "hand_written_gpt.py": {
        "aliasing-or-inplace/saved-activation": "along = (inner * normed)",
        "axis-or-shape-error/coupled-samples": "scores = q @ k.transpose",
        "attention-mask-error/sees-the-future": "scores = q @ k.transpose",
    },
    "frozen_decoder.py": {"exploding-signal/time": "return self.out(self.rnn(codes)[0])"},
}


@pytest.mark.slow
@pytest.mark.parametrize("script", FOUND)
def test_a_case_is_told_as_its_page_tells_it(script, tmp_path):
    causes = [cause for cause in diagnose(script, tmp_path)["causes"] if cause["level"] == "problem"]
    assert {cause["id"] for cause in causes} == FOUND[script].keys()
    for cause in causes:
        line = line_of(script, FOUND[script][cause["id"]])
        assert cause["confidence"] == "proven"
        assert f"{script}:{line}" in cause["where"]


@pytest.mark.slow
@pytest.mark.parametrize("script", FOUND)
def test_mended_it_is_silent(script, tmp_path):
    found = diagnose(script, tmp_path, "--fixed")["causes"]
    assert not [cause for cause in found if cause["level"] in ("problem", "warning")]


@pytest.mark.slow
def test_compensated_summation_changes_nothing():
    """The rewritten loss kernel, of which much was hoped."""
    naive, compensated = (losses_of("hand_written_gpt.py", *more)[-1] for more in (["--naive-sum"], []))
    assert abs(naive - compensated) < 0.02 and compensated > 1


@pytest.mark.parametrize("fixed", [False, True])
def test_layers_whose_backward_is_never_called(fixed, monkeypatch):
    monkeypatch.syspath_prepend(CASES)
    monkeypatch.setattr(sys, "argv", ["x", *(["--fixed"] if fixed else [])])
    monkeypatch.delitem(sys.modules, "layers_without_backward", raising=False)
    import layers_without_backward as model

    found = gradproof.check_training(
        lambda P, batch: model.forward(P, batch)[0], model.gradients, model.P, model.draw_batch()
    )
    assert found.right == fixed
    if not fixed:
        never = [name for name in model.P if "never called" in found[name].pattern]
        assert sorted(never) == ["0.w1", "0.w2", "1.w1", "1.w2"] and found.first == "1.w2"
        assert found["head"].verdict == "right" and "missing derivative" in found["embedding"].pattern


@pytest.mark.slow
def test_before_and_after():
    assert losses_of("layers_without_backward.py")[-1] > 1.8
    assert losses_of("layers_without_backward.py", "--fixed")[-1] < 0.8


def test_every_case_has_a_page():
    pages = {page.stem.replace("-", "_") for page in (CASES.parents[1] / "docs" / "cases").glob("*.md")} - {
        "index"
    }
    assert pages == {os.path.splitext(script.name)[0] for script in CASES.glob("*.py")}
