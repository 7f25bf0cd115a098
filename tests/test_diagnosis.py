"""Each symptom is planted and found, and stays silent on its healthy twin; verdicts outrank suspicions."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradproof
from gradproof.diagnosis import ranking, symptoms
from gradproof.diagnosis.causes import BY_FAMILY
from gradproof.diagnosis.findings import LEVELS, Diagnosis, Finding, Symptom
from gradproof.diagnosis.ranking import (
    PROOFS,
    RECORDED,
    TROUBLE,
    add_suspicions,
    diagnose,
    finding_of_suspicion,
    fold_consequences,
    rank,
)
from gradproof.diagnosis.series import trend
from gradproof.record.run import open_run
from gradproof.record.schema import STATISTICS, STATISTICS_FRAME, json_line
from gradproof.record.writer import RunWriter
from gradproof.report.text import render_text, wants_color

FALLING = 2.0 * 0.97 ** np.arange(60)
NOISE = np.random.default_rng(0).normal(size=400)


def parameter(name, shape=(4, 4), optimizer=0, gradient=True, changed=True, dtype="float32", trainable=True):
    return {
        "name": name,
        "shape": list(shape),
        "dtype": dtype,
        "trainable": trainable,
        "optimizer": optimizer,
        "gradient": gradient,
        "changed": changed,
    }


class Written:
    """A run written by hand: `column=values` for steps.csv, then frames and events."""

    def __init__(self, path, parameters=(), optimizers=1, **columns):
        named = [{"name": f"optimizer{i}"} for i in range(optimizers)]
        self.writer = RunWriter(path, {"parameters": list(parameters), "optimizers": named})
        length = max((len(values) for values in columns.values()), default=0)
        columns.setdefault("order", ["zbs"] * length)
        for step in range(length):
            row = {name: values[step] for name, values in columns.items()}
            row = {k: v.item() if isinstance(v, np.generic) else v for k, v in row.items()}
            self.writer.write_step({"step": step, **row})

    def frame(self, step, kind, /, shape=(4, 4), module="", **tensors):
        """Statistics of tensors at a step: name={statistic: value}."""
        named = {name.replace("__", "."): values for name, values in tensors.items()}
        facts = {"shape": list(shape), "module": module}
        numbers = [self.writer.add_tensor(kind, name, **facts) for name in named]
        rows = np.full((len(named), len(STATISTICS)), np.nan)
        for row, values in zip(rows, named.values(), strict=True):
            for statistic, value in {"nan": 0, "inf": 0, **values}.items():
                row[STATISTICS.index(statistic)] = value
        self.writer.write_frame(STATISTICS_FRAME, step, np.array(numbers), rows)
        return self

    def event(self, name, **facts):
        self.writer.write_event(name, **facts)
        return self

    def read(self):
        self.writer.close()
        return open_run(self.writer.path)


@pytest.fixture
def written(tmp_path):
    return lambda *args, **columns: Written(tmp_path / "run", *args, **columns)


def seen(run):
    """The names of the symptoms of a run, with their levels."""
    return {s.name: s.level for find in symptoms.SYMPTOMS for s in find(run)}


def train(path, model, optimizer, step, steps=40, **options):
    """A real training, watched: `step(i)` does one of its steps."""
    with gradproof.watch(model, optimizer, out=path, experiments=False, **options):
        for i in range(steps):
            step(i)
    return open_run(path)


def regression(model, optimizer, target=lambda x: x.sum(1, keepdim=True)):
    """One ordinary step of a regression."""

    def step(i):
        x = torch.randn(32, 4)
        optimizer.zero_grad()
        F.mse_loss(model(x), target(x)).backward()
        optimizer.step()

    return step


def small_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def test_a_healthy_run_shows_nothing(tmp_path):
    model, optimizer = small_model()
    run = train(tmp_path / "run", model, optimizer, regression(model, optimizer))
    assert seen(run) == {} and diagnose(run).causes == () and diagnose(run).worst is None


# not finite ------------------------------------------------------------------------------------------------


def test_a_nan_in_forward_is_found_with_its_module(tmp_path):
    model, optimizer = small_model()

    def step(i):
        optimizer.zero_grad()
        x = torch.randn(8, 4)
        hidden = model[1](model[0](x))
        hidden = torch.log(hidden - hidden) if i == 12 else hidden
        model[2](hidden).square().mean().backward()
        optimizer.step()

    first = diagnose(train(tmp_path / "run", model, optimizer, step, schedule="all every step")).causes[0]
    assert (first.family, first.step) == ("forward-nonfinite", 12)
    assert first.where == "output of 2"  # and no line: the model itself is never called
    assert first.level == "problem" and "nan" in first.evidence[0]


def test_a_nan_in_backward_names_the_parameter_nearest_to_the_loss(tmp_path):
    model, optimizer = small_model()

    def step(i):
        optimizer.zero_grad()
        out = model(torch.randn(8, 4))
        ((out - out.detach() * (i == 12)).abs().sqrt().mean()).backward()
        optimizer.step()

    run = train(tmp_path / "run", model, optimizer, step, schedule="parameters every step")
    first = diagnose(run).causes[0]
    assert (first.family, first.step) == ("backward-nonfinite", 12)
    assert first.where.startswith("gradient of 2.bias (test_diagnosis.py:")


def test_harmless_infinities_are_not_blamed(written):
    columns = {"loss": [1.0, 0.9, 0.8, math.nan], "grad_norm": [1.0, 1.0, 1.0, math.nan]}
    run = written(**columns)
    for step in range(4):
        run.frame(step, "output", mask={"inf": 6}, head={"nan": 2 if step == 3 else 0})
    (found,) = symptoms.nonfinite(run.read())
    assert found.where == "output of head" and found.step == 3
    calm = Written(run.writer.path, loss=[1.0, 0.9], grad_norm=[1.0, 1.0]).frame(0, "output", mask={"inf": 6})
    assert list(symptoms.nonfinite(calm.read())) == []


def test_growth_before_the_nan_points_at_the_steps(written):
    loss = [1.0] * 10 + [3.0, 30.0, 9e3, 4e9, math.nan]
    (found,) = symptoms.nonfinite(written(loss=loss).read())
    assert found.suspects[0] == "lr-too-high/diverged"


def test_skipped_steps_are_harmless_until_they_are_most(written):
    norm = [math.inf, math.inf, *[1.0] * 58]
    few = {"grad_norm": norm, "skipped": [1, 1, *[None] * 58], "loss": [math.inf, *FALLING[1:]]}
    assert seen(written(**few).read()) == {}
    all_of_them = {"grad_norm": [math.inf] * 60, "skipped": [1] * 60, "loss_scale": 2.0 ** -np.arange(60)}
    run = written(**all_of_them, loss=[2.0] * 60).read()
    found = seen(run)
    assert found["steps_skipped"] == "problem"
    assert diagnose(run).causes[0].family in ("low-precision-error", "backward-nonfinite")


# losses ----------------------------------------------------------------------------------------------------


def test_a_loss_that_rises_stands_still_or_is_at_its_optimum(written):
    assert seen(written(loss=FALLING[::-1]).read())["loss_rising"] == "problem"
    assert seen(written(loss=2.3 + 0.01 * NOISE[:60]).read()) == {"loss_not_improving": "warning"}
    assert seen(written(loss=1e-6 * (1 + 0.1 * NOISE[:60] ** 2)).read()) == {}
    assert seen(written(loss=FALLING + 0.02 * NOISE[:60]).read()) == {}


def test_one_player_of_two_may_lose(written):
    loss = np.stack([FALLING, FALLING[::-1]], axis=1).reshape(-1)
    run = written(optimizers=2, loss=loss, optimizer=[0, 1] * 60).read()
    assert seen(run) == {"player_losing": "note"}
    assert diagnose(run).causes[0].where == "optimizer1"


def test_flat_noise_does_not_rise():
    rng = np.random.default_rng(1)
    for make in (rng.normal, rng.lognormal):
        for points in (30, 100, 400):
            rises = sum(trend(10 + make(size=points)).rose for _ in range(500))
            assert rises <= 5, (make, points, rises)


def test_oscillation_is_told_from_noise(tmp_path, written):
    torch.manual_seed(0)
    weight = nn.Parameter(torch.tensor([1.0]))
    optimizer = torch.optim.SGD([weight], lr=1.0)  # of an absolute value: steps over the minimum for ever

    def step(i):
        optimizer.zero_grad()
        (weight - 0.3).abs().sum().backward()
        optimizer.step()

    run = train(tmp_path / "swing", None, optimizer, step)
    assert [s.name for s in symptoms.loss_oscillating(run)] == ["loss_oscillating"]
    for seed in range(20):  # small batches
        noise = np.random.default_rng(seed).lognormal(0, 0.8, 200)
        calm = Written(run.path.with_name("calm"), loss=noise).read()
        assert list(symptoms.loss_oscillating(calm)) == []


@pytest.mark.parametrize(
    "end, confidence, level",
    [
        ({}, "likely", "warning"),
        ({"stopped_after": 60}, "likely", "note"),
        ({"exit_code": 130}, "likely", "note"),
        ({"stopped_after": 60}, "proven", "warning"),
    ],
)
def test_a_slow_rate_is_no_trouble_of_a_run_that_was_cut_short(written, end, confidence, level):
    run = written(loss=np.linspace(2.0, 1.8, 60))
    said = {"family": "lr-too-low", "id": "lr-too-low/tiny-steps", "verdict": "confirmed", "level": "warning"}
    run.event("verdict", **said, confidence=confidence, evidence=["it falls"], step=9)
    run.writer.set_info(**end)
    assert [f.level for f in diagnose(run.read()).causes] == [level]


@pytest.mark.parametrize("end, level", [({}, "problem"), ({"stopped_after": 60}, "note")])
@pytest.mark.parametrize("id", ["lr-schedule-error/warmup-never-ends", "optimizer-config/momentum"])
def test_what_takes_many_steps_is_not_held_against_a_run_that_was_cut_short(written, id, end, level):
    run = written(loss=np.linspace(2.0, 1.8, 60))
    said = {"family": id.partition("/")[0], "id": id, "verdict": "confirmed", "level": "problem"}
    run.event("verdict", **said, confidence="likely", evidence=["it is long"], step=9)
    run.writer.set_info(**end)
    assert [f.level for f in diagnose(run.read()).causes] == [level]


def test_a_spike_is_noted_with_its_step(written):
    loss = FALLING + 0.01 * NOISE[:60]
    loss[40] = 30.0
    run = written(loss=loss).read()
    assert seen(run) == {"loss_spike": "note"} and next(symptoms.loss_spike(run)).step == 40
    spiky = Written(run.path.with_name("calm"), loss=np.random.default_rng(2).lognormal(0, 0.3, 60))
    assert list(symptoms.loss_spike(spiky.read())) == []
    policy = Written(run.path.with_name("policy"), loss=loss)
    policy.writer.set_info(facts={"policy_loss": True})
    assert list(symptoms.loss_spike(policy.read())) == []


# gradients -------------------------------------------------------------------------------------------------


def test_clipping_at_every_step_matters_only_if_nothing_is_learned(written):
    clip = {"norm_before_clip": [500.0] * 60, "clip_limit": [1.0] * 60}
    assert seen(written(loss=FALLING, **clip).read()) == {"clipped_always": "note"}
    stuck = written(loss=2.3 + 0.01 * NOISE[:60], **clip).read()
    assert seen(stuck)["clipped_always"] == "warning"
    assert "grad-clip-misuse" in [cause.family for cause in diagnose(stuck).causes]
    assert seen(written(loss=FALLING, norm_before_clip=[0.5] * 60, clip_limit=[1.0] * 60).read()) == {}


def deep(activation, width=8, layers=12):
    torch.manual_seed(0)
    blocks = [m for _ in range(layers) for m in (nn.Linear(width, width), activation())]
    return nn.Sequential(nn.Linear(4, width), *blocks, nn.Linear(width, 1))


def test_vanishing_gradients_are_found_in_the_first_layers(tmp_path):
    model = deep(nn.Sigmoid)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    target = lambda x: torch.randn(len(x), 1)  # noqa: E731  nothing to learn: the loss stays
    run = train(tmp_path / "run", model, optimizer, regression(model, optimizer, target))
    (found,) = symptoms.gradient_flow(run)
    assert found.name == "vanishing_gradients" and found.where in ("0.weight", "1.weight")
    model = deep(lambda: nn.Identity(), layers=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = train(tmp_path / "twin", model, optimizer, regression(model, optimizer, target))
    assert list(symptoms.gradient_flow(run)) == []


def test_exploding_gradients_are_a_note_while_the_loss_falls(written):
    parameters = [parameter(name) for name in ("a", "b", "c")]

    def run(loss):
        made = written(parameters, loss=loss)
        for step in range(5):
            made.frame(step, "gradient", a={"norm": 5e4}, b={"norm": 3.0}, c={"norm": 1.0})
        return made.read()

    assert seen(run(FALLING)) == {"exploding_gradients": "note"}
    assert seen(run(2.3 + 0.01 * NOISE[:60]))["exploding_gradients"] == "warning"


def test_a_gradient_that_grows_is_no_single_spike(written):
    growing, flat = np.geomspace(1, 1e6, 60), np.full(60, 1.0)
    spike = np.where(np.arange(60) == 30, 1e6, 1.0)
    loss = 2.3 + 0.01 * NOISE[:60]
    assert seen(written(loss=loss, grad_norm=growing).read())["gradient_growing"] == "problem"
    for norm in (flat, spike, 1e6 * flat):  # large and stable is fine
        assert "gradient_growing" not in seen(written(loss=loss, grad_norm=norm).read())


# parameters ------------------------------------------------------------------------------------------------


def test_parameters_outside_the_optimizer(tmp_path):
    torch.manual_seed(0)
    model, _ = small_model()
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.05)
    found = diagnose(train(tmp_path / "run", model, optimizer, regression(model, optimizer)))
    first = found.causes[0]
    assert first.id == "param-not-updated/not-in-optimizer"
    assert first.where.startswith("0.weight (test_diagnosis.py:")  # where the optimizer is made
    assert (first.level, first.confidence) == ("problem", "proven")
    model[0].requires_grad_(False)  # frozen on purpose
    run = train(tmp_path / "twin", model, optimizer, regression(model, optimizer))
    assert list(symptoms.outside_optimizer(run)) == []


def test_a_target_network_and_a_second_optimizer_are_no_problem(tmp_path):
    class Agent(nn.Module):
        def __init__(self):
            super().__init__()
            self.online, self.target, self.other = nn.Linear(4, 1), nn.Linear(4, 1), nn.Linear(1, 1)

    torch.manual_seed(0)
    agent = Agent()
    optimizer = torch.optim.SGD(agent.online.parameters(), lr=0.05)
    unseen = torch.optim.SGD(agent.other.parameters(), lr=0.05)

    def step(i):
        x = torch.randn(16, 4)
        with torch.no_grad():
            goal = agent.target(x)
        optimizer.zero_grad()
        unseen.zero_grad()
        F.mse_loss(agent.other(agent.online(x)), goal).backward()
        optimizer.step()
        unseen.step()

    assert seen(train(tmp_path / "run", agent, optimizer, step)) == {"idle_parameters": "note"}


def test_parameters_without_gradient(tmp_path):
    class Cut(nn.Module):
        def __init__(self, cut):
            super().__init__()
            self.body, self.head, self.cut = nn.Linear(4, 4), nn.Linear(4, 1), cut

        def forward(self, x):
            hidden = self.body(x)
            return self.head(hidden.detach() if self.cut else hidden)

    for cut in (True, False):
        torch.manual_seed(0)
        model = Cut(cut)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        run = train(tmp_path / f"{cut}", model, optimizer, regression(model, optimizer))
        assert [(s.name, s.where) for s in symptoms.never_changed(run)] == (
            [("no_gradient", "body.weight")] if cut else []
        )


def test_updates_lost_to_bfloat16(tmp_path):
    for dtype in (torch.bfloat16, torch.float32):
        torch.manual_seed(0)
        model = nn.Linear(4, 1).to(dtype)
        with torch.no_grad():
            model.weight.fill_(1.0)
            model.bias.fill_(1.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)

        def step(i, model=model, optimizer=optimizer, dtype=dtype):
            optimizer.zero_grad()
            model(torch.randn(8, 4, dtype=dtype)).square().mean().backward()
            optimizer.step()

        run = train(tmp_path / str(dtype), model, optimizer, step, steps=10)
        expected = ["low-precision-error/lost-updates"] if dtype == torch.bfloat16 else []
        assert [s.suspects[0] for s in symptoms.never_changed(run)] == expected


def test_a_gradient_of_exactly_zero_and_a_bias_without_effect(written):
    still = [parameter("a", changed=False), parameter("b")]
    made = written(still, loss=FALLING)
    for step in range(4):
        made.frame(step, "gradient", a={"absmax": 0.0, "norm": 0.0}, b={"absmax": 1.0, "norm": 1.0})
    (found,) = symptoms.never_changed(made.read())
    assert found.suspects[0] == "dead-activation/units" and "exactly zero" in found.evidence
    critic = [parameter("out.bias", shape=(1,), changed=False), parameter("out.weight")]
    for weight, suspected in ((1.0, False), (0.0, True)):  # a loss of differences; a layer that is dead
        made = written(critic, loss=FALLING)
        for step in range(4):
            made.frame(step, "gradient", out__bias={"absmax": 0.0}, out__weight={"absmax": weight})
        (found,) = symptoms.never_changed(made.read())
        assert bool(found.suspects) == suspected and ("cancels" in found.evidence) != suspected
    bias = [parameter("conv.bias", shape=(4,), changed=False), parameter("conv.weight")]
    made = written(bias, loss=FALLING).frame(0, "gradient", conv__bias={"absmax": 1e-9})
    assert seen(made.read()) == {"never_changed": "note"}


def test_a_learning_rate_of_zero(tmp_path):
    model, optimizer = small_model()
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=10)
    plain = regression(model, optimizer)

    def step(i):
        plain(i)
        schedule.step()

    run = train(tmp_path / "run", model, optimizer, step)
    (found,) = symptoms.learning_rate(run)
    assert found.step == 10 and found.suspects == ("lr-schedule-error/ends-at-zero",)
    restarts = Written(tmp_path / "twin", loss=FALLING, lr=np.tile(np.linspace(0.1, 0, 20), 3)).read()
    assert list(symptoms.learning_rate(restarts)) == []


# the order of calls ----------------------------------------------------------------------------------------

ORDERS = {
    "stale_gradient": lambda m, o, loss, s: (loss().backward(), o.step(), s.step()),
    "zeroed_before_step": lambda m, o, loss, s: (loss().backward(), o.zero_grad(), o.step()),
    "late_clip": lambda m, o, loss, s: (
        o.zero_grad(),
        loss().backward(),
        o.step(),
        nn.utils.clip_grad_norm_(m.parameters(), 1.0),
    ),
}
HEALTHY = {
    "by hand": lambda m, o, loss, s: (
        [p.grad.zero_() for p in m.parameters() if p.grad is not None],
        loss().backward(),
        o.step(),
    ),
    "zeroed at the end": lambda m, o, loss, s: (loss().backward(), o.step(), o.zero_grad(), s.step()),
    "zeros kept": lambda m, o, loss, s: (o.zero_grad(set_to_none=False), loss().backward(), o.step()),
    "clipped": lambda m, o, loss, s: (
        o.zero_grad(),
        loss().backward(),
        nn.utils.clip_grad_norm_(m.parameters(), 1.0),
        o.step(),
        s.step(),
    ),
    "other model": lambda m, o, loss, s: (
        o.zero_grad(),
        loss().backward(),
        nn.Linear(1, 1).zero_grad(),
        o.step(),
    ),
}


def run_in_order(path, calls):
    model, optimizer = small_model()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1000)
    return train(
        path, model, optimizer, lambda i: calls(model, optimizer, lambda: loss_of(model), schedule), 12
    )


def loss_of(model):
    x = torch.randn(16, 4)
    return F.mse_loss(model(x), x.sum(1, keepdim=True))


@pytest.mark.parametrize("name", ORDERS)
def test_calls_in_the_wrong_order_are_proven(name, tmp_path):
    run = run_in_order(tmp_path / "run", ORDERS[name])
    assert [s.name for s in symptoms.order_of_calls(run)] == [name]
    first = diagnose(run).causes[0]
    assert (first.level, first.confidence) == ("problem", "proven")


@pytest.mark.parametrize("name", HEALTHY)
def test_calls_in_a_right_order_are_silent(name, tmp_path):
    assert list(symptoms.order_of_calls(run_in_order(tmp_path / "run", HEALTHY[name]))) == []


def test_clipping_before_unscaling(tmp_path):
    for unscale in (False, True):
        model, optimizer = small_model()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

        def step(i, model=model, optimizer=optimizer, scaler=scaler, unscale=unscale):
            optimizer.zero_grad()
            scaler.scale(loss_of(model)).backward()
            if unscale:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()

        run = train(tmp_path / f"{unscale}", model, optimizer, step, steps=8)
        expected = [] if unscale else ["clip_before_unscale"]
        assert [s.name for s in symptoms.order_of_calls(run)] == expected


@pytest.mark.parametrize("order", ["bszszsz", "zbs", "lzbcs", "cs", "zbbbbs", "bs", "zbux"])
def test_other_orders_are_silent(order, written):
    run = written(loss=FALLING, order=[order] * 60, grad_norm=[1.0] * 60).read()
    assert list(symptoms.order_of_calls(run)) == []


# units, updates, Adam --------------------------------------------------------------------------------------


def test_dead_units(tmp_path):
    for bias, expected in ((-100.0, ["dead_units"]), (0.0, [])):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
        nn.init.constant_(model[0].bias, bias)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        target = lambda x: torch.randn(len(x), 1)  # noqa: E731
        run = train(tmp_path / f"{bias}", model, optimizer, regression(model, optimizer, target))
        found = list(symptoms.dead_units(run))
        assert [s.name for s in found] == expected
        assert not found or (found[0].where, found[0].level) == ("1", "problem")


def test_few_samples_do_not_make_units_dead(written):
    made = written(loss=2.3 + 0.01 * NOISE[:60])
    for step in range(4):
        made.frame(step, "output", shape=(2, 64), module="ReLU", act={"dead": 0.6})
    assert list(symptoms.dead_units(made.read())) == []


def test_updates_too_small_or_too_large(tmp_path):
    for lr, expected in ((1e-9, ["tiny_updates"]), (1e-3, []), (1.0, ["huge_updates"])):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.Adam(model.parameters(), lr=lr)

        def step(i, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            F.cross_entropy(model(torch.randn(16, 4)), torch.randint(4, (16,))).backward()
            optimizer.step()

        run = train(tmp_path / f"{lr}", model, optimizer, step)
        assert [s.name for s in symptoms.update_ratio(run)] == expected


def test_adams_epsilon(tmp_path):
    for eps, expected in ((1.0, {"adam_epsilon"}), (1e-8, set())):
        torch.manual_seed(0)
        model = nn.Embedding(5000, 4)  # of which few rows are ever used
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, eps=eps)

        def step(i, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            model(torch.randint(2500, (2000,))).square().mean().backward()
            optimizer.step()

        run = train(tmp_path / f"{eps}", model, optimizer, step, steps=8, schedule="optimizer every step")
        assert {s.name for s in symptoms.adam_epsilon(run)} == expected


# ranking ---------------------------------------------------------------------------------------------------


def finding(family="lr-too-high", level="problem", confidence="likely", **facts):
    return Finding(family, f"{family}/x", level, confidence, ("seen",), "change it", **facts)


def test_rank_gravest_then_surest_then_earliest():
    ranked = rank(
        [
            finding("bad-init", "note", "proven"),
            finding("lr-too-low", "problem", "possible", step=1),
            finding("wrong-gradient", "problem", "proven", step=9),
            finding("zero-grad-error", "problem", "proven", step=3),
            finding("wrong-gradient", "problem", "likely", step=0),
        ]
    )
    assert [f.family for f in ranked] == ["zero-grad-error", "wrong-gradient", "lr-too-low", "bad-init"]
    apart = rank([finding(where="a"), finding(where="b"), finding(where="a", confidence="proven")])
    assert [(f.where, f.confidence) for f in apart] == [("a", "proven"), ("b", "likely")]


def verdict(family, answer, **facts):
    return {"family": family, "id": f"{family}/tested", "verdict": answer, "confidence": "proven", **facts}


def test_a_cause_is_there_since_the_first_step_that_shows_it_whichever_was_asked_first(written):
    made = written(loss=FALLING)
    for step in (13, 1, 4):
        made.event("verdict", **verdict("lr-too-high", "confirmed", evidence=["overshoots"]), step=step)
    (found,) = diagnose(made.read()).causes
    assert found.step == 1


@pytest.mark.parametrize("order", [(1, 4, 13), (13, 1, 4), (4, 13, 1)])
def test_what_is_said_of_a_later_step_stands_whichever_was_asked_first(written, order):
    """Of a long training the newest steps are asked first: an early step takes nothing from what a late one shows."""
    made = written(loss=FALLING)
    for step in order:
        said = verdict("lr-too-low", "confirmed", evidence=["tiny"]) | {
            "if_troubled": step < 13,
            "lasting": False,
        }
        made.event("verdict", **said, step=step)
    (found,) = diagnose(made.read()).causes
    assert found.family == "lr-too-low" and found.step == 1


@pytest.mark.parametrize("said", [{}, {"confidence": None}, {"confidence": ""}])
def test_a_verdict_that_does_not_say_how_sure_it_is_is_only_possible(written, said):
    made = written(loss=FALLING)
    plain = {**verdict("wrong-gradient", "confirmed"), **said}
    made.event("verdict", **(plain if said else {k: v for k, v in plain.items() if k != "confidence"}))
    (cause,) = diagnose(made.read()).causes
    assert (cause.level, cause.confidence) == ("problem", "possible")


def test_what_is_read_off_the_record_is_likely_and_what_leaves_no_doubt_is_proven():
    catalogue = Path(ranking.__file__).parent
    source = "".join(file.read_text() for file in catalogue.glob("*.py") if file.stem != "ranking")
    assert not set(PROOFS) & set(RECORDED)
    for name in (*PROOFS, *RECORDED):
        assert f'"{name}"' in source or f'/{name}"' in source, name
        for level in ("problem", "warning"):
            said = finding_of_suspicion("lr-too-high/x", [Symptom(name, level, "seen")])
            assert said.confidence == ("proven" if name in PROOFS else "likely")
    assert finding_of_suspicion("lr-too-high/x", [Symptom("x", "warning", "")]).confidence == "possible"


def test_beside_a_proven_problem_only_suspicions_become_warnings():
    proven = finding("wrong-gradient", "problem", "proven")
    curve, record = finding("lr-too-high"), finding("lr-schedule-error")
    found = {f.family: f.level for f in add_suspicions([proven], [curve, record], {record.id})}
    assert found == {"wrong-gradient": "problem", "lr-too-high": "warning", "lr-schedule-error": "problem"}
    alone = add_suspicions([], [curve, record], {record.id})
    assert [f.level for f in alone] == ["problem", "problem"]


@pytest.mark.parametrize("what", ["dies-early", "warmup-never-ends", "multiplied"])
def test_a_schedule_that_makes_steps_short_comes_before_short_steps(what):
    short = finding("lr-too-low", "problem", "proven")
    schedule = replace(finding("lr-schedule-error", "warning"), id=f"lr-schedule-error/{what}")
    first, second = rank([short, schedule])
    assert (first.family, first.level, second.family) == ("lr-schedule-error", "problem", "lr-too-low")


def test_verdicts_outrank_symptoms(written):
    rising = {"loss": FALLING[::-1]}
    plain = diagnose(written(**rising).read())
    assert [(f.id, f.confidence) for f in plain.causes] == [("lr-too-high/diverged", "likely")]
    made = written(**rising)
    made.event("verdict", **verdict("wrong-gradient", "confirmed", where="blocks.2", evidence=["26 % off"]))
    made.event("verdict", **verdict("lr-too-high", "excluded", reason="the loss falls along the step"))
    made.event("verdict", **verdict("bad-init", "undecided"))
    made.event("verdict", **verdict("from-the-future", "confirmed"))
    found = diagnose(made.read())
    assert [(f.id, f.confidence, f.where) for f in found.causes] == [
        ("wrong-gradient/tested", "proven", "blocks.2")
    ]
    assert [(e.family, e.reason) for e in found.excluded] == [
        ("lr-too-high", "the loss falls along the step")
    ]
    assert [s.name for s in found.symptoms] == ["loss_rising"]


def test_a_confirmed_family_swallows_its_suspicions(written):
    made = written(loss=FALLING[::-1])
    made.event(
        "verdict", **verdict("lr-too-high", "confirmed", where="group 0", evidence=["α = 0.1 is best"])
    )
    assert [f.id for f in diagnose(made.read()).causes] == ["lr-too-high/tested"]


def test_an_excluded_suspect_gives_way_to_the_next(written):
    made = written(loss=2.3 + 0.01 * NOISE[:60])
    assert diagnose(made.read()).causes[0].family == "lr-too-low"
    made = written(loss=2.3 + 0.01 * NOISE[:60])
    made.event("verdict", **verdict("lr-too-low", "excluded", reason="α = 1 is best"))
    assert diagnose(made.read()).causes[0].family == "lr-too-high"


def test_every_suspect_is_in_the_catalogue():
    import ast
    from pathlib import Path

    source = ast.parse(Path(symptoms.__file__).read_text())
    words = [n.value for n in ast.walk(source) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    suspects = [w for w in words if "/" in w and " " not in w and w[0] != "/"]
    assert len(suspects) > 15 and {w.partition("/")[0] for w in suspects} <= set(BY_FAMILY)


# empty, short, all NaN -------------------------------------------------------------------------------------


def test_an_empty_run(written):
    found = diagnose(written().read())
    assert found.causes == () and "No step was recorded" in render_text(found)


def test_a_run_of_one_step(tmp_path):
    model, optimizer = small_model()
    found = diagnose(train(tmp_path / "run", model, optimizer, regression(model, optimizer), steps=1))
    assert found.causes == () and "1 step: 1 watched, 0 taped, 0 questions asked\n" in render_text(found)


def test_a_run_of_nothing_but_nan(written):
    nan = [math.nan] * 40
    made = written([parameter("a")], loss=nan, grad_norm=nan, lr=nan, norm_before_clip=nan, clip_limit=nan)
    for step in range(4):
        nothing = {name: math.nan for name in STATISTICS if name not in ("nan", "inf")}
        made.frame(step, "output", out={"nan": 16, **nothing}).frame(
            step, "gradient", a={"nan": 16, **nothing}
        )
    found = diagnose(made.read())
    assert [(f.family, f.step, f.where) for f in found.causes] == [("forward-nonfinite", 0, "output of out")]
    json.loads(json_line(found.as_data()))


# what is printed -------------------------------------------------------------------------------------------


def test_the_report_starts_with_what_matters_and_ends_with_a_command(tmp_path):
    run = run_in_order(tmp_path / "run", ORDERS["stale_gradient"])
    lines = render_text(diagnose(run)).splitlines()
    assert lines[0].startswith("gradproof · ") and "12 steps" in lines[0]
    assert lines[1].startswith(
        "Gradients are not cleared, or cleared at the wrong time, at test_diagnosis.py:"
    )
    assert lines[1].endswith("(proven)")
    assert lines[-1].startswith(f"next: gradproof diagnose {run.path}")
    assert any(line.startswith("watching took ") and "% of the wall time" in line for line in lines[-4:-1])
    assert max(map(len, lines[1:-1])) <= 100 + 3 and not any("\x1b" in line for line in lines)
    assert "\x1b[1;31m" in render_text(diagnose(run), color=True)


def test_a_killed_run_says_that_its_cost_is_not_known(written):
    assert "cost is not known" in render_text(diagnose(written(loss=FALLING).read()))


def test_color_is_for_terminals_that_want_it(monkeypatch):
    class Terminal:
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert wants_color(Terminal())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not wants_color(Terminal())


def test_a_diagnosis_as_data_and_as_a_sentence(written):
    found = diagnose(written(loss=FALLING[::-1]).read())
    data = json.loads(json_line(found.as_data()))
    lists = {"causes", "symptoms", "excluded", "notes", "next_steps"}
    words = {"failure", "raised", "stopped", "conclusion"}
    assert set(data) == {"run", "steps", "cost", "examination", "counted", "sure", *words, *lists}
    keys = {"family", "id", "level", "confidence", "where", "step", "evidence", "fix", "title"}
    assert set(data["causes"][0]) >= keys and isinstance(data["causes"][0]["evidence"], list)
    assert str(found) == "problem: the steps overshoot (likely)"
    assert str(Diagnosis("runs/a", 3)).startswith("No problem was found in the recorded numbers")
    assert all(s["level"] in LEVELS for s in data["symptoms"])


@pytest.mark.parametrize("last, level", [(0.05, "note"), (40.0, "problem")])
def test_a_loss_that_is_negative_at_times_may_rise(written, last, level):
    """A policy's loss from below zero to nearly zero is no divergence; one that grows beyond all bounds is."""
    noise = np.random.default_rng(0).normal(size=120) * 0.02
    run = written(loss=np.linspace(-0.7, last, 120) + noise, lr=[1e-3] * 120).read()
    names = {"note": "objective_rising", "problem": "loss_rising"}
    assert seen(run)[names[level]] == level and diagnose(run).worst == level


