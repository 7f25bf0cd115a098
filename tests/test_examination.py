"""Experiments in the training process: they find what was planted, and leave training bit for bit as it was."""

import json
import math
import shutil

import pytest
import torch
import torch.nn.functional as F
import trainings
from conftest import examine_here
from torch import nn

from gradproof.diagnosis.findings import Exclusion
from gradproof.diagnosis.ranking import diagnose, exclusion_of_verdict
from gradproof.examination import examiner
from gradproof.examination.process import CUT_OFF, WorkerLost
from gradproof.examination.worker import PUSHED_OUT, Worker
from gradproof.experiments.steps import owners
from gradproof.experiments.verdict import confirmed, excluded
from gradproof.probes import taping as taping_module
from gradproof.probes.hooks import attach
from gradproof.probes.names import Names
from gradproof.probes.taping import begin_taping
from gradproof.probes.watch import open_session
from gradproof.record.run import open_run
from gradproof.record.writer import RunWriter
from gradproof.tape.label import find_specimens


def examine(path, training, questions=(), **options):
    """Run a training, watched and taped as `gradproof run` does it; ask its specimens; what the training returned."""
    session = open_session(path, command=["test"], names=Names())
    begin_taping(session, **options)
    with attach(session):
        try:
            return training()
        finally:
            session.close()
            examine_here(path, only=questions)


def outcome_of(kind):
    torch.manual_seed(3)
    model, _, losses = kind()
    losses = list(losses)
    return losses, [value.clone() for value in model.state_dict().values()], torch.get_rng_state()


@pytest.mark.parametrize("kind", [trainings.mlp, trainings.cnn, trainings.lstm, trainings.transformer])
def test_training_is_bit_identical(kind, tmp_path):
    plain, examined = outcome_of(kind), examine(tmp_path / "run", lambda: outcome_of(kind))
    assert examined[0] == plain[0]
    assert all(torch.equal(a, b) for a, b in zip(examined[1], plain[1], strict=True))
    assert torch.equal(examined[2], plain[2])
    run = open_run(tmp_path / "run")
    assert run.info["cost"]["taped_steps"] >= 2
    assert not [event for event in run.events if event.get("outcome") == "failed"], run.events
    assert diagnose(run).worst != "problem"


def regression(lr=0.05, steps=40, function=lambda x: x, spoil=lambda batches: None):
    torch.manual_seed(0)
    batches = torch.randn(steps, 32, 4)
    spoil(batches)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for x in batches:
        loss = F.mse_loss(function(model(x)), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


class HalfTanh(torch.autograd.Function):
    """A hand-written tanh whose backward forgets a factor of two."""

    @staticmethod
    def forward(ctx, x):
        out = x.tanh()
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, grad):
        (out,) = ctx.saved_tensors
        return 0.5 * grad * (1 - out * out)


def first_cause(path):
    return diagnose(path).causes[0]


def test_a_wrong_backward_is_named(tmp_path):
    examine(tmp_path / "run", lambda: regression(function=HalfTanh.apply))
    cause = first_cause(tmp_path / "run")
    assert (cause.family, cause.confidence) == ("wrong-gradient", "proven")
    assert "HalfTanh" in " ".join(cause.evidence) and "test_examination.py" in cause.where


def test_a_healthy_training_is_not_accused(tmp_path):
    examine(tmp_path / "run", regression)
    diagnosis = diagnose(tmp_path / "run")
    assert diagnosis.worst in (None, "note")
    assert {"wrong-gradient", "lr-too-high"} <= {exclusion.family for exclusion in diagnosis.excluded}


def test_a_step_that_is_too_long_is_proven(tmp_path):
    examine(tmp_path / "run", lambda: regression(lr=2.0))
    cause = first_cause(tmp_path / "run")
    assert cause.family == "lr-too-high" and "instead of 2.0e+00" in cause.fix


def test_steps_that_are_too_short_are_proven(tmp_path):
    examine(tmp_path / "run", lambda: regression(lr=1e-6, steps=60))
    cause = first_cause(tmp_path / "run")
    assert cause.family == "lr-too-low" and cause.confidence == "proven"


def test_a_nan_is_caught_in_the_act(tmp_path):
    def spoil(batches):
        batches[13, 7, 2] = math.nan

    examine(tmp_path / "run", lambda: regression(spoil=spoil))
    cause = first_cause(tmp_path / "run")
    assert cause.family == "forward-nonfinite" and cause.step == 13 and cause.confidence == "proven"
    assert "(7, 2)" in " ".join(cause.evidence)  # the entry of the batch it came from


