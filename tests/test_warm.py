"""Kernels are compiled beside a training, once on a machine that has a GPU."""

import sys
import threading

import pytest

from gradproof.kernels import warm


@pytest.fixture
def machine(tmp_path, monkeypatch):
    monkeypatch.setattr(warm, "GPU", tmp_path / "nvidiactl")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


def test_cold_is_a_gpu_without_a_sign(machine):
    assert not warm.is_cold()
    (machine / "nvidiactl").touch()
    assert warm.is_cold()
    (machine / "cache").mkdir()
    warm._mark().touch()
    assert not warm.is_cold()


@pytest.mark.parametrize("has_gpu", [False, True])
def test_a_process_is_started_where_it_is_cold(has_gpu, machine, monkeypatch):
    started = []
    monkeypatch.setattr(warm.subprocess, "Popen", lambda command, **_: started.append(command))
    if has_gpu:
        (machine / "nvidiactl").touch()
    warm.warm_up()
    assert started == ([[sys.executable, "-m", "gradproof.kernels.warm"]] if has_gpu else [])


def test_triton_is_hashed_from_when_cuda_is_first_used(machine, monkeypatch):
    import torch
    from triton.runtime.cache import triton_key

    waiting = []
    monkeypatch.setattr(torch.cuda, "_lazy_call", waiting.append)
    warm.hash_beside()
    assert not waiting
    (machine / "nvidiactl").touch()
    warm.hash_beside()
    triton_key.cache_clear()
    waiting[0]()
    for thread in threading.enumerate():
        if thread.name == "gradproof-triton":
            thread.join()
    assert triton_key.cache_info().currsize == 1


def test_without_a_gpu_nothing_is_compiled(machine):
    import torch

    if torch.cuda.is_available():
        warm.compile_kernels()
        assert warm._mark().exists()
    else:
        warm.compile_kernels()
        assert not (machine / "cache").exists()