@pytest.mark.parametrize("back, level", [(True, "note"), (False, "problem")])
def test_a_loss_that_has_leapt_and_come_back_is_not_rising(written, back, level):
    """A codebook that is found late: four times the loss for a while, and down again when the run ends."""
    leap = [*np.linspace(13, 60, 12), *np.geomspace(58, 13 if back else 50, 12)]
    run = written(loss=[*np.linspace(14, 12, 36), *leap], lr=[1e-3] * 60).read()
    assert seen(run)["loss_came_back" if back else "loss_rising"] == level


def placed(family, where="net (a.py:3)", confidence="proven"):
    return Finding(family, f"{family}/x", "problem", confidence, (f"{family} seen",), "", where=where)


def test_a_nan_of_an_operation_that_is_wrong_in_itself_is_its_consequence():
    nan, axis = placed("forward-nonfinite"), placed("axis-or-shape-error")
    (kept,) = fold_consequences([nan, axis])
    assert kept.family == "axis-or-shape-error" and kept.evidence[-1] == "consequence: forward-nonfinite seen"
    elsewhere = placed("axis-or-shape-error", where="net (a.py:9)")
    assert fold_consequences([nan, elsewhere]) == [nan, elsewhere]
    unsure = placed("axis-or-shape-error", confidence="likely")
    assert fold_consequences([nan, unsure]) == [nan, unsure]


