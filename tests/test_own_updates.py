"""Updates by hand are steps like any other: found, named, taped to their last operation, and not changed by a bit."""

import numpy as np
import pytest
import torch
from own_updates import END, START, watch_script

from gradproof.diagnosis.ranking import diagnose
from gradproof.probes import own_updates
from gradproof.probes.own_updates import rate_of
from gradproof.tape.label import find_specimens
from gradproof.tape.specimen import load

LEAVES = "W.requires_grad_(); b.requires_grad_()\n"
LOOP = """
for step in range(14):
    x, y = batch()
    loss = ((predict(x, W, b) - y) ** 2).mean()
    losses.append(loss.item())
"""
IN_A_DICT = LOOP.replace("predict(x, W, b)", "predict(x, P['W'], P['b'])")
KINDS = {
    "data": (
        LEAVES + LOOP + "    W.grad = b.grad = None\n    loss.backward()\n"
        "    for p in (W, b):\n        p.data -= 0.1 * p.grad\n",
        {"W", "b"},
    ),
    "in place": (
        LEAVES + LOOP + "    loss.backward()\n    with torch.no_grad():\n"
        "        for p in (W, b):\n            p -= 0.1 * p.grad\n            p.grad.zero_()\n",
        {"W", "b"},
    ),
    "copied": (
        LEAVES + LOOP + "    loss.backward()\n    with torch.no_grad():\n"
        "        for p in (W, b):\n            p.copy_(p - 0.1 * p.grad)\n            p.grad = None\n",
        {"W", "b"},
    ),
    "other data": (
        LEAVES + LOOP + "    loss.backward()\n"
        "    for p in (W, b):\n        p.data = p.data - 0.1 * p.grad\n        p.grad = None\n",
        {"W", "b"},
    ),
    "other variables": (
        LEAVES + LOOP + "    loss.backward()\n"
        "    W = (W - 0.1 * W.grad).detach().requires_grad_()\n"
        "    b = (b - 0.1 * b.grad).detach().requires_grad_()\n",
        {"W", "b"},
    ),
    "other entries": (
        "P = {'W': W.requires_grad_(), 'b': b.requires_grad_()}\ndel W, b\n"
        + IN_A_DICT
        + "    loss.backward()\n"
        "    for k in P:\n        P[k] = (P[k].data - 0.1 * P[k].grad).requires_grad_()\n",
        {"P.W", "P.b"},
    ),
    "asked for": (
        LEAVES + LOOP + "    dW, db = torch.autograd.grad(loss, [W, b])\n"
        "    with torch.no_grad():\n        W -= 0.1 * dW\n        b -= 0.1 * db\n",
        {"W", "b"},
    ),
    "functional": (
        "def loss_of(P, x, y):\n    return ((predict(x, P['W'], P['b']) - y) ** 2).mean()\n"
        "def fit(P):\n    for step in range(14):\n        x, y = batch()\n"
        "        G, loss = torch.func.grad_and_value(loss_of)(P, x, y)\n        losses.append(loss.item())\n"
        "        P = {k: v - 0.1 * G[k] for k, v in P.items()}\nfit({'W': W, 'b': b})\n",
        {"W", "b"},
    ),
    "an optimizer of its own": (
        "class Descent:\n    def __init__(self, params):\n        self.params = list(params)\n"
        "    @torch.no_grad()\n    def step(self):\n        for p in self.params:\n"
        "            p.add_(p.grad, alpha=-0.1)\n            p.grad = None\n"
        "net = torch.nn.Linear(4, 1)\nopt = Descent(net.parameters())\n"
        + LOOP.replace("predict(x, W, b)", "net(x)")
        + "    loss.backward()\n    opt.step()\n",
        {"weight", "bias"},
    ),
}


AT_ONCE = ("data", "other variables", "functional", "an optimizer of its own")


