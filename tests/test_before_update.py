"""A run that goes non-finite is located while its weights are still good: from the tape, or from its calls."""

import copy
import functools
import itertools

import pytest
import torch
from test_examination import examine
from torch import nn

import gradproof
from gradproof.diagnosis.ranking import diagnose
from gradproof.record.run import open_run
from gradproof.tape.specimen import load

TAPED, UNTAPED = 4, 5  # steps of a short training; see taping.PLAIN_STEPS


examine = functools.partial(examine, questions=("where_was_it_born",))


class Model(nn.Module):
    """Finite, until a batch is given a flag; dropout and BatchNorm have to come out the same when it runs again."""

    def __init__(self):
        super().__init__()
        self.a, self.norm, self.drop, self.b = (
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1)
        )  # fmt: skip

    def forward(self, x, fault=""):
        h = self.drop(self.norm(self.a(x)))
        if fault == "backward":
            h = h + h.square().sqrt()  # h is zero where it was dropped: the slope there is 0 / 0
        if fault == "forward":
            h = h + (h - h).log()
        return self.b(h)


def plain_step(model, optimizer, x, fault):
    loss = model(x, fault=fault).square().mean()
    optimizer.zero_grad()
    loss.backward()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    return before


def closure_step(model, optimizer, x, fault):
    before = [p.detach().clone() for p in model.parameters()]

    def closure():
        optimizer.zero_grad()
        loss = model(x, fault=fault).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    return before


def accumulating_step(model, optimizer, x, fault):
    optimizer.zero_grad()
    for number, part in enumerate(x.split(8)):
        (model(part, fault=fault if number == 1 else "").square().mean() / 3).backward()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    return before


def scaled_step(model, optimizer, x, fault):
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer.zero_grad()
    scaler.scale(model(x, fault=fault).square().mean()).backward()
    before = [p.detach().clone() for p in model.parameters()]
    scaler.step(optimizer)
    return before