def test_where_nothing_is_proven_two_next_experiments_are_named(written):
    run = written(loss=[1.0, 1.1, 0.9, 1.0] * 20, lr=[1e-3] * 80).read()
    found = diagnose(run)
    assert len(found.next_steps) == 2 and "with experiments" in found.next_steps[0]
    assert "what would tell most" in render_text(found) and found.as_data()["next_steps"]


def test_a_run_that_is_well_needs_no_next_experiment(written):
    assert diagnose(written(loss=np.linspace(2, 0.1, 80), lr=[1e-3] * 80).read()).next_steps == ()


def test_the_loss_of_a_policy_may_stand_still(written):
    made = written(loss=-0.3 + 0.1 * NOISE[:80], lr=[1e-3] * 80)
    made.writer.set_info(facts={"policy_loss": True})
    assert seen(made.read())["objective_standing"] == "note"
    assert "loss_not_improving" in seen(written(loss=-0.3 + 0.1 * NOISE[:80], lr=[1e-3] * 80).read())


POLICIES = {  # curves of a policy's loss that say nothing: of values against returns that change, above all
    "rising": np.linspace(946, 2816, 80),
    "leaping": np.concatenate([[100, 110, 120], np.full(77, 5983.0)]),
    "swinging": 5.0 + np.tile([2.0, -2.0], 40),
    "hardly falling": np.linspace(2.3, 2.25, 80),
}


