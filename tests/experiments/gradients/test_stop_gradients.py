"""Targets, teachers and baselines with gradient, and the same with it stopped; contrasts that want both sides."""

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from taped_trainings import examine, ids, plain_step
from torch import nn

from gradproof.experiments.gradients.stop_gradients import does_gradient_reach_what_it_must_not


def verdicts(model, make_loss, parameters=None, after=None):
    optimizer = torch.optim.SGD(parameters or list(model.parameters()), lr=0.01)
    train = plain_step(model, optimizer, make_loss)

    def step():
        loss = train()
        if after:
            after()
        return loss

    return examine(does_gradient_reach_what_it_must_not, model, optimizer, step, steps=2)


@pytest.mark.parametrize("stopped", [True, False])
@pytest.mark.parametrize("compare", [F.mse_loss, lambda q, t: (q - t).pow(2).mean()])
def test_bootstrapped_return(stopped, compare):
    model = nn.ModuleDict({"q": nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))})
    now, then, reward = torch.randn(6, 3), torch.randn(6, 3), torch.randn(6)

    def loss():
        target = reward + 0.9 * model["q"](then).max(dim=1).values
        return compare(model["q"](now)[:, 0], target.detach() if stopped else target)

    found = verdicts(model, loss)
    assert ids(found) == (set() if stopped else {"missing-stop-gradient/target"})
    if found:  # where the target is made, not where it is compared
        number = int(found[0].where.rpartition(":")[2])
        assert Path(__file__).read_text().splitlines()[number - 1].strip().startswith("target = reward +")


class Called(nn.Module):
    """Layers with a ReLU of no module between them."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(3, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.two(torch.relu(self.one(x)))


@pytest.mark.parametrize("stopped", [True, False])
def test_a_network_whose_forward_is_called_by_name(stopped):
    """No module is seen around its ReLU, which is no margin of the loss for that."""
    model = Called()
    now, then, reward = torch.randn(6, 3), torch.randn(6, 3), torch.randn(6)

    def loss():
        target = reward + 0.9 * model.forward(then).max(dim=1).values
        return F.mse_loss(target.detach() if stopped else target, model.forward(now)[:, 0])

    assert ids(verdicts(model, loss)) == (set() if stopped else {"missing-stop-gradient/target"})


@pytest.mark.parametrize("stopped", [True, False])
def test_branch_without_a_predictor(stopped):
    model = nn.ModuleDict({"student": nn.Linear(4, 4), "predictor": nn.Linear(4, 4)})
    a, b = torch.randn(6, 4), torch.randn(6, 4)

    def loss():
        target = F.normalize(model["student"](b), dim=1)
        prediction = F.normalize(model["predictor"](model["student"](a)), dim=1)
        return 2 - 2 * (prediction * (target.detach() if stopped else target)).sum(dim=1).mean()

    assert ids(verdicts(model, loss)) == (set() if stopped else {"missing-stop-gradient/target"})


@pytest.mark.parametrize("others", [True, False])
def test_two_views_that_the_other_samples_keep_apart(others):
    """SimCLR divides by the similarity to all others; without, one vector for every sample is the best there is."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    a = torch.randn(6, 4)
    b = a + 0.1 * torch.randn(6, 4)

    def loss():
        one, two = F.normalize(model(a), dim=1), F.normalize(model(b), dim=1)
        alike = (one * two).sum(dim=-1) / 0.5
        if not others:
            return 2 - alike.mean()
        both = torch.cat([one, two])
        near = torch.exp(both @ both.T / 0.5)[~torch.eye(12, dtype=torch.bool)].view(12, -1).sum(1)
        return -torch.log(torch.cat([alike, alike]).exp() / near).mean()

    found = verdicts(model, loss)
    assert ids(found) == (set() if others else {"missing-stop-gradient/target"})


