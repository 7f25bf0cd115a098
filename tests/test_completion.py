"""Shells complete what the parser knows, and every command can be told to be quiet."""

import argparse
import subprocess

import pytest

from gradproof.cli import build_parser, main
from gradproof.commands.completing import read_commands


def completed(capsys, *words):
    """What bash offers behind these words, the last of which is being typed."""
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    typed = " ".join(f"'{word}'" for word in ("gradproof", *words))
    ask = f"COMP_WORDS=({typed}); COMP_CWORD={len(words)}; _gradproof; echo ${{COMPREPLY[*]}}"
    return subprocess.check_output(["bash", "-ec", f"{script}\n{ask}"], text=True).split()


def test_bash_completes_commands_and_their_options(capsys):
    assert completed(capsys, "exa") == ["examine"]
    assert {"run", "diagnose", "fix", "completion"} <= set(completed(capsys, ""))
    assert completed(capsys, "run", "--bud") == ["--budget"]
    assert "--step" in completed(capsys, "examine", "runs/a", "--s")
    assert "--beside" not in completed(capsys, "examine", "--")  # what is for gradproof itself
    assert completed(capsys, "run", "tra") == []  # a file: bash's own


def test_zsh_and_fish_have_every_command_and_option(capsys):
    words = dict(read_commands(build_parser()))
    assert main(["completion", "zsh"]) == 0
    assert capsys.readouterr().out.startswith("autoload")
    assert main(["completion", "fish"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(words) + sum(len(options) for _, options in words.values())
    assert all(line.count("'") - line.count("\\'") in (2, 4) for line in lines)


def test_every_command_takes_quiet():
    parser = build_parser()
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    for name, command in commands.choices.items():
        assert "--quiet" in command.format_help(), name


@pytest.mark.slow
def test_a_quiet_training_says_only_its_end(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 200)
    small = [
        "--context",
        "8",
        "--width",
        "8",
        "--heads",
        "1",
        "--layers",
        "1",
        "--batch",
        "2",
        "--steps",
        "3",
    ]
    words = ["train", "--data", "text.txt", "--device", "cpu", *small]
    assert main([*words, "--out", "loud"]) == 0
    assert "step " in capsys.readouterr().out.partition("gradproof ·")[0]
    assert main([*words, "--out", "still", "--quiet"]) == 0
    assert capsys.readouterr().out.strip().startswith("gradproof ·")
