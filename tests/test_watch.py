"""Watching changes nothing, breaks nothing, leaves nothing behind, and records what happened."""

import gc
import resource
import sys
import warnings
from contextlib import ExitStack

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import trainings
from torch import nn

import gradproof
from gradproof import errors
from gradproof.probes import ledger, modules, optimizer, parameters, session, tensors
from gradproof.probes.schedule import Purse
from gradproof.probes.step import OpenStep
from gradproof.probes.watch import watch
from gradproof.record.run import open_run

KINDS = [trainings.mlp, trainings.cnn, trainings.lstm, trainings.transformer, trainings.checkpointed]


def train(kind, watched=None, **options):
    """Losses, final weights and the state of the random numbers of a training, watched or not."""
    torch.manual_seed(3)
    options.setdefault("experiments", False)
    model, optimizer_, losses = kind()
    if watched is None:
        losses = list(losses)
    else:
        with watch(model, optimizer_, out=watched, **options):
            losses = list(losses)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return losses, state, torch.get_rng_state()


def hooks_left():
    """Everything that watching hangs its hooks on."""
    return (
        len(nn.modules.module._global_forward_hooks),
        len(sys.modules["torch.optim.optimizer"]._global_optimizer_pre_hooks),
        len(sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks),
        torch.autograd.backward,
        torch.optim.Optimizer.zero_grad,
        torch.optim.Optimizer.__init__,
        nn.Module.zero_grad,
        nn.utils.clip_grad_norm_,
        nn.utils.clip_grad.clip_grad_value_,
        torch.amp.GradScaler.step,
        torch.optim.lr_scheduler.LRScheduler.step,
        torch.utils.data.DataLoader.__iter__,
        torch.utils.data.DataLoader.__init__,
        torch.compile,
        nn.Module.compile,
        nn.Module.state_dict,
        nn.Module.requires_grad_,
        nn.init.normal_,
        nn.parallel.DistributedDataParallel.no_sync,
        torch.manual_seed,
        torch._C._len_torch_dispatch_stack(),
    )


