"""Evidence of small training steps for the tests of experiments."""

from __future__ import annotations

import torch
from taped_trainings import evidence_of_step, plain_step

from gradproof.experiments.needs import why_not
from gradproof.experiments.table import BY_NAME


def evidence_of(model, make_loss, step=1, memory=None, optimizer=None, losses=(), facts=None):
    """One taped step of a model, read back from a file: `make_loss()` is its forward pass."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
    train = plain_step(model, optimizer, make_loss)
    return evidence_of_step(train, {"": model}, [optimizer], step, losses, facts, memory)


def confirmed_ids(experiment, evidence):
    found = [v.id for v in experiment(evidence) if v.verdict == "confirmed"]
    question = BY_NAME.get(experiment.__name__)
    assert not found or question is None or not why_not(question, evidence)  # or it would never be asked
    return found


def excluded_families(experiment, evidence):
    return [v.family for v in experiment(evidence) if v.verdict == "excluded"]
