"""Where specimens are put: within a limit, without the training noticing, whatever the disk says."""

import errno
import gc
import os
import time
import weakref
from pathlib import Path

import pytest
import torch
from kinds_of_training import mlp
from test_specimen import make, tape_step

from gradproof.probes import shelf as shelf_module
from gradproof.probes.shelf import Shelf
from gradproof.tape.label import find_specimens
from gradproof.tape.specimen import load, step_of


@pytest.fixture
def tape():
    models, optimizers, step = make(mlp)
    return lambda number: tape_step(models, optimizers, step, number)[0]


def put_all(shelf, specimens):
    for specimen in specimens:
        shelf.put(specimen)
    shelf.close()


def test_the_limit_holds_and_the_first_stays(tmp_path, tape):
    specimens = [tape(number) for number in range(8)]
    size = specimens[0].tape.bytes()
    shelf = Shelf(tmp_path, limit=3 * size + size // 2)
    put_all(shelf, specimens)
    assert [step_of(path) for path in find_specimens(tmp_path)] == [0, 6, 7]
    assert shelf.pushed_out == 5 and not shelf.broken
    found = shelf.describe()
    assert found["kept"] == 3 and found["bytes"] <= found["limit"]


def test_there_are_never_too_many(tmp_path, tape, monkeypatch):
    monkeypatch.setattr(shelf_module, "MOST", 4)
    put_all(Shelf(tmp_path), [tape(number) for number in range(9)])
    assert [step_of(path) for path in find_specimens(tmp_path)] == [0, 6, 7, 8]


def test_what_is_still_to_be_written_is_written_at_the_end(tmp_path, tape, monkeypatch):
    save = shelf_module.save

    def slow(specimen, directory):
        time.sleep(0.3)
        return save(specimen, directory)

    monkeypatch.setattr(shelf_module, "save", slow)
    shelf = Shelf(tmp_path)
    for number in range(4):
        shelf.put(tape(number))
    assert not shelf.has_room and len(find_specimens(tmp_path)) < 4
    shelf.close()
    assert len(find_specimens(tmp_path)) == 4 and shelf.has_room
    shelf.close()  # a second time: nothing


def test_a_full_disk_ends_taping_with_one_note(tmp_path, tape, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    shelf = Shelf(tmp_path)
    shelf.put(tape(0))
    shelf.close()
    with monkeypatch.context() as patch:
        patch.setattr("gradproof.tape.specimen.write_tensors", full)
        put_all(shelf, [tape(1)])
    assert "No space left" in shelf.broken and not shelf.has_room
    assert [step_of(path) for path in find_specimens(tmp_path)] == [0]
    assert not [path for path in shelf.path.iterdir() if path.name.startswith(".")]  # no draft stays
    assert shelf.describe()["broken"] == shelf.broken


def test_what_is_larger_than_the_limit_goes_through_memory(tmp_path, tape, monkeypatch):
    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setattr(shelf_module, "IN_MEMORY", memory)
    shelf = Shelf(tmp_path, limit=10)
    put_all(shelf, [tape(1)])
    assert not shelf.broken and list(memory.iterdir())
    (path,) = find_specimens(tmp_path)
    assert path.is_symlink() and load(path).step == 1
    shelf.clear_away()
    assert not list(memory.iterdir()) and not list(shelf.path.iterdir())


def test_what_fits_nowhere_is_said(tmp_path, tape, monkeypatch):
    monkeypatch.setattr(shelf_module, "IN_MEMORY", Path("/nonexistent"))
    shelf = Shelf(tmp_path, limit=10)
    put_all(shelf, [tape(1)])
    assert "are allowed" in shelf.broken


@pytest.mark.parametrize("place", ["write_tensors", "seal"])
def test_a_training_goes_on_when_the_disk_is_full(place, tmp_path, monkeypatch):
    from test_examination import examine, regression

    from gradproof.record.run import open_run

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(f"gradproof.tape.specimen.{place}", full)
    examine(tmp_path / "run", lambda: regression(steps=12))
    run = open_run(tmp_path / "run")
    assert len(run) == 12
    assert "No space left" in run.info["taping"]["specimens"]["broken"]


def test_nothing_of_a_training_is_kept_alive(tmp_path):
    models, optimizers, step = make(mlp)
    specimen, *_ = tape_step(models, optimizers, step)
    shelf = Shelf(tmp_path)
    shelf.put(specimen)
    shelf.close()
    model = weakref.ref(models[""])
    parameter = weakref.ref(next(models[""].parameters()))
    del models, optimizers, step, specimen, _
    gc.collect()
    assert model() is None and parameter() is None


def test_a_fork_does_not_wait_for_the_shelf_of_its_parent(tmp_path, tape):
    shelf = Shelf(tmp_path)
    shelf.put(tape(0))
    pid = os.fork()
    if pid == 0:
        shelf.close()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    shelf.close()
    assert len(find_specimens(tmp_path)) == 1
    assert torch.get_num_threads() >= 1
