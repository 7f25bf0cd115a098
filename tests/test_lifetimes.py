"""Watching keeps nothing of a script alive: what it lets go of is gone when it would be without gradproof."""

import copy
import gc
import pickle
import sys
import weakref

import pytest
import torch
from torch import nn

from gradproof.diagnosis.symptoms import never_changed, outside_optimizer
from gradproof.probes import taping
from gradproof.probes.hooks import attach
from gradproof.probes.names import Names
from gradproof.probes.own_updates import OwnUpdates
from gradproof.probes.taping import begin_taping
from gradproof.probes.watch import open_session
from gradproof.record.run import open_run
from gradproof.tape.living import Living


def by_an_optimizer(model, steps):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(steps):
        x = torch.randn(8, 4)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return {"optimizer": optimizer, "batch": x, "moment": optimizer.state[model[0].weight]["exp_avg"]}


def by_hand(model, steps):
    for _ in range(steps):
        x = torch.randn(8, 4)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.01 * p.grad
                p.grad = None
    return {"batch": x}


def fold(train, steps):
    """Trains a model and an average of it, evaluates both; who refers to what, and how often."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 1))
    things = {"model": model, "weight": model[0].weight, **train(model, steps)}
    things["average"] = average = copy.deepcopy(model)
    model.load_state_dict(average.state_dict())
    with torch.no_grad():
        model.eval()(torch.randn(5, 4))
        average.eval()(torch.randn(5, 4))
    counts = {name: sys.getrefcount(thing) for name, thing in things.items()}
    return counts, {name: weakref.ref(thing) for name, thing in things.items()}


def folds(train, steps):
    """Reference counts in each of some folds, and what is alive after it; without the help of the collector."""
    fold(train, 2)  # what PyTorch imports on first use leaves cycles
    gc.collect()
    gc.disable()
    try:
        found = []
        for _ in range(3):
            counts, references = fold(train, steps)
            found.append((counts, [name for name, thing in references.items() if thing() is not None]))
        return found
    finally:
        gc.enable()


@pytest.fixture
def every_step(monkeypatch):
    monkeypatch.setattr(taping, "PLAIN_STEPS", ())
    monkeypatch.setattr(taping, "ALLOWANCE", 1e9)


def watched(path, training, experiments=True):
    session = open_session(path, command=["test"], names=Names())
    session.own = OwnUpdates(session)
    if experiments:
        begin_taping(session)
    with attach(session):
        try:
            return training()
        finally:
            session.close()
            assert session.failure is None


@pytest.mark.parametrize("experiments", [True, False])
def test_a_model_that_is_deleted_is_gone(experiments, tmp_path, every_step):
    plain = folds(by_an_optimizer, 5)
    assert plain[0][1] == []
    assert watched(tmp_path / "run", lambda: folds(by_an_optimizer, 5), experiments) == plain


@pytest.mark.parametrize("steps", [1, 5])
def test_a_model_that_is_trained_by_hand_is_gone_when_the_script_drops_it(tmp_path, steps):
    """And its last step is not lost."""

    def living():
        return [[name for name, thing in fold(by_hand, steps)[1].items() if thing()] for _ in range(4)]

    living()
    assert living() == [[], [], [], []]
    assert watched(tmp_path / "run", living) == [[], [], [], []]
    run = open_run(tmp_path / "run")
    assert run.steps["step"].tolist() == list(range(4 * steps)) and set(run.steps["order"]) == {"bs"}
    weights = [each for each in run.info["parameters"] if each["name"].endswith("3.weight")]
    assert run.seen["loss"].all() and len(weights) == 4 and all(each["changed"] for each in weights)


def test_a_model_that_dies_while_its_parameters_are_trained_on(tmp_path):
    """Its parameters are learnt anew: no step is missed."""

    def training():
        model = nn.Linear(4, 1)
        weight, bias = model.weight, model.bias
        for step in range(8):
            if step == 4:
                del model
            ((torch.ones(8, 4) @ weight.T + bias) - 3).square().mean().backward()
            with torch.no_grad():
                for p in (weight, bias):
                    p -= 0.01 * p.grad
                    p.grad = None

    watched(tmp_path / "run", training)
    run = open_run(tmp_path / "run")
    assert run.steps["step"].tolist() == list(range(8)) and set(run.steps["order"]) == {"bs"}


def test_copies_of_what_is_watched_are_as_without_us(tmp_path, every_step):
    def copies():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
        twin, other = copy.deepcopy((model, optimizer))
        for _ in range(2):  # the copy trains, and the original does not
            twin(torch.ones(8, 4)).square().mean().backward()
            other.step()
        whole = pickle.loads(pickle.dumps((model, optimizer)))
        weights = [p.tolist() for m in (model, twin, whole[0]) for p in m.parameters()]
        return weights, vars(other).keys(), vars(model).keys(), len(pickle.dumps((model, optimizer)))

    assert watched(tmp_path / "run", copies) == copies()


def still(model, **options):
    """A training whose second layer does not move, in a function that has returned when the run ends."""
    optimizer = torch.optim.SGD(
        [{"params": model[0].parameters()}, {"params": model[1].parameters(), **options}], 0.1
    )
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()


def test_what_never_moved_is_said_of_a_model_that_is_gone(tmp_path):
    make = lambda: nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))  # noqa: E731
    watched(tmp_path / "sick", lambda: still(make(), lr=0.0), experiments=False)
    run = open_run(tmp_path / "sick")
    assert {p["name"]: p["changed"] for p in run.info["parameters"]} == {
        "0.weight": True, "0.bias": True, "1.weight": False, "1.bias": False,
    }  # fmt: skip
    assert [symptom.where for symptom in never_changed(run)] == ["1.weight"]
    watched(tmp_path / "healthy", lambda: still(make()), experiments=False)
    assert not list(never_changed(open_run(tmp_path / "healthy")))


def test_who_trained_a_model_is_known_when_the_optimizer_is_gone(tmp_path):
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    watched(tmp_path / "run", lambda: still(model), experiments=False)
    run = open_run(tmp_path / "run")
    assert [p["optimizer"] for p in run.info["parameters"]] == [0, 0, 0, 0]
    assert not list(outside_optimizer(run)) and len(run.info["optimizers"]) == 1


def test_many_models_leave_a_run_of_some_size(tmp_path, monkeypatch):
    monkeypatch.setattr("gradproof.probes.parameters.MOST_GONE", 6)
    make = lambda: nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))  # noqa: E731
    watched(tmp_path / "run", lambda: [still(make()) and None for _ in range(5)], experiments=False)
    info = open_run(tmp_path / "run").info
    assert len(info["optimizers"]) == 5 and 4 <= len(info["parameters"]) <= 10
    assert all(p["changed"] for p in info["parameters"])


def test_what_dies_is_not_taken_for_what_comes_after():
    class Thing:
        def __eq__(self, other):
            return True

        __hash__ = None

    known, first, second = Living(), Thing(), Thing()
    known[first] = 1
    assert first in known and second not in known
    address = id(first)
    del first
    others = [Thing() for _ in range(1000)]
    assert len(known) == 0 and not any(id(other) == address and other in known for other in others)


def thawed_late(step_of_thaw):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(60):
        model[0].requires_grad_(step >= step_of_thaw)
        optimizer.zero_grad()
        x = torch.randn(8, 4)
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("step_of_thaw", [40, 59])
def test_what_stood_still_for_a_while_is_not_said_of_the_end(tmp_path, step_of_thaw):
    """Frozen for most of a run that ends within a function: nobody has looked since it began to move."""
    watched(tmp_path / "run", lambda: thawed_late(step_of_thaw), experiments=False)
    assert not list(never_changed(open_run(tmp_path / "run")))