@pytest.mark.parametrize(
    "options", [{}, {"schedule": "all every step"}, {"experiments": True}], ids=["", "all", "experiments"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_it_changes_nothing(kind, options, tmp_path):
    plain, before = train(kind), hooks_left()
    watched = train(kind, tmp_path / "run", **options)
    assert hooks_left() == before
    assert watched[0] == plain[0]
    assert all(torch.equal(watched[1][name], plain[1][name]) for name in plain[1])
    assert torch.equal(watched[2], plain[2])
    run = open_run(tmp_path / "run")
    assert len(run) == len(plain[0]) and run.table("output", "norm").values.size
    assert (run.info["cost"]["taped_steps"] >= 2) == options.get("experiments", False)
    assert not [event for event in run.events if event["event"] == "experiment_failed"], run.events


def test_experiments_run_in_a_watched_block_by_default(tmp_path):
    """A learning rate that is far too high is proven, not only suspected; and the hooks are gone after an error."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer_ = torch.optim.SGD(model.parameters(), lr=2.0)
    before = hooks_left()
    with pytest.raises(ZeroDivisionError), watch(model, optimizer_, out=tmp_path / "run"):
        for _ in range(40):
            x = torch.randn(32, 4)
            optimizer_.zero_grad()
            nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
            optimizer_.step()
        raise ZeroDivisionError
    assert hooks_left() == before
    first = gradproof.diagnose(tmp_path / "run").causes[0]
    assert (first.family, first.confidence) == ("lr-too-high", "proven")


PROBES = [
    (parameters.Parameters, "of_optimizer"),
    (parameters.Parameters, "describe"),
    (ledger.Ledger, "add"),
    (tensors, "measure"),
    (tensors, "measure_changes"),
    (tensors, "square_sums"),
    (tensors, "sample"),
    (tensors, "distributions"),
    (tensors, "cosines"),
    (tensors, "dead_share"),
    (optimizer, "moments"),
    (optimizer.WeightCopy, "take"),
    (modules.OutputProbe, "_backward"),
    (session.RunWriter, "write_step"),
    (session.RunWriter, "write_frame"),
]


@pytest.mark.parametrize("owner, name", PROBES, ids=[name for _, name in PROBES])
def test_it_never_breaks_training(owner, name, tmp_path, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("planted")

    plain = train(trainings.mlp)
    before = hooks_left()
    monkeypatch.setattr(owner, name, broken)
    with pytest.warns(UserWarning, match="gradproof stopped watching.*planted.*training goes on") as caught:
        watched = train(trainings.mlp, tmp_path / "run", schedule="all steps 0-3; light every step")
    assert len(caught) == 1
    assert watched[0] == plain[0] and hooks_left() == before


def test_where_warnings_are_errors_it_prints_instead_and_tapes_no_more(tmp_path, monkeypatch):
    printed = []

    def broken(*args, **kwargs):
        raise RuntimeError("planted")

    plain = train(trainings.mlp)
    monkeypatch.setattr(session.RunWriter, "write_step", broken)
    monkeypatch.setattr(errors, "print_instead", printed.append)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watched = train(trainings.mlp, tmp_path / "run", experiments=True)
    assert watched[0] == plain[0] and torch._C._len_torch_dispatch_stack() == 0
    assert len(printed) == 1 and "planted" in printed[0]


def test_a_training_in_float64_by_default(tmp_path):
    torch.set_default_dtype(torch.float64)
    try:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.Adam(model.parameters())
        with watch(model, optimizer, out=tmp_path / "run", schedule="all every step"):
            for _ in range(6):
                optimizer.zero_grad()
                model(torch.randn(8, 4)).square().mean().backward()
                optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    assert len(open_run(tmp_path / "run")) == 6


def test_one_block_inside_another(tmp_path):
    """Two trainings in turns, each watched and taped by itself, and both as they are alone."""

    def both(path=None):
        torch.manual_seed(1)
        models = [nn.Linear(4, 1) for _ in range(2)]
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
        with ExitStack() as stack:
            for i, pair in enumerate(zip(models, optimizers, strict=True)):
                if path is not None:
                    stack.enter_context(watch(*pair, out=path / str(i)))
            for step in range(12):
                i = step % 3 == 0
                loss = models[i](torch.randn(8, 4)).square().mean()
                optimizers[i].zero_grad()
                loss.backward()
                optimizers[i].step()
        return [value.clone() for m in models for value in m.state_dict().values()]

    plain, before = both(), hooks_left()
    assert all(torch.equal(a, b) for a, b in zip(plain, both(tmp_path), strict=True))
    assert hooks_left() == before and [len(open_run(tmp_path / n)) for n in "01"] == [8, 4]


def test_a_state_that_is_a_plain_dict_is_no_reason_to_fail(tmp_path):
    model = nn.Linear(4, 1)
    model._register_state_dict_hook(lambda module, state, prefix, metadata: dict(state))
    with watch(model, torch.optim.SGD(model.parameters(), lr=0.1), out=tmp_path / "run"):
        assert type(model.state_dict()) is dict


def test_no_hook_stays_behind(tmp_path):
    before = hooks_left()
    train(trainings.transformer, tmp_path / "a", schedule="all every step")
    assert hooks_left() == before
    model, optimizer_, losses = trainings.mlp()
    with pytest.raises(ZeroDivisionError), watch(model, optimizer_, out=tmp_path / "b"):
        next(losses)
        raise ZeroDivisionError
    assert hooks_left() == before
    assert len(open_run(tmp_path / "b")) == 1


def test_statistics_are_those_of_the_tensors(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(5, 2)
    optimizer_ = torch.optim.SGD(model.parameters(), lr=0.5)
    with watch(model, optimizer_, out=tmp_path / "run", experiments=False):
        old = model.weight.detach().double().clone()
        model(torch.randn(7, 5)).square().mean().backward()
        gradient = model.weight.grad.double().clone()
        optimizer_.step()
    run = open_run(tmp_path / "run")
    new = model.weight.detach().double()
    expected = {"gradient": gradient, "weight": new, "update": new - old}
    for kind, tensor in expected.items():
        for statistic, value in {
            "norm": tensor.norm(),
            "mean": tensor.mean(),
            "std": tensor.std(correction=0),
            "min": tensor.min(),
            "max": tensor.max(),
            "absmax": tensor.abs().max(),
        }.items():
            measured = run.series(kind, "weight", statistic)[1]
            np.testing.assert_allclose(measured, [value.item()], rtol=2e-5, err_msg=f"{kind} {statistic}")
    whole = torch.cat([gradient.flatten(), model.bias.grad.double()]).norm()
    np.testing.assert_allclose(run.steps["grad_norm"], [whole.item()], rtol=5e-6)


def test_percentiles_and_exponents(tmp_path):
    train(trainings.mlp, tmp_path / "run")
    run = open_run(tmp_path / "run")
    number = next(i for i, t in enumerate(run.tensors) if (t["kind"], t["name"]) == ("weight", "0.weight"))
    steps, percentiles, exponents = run.percentiles(number)
    assert len(steps) and (np.diff(percentiles, axis=1) >= 0).all()
    assert exponents.sum(axis=1).tolist() == [96] * len(steps)  # 6 × 16 entries, each counted once


def test_norms_are_accurate_where_float32_sums_are_not():
    long = torch.full((40_000_000,), 1e-3)
    assert tensors.square_sums([long])[0].sqrt().item() == pytest.approx(1e-3 * 4e7**0.5, rel=5e-6)


def test_adam_state_cosine_and_ratio(tmp_path):
    train(trainings.mlp, tmp_path / "run")
    run = open_run(tmp_path / "run")
    assert (run.table("adam_v", "min").values >= 0).all()
    assert np.nanmax(np.abs(run.table("gradient", "cosine").values)) <= 1.0001
    assert np.isfinite(run.steps["cosine"][1:3]).all()
    assert (run.table("adam_v", "eps_share").values >= 0).all()


def test_gradient_accumulation_is_one_step(tmp_path):
    model = nn.Linear(3, 1)
    optimizer_ = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with watch(model, optimizer_, out=tmp_path / "run", experiments=False):
        for _ in range(3):
            optimizer_.zero_grad()
            for _ in range(4):
                loss = model(torch.randn(2, 3)).square().mean() / 4
                loss.backward()
                losses.append(loss.item())
            optimizer_.step()
    run = open_run(tmp_path / "run")
    assert run.steps["backwards"].tolist() == [4, 4, 4] and list(run.steps["order"]) == ["zbbbbs"] * 3
    np.testing.assert_allclose(run.steps["loss"], np.reshape(losses, (3, 4)).sum(axis=1), rtol=1e-6)
    calls = run.table("output", "norm")  # one row for the module, its four calls together
    assert calls.names == ["model"] and len(calls.steps) == 3


def test_a_gan_has_two_tracks(tmp_path):
    generator, judge = nn.Linear(2, 2), nn.Linear(2, 1)
    one = torch.optim.Adam(generator.parameters(), lr=1e-3)
    two = torch.optim.Adam(judge.parameters(), lr=2e-3)
    with watch([generator, judge], [one, two], out=tmp_path / "run"):
        for _ in range(3):
            two.zero_grad()
            judge(generator(torch.randn(4, 2)).detach()).mean().backward()
            two.step()
            one.zero_grad()
            (-judge(generator(torch.randn(4, 2))).mean()).backward()
            one.step()
    run = open_run(tmp_path / "run")
    assert run.steps["lr"].tolist() == [2e-3, 1e-3] * 3
    assert [o["name"] for o in run.info["optimizers"]] == ["two", "one"]
    names = {p["name"] for p in run.info["parameters"]}
    assert names == {"generator.weight", "generator.bias", "judge.weight", "judge.bias"}


def test_tied_and_frozen_weights(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.middle, self.head = (
                nn.Embedding(5, 4),
                nn.Linear(4, 4),
                nn.Linear(4, 5, False),
            )
            self.head.weight = self.embedding.weight
            self.middle.requires_grad_(False)

        def forward(self, ids):
            return self.head(self.middle(self.embedding(ids)))

    model = Tied()
    optimizer_ = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with watch(model, optimizer_, out=tmp_path / "run", experiments=False):
        F.cross_entropy(model(torch.arange(5)), torch.arange(5)).backward()
        optimizer_.step()
    run = open_run(tmp_path / "run")
    assert run.table("gradient", "norm").names == ["embedding.weight"]
    assert [p["name"] for p in run.info["parameters"]] == ["embedding.weight"]
    assert not gradproof.diagnose(run).causes


def test_lbfgs_closure(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer_ = torch.optim.LBFGS(model.parameters(), max_iter=4)
    x, y = torch.randn(20, 3), torch.randn(20, 1)

    def closure():
        optimizer_.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    model.weight.grad = None
    closure()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()
    with watch(model, optimizer_, out=tmp_path / "run", experiments=False):
        for _ in range(2):
            optimizer_.step(closure)
    run = open_run(tmp_path / "run")
    assert len(run) == 2 and run.steps["backwards"][0] >= 2
    assert run.steps["grad_norm"][0] == pytest.approx(expected, rel=1e-5)  # the gradient at the start


def test_sparse_gradients(tmp_path):
    model = nn.Embedding(50, 4, sparse=True)
    optimizer_ = torch.optim.SparseAdam(model.parameters(), lr=0.1)
    with watch(model, optimizer_, out=tmp_path / "run", experiments=False):
        for _ in range(2):
            optimizer_.zero_grad()
            model(torch.tensor([3, 3, 7])).square().sum().backward()
            dense = model.weight.grad.to_dense().norm().item()
            optimizer_.step()
    run = open_run(tmp_path / "run")
    assert run.steps["grad_norm"][-1] == pytest.approx(dense, rel=1e-5)


def test_compiled_model(tmp_path):
    torch.manual_seed(0)
    model = torch.compile(
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)), backend="eager", fullgraph=True
    )
    optimizer_ = torch.optim.Adam(model.parameters(), lr=1e-2)
    with watch(model, optimizer_, out=tmp_path / "run", experiments=False):
        for _ in range(4):
            optimizer_.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer_.step()
    run = open_run(tmp_path / "run")
    assert run.table("gradient", "norm").names == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert len(run) == 4 and not run.numbers("output")  # outputs stay inside the compiled graph
    torch._dynamo.reset()


def test_checkpointing_measures_each_module_once(tmp_path):
    train(trainings.checkpointed, tmp_path / "run", schedule="all every step")
    run = open_run(tmp_path / "run")
    table = run.table("output", "zero")
    assert table.names[:3] == ["0", "1", "2"] and np.isfinite(table.values).all()


def test_bf16_autocast(tmp_path):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer_ = torch.optim.Adam(model.parameters(), lr=1e-2)
    with watch(model, optimizer_, out=tmp_path / "run", experiments=False):
        for _ in range(3):
            optimizer_.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(torch.randn(8, 4)).square().mean()
            loss.backward()
            optimizer_.step()
    run = open_run(tmp_path / "run")
    assert {t["dtype"] for t in run.tensors if t["kind"] == "output"} == {"bfloat16"}
    assert np.isfinite(run.steps["grad_norm"]).all()


def test_grad_scaler_skips_are_steps_and_losses_are_unscaled(tmp_path):
    model = nn.Linear(4, 1)
    optimizer_ = torch.optim.SGD(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    seen = []
    with watch(model, optimizer_, out=tmp_path / "run", experiments=False):
        for step in range(4):
            optimizer_.zero_grad()
            loss = model(torch.randn(8, 4)).square().mean() * (float("inf") if step == 1 else 1.0)
            seen.append(loss.item())
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer_)
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            scaler.step(optimizer_)
            scaler.update()
    run = open_run(tmp_path / "run")
    assert len(run) == 4 and np.nan_to_num(run.steps["skipped"]).tolist() == [0, 1, 0, 0]
    np.testing.assert_allclose(run.steps["loss"], seen, rtol=1e-6)
    assert run.steps["loss_scale"].tolist() == [1024, 1024, 512, 512]
    assert list(run.steps["order"]) == ["zbucs", "zbucx", "zbucs", "zbucs"]
    assert not np.isfinite(run.steps["grad_norm"][1])
    assert np.isfinite(run.steps["grad_norm"][[0, 2, 3]]).all()


def test_a_fused_optimizer_unscales_and_skips_inside_its_own_step(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer_ = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    norms = []
    rules = "parameters steps 0-2; light every step"
    with watch(model, optimizer_, out=tmp_path / "run", schedule=rules, experiments=False):
        for step in range(6):
            optimizer_.zero_grad()
            loss = model(torch.randn(8, 4)).square().mean() * (float("inf") if step == 1 else 1.0)
            scaler.scale(loss).backward()
            norms.append(
                torch.cat([p.grad.flatten() for p in model.parameters()]).norm() / scaler.get_scale()
            )
            scaler.step(optimizer_)
            scaler.update()
    run = open_run(tmp_path / "run")
    assert np.nan_to_num(run.steps["skipped"]).tolist() == [0, 1, 0, 0, 0, 0]
    finite = [0, 2, 3, 4, 5]
    np.testing.assert_allclose(run.steps["grad_norm"][finite], np.array(norms)[finite], rtol=1e-5)
    per_tensor = run.table("gradient", "norm").values[0]
    np.testing.assert_allclose(np.sqrt(np.square(per_tensor).sum()), norms[0], rtol=1e-5)
    assert gradproof.diagnose(run).worst != "problem"


def test_adams_state_can_be_measured_without_outputs(tmp_path):
    train(trainings.mlp, tmp_path / "run", schedule="optimizer every step")
    run = open_run(tmp_path / "run")
    assert (
        np.isfinite(run.table("adam_m", "norm").values).all() and len(run.table("adam_v", "norm").steps) == 8
    )
    assert np.isfinite(run.steps["grad_norm"]).all() and not run.numbers("output")


def test_a_gpu_counts_distributions_as_a_cpu_does():
    samples = torch.randn(40, 1024) * 10.0 ** torch.arange(-45, 35, 2)[:, None]
    samples[3] = float("nan")
    samples[4] = 0.0
    samples[5, ::3] = float("inf")
    samples[6, 7:] = float("nan")
    samples[7, ::2] = 0.0
    expected = tensors.distributions(samples.numpy())
    for device in ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]:
        found = tensors.distributions_on_device(samples.to(device)).cpu().numpy()
        np.testing.assert_array_equal(found.astype(np.float32), expected)


def test_samples_are_the_entries_of_the_tensors():
    several = [torch.arange(5.0), torch.arange(3000.0).reshape(3000, 1), torch.arange(12.0).reshape(3, 4).T]
    rows = tensors.sample(several)
    assert rows.shape == (3, tensors.SAMPLE) and rows[0, :5].tolist() == [0, 1, 2, 3, 4]
    assert rows[0, 5:].isnan().all() and rows[1, :1000].tolist() == list(range(0, 3000, 3))
    assert sorted(rows[2, :12].tolist()) == list(range(12))
    mixed = tensors.sample([torch.ones(2, dtype=torch.bfloat16), torch.ones(3, dtype=torch.float64)])
    assert mixed.dtype == torch.float32 and mixed.nansum() == 5


def test_tuple_and_dict_outputs_and_modules_called_twice(tmp_path):
    class Many(nn.Module):
        def __init__(self):
            super().__init__()
            self.pair, self.table, self.nothing = Pair(), Table(), nn.Identity()

        def forward(self, x):
            a, b = self.pair(x)
            self.pair(a)
            return self.nothing(self.table(a + b)["value"])

    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x):
            return self.linear(x), 2 * x

    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 1)

        def forward(self, x):
            return {"value": self.linear(x), "name": "x"}

    model = Many()
    optimizer_ = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer_, out=tmp_path / "run", experiments=False):
        model(torch.ones(4, 3)).sum().backward()
        optimizer_.step()
    run = open_run(tmp_path / "run")
    names = run.table("output", "norm").names
    assert "pair.linear" in names and "pair[1]" in names and "table.linear" in names


def test_optimizers_that_step_inside_backward_are_one_step(tmp_path):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    with watch(model, list(optimizers.values()), out=tmp_path / "run"):
        for _ in range(3):
            model(torch.randn(4, 3)).square().mean().backward()
    run = open_run(tmp_path / "run")
    assert len(run) == 3
    assert len(run.table("gradient", "norm").names) == 4


def test_scheduler_epochs_and_clip_by_value(tmp_path):
    model = nn.Linear(3, 1)
    optimizer_ = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer_, 1, gamma=0.5)
    data = torch.utils.data.TensorDataset(torch.randn(8, 3), torch.randn(8, 1))
    with watch(model, optimizer_, out=tmp_path / "run", experiments=False):
        for _ in range(2):
            for x, y in torch.utils.data.DataLoader(data, batch_size=4):
                optimizer_.zero_grad()
                F.mse_loss(model(x), y).backward()
                nn.utils.clip_grad_value_(model.parameters(), 0.1)
                optimizer_.step()
            scheduler.step()
    run = open_run(tmp_path / "run")
    assert run.steps["epoch"].tolist() == [0, 0, 1, 1] and run.steps["batch"].tolist() == [0, 1, 0, 1]
    assert run.steps["lr"].tolist() == [1.0, 1.0, 0.5, 0.5]
    assert list(run.steps["order"]) == ["zbvs", "zbvs", "lzbvs", "zbvs"]
    assert run.steps["clip_limit"].tolist() == [0.1] * 4


def test_training_without_modules(tmp_path):
    rng = np.random.default_rng(0)
    weights = rng.normal(size=(3, 1))
    m, v = np.zeros_like(weights), np.zeros_like(weights)
    with watch(out=tmp_path / "run") as monitor:
        for _ in range(5):
            x = rng.normal(size=(16, 3))
            gradient = 2 * x.T @ (x @ weights) / 16
            norm = float(np.linalg.norm(gradient))
            monitor.tensors("gradient", {"output": gradient})
            monitor.clip(before=norm, after=min(norm, 1.0), limit=1.0)
            m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
            update = -0.01 * m / (np.sqrt(v) + 1e-8)
            weights = weights + update
            monitor.adam({"output": m}, {"output": v}, {"output": update}, {"output": weights})
            monitor.log(loss=float(np.mean((x @ weights) ** 2)), lr=0.01, grad_norm=min(norm, 1.0))
    run = open_run(tmp_path / "run")
    assert len(run) == 5 and run.steps["lr"].tolist() == [0.01] * 5
    np.testing.assert_allclose(
        run.series("weight", "output", "norm")[1][-1], np.linalg.norm(weights), rtol=1e-6
    )
    np.testing.assert_allclose(run.series("update", "output", "min")[1][-1], update.min(), rtol=1e-6)
    assert np.isfinite(run.steps["norm_before_clip"]).all()


def test_nonfinite_values_are_shown_as_what_they_are(tmp_path):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    optimizer_ = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer_, out=tmp_path / "run", experiments=False):
        for step in range(6):
            optimizer_.zero_grad()
            x = torch.randn(4, 3)
            if step == 4:
                x[2, 1] = float("nan")
            model(x).square().mean().backward()
            optimizer_.step()
    run = open_run(tmp_path / "run")
    assert "nan" in (tmp_path / "run" / "steps.csv").read_text().splitlines()[5]
    table = run.table("gradient", "nan")
    assert table.steps[table.values.sum(axis=1) > 0][0] == 4
    first = gradproof.diagnose(run).causes[0]
    assert first.family == "forward-nonfinite" and first.step == 4


def train_small_steps(path, steps, **options):
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])
    optimizer_ = torch.optim.Adam(model.parameters(), lr=1e-3)
    with watch(model, optimizer_, out=path, experiments=False, **options):
        for _ in range(steps):
            optimizer_.zero_grad()
            model(torch.randn(8, 16)).square().mean().backward()
            optimizer_.step()
    return open_run(path)


def test_a_budget_that_is_asked_for_is_kept_even_by_tiny_steps(tmp_path):
    run = train_small_steps(tmp_path / "run", 10_000, budget=0.05)
    cost = run.info["cost"]
    assert cost["steps"] == 10_000 and cost["unseen_steps"] == 10_000 - len(run) > 0
    assert run.steps["step"].max() > 8_000 and (np.diff(run.steps["step"]) > 0).all()  # it goes on looking
    assert cost["share"] < 0.05 + 0.1 / cost["wall_seconds"]  # the first three steps and the end are dear


def test_without_a_budget_every_step_has_its_row(tmp_path, monkeypatch):
    monkeypatch.setattr(Purse, "GRACE", 0.0)
    run = train_small_steps(tmp_path / "run", 300)
    assert len(run) == 300 and run.info["cost"]["unseen_steps"] == 0 < run.info["cost"]["bare_steps"]


@pytest.mark.slow
def test_memory_stays_constant_over_20000_steps(tmp_path):
    model = nn.Linear(4, 1)
    optimizer_ = torch.optim.Adam(model.parameters(), lr=1e-3)
    x, y = torch.randn(8, 4), torch.randn(8, 1)
    sizes = []
    with watch(model, optimizer_, out=tmp_path / "run", experiments=False):
        for step in range(20_000):
            optimizer_.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer_.step()
            if step in (2_000, 19_999):
                gc.collect()
                sizes.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    assert sizes[1] - sizes[0] < 8 * 1024  # KiB
    assert len(open_run(tmp_path / "run")) == 20_000


def test_watching_is_silent(tmp_path, capfd):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(trainings.mlp, tmp_path / "run")
    assert capfd.readouterr() == ("", "")


def test_what_a_gpu_has_counted_is_written_as_what_a_cpu_has(tmp_path, monkeypatch):
    def run(name):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        with gradproof.watch(model, optimizer, out=tmp_path / name, experiments=False):
            for _ in range(3):
                optimizer.zero_grad()
                (model(torch.randn(6, 4)) + model(torch.randn(6, 4))).square().mean().backward()
                optimizer.step()
        return open_run(tmp_path / name).distributions

    plain = run("plain")

    def far(step, start, sample):
        step._far_samples.append((start, sample))

    monkeypatch.setattr(OpenStep, "_add_sample", far)
    counted = run("counted")
    assert len(plain) == len(counted) > 0
    for one, other in zip(plain, counted, strict=True):
        order, same = np.argsort(one.numbers), np.argsort(other.numbers)
        assert (one.step, list(one.numbers[order])) == (other.step, list(other.numbers[same]))
        np.testing.assert_array_equal(one.values[order], other.values[same])
