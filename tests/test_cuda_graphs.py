"""While a CUDA graph is captured nothing of gradproof runs; a graph that holds a step is a step at each replay."""

import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from gradproof.probes import aside
from gradproof.probes.watch import watch
from gradproof.record.run import open_run

NO_WORK = {"detach", "__get__", "is_floating_point", "is_complex", "dim", "numel", "size", "stride"}


class Ours(TorchFunctionMode):
    """What gradproof asks of tensors while something is captured, but for questions that need no device."""

    def __init__(self):
        super().__init__()
        self.calls, self.all = [], 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        frame = sys._getframe(1)  # not what a wrapper passes on to
        if "/gradproof/" in frame.f_code.co_filename:
            self.all += 1
            name = getattr(function, "__name__", str(function))
            if FakeGraph.capturing and name not in NO_WORK:
                self.calls.append(f"{name} at {frame.f_code.co_filename}:{frame.f_lineno}")
        return function(*args, **(kwargs or {}))


class FakeGraph:
    """A graph that on replay calls a function, which works on plain memory without any hook."""

    capturing = False

    def __init__(self, function=None):
        self.function = function

    def capture_begin(self):
        FakeGraph.capturing = True

    def capture_end(self):
        FakeGraph.capturing = False

    def replay(self):
        self.function()


@pytest.fixture
def fake_cuda(monkeypatch):
    """A CPU that says it is a GPU whose stream is being captured, whenever a FakeGraph says so."""
    monkeypatch.setattr(aside, "_uses_cuda", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: FakeGraph.capturing)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)


class Training:
    """A small training whose step can be run, or captured and then repeated by hand in the same memory."""

    def __init__(self, clear="before", step=True):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.0), nn.Linear(16, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.clear, self.steps = clear, step
        self.x, self.loss, self.losses = torch.randn(16, 4), None, []

    def step(self):
        """All that a watched step can pass through."""
        if self.clear == "before":
            self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.model(self.x), self.x.sum(1, keepdim=True))
        with torch.no_grad():
            self.model(self.x)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 100.0)
        if self.steps:
            self.optimizer.step()
        if self.clear == "after":
            self.optimizer.zero_grad(set_to_none=False)
        return loss

    def capture(self):
        graph = torch.cuda.CUDAGraph(self.repeat)
        graph.capture_begin()
        self.loss = self.step().detach()
        graph.capture_end()
        return graph

    @torch.enable_grad()
    def repeat(self):
        parameters = list(self.model.parameters())
        loss = nn.functional.mse_loss(
            nn.functional.linear(
                nn.functional.linear(self.x, parameters[0], parameters[1]).relu(),
                parameters[2],
                parameters[3],
            ),
            self.x.sum(1, keepdim=True),
        )
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            self.loss.copy_(loss)
            self.losses.append(loss.item())
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad.copy_(gradient)
                if self.steps:
                    parameter.sub_(gradient, alpha=0.05)
                if self.clear == "after":
                    parameter.grad.zero_()


@pytest.mark.parametrize("experiments", [False, True])
@pytest.mark.parametrize("clear", ["before", "after", "never"])
def test_each_replay_of_a_captured_step_is_a_step(clear, experiments, fake_cuda, tmp_path):
    training, ours = Training(clear), Ours()
    out, rules = tmp_path / "run", None if experiments else "all every step"
    with ours, watch(training.model, training.optimizer, out=out, schedule=rules, experiments=experiments):
        for _ in range(2):
            training.step()
        seen = ours.all
        training.optimizer.zero_grad(set_to_none=True)
        graph = training.capture()
        assert ours.calls == [], "gradproof worked while the stream was captured"
        for group in training.optimizer.param_groups:
            group["lr"] = 1e-9  # too late: the graph holds another
        for _ in range(12):
            graph.replay()
        assert ours.all > seen > 0, "the mode sees gradproof at work where it may"
    run = open_run(out)
    assert run.info["failure"] is None and len(run) == 14
    assert (
        run.steps["loss"][2:] == pytest.approx(training.losses)
        and run.steps["loss"][-1] < 0.9 * training.losses[0]
    )
    assert (run.steps["lr"] == 0.05).all()
    order = {"before": "zbcs", "after": "zbcsz", "never": "zbcs"}[clear]
    assert set(run.steps["order"][3:]) == {order}, "the step before the graph ends with zero_grad"
    assert np.isfinite(run.steps["norm_before_clip"]).all()
    known = np.isfinite(run.steps["grad_norm"][3:])
    assert known.all() if clear != "after" else not known.any(), (
        "what is cleared inside of the graph is not measured"
    )
    if not experiments:
        updates = run.table("update", "norm")
        assert set(updates.steps) >= set(range(3, 14)) and (updates.values[3:] > 0).any(axis=1).all()