@pytest.mark.parametrize("name", POLICIES)
def test_nothing_is_accused_because_the_loss_of_a_policy_does_not_fall(written, name):
    made = written(loss=POLICIES[name] + 1e-3 * NOISE[:80], lr=[1e-3] * 80)
    assert set(TROUBLE) & set(seen(made.read()))
    made.writer.set_info(facts={"policy_loss": True})
    assert not set(TROUBLE) & set(seen(made.read())) and diagnose(made.read()).worst in (None, "note")


def said_of(run):
    return " ".join(symptom.evidence for symptom in diagnose(run).symptoms)


def test_a_loss_that_ends_below_its_first_value_does_not_rise(written):
    """Sorted by class: the first class is learned at once, the second costs more than guessing."""
    curve = np.concatenate([[4.6, 0.9, 0.2], np.linspace(6.0, 4.6, 27), np.linspace(4.5, 2.8, 270)])
    run = written(loss=curve + 0.01 * NOISE[:300]).read()
    assert "rises" not in said_of(run) and diagnose(run).worst in (None, "note")


def test_a_loss_that_has_leapt_at_once_is_told_with_what_it_was(written):
    curve = np.concatenate([[1.0, 1.1, 1.2], np.linspace(60, 50, 297)])
    run = written(loss=curve + 0.01 * NOISE[:300]).read()
    assert "the loss rises: 1.099" in said_of(run) and seen(run)["loss_rising"] == "problem"


