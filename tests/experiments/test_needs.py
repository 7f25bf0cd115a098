"""What a question needs: each word of the table is looked for in steps that have it and in steps that do not."""

import doctest
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from experiment_steps import evidence_of
from taped_trainings import evidence_of_step
from torch import nn

from gradproof.examination.worker import Here, Worker
from gradproof.experiments import needs
from gradproof.experiments.needs import HAS, why_not
from gradproof.experiments.table import BY_NAME, NEEDS
from gradproof.instruments.evidence import Evidence
from gradproof.instruments.update import BY_HAND
from gradproof.record.schema import DOES_NOT_APPLY, OUT_OF_REACH
from gradproof.tape.shards import GATHERED, PARTS
from gradproof.tape.specimen import Facts, save

X, Y = torch.randn(16, 4), torch.randn(16, 1)
LABELS = torch.arange(16) % 3
TOKENS = torch.tensor([[1, 2, 3, 4, 0, 0], [2, 3, 4, 5, 6, 1], [3, 1, 2, 0, 0, 0], [4, 5, 1, 2, 3, 0]])


def regression(**options):
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))
    return evidence_of(model, lambda: F.mse_loss(model(X), Y), **options)


def by_hand():
    specimen = regression().specimen
    records = [replace(record, kind=BY_HAND) for record in specimen.optimizer_records]
    return Evidence(replace(specimen, optimizer_records=records))


def of_nothing_at_all():
    """No model, no optimizer, nothing but a loss of a number."""
    weight = torch.ones(2, requires_grad=True)

    def step():
        (weight * 2).sum().backward()

    return evidence_of_step(step, {}, [])


def without_weights():
    return evidence_of_step(lambda: torch.ones(2).mul(2).sum(), {}, [])


def classes():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.LayerNorm(8), nn.Dropout(0.5), nn.Linear(8, 3))
    return evidence_of(model, lambda: F.cross_entropy(model(X), LABELS), losses=[1.0])


def yes_or_no():
    model = nn.Linear(4, 1)
    return evidence_of(model, lambda: F.binary_cross_entropy_with_logits(model(X), (Y > 0).float()))


class Speaker(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(7, 8), nn.Linear(8, 7)
        self.rnn = nn.GRU(8, 8, batch_first=True)

    def forward(self, tokens):
        x, _ = self.rnn(self.table(tokens))
        return self.head(x + F.scaled_dot_product_attention(x, x, x))


def language():
    model = Speaker()
    return evidence_of(
        model, lambda: F.cross_entropy(model(TOKENS).flatten(0, 1), TOKENS.roll(-1, 1).flatten())
    )


def deep():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    return evidence_of(model, lambda: model(X).pow(2).mean())


def half():
    model = nn.Linear(4, 1).bfloat16()
    return evidence_of(model, lambda: F.mse_loss(model(X.bfloat16()), Y.bfloat16()))


def maps():
    model = nn.Conv2d(1, 1, 3, padding=1)
    images, wanted = torch.randn(4, 1, 8, 8), torch.randn(4, 1, 8, 8)
    return evidence_of(model, lambda: F.mse_loss(model(images), wanted))


def penalised():
    """Two backwards, and a derivative inside the loss; two optimizers, and an average of the weights."""
    model, average = nn.Linear(4, 1), nn.Linear(4, 1)
    optimizers = [torch.optim.SGD([p], lr=0.01) for p in model.parameters()]

    def step():
        x = X.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        slope.pow(2).mean().backward()
        F.mse_loss(model(X), Y).backward()
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.1)

    return evidence_of_step(step, {"model": model, "average": average}, optimizers)


def policy():
    model = nn.Linear(4, 3)
    actions, returns = LABELS[:, None], torch.randn(16)

    def loss():
        return -(model(X).log_softmax(1).gather(1, actions).squeeze(1) * returns).mean()

    return evidence_of(model, loss)


class Outside(torch.autograd.Function):
    """A tanh that NumPy computes."""

    @staticmethod
    def forward(ctx, x):
        y = torch.from_numpy(np.tanh(x.detach().numpy()))
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, g):
        return g * (1 - ctx.saved_tensors[0] ** 2)