@pytest.mark.parametrize("stopped", [True, False])
def test_baseline(stopped):
    model = nn.ModuleDict({"policy": nn.Linear(4, 3), "value": nn.Linear(4, 1)})
    seen, returns, action = torch.randn(8, 4), torch.randn(8), torch.randint(0, 3, (8,))

    def loss():
        values = model["value"](seen).squeeze(-1)
        log_p = model["policy"](seen).log_softmax(-1).gather(1, action[:, None]).squeeze(1)
        advantage = returns - (values.detach() if stopped else values)
        return -(log_p * advantage).mean() + 0.5 * F.mse_loss(values, returns)

    assert ids(verdicts(model, loss)) == (set() if stopped else {"missing-stop-gradient/baseline"})


@pytest.mark.parametrize("stopped", [True, False])
def test_teacher_that_is_trained(stopped):
    student = nn.Linear(4, 4)
    model = nn.ModuleDict({"student": student, "teacher": copy.deepcopy(student)})
    x = torch.randn(6, 4)

    def follow():
        with torch.no_grad():
            for slow, fast in zip(model["teacher"].parameters(), student.parameters(), strict=True):
                slow.mul_(0.99).add_(fast, alpha=0.01)

    def loss():
        target = model["teacher"](x)
        return F.mse_loss(student(x) + 1, target.detach() if stopped else target)

    assert ids(verdicts(model, loss, after=follow)) == (
        set() if stopped else {"missing-stop-gradient/teacher"}
    )


def test_triplets_and_weight_clipping_are_silent():
    model = nn.Linear(4, 4)
    anchor, positive, negative = torch.randn(3, 6, 4)

    def loss():
        near, far = ((model(anchor) - model(x)).pow(2).sum(1) for x in (positive, negative))
        return F.relu(near - far + 1).mean()

    def clip():
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-1, 1)

    assert not verdicts(model, loss, after=clip)


def test_divergence_of_two_outputs_of_one_pass_is_silent():
    model = nn.ModuleDict({"body": nn.Linear(4, 4), "mean": nn.Linear(4, 2), "spread": nn.Linear(4, 2)})
    x = torch.randn(6, 4)

    def loss():
        h = model["body"](x).tanh()
        mean, spread = model["mean"](h), model["spread"](h)
        return -0.5 * (1 + spread - mean.pow(2) - spread.exp()).mean()

    assert not verdicts(model, loss)


@pytest.mark.parametrize("how", ["detached", "pulled", "soft labels", "both ways", "one network twice"])
def test_distillation(how):
    model = nn.ModuleDict({"teacher": nn.Linear(4, 5), "student": nn.Linear(4, 5)})
    x = torch.randn(6, 4)

    def kl(prediction, target):
        return F.kl_div(F.log_softmax(prediction / 2, 1), F.softmax(target / 2, 1), reduction="batchmean")

    def loss():
        teacher, student = model["teacher"](x), model["student"](x)
        if how == "both ways":  # two networks that teach each other
            return kl(student, teacher) + kl(teacher, student)
        if how == "one network twice":
            return kl(student, model["student"](x + 0.1 * torch.randn_like(x))) + teacher.square().mean()
        if how == "soft labels":
            return F.cross_entropy(student, F.softmax(teacher, 1))
        return kl(student, teacher.detach() if how == "detached" else teacher)

    wrong = how in ("pulled", "soft labels")
    assert ids(verdicts(model, loss)) == ({"missing-stop-gradient/target"} if wrong else set())


class Distiller(nn.Module):
    """A model that computes its loss itself."""

    def __init__(self, stopped):
        super().__init__()
        self.teacher, self.student, self.stopped = nn.Linear(4, 3), nn.Linear(4, 3), stopped

    def forward(self, x):
        wanted = self.teacher(x).softmax(1)
        given = self.student(x).log_softmax(1)
        return F.kl_div(given, wanted.detach() if self.stopped else wanted, reduction="batchmean")


@pytest.mark.parametrize("stopped", [True, False])
def test_a_loss_inside_of_the_model(stopped):
    model, x = Distiller(stopped), torch.randn(6, 4)
    trained = list(model.student.parameters()) if stopped else None
    found = ids(verdicts(model, lambda: model(x), trained))
    assert found == (set() if stopped else {"missing-stop-gradient/target"})
