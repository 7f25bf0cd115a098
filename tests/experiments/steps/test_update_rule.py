"""The rule of an update by hand is told from its changes, and what it lacks or leaves out is named with its line."""

import numpy as np
import pytest
from own_updates import END, START, watch_script

from gradproof.instruments.rules import adam_way, averages, recognise

UPDATES, ENTRIES = 24, 12


def history(rule):
    """Gradients, weights and changes of a rule in float32, on gradients that turn as a training's do."""
    random = np.random.default_rng(0)
    trend, gradients = random.normal(size=ENTRIES), []
    for _ in range(UPDATES):
        trend = 0.9 * trend + 0.5 * random.normal(size=ENTRIES)
        gradients.append(trend.copy())
    gradients = np.array(gradients)
    weights = [random.normal(size=ENTRIES).astype(np.float32)]
    for change in rule(gradients):
        change = change(weights[-1]) if callable(change) else change
        weights.append((weights[-1] + change).astype(np.float32))
    weights = np.array(weights, dtype=np.float64)
    return gradients, weights[:-1], np.diff(weights, axis=0)


def momentum(gradients):
    state = np.zeros(ENTRIES)
    for gradient in gradients:
        state = 0.9 * state + gradient
        yield -0.01 * state


def adamw(gradients):
    for direction in adam_way(gradients, 0.9, 0.99, 1e-8):
        yield lambda weight, direction=direction: -0.01 * (direction + 0.1 * weight)


RULES = {
    "SGD (rate 0.05)": lambda g: -0.05 * g,
    "momentum (rate 0.01, μ 0.9)": momentum,
    "RMSProp (rate 0.01, β2 0.99, ε 1e-08)": lambda g: -0.01 * g / (np.sqrt(averages(g**2, 0.99)) + 1e-8),
    "Adam (rate 0.01, β1 0.9, β2 0.999, ε 1e-08)": lambda g: -0.01 * adam_way(g, 0.9, 0.999, 1e-8),
    "AdamW (rate 0.01, β1 0.9, β2 0.99, ε 1e-08, decay 0.1)": adamw,
    "sign (rate 0.01)": lambda g: -0.01 * np.sign(g),
}


@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_recognised_with_its_settings(name):
    found = recognise(*history(RULES[name]))
    best = min(found, key=lambda rule: rule.error) if name.startswith("Adam") else found[0]
    assert str(best) == name


def test_something_else_is_no_rule_of_the_textbook():
    clipped = history(lambda g: -0.01 * g * np.minimum(1, 1 / np.linalg.norm(g, axis=1))[:, None])
    assert recognise(*clipped) == []
    assert recognise(*(part[:3] for part in history(RULES["SGD (rate 0.05)"]))) == []  # too few to tell


ADAM = (
    START.replace("W, b = torch.randn(4, 1, generator=g), torch.zeros(1)", "")
    + """
names = ["w1", "w2", "w3", "b"]
P = {name: torch.randn(4, 4, generator=g) * 0.5 for name in names[:2]}
P |= {"w3": torch.randn(4, 1, generator=g) * 0.5, "b": torch.zeros(1)}
for p in P.values():
    p.requires_grad_()
M = {name: torch.zeros_like(p) for name, p in P.items()}
V = {name: torch.zeros_like(p) for name, p in P.items()}
for t in range(1, 15):
    x, y = batch()
    loss = ((torch.tanh(torch.tanh(x @ P["w1"]) @ P["w2"]) @ P["w3"] + P["b"] - y) ** 2).mean()
    losses.append(loss.item())
    loss.backward()
    with torch.no_grad():
        for name, p in P.items():
            m, v = M[name], V[name]
            m.mul_(0.9).add_(0.1 * p.grad)
            v.mul_(0.99).add_(0.01 * p.grad**2)
            m_hat, v_hat = m / (1 - 0.9**t), v / (1 - 0.99**t)
            p -= 0.01 * m_hat / (v_hat.sqrt() + 1e-8)
            p.grad.zero_()
"""
    + END
)
QUESTION, HOLDS = "is_the_update_the_textbooks", "does_the_optimizer_hold_everything"
SLIPS = {  # id: (edits, text of the line that is to be named)
    "param-not-updated/left-out": (
        (("in P.items():\n            m, v", "in list(P.items())[1:]:\n            m, v"),),
        "p -= 0.01",
    ),
    "optimizer-config/no-bias-correction": ((("m / (1 - 0.9**t), v / (1 - 0.99**t)", "m, v"),), "p -= 0.01"),
    "optimizer-config/state-not-kept": (
        (("m, v = M[name], V[name]", "m, v = torch.zeros_like(p), torch.zeros_like(p)"),),
        "torch.zeros_like(p), ",
    ),
    "optimizer-config/state-shared": (
        (("m, v = M[name], V[name]", "m, v = M[name.replace('w2', 'w1')], V[name]"),),
        "m.mul_(0.9)",
    ),
    "zero-grad-error/before-step": (
        (
            ("            p.grad.zero_()\n", ""),
            (
                "    loss.backward()\n",
                "    loss.backward()\n    for p in P.values():\n        p.grad.zero_()\n",
            ),
        ),
        "        p.grad.zero_()",
    ),
}


