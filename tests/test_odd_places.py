"""Scripts under `python -O` and `python -W error`, and models on the meta device: watched, or told why not."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from gradproof.probes.watch import watch
from gradproof.record.run import open_run

WARNS = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
data = torch.utils.data.DataLoader(torch.randn(96, 4), 8, shuffle=True)
for x in data:
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    print(loss.item())
assert not __debug__, "asserted"
try:
    nn.functional.mse_loss(torch.ones(3), torch.ones(3, 1))  # PyTorch warns of the shapes
    print("warned")
except UserWarning:
    print("raised")
"""


@pytest.mark.slow
@pytest.mark.parametrize("options", [["-O"], ["-OO"], ["-O", "-W", "error"]], ids=" ".join)
def test_python_with_options(options, tmp_path):
    (tmp_path / "train.py").write_text(WARNS)
    watched = ["-m", "gradproof", "run", "--quiet", "--out", "run"]
    plain, ours = (
        subprocess.run(
            [sys.executable, *options, *words, "train.py"], cwd=tmp_path, capture_output=True, text=True
        )
        for words in ([], watched)
    )
    assert plain.returncode == ours.returncode == 0, ours.stderr
    assert ours.stdout == plain.stdout and plain.stdout.endswith(
        "raised\n" if "-W" in options else "warned\n"
    )
    run = open_run(tmp_path / "run")
    assert len(run) == 12 and run.info["failure"] is None and run.info["cost"]["taped_steps"] >= 3
    assert "Tested, and not the cause" in ours.stderr and "gradproof stopped" not in ours.stderr


def steps(model, optimizer, device):
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(8, 4, device=device)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def test_a_model_on_the_meta_device_has_nothing_to_watch(tmp_path):
    model = nn.Linear(4, 1, device="meta")
    optimizer = torch.optim.AdamW(model.parameters())
    with (
        pytest.warns(UserWarning, match="stopped watching at step 0 .*every parameter is on the meta device"),
        watch(model, optimizer, out=tmp_path / "run"),
    ):
        steps(model, optimizer, "meta")
    assert "meta device" in open_run(tmp_path / "run").info["failure"]


def test_a_part_on_the_meta_device_is_left_out(tmp_path):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(4, 1), nn.Linear(4, 1, device="meta")

        def forward(self, x):
            self.unused(torch.ones(8, 4, device="meta")).sum().backward()
            return self.used(x)

    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    with watch(model, optimizer, out=tmp_path / "run"):
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
    run = open_run(tmp_path / "run")
    assert run.info["failure"] is None and len(run) == 4
    changed = {p["name"]: p.get("changed") for p in run.info["parameters"]}
    assert changed == {"used.weight": True, "used.bias": True, "unused.weight": None, "unused.bias": None}
