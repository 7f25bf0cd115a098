"""Taping changes nothing: losses, weights, random numbers and what else a script can see are as without it."""

import gc
import inspect
import random
import signal
import subprocess
import sys
import warnings
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from kinds_of_training import KINDS, mlp, transformer_with_dropout
from torch import nn

from gradproof.probes import taping
from gradproof.probes.hooks import attach
from gradproof.probes.names import Names
from gradproof.probes.taping import begin_taping
from gradproof.probes.watch import open_session
from gradproof.record.run import open_run
from gradproof.tape.label import find_specimens
from gradproof.tape.specimen import load


def trained(kind, steps=5):
    """What a training leaves: losses, weights, buffers and the states of all generators."""
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    models, _, step = kind()
    losses = [loss.tolist() for _ in range(steps) for loss in step()]
    weights = [value.clone() for model in models.values() for value in model.state_dict().values()]
    generators = (torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate())
    return losses, weights, generators


def taped(path, training, limit=None):
    """The same, taped as `gradproof run` does it; every step, whatever it costs."""
    session = open_session(path, command=["test"], names=Names())
    begin_taping(session, limit=limit)
    with attach(session):
        try:
            return training()
        finally:
            session.close()


def check_same(first, second):
    assert first[0] == second[0]
    assert len(first[1]) == len(second[1])
    assert all(torch.equal(a, b) for a, b in zip(first[1], second[1], strict=True))
    assert torch.equal(first[2][0], second[2][0]) and first[2][1:] == second[2][1:]


@pytest.fixture
def every_step(monkeypatch):
    monkeypatch.setattr(taping, "PLAIN_STEPS", ())
    monkeypatch.setattr(taping, "ALLOWANCE", 1e9)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_taped_training_is_the_same(kind, tmp_path, every_step):
    plain = trained(kind)
    check_same(taped(tmp_path / "run", lambda: trained(kind)), plain)
    run = open_run(tmp_path / "run")
    assert run.info["cost"]["taped_steps"] >= 3 and not run.info["taping"]["broken"]
    assert len(find_specimens(tmp_path / "run")) >= 3


@pytest.mark.helper
@pytest.mark.parametrize("kind", [mlp, transformer_with_dropout], ids=lambda kind: kind.__name__)
def test_a_training_with_the_helper_beside_it_is_the_same(kind, tmp_path, every_step, monkeypatch):
    import gradproof
    from gradproof.probes import helper

    monkeypatch.setattr(helper, "LIMIT", 1.0)
    plain = trained(kind)

    def watched():
        with gradproof.watch(nn.Linear(1, 1), out=tmp_path / "run") as run:
            assert run is not None
            return trained(kind)

    check_same(watched(), plain)


def blocks(compile_all):
    """A model of blocks with dropout; `compile_all` compiles what it likes of it."""

    def kind():
        model = nn.Sequential(
            nn.Linear(6, 16),
            *(nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.2), nn.GELU()) for _ in range(2)),
            nn.Linear(16, 3),
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        called = compile_all(model)

        def step():
            optimizer.zero_grad()
            loss = F.cross_entropy(called(torch.randn(12, 6)), torch.randint(3, (12,)))
            loss.backward()
            optimizer.step()
            return [loss.detach()]

        return {"": model}, [optimizer], step

    return kind


def whole(backend):
    return lambda model: torch.compile(model, backend=backend)


def in_place(backend):
    def compile_all(model):
        model.compile(backend=backend)
        return model

    return compile_all


def block_by_block(backend):
    def compile_all(model):
        for block in list(model)[1:3]:
            block.compile(backend=backend)
        return model

    return compile_all


@pytest.mark.parametrize("how", [whole, in_place, block_by_block])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_training_is_the_same(how, backend, tmp_path, every_step):
    if backend == "inductor" and how is in_place:
        pytest.skip("compiled or not, by what this process compiled before; see the test of a script below")
    kind = blocks(how(backend))
    torch._dynamo.reset()
    plain = trained(kind)
    torch._dynamo.reset()
    check_same(taped(tmp_path / "run", lambda: trained(kind)), plain)
    torch._dynamo.reset()
    run = open_run(tmp_path / "run")
    assert run.info["cost"]["taped_steps"] >= 2 and not run.info["taping"]["broken"], run.info["taping"]
    assert load(find_specimens(tmp_path / "run")[-1]).tape.compiled


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream", "ignore:Attempting to run cuBLAS")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_training_by_a_cuda_graph_is_the_same(tmp_path, every_step):
    def kind():
        model = nn.Linear(8, 8).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        called = torch.cuda.make_graphed_callables(model, (torch.randn(4, 8, device="cuda"),))

        def step():
            optimizer.zero_grad()
            loss = called(torch.randn(4, 8, device="cuda")).square().mean()
            loss.backward()
            optimizer.step()
            return [loss.detach()]

        return {"": model}, [optimizer], step

    plain = trained(kind)
    check_same(taped(tmp_path / "run", lambda: trained(kind)), plain)


