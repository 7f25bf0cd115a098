"""A loop that computes its gradients itself hands them in; one that says nothing is watched by what it prints."""

import numpy as np
import pytest
import torch
from own_updates import watch_script

import gradproof
from gradproof.commands.watching import why_nothing_was_trained
from gradproof.diagnosis.ranking import diagnose
from gradproof.errors import UserError
from gradproof.probes.printed import find_loss
from gradproof.record.run import open_run


def fit(monitor, parameters, steps=40, rate=0.1, skip=()):
    """Linear regression with its gradients written out, on tensors or arrays."""
    random = np.random.default_rng(0)
    x = random.normal(size=(64, 3))
    y = x @ np.array([1.0, -2.0, 0.5]) + 0.3
    for _ in range(steps):
        error = x @ np.asarray(parameters["w"]) + np.asarray(parameters["b"]) - y
        gradients = {"w": 2 * x.T @ error / len(x), "b": np.array(2 * error.mean())}
        for name, gradient in gradients.items():
            if name not in skip:
                change = (
                    torch.from_numpy(gradient) if isinstance(parameters[name], torch.Tensor) else gradient
                )
                parameters[name] = parameters[name] - rate * change
        monitor.step(loss=(error**2).mean(), gradients=gradients)


@pytest.mark.parametrize("make", [np.zeros, lambda shape: torch.zeros(shape, dtype=torch.float64)])
def test_gradients_by_hand_are_recorded_with_what_they_change(make, tmp_path):
    parameters = {"w": make((3,)), "b": make(())}
    with gradproof.watch(parameters=parameters, out=tmp_path / "run") as monitor:
        fit(monitor, parameters)
        assert monitor.step == 40
    run = open_run(tmp_path / "run")
    assert len(run) == 40 and run.steps["loss"][-1] < 1e-3 * run.steps["loss"][0]
    assert run.steps["lr"][1:] == pytest.approx(0.1)
    assert run.steps["update_norm"][0] == pytest.approx(0.1 * run.steps["grad_norm"][0])
    assert [(p["name"], p["changed"], p["gradient"]) for p in run.info["parameters"]] == [
        ("w", True, True),
        ("b", True, True),
    ]
    assert [cause for cause in diagnose(run).causes if cause.level != "note"] == []


def test_a_parameter_that_its_own_loop_leaves_out_shows(tmp_path):
    parameters = {"w": np.zeros(3), "b": np.zeros(())}
    with gradproof.watch(parameters=parameters, out=tmp_path / "run") as monitor:
        fit(monitor, parameters, skip=("w",))
    run = open_run(tmp_path / "run")
    assert [(p["name"], p["changed"]) for p in run.info["parameters"]] == [("w", False), ("b", True)]
    assert [cause.id for cause in diagnose(run).causes if cause.where == "w"] == [
        "param-not-updated/left-out"
    ]


def test_a_list_of_tensors_that_backward_fills_is_listened_to(tmp_path):
    weight = torch.zeros(3, 1, requires_grad=True)
    x = torch.randn(32, 3, generator=torch.Generator().manual_seed(0))
    with gradproof.watch(parameters=[weight], out=tmp_path / "run", experiments=False) as monitor:
        for _ in range(12):
            loss = (x @ weight - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            weight.data -= 0.1 * weight.grad
            weight.grad = None
        assert monitor.step == 12
    run = open_run(tmp_path / "run")
    assert len(run) == 12 and [p["name"] for p in run.info["parameters"]] == ["0"]
    assert run.steps["lr"] == pytest.approx(0.1)


@pytest.mark.parametrize(
    "gradients, said",
    [
        ({"v": np.zeros(3)}, "there is a gradient for 'v', which is no parameter; those are w"),
        ({"w": np.zeros((3, 1))}, r"the gradient of 'w' is \[3, 1\], the parameter \[3\]"),
    ],
)
def test_what_cannot_be_a_gradient_is_one_sentence(gradients, said, tmp_path):
    with (
        gradproof.watch(parameters={"w": np.zeros(3)}, out=tmp_path / "run") as monitor,
        pytest.raises(UserError, match=said),
    ):
        monitor.step(loss=1.0, gradients=gradients)


def test_no_parameters_are_refused_in_one_sentence(tmp_path):
    with (
        pytest.raises(UserError, match="was given none"),
        gradproof.watch(parameters={}, out=tmp_path / "run"),
    ):
        pass


WITHOUT_BACKWARD = """
import numpy as np
random = np.random.default_rng(0)
x = random.normal(size=(64, 3))
y = x @ np.array([1.0, -2.0, 0.5])
def train(P):
    for step in range(60):
        rows = random.integers(0, 64, 16)
        batch = x[rows]
        error = batch @ P["w"] - y[rows]
        P["w"] = P["w"] - RATE * batch.T @ error / 16
        if step % 5 == 0:
            print(f"step {step} loss {(error**2).mean():.4f}")
train({"w": np.ones(3)})
"""


def test_a_script_without_backward_is_watched_by_what_it_prints(tmp_path, monkeypatch):
    found = watch_script(tmp_path, monkeypatch, WITHOUT_BACKWARD.replace("RATE", "0.1"))
    assert len(found.run) == 12 and found.run.steps["loss"][-1] < 0.1 * found.run.steps["loss"][0]
    assert found.outcome.printed == ("P.w",)
    said = why_nothing_was_trained(found.outcome, "train.py")
    assert "12 losses that it printed were recorded, and P.w change" in said and "\n" not in said
    assert "gradproof.watch(parameters=P)" in said and "monitor.step(loss=loss, gradients=G)" in said
    assert [cause for cause in diagnose(found.run).causes if cause.level != "note"] == []


def test_one_that_only_prints_losses_is_no_training(tmp_path, monkeypatch):
    found = watch_script(tmp_path, monkeypatch, WITHOUT_BACKWARD.replace("RATE", "0.0"))
    assert len(found.run) == 0 and found.outcome.printed == ()
    said = why_nothing_was_trained(found.outcome, "train.py")
    assert "backward was never called" in said and "monitor.step(loss=loss, gradients=G)" in said


def test_a_loss_is_found_by_its_word_or_by_the_line_that_prints_it():
    assert find_loss("   99: loss 1.2345", "") == 1.2345
    assert find_loss("Loss=nan", "") != find_loss("Loss=nan", "")
    assert find_loss("99 0.0123", "print(t, loss.item())") == 0.0123
    assert find_loss("99 0.0123", "print(t, accuracy)") is None
    assert find_loss("saved 3 files", "print('saved', n, 'files')") is None
