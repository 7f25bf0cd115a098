"""Parameters that no optimizer has: forgotten, replaced, kept in a plain list; and teachers, which none should have."""

import pytest
import torch
import torch.nn.functional as F
from experiment_steps import confirmed_ids
from own_updates import watch_script
from taped_trainings import evidence_of_step, examine, ids, plain_step
from torch import nn

from gradproof.experiments.steps.owners import does_the_optimizer_hold_everything
from gradproof.probes.names import Names


class Stack(nn.Module):
    def __init__(self, registered=True):
        super().__init__()
        layers = [nn.Linear(4, 4) for _ in range(2)]
        self.layers = nn.ModuleList(layers) if registered else layers
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x)


def verdicts(model, parameters, change=None):
    optimizer = torch.optim.SGD(parameters, lr=0.01)
    if change:
        change(model)
    x = torch.randn(8, 4)
    step = plain_step(model, optimizer, lambda: model(x).pow(2).mean())
    return examine(does_the_optimizer_hold_everything, model, optimizer, step)


def replace_layers(model):
    model.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])


def test_only_the_head_in_the_optimizer():
    model = Stack()
    found = verdicts(model, model.head.parameters())
    assert ids(found) == {"param-not-updated/not-in-optimizer"} and found[0].where == "layers.0.weight"


def test_layers_replaced_after_the_optimizer_was_made():
    model = Stack()
    assert ids(verdicts(model, model.parameters(), replace_layers)) == {"param-not-updated/replaced"}


def test_layers_in_a_plain_list():
    model = Stack(registered=False)
    assert ids(verdicts(model, model.parameters())) == {"param-not-updated/unregistered"}


class Taught(nn.Module):
    def __init__(self):
        super().__init__()
        self.student, self.teacher = Stack(), Stack()

    def forward(self, x):
        return self.student(x) - self.teacher(x)


@pytest.mark.parametrize("make", [Stack, Taught])
def test_all_there_or_a_teacher_that_only_follows(make):
    model = make()
    trained = model.student if isinstance(model, Taught) else model
    assert not verdicts(model, trained.parameters())


def test_frozen_parts_are_silent():
    model = Stack()
    model.layers.requires_grad_(False)
    assert not verdicts(model, model.head.parameters())


def two_models(judge_in_eval):
    """An encoder and a decoder of their own; only the decoder is given to the optimizer."""
    torch.manual_seed(0)
    encoder, decoder = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), Stack()
    encoder.train(not judge_in_eval)
    optimizer = torch.optim.SGD(decoder.parameters(), lr=0.01)
    x = torch.randn(8, 4)
    step = plain_step(decoder, optimizer, lambda: decoder(encoder(x)).pow(2).mean())
    return examine(does_the_optimizer_hold_everything, decoder, optimizer, step)


def test_a_model_of_its_own_that_no_optimizer_has_is_named():
    (found,) = two_models(judge_in_eval=False)[1:2]
    assert found.id == "param-not-updated/not-in-optimizer" and found.where == "encoder"


def test_a_model_that_only_judges_is_silent():
    assert not two_models(judge_in_eval=True)


def test_a_plain_list_is_named_with_its_line():
    model = Stack(registered=False)
    (found, *_) = verdicts(model, model.parameters())
    assert found.where.startswith("layers (test_owners.py:")


CRITIC_FIRST = """
import torch
from torch import nn
torch.manual_seed(0)
G, D = nn.Linear(3, 4), nn.Linear(4, 1)
d_solver = torch.optim.RMSprop(D.parameters(), lr=1e-3)
HELD
for step in range(4):
    for _ in range(3):
        loss = D(G(torch.randn(8, 3))).mean() - D(torch.randn(8, 4)).mean()
        loss.backward()
        d_solver.step()
        G.zero_grad(), D.zero_grad()
    loss = -D(G(torch.randn(8, 3))).mean()
    loss.backward()
    STEP
    G.zero_grad(), D.zero_grad()
"""


@pytest.mark.parametrize("forgotten", [False, True])
def test_a_generator_that_waits_for_its_turn_has_an_optimizer(forgotten, tmp_path, monkeypatch):
    held = "" if forgotten else "g_solver = torch.optim.RMSprop(G.parameters(), lr=1e-3)"
    text = CRITIC_FIRST.replace("HELD", held).replace(
        "STEP", "d_solver.step()" if forgotten else "g_solver.step()"
    )
    found = watch_script(tmp_path, monkeypatch, text)
    said, _ = found.ask("does_the_optimizer_hold_everything", steps=(1,))
    assert [v.id for v in said] == (["param-not-updated/not-in-optimizer"] if forgotten else [])


