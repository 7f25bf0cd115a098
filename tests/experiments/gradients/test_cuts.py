"""Cut paths, whole and in part, named by line; detached targets, teachers and truncated recurrences are silent."""

import pytest
import torch
import torch.nn.functional as F
from experiment_steps import confirmed_ids, evidence_of
from taped_trainings import examine, ids, plain_step
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradproof.experiments.gradients.cuts import is_a_path_cut


def line_of(text):
    with open(__file__) as file:
        return next(i for i, line in enumerate(file, 1) if line.rstrip().endswith(f"# {text}"))


class Two(nn.Module):
    def __init__(self, between):
        super().__init__()
        self.encoder, self.decoder, self.between = nn.Linear(4, 4), nn.Linear(4, 4), between

    def forward(self, x):
        return self.decoder(self.between(self.encoder(x)))


def through_numpy(h):
    return torch.from_numpy(h.detach().numpy() * 1.0)  # numpy


def through_data(h):
    return h.data.tanh()  # data


@torch.no_grad()
def without_grad(h):
    return h.tanh()  # no_grad


def verdicts(model, make_loss, steps=4):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return examine(is_a_path_cut, model, optimizer, plain_step(model, optimizer, make_loss), steps=steps)


@pytest.mark.parametrize(
    "between, name", [(through_numpy, "numpy"), (through_data, "data"), (without_grad, "no_grad")]
)
def test_encoder_behind_a_cut(between, name):
    model, x = Two(between), torch.randn(8, 4)
    found = verdicts(model, lambda: model(x).pow(2).mean())
    assert ids(found, "problem") == {"detached-graph/cut"}
    assert f"test_cuts.py:{line_of(name)}" in found[0].where


class Attention(nn.Module):
    def __init__(self, cut):
        super().__init__()
        self.qkv, self.cut = nn.Linear(8, 24), cut

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        weights = (q @ k.mT).softmax(dim=-1)
        return (weights.data if self.cut else weights) @ v  # attention


@pytest.mark.parametrize("cut", [True, False])
def test_rows_of_a_fused_layer_behind_a_cut(cut):
    model, x = Attention(cut), torch.randn(2, 5, 8)
    found = verdicts(model, lambda: model(x).pow(2).mean())
    assert ids(found) == ({"detached-graph/part-cut"} if cut else set())
    assert not cut or f":{line_of('attention')}" in found[0].where


@pytest.mark.parametrize("detached", [True, False])
def test_units_that_only_a_target_turns_on(detached):
    """A value of the next state is the target of this one's: what is off here and on there has no gradient to get."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
    here, there = torch.randn(1, 4), -torch.randn(1, 4)

    def loss():
        target = 1 + 0.9 * model(there)
        return F.mse_loss(model(here), target.detach() if detached else target)

    assert ids(verdicts(model, loss)) == set()


def test_what_autograd_keeps_for_itself_is_no_cut():
    """Two heads, of which one optimizer's loss wants the first only: softmax keeps its result by a detach."""

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 1), nn.Linear(4, 3)

        def forward(self, x):
            hidden = self.body(x).exp()
            return self.one(hidden), self.other(hidden).softmax(1)

    model, x = Heads(), torch.randn(8, 4)
    assert ids(verdicts(model, lambda: model(x)[0].pow(2).mean())) == set()


class Positions(nn.Module):
    """Tokens and their places: an operation and a detach of its result in one line."""

    def __init__(self, cut):
        super().__init__()
        self.tokens, self.places, self.head, self.cut = (
            nn.Embedding(9, 4),
            nn.Embedding(5, 4),
            nn.Linear(4, 9),
            cut,
        )

    def forward(self, ids):
        at = torch.arange(5)
        places = self.places(at).detach() if self.cut else self.places(at)  # places
        return self.head(self.tokens(ids) + places)


@pytest.mark.parametrize("cut", [True, False])
def test_a_detach_in_the_line_of_what_it_detaches(cut):
    model, ids_of_tokens = Positions(cut), torch.randint(0, 9, (3, 5))
    found = verdicts(
        model, lambda: F.cross_entropy(model(ids_of_tokens).flatten(0, 1), ids_of_tokens.flatten())
    )
    assert ids(found, "problem") == ({"detached-graph/cut"} if cut else set())
    assert not cut or f":{line_of('places')}" in found[0].where


@pytest.mark.parametrize("cut", [True, False])
def test_a_network_that_cuts_what_a_layer_puts_out(cut):
    class Sharpened(Two):
        def forward(self, x):
            weights = self.encoder(x).softmax(1).detach() if cut else self.encoder(x).softmax(1)
            return self.decoder(x * weights)

    model, x = Sharpened(None), torch.randn(8, 4)
    assert ids(verdicts(model, lambda: model(x).pow(2).mean()), "problem") == (
        {"detached-graph/cut"} if cut else set()
    )


class Variational(Two):
    def forward(self, x):
        code = self.encoder(x)
        return self.decoder(self.between(code)), code