@pytest.mark.parametrize(
    "kind", [kind if kind in AT_ONCE else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_an_update_by_hand_is_a_step(kind, tmp_path, monkeypatch):
    body, names = KINDS[kind]
    text = START + "torch.manual_seed(1)\n" + body + END
    found = watch_script(tmp_path, monkeypatch, text)
    assert found.losses == found.plain and len(found.plain) == 14
    assert len(found.run) == 14
    assert found.run.steps["loss"] == pytest.approx([float.fromhex(loss) for loss in found.plain])
    assert {p["name"] for p in found.run.info["parameters"]} == names
    assert all(p["changed"] and p["gradient"] and p["trainable"] for p in found.run.info["parameters"])
    rates = found.run.steps["lr"]
    assert np.nanmax(np.abs(rates - 0.1)) < 1e-3 and np.isfinite(rates).sum() >= 13
    line = next(n for n, text in enumerate(text.splitlines(), 1) if "0.1" in text)
    assert f"train.py:{line}" in found.run.info["facts"]["lines"]["step"]
    specimens = [load(path) for path in find_specimens(found.outcome.path)]
    assert len(specimens) >= 5
    for specimen in specimens:
        tape = specimen.tape
        assert {tape.slots[slot].name for slot in tape.stepped} == names
        assert {tape.slots[slot].name for slot in tape.final_gradients} == names
        assert len(tape.loss_slots) == 1
        assert [op.name for op in tape.operations if op.phase == "forward"].count(
            "randint"
        ) == 1  # its own batch
    answers, noted = found.ask("is_the_update_the_textbooks")
    answers += found.ask("does_the_optimizer_hold_everything")[0]
    assert [answer.verdict for answer in answers] == ["excluded", "excluded"]
    assert noted["update_rule"]["rule"] == "SGD (rate 0.1)"
    answers, _ = found.ask("is_the_gradient_right", steps=(4,))
    assert [(answer.verdict, answer.family) for answer in answers] == [("excluded", "wrong-gradient")]


def test_backwards_without_an_update_between_them_are_one_step(tmp_path, monkeypatch):
    body = LEAVES + LOOP + "    (loss / 2).backward()\n    if step % 2:\n        for p in (W, b):\n"
    body += "            p.data -= 0.1 * p.grad\n            p.grad = None\n"
    found = watch_script(tmp_path, monkeypatch, START + body + END)
    assert found.losses == found.plain
    assert found.run.steps["backwards"].tolist() == [2.0] * 7
    steps = {load(path).step for path in find_specimens(found.outcome.path)}
    assert len(steps) >= 3 and max(steps) <= 6


def test_an_optimizer_of_torch_is_what_trains(tmp_path, monkeypatch):
    def refuse(*args):
        raise AssertionError("nobody watches for updates by hand")

    monkeypatch.setattr(own_updates.OwnUpdates, "backward_begins", refuse)
    monkeypatch.setattr(own_updates, "UpdateWatch", refuse)
    body = LEAVES + "opt = torch.optim.SGD([W, b], lr=0.1)\n" + LOOP
    body += "    opt.zero_grad(); loss.backward(); opt.step()\n"
    found = watch_script(tmp_path, monkeypatch, START + body + END)
    assert found.losses == found.plain and len(found.run) == 14


def test_nothing_is_left_behind_when_the_script_raises_in_mid_update(tmp_path, monkeypatch):
    body = LEAVES + LOOP + "    loss.backward()\n    with torch.no_grad():\n        W -= 0.1 * W.grad\n"
    body += "        W.grad = None\n        if step == 5:\n            raise SystemExit(0)\n        b -= 0.1 * b.grad\n"
    before = (torch.autograd.grad, torch.func.grad, torch.func.grad_and_value, print)
    text = START + "try:\n" + indent(body) + "except SystemExit:\n    pass\n" + END
    found = watch_script(tmp_path, monkeypatch, text)
    assert found.losses == found.plain and len(found.run) == 6
    assert (torch.autograd.grad, torch.func.grad, torch.func.grad_and_value, print) == before
    assert torch._C._len_torch_dispatch_stack() == 0


def indent(text):
    return "".join(f"    {line}\n" for line in text.splitlines())


def test_gradients_that_move_nothing_are_said_to(tmp_path, monkeypatch):
    from gradproof.commands.watching import why_nothing_was_trained

    found = watch_script(tmp_path, monkeypatch, START + LEAVES + LOOP + "    loss.backward()\n" + END)
    assert found.losses == found.plain and len(found.run) == 0
    said = why_nothing_was_trained(found.outcome, "train.py")
    assert "called backward 14 times" in said and "monitor.step(loss=loss, gradients=G)" in said
    assert "\n" not in said


def test_gradients_of_single_samples_are_none_of_a_step(tmp_path, monkeypatch):
    """As differential privacy takes them: under vmap, nothing of them may be looked at."""
    body = (
        "def loss_of(P, x, y):\n    return ((predict(x[None], P['W'], P['b']) - y) ** 2).mean()\n"
        "P = {'W': W, 'b': b}\nper_sample = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0, 0))\n"
        "for step in range(14):\n    x, y = batch()\n    G = per_sample(P, x, y)\n"
        "    losses.append(loss_of(P, x[0], y[0]).item())\n"
        "    for k, v in P.items():\n        v.sub_(0.1 * G[k].clamp(-1, 1).mean(0))\n"
    )
    found = watch_script(tmp_path, monkeypatch, START + body + END)
    assert found.losses == found.plain and len(found.plain) == 14


def test_a_rate_is_read_off_only_where_there_is_one():
    gradient, weight = np.array([1.0, -2.0, 0.5]), np.ones(3)
    assert rate_of(-0.1 * gradient, gradient, weight) == pytest.approx(0.1)
    assert rate_of(0.1 * gradient, gradient, weight) == pytest.approx(-0.1)
    assert rate_of(-0.1 * np.sign(gradient), gradient, weight) is None
    assert rate_of(np.zeros(3), gradient, weight, largest=0.1) == 0
    assert rate_of(np.zeros(3), 1e-9 * gradient, weight, largest=0.1) is None  # lost in rounding at any rate
    assert rate_of(np.full(3, np.nan), gradient, weight) is None


DECAYS = """
import torch
torch.manual_seed(0)
W = torch.randn(6, 1, requires_grad=True)
X = torch.randn(200, 6)
Y = torch.tanh(X.sum(1, keepdim=True))
m, v, lr = torch.zeros_like(W), torch.zeros_like(W), 0.02
for t in range(1, 161):
    ix = torch.randint(0, 200, (20,))
    loss = ((X[ix] @ W - Y[ix]) ** 2).mean()
    W.grad = None
    loss.backward()
    lr = RATE
    with torch.no_grad():
        m = 0.9 * m + 0.1 * W.grad
        v = 0.99 * v + 0.01 * W.grad**2
        W -= lr * (m / (1 - 0.9**t)) / ((v / (1 - 0.99**t)).sqrt() + 1e-8)
"""


@pytest.mark.parametrize("rate", ["lr * 0.85", "0.02 * (1 - t / 161)", "0.02 if t < 120 else 0.002"])
def test_a_rate_that_decays_to_nothing_is_named_at_its_line(rate, tmp_path, monkeypatch):
    found = watch_script(tmp_path, monkeypatch, DECAYS.replace("RATE", rate), experiments=False)
    said = [(c.id, c.level) for c in diagnose(found.run).causes if c.level != "note"]
    if rate == "lr * 0.85":
        assert said[0] == ("lr-schedule-error/dies-early", "problem")
        assert "train.py:13" in diagnose(found.run).causes[0].where
    else:
        assert [id for id, _ in said if id.startswith("lr-schedule")] == []


CLIP = "    torch.nn.utils.clip_grad_norm_([W, b], 0.3)\n"
BY_HAND = "    for p in (W, b):\n        p.grad.mul_(0.3 / (0.3 + p.grad.norm()) if losses else 1.0)\n"
UPDATE = "    for p in (W, b):\n        p.data.add_(p.grad, alpha=-0.1)\n        CLEAR\n"


@pytest.mark.parametrize(
    "order, clear", [("clipped", "pass"), ("clipped", "p.grad = None"), ("late", "pass"), ("by hand", "pass")]
)
def test_a_clip_belongs_to_the_update_that_it_comes_before(order, clear, tmp_path, monkeypatch):
    body = {"clipped": CLIP + UPDATE, "late": UPDATE + CLIP, "by hand": BY_HAND + UPDATE}[order]
    text = START + LEAVES + LOOP.replace("14", "40") + "    W.grad = b.grad = None\n    loss.backward()\n"
    text += body.replace("CLEAR", clear) + END
    found = watch_script(tmp_path, monkeypatch, text, experiments=False)
    assert found.losses == found.plain and len(found.run) == 40
    said = [c.id for c in diagnose(found.run).causes]
    assert said == (["grad-clip-misuse/after-step"] if order == "late" else [])
    if order == "clipped":
        assert set(found.run.steps["order"]) == {"bcs"}
        rates = found.run.steps["lr"]
        assert np.nanmax(np.abs(rates - 0.1)) < 1e-3 and np.isfinite(rates).sum() >= 39


def test_points_whose_derivative_is_wanted_are_no_parameters(tmp_path, monkeypatch):
    body = LEAVES + "x = torch.linspace(0, 1, 32)[:, None].requires_grad_()\n"
    body += "W.data = W.data[:1]\nfor step in range(14):\n    f = torch.tanh(x @ W + b)\n"
    body += "    slope, = torch.autograd.grad(f.sum(), x, create_graph=True)\n"
    body += "    loss = ((slope - 1) ** 2).mean()\n    losses.append(loss.item())\n"
    body += "    loss.backward()\n    with torch.no_grad():\n        for p in (W, b):\n"
    body += "            p -= 0.1 * p.grad\n            p.grad = None\n"
    found = watch_script(tmp_path, monkeypatch, START + body + END, experiments=False)
    assert found.losses == found.plain and len(found.run) == 14
    assert {p["name"] for p in found.run.info["parameters"]} == {"W", "b"}
    assert [cause.id for cause in diagnose(found.run).causes if cause.level != "note"] == []


def test_an_optimizer_that_was_made_before_anybody_watched(tmp_path):
    """Its first step tells that the update is not made by hand; the step that waited for one is its own."""
    import gradproof
    from gradproof.record.run import open_run

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradproof.watch(model, out=tmp_path / "run", experiments=False):
        for _ in range(8):
            optimizer.zero_grad()
            (model(torch.randn(8, 4)) - 1).square().mean().backward()
            optimizer.step()
    run = open_run(tmp_path / "run")
    assert len(run) == 8 and set(run.steps["order"]) == {"zbs"}
    (described,) = run.info["optimizers"]
    assert "UpdatesByHand" not in str(described)
    assert torch._C._len_torch_dispatch_stack() == 0


def test_much_data_does_not_hide_the_parameters(tmp_path, monkeypatch):
    """Be it the script's own, or that of a library which runs the script: a test runner holds thousands of tests."""
    body, names = KINDS["other entries"]
    samples = (
        "class Sample:\n    def __init__(self, i):\n        for name in 'abcdefghijkl':\n"
        "            setattr(self, name, [i])\nsamples = [Sample(i) for i in range(9000)]\n"
    )
    library = "def call(function, *args):\n    many = {str(i): {str(k): [k] for k in range(12)} for i in range(9000)}\n"
    scope = {}
    exec(compile(library + "    return function(*args)\n", "/lib/site-packages/runner.py", "exec"), scope)
    text = START + "torch.manual_seed(1)\n" + samples + body + END
    found = scope["call"](watch_script, tmp_path, monkeypatch, text)
    assert {p["name"] for p in found.run.info["parameters"]} == names and len(found.run) == 14
