"""Runs with recorded steps for the tests of asking, written without a session: what is taped depends on no clock."""

import torch
from taped_trainings import plain_step, specimen_of
from torch import nn
from torch.nn import functional as F

from gradproof.record.writer import RunWriter
from gradproof.tape.specimen import save


def write_run(path, step, model, optimizer, steps=2, **info):
    """A run of some steps, each of them recorded."""
    facts = {"command": ["train.py"], "versions": {"torch": "2.0"}, "directory": "/home/someone"}
    writer = RunWriter(path, {**facts, **info})
    losses = []
    for number in range(steps):
        specimen, loss = specimen_of(step, {"": model}, [optimizer], number, losses)
        losses.append(float(loss))
        save(specimen, writer.path / "specimens")
        writer.write_step({"step": number, "loss": losses[-1], "optimizer": 0, "lr": 0.1, "backwards": 1})
    writer.set_info(ended=1.0, exit_code=0)
    writer.close()
    return writer.path


def classifier(path, after=lambda scores: scores, x=None, optimizer=None, steps=2, seed=0, **info):
    """Twelve samples in three classes; `after` is done to the scores before the loss."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    x = torch.randn(12, 4) if x is None else x
    labels = torch.arange(12) % 3
    made = optimizer(model) if optimizer else torch.optim.SGD(model.parameters(), lr=0.1)

    def make_loss():
        return F.cross_entropy(after(model(x)), labels)

    return write_run(path, plain_step(model, made, make_loss), model, made, steps, **info)
