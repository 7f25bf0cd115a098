"""A training that begins where another run was: `gradproof run --from`, `try --from`, and a what-if with a patch."""

import os
import subprocess
import sys

import pytest
import torch
from asked_runs import classifier
from test_try import diff
from torch import nn

import gradproof
from gradproof import children
from gradproof.cli import main
from gradproof.errors import UserError
from gradproof.probes.snapshot import live_state, starting_from

SLOW = """import torch
from torch import nn

torch.manual_seed(0)


def wanted(x):
    return x.sum(1, keepdim=True)


model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(60):
    x = torch.randn(64, 4)
    loss = (model(x) - wanted(x)).square().mean()
    print(loss.item())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.01)


class Mine(torch.optim.AdamW):
    """The script's own, made from PyTorch's: it keeps the same state."""


class Other(torch.optim.Optimizer):
    """The script's own from the ground up."""


@pytest.mark.parametrize("kind, in_a_tensor", [(torch.optim.AdamW, True), (Mine, True), (Other, False)])
def test_a_count_of_steps_is_of_the_kind_that_the_optimizer_keeps(kind, in_a_tensor):
    weight = nn.Parameter(torch.zeros(2))
    count = live_state("step", 3, weight, kind([weight], {}) if kind is Other else kind([weight]))
    assert count == 3 and isinstance(count, torch.Tensor) == in_a_tensor


def test_weights_and_states_are_those_of_the_step(tmp_path):
    run = gradproof.open(classifier(tmp_path / "run", optimizer=adam, steps=3))
    evidence = run._open(2)
    with starting_from(run.specimen(2)) as snapshot:
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        optimizer = adam(model)
        model(torch.randn(2, 4)).sum().backward()
        for name, parameter in model.named_parameters():
            kept = evidence.tape.leaf_value(evidence.tape.leaf_named[name])
            assert torch.equal(parameter, kept)
        optimizer.step()
    assert str(snapshot) == "began with step 2: 4 of 4 parameters, 4 optimizer states"
    assert all(state["step"] == 3 for state in optimizer.state.values())  # two steps were made before


def test_what_does_not_fit_stays_as_it_was_made(tmp_path):
    run = gradproof.open(classifier(tmp_path / "run", steps=1))
    made = torch.optim.SGD.__init__
    with starting_from(run.specimen()) as snapshot:
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 5))
        before = model[2].weight.detach().clone()
        torch.optim.SGD(model.parameters(), lr=0.1)
    assert torch.equal(model[2].weight, before) and str(snapshot).startswith("began with step 0: 2 of 4")
    assert torch.optim.SGD.__init__ is made


def recorded(tmp_path, step):
    (tmp_path / "train.py").write_text(SLOW)
    command = ["-m", "gradproof", "run", "--quiet", "--examine", "off", "--until", str(step), "--out", "run"]
    environment = {**os.environ, "PYTHONPATH": children.environment()["PYTHONPATH"], "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, *command, "train.py"], cwd=tmp_path, check=True, capture_output=True, env=environment
    )
    return tmp_path / "run"


def test_what_if_a_function_of_the_script_were_another(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    run = recorded(tmp_path, 50)
    patch = tmp_path / "fix.diff"
    patch.write_text(
        diff(SLOW, SLOW.replace("return x.sum(1, keepdim=True)", "return -x.sum(1, keepdim=True)"))
    )
    found = gradproof.open(run).ask("what-if", patch=str(patch), steps=4)
    start = found.rows[0]["as_it_was"]
    assert start < 1.5 and found.rows[0]["changed"] > 4 * start  # it had learnt the one, not the other
    assert "worse" in found.sentence and "began with step 50: 6 of 6 parameters" in found.not_looked_at[0]
    assert (tmp_path / "train.py").read_text() == SLOW


def test_a_step_that_was_not_recorded(tmp_path, capsys):
    run = classifier(tmp_path / "run", steps=2)
    (tmp_path / "fix.diff").write_text("")
    assert main(["try", str(run), "--patch", str(tmp_path / "fix.diff"), "--from", "77"]) == 2
    assert "step 77" in capsys.readouterr().err
    with pytest.raises(UserError, match="step 77"):
        gradproof.open(run).ask("what-if", patch=str(tmp_path / "fix.diff"), step=77)
