"""What watching does for each of many backwards of a step is little, the same for all, and waits for no GPU."""

import sys
import warnings

import pytest
import torch
from torch import nn

from gradproof.probes.watch import watch
from gradproof.record.run import open_run


class OurCalls:
    """How often gradproof calls torch; no mode is shown what gradproof does."""

    count = 0

    def __enter__(self):
        sys.setprofile(self.called)
        return self

    def __exit__(self, *error):
        sys.setprofile(None)

    def called(self, frame, event, function):
        if event == "c_call" and "/gradproof/" in frame.f_code.co_filename:
            of_torch = "_VariableFunctions" in getattr(function, "__qualname__", "")
            self.count += of_torch or isinstance(getattr(function, "__self__", None), torch.Tensor)


def waiting_is_an_error(wanted):
    if torch.cuda.is_available():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch calls it a prototype
            torch.cuda.set_sync_debug_mode("error" if wanted else "default")


def train(path, micro_batches, schedule, steps=3, device="cpu"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler(device, init_scale=4.0)
    x, losses = torch.randn(8, 4, device=device), []
    with OurCalls() as calls, watch(model, optimizer, out=path, schedule=schedule, experiments=False):
        for _ in range(steps):
            optimizer.zero_grad()
            total = torch.zeros((), device=device)
            waiting_is_an_error(device == "cuda")
            try:
                for _ in range(micro_batches):
                    loss = nn.functional.mse_loss(model(x), x[:, :1]) / micro_batches
                    scaler.scale(loss).backward()
                    total += loss.detach()
            finally:
                waiting_is_an_error(False)
            losses.append(total.item())
            scaler.step(optimizer)
            scaler.update()
    run = open_run(path)
    assert run.steps["loss"] == pytest.approx(losses, rel=1e-5) and len(run) == steps
    assert set(run.steps["backwards"]) == {micro_batches} and (run.steps["loss_scale"] == 4.0).all()
    return calls.count / steps


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("schedule, most", [("light every step", 5), ("all every step", 24)])
def test_the_work_for_a_backward_is_small_and_constant(schedule, most, tmp_path):
    few, many, more = (train(tmp_path / str(n), n, schedule) for n in (8, 72, 136))
    assert 0 < (many - few) / 64 <= most
    assert more - many == pytest.approx(many - few, rel=0.05), "it does not grow with their number"


def test_outputs_of_a_few_micro_batches_stand_for_all(tmp_path):
    counts = {}
    for n in (2, 4, 50):
        train(tmp_path / str(n), n, "all every step")
        run = open_run(tmp_path / str(n))
        counts[n] = run.table("output", "zero").values.sum()
    assert counts[4] == pytest.approx(2 * counts[2], rel=0.2) and counts[50] == pytest.approx(
        counts[4], rel=0.2
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("schedule", ["light every step", "all every step"])
def test_no_backward_waits_for_a_gpu(schedule, tmp_path):
    train(tmp_path / "run", 16, schedule, steps=4, device="cuda")