AT_ONCE = (
    "param-not-updated/left-out",
    "optimizer-config/no-bias-correction",
    "optimizer-config/state-shared",
)


def slow(values, fast):
    """The same tests, those that are not among the fast ones marked."""
    return [value if value in fast else pytest.param(value, marks=pytest.mark.slow) for value in values]


def edited(edits):
    text = ADAM
    for old, new in edits:
        assert text.count(old) == 1
        text = text.replace(old, new)
    return text


@pytest.mark.parametrize("id", slow(SLIPS, AT_ONCE))
def test_a_slip_of_the_update_is_named_with_its_line(id, tmp_path, monkeypatch):
    edits, piece = SLIPS[id]
    text = edited(edits)
    found = watch_script(tmp_path, monkeypatch, text)
    assert found.losses == found.plain
    answers, _ = found.ask(HOLDS if id.startswith("param") else QUESTION)
    (verdict,) = [answer for answer in answers if answer.verdict == "confirmed"]
    assert verdict.id == id and verdict.confidence == "proven"
    line = next(n for n, source in enumerate(text.splitlines(), 1) if piece in source)
    assert f"train.py:{line}" in verdict.where
    if id == "param-not-updated/left-out":
        assert verdict.where.startswith("P.w1 ")


TWINS = {
    "Adam": (),
    "sign": (
        ("            p -= 0.01 * m_hat / (v_hat.sqrt() + 1e-8)", "            p -= 0.01 * p.grad.sign()"),
    ),
    "RMSProp": (("m / (1 - 0.9**t), v / (1 - 0.99**t)", "p.grad, v"),),  # it corrects nothing
    "clipped": (
        (
            "    with torch.no_grad():\n",
            "    torch.nn.utils.clip_grad_norm_(P.values(), 0.1)\n    with torch.no_grad():\n",
        ),
    ),
}


@pytest.mark.parametrize("twin", slow(TWINS, ("Adam",)))
def test_its_healthy_twins_are_not_accused(twin, tmp_path, monkeypatch):
    found = watch_script(tmp_path, monkeypatch, edited(TWINS[twin]))
    assert found.losses == found.plain
    for question in (QUESTION, HOLDS):
        answers, _ = found.ask(question)
        assert answers and not [answer for answer in answers if answer.verdict == "confirmed"]


SIGNS = [("+", "loss"), ("-", "loss"), ("+", "(-loss)")]


@pytest.mark.parametrize("signs", slow(SIGNS, SIGNS[:1]))
def test_an_update_that_climbs_what_is_to_fall_is_named(signs, tmp_path, monkeypatch):
    sign, loss = signs
    edits = (("p -= 0.01", f"p {sign}= 0.01"), ("    loss.backward()", f"    {loss}.backward()"))
    found = watch_script(tmp_path, monkeypatch, edited(edits))
    answers, _ = found.ask("is_the_loss_the_right_way_up", steps=(4,))
    confirmed = [(answer.id, answer.where) for answer in answers if answer.verdict == "confirmed"]
    line = next(n for n, source in enumerate(ADAM.splitlines(), 1) if "p -= 0.01" in source)
    wrong = sign == "+" and loss == "loss"
    assert confirmed == ([("optimizer-config/maximize", f"train.py:{line}")] if wrong else [])


@pytest.mark.slow
def test_gradients_that_are_not_cleared_are_named(tmp_path, monkeypatch):
    found = watch_script(tmp_path, monkeypatch, edited((("            p.grad.zero_()\n", ""),)))
    answers, _ = found.ask("is_the_gradient_right", steps=(4,))
    assert [answer.id for answer in answers if answer.verdict == "confirmed"] == ["zero-grad-error/stale"]