def test_what_was_so_from_the_start_comes_before_what_came_of_it(written):
    made = written(loss=FALLING[::-1])
    growing = verdict("exploding-signal", "confirmed", experiment="signal", evidence=["1.5 a time step"])
    for step in (1, 10, 100):
        made.event("verdict", **growing, step=step)
    made.event("verdict", **verdict("lr-too-high", "confirmed", evidence=["overshoots"], step=32))
    first, second = diagnose(made.read()).causes
    assert (first.family, first.step) == ("exploding-signal", 1) and second.step == 32


def test_growth_that_uneven_windows_explain_stands_behind_them():
    ranked = rank([finding("exploding-signal", step=3), finding("grad-accumulation-error", step=9)])
    assert [f.family for f in ranked] == ["grad-accumulation-error", "exploding-signal"]
    measured = finding("exploding-signal", confidence="proven", step=9)
    ranked = rank([finding("grad-accumulation-error", step=3), measured])
    assert ranked[0].family == "exploding-signal"


def test_a_cut_graph_stands_before_the_length_of_the_steps():
    too_long = finding(confidence="proven", step=1)
    for family in ("detached-graph", "wrong-gradient", "param-not-updated"):
        proof = finding(family, confidence="proven", step=3)
        assert [f.family for f in rank([too_long, proof])] == [family, "lr-too-high"]
        suspicion = finding(family, confidence="likely", step=3)
        assert rank([too_long, suspicion])[0].family == "lr-too-high"
    late = finding(
        "dead-activation", confidence="proven", step=3
    )  # what steps that are too long leave behind
    assert rank([too_long, late])[0].family == "lr-too-high"