def test_a_graph_that_holds_only_forward_and_backward(fake_cuda, tmp_path):
    training, ours = Training(step=False), Ours()
    with ours, watch(training.model, training.optimizer, out=tmp_path / "run", experiments=False):
        graph = training.capture()
        assert ours.calls == []
        for _ in range(6):
            graph.replay()
            training.optimizer.step()
    run = open_run(tmp_path / "run")
    assert run.info["failure"] is None and len(run) == 6
    assert run.steps["loss"] == pytest.approx(training.losses)
    assert set(run.steps["order"]) == {"zbcs"}


def test_the_very_first_step_is_captured(fake_cuda, tmp_path):
    """What looks around once, at the first step or validation, waits for one that is not captured."""
    training, ours = Training(), Ours()
    evaluated = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    table, order = torch.rand(600, 2).half(), torch.randperm(300)
    with ours, watch(training.model, training.optimizer, out=tmp_path / "run"):
        training.model.load_state_dict({k: v.clone() for k, v in training.model.state_dict().items()})
        for parameter in training.model.parameters():
            nn.init.zeros_(parameter)
        graph = torch.cuda.CUDAGraph(training.repeat)
        graph.capture_begin()
        training.loss = training.step().detach()
        training.model.eval()
        with torch.no_grad():
            training.model(training.x)
            evaluated(training.x)
        training.model.train()
        graph.capture_end()
        assert ours.calls == []
        graph.replay()
    assert len(open_run(tmp_path / "run")) == 1 and len(table) + len(order) == 900


def test_a_graph_that_does_not_train_is_no_step(fake_cuda, tmp_path):
    training = Training()
    with watch(training.model, training.optimizer, out=tmp_path / "run", experiments=False):
        graph = FakeGraph(lambda: None)
        graph.capture_begin()
        with torch.no_grad():
            training.model(training.x)
        graph.capture_end()
        for _ in range(3):
            graph.replay()
            training.step()
    run = open_run(tmp_path / "run")
    assert len(run) == 3 and set(run.steps["order"]) == {"zbcs"}


def test_asking_costs_next_to_nothing_without_a_gpu():
    from timeit import repeat

    assert min(repeat(aside.is_recorded, number=2000, repeat=5)) / 2000 < 5e-6


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("experiments", [False, True])
def test_a_whole_step_on_a_gpu(experiments, optimizer_class, tmp_path):
    def train(out=None):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1)).cuda()
        options = {"capturable": True} if optimizer_class is torch.optim.Adam else {}
        optimizer = optimizer_class(model.parameters(), lr=0.01, **options)
        x = torch.randn(32, 16, device="cuda")

        def step():
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
            optimizer.step()
            return loss

        def run():
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    step()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                loss = step()
            losses = []
            for _ in range(20):
                x.normal_()
                graph.replay()
                losses.append(loss.detach().clone())
            return torch.stack(losses).tolist()

        if out is None:
            return run()
        with watch(model, optimizer, out=out, experiments=experiments):
            return run()

    losses = train(tmp_path / "run")
    assert losses == train(), "watching changes nothing"
    run = open_run(tmp_path / "run")
    assert run.info["failure"] is None and len(run) == 23
    assert run.steps["loss"][3:] == pytest.approx(losses)
    assert (run.steps["grad_norm"][3:] > 0).all()


@pytest.mark.filterwarnings(
    "ignore:The AccumulateGrad node's stream"
)  # make_graphed_callables keeps its warm-up alive
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_graphed_callables_on_a_gpu(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(32, 16, device="cuda")
    with watch(model, optimizer, out=tmp_path / "run", schedule="all every step", experiments=False):
        graphed = torch.cuda.make_graphed_callables(model, (x,))
        for _ in range(10):
            optimizer.zero_grad(set_to_none=True)
            nn.functional.mse_loss(graphed(x), x.sum(1, keepdim=True)).backward()
            optimizer.step()
    run = open_run(tmp_path / "run")
    assert run.info["failure"] is None and len(run) == 10
    assert (np.diff(run.steps["loss"]) < 0).all()
