"""Evidence of small training steps for the tests of experiments."""

from __future__ import annotations

import torch

from gradproof.experiments.evidence import Evidence
from gradproof.tape.record import record


def evidence_of(model, make_loss, step=1, memory=None, optimizer=None, losses=()):
    """One taped step of a model: `make_loss()` is its forward pass."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
    with record({p: n for n, p in model.named_parameters()}) as tape:
        optimizer.zero_grad()
        loss = make_loss()
        loss.backward()
        optimizer.step()
    assert not tape.broken, tape.broken
    memory = {} if memory is None else memory
    return Evidence(tape, step, {"": model}, [optimizer], [*losses, float(loss.detach())], memory=memory)


def confirmed_ids(experiment, evidence):
    return [v.id for v in experiment(evidence) if v.verdict == "confirmed"]


def excluded_families(experiment, evidence):
    return [v.family for v in experiment(evidence) if v.verdict == "excluded"]
