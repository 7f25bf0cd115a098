"""Very many tensors, very long names, models that grow, optimizers that are made again: all of it bounded."""

import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import gradproof
from gradproof.cli import main
from gradproof.probes import parameters as describing
from gradproof.probes import tensors as measuring
from gradproof.probes.names import LONGEST, short
from gradproof.record import writer as writing
from gradproof.record.run import open_run
from gradproof.record.writer import RunWriter
from gradproof.tape.roles import find_unknown_parameters


class Many(nn.Module):
    """So many parameters of two entries, with names of any length."""

    def __init__(self, count, length=8):
        super().__init__()
        for number in range(count):
            stem = f"p{number}_"
            self.register_parameter(stem.ljust(length, "x"), nn.Parameter(torch.ones(2)))

    def forward(self, x):
        return torch.stack(list(self.parameters())).mean(0) @ x


def train(model, optimizer, steps=6, before=lambda step: None):
    for step in range(steps):
        before(step)
        optimizer.zero_grad()
        model(torch.ones(2)).square().backward()
        optimizer.step()


def said(path):
    found = gradproof.diagnose(path)
    assert not found.stopped, found.stopped
    return found


@pytest.mark.parametrize("count, length", [(2000, 8), (300, 10_000)])
def test_many_groups_with_long_names(tmp_path, capsys, count, length):
    model = Many(count, length)
    optimizer = torch.optim.SGD([{"params": [p]} for p in model.parameters()], lr=0.1)
    with gradproof.watch(model, optimizer, out=tmp_path / "run", experiments=False):
        train(model, optimizer)
    said(tmp_path / "run")
    run = open_run(tmp_path / "run")
    names = {tensor["name"] for tensor in run.tensors if tensor["kind"] == "gradient"}
    assert len(names) == count and max(map(len, names)) <= LONGEST and run.notes == []
    assert len(run.info["optimizers"][0]["groups"]) == min(count, 1000)
    left_out = ["1000 more parameter groups were there than have room in run.json; of those nothing is said"]
    assert [note for note in said(tmp_path / "run").notes if "groups" in note] == left_out * (count > 1000)
    assert (tmp_path / "run" / "run.json").stat().st_size < 2000 * count
    began = time.process_time()
    assert main(["report", str(tmp_path / "run")]) == 0
    assert time.process_time() - began < 30


def seconds_of_groups(count, path, named):
    """CPU time of six watched steps with so many groups, which torch itself would compare with each other."""
    model = Many(count) if named else None
    leaves = list(model.parameters()) if named else [torch.ones(2, requires_grad=True) for _ in range(count)]
    optimizer = torch.optim.SGD(leaves[:1], lr=0.1)
    first = optimizer.param_groups[0]
    optimizer.param_groups.extend({**first, "params": [leaf]} for leaf in leaves[1:])
    with gradproof.watch(model, optimizer, out=path, experiments=False):
        began = time.thread_time()
        train(model or (lambda x: torch.stack(leaves).mean(0) @ x), optimizer)
    took = time.thread_time() - began
    assert len({t["name"] for t in open_run(path).tensors if t["kind"] == "gradient"}) == count
    return took


@pytest.mark.parametrize("named", [True, False])
def test_many_groups_take_as_long_as_there_are_many(tmp_path, named):
    """Eight times as many: eight times as long, and something that is done once; not 64 times."""
    seconds_of_groups(50, tmp_path / "warm", named)
    few = min(seconds_of_groups(500, tmp_path / f"few{n}", named) for n in range(2))
    assert seconds_of_groups(4000, tmp_path / "many", named) < 20 * few


def test_parameters_that_no_model_lists_are_looked_for_once():
    """Among 20,000 that step; each looked up among all others they would take 200 million looks."""
    slots = [SimpleNamespace(index=n, name=f"p{n}") for n in range(20_000)]
    reads = SimpleNamespace(phase="forward", module="head", reads=[7], line=None)
    call = SimpleNamespace(contributions=[(None, slot.index, None) for slot in slots])
    stepped = [slot.index for slot in slots if slot.index != 7]
    tape = SimpleNamespace(backwards=[call], parameters=slots, stepped=stepped, operations=[reads])
    began = time.process_time()
    assert list(find_unknown_parameters(tape, known=set())) == ["p7"]
    assert time.process_time() - began < 1


def test_names_that_differ_in_their_middle_stay_apart():
    assert short("a" * LONGEST) == "a" * LONGEST
    one, other = ("x" * 500 + middle + "y" * 500 for middle in "ab")
    assert short(one) != short(other) and len(short(one)) <= LONGEST


def test_what_has_no_room_in_the_run_is_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "MOST_NAMED", 5000)
    monkeypatch.setattr(describing, "MOST", 30)
    model = Many(50)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradproof.watch(model, optimizer, out=tmp_path / "run", experiments=False):
        train(model, optimizer)
    run, notes = open_run(tmp_path / "run"), " ".join(said(tmp_path / "run").notes)
    assert 50 <= len(run.tensors) < 60 and len(run.info["parameters"]) == 30 and len(run.frames)
    assert "20 more parameters were there" in notes and "more tensors were there" in notes


