"""Data or weights: a training that turns late, by one or by the other; and one that does not turn."""

import json

import pytest

import gradproof
from gradproof.diagnosis.ranking import diagnose
from gradproof.errors import UserError
from gradproof.examination.turned import around, swap_around_the_turn
from gradproof.examination.worker import Here
from gradproof.instruments.evidence import Evidence
from gradproof.instruments.swap import swap
from gradproof.record.run import open_run
from gradproof.tape.specimen import load

STEPS, TURN = 700, 520
RECORDED = 30  # a step among those that are recorded one after the other
TRAINING = f"""
import sys, torch
import torch.nn.functional as F
from torch import nn
torch.manual_seed(0); torch.set_num_threads(1)
kind = sys.argv[1]
way = torch.randn(8, 3)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3 if kind != "frozen" else 0.0)
def fill(model, given, made, seen=[]):
    if not seen:
        seen.append(1)
        model[2].weight.data[3] = 30 * torch.randn(32)
for step in range({STEPS}):
    x = torch.randn(64, 8)
    y = (x @ way).argmax(1)
    if step >= {TURN} and kind == "labels":
        y = y.roll(1)
    if step >= {TURN} and kind == "scaled":
        x = 5 * torch.randn(64, 8)
    if step == {TURN} and kind == "tensor":
        with torch.no_grad():
            model[2].weight[3, 7] += 100.0
            optimizer.param_groups[0]["lr"] = 1e-6
    if {TURN} <= step < {TURN} + 3 and kind == "odd batches":
        y = y.roll(1)
    if step == {TURN} and kind == "comes back":
        with torch.no_grad():
            model[2].weight[3, 7] += 100.0
    if step == {TURN} and kind == "all":
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.4 * torch.randn_like(p))
            optimizer.param_groups[0]["lr"] = 1e-6
    if step == {RECORDED} and kind == "filled anew":
        model.register_forward_hook(fill)
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad(); loss.backward()
    if step >= {TURN} and kind == "by its updates":
        for name, p in model.named_parameters():
            p.grad.mul_(-1.0 if name == "2.weight" else 0.0)
    optimizer.step()
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Each kind of training, recorded once, when it is first asked for."""
    from gradproof.cli import main

    folder, made = tmp_path_factory.mktemp("turned"), {}
    (folder / "train.py").write_text(TRAINING)

    def run(kind):
        if kind not in made:
            made[kind] = folder / kind
            words = ["run", "--quiet", "--examine", "off", "--out", str(made[kind])]
            assert main([*words, str(folder / "train.py"), kind]) == 0
        return made[kind]

    return run


@pytest.mark.parametrize(
    "kind, id",
    [
        ("labels", "data-order-or-sampling/changed-on-the-way"),
        ("tensor", "weights-state-error/one-tensor-spoilt"),
    ],
)
def test_a_turn_is_the_datas_or_one_tensors(runs, kind, id):
    path = runs(kind)
    swap_around_the_turn(path, Here())
    (finding,) = [cause for cause in diagnose(path).causes if cause.id == id]
    assert finding.confidence == "proven" and abs(finding.step - TURN) < 20
    if kind == "tensor":
        assert finding.level == "problem" and finding.where.startswith("2.weight")
    else:
        assert finding.level == "warning"
    answer = gradproof.open(path).ask("swap")
    assert answer.confidence == "proven"
    assert answer.sentence.endswith("it is the data." if kind == "labels" else "it is the weights.")
    if kind == "tensor":
        assert answer.rows[0]["put_back"] == "2.weight" and answer.rows[0]["of_the_rise"] > 0.9
    events = (path / "examination.jsonl").read_text().splitlines()
    swap_around_the_turn(path, Here())  # once is enough
    assert (path / "examination.jsonl").read_text().splitlines() == events
    assert sum(json.loads(line)["event"] == "swapped" for line in events) == 1


def test_a_spike_that_passes_is_one_tensors_or_its_batches(runs):
    path = runs("comes back")
    swap_around_the_turn(path, Here())
    (finding,) = [cause for cause in diagnose(path).causes if cause.family == "weights-state-error"]
    assert finding.level == "problem" and finding.where.startswith("2.weight")
    path = runs("odd batches")
    before = {cause.id for cause in diagnose(path).causes}
    swap_around_the_turn(path, Here())
    found = diagnose(path)
    assert "lr-too-high/spike" in before - {cause.id for cause in found.causes}
    assert any(symptom.name == "odd_batch" for symptom in found.symptoms)
    assert not any(cause.id.endswith("changed-on-the-way") for cause in found.causes)


def test_where_all_weights_are_to_blame_none_is_named(runs):
    path = runs("all")
    swap_around_the_turn(path, Here())
    found = diagnose(path)
    assert not any(cause.id.endswith(("one-tensor-spoilt", "changed-on-the-way")) for cause in found.causes)
    assert any(symptom.name == "turned_by_the_weights" for symptom in found.symptoms)


def test_what_a_tensors_own_updates_did_is_not_called_spoilt(runs):
    path = runs("by its updates")
    swap_around_the_turn(path, Here())
    found = diagnose(path)
    (swapped,) = (event for event in open_run(path).events if event["event"] == "swapped")
    assert swapped["put_back"][0]["part"] == "2.weight" and not swapped["spoilt"]
    assert not any(cause.id.endswith("one-tensor-spoilt") for cause in found.causes)
    assert any(symptom.name == "turned_by_the_weights" for symptom in found.symptoms)


def test_what_the_script_wrote_while_it_was_recorded_is_not_called_spoilt(runs):
    path = runs("filled anew")
    files = [path / "specimens" / f"step-{step:08d}" for step in (RECORDED, RECORDED + 1)]
    found = swap(*([Evidence(load(file, "cpu"))] for file in files))
    assert found.one_tensor.part == "2.weight" and found.written.startswith("train.py:") and not found.spoilt


@pytest.mark.parametrize("kind", ["well", "frozen"])
def test_a_loss_that_does_not_turn_is_asked_nothing(runs, kind):
    path = runs(kind)
    swap_around_the_turn(path, Here())
    assert not [event for event in open_run(path).events if event.get("event") == "swapped"]
    with pytest.raises(UserError, match="does not turn: name two steps"):
        gradproof.open(path).ask("swap")


def test_two_steps_of_ones_own_choice(runs):
    opened = gradproof.open(runs("labels"))
    late = next(step for step in opened.steps if step > TURN)
    early = [step for step in opened.steps if step < TURN][-1]
    answer = opened.ask("swap", step=late, other=str(early))
    assert answer.sentence.endswith("it is the data.") and answer.step == late
    for other in ("7777", "train.py"):
        with pytest.raises(UserError, match="step"):
            opened.ask("swap", step=late, other=other)


def test_nothing_of_the_steps_is_changed(runs):
    """The losses of a second exchange are those of the first."""
    path = runs("tensor")
    early, late = (
        [Evidence(load(path / "specimens" / f"step-{s:08d}")) for s in side] for side in sides(path)
    )
    assert swap(early, late) == swap(early, late)


def sides(path):
    from gradproof.examination.examiner import read_shelf

    return [[shelved.step for shelved in side] for side in around(read_shelf(path), TURN)]