def test_every_gradient_s_error_is_kept_for_the_page(tmp_path, monkeypatch):
    monkeypatch.setattr(examiner, "MOST_SHADOWS", 2)
    examine(tmp_path / "run", regression)
    shadows = [event for event in open_run(tmp_path / "run").events if event["event"] == "shadow"]
    assert len(shadows) == 2
    found = {each["name"]: each for each in shadows[0]["parameters"]}
    assert sorted(found) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    assert all(each["verdict"] == "right" and each["error"] <= each["tolerance"] for each in found.values())


def test_an_experiment_that_fails_is_noted_and_left_out(tmp_path, monkeypatch):
    def broken(evidence):
        raise RuntimeError("planted")
        yield

    monkeypatch.setattr(owners, "does_the_optimizer_hold_everything", broken)
    examine(tmp_path / "run", lambda: regression(function=HalfTanh.apply))
    failed = [e for e in open_run(tmp_path / "run").events if e.get("outcome") == "failed"]
    assert failed and all(
        "planted" in e["reason"] and e["question"].endswith("hold_everything") for e in failed
    )
    assert first_cause(tmp_path / "run").family == "wrong-gradient"


def test_a_recorder_that_fails_ends_taping_only(tmp_path, monkeypatch):
    def broken(self, inside_optimizer_hook=False):
        raise RuntimeError("planted")

    monkeypatch.setattr(taping_module.Recorder, "start", broken)
    examine(tmp_path / "run", regression)
    run = open_run(tmp_path / "run")
    assert len(run) == 40 and run.info["cost"]["taped_steps"] == 0


def write_verdicts(path, *verdicts):
    (path / "events.jsonl").write_text(
        "".join(
            json.dumps({"event": "verdict", "experiment": name, "step": step, **vars(verdict)}) + "\n"
            for step, (name, verdict) in enumerate(verdicts)
        )
    )
    return diagnose(path)


def test_the_last_verdict_of_an_experiment_counts_unless_an_earlier_one_is_lasting(tmp_path):
    examine(tmp_path / "run", lambda: regression(steps=8))
    found = write_verdicts(
        tmp_path / "run",
        ("a", confirmed("lr-too-high/x", "seen", confidence="proven", lasting=False)),
        ("a", excluded("lr-too-high", "no longer")),
    )
    assert not found.causes and found.excluded[0].reason == "no longer"
    found = write_verdicts(
        tmp_path / "run",
        ("a", confirmed("lr-too-high/x", "seen", confidence="proven")),
        ("a", excluded("lr-too-high", "no longer")),
    )
    assert found.causes[0].id == "lr-too-high/x"
    found = write_verdicts(
        tmp_path / "run", ("a", confirmed("bad-init/x", "seen", confidence="proven", if_troubled=True))
    )
    assert found.worst == "note"  # this training shows no trouble
    found = write_verdicts(
        tmp_path / "run", ("a", confirmed("lr-too-high/x", "seen", confidence="proven", if_troubled=True))
    )
    assert not found.causes  # a little too high at one step and too low at another: every good rate is


def test_an_exclusion_clears_what_it_measured_when_it_measured_it():
    by_id = Exclusion("data-order-or-sampling", "mixed", "data-order-or-sampling/sorted-by-class", step=40)
    assert by_id.covers("data-order-or-sampling/sorted-by-class", 10)
    assert not by_id.covers("data-order-or-sampling/same-batch", 10)
    whole = Exclusion("lr-too-high", "each step lowers its loss", step=40)
    assert whole.covers("lr-too-high/diverged", 40) and not whole.covers("lr-too-high/diverged", 5000)
    measured = exclusion_of_verdict({"family": "lr-too-high", "reason": "it falls", "step": 40})
    assert measured.step == 40, "readers are told when it was measured"


def test_a_loss_that_rises_long_after_the_last_tape_is_still_suspected(tmp_path):
    examine(tmp_path / "run", lambda: regression(steps=8))
    exclusion = json.dumps(
        {"event": "verdict", "experiment": "a", "step": 3, **vars(excluded("lr-too-high", "x"))}
    )
    loss = [1.0] * 30 + [float(i) for i in range(1, 51)]
    for steps, suspected in ((loss, True), (loss[:8], False)):
        writer = RunWriter(tmp_path / f"run{len(steps)}", {})
        for step, value in enumerate(steps):
            writer.write_step({"step": step, "loss": value, "order": "zbs", "lr": 0.1})
        writer.close()
        (tmp_path / f"run{len(steps)}" / "events.jsonl").write_text(exclusion + "\n")
        causes = diagnose(tmp_path / f"run{len(steps)}").causes
        assert bool([c for c in causes if c.family == "lr-too-high"]) == suspected


