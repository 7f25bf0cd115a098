"""What tests share: one thread a worker, the small trainings beside the tests, and a walk through the backends."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parent.parent))  # processes that a test spawns look for tests.test_…
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported

import torch

torch.set_num_threads(1)


@pytest.fixture(params=["torch", "triton"])
def loss_device(request, monkeypatch):
    """The device to put tensors on, with the losses computed by one backend and then by the other."""
    import numpy as np

    from gradproof.kernels import cross_entropy, linear_cross_entropy, torch_loss

    if request.param == "triton":
        backend = pytest.importorskip("gradproof.kernels.triton_loss")
    else:
        backend = torch_loss
    for module in (cross_entropy, linear_cross_entropy):
        monkeypatch.setattr(module, "backend_of", lambda x: backend)
    with np.errstate(all="ignore"):  # the interpreter computes with numpy, which warns where a GPU gives inf
        yield "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def own_warnings_are_errors(monkeypatch):
    """Where warnings are errors, gradproof prints its own instead of raising: a test that did not ask for one fails."""
    from gradproof import errors

    monkeypatch.setattr(errors, "print_instead", pytest.fail)
