"""Two threads that train at once, and a script's signal handler that raises in the middle of gradproof's own code."""

import signal
import sys
import threading
import time
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from gradproof.probes import hooks
from gradproof.probes.guard import quietly, raised_by_signal
from gradproof.probes.names import Names
from gradproof.probes.watch import open_session, watch
from gradproof.record.run import open_run


class Training:
    def __init__(self, seed, width=8):
        generator = torch.Generator().manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.x = torch.randn(16, 4, generator=generator)
        self.losses = []

    def step(self):
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.model(self.x), self.x.sum(1, keepdim=True))
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.losses.append(loss.item())


def run_threads(*functions):
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.fixture
def watched(tmp_path):
    """Everything that trains in this process, as under `gradproof run`."""
    session = open_session(tmp_path / "run", command=["train.py"], names=Names())
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # threads take turns in the middle of everything
    with hooks.attach(session), warnings.catch_warnings():
        yield session
        session.close()
    sys.setswitchinterval(interval)


def closed(session):
    session.close()
    return open_run(session.writer.path)


@pytest.mark.parametrize("attempt", range(3))
def test_of_two_threads_that_train_at_once_the_first_is_watched(attempt, watched):
    trainings, both = [Training(0), Training(1, width=9)], threading.Barrier(2)

    def train(training):
        for _ in range(3):  # both train before one of them has ended
            both.wait()
            training.step()
        for _ in range(57):
            training.step()

    run_threads(*(lambda t=t: train(t) for t in trainings))
    run = closed(watched)
    assert run.info["failure"] is None and run.info["threads"] == 2 and len(run) == 60
    assert [e["text"] for e in run.events if e["event"] == "second_thread"] == [
        "two threads train; only the first is watched"
    ]
    logged = run.steps["loss"][1:]
    assert any(logged == pytest.approx(t.losses[1:]) for t in trainings), (
        "one training's losses, not a mixture"
    )
    clip = run.info["facts"]["clip"]
    assert clip["given"] == clip["stepped"] > 0


def test_the_slower_of_two_threads_is_left_alone_when_the_first_has_ended(watched):
    first, second, begun = Training(0), Training(1, width=9), threading.Event()
    both = threading.Barrier(2)

    def short():
        for _ in range(5):
            first.step()
        both.wait()
        begun.wait()

    def long():
        both.wait()
        second.step()
        begun.set()
        threads[0].join()
        for _ in range(20):
            second.step()

    threads = [threading.Thread(target=f) for f in (short, long)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    run = closed(watched)
    assert run.info["threads"] == 2 and run.steps["loss"] == pytest.approx(first.losses)


def test_one_training_alone_says_nothing_about_threads(watched):
    training = Training(0)
    run_threads(lambda: [training.step() for _ in range(20)])
    run = closed(watched)
    assert run.info["threads"] == 1 and run.info["failure"] is None and len(run) == 20
    assert not [e for e in run.events if e["event"] == "second_thread"]


def test_a_training_that_goes_from_thread_to_thread_is_one(watched):
    """A pool whose workers take steps in turn; and a second training after the first one's thread has ended."""
    training, second = Training(0), Training(1)
    for _ in range(10):
        run_threads(training.step)
    run_threads(lambda: [second.step() for _ in range(10)])
    run = closed(watched)
    assert run.info["threads"] == 1 and len(run) == 20
    assert run.steps["loss"] == pytest.approx(training.losses + second.losses)


def test_a_loader_in_a_thread_beside_the_training_is_no_training(watched):
    training, over = Training(0), threading.Event()
    data = torch.utils.data.DataLoader(torch.arange(8))

    def read():
        while not over.is_set():
            list(data)

    def train():
        for _ in range(20):
            training.step()
        over.set()

    run_threads(read, train)
    run = closed(watched)
    assert run.info["threads"] == 1 and len(run) == 20 and run.steps["epoch"].max() > 0


class Timeout(Exception):
    pass


def inside_gradproof(frame):
    """Not at the first instruction of our __exit__ of no_grad: torch's own can be hit there, too."""
    if frame is None or "/gradproof/" not in frame.f_code.co_filename:
        return False
    return frame.f_code.co_name != "__exit__" or frame.f_lasti > 2


@pytest.mark.parametrize("arguments", ["named", "starred"])
def test_what_a_signal_handler_raises_reaches_the_script(arguments, tmp_path):
    training, raised, on_its_way, looking = Training(0), 0, False, False

    def handler(signum, frame):
        nonlocal raised, on_its_way, looking
        if on_its_way or looking:  # to read a frame's code is heard by our audit hook: a place of ours, too
            return
        looking = True
        hit = inside_gradproof(frame)
        looking = False
        if hit:
            raised, on_its_way = raised + 1, True
            raise Timeout

    def starred(*given):
        handler(*given)

    with watch(
        training.model, training.optimizer, out=tmp_path / "run", schedule="all every step", experiments=False
    ):
        before = signal.signal(signal.SIGALRM, handler if arguments == "named" else starred)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.002, 0.0007)
            until = time.monotonic() + 60  # a busy machine hits fewer
            while raised < 300 and time.monotonic() < until:
                try:
                    training.step()
                    assert not on_its_way, "swallowed"
                except Timeout:
                    on_its_way = False
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        for _ in range(3):
            training.step()
    assert raised >= 20
    run = open_run(tmp_path / "run")
    assert run.info["failure"] is None and np.isfinite(run.steps["grad_norm"][-2:]).all()
    assert torch.is_grad_enabled() and not nn.modules.module._global_forward_pre_hooks


def test_errors_of_our_own_are_still_kept_from_the_script():
    """Also where code of the script that we call raises: only a signal handler is given the frame it interrupts."""

    def script_code(value):
        raise ValueError(value)

    with quietly():
        script_code((1, 2))
    with quietly():
        [][0]
    try:
        {}["missing"]
    except KeyError as error:
        assert not raised_by_signal(error)
    with pytest.raises(KeyboardInterrupt), quietly():
        raise KeyboardInterrupt
