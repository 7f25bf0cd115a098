"""A step as a file is the step: replayed from disk it gives the same losses, gradients and updates to the last bit."""

import json
import linecache
import os
import pickle
import re
import shutil
import struct
import subprocess
import sys
from contextlib import suppress
from dataclasses import fields
from random import Random

import pytest
import torch
import torch.nn.functional as F
from kinds_of_training import KINDS, complex_numbers, mlp
from torch import nn

from gradproof.errors import UserError
from gradproof.instruments.evidence import Evidence
from gradproof.probes.capture import capture
from gradproof.tape.codec import Foreign
from gradproof.tape.execute import CannotReplay
from gradproof.tape.label import find_specimens, read_label
from gradproof.tape.record import Recorder
from gradproof.tape.replay import replay_exactly
from gradproof.tape.specimen import Facts, load, save, seal


def named_parameters(models):
    return {
        p: f"{prefix}.{n}" if prefix else n for prefix, m in models.items() for n, p in m.named_parameters()
    }


def tape_step(models, optimizers, step, number=3, facts=None):
    """(specimen, losses, gradients that the optimizer saw, updates) of one live step."""
    names = named_parameters(models)
    before = {name: p.detach().clone() for p, name in names.items()}
    gradients = {}

    def look(optimizer, *_):
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    gradients[names[p]] = p.grad.detach().clone()

    handles = [optimizer.register_step_pre_hook(look) for optimizer in optimizers]
    recorder = Recorder(names)
    recorder.start()
    losses = step()
    tape = recorder.stop()
    for handle in handles:
        handle.remove()
    if isinstance(optimizers[0], torch.optim.LBFGS):
        gradients = {name: p.grad.detach().clone() for p, name in names.items()}
    assert not tape.broken, tape.broken
    specimen = capture(recorder.state, number, models, optimizers, [0.5, float("nan"), 1.0], facts)
    updates = {name: p.detach() - before[name] for p, name in names.items()}
    return specimen, losses, gradients, updates


def make(kind, warmup=2):
    torch.manual_seed(0)
    models, optimizers, step = kind()
    for _ in range(warmup):
        step()
    return models, optimizers, step


def same(a, b):
    a, b = (t.to_dense() if t.layout != torch.strided else t for t in (a, b))
    return a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_step_from_disk_is_the_step(kind, tmp_path):
    models, optimizers, step = make(kind)
    specimen, losses, gradients, updates = tape_step(models, optimizers, step)
    read = load(save(specimen, tmp_path))
    tape = read.tape
    found = replay_exactly(tape).losses
    assert [loss.tolist() for loss in found] == [loss.tolist() for loss in losses]
    evidence = Evidence(read)
    names = {slot.index: slot.name for slot in tape.parameters}
    again = {names[slot]: g for slot, g in evidence.aftermath.gradients.items() if slot in names}
    assert set(gradients) <= set(again)
    wrong = [name for name, g in gradients.items() if not same(again[name], g)]
    assert not wrong
    moved = {names[slot]: u for slot, u in evidence.updates.items() if slot in names}
    wrong = [name for name, u in updates.items() if not same(moved.get(name, torch.zeros_like(u)), u)]
    assert not wrong