class ByHand(torch.autograd.Function):
    """Its forward runs without gradient, and its backward leads back all the same."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clamp(min=0) ** 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2 * ctx.saved_tensors[0].clamp(min=0)


@pytest.mark.parametrize(
    "between, warned", [(without_grad, True), (torch.tanh, False), (ByHand.apply, False)]
)
def test_code_sampled_without_gradient_is_warned_of(between, warned):
    model, x = Variational(between), torch.randn(8, 4)

    def loss():
        out, code = model(x)
        return F.mse_loss(out, x) + 0.1 * code.pow(2).mean()

    found = verdicts(model, loss)
    assert ids(found, "warning") == ({"detached-graph/between-modules"} if warned else set())
    assert not ids(found, "problem")


class Towers(nn.Module):
    """Two blocks that are computed again in backward, of convolutions or of a recurrence."""

    def __init__(self, recurrent, reentrant):
        super().__init__()
        first = (
            nn.GRU(4, 4, batch_first=True)
            if recurrent
            else nn.Sequential(nn.Conv1d(6, 6, 3, padding=1), nn.ReLU())
        )
        self.first, self.second, self.head = first, nn.Linear(4, 4), nn.Linear(4, 1)
        self.recurrent, self.reentrant = recurrent, reentrant

    def enter(self, x):
        return self.first(x)[0] if self.recurrent else self.first(x)

    def forward(self, x):
        h = checkpoint(self.enter, x, use_reentrant=self.reentrant)  # checkpoint
        return self.head(checkpoint(self.second, h, use_reentrant=self.reentrant))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("recurrent", [True, False])
@pytest.mark.parametrize(
    "reentrant, asks, cut", [(True, False, True), (True, True, False), (False, False, False)]
)
def test_a_checkpoint_that_nobody_comes_back_through(recurrent, reentrant, asks, cut):
    model, x = Towers(recurrent, reentrant), torch.randn(8, 6, 4, requires_grad=asks)
    found = verdicts(model, lambda: model(x).pow(2).mean())
    assert ids(found, "problem") == ({"detached-graph/cut"} if cut else set())
    if cut:
        assert f"test_cuts.py:{line_of('checkpoint')}" in found[0].where and found[0].confidence == "proven"
        assert "use_reentrant=False" in found[0].fix


def test_loss_made_anew():
    model, x = Two(torch.tanh), torch.randn(8, 4)
    found = verdicts(model, lambda: torch.tensor(model(x).pow(2).mean().item(), requires_grad=True), steps=1)
    assert ids(found) == {"detached-graph/new-tensor"}


def test_truncated_recurrence_and_detached_target_are_silent():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head = nn.GRUCell(4, 6), nn.Linear(6, 4)

    model, x = Recurrent(), torch.randn(6, 3, 4)

    def loss():
        state = torch.zeros(3, 6)
        total = 0.0
        for t in range(5):
            if t == 3:
                state = state.detach()
            state = model.cell(x[t], state)
            out = model.head(state)
            total = total + F.mse_loss(out, x[t + 1]) + F.mse_loss(out, out.detach() + 0.1)
        return total

    assert not verdicts(model, loss)


def test_players_that_wait_for_each_other_are_silent():
    model = nn.ModuleDict({"g": nn.Linear(2, 2), "d": nn.Linear(2, 1)})
    opt_g, opt_d = (torch.optim.SGD(model[k].parameters(), lr=0.01) for k in "gd")
    turn = [0]

    def step():
        turn[0] += 1
        fake = model["g"](torch.randn(4, 2))
        mine, other = (opt_d, fake.detach()) if turn[0] % 2 else (opt_g, fake)
        mine.zero_grad()
        loss = model["d"](other).mean()
        loss.backward()
        mine.step()
        return loss.detach()

    assert not ids(examine(is_a_path_cut, model, [opt_g, opt_d], step, steps=8), "problem")


@pytest.mark.parametrize("how", ["sample", "rsample", "action"])
def test_a_sample_that_a_layer_goes_on_with(how):
    model = nn.ModuleDict({"encoder": nn.Linear(6, 4), "decoder": nn.Linear(2, 6)})
    x = torch.randn(16, 6)

    def loss():
        mean, deviation = model["encoder"](x).chunk(2, 1)
        q = torch.distributions.Normal(mean, deviation.exp())
        if (
            how == "action"
        ):  # a policy: the reward weighs the log-probability, a critic's guess of it is apart
            action = q.sample()
            return -(q.log_prob(action).sum(1) * x[:, 0]).mean() + model["decoder"](action).pow(2).mean()
        z = q.sample() if how == "sample" else q.rsample()
        kl = torch.distributions.kl_divergence(q, torch.distributions.Normal(0.0, 1.0)).sum(1)
        return (model["decoder"](z) - x).pow(2).mean() + kl.mean()

    said = confirmed_ids(is_a_path_cut, evidence_of(model, loss))
    assert said == (["detached-graph/sample"] if how == "sample" else [])


def test_codes_that_nothing_is_near_to():
    """A codebook: the nearest row is looked up, and gradient goes straight through."""
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {"encoder": nn.Linear(6, 4), "codes": nn.Embedding(16, 4), "decoder": nn.Linear(4, 6)}
    )
    x = torch.randn(5, 6)

    def loss():
        z = model["encoder"](x)
        q = model["codes"](torch.cdist(z, model["codes"].weight).argmin(1))
        out = model["decoder"](z + (q - z).detach())
        return (out - x).pow(2).mean() + F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach())

    assert not ids(verdicts(model, loss))


def test_units_that_are_dead_here_and_asked_without_gradient_are_no_cut():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    with torch.no_grad():
        model[0].weight[:4, 0] = -9.0  # never on for positive inputs, always for negative ones
    now, then, picked = torch.rand(16, 4), -torch.rand(16, 4), torch.zeros(16, 1, dtype=torch.long)

    def loss():
        with torch.no_grad():
            best = model(then).amax(1)
        return F.mse_loss(model(now).gather(1, picked).squeeze(1), best)

    assert not verdicts(model, loss, steps=3)


@pytest.mark.parametrize(
    "between, cut",
    [
        (lambda z: z.sign() * F.relu(z.abs() - 100.0), False),
        (lambda z: torch.where(z.abs() > 100.0, z, torch.zeros_like(z)), False),
        (lambda z: z.sign(), True),
        (lambda z: (z > 0).float(), True),
    ],
)
def test_a_threshold_above_every_value_is_no_cut(between, cut):
    """The way is open, and its gradient is zero because the units are off; through a step there is no way."""
    model, x = Two(between), torch.randn(8, 4)
    found = verdicts(model, lambda: (model(x) - x).pow(2).mean())
    assert ids(found) == ({"detached-graph/cut"} if cut else set())


def test_rows_of_units_that_are_off_are_no_cut():
    """Choices are drawn from what the layer puts out, which carries no gradient; its dead rows have none either way."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    with torch.no_grad():
        model[0].weight[:4], model[0].bias[:4] = -0.02, 0.0  # off for positive inputs, though not far from on
    x, gained = torch.rand(16, 4), torch.randn(16)

    def loss():
        chosen = torch.distributions.Categorical(logits=model(x))
        return -(chosen.log_prob(chosen.sample()) * gained).mean()

    assert not verdicts(model, loss)