def train(model, fault, at, step=plain_step, steps=7):
    """The parameters before each step."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return [
        step(model, optimizer, torch.randn(24, 4), fault if number == at else "") for number in range(steps)
    ]


def train_watched(path, fault, at, step=plain_step):
    """Train; the verdicts on a NaN with the weights in the specimen of that step, and the weights before each step."""
    torch.manual_seed(0)
    model, seen = Model(), []
    before = examine(path, lambda: train(model, fault, at, step))
    for facts in open_run(path).events:
        if facts["event"] == "verdict" and "nonfinite" in facts["family"]:
            specimen = load(path / "specimens" / f"step-{facts['step']:08d}")
            bundle = (path / "first_bad_operation" / "reproduce.py").exists()
            seen.append((facts, list(specimen.models[""].parameters()), bundle))
    return model, seen, before


@pytest.mark.parametrize("step", [plain_step, closure_step, accumulating_step])
@pytest.mark.parametrize("at", [TAPED, UNTAPED])
@pytest.mark.parametrize("fault", ["forward", "backward"])
def test_the_step_is_on_disk_with_the_weights_from_before_it(fault, at, step, tmp_path):
    model, seen, before = train_watched(tmp_path / "run", fault, at, step)
    assert not all(bool(torch.isfinite(p).all()) for p in model.parameters()), "planted"
    ((facts, weights, bundle),) = seen
    assert facts["family"] == f"{fault}-nonfinite" and facts["step"] == at
    assert "test_before_update.py" in facts["where"] and bundle
    assert all(torch.equal(then, now) for then, now in zip(before[at], weights, strict=True))
    cause = diagnose(tmp_path / "run").causes[0]
    assert (cause.family, cause.step, cause.confidence) == (f"{fault}-nonfinite", at, "proven")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("fault", ["forward", "backward"])
def test_on_a_gpu_a_taped_step_is_located_in_time(fault, tmp_path):
    def step(model, optimizer, x, fault):
        return plain_step(model.to("cuda"), optimizer, x.to("cuda"), fault)

    _, seen, before = train_watched(tmp_path / "run", fault, TAPED, step)
    ((facts, weights, _),) = seen
    assert facts["family"] == f"{fault}-nonfinite" and facts["step"] == TAPED
    assert all(torch.equal(then, now) for then, now in zip(before[TAPED], weights, strict=True))


@pytest.mark.parametrize("at", [TAPED, UNTAPED])
def test_a_loss_that_makes_a_scaler_skip_is_located(at, tmp_path):
    model, seen, before = train_watched(tmp_path / "run", "forward", at, scaled_step)
    ((facts, weights, _),) = seen
    assert (facts["id"], facts["step"]) == ("forward-nonfinite/log", at)
    assert all(torch.equal(then, now) for then, now in zip(before[at], weights, strict=True))
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())


@pytest.mark.parametrize("fault", ["", "backward"])
def test_looking_leaves_nothing_behind(fault, tmp_path):
    torch.manual_seed(0)
    plain = Model()
    train(plain, fault, UNTAPED)
    state = torch.get_rng_state()
    model, seen, _ = train_watched(tmp_path / "run", fault, UNTAPED)
    assert torch.equal(torch.get_rng_state(), state)
    for theirs, ours in zip(plain.state_dict().values(), model.state_dict().values(), strict=True):
        assert torch.equal(theirs.nan_to_num(7.0), ours.nan_to_num(7.0))
    for theirs, ours in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(theirs.grad.nan_to_num(7.0), ours.grad.nan_to_num(7.0))
    assert not model._forward_hooks and "__call__" not in vars(Model)
    assert len(seen) == (1 if fault else 0)


@pytest.mark.parametrize("fault", ["", "backward"])
def test_a_loop_that_is_only_watched(fault, tmp_path):
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with gradproof.watch(model, optimizer, out=tmp_path / "run"):
        for number in range(4):
            plain_step(model, optimizer, torch.randn(24, 4), fault if number == 2 else "")
    run, causes = open_run(tmp_path / "run"), diagnose(tmp_path / "run").causes
    # step 2 is left untaped; where it is bad, its calls are made again
    assert run.info["cost"]["taped_steps"] == (4 if fault else 3) and "__call__" not in vars(Model)
    found = [(cause.id, cause.step) for cause in causes if cause.confidence == "proven"]
    assert found == ([("backward-nonfinite/sqrt", 2)] if fault else [])


def test_models_can_be_copied_and_saved_while_they_are_listened_to(tmp_path):
    def step(model, optimizer, x, fault):
        average = copy.deepcopy(model)
        torch.save(model, tmp_path / "model.pt")
        again = torch.load(tmp_path / "model.pt", weights_only=False)
        assert not (average._forward_hooks or again._forward_hooks or "__call__" in vars(again))
        average(x)
        return plain_step(model, optimizer, x, fault)

    examine(tmp_path / "run", lambda: train(Model(), "backward", UNTAPED, step))
    assert diagnose(tmp_path / "run").causes[0].id == "backward-nonfinite/sqrt"


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_loop_that_is_only_watched(in_place, tmp_path):
    torch.manual_seed(0)
    model = Tanh()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if in_place:
        model.compile(backend=wrong_code(torch.log))
    else:
        model = torch.compile(model, backend=wrong_code(torch.log))
    with gradproof.watch(model, optimizer, out=tmp_path / "run"):
        model(torch.randn(6, 4)).square().mean().backward()
        optimizer.step()
    assert diagnose(tmp_path / "run").causes[0].id == "forward-nonfinite/born-in-the-compiler"
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_function_that_is_compiled_whole_may_call_the_model(tmp_path):
    def training():
        torch.manual_seed(0)
        model = Tanh()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loss = torch.compile(lambda x: model(x).square().mean(), backend="eager", fullgraph=True)
        for _ in range(4):
            optimizer.zero_grad()
            loss(torch.randn(6, 4)).backward()
            assert "__call__" not in vars(Tanh), "the function would be compiled again and again"
            optimizer.step()

    examine(tmp_path / "run", training)
    assert len(open_run(tmp_path / "run")) == 4
    torch.compiler.reset()


def test_a_nan_around_the_model_is_left_to_a_second_run(tmp_path):
    def step(model, optimizer, x, fault):
        optimizer.zero_grad()
        out = model(x)
        (out.square().mean() + ((out - out).sqrt().sum() if fault else 0.0)).backward()
        optimizer.step()

    examine(tmp_path / "run", lambda: train(Model(), "yes", UNTAPED, step))
    cause = diagnose(tmp_path / "run").causes[0]
    assert cause.id == "backward-nonfinite/not-taped" and f"--until {UNTAPED} " in cause.fix


# -- born in the compiler


def bad_slope(x):
    """tanh, and a term that is zero with a slope of 0 / 0."""
    return x.tanh() + (x * 0).square().sqrt()


def wrong_code(instead):
    """A compiler that makes something else of tanh."""

    def backend(graph, inputs):
        for node in graph.graph.nodes:
            if node.target in (torch.tanh, "tanh"):
                node.op, node.target = "call_function", instead
        graph.recompile()
        return graph.forward

    return backend


class Tanh(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


def train_compiled(backend, in_place, steps=4):
    torch.manual_seed(0)
    model = compiled = Tanh()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if in_place:
        model.compile(backend=backend)
    else:
        compiled = torch.compile(model, backend=backend)
    assert not torch._C._len_torch_dispatch_stack(), "a tape is left on, and nothing is compiled under it"
    for _ in range(steps):
        optimizer.zero_grad()
        compiled(torch.randn(6, 4)).square().mean().backward()
        optimizer.step()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(
    "instead, family", [(torch.log, "forward-nonfinite"), (bad_slope, "backward-nonfinite")]
)
def test_born_in_the_compiler(instead, family, in_place, tmp_path):
    examine(tmp_path / "run", lambda: train_compiled(wrong_code(instead), in_place))
    cause = diagnose(tmp_path / "run").causes[0]
    assert (cause.id, cause.step, cause.confidence) == (f"{family}/born-in-the-compiler", 0, "proven")
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    "instead, id", [(torch.log, "forward-nonfinite/born-in-the-compiler"), (torch.tanh, None)]
)
def test_a_step_that_was_asked_for_is_taped_and_compared_with_compiled_code(instead, id, tmp_path):
    backend, step = wrong_code(torch.tanh), 2

    def late(graph, inputs):  # what a GPU shows too late is asked for in a second run
        right, wrong = backend(graph, inputs), wrong_code(instead)(copy.deepcopy(graph), inputs)
        calls = itertools.count()
        return lambda *args: (right if next(calls) < step else wrong)(*args)

    examine(tmp_path / "run", lambda: train_compiled(late, in_place=False), only=step)
    run = open_run(tmp_path / "run")
    assert run.info["cost"]["taped_steps"] == 1
    verdicts = [event for event in run.events if "nonfinite" in event.get("family", "")]
    assert [(event["id"], event["step"]) for event in verdicts] == ([(id, step)] if id else [])
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("fault", [False, True])
def test_a_compiled_run_that_is_right_or_wrong_by_itself(fault, tmp_path):
    def backend(graph, inputs):
        return graph.forward

    if fault:
        Bad = type("Bad", (Tanh,), {"forward": lambda self, x: self.b((self.a(x) * 0).log())})
    else:
        Bad = Tanh

    def training():
        torch.manual_seed(0)
        model = Bad()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        compiled = torch.compile(model, backend=backend)
        for _ in range(3):
            optimizer.zero_grad()
            compiled(torch.randn(6, 4)).square().mean().backward()
            optimizer.step()

    examine(tmp_path / "run", training)
    diagnosis = diagnose(tmp_path / "run")
    if fault:
        assert diagnosis.causes[0].id == "forward-nonfinite/log" and diagnosis.causes[0].step == 0
    else:
        assert diagnosis.worst != "problem"
    assert not [e for e in open_run(tmp_path / "run").events if e["event"] == "watching_failed"]
    torch.compiler.reset()