def describe_module(module):
    own = {
        k: v
        for k, v in vars(module).items()
        if not k.startswith("_") and isinstance(v, (int, float, str, bool, tuple, type(None)))
    }
    own.pop("gradproof_skeleton", None)
    return type(module).__name__, module.training, own


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_the_models_and_optimizers_from_disk_are_those_of_the_training(kind, tmp_path):
    models, optimizers, step = make(kind)
    before = {name: p.detach().clone() for p, name in named_parameters(models).items()}
    specimen, *_ = tape_step(models, optimizers, step)
    read = load(save(specimen, tmp_path))
    assert list(read.models) == list(models)
    for prefix, model in models.items():
        skeleton = read.models[prefix]
        there = {path: describe_module(m) for path, m in model.named_modules()}
        assert {path: describe_module(m) for path, m in skeleton.named_modules()} == there
        kinds = {path: [k.__name__ for k in type(m).__mro__ if k.__module__.startswith("torch.nn")] for path, m in
                 model.named_modules()}  # fmt: skip
        assert {
            path: [k.__name__ for k in type(m).__mro__ if k.__module__.startswith("torch.nn")]
            for path, m in skeleton.named_modules()
        } == kinds
        for duplicates in (False, True):  # tied weights have two names
            mine = dict(skeleton.named_parameters(remove_duplicate=duplicates))
            theirs = dict(model.named_parameters(remove_duplicate=duplicates))
            assert list(mine) == list(theirs)
        for name, parameter in skeleton.named_parameters():
            live = dict(model.named_parameters())[name]
            assert (parameter.shape, parameter.dtype, parameter.requires_grad) == (
                live.shape, live.dtype, live.requires_grad,
            )  # fmt: skip
            assert same(parameter.detach(), before[f"{prefix}.{name}" if prefix else name])
        assert [n for n, _ in skeleton.named_buffers()] == [n for n, _ in model.named_buffers()]
    assert [type(o).__name__ for o in read.optimizers] == [type(o).__name__ for o in optimizers]
    ours, theirs = named_parameters(read.models), named_parameters(models)
    for skeleton, optimizer in zip(read.optimizers, optimizers, strict=True):
        for mine, group in zip(skeleton.param_groups, optimizer.param_groups, strict=True):
            assert [ours[p] for p in mine["params"]] == [theirs[p] for p in group["params"]]
            settings = {k: v for k, v in mine.items() if k != "params"}
            assert settings == {k: v for k, v in group.items() if k != "params"}
        if isinstance(optimizer, torch.optim.LBFGS):
            continue
        held = {ours[p]: set(state) for p, state in skeleton.state.items() if state}
        assert held == {theirs[p]: set(s) - nones(s) for p, s in optimizer.state.items()}


def nones(state):
    return {key for key, value in state.items() if value is None}


def test_the_states_from_disk_are_those_before_the_step(tmp_path):
    models, optimizers, step = make(mlp)
    (optimizer,) = optimizers
    names = named_parameters(models)
    before = {names[p]: {k: v.clone() for k, v in s.items()} for p, s in optimizer.state.items()}
    specimen, *_ = tape_step(models, optimizers, step)
    read = load(save(specimen, tmp_path))
    ours = named_parameters(read.models)
    for parameter, state in read.optimizers[0].state.items():
        for key in ("exp_avg", "exp_avg_sq"):
            assert same(state[key], before[ours[parameter]][key])
        assert state["step"] == float(before[ours[parameter]]["step"])


def test_what_the_probes_saw_comes_back_as_it_was(tmp_path):
    models, optimizers, step = make(mlp)
    known = {
        "lines": {"zero_grad": ["train.py:3"]},
        "loads": [
            {"file": "weights.pt", "keys": ("a", "b"), "share": float("inf"), "device": torch.device("cpu")}
        ],
        "_evaluated": {"train.py:9": (0, [torch.arange(6.0).reshape(2, 3)])},
        "_came_back": [(torch.ones(2), torch.zeros(2, dtype=torch.bool))],
        "_orders": [{"values": torch.arange(5), "slice": slice(1, None, 2), "where": Ellipsis, "z": 1 + 2j}],
        "_tables": [{"ids": {1, 2, 3}, "n": -1, "dtype": torch.bfloat16, "b": b"bytes".decode()}],
    }
    specimen, *_ = tape_step(models, optimizers, step, facts=known)
    read = load(save(specimen, tmp_path))
    assert read.losses[0] == 0.5 and read.losses[1] != read.losses[1] and read.losses[2] == 1.0
    assert read.environment == specimen.environment and read.label() == specimen.label()
    for part in fields(Facts):
        assert repr(getattr(read.facts, part.name)) == repr(getattr(specimen.facts, part.name)), part.name
    assert read.facts.loads[0]["device"] == torch.device("cpu")