def test_a_loss_made_before_the_tape_began_has_a_history():
    """Two optimizers step one after the other on losses that were both made before the first of them."""
    model, x = Two(torch.tanh), torch.randn(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    made = [model(x).pow(2).mean() for _ in range(2)]

    def step():
        loss = made.pop()
        loss.backward()
        return loss.detach()

    assert not ids(examine(is_a_path_cut, model, optimizer, step, steps=2))


def test_a_cut_that_is_followed_is_proven_and_one_that_cannot_be_is_likely():
    x = torch.randn(8, 4)
    for between, sure in ((without_grad, "proven"), (through_data, "proven"), (through_numpy, "likely")):
        model = Two(between)
        found = verdicts(model, lambda model=model: model(x).pow(2).mean())
        assert {v.confidence for v in found} == {sure}, between


class Heads(nn.Module):
    """Two heads on what one body makes; the second gets it as `pass_on` says."""

    def __init__(self, pass_on):
        super().__init__()
        self.body, self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 2)
        self.pass_on = pass_on

    def forward(self, x):
        h = self.body(x).relu()
        return self.first(h).pow(2).mean() + self.second(self.pass_on(self, x, h)).pow(2).mean()


def teacher(model, x, h):
    with torch.no_grad():
        return model.body(x)


WAYS_ON = {
    "as it is": (lambda model, x, h: h, False),
    "with what was cut added": (lambda model, x, h: h + (h.round() - h).detach(), False),
    "a pass without gradient": (teacher, False),
    "the place of the largest": (lambda model, x, h: F.one_hot(h.argmax(-1), 4).float(), False),
    "times nothing": (lambda model, x, h: h.detach() * 0.0, False),
    "detached": (lambda model, x, h: h.detach(), True),
}


@pytest.mark.parametrize("low", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("way", WAYS_ON)
def test_between_modules_only_what_would_change_a_gradient_is_warned_of(way, low):
    pass_on, warned = WAYS_ON[way]
    torch.manual_seed(0)
    model, x = Heads(pass_on), torch.randn(8, 4)

    def loss():
        with torch.autocast("cpu", low or torch.bfloat16, enabled=low is not None):
            return model(x)

    found = verdicts(model, loss, steps=2)
    assert ids(found) == ({"detached-graph/between-modules"} if warned else set())
    assert all(v.level == "warning" and v.confidence == "likely" for v in found)


def test_gradients_that_underflow_are_no_cut():
    torch.manual_seed(0)
    model, x = Two(torch.tanh), torch.randn(8, 4)

    def loss():
        with torch.autocast("cpu", torch.float16):
            return model(x).pow(2).mean() * 1e-9

    assert not verdicts(model, loss)
