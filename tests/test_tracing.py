"""Scripted blocks, and models that are traced in mid-training: the script's graph holds nothing of gradproof's."""

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from gradproof.probes.watch import watch
from gradproof.record.run import open_run

X, Y = torch.randn(16, 4), torch.randint(0, 2, (16,))


class Net(nn.Module):
    def __init__(self, scripted):
        super().__init__()
        block = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.0))
        self.block = torch.jit.script(block) if scripted else block
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.block(x))


def train(models, steps, out=None, between=None, experiments=False):
    """A short training, with something done between its steps; what that returned."""
    torch.manual_seed(0)
    parameters = [p for model in models for p in model.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)

    def loop():
        found = []
        for step in range(steps):
            if between is not None and step in (0, 3):
                found.append(between(models[0]))
            optimizer.zero_grad()
            sum(nn.functional.cross_entropy(model(X), Y) for model in models).backward()
            optimizer.step()
        return found

    if out is None:
        return loop()
    options = {"schedule": "all every step"} if not experiments else {}
    with watch(models, optimizer, out=out, experiments=experiments, **options):
        found = loop()
    run = open_run(out)
    assert run.info["failure"] is None and len(run) == steps
    return found


def jit_trace(model):
    traced = torch.jit.trace(model, X)  # raises where two traces differ
    return [node.kind() for node in traced.inlined_graph.nodes()]


def jit_trace_for_use(model):
    with torch.no_grad():
        model.eval()
        nodes = jit_trace(model)
        model.train()
    return nodes


def fx(model):
    return torch.fx.symbolic_trace(model).code


def by_dispatch(model):
    return make_fx(model)(X).code


def flops(model):
    with FlopCounterMode(display=False) as counter:
        model(X).sum().backward()
    return counter.get_total_flops()


def add_graph(model):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        writer = tensorboard.SummaryWriter(folder)
        writer.add_graph(model, X)
        writer.close()


WAYS = [jit_trace, jit_trace_for_use, fx, by_dispatch, flops, add_graph]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("scripted", [False, True], ids=["plain", "scripted block"])
def test_a_graph_is_the_same_as_without_watching(scripted, way, tmp_path):
    if scripted and way in (fx, by_dispatch):
        pytest.skip("a scripted block cannot be traced so, watched or not")
    torch.manual_seed(0)
    plain = train([Net(scripted)], 6, between=way)
    torch.manual_seed(0)
    assert train([Net(scripted)], 6, tmp_path / "run", between=way) == plain


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", [jit_trace, add_graph])
def test_tracing_in_a_step_that_is_taped(way, tmp_path):
    plain = train([Net(False)], 6, between=way)
    assert train([Net(False)], 6, tmp_path / "run", between=way, experiments=True) == plain


class Pictures(nn.Module):
    """Buffers that tracing changes, and operations that write in place."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 4, 1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1)
        )
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.body(x.view(-1, 1, 2, 2)).flatten(1))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", [jit_trace, add_graph])
def test_tracing_a_network_with_a_batch_norm_in_a_step_that_is_taped(way, tmp_path):
    """As a script does that shows its graph before it begins: the first step is taped."""
    torch.manual_seed(0)
    plain = train([Pictures()], 6, between=way)
    torch.manual_seed(0)
    assert train([Pictures()], 6, tmp_path / "run", between=way, experiments=True) == plain


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("experiments", [False, True])
def test_models_that_are_scripted_as_a_whole(experiments, tmp_path):
    models = [torch.jit.script(nn.Linear(4, 2)), torch.jit.script(Net(False)), Net(True)]
    train(models, 6, tmp_path / "run", experiments=experiments)
    run = open_run(tmp_path / "run")
    assert len({row["name"] for row in run.info["parameters"]}) == 10


def test_what_is_not_traced_is_measured_as_before(tmp_path):
    train([Net(False)], 4, tmp_path / "run")
    assert set(open_run(tmp_path / "run").table("output", "norm").steps) == {0, 1, 2, 3}