def test_a_gradient_that_does_not_arrive_stands_behind_what_keeps_it_out():
    missing = finding("param-not-updated", "warning", "likely")
    for family in ("forward-nonfinite", "dead-activation", "exploding-signal"):
        kept_out = finding(family, "warning", "possible", step=9)
        assert [f.family for f in rank([missing, kept_out])] == [family, "param-not-updated"]
    forgotten = finding("param-not-updated", "warning", "proven")
    assert rank([forgotten, finding("dead-activation", "warning", "likely", step=9)])[0] is forgotten


@pytest.mark.parametrize("step, first", [(1, "exploding-signal"), (32, "param-not-updated")])
def test_a_signal_that_explodes_from_the_start_is_no_lesser_matter_than_an_unused_layer(written, step, first):
    made = written([parameter("norm", gradient=False, changed=False), parameter("fc")], loss=FALLING)
    growing = verdict("exploding-signal", "confirmed", experiment="signal", evidence=["1.7 a block"])
    made.event("verdict", **growing, if_troubled=True, step=step)
    causes = diagnose(made.read()).causes
    assert causes[0].family == first and all(c.level != "problem" for c in causes)


@pytest.mark.parametrize(
    "order, burst, said", [("zbs", 200.0, True), ("zbcs", 200.0, False), ("zbs", 4.0, False)]
)
def test_a_gradient_that_bursts_and_is_not_clipped_is_said_beside_the_rate(written, order, burst, said):
    loss, norm = FALLING + 0.01 * NOISE[:60], 1.5 + 0.2 * NOISE[:60]
    loss[30], norm[30] = 8.0, burst
    made = written(loss=loss, grad_norm=norm, order=[order] * 60)
    made.writer.set_info(facts={"lines": {"backward": ["train.py:52"]}})
    made.event("verdict", **verdict("lr-too-high", "confirmed", evidence=["2 of 4"], step=32))
    (found,) = diagnose(made.read()).causes
    assert ("train.py:52" in " ".join(found.evidence) and "clip_grad_norm_" in found.fix) == said