def test_a_usual_model_has_room(tmp_path):
    model = Many(50)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradproof.watch(model, optimizer, out=tmp_path / "run", experiments=False):
        train(model, optimizer)
    assert not any("more" in note for note in said(tmp_path / "run").notes)


def test_rows_of_tensors_without_a_number_are_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "MOST_NAMED", 250)
    writer = RunWriter(tmp_path / "run", {})
    numbers = np.array([writer.add_tensor("gradient", f"layer{n}") for n in range(5)])
    assert numbers.tolist() == [0, 1, -1, -1, -1] and writer.add_tensor("gradient", "layer1") == 1
    writer.write_frame(1, 0, numbers, np.arange(5 * 13.0).reshape(5, 13))
    writer.close()
    run = open_run(tmp_path / "run")
    assert run.frames[0].values[:, 0].tolist() == [0.0, 13.0] and run.info["tensors_left_out"] == 3


@pytest.mark.parametrize("count, width", [(3, 1024), (4096, 1024), (8192, 512), (1 << 19, 16)])
def test_samples_of_very_many_tensors_are_narrow(count, width):
    rows = measuring.sample([torch.arange(5.0)] * 2 + [torch.ones(1)] * (count - 2))
    assert rows.shape == (count, width) and rows[1, :6].tolist()[:5] == [0, 1, 2, 3, 4]
    assert rows[1, 5:].isnan().all() and rows[2, 0] == 1 and rows[2, 1:].isnan().all()


def test_distributions_are_the_same_in_slabs(monkeypatch):
    samples = np.random.default_rng(0).normal(size=(100, 64)).astype(np.float32)
    whole = measuring.distributions(samples)
    monkeypatch.setattr(measuring, "SLAB", 7 * 64)
    assert np.array_equal(whole, measuring.distributions(samples))


def test_a_model_that_grows_and_swaps_its_parameters(tmp_path):
    model = Many(5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def grow(step):
        if step % 5 == 0:
            fresh = nn.Parameter(torch.ones(2))
            model.register_parameter(f"grown{step}", fresh)
            optimizer.add_param_group({"params": [fresh]})
        if step % 7 == 0:
            swapped = nn.Parameter(torch.ones(2))
            model.p0_xxxxx = swapped
            optimizer.param_groups[0]["params"][0] = swapped

    with gradproof.watch(model, optimizer, out=tmp_path / "run", experiments=False):
        train(model, optimizer, 200, grow)
    found = said(tmp_path / "run")
    assert len(open_run(tmp_path / "run")) == 200 and found.worst != "problem", found


def test_optimizers_that_are_made_again_every_epoch(tmp_path, monkeypatch):
    monkeypatch.setattr(describing, "MOST_OPTIMIZERS", 100)
    model, took = Many(5), []
    with gradproof.watch(model, out=tmp_path / "run", experiments=False):
        for _ in range(300):
            began = time.process_time()
            train(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), 2)
            took.append(time.process_time() - began)
    said(tmp_path / "run")
    run = open_run(tmp_path / "run")
    assert len(run) == 600 and len(run.info["optimizers"]) == 100
    assert np.median(took[200:]) < 3 * np.median(took[20:120])


class WithoutRate(torch.optim.SGD):
    """As Adafactor in some libraries: the rate is its own affair."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.param_groups[0]["lr"] = None

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter -= 0.01 * parameter.grad


def test_an_optimizer_without_a_learning_rate(tmp_path):
    model = Many(5)
    with gradproof.watch(model, out=tmp_path / "run"):
        train(model, WithoutRate(model.parameters()))
    said(tmp_path / "run")
    assert len(open_run(tmp_path / "run")) == 6


def test_many_optimizers_are_counted(tmp_path, monkeypatch, capsys):
    """Of those that are not described, the report and its notes for programs say how many there were."""
    monkeypatch.setattr(describing, "MOST_OPTIMIZERS", 4)
    for count, path in ((4, tmp_path / "few"), (7, tmp_path / "many")):
        model = Many(count)
        optimizers = [torch.optim.SGD([p], lr=0.1) for p in model.parameters()]
        with gradproof.watch(model, optimizers, out=path, experiments=False):
            for optimizer in optimizers:
                train(model, optimizer, steps=2)
    note = "3 more optimizers were there than have room in run.json; of those nothing is said"
    assert note in said(tmp_path / "many").as_data()["notes"]
    assert len(open_run(tmp_path / "many").info["optimizers"]) == 4
    main(["diagnose", str(tmp_path / "many")])
    assert "3 more optimizers" in capsys.readouterr().out.replace("\n", " ")
    assert not any("optimizers" in note for note in said(tmp_path / "few").notes)
