"""Averages and copies evaluated with BatchNorm statistics that nobody has copied; and copies that are whole."""

import copy
import linecache

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import gradproof

ID = "weights-state-error/statistics-not-copied"
STEPS = 60


class Student(nn.Module):
    """A trained network and an average of it in one module."""

    def __init__(self, network):
        super().__init__()
        self.network = network
        self.average = copy.deepcopy(network).requires_grad_(False)

    def forward(self, x):
        return self.network(x)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


@torch.no_grad()
def mix(average, model, share=0.1):
    for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
        slow.lerp_(fast, share)


@torch.no_grad()
def copy_buffers(average, model):
    for slow, fast in zip(average.buffers(), model.buffers(), strict=True):
        slow.copy_(fast)


@torch.no_grad()
def evaluate(model, x):
    model.eval()
    model(x)


def train(tmp_path, model, trained, average, after_step, before_evaluation=None, every=20):
    optimizer = torch.optim.Adam(trained.parameters(), lr=0.01)
    x = 3 * torch.randn(64, 4) + 2
    with gradproof.watch(model, optimizer, out=tmp_path / "run"):
        for number in range(STEPS):
            loss = (trained(x) - x.sin().sum(1, keepdim=True)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            after_step(number)
            if (number + 1) % every == 0:
                if before_evaluation is not None:
                    before_evaluation(x)
                evaluate(average, x)
    return {c.id: c for c in gradproof.diagnose(tmp_path / "run").causes}


def test_an_average_of_parameters_only(tmp_path):
    model = net()
    average = copy.deepcopy(model).eval().requires_grad_(False)
    found = train(tmp_path, model, model, average, lambda _: mix(average, model))
    assert found[ID].level == "problem" and "test_copies.py" in found[ID].where
    assert "mean 0 and variance 1" in found[ID].evidence[0]


def test_one_evaluation_at_the_end(tmp_path):
    model = net()
    average = copy.deepcopy(model).eval()
    found = train(tmp_path, model, model, average, lambda _: mix(average, model, 1.0), every=STEPS)
    assert found[ID].level == "problem"


def test_an_average_inside_of_what_trains(tmp_path):
    both = Student(net())
    found = train(tmp_path, both, both.network, both.average, lambda _: mix(both.average, both.network))
    assert found[ID].level == "problem"


def test_statistics_that_stand_still_since_the_copy_was_made(tmp_path):
    model = net()
    model(torch.randn(64, 4) - 3)
    average = copy.deepcopy(model).eval()
    found = train(tmp_path, model, model, average, lambda _: mix(average, model))
    assert "what they were at its first call" in found[ID].evidence[0]


@pytest.mark.parametrize("use_buffers", [True, False])  # averaged, or copied at each update
def test_torchs_own_averaged_model_has_its_buffers(tmp_path, use_buffers):
    model = net()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=use_buffers)
    assert ID not in train(tmp_path, model, model, average, lambda _: average.update_parameters(model))


def test_statistics_taken_anew_before_each_evaluation(tmp_path):
    model = net()
    average = copy.deepcopy(model)
    found = train(
        tmp_path, model, model, average, lambda _: mix(average, model), lambda x: update_bn([x], average)
    )
    assert ID not in found


def every_step(average, model):
    def after_step(number):
        mix(average, model)
        copy_buffers(average, model)

    return after_step


def now_and_then(average, model):
    def after_step(number):
        mix(average, model)
        if number % 25 == 24:  # once behind the first evaluation, once before the last
            copy_buffers(average, model)

    return after_step


def never_anything(average, model):
    return lambda number: None  # a reference as it was at the start


@pytest.mark.parametrize("way", [every_step, now_and_then, never_anything])
def test_whole_copies_are_no_problem(tmp_path, way):
    model = net()
    average = copy.deepcopy(model).eval().requires_grad_(False)
    assert ID not in train(tmp_path, model, model, average, way(average, model))


def test_a_random_network_of_the_same_shape_is_no_copy(tmp_path):
    model, other = net(), net().requires_grad_(False).eval()
    nn.init.normal_(other[0].weight)
    assert ID not in train(tmp_path, model, model, other, lambda _: None)


@pytest.mark.slow
def test_a_first_evaluation_before_training(tmp_path):
    model = net()
    average = copy.deepcopy(model).eval()
    evaluate(average, torch.randn(8, 4))
    assert ID not in train(tmp_path, model, model, average, lambda _: mix(average, model), every=1000)


@pytest.mark.slow
@pytest.mark.parametrize("every, level", [(1, "warning"), (2, "problem")])
def test_a_teacher_called_at_most_steps_may_be_meant_so(tmp_path, every, level):
    model = net()
    teacher = copy.deepcopy(model).eval().requires_grad_(False)
    found = train(tmp_path, model, model, teacher, lambda _: mix(teacher, model), every=every)
    assert found[ID].level == level


@pytest.mark.slow
def test_a_teacher_with_its_buffers_is_not_named_at_any_rate(tmp_path):
    model = net()
    teacher = copy.deepcopy(model).eval().requires_grad_(False)
    assert ID not in train(tmp_path, model, model, teacher, every_step(teacher, model), every=1)


def kept_in_a_dict(model, rebinds, names):
    """An average of some tensors of a model, by name, and what updates it."""
    average = {name: tensor.detach().clone() for name, tensor in model.state_dict().items() if name in names}

    @torch.no_grad()
    def after_step(number):
        for name, tensor in model.state_dict().items():
            if name not in names:
                continue
            if not tensor.is_floating_point():
                average[name] = tensor.clone()
            elif rebinds:
                average[name] = 0.9 * average[name] + 0.1 * tensor
            else:
                average[name].mul_(0.9).add_(tensor, alpha=0.1)

    return average, after_step


@pytest.mark.slow
@pytest.mark.parametrize("rebinds, whole", [(True, False), (False, False), (True, True)])
def test_an_average_kept_in_a_dict_and_evaluated_once(tmp_path, rebinds, whole):
    model, evaluated = net(), net().eval()
    names = set(model.state_dict()) if whole else {name for name, _ in model.named_parameters()}
    average, after_step = kept_in_a_dict(model, rebinds, names)

    def load(x):
        evaluated.load_state_dict(average, strict=False)

    found = train(tmp_path, model, model, evaluated, after_step, load, every=STEPS)
    assert (ID in found) != whole
    if not whole:  # the place is where the average is made, not where it is used
        number = int(found[ID].where.split(":")[-1].rstrip(")"))
        made = linecache.getline(__file__, number)
        assert found[ID].level == "problem" and ("0.9 * average" if rebinds else "mul_(0.9)") in made