def test_overshooting_is_worth_a_warning_where_the_loss_has_leapt(written):
    facts = verdict("lr-too-high", "confirmed", evidence=["3 of 5"], if_troubled=True, numbers={"rise": 0.2})
    facts["id"] = "lr-too-high/overshoot"
    calm = written(loss=FALLING).event("verdict", **facts).read()
    assert not diagnose(calm).causes
    leapt = FALLING.copy()
    leapt[4:7] *= 1.6
    (found,) = diagnose(
        Written(calm.path.parent / "leapt", loss=leapt).event("verdict", **facts).read()
    ).causes
    assert (found.family, found.level) == ("lr-too-high", "warning")
    facts["numbers"] = {"rise": 0.2, "steps": 1}  # the only tape, of a training's second step
    once = Written(calm.path.parent / "once", loss=leapt).event("verdict", **facts).read()
    assert not diagnose(once).causes


@pytest.mark.parametrize("last, level", [(0.35, "note"), (0.65, "warning"), (1.3, "problem")])
def test_a_loss_that_gives_back_some_of_what_it_has_learned(written, last, level):
    curve = (
        np.concatenate([np.linspace(1.0, 0.1, 12), np.linspace(0.1, last, 188)])
        + 0.002 * np.tile(NOISE, 4)[:200]
    )
    assert level in {seen(written(loss=curve).read()).get(name) for name in ("loss_drifting", "loss_rising")}


