"""Small trainings for the tests of experiments: each step is taped and examined, as in a watched run."""

from gradproof.experiments.evidence import Evidence
from gradproof.tape.record import record


def examine(experiment, model, optimizers, step, steps=4, memory=None, models=None):
    """The verdicts of an experiment over a few taped steps; `step()` runs a whole step and returns its loss."""
    memory = {} if memory is None else memory
    optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
    names = {p: n for n, p in model.named_parameters()}
    losses, verdicts = [], []
    for number in range(1, steps + 1):
        with record(names=names.get) as tape:
            loss = step()
        assert not tape.broken
        losses.append(float(loss))
        verdicts += experiment(
            Evidence(tape, number, models or {"": model}, optimizers, losses, memory=memory)
        )
    return verdicts


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
