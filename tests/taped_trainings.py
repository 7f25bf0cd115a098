"""Small trainings for the tests of experiments: each step becomes a specimen on disk and is examined as it is read."""

import tempfile
from dataclasses import asdict

import torch

from gradproof.examination.sightings import Sightings
from gradproof.experiments.needs import why_not
from gradproof.experiments.table import BY_NAME
from gradproof.experiments.verdict import Verdict
from gradproof.instruments.evidence import Evidence
from gradproof.probes.capture import capture
from gradproof.tape.record import Recorder
from gradproof.tape.specimen import load, save


def specimen_of(step, models, optimizers, number=1, losses=(), facts=None, names=None):
    """What `step()` does, taped, written to a file and read again; and what it returned."""
    if names is None:
        names = {
            p: f"{prefix}.{n}" if prefix else n
            for prefix, m in models.items()
            for n, p in m.named_parameters()
        }
    recorder = Recorder(names)
    recorder.start()
    try:
        result = step()
    finally:
        tape = recorder.stop()
    assert not tape.broken, tape.broken
    losses = [*losses, float(torch.as_tensor(result).detach())] if result is not None else list(losses)
    specimen = capture(recorder.state, number, models, optimizers, losses, facts)
    with tempfile.TemporaryDirectory() as directory:
        return load(save(specimen, directory)), result


def evidence_of_step(step, models, optimizers, number=1, losses=(), facts=None, memory=None, names=None):
    specimen, _ = specimen_of(step, models, optimizers, number, losses, facts, names)
    return Evidence(specimen, {} if memory is None else memory)


def examine(experiment, model, optimizers, step, steps=4, memory=None, models=None, facts=None):
    """The verdicts of an experiment over a few taped steps; `step()` runs a whole step and returns its loss.

    What must be seen at several steps is confirmed as the examiner would.
    """
    memory = {} if memory is None else memory
    optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
    names = {p: n for n, p in model.named_parameters()}
    losses, verdicts, sightings = [], [], Sightings()
    for number in range(1, steps + 1):
        specimen, loss = specimen_of(step, models or {"": model}, optimizers, number, losses, facts, names)
        losses.append(float(loss))
        evidence = Evidence(specimen, memory)
        verdicts += as_said(experiment, evidence, sightings)
        memory.setdefault("noted", {}).update(evidence.noted)
    return verdicts


def as_said(experiment, evidence, sightings):
    """The verdicts on one step, as an examiner says them that has made these sightings before."""
    question = BY_NAME.get(experiment.__name__)
    found = list(experiment(evidence))
    if question is None:
        return found
    assert not any(v.id for v in found) or not why_not(question, evidence)  # or it would never be asked
    said, _ = sightings.hear(question, map(asdict, found))
    return [Verdict(**verdict) for verdict in said]


def plain_step(model, optimizer, make_loss):
    """zero_grad, forward, backward, step."""

    def step():
        optimizer.zero_grad()
        loss = make_loss()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def ids(verdicts, level=None):
    return {v.id for v in verdicts if v.verdict == "confirmed" and (level is None or v.level == level)}
