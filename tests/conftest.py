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


@pytest.fixture(autouse=True)
def gradients_stay_on():
    """A test that leaves them off fails itself, not all those after it."""
    yield
    on = torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    assert on, "the test has left gradients switched off"


@pytest.fixture(autouse=True)
def examined_here(request, monkeypatch):
    """Specimens are examined in this process when a training has ended; a test marked `helper` has the real helper."""
    if request.node.get_closest_marker("helper"):
        return
    from gradproof.probes import helper, watch

    for module in (helper, watch):
        monkeypatch.setattr(module, "Helper", ExaminesHere)


class ExaminesHere:
    next_look = float("inf")

    def __init__(self, run, limit=None):
        self.run = run

    def announcements(self):
        return []

    def finish(self, show=None):
        examine_here(self.run)

    def stop(self):
        pass


def examine_here(run, **options):
    from gradproof.examination.examiner import Examiner
    from gradproof.examination.worker import Here

    state, threads = torch.get_rng_state(), torch.get_num_threads()
    examiner = Examiner(Path(run), [Here()], **options)
    examiner.end(None, examiner.ask_all())
    torch.set_rng_state(state)
    torch.set_num_threads(threads)
    return examiner
