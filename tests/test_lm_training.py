"""Training as a user runs it: exact resume, checkpoints that survive anything, ranks, bad input."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from gradproof import cli
from gradproof.errors import UserError
from gradproof.lm import checkpoint, trainer
from gradproof.lm.checkpoint import find_checkpoint, load_checkpoint, read_state, save_checkpoint
from gradproof.lm.data import open_token_files
from gradproof.lm.ranks import joined_ranks
from gradproof.lm.trainer import Job, build_learner, read_job, start_run, train

TEXT = "the quick brown fox jumps over the lazy dog. " * 60
SMALL = {"context": 16, "width": 16, "heads": 2, "layers": 1, "batch": 4, "evaluate_batches": 2}
SMALL_ARGUMENTS = ["--context", "16", "--width", "16", "--heads", "2", "--layers", "1", "--batch", "4"]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


class Crash(Exception):
    pass


def train_job(run, job, crash_at=None):
    """Trains in this process, as new or from the last checkpoint; the losses by step."""
    if not (run / "job.json").exists():
        start_run(run, job)
    losses = {}

    def on_step(step):
        losses[step.step] = step.loss
        if step.step == crash_at:
            raise Crash

    data = open_token_files(run / "data", job.context)
    with joined_ranks("cpu") as ranks:
        learner = build_learner(job, data.tokenizer.vocabulary, ranks)
        with suppress(Crash):
            train(run, job, learner, data, ranks, on_step=on_step)
    return losses


def final_bytes(run):
    folder = find_checkpoint(run, "last")
    return [(folder / name).read_bytes() for name in ("weights.safetensors", "adam.safetensors")]


@pytest.mark.parametrize("model", trainer.MODELS)
def test_a_resumed_run_is_the_same_run(model, text, tmp_path):
    job = Job(model=model, data=str(text), steps=12, evaluate_every=5, accumulate=2, **SMALL)
    whole = train_job(tmp_path / "whole", job)
    first = train_job(tmp_path / "cut", job, crash_at=8)  # the last checkpoint is of step 5
    rest = train_job(tmp_path / "cut", job)
    assert list(rest) == list(range(6, 13))
    assert {**first, **rest} == whole  # floats, bit for bit
    assert final_bytes(tmp_path / "cut") == final_bytes(tmp_path / "whole")
    assert len(set(whole.values())) == 12


def test_a_lost_optimizer_state_would_be_seen(text, tmp_path, monkeypatch):
    job = Job(data=str(text), steps=12, evaluate_every=5, **SMALL)
    whole = train_job(tmp_path / "whole", job)
    train_job(tmp_path / "cut", job, crash_at=8)
    load = trainer.ModuleLearner.load
    monkeypatch.setattr(trainer.ModuleLearner, "load", lambda self, w, adam, steps: load(self, w, adam, 0))
    rest = train_job(tmp_path / "cut", job)
    assert rest[6] == whole[6] and rest[8] != whole[8]


def test_explicit_and_module_learners_train_alike(text, tmp_path):
    jobs = [
        Job(model=m, data=str(text), steps=8, evaluate_every=8, dtype="float64", **SMALL)
        for m in trainer.MODELS[:2]
    ]
    first, second = (train_job(tmp_path / job.model, job) for job in jobs)
    assert all(abs(first[s] - second[s]) < 1e-6 for s in first)
    # and the explicit model's checkpoint is one of the GPT
    module, _ = trainer.load_trained(tmp_path / "explicit", "last")
    assert isinstance(module, trainer.GPT)


def gradproof(*arguments, **options):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "gradproof", *map(str, arguments)]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def wait_for_step(run, step, process):
    """Until the run has a checkpoint of that step or later."""
    while process.poll() is None:
        folder = find_checkpoint(run, "last")
        if folder is not None and int(folder.name.removeprefix("step-")) >= step:
            return
        time.sleep(0.01)
    raise AssertionError(process.communicate())


@pytest.mark.slow
def test_killed_and_resumed_it_ends_in_the_same_weights(text, tmp_path):
    arguments = ["--data", text, "--steps", 120, "--evaluate-every", 20, *SMALL_ARGUMENTS]
    killed = gradproof("train", *arguments, "--out", tmp_path / "killed")
    wait_for_step(tmp_path / "killed", 40, killed)
    killed.kill()
    killed.communicate()
    left = int(find_checkpoint(tmp_path / "killed", "last").name.removeprefix("step-"))
    assert left < 120
    assert cli.main(["train", "--resume", str(tmp_path / "killed")]) == 0
    assert cli.main(["train", *map(str, arguments), "--out", str(tmp_path / "whole")]) == 0
    assert final_bytes(tmp_path / "killed") == final_bytes(tmp_path / "whole")


@pytest.mark.slow
def test_sigterm_saves_and_ends(text, tmp_path):
    run = tmp_path / "run"
    arguments = ["--data", text, "--steps", 100_000, "--evaluate-every", 50, *SMALL_ARGUMENTS]
    process = gradproof("train", *arguments, "--out", run)
    wait_for_step(run, 50, process)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM and "Traceback" not in err
    assert f"go on with: gradproof train --resume {run}" in out
    last = read_state(find_checkpoint(run, "last"))["step"]
    assert f"step {last}: validation loss" in out  # the step in progress was finished and saved


def test_train_and_generate_commands(text, tmp_path, capsys):
    run = tmp_path / "run"
    steps = ["--steps", "30", "--evaluate-every", "15", "--lr", "1e-2"]
    assert cli.main(["train", "--data", str(text), "--out", str(run), *steps, *SMALL_ARGUMENTS]) == 0
    out = capsys.readouterr().out
    assert "60 of 60 targets are the next input" in out and "validation loss" in out and "30 steps" in out
    assert {p.name for p in (run / "checkpoints").iterdir() if p.is_dir()} <= {"step-000015", "step-000030"}
    assert cli.main(["generate", str(run), "--prompt", "the ", "--tokens", "12", "--temperature", "0"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("the ") and len(said) > 8


def test_the_explicit_model_is_watched_too(text, tmp_path):
    import gradproof

    run = tmp_path / "run"
    arguments = ["train", "--model", "explicit", "--data", str(text), "--out", str(run), "--steps", "12"]
    assert cli.main([*arguments, *SMALL_ARGUMENTS]) == 0
    record = gradproof.open_run(run / "record")
    assert len(record.steps["loss"]) == 12
    assert "blocks.0.attention.query.weight" in record.table("gradient", "norm").names
    assert not [cause for cause in gradproof.diagnose(run / "record").causes if cause.level == "problem"]


def test_check_data_prints_the_table_and_stops(text, tmp_path, capsys):
    run = tmp_path / "run"
    assert cli.main(["train", "--data", str(text), "--out", str(run), "--check-data", *SMALL_ARGUMENTS]) == 0
    out = capsys.readouterr().out
    assert "OK" in out and "MISMATCH" not in out and "of the first 100 batches repeat" in out
    assert not (run / "checkpoints").exists()


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--data", "nowhere.txt"], "no data at nowhere.txt"),
        (["--heads", "3"], "3 heads do not divide a width of 16"),
        (["--batch", "5", "--accumulate", "2"], "choose a multiple of 2"),
        (["--context", "4000"], "the train data are too short"),
        (["--tokenizer", "syllable"], "no tokenizer 'syllable'"),
        (["--schedule", "square"], "no schedule 'square'"),
        (["--model", "rnn"], "no model 'rnn'"),
        (["--dtype", "int8"], "no dtype 'int8'"),
        (["--steps", "0"], "--steps must be at least 1"),
        (["--lr", "nan"], "--lr must be above 0"),
        (["--device", "toaster"], "no device 'toaster'"),
        (["--model", "explicit", "--shard"], "the explicit model has no modules"),
        (["--shard"], "needs more than one process"),
        (["--resume", "nowhere"], "nowhere is not a training run"),
    ],
)
def test_bad_input_gets_a_sentence(arguments, said, text, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = ["train", "--data", str(text), *SMALL_ARGUMENTS, "--steps", "2", "--out", str(tmp_path / "run")]
    if "--resume" in arguments:
        given = ["train"]
    assert cli.main([*given, *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_run_is_neither_overwritten_nor_changed_by_resuming(text, tmp_path, capsys):
    run = str(tmp_path / "run")
    arguments = ["train", "--data", str(text), *SMALL_ARGUMENTS, "--steps", "3", "--out", run]
    assert cli.main(arguments) == 0
    before = final_bytes(tmp_path / "run")
    assert cli.main(arguments) == 2
    assert "resume it with --resume" in capsys.readouterr().err
    assert cli.main(["train", "--resume", run, "--width", "32"]) == 2
    assert "--width cannot change" in capsys.readouterr().err
    assert cli.main(["train", "--resume", run, "--steps", "2"]) == 2
    assert "has done 3 steps already" in capsys.readouterr().err
    assert cli.main(["train", "--resume", run]) == 0  # nothing left to do
    assert final_bytes(tmp_path / "run") == before
    assert cli.main(["train", "--resume", run, "--steps", "4"]) == 0
    assert read_job(tmp_path / "run").steps == 4


SHAPES = {"a": (2, 3), "b": (4,)}


def tensors(value=0.0):
    weights = {name: torch.full(shape, value) for name, shape in SHAPES.items()}
    return weights, {f"{m}.{name}": w.clone() for name, w in weights.items() for m in ("m", "v")}


def test_the_last_and_the_best_are_kept(tmp_path):
    for step, best in ((1, True), (2, True), (3, False), (4, False)):
        save_checkpoint(tmp_path, *tensors(step), {"step": step, "best": 0.5}, best=best)
    assert find_checkpoint(tmp_path, "last").name == "step-000004"
    assert find_checkpoint(tmp_path, "best").name == "step-000002"
    assert sorted(p.name for p in (tmp_path / "checkpoints").glob("step-*")) == ["step-000002", "step-000004"]
    weights, adam, state = load_checkpoint(find_checkpoint(tmp_path, "best"), SHAPES)
    assert weights["a"].eq(2).all() and adam["v.b"].eq(2).all() and state["step"] == 2


@pytest.mark.parametrize("at", range(1, 8))
def test_a_save_that_dies_leaves_the_checkpoint_before(tmp_path, monkeypatch, at):
    """At each of its first system calls that name a file or flush one."""
    save_checkpoint(tmp_path, *tensors(1.0), {"step": 1, "best": 1.0}, best=True)
    calls = 0

    def dying(real):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == at:
                raise Crash
            return real(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for name in ("fsync", "replace"):
            patch.setattr(checkpoint.os, name, dying(getattr(os, name)))
        with pytest.raises(Crash):
            save_checkpoint(tmp_path, *tensors(2.0), {"step": 2, "best": 0.5}, best=True)
    weights, _, state = load_checkpoint(find_checkpoint(tmp_path, "last"), SHAPES)
    assert state["step"] == 1 and weights["a"].eq(1).all()
    save_checkpoint(tmp_path, *tensors(2.0), {"step": 2, "best": 0.5}, best=True)
    assert read_state(find_checkpoint(tmp_path, "last"))["step"] == 2
    assert not list((tmp_path / "checkpoints").glob(".step*"))  # what the dead one left is gone


def damage(path, how):
    weights = path / "weights.safetensors"
    if how == "truncated":
        weights.write_bytes(weights.read_bytes()[:-5])
    elif how == "empty":
        weights.write_bytes(b"")
    elif how == "missing":
        weights.unlink()
    elif how == "state":
        (path / "state.json").write_text('{"step": 1')


@pytest.mark.parametrize("how", ["truncated", "empty", "missing", "state"])
def test_a_damaged_checkpoint_is_named(tmp_path, how):
    path = save_checkpoint(tmp_path, *tensors(), {"step": 1, "best": 1.0}, best=True)
    load_checkpoint(path, SHAPES)
    damage(path, how)
    with pytest.raises(UserError, match="damaged"):
        load_checkpoint(path, SHAPES)


@pytest.mark.parametrize(
    "expected, said",
    [
        ({"a": (2, 3)}, r"1 unknown tensors \(b\), 0 missing \(none\)"),
        ({**SHAPES, "c": (1,)}, r"0 unknown tensors \(none\), 1 missing \(c\)"),
        ({"a": (3, 2), "b": (4,)}, r"a is \(2, 3\) there and \(3, 2\) in this model"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(tmp_path, expected, said):
    path = save_checkpoint(tmp_path, *tensors(), {"step": 1, "best": 1.0}, best=True)
    with pytest.raises(UserError, match=said):
        load_checkpoint(path, expected)


def test_a_refused_checkpoint_changes_nothing(text, tmp_path):
    job = Job(data=str(text), steps=4, evaluate_every=2, **SMALL)
    train_job(tmp_path / "run", job)
    damage(find_checkpoint(tmp_path / "run", "last"), "truncated")
    with joined_ranks("cpu") as ranks:
        learner = build_learner(job, 257, ranks)
        before = [p.clone() for p in learner.module.parameters()]
        with pytest.raises(UserError, match="damaged"):
            trainer.resume(tmp_path / "run", learner, job)
        assert all(torch.equal(p, q) for p, q in zip(learner.module.parameters(), before, strict=True))
    (tmp_path / "run" / "job.json").write_text(json.dumps({"steps": 3, "colour": "red"}))
    with pytest.raises(UserError, match=r"job.json is damaged \(.*colour"):
        read_job(tmp_path / "run")


def torchrun(*arguments):
    """On two ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "gradproof", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def alone(*arguments):
    assert cli.main([*map(str, arguments)]) == 0