class Crowded:
    """A worker on a GPU without room, until there is some."""

    def __init__(self):
        self.asked, self.room = [], False

    def ask(self, limit, what, **request):
        if what == "extras":
            return {}
        if not self.room:
            return {"later": "the GPU has 1 GB free", "seconds": 0.0}
        self.asked.append(request["question"])
        return {"verdicts": [], "noted": {}, "seconds": 0.0}

    def warm_up(self):
        pass

    def close(self):
        pass


def test_what_finds_no_room_on_a_gpu_is_asked_later_or_said_not_to_be(tmp_path):
    examine(tmp_path / "run", lambda: regression(steps=4), questions=("where_was_it_born",))
    worker = Crowded()
    asks = examiner.Examiner(tmp_path / "run", [worker], only=("do_shapes_meet",))
    assert asks.ask_all() == 0 and not worker.asked
    worker.room = True
    asks.ask_again_what_had_to_wait()
    assert asks.ask_all() == 0 and "do_shapes_meet" in worker.asked
    worker.room = False
    asks = examiner.Examiner(tmp_path / "run", [worker], only=("do_targets_line_up",))
    asks.end(None, asks.ask_all())
    said = [e for e in open_run(tmp_path / "run").events if e.get("question") == "do_targets_line_up"]
    assert said and {(e["outcome"], e["reason"]) for e in said} == {("not asked", "the GPU has 1 GB free")}


@pytest.mark.parametrize("trains", [True, False])
def test_memory_that_ran_out_beside_a_training_is_asked_for_again_and_else_it_has_failed(trains, tmp_path):
    examine(tmp_path / "run", lambda: regression(steps=4), questions=("where_was_it_born",))
    worker = Crowded()
    worker.ask = lambda limit, what, **request: {"error": "OutOfMemoryError: no room", "seconds": 0.0}
    asks = examiner.Examiner(tmp_path / "run", [worker], only=("do_shapes_meet",))
    asks.share = 0.25 if trains else asks.share
    assert asks.ask_all() == 0
    asked = [e for e in open_run(tmp_path / "run").events if e.get("question") == "do_shapes_meet"]
    assert {e["outcome"] for e in asked} == (set() if trains else {"failed"})
    asks.ask_again_what_had_to_wait()
    assert bool(asks.jobs()) == trains


def test_a_question_that_the_end_cut_off_has_not_failed_and_is_asked_again(tmp_path):
    examine(tmp_path / "run", lambda: regression(steps=4), questions=("where_was_it_born",))
    worker = Crowded()

    def ask(limit, what, **request):
        raise WorkerLost(CUT_OFF)

    worker.ask = ask
    asks = examiner.Examiner(tmp_path / "run", [worker], only=("do_shapes_meet",))
    asks.ask_all()
    asked = [e for e in open_run(tmp_path / "run").events if e.get("question") == "do_shapes_meet"]
    assert {(e["outcome"], e["reason"]) for e in asked} == {("not asked", CUT_OFF)}
    assert examiner.Examiner(tmp_path / "run", [worker], only=("do_shapes_meet",)).jobs()


def test_a_late_step_that_was_passed_over_is_asked_by_itself(tmp_path):
    """The newest is asked first, having seen what was asked; what lies between has no memory to go on."""
    mine = examiner.Examiner.__new__(examiner.Examiner)
    mine._lost, mine._asked = {}, {("q", 100): "nothing", ("q", 500): "nothing"}
    question = examiner.Question("q", "none", "?", (), "read")
    shelf = []
    for step in (100, 400, 500, 600):
        (tmp_path / str(step)).mkdir()
        shelf.append(examiner.Shelved(tmp_path / str(step), step, True, 1, 1, "cpu"))
    assert mine._seen_before(question, shelf[3], shelf, {"q": 500}) == [
        str(s.path) for s in (shelf[0], shelf[2])
    ]
    assert mine._seen_before(question, shelf[1], shelf, {"q": 500}) == []


def test_a_step_that_is_pushed_out_while_it_waits_has_not_failed(tmp_path):
    """The training goes on: between a question's turn and its answer the shelf may need the room."""
    examine(tmp_path / "run", lambda: regression(steps=8), questions=("where_was_it_born",))
    first, *others, last = (str(path) for path in find_specimens(tmp_path / "run"))
    worker = Worker()
    shutil.rmtree(first)
    assert "verdicts" in worker.ask("do_shapes_meet", [first, *others])
    shutil.rmtree(last)
    assert worker.ask("do_shapes_meet", [*others, last])["not_asked"] == PUSHED_OUT