def what_a_script_can_see(model):
    """Everything that somebody might leave behind."""
    module = nn.modules.module
    hooks = {name: len(value) for name, value in vars(module).items() if name.startswith("_global") and value}
    optimizer = torch.optim.Optimizer
    return {
        "calls": [nn.Module.__call__, nn.Module._call_impl, nn.Module.train, nn.Module.zero_grad],
        "optimizers": [optimizer.__init__, optimizer.step, optimizer.zero_grad, optimizer.profile_hook_step],
        "tensors": [torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad, torch.Tensor.__init__],
        "names": [sorted(vars(owner)) for owner in (torch.Tensor, nn.Module, optimizer, torch.autograd, torch.func)],
        "printing": print,
        "functions": [torch.autograd.function.FunctionMeta.__init__, F.cross_entropy, F.dropout],
        "hooks": hooks,
        "own hooks": [
            len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules()
        ],
        "parameters": [p._backward_hooks for p in model.parameters()],
        "accumulated": [getattr(p, "_post_accumulate_grad_hooks", None) for p in model.parameters()],
        "modes": [torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()],
        "signals": [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGALRM)],
        "warnings": list(warnings.filters),
        "grad": [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype()],
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "random": [random.random, np.random.rand, np.random.get_state()[0]],
        "compile": torch.compile,
        "state": model.training,
    }  # fmt: skip


def test_nothing_stays_behind(tmp_path, every_step):
    torch.manual_seed(0)
    models, _, step = transformer_with_dropout()
    model = models[""]
    step()
    before = what_a_script_can_see(model)
    taped(tmp_path / "run", lambda: [step() for _ in range(3)])
    after = what_a_script_can_see(model)
    assert after == before
    assert len(find_specimens(tmp_path / "run")) >= 1


def test_nothing_stays_behind_when_the_training_raises(tmp_path, every_step):
    torch.manual_seed(0)
    models, _, step = mlp()
    model = models[""]
    before = what_a_script_can_see(model)

    def breaks():
        step()
        step()
        model(torch.randn(2, 5))  # in mid-step, of a wrong shape

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        taped(tmp_path / "run", breaks)
    assert what_a_script_can_see(model) == before


def test_a_model_is_gone_when_its_script_lets_go(tmp_path, every_step):
    """What was taped is on disk, and holds nothing of what it was taped from."""
    found = {}

    def training():
        models, optimizers, step = mlp()
        for _ in range(4):
            step()
        things = {"model": models[""], "weight": models[""][0].weight, "optimizer": optimizers[0]}
        found.update({name: weakref.ref(thing) for name, thing in things.items()})

    torch.manual_seed(0)
    taped(tmp_path / "run", training)
    gc.collect()
    assert len(find_specimens(tmp_path / "run")) >= 3
    assert not [name for name, thing in found.items() if thing() is not None]


def described():
    """Signature, module and name of everything that a script may call and we may listen to."""
    owners = (
        *(
            nn.Module,
            torch.optim.Optimizer,
            torch.optim.SGD,
            torch.Tensor,
            torch.no_grad,
            torch.inference_mode,
        ),
        *(torch, torch.autograd, nn.functional, nn.utils, nn.init, torch.utils.data.DataLoader),
        *(torch.amp.GradScaler, torch.optim.lr_scheduler.LRScheduler, torch.autograd.Function),
    )
    found = {}
    for owner in owners:
        for name in dir(owner):
            value = getattr(owner, name)
            if inspect.isroutine(value) and hasattr(value, "__code__"):
                try:
                    signature = str(inspect.signature(value))
                except ValueError:  # of a builtin
                    signature = ""
                found[str(owner), name] = (signature, value.__module__, value.__qualname__)
    return found


def test_what_we_listen_to_looks_as_before(tmp_path, every_step):
    before, meanwhile = described(), {}

    def training():
        meanwhile.update(described())
        with torch.no_grad():  # more is listened to inside
            meanwhile.update(described())
        return trained(mlp)

    taped(tmp_path / "run", training)
    assert {key for key in before if before[key] != meanwhile[key]} == set()


COMPILED = """
import torch
from torch import nn
torch.manual_seed(0)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.drop = nn.Linear(16, 16), nn.Dropout(0.3)

    def forward(self, x):
        return x + self.drop(torch.relu(self.a(x)))

net = nn.Sequential(nn.Linear(6, 16), Block(), Block(), nn.Linear(16, 3))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
COMPILE
for _ in range(6):
    optimizer.zero_grad()
    loss = net(torch.randn(12, 6)).square().mean()
    loss.backward()
    optimizer.step()
    print(loss.item())
"""


@pytest.mark.slow
@pytest.mark.parametrize("compile_it", ["net.compile()", "net = torch.compile(net)"])
def test_the_output_of_a_compiled_script_is_the_same(compile_it, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(COMPILED.replace("COMPILE", compile_it))
    watched = ["-m", "gradproof", "run", "--quiet", "--examine", "off", "--out", "run"]
    plain, taped = (
        subprocess.run(
            [sys.executable, *words, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        for words in ([], watched)
    )
    assert taped.stdout == plain.stdout and len(plain.stdout.splitlines()) == 6
    assert any(load(path).tape.compiled for path in find_specimens(tmp_path / "run"))