def weights_of(run: Path):
    from safetensors.torch import load_file

    return load_file(find_checkpoint(run, "last") / "weights.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("model, shard", [("gpt", []), ("gpt", ["--shard"]), ("explicit", [])])
def test_two_ranks_train_the_model_of_one(model, shard, text, tmp_path):
    """All steps on one rank, all on two, and half of them on each in either order: the same weights."""
    job = [
        "train",
        "--model",
        model,
        "--data",
        text,
        "--dtype",
        "float64",
        "--accumulate",
        "2",
        *SMALL_ARGUMENTS,
    ]
    job += ["--schedule", "constant", "--warmup", "0", "--lr", "1e-3"]
    one, two, up, down = (tmp_path / name for name in ("one", "two", "up", "down"))
    alone(*job, "--steps", 6, "--out", one)
    assert "on 2 × cpu" in torchrun(*job, *shard, "--steps", 6, "--out", two)
    alone(*job, "--steps", 3, "--out", up)
    torchrun("train", "--resume", up, *shard, "--steps", 6)
    torchrun(*job, *shard, "--steps", 3, "--out", down)
    alone("train", "--resume", down, *(["--no-shard"] if shard else []), "--steps", 6)
    expected = weights_of(one)
    for run in (two, up, down):
        found = weights_of(run)
        assert found.keys() == expected.keys()
        for name, weight in expected.items():
            # a key's bias has no gradient but rounding, of which Adam makes steps of any sign
            if not name.endswith("qkv.bias"):
                assert (found[name] - weight).abs().max() < 1e-6, (run.name, name)
