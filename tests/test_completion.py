"""Shells complete what the parser knows, and every command can be told to be quiet."""

import argparse
import os
import pty
import shutil
import subprocess
import time

import pytest

from gradproof.cli import build_parser, main
from gradproof.commands.completing import read_commands


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A directory with three runs, a directory that is none, and a script."""
    for name in ("runs/mine", "runs/other", "elsewhere"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "run.json").write_text("{}")
    (tmp_path / "runs" / "mixed").mkdir()
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))  # no settings of whoever runs this
    return tmp_path


def script_for(shell, capsys):
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


def need(shell):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")


def completed_by_bash(capsys, *words):
    """What bash offers behind these words, the last of which is being typed."""
    script = script_for("bash", capsys)
    typed = " ".join(f"'{word}'" for word in ("gradproof", *words))
    ask = f"COMP_WORDS=({typed}); COMP_CWORD={len(words)}; _gradproof; echo ${{COMPREPLY[*]}}"
    return subprocess.check_output(["bash", "-c", f"{script}\n{ask}"], text=True).split()


def test_bash_completes_commands_options_and_runs(capsys, place):
    assert completed_by_bash(capsys, "exa") == ["examine"]
    assert {"run", "diagnose", "fix", "completion"} <= set(completed_by_bash(capsys, ""))
    assert completed_by_bash(capsys, "run", "--bud") == ["--budget"]
    assert "--step" in completed_by_bash(capsys, "examine", "runs/a", "--s")
    assert "--beside" not in completed_by_bash(capsys, "examine", "--")  # what is for gradproof itself
    assert completed_by_bash(capsys, "run", "tra") == []  # a file: bash's own
    assert set(completed_by_bash(capsys, "diagnose", "runs/mi")) == {"runs/mine"}
    assert set(completed_by_bash(capsys, "diagnose", "")) == {"runs/mine", "runs/other", "elsewhere"}


def completed_by_fish(script, line):
    ask = f"source {script}; complete -C '{line}'"
    found = subprocess.check_output(["fish", "--no-config", "-c", ask], text=True, timeout=60)
    return [offer.split("\t")[0] for offer in found.splitlines()]


def test_fish_completes_commands_options_and_runs(capsys, place):
    need("fish")
    script = place / "gradproof.fish"
    script.write_text(script_for("fish", capsys))
    assert completed_by_fish(script, "gradproof exa") == ["examine"]
    assert completed_by_fish(script, "gradproof run --bud") == ["--budget"]
    assert completed_by_fish(script, "gradproof diagnose run --bud") == []  # a run that is called run
    assert "--beside" not in completed_by_fish(script, "gradproof examine --b")
    assert "runs/mine" in completed_by_fish(script, "gradproof diagnose ru")
    assert "train.py" in completed_by_fish(script, "gradproof run tra")


def completed_by_zsh(script, line):
    """The line as it stands after Tab, typed at a real terminal: zsh completes nowhere else."""
    answer = script.with_suffix(".answer")
    answer.unlink(missing_ok=True)
    show = f'show() {{ print -r -- "$BUFFER" > {answer}.part; mv {answer}.part {answer} }}'
    script.with_name(".zshrc").write_text(
        f"source {script}\n{show}\nzle -N show; bindkey '^G' show; bindkey '^I' complete-word\n"
    )
    child, terminal = pty.fork()
    if child == 0:
        os.environ.update(ZDOTDIR=str(script.parent), TERM="vt100")
        os.execvp("zsh", ["zsh", "-d", "-i"])
    try:
        os.write(terminal, f"{line}\t\x07".encode())
        until = time.monotonic() + 60
        while not answer.exists():
            assert time.monotonic() < until, "zsh does not answer"
            time.sleep(0.05)
    finally:
        os.close(terminal)
        os.kill(child, 9)
        os.waitpid(child, 0)
    return answer.read_text().rstrip("\n")


def test_zsh_completes_commands_options_and_runs(capsys, place):
    need("zsh")
    script = place / "gradproof.zsh"
    script.write_text(script_for("zsh", capsys))
    assert completed_by_zsh(script, "gradproof exa").rstrip() == "gradproof examine"
    assert completed_by_zsh(script, "gradproof run --bud").rstrip() == "gradproof run --budget"
    assert completed_by_zsh(script, "gradproof diagnose runs/mi").rstrip() == "gradproof diagnose runs/mine"
    assert completed_by_zsh(script, "gradproof run tra").rstrip() == "gradproof run train.py"


def test_fish_has_every_command_and_option(capsys):
    commands = list(read_commands(build_parser()))
    lines = [line for line in script_for("fish", capsys).splitlines() if line.startswith("complete")]
    assert len(lines) == sum(1 + c.reads_runs + len(c.options) for c in commands)
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