SCRIPT = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)  # the line that sets it

    def forward(self, x):
        return self.layer(x).relu()  # the line that computes

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def step():
    optimizer.zero_grad()
    loss = model(torch.randn(4, 3)).square().sum()
    loss.backward()
    optimizer.step()
    return [loss.detach()]
"""


def test_source_lines_outlive_the_script(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    space = {"__name__": "train_of_a_test"}
    sys.modules["train_of_a_test"] = type(sys)("train_of_a_test")
    sys.modules["train_of_a_test"].__file__ = str(file)
    try:
        exec(compile(SCRIPT, str(file), "exec"), space)
        specimen, *_ = tape_step({"": space["model"]}, [space["optimizer"]], space["step"])
    finally:
        del sys.modules["train_of_a_test"]
    path = save(specimen, tmp_path / "specimens")
    file.unlink()
    linecache.clearcache()
    read = load(path)
    lines = {linecache.getline(op.line.file, op.line.number) for op in read.tape.operations if op.line}
    assert any("the line that computes" in line for line in lines)
    from gradproof.tape.replica import line_that_sets

    assert line_that_sets(type(read.models[""]), "layer") == "train.py:8"


@torch.library.custom_op("trust_tests::cube", mutates_args=())
def cube(x: torch.Tensor) -> torch.Tensor:
    return x**3


cube.register_autograd(
    lambda ctx, grad: 3 * grad * ctx.saved_tensors[0] ** 2,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)

ELSEWHERE = """
import json, sys, torch
from gradproof.instruments.evidence import Evidence
from gradproof.tape.replay import replay_forward
from gradproof.tape.specimen import load
read = load(sys.argv[1])
assert not hasattr(torch.ops.trust_tests, "cube")
(op,) = [op for op in read.tape.operations if op.name == "cube"]
evidence = Evidence(read)
names = {slot.index: slot.name for slot in read.tape.parameters}
print(json.dumps({
    "func": type(op.func).__name__, "kept": op.kept is not None,
    "loss": float(replay_forward(read.tape).losses[0]),
    "gradients": {names[s]: g.tolist() for s, g in evidence.aftermath.gradients.items()},
}))
"""


def test_an_operator_from_outside_is_a_name_and_its_results(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        loss = model[1](cube(model[0](torch.randn(3, 4)))).sum()
        loss.backward()
        optimizer.step()
        return [loss.detach()]

    specimen, losses, gradients, _ = tape_step({"": model}, [optimizer], step)
    path = save(specimen, tmp_path)
    command = [sys.executable, "-c", ELSEWHERE, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["func"] == "Foreign" and said["kept"]
    assert said["loss"] == losses[0].item()
    assert said["gradients"] == {name: g.tolist() for name, g in gradients.items()}


def test_a_specimen_is_hardly_larger_than_what_it_holds(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(1024, 2048), nn.GELU(), nn.Linear(2048, 1024), nn.GELU(), nn.Linear(1024, 1000)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    x, y = torch.randn(64, 1024), torch.randint(1000, (64,))

    def step():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return [loss.detach()]

    step()
    specimen, *_ = tape_step({"": model}, [optimizer], step)
    path = save(specimen, tmp_path)
    weights = sum(p.numel() for p in model.parameters())
    assert weights > 5_000_000
    held = 4 * (3 * weights + x.numel()) + 8 * y.numel()
    size = sum(file.stat().st_size for file in path.iterdir())
    assert size <= 1.1 * held + 1e6, f"{size} bytes for {held}"


def mapped_bytes(file):
    """What the kernel has mapped of a file into this process."""
    found = 0
    with open("/proc/self/maps") as maps:
        for line in maps:
            if line.rstrip().endswith(str(file)):
                first, last = line.split()[0].split("-")
                found += int(last, 16) - int(first, 16)
    return found


def test_reading_maps_the_file_and_unpickles_nothing(tmp_path, monkeypatch):
    models, optimizers, step = make(mlp)
    path = save(tape_step(models, optimizers, step)[0], tmp_path)

    def forbidden(*args, **kwargs):
        raise AssertionError("a specimen was unpickled")

    for module, name in ((pickle, "loads"), (pickle, "load"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(module, name, forbidden)
    read = load(path)
    assert mapped_bytes(path / "tensors.safetensors") >= os.stat(path / "tensors.safetensors").st_size
    assert Evidence(read).loss > 0


def test_the_package_never_reaches_for_pickle():
    import gradproof.tape.specimen as specimen

    folder = os.path.dirname(specimen.__file__)
    for name in ("specimen", "codec", "replica", "tensors", "operations"):
        with open(os.path.join(folder, f"{name}.py")) as source:
            text = source.read()
        assert "import pickle" not in text and "torch.load(" not in text and "eval(" not in text


def test_specimens_of_a_run_are_found_by_step(tmp_path):
    models, optimizers, step = make(mlp)
    for number in (30, 2, 100):
        save(tape_step(models, optimizers, step, number)[0], tmp_path / "specimens")
    assert [path.name for path in find_specimens(tmp_path)] == [
        "step-00000002", "step-00000030", "step-00000100",
    ]  # fmt: skip
    assert find_specimens(tmp_path / "nowhere") == []


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_huge_sparse_matrix_stays_sparse(layout, tmp_path):
    """An adjacency matrix of 100,000 nodes would have 40 GB if it were written densely."""
    torch.manual_seed(0)
    nodes = 100_000
    edges = torch.stack([torch.arange(nodes), torch.randperm(nodes)])
    graph = torch.sparse_coo_tensor(edges, torch.rand(nodes), (nodes, nodes)).coalesce()
    graph = graph if layout == torch.sparse_coo else graph.to_sparse_csr()
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(nodes, 2)

    def step():
        optimizer.zero_grad()
        loss = torch.sparse.mm(graph, model(x)).square().mean()
        loss.backward()
        optimizer.step()
        return [loss.detach()]

    specimen, losses, gradients, _ = tape_step({"": model}, [optimizer], step)
    assert specimen.label()["bytes"] < 10e6
    read = load(save(specimen, tmp_path))
    assert [float(loss) for loss in replay_exactly(read.tape).losses] == [float(loss) for loss in losses]
    names = {slot.index: slot.name for slot in read.tape.parameters}
    again = {names[slot]: g for slot, g in Evidence(read).aftermath.gradients.items()}
    assert all(same(again[name], g) for name, g in gradients.items())


@pytest.mark.parametrize(
    "dtype", [torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.bfloat16]
)
def test_every_kind_of_number_can_be_written(dtype, tmp_path):
    models, optimizers, step = make(mlp)
    value = torch.arange(6).to(dtype)
    specimen, *_ = tape_step(models, optimizers, step, facts={"_orders": [{"values": value}]})
    read = load(save(specimen, tmp_path)).facts.orders[0]["values"]
    assert read.dtype == dtype and torch.equal(read.view(torch.uint8), value.view(torch.uint8))


# what is no specimen, or no longer one -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    models, optimizers, step = make(mlp)
    return save(tape_step(models, optimizers, step)[0], tmp_path_factory.mktemp("sound"))


@pytest.fixture
def copy(sound, tmp_path):
    return shutil.copytree(sound, tmp_path / sound.name)


def refused(path):
    """The one sentence with which a specimen is refused."""
    with pytest.raises(UserError) as caught:
        load(path)
    said = str(caught.value)
    assert str(path) in said and "\n" not in said and "Traceback" not in said and len(said) < 500, said
    assert said.isprintable()
    return said.replace(str(path), "")


def forge(path, change):
    """Somebody changes what is on the tape, and signs it anew: no checksum tells."""
    data = json.loads((path / "tape.json").read_text())
    change(data)
    (path / "tape.json").write_text(json.dumps(data))
    seal(path, {k: v for k, v in read_label(path).items() if k not in ("gradproof", "stored", "signature")})


def parts_of(data, kind):
    """Every object of a kind in the JSON of a tape, as its list of fields."""
    if isinstance(data, dict):
        if data.get("k") == kind:
            yield data["v"]
        data = list(data.values())
    for part in data if isinstance(data, list) else ():
        yield from parts_of(part, kind)


def test_a_forged_specimen_that_changes_nothing_is_read(copy):
    forge(copy, lambda data: None)
    assert load(copy).step == 3


@pytest.mark.parametrize("name", ["tape.json", "tensors.safetensors", "label.json"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.999])
def test_a_truncated_file_is_refused(name, share, copy):
    file = copy / name
    os.truncate(file, int(share * file.stat().st_size))
    assert name in refused(copy) or "not as they were written" in refused(copy)


@pytest.mark.parametrize("name", ["tape.json", "tensors.safetensors", "label.json"])
def test_a_missing_file_is_named(name, copy):
    (copy / name).unlink()
    assert f"it has no {name}" in refused(copy)
    (copy / name).mkdir()
    assert f"it has no {name}" in refused(copy)


@pytest.mark.timeout(10)
@pytest.mark.parametrize("name", ["tape.json", "tensors.safetensors", "label.json"])
def test_a_pipe_or_a_device_in_place_of_a_file_is_not_waited_for(name, copy):
    (copy / name).unlink()
    os.mkfifo(copy / name)
    refused(copy)
    (copy / name).unlink()
    (copy / name).symlink_to("/dev/zero")
    refused(copy)


def test_what_is_no_directory_of_a_specimen_is_refused(tmp_path, copy):
    assert "no specimen" in refused(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "no specimen" in refused(tmp_path / "empty")
    (tmp_path / "text").write_text("hello\n")
    assert "no specimen" in refused(tmp_path / "text")
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")
    assert "no specimen" in refused(tmp_path / "dangling")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    assert "no specimen" in refused(tmp_path / "circle")
    (tmp_path / "link").symlink_to(copy)  # as the shelf makes one, to what it keeps in memory
    assert load(tmp_path / "link").step == 3


@pytest.mark.parametrize("version", [1, 99, "x" * 1000, None, [2], {"a": 1}])
def test_another_format_is_named(version, copy):
    label = read_label(copy)
    (copy / "label.json").write_text(json.dumps({**label, "gradproof": version}))
    assert "written by another gradproof" in refused(copy)


def test_flipped_bytes_are_found_wherever_they_are(sound, tmp_path):
    """What is said of the step and of its tensors is protected; the values of tensors are read as they are."""
    random = Random(0)
    files = {name: (sound / name).read_bytes() for name in ("tape.json", "tensors.safetensors", "label.json")}
    header = 8 + struct.unpack("<Q", files["tensors.safetensors"][:8])[0]
    found = 0
    for _ in range(300):
        name = random.choice(list(files))
        place = random.randrange(len(files[name]))
        broken = bytearray(files[name])
        broken[place] ^= 1 << random.randrange(8)
        path = shutil.copytree(sound, tmp_path / "broken")
        (path / name).write_bytes(broken)
        if name == "tensors.safetensors" and place >= header:
            assert load(path).step == 3
        elif name == "label.json":  # the step, the device: what does not belong to what is read
            try:
                assert load(path).step == 3
            except UserError:
                found += 1
        else:
            refused(path)
            found += 1
        shutil.rmtree(path)
    assert found > 100


def test_a_flip_that_is_signed_anew_is_read_or_refused(sound, tmp_path):
    """Whatever a tape says, reading it ends with a specimen or with a sentence."""
    random = Random(1)
    text = (sound / "tape.json").read_bytes()
    refusals = 0
    for _ in range(300):
        broken = bytearray(text)
        broken[random.randrange(len(text))] = random.randrange(32, 127)
        path = shutil.copytree(sound, tmp_path / "broken")
        (path / "tape.json").write_bytes(broken)
        seal(path, {"step": 3})
        try:
            load(path)
        except UserError as error:
            assert "\n" not in str(error)
            refusals += 1
        shutil.rmtree(path)
    assert refusals > 50


@pytest.mark.parametrize("key", ["tape", "tensors", "modules", "facts", "step", "sources"])
def test_a_missing_key_is_named(key, copy):
    forge(copy, lambda data: data.pop(key))
    assert f"has no '{key}'" in refused(copy)


def test_a_missing_tensor_is_named(copy):
    forge(copy, lambda data: next(parts_of(data, "Memory"))[0].update(T="t999"))
    assert "tensor t999 is missing" in refused(copy)


def plant(kind, field, value):
    """Something else in one field of the first object of a kind."""
    return lambda data: next(parts_of(data, kind)).__setitem__(field, value)


HUGE = {"t": [10**15]}
FORGERIES = {
    "a slot that calls itself another": (plant("Slot", 0, 7), "calls itself 7"),
    "an operation that does not exist": (plant("Slot", 4, 10**6), "operation 1000000 does not exist"),
    "an operation below zero": (plant("Slot", 4, -1), "operation -1 does not exist"),
    "a slot that does not exist": (plant("Operation", 4, {"r": 2 * 10**6}), "slot 1000000 does not exist"),
    "a slot in a word": (plant("Operation", 5, {"t": ["three"]}), "slot three does not exist"),
    "a call that ends nowhere": (plant("ModuleCall", 3, 10**9), "operation 1000000000 does not exist"),
    "a root that does not exist": (plant("BackwardCall", 1, [10**9]), "slot 1000000000 does not exist"),
    "a view beyond its memory": (
        plant("Memory", 2, {"d": [[0, {"t": [{"t": [10**6]}, {"t": [1]}, 0]}]]}),
        "beyond its memory",
    ),
    "a view before its memory": (
        plant("Memory", 2, {"d": [[0, {"t": [{"t": [2]}, {"t": [-1]}, 1]}]]}),
        "beyond its memory",
    ),
    "a view of one number as very many": (
        plant("Memory", 2, {"d": [[0, {"t": [HUGE, {"t": [0]}, 0]}]]}),
        "a tensor claims to be (1000000000000000,)",
    ),
    "an absurd shape": (plant("Slot", 1, HUGE), "a tensor claims to be (1000000000000000,)"),
    "a negative shape": (plant("Slot", 1, {"t": [-3]}), "a tensor claims to be (-3,)"),
    "an absurd shape of a parameter": (plant("TensorRecord", 0, HUGE), "a tensor claims to be"),
    "a module that does not exist": (lambda data: data["roots"]["d"].append(["x", 99]), "module 99"),
    "a parameter that does not exist": (
        plant("ModuleRecord", 7, {"d": [["weight", 10**6]]}),
        "tensor 1000000 does not exist",
    ),
    "no operation": (plant("Operation", 1, 5), "is no operation"),
    "a word for a function": (plant("Operation", 1, "print"), "is no operation"),
    "an own function that there is not": (plant("Operation", 1, {"own": "system"}), "no operation 'system'"),
    "an unknown kind": (lambda data: data["tape"].update(k="Popen"), "no 'Popen'"),
    "an unknown spelling": (lambda data: data.update(step={"eval": "1+1"}), "spelt 'eval'"),
    "something of torch that is no word": (
        plant("Slot", 2, {"torch": "load"}),
        "PyTorch has no 'load'",
    ),
    "a list for the whole": (lambda data: data.update(tape=[]), ""),
}  # fmt: skip


@pytest.mark.parametrize("what", FORGERIES)
def test_a_forged_tape_is_refused(what, copy):
    change, reason = FORGERIES[what]
    forge(copy, change)
    assert reason in refused(copy)


@pytest.mark.parametrize(
    "name",
    [
        "os.system",
        "os.system.default",
        "torch.ops.aten.__class__",
        "aten.add.__class__",
        "aten.__class__.__subclasses__",
        "__class__.__mro__.x",
        "load_library.__call__.default",
        "import_module.__func__.__globals__",
        "aten.from_file.default",
        "higher_order.cond.default",
        ".".join(["a"] * 10_000),
        "",
    ],
)
def test_a_hostile_operator_is_only_a_name(name, copy):
    forge(copy, plant("Operation", 1, {"op": name}))
    read = load(copy)
    assert type(read.tape.operations[0].func) is Foreign
    with pytest.raises(CannotReplay):
        read.tape.operations[0].func("true")


def test_deep_nesting_is_refused(copy):
    (copy / "tape.json").write_text("[" * 100_000 + "]" * 100_000)
    seal(copy, {"step": 3})
    refused(copy)
    (copy / "label.json").write_text("[" * 50_000)
    refused(copy)


def test_a_nested_value_is_refused(copy):
    def nest(data):
        for _ in range(900):
            data["losses"] = [data["losses"]]

    limit = sys.getrecursionlimit()
    forge(copy, nest)
    with suppress(UserError):  # as deep as Python goes
        load(copy)
    assert sys.getrecursionlimit() == limit


def test_a_header_that_lies_is_refused(copy):
    file = copy / "tensors.safetensors"
    data = file.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    first = next(iter(header))
    for entry in (
        {"dtype": "F32", "shape": [10**15], "data_offsets": [0, 4 * 10**15]},
        {"dtype": "F32", "shape": [2], "data_offsets": [10, 2]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]},
        {"dtype": "PICKLE", "shape": [1], "data_offsets": [0, 4]},
    ):
        text = json.dumps({**header, first: entry}).encode()
        file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])
        seal(copy, {"step": 3})
        refused(copy)
    file.write_bytes(struct.pack("<Q", 1 << 62) + data[8:])
    seal(copy, {"step": 3})
    refused(copy)


def test_too_large_a_tape_is_not_even_read(copy):
    with open(copy / "tape.json", "ab") as stream:
        stream.truncate(2 << 30)  # no bytes on disk: a hole
    assert "more than 512 MB" in refused(copy)


WITHIN = """
import resource, sys
from gradproof.errors import UserError
from gradproof.tape.specimen import load
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sys.argv[1:]:
    try:
        load(path)
        print("read")
    except UserError as error:
        print("refused")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.timeout(120)
def test_no_specimen_eats_the_memory(sound, tmp_path):
    paths = []
    for number, what in enumerate(FORGERIES):
        paths.append(shutil.copytree(sound, tmp_path / str(number) / sound.name))
        forge(paths[-1], FORGERIES[what][0])
    paths.append(save(tape_step(*make(complex_numbers))[0], tmp_path / "often"))
    text = (paths[-1] / "tape.json").read_text()
    often = {"C": re.search(r'{"C": "(\w+)"}', text)[1]}  # one tensor, said a million times
    forge(paths[-1], lambda data: data.update(losses=[often] * 1_000_000))
    done = subprocess.run(
        [sys.executable, "-c", WITHIN, *map(str, paths)], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    *said, kilobytes = done.stdout.split()
    assert said[: len(FORGERIES)] == ["refused"] * len(FORGERIES)
    assert int(kilobytes) < 1 << 20, f"{int(kilobytes) >> 10} MB"
