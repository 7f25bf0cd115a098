"""`gradproof explain` and `gradproof doctor` say what is true, and what to do next."""

import re
import sys
from pathlib import Path

import pytest

from gradproof.cli import main
from gradproof.commands import helping
from gradproof.diagnosis.causes import CAUSES


def test_every_cause_is_listed_and_explained(capsys):
    assert main(["explain"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == [cause.family for cause in CAUSES]
    for cause in CAUSES:
        assert main(["explain", cause.family]) == 0
        said = capsys.readouterr().out
        assert said.startswith(cause.family) and "What decides it" in said
        assert "```" not in said and "](" not in said and "\n#" not in said.replace("\n    #", "")


def test_the_advice_for_an_id_comes_first(capsys):
    assert main(["explain", "lr-schedule-error/ends-at-zero"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("lr-schedule-error/ends-at-zero: let the schedule last")


def test_a_cause_that_is_misspelt_is_guessed(capsys):
    assert main(["explain", "lr-to-high"]) == 2
    said = capsys.readouterr().err
    assert "lr-too-high" in said and "gradproof explain" in said


def test_pages_are_found_where_they_are_installed(tmp_path, monkeypatch):
    (tmp_path / "bad-init.md").write_text("# installed")
    monkeypatch.setattr(helping, "PAGES", (tmp_path, *helping.PAGES))
    assert helping.page_of("bad-init") == "# installed" and "overshoot" in helping.page_of("lr-too-high")
    monkeypatch.setattr(helping, "PAGES", (tmp_path / "gone",))
    with pytest.raises(helping.UserError, match="install gradproof again"):
        helping.page_of("bad-init")


def test_the_doctor_finds_this_installation_sound(capsys):
    import torch

    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert torch.__version__ in said and "everything that is needed is here" in said
    assert not re.search(r"^  !!", said, re.M)


def test_the_doctor_says_what_is_missing(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(helping, "EXTRAS", {"no_such_library": "what nobody needs"})
    monkeypatch.setattr(helping.os, "access", lambda path, mode: False)
    monkeypatch.chdir(tmp_path)
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert re.search(r"!!  torch +cannot be imported .*pip install torch", said)
    assert re.search(r"–   no_such_library *not installed; for what nobody needs", said)
    assert re.search(rf"!!  runs +{Path.cwd()} cannot be written: .*--out DIR", said)


@pytest.mark.parametrize(
    "words, next_thing",
    [
        (["run", "no.py"], "as `python` would be told"),
        (["run", "wrong.py"], "repair that line first"),
        (["run", "-m", "nothing_like_it"], "start it where `python -m nothing_like_it` runs"),
        (["run", "--fix", "lr=fast", "train.py"], "for example lr=0.1"),
        (["diagnose", "no_run"], "`gradproof run train.py` makes one"),
        (["try", "no_run", "--patch", "a.diff"], "`gradproof run train.py` makes one"),
        (["fix", "no_run", "--steps", "0"], "--steps 100"),
        (["check-run", "no.py"], "as `python` would be told"),
        (["check", "no.py:f"], "write FILE.py:NAME"),
        (["check-dump", "no.safetensors", "--against", "gpt2"], "dump_step"),
        (["examine", "no_run", "--within", "soon"], "30s or 5m"),
        (["train", "--data", "no.txt"], "give a text file"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else "",
)
def test_an_error_names_the_next_thing_to_do(words, next_thing, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wrong.py").write_text("def\n")
    (tmp_path / "train.py").write_text("pass\n")
    if "no.py" in words[1:]:
        (tmp_path / "wrong.py").unlink()
        (tmp_path / "train.py").unlink()
    assert main(words) == 2
    assert next_thing in capsys.readouterr().err