class Traced(torch.optim.SGD):
    """Steps what had a gradient when it was traced last, which is when some had none."""

    kept = None

    def step(self, closure=None):
        held = self.param_groups[0]["params"]
        if self.kept is None or any(p.grad is None for p in held):
            self.kept = [p.grad is not None for p in held]
        gradients = [p.grad for p in held]
        for p, kept in zip(held, self.kept, strict=True):
            p.grad = p.grad if kept else None
        super().step()
        for p, gradient in zip(held, gradients, strict=True):
            p.grad = gradient


@pytest.mark.parametrize("kind", [Traced, torch.optim.SGD])
@pytest.mark.parametrize("convolves", [False, True])
def test_steps_that_pass_over_what_they_changed_before(kind, convolves):
    torch.manual_seed(0)
    if convolves:
        model, x = nn.Sequential(nn.Conv1d(2, 4, 3), nn.ReLU(), nn.Conv1d(4, 1, 3)), torch.randn(8, 2, 9)
    else:
        model, x = Stack(), torch.randn(8, 4)
    first, last = next(iter(model.named_parameters()))[0], list(model.children())[-1]
    optimizer, count = kind(model.parameters(), lr=0.01), iter(range(100))

    def step():
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        if next(count) == 2:
            for p in set(model.parameters()) - set(last.parameters()):
                p.grad = None
        optimizer.step()
        return loss.detach()

    found = examine(does_the_optimizer_hold_everything, model, optimizer, step, steps=13)
    assert ids(found) == ({"param-not-updated/passed-over"} if kind is Traced else set())
    assert all(verdict.where.startswith(first) for verdict in found)


def test_who_trains_its_parts_in_turns_passes_over_nothing():
    model = Stack()
    groups = [{"params": model.layers.parameters()}, {"params": model.head.parameters()}]
    optimizer, count = torch.optim.SGD(groups, lr=0.01), iter(range(100))
    x = torch.randn(8, 4)

    def step():
        optimizer.param_groups[next(count) // 10]["lr"] = 0.0  # layers at first, the head later
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    assert ids(examine(does_the_optimizer_hold_everything, model, optimizer, step, steps=13)) == set()


class Adapted(nn.Module):
    """A layer with a branch of low rank beside it, which begins at zero."""

    def __init__(self):
        super().__init__()
        self.base, self.down, self.up = (
            nn.Linear(4, 4),
            nn.Linear(4, 2, bias=False),
            nn.Linear(2, 4, bias=False),
        )
        self.norm = nn.LayerNorm(4)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.norm(self.base(x) + self.up(self.down(x)))


@pytest.mark.parametrize(
    "trained, said",
    [("norm", {"param-not-updated/frozen"}), ("norm up down", set()), ("norm base up down", set())],
)
def test_a_branch_that_is_frozen_at_zero(trained, said):
    model = Adapted()
    nn.init.zeros_(model.base.bias)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name.partition(".")[0] in trained.split()
    found = verdicts(model, [p for p in model.parameters() if p.requires_grad])
    assert ids(found) == said
    assert not said or (found[0].where.startswith("up.weight") and found[0].confidence == "proven")


def test_adapters_that_a_model_was_given_for_a_second_stage_have_names(tmp_path):
    class Adapted(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base
            self.lora_A = nn.Parameter(torch.randn(2, base.in_features), requires_grad=False)
            self.lora_B = nn.Parameter(torch.zeros(base.out_features, 2), requires_grad=False)

        def forward(self, x):
            return self.base(x) + x @ self.lora_A.mT @ self.lora_B.mT

    names = Names()
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    names.learn(model.parameters())
    model[0] = Adapted(model[0])
    names.learn(model[1].parameters())
    assert names.of_parameter(model[0].lora_B) == "0.lora_B"
    assert names.of_parameter(model[0].base.weight) == "0.weight"  # a name is given once


class Values(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(3, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.two(torch.relu(self.one(x)))


@pytest.mark.parametrize("every", [3, 0])
def test_a_target_network_that_gets_a_gradient_is_not_to_be_trained(every):
    """Its targets were not detached, but it is overwritten every so often; what nobody changes is left out."""
    torch.manual_seed(0)
    model, target, memory, said = Values(), Values(), {}, []
    optimizer = torch.optim.Adam(model.parameters())
    for number in range(8):
        now, then, reward = torch.randn(6, 3), torch.randn(6, 3), torch.randn(6)
        loss = lambda now=now, then=then, reward=reward: F.mse_loss(  # noqa: E731
            model(now)[:, 0], reward + 0.9 * target(then).max(dim=1).values
        )
        train = plain_step(model, optimizer, loss)
        evidence = evidence_of_step(train, {"": model}, [optimizer], number, (), None, memory)
        said.append(confirmed_ids(does_the_optimizer_hold_everything, evidence))
        if every and number % every == 0:
            target.load_state_dict(model.state_dict())
    assert said[0] == ["param-not-updated/not-in-optimizer"]  # nothing is known of it yet
    assert said[1:] == [["param-not-updated/not-in-optimizer"] if not every else []] * 7