@pytest.mark.parametrize(
    "share, at, last, found",
    [
        (0.004, 107, 6.97, True),
        (0.2, 107, 6.97, False),  # something was explained
        (0.004, 107, 5.5, False),  # and learned since
        (0.004, 230, 6.97, False),  # there was no time to
    ],
)
def test_a_constant_would_do_as_well(written, share, at, last, found):
    curve = np.concatenate([np.linspace(7.8, 7.0, 60), np.linspace(7.0, last, 200)])
    run = written(loss=curve + 1e-3 * np.tile(NOISE, 8)[:260])
    run.writer.set_info(facts={"learned": [[at, share]]})
    assert ("nothing_learned" in seen(run.read())) == found


@pytest.mark.parametrize("guess, last, found", [(6.93, 6.97, True), (8.0, 6.97, False), (5.0, 6.0, False)])
def test_a_loss_that_ends_where_guessing_is(written, guess, last, found):
    """In the last case it is above that of a constant, and still falls."""
    run = written(loss=np.linspace(7.0, last, 260) + 1e-3 * np.tile(NOISE, 8)[:260])
    run.writer.set_info(facts={"guessing": [[1, guess], [9, guess + 0.01]]})
    assert ("nothing_learned" in seen(run.read())) == found


@pytest.mark.parametrize("last, level", [(2.25, "note"), (1.2, None)])
def test_a_loss_that_hardly_falls(written, last, level):
    curve = np.linspace(2.3, last, 60) + 1e-3 * NOISE[:60]
    assert seen(written(loss=curve).read()).get("loss_hardly_falling") == level


@pytest.mark.parametrize(
    "limit, kind, found", [(0.01, "SGD", True), (0.5, "SGD", False), (0.01, "Adam", False)]
)
def test_a_clip_that_sets_the_step(tmp_path, limit, kind, found):
    writer = RunWriter(tmp_path / "run", {"optimizers": [{"name": "optimizer", "class": kind}]})
    for step in range(40):
        row = {"step": step, "loss": 1.0 - 0.01 * step, "order": "zbcs", "lr": 0.1}
        writer.write_step({**row, "norm_before_clip": 2.0, "clip_limit": limit})
    writer.close()
    assert ("clip_sets_the_step" in seen(open_run(tmp_path / "run"))) == found


@pytest.mark.parametrize("way", ["assigned", "copied"])
def test_gradients_of_master_weights_may_stay(tmp_path, way):
    """They are written anew at each step; the backward adds to the model's own, which are cleared."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).bfloat16()
    masters = [p.detach().float().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.05)
    x = torch.randn(64, 8).bfloat16()
    with gradproof.watch(model, optimizer, out=tmp_path / "run", experiments=False):
        for _ in range(12):
            (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
            for p, master in zip(model.parameters(), masters, strict=True):
                if way == "assigned" or master.grad is None:
                    master.grad = p.grad.float()
                else:
                    master.grad.copy_(p.grad)
                p.grad = None
            optimizer.step()
            with torch.no_grad():
                for p, master in zip(model.parameters(), masters, strict=True):
                    p.copy_(master)
    run = open_run(tmp_path / "run")
    assert list(symptoms.order_of_calls(run)) == []


@pytest.mark.parametrize("died", [True, False])
def test_what_matters_only_in_trouble_stands_behind_a_rate_that_died(written, died):
    """A loss that stays where it is: because nothing moves any more, or because the first inputs are forgotten."""
    lr = 0.1 * 0.9 ** np.arange(300) if died else np.full(300, 0.1)
    made = written(
        loss=2.0 + 0.01 * np.cos(np.arange(300)), lr=lr, grad_norm=np.ones(300), order=["zbsl"] * 300
    )
    made.event(
        "verdict", **verdict("vanishing-signal", "confirmed", id="vanishing-signal/time", if_troubled=True)
    )
    first, *_ = diagnose(made.read()).causes
    assert first.id == ("lr-schedule-error/dies-early" if died else "vanishing-signal/time")
    assert first.level == "problem"


def test_who_reads_the_conclusion_alone_is_told_of_the_problem():
    finding = Finding(
        "lr-too-high", "lr-too-high/overshoot", "problem", "proven", ("0.1 to 9",), "lower it", "a.py:3"
    )
    data = Diagnosis("runs/a", 10, (finding,)).as_data()
    assert data["conclusion"] == "problem: lr-too-high/overshoot, at a.py:3 (proven)." and not data["sure"]
    assert data["examination"]["conclusion"] == data["conclusion"]
    noted = Diagnosis("runs/a", 10, (replace(finding, level="note"),)).as_data()
    assert noted["conclusion"].startswith("No problem was found")