def opaque():
    model = nn.Linear(4, 1)
    return evidence_of(model, lambda: F.mse_loss(Outside.apply(model(X)), Y))


def with_facts(**found):
    return Evidence(replace(regression().specimen, facts=Facts(**found)))


SOME = [{"a": 1}, {"b": 2}]
FACTS = {
    "_evaluated": {"line": []},
    "_fetched": SOME,
    "_orders": SOME,
    "_samplers": SOME,
}
# need -> a step that has it, and one that does not
STEPS = {
    "models": (regression, of_nothing_at_all),
    "parameters": (regression, without_weights),
    "optimizers": (regression, of_nothing_at_all),
    "whole updates": (regression, lambda: with_facts(sharded=GATHERED)),
    "updates by hand": (by_hand, regression),
    "two optimizers": (penalised, regression),
    "targets": (regression, of_nothing_at_all),
    "values": (regression, classes),
    "yes or no": (yes_or_no, regression),
    "tokens": (language, classes),
    "attention": (language, classes),
    "activations": (classes, regression),
    "half precision": (half, regression),
    "several backwards": (penalised, regression),
    "maps": (maps, regression),
    "black boxes": (opaque, regression),
    "losses": (classes, of_nothing_at_all),
}


def test_every_need_has_a_look_and_a_test():
    assert set(HAS) == set(NEEDS)
    assert {*STEPS, *(f"facts:{name}" for name in FACTS)} == set(NEEDS)


@pytest.mark.parametrize("need", STEPS)
def test_a_need_is_seen_where_it_is_and_not_where_it_is_not(need):
    there, missing = STEPS[need]
    assert HAS[need](there()) and not HAS[need](missing())


@pytest.mark.parametrize("name", FACTS)
def test_a_fact_that_was_seen(name):
    assert HAS[f"facts:{name}"](with_facts(**{name.removeprefix("_"): FACTS[name]}))
    assert not HAS[f"facts:{name}"](regression())


def test_a_question_without_an_object_is_not_asked(tmp_path):
    path = save(regression().specimen, tmp_path)
    said = Worker().ask("where_does_attention_look", [str(path)])
    assert said["not_asked"] == "does not apply: the step has no attention over keys"
    said = Here().ask(1.0, what="ask", question="is_it_precision", specimens=[str(path)])
    assert json.loads(json.dumps(said))["not_asked"].startswith(f"{DOES_NOT_APPLY}: ")
    assert "verdicts" in Worker().ask("do_shapes_meet", [str(path)])


@pytest.mark.parametrize("sharded", [GATHERED, PARTS])
def test_what_takes_the_whole_is_refused_of_a_part_and_stays_open(sharded):
    step = with_facts(sharded=sharded)
    for name in ("is_the_step_too_long_or_short", "does_the_optimizer_do_what_was_meant"):
        assert why_not(BY_NAME[name], step).startswith(f"{OUT_OF_REACH}: it ")
    assert bool(why_not(BY_NAME["is_the_gradient_right"], step)) == (sharded == PARTS)
    assert not why_not(BY_NAME["where_was_it_born"], step)


def test_what_a_step_lacks_is_said_in_words():
    for question in BY_NAME.values():
        said = why_not(question, of_nothing_at_all())
        assert not said or said.startswith(f"{DOES_NOT_APPLY}: the step has no "), said
    assert doctest.testmod(needs).failed == 0


def test_memory_catches_up_with_steps_that_lacked_something(tmp_path, monkeypatch):
    """What a question keeps of the steps is complete, once it is asked at all."""
    from gradproof.experiments.data import leaks

    paths = [str(save(regression(step=step).specimen, tmp_path)) for step in (1, 2)]
    seen = []

    def remember(evidence):
        seen.append(evidence.step)
        yield from ()

    monkeypatch.setattr(leaks, "has_validation_been_trained_on", remember)
    worker = Worker()
    assert "not_asked" in worker.ask("has_validation_been_trained_on", paths[:1]) and not seen
    monkeypatch.setitem(HAS, "facts:_evaluated", lambda evidence: True)
    assert "verdicts" in worker.ask("has_validation_been_trained_on", paths) and seen == [1, 2]
