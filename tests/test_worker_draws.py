"""Workers of a loader that begin with the same random numbers, and those that each have their own."""

import pickle
from contextlib import ExitStack
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import worker

from gradproof.probes.worker_draws import worker_draws


class Noisy(Dataset):
    """Each sample is drawn, from NumPy's generator or from one that the data set was given."""

    def __init__(self, own=None):
        self.own = own

    def __len__(self):
        return 64

    def __getitem__(self, i):
        return (self.own or np.random).normal(size=3).astype(np.float32)


class Stored(Noisy):
    """Holds a generator, and draws nothing."""

    def __getitem__(self, i):
        return np.float32(i)


def alike(worker):
    np.random.seed(0)


def facts_of(data, **options):
    session = SimpleNamespace(facts={}, alive=True)
    with ExitStack() as stack:
        worker_draws(session, stack, lambda optimizer: True)
        batches = list(DataLoader(data, 4, multiprocessing_context="fork", **options))
        assert (
            pickle.loads(pickle.dumps(worker._worker_loop)) is worker._worker_loop
        )  # for workers that are spawned
    assert len(batches) == 16
    return session.facts.get("worker_draws")


@pytest.mark.parametrize(
    "data, init, generator", [(Noisy(), alike, "numpy"), (Noisy(np.random.default_rng(0)), None, "its own")]
)
def test_workers_with_one_seed_are_seen(data, init, generator):
    found = facts_of(data, num_workers=2, worker_init_fn=init)
    assert found["generator"] == generator and (found["alike"], found["workers"]) == (2, 2)


@pytest.mark.parametrize(
    "data, init, count",
    [
        (Noisy(), None, 2),
        (Stored(np.random.default_rng(0)), None, 2),
        (Stored(), alike, 2),
        (Noisy(), alike, 1),
    ],
)
def test_workers_that_draw_their_own_or_nothing_are_left_alone(data, init, count):
    assert facts_of(data, num_workers=count, worker_init_fn=init) is None


def test_what_workers_hand_out_stays_the_same():
    torch.manual_seed(0)
    plain = torch.cat(list(DataLoader(Noisy(), 4, num_workers=2, multiprocessing_context="fork")))
    torch.manual_seed(0)
    with ExitStack() as stack:
        worker_draws(SimpleNamespace(facts={}, alive=True), stack, lambda optimizer: True)
        watched = torch.cat(list(DataLoader(Noisy(), 4, num_workers=2, multiprocessing_context="fork")))
    assert torch.equal(plain, watched)
