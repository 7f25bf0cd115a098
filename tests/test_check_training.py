"""check_training: gradients by hand, in NumPy and torch, right and with one slip each."""

import functools
import json
import math
import re

import numpy as np
import pytest
import torch
from by_hand import (
    gpt_batch,
    gpt_loss,
    gpt_parameters,
    gpt_step,
    mlp_batch,
    mlp_gradients,
    mlp_loss,
    mlp_parameters,
)

import gradproof
from gradproof import check_training
from gradproof.check.truth import differentiate_numpy
from gradproof.errors import UserError


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def check_mlp(slip=None, dtype=np.float32, **options):
    p, batch = mlp_parameters(dtype), mlp_batch(dtype)
    return check_training(mlp_loss, mlp_gradients(p, batch, slip), p, batch, **options)


def check_gpt(slip=None, dtype=torch.float32, seed=0, layers=1, layer=0):
    p, batch = gpt_parameters(dtype, seed, layers), gpt_batch(seed=seed)
    return check_training(gpt_loss, gpt_step(p, batch, slip, layer)[2], p, batch)


# ---- what is right stays silent


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_healthy_numpy_gradients_are_right(dtype):
    found = check_mlp(dtype=dtype)
    assert found.right and found.wrong == () and found.first is None
    assert all(line.pattern == "" and line.verdict == "right" for line in found.lines)
    assert found.method == "PyTorch's NumPy layer in float64" and "are right" in str(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_healthy_torch_gradients_are_right(dtype, seed):
    found = check_gpt(dtype=dtype, seed=seed, layers=1 + seed)
    assert found.right, str(found)


def test_the_hand_written_gpt_of_ours_is_right(heads=2):
    from gradproof.lm.explicit_gpt import ExplicitGPT
    from gradproof.lm.reference import gpt_reference
    from gradproof.lm.shape import GPTShape

    model = ExplicitGPT(GPTShape(17, 8, 16, heads, 2), seed=1)
    generator = torch.Generator().manual_seed(0)
    tokens, targets = (torch.randint(17, (3, 8), generator=generator) for _ in range(2))
    model.forward(tokens, targets)
    model.backward()
    batch = {"tokens": tokens, "targets": targets}
    found = check_training(gpt_reference(heads), model.gradients, model.parameters, batch)
    assert found.right, str(found)


def test_a_gradient_that_is_only_rounding_is_right():
    """The gradient of a bias before a softmax's shift is exactly zero; by hand it is 1e-9."""

    def loss(p, x):
        return torch.softmax(x @ p["w"] + p["b"], -1).square().sum()

    x, p = torch.randn(4, 3), {"w": torch.randn(3, 5), "b": torch.zeros(1)}
    w, b = (v.clone().requires_grad_() for v in p.values())
    grads = torch.autograd.grad(loss({"w": w, "b": b}, x), (w, b))
    found = check_training(loss, {"w": grads[0], "b": grads[1] + 1e-9}, p, x)
    assert found.right, str(found)


def test_constants_are_not_rounded_out_of_their_domain():
    """A negative number to the power of 2.0000001 is NaN; NumPy's layer makes a tensor of the exponent."""

    def loss(p, x):
        return ((x @ p["w"]) ** 2).mean()

    x, w = np.random.default_rng(0).standard_normal((6, 4)), np.ones((4, 2))
    assert check_training(loss, {"w": 2 * x.T @ (x @ w) / 12}, {"w": w}, x).right


# ---- slips, each named in words

MLP_SLIPS = {
    "sum": ("b3", "factor 8 = B (8 samples): a sum where a mean belongs"),
    "mean twice": ("b3", "factor 0.125 = 1/B (8 samples)"),
    "no tanh": ("b2", "missing derivative: the gradient of .* is that of h2 "),
    "stale": ("w2", "stale: backward took h2 .* where h1 .* belongs"),
    "no transpose": ("b1", "took its transpose where w2 belongs"),
    "transposed": ("w2", "transposed: axes 0 and 1 are swapped"),
    "sign": ("b1", "sign: it is minus the gradient"),
    "twice": ("w1", "factor 2 = accumulated twice"),
    "zero": ("w1", "zero: every entry is 0"),
    "never": ("b2", "never written: no gradient was given for it"),
    "nan": ("w2", r"never written in 18 of 36 entries \(all in rows 3 to 5\): NaN there, right elsewhere"),
    "exchanged": ("b2", "exchanged: it holds the gradient of b1, and b1 holds this one"),
    "row": (
        "w1",
        r"never written in 6 of 30 entries \(all in row 4 \(the last\)\): 0 there, right elsewhere",
    ),
    "garbage": ("w1", "never written: 30 of 30 entries are numbers like 1e-41"),
}


@pytest.mark.parametrize("slip", MLP_SLIPS)
def test_a_slip_in_numpy_is_named(slip):
    first, pattern = MLP_SLIPS[slip]
    found = check_mlp(slip)
    assert found.first == first, str(found)
    assert re.search(pattern.replace("(8 samples)", r"\(8 samples\)"), found[first].pattern), str(found)


GPT_SLIPS = {
    "no B": ("cf", "factor 4 = B \\(4 samples\\): a sum where a mean belongs"),
    "no T": ("cf", "factor 6 = T "),
    "sum": ("cf", "factor 24 = \\(B·T\\)"),
    "stale norm": ("gf", "stale: backward took mid .* where x .* belongs, in the norm of "),
    "no skip back": ("h0.wo", "missing term: what comes back to mid .* through the \\+ of .*`x = mid \\+"),
    "no gelu": ("h0.b1", "missing derivative: the gradient of hidden .* is that of active"),
    "gelu of output": ("h0.b1", "stale: backward took active .* where hidden .* belongs, in the gelu of "),
    "other norm": ("h0.w1", "stale: backward took n1 .* where n2 .* belongs"),
    "no mean": ("h0.wo", "missing term: .* mean .*`centred = x - x.mean"),
    "branch twice": ("h0.wo", "accumulated twice: what comes back to .* with h0.g2"),
    "branch sign": ("h0.wo", "sign: what comes back to .* has the wrong sign"),
    "softmax": ("h0.wk", "missing term: what comes back to the result of sum in softmax"),
    "no key path": ("h0.g1", "missing term: what comes back to n1 .* with h0.wk, is left out"),
    "head forgotten": ("wte", "missing term: .*`logits = nf @ p"),
    "embedding forgotten": ("wte", "missing term: .*`x = p\\[.wte"),
    "uninitialised": ("h0.wv", "never written in 128 of 256 entries \\(all in rows 8 to 15\\): NaN there"),
}


@pytest.mark.parametrize("slip", GPT_SLIPS)
def test_a_slip_in_a_transformer_is_named(slip):
    first, pattern = GPT_SLIPS[slip]
    found = check_gpt(slip)
    assert found.first == first, str(found)
    assert re.search(pattern, found[first].pattern), str(found)


@pytest.mark.parametrize("slip", ["no skip back", "no gelu", "branch sign", "stale norm"])
def test_what_one_slip_explains_follows_from_it(slip):
    found = check_gpt(slip, layers=2, layer=1)
    wrong = [line for line in found.lines if line.verdict == "wrong"]
    follows = [line for line in found.lines if line.verdict == "follows"]
    assert [line.parameter for line in wrong] == [found.first] and len(follows) >= 8, str(found)
    assert all(line.pattern == f"from {found.first}" for line in follows)


def test_numbers_of_the_table():
    found = check_mlp("sign")
    line = found["b1"]
    assert line.ratio == pytest.approx(1, abs=1e-5) and line.cosine == pytest.approx(-1, abs=1e-5)
    text = str(found)
    assert "|hand|/|true|" in text and "-1.0000" in text and "1 of 6 gradients are wrong" in text


def test_bfloat16_hides_rounding_but_not_a_factor():
    assert check_gpt("no B", torch.bfloat16).first == "cf"
    assert "sign" in check_gpt("sign", torch.bfloat16)["h0.wo"].pattern


# ---- gradients as a function, and the step before


def test_a_function_of_gradients_is_called():
    p, batch = mlp_parameters(), mlp_batch()
    assert check_training(mlp_loss, mlp_gradients, p, batch).right
    found = check_training(mlp_loss, functools.partial(mlp_gradients, slip="sign"), p, batch)
    assert found.wrong == ("b1",)


def test_a_buffer_that_is_not_cleared_or_not_written_anew_is_seen():
    p, batch = mlp_parameters(), mlp_batch()
    buffers = {k: np.zeros_like(v) for k, v in p.items()}

    def accumulating(p, batch):
        for k, v in mlp_gradients(p, batch).items():
            buffers[k] += v
        return buffers

    found = check_training(mlp_loss, accumulating, p, batch)
    assert len(found.wrong) == 6
    assert all("the step before is still in it; it was not cleared" in x.pattern for x in found.lines)

    kept = {}

    def keeping(p, batch):
        new = mlp_gradients(p, batch)
        return new | {"w1": kept.setdefault("w1", new["w1"])}

    found = check_training(mlp_loss, keeping, p, batch)
    assert found.wrong == ("w1",) and found["w1"].pattern.startswith(
        "stale: equal to that of the step before"
    )


def test_the_step_before_as_a_dict():
    p, batch = mlp_parameters(), mlp_batch()
    before = mlp_gradients(p, mlp_batch(seed=5))
    hand = mlp_gradients(p, batch)
    assert check_training(mlp_loss, hand, p, batch, before=before).right
    found = check_training(mlp_loss, hand | {"w2": before["w2"]}, p, batch, before=before)
    assert found.wrong == ("w2",) and "step before" in found["w2"].pattern


def test_gradients_are_not_written_to_nor_parameters_changed():
    p, batch = mlp_parameters(), mlp_batch()
    hand = mlp_gradients(p, batch)
    copies = [{k: v.copy() for k, v in d.items()} for d in (p, hand)]
    check_training(mlp_loss, hand, p, batch)
    assert all(np.array_equal(d[k], c[k]) for d, c in zip((p, hand), copies, strict=True) for k in d)


# ---- the truth: layer, differences


def opaque_loss(p, batch):
    """Nothing that PyTorch's layer can follow: through Python numbers."""
    x, y = batch
    h = np.array([[math.tanh(v) for v in row] for row in (x @ p["w1"] + p["b1"]).tolist()])
    h = np.array([[math.tanh(v) for v in row] for row in (h @ p["w2"] + p["b2"]).tolist()])
    z = h @ p["w3"] + p["b3"]
    return float(
        sum(math.log(sum(math.exp(v) for v in row)) - row[t] for row, t in zip(z.tolist(), y, strict=True))
    ) / len(y)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_code_that_no_layer_can_follow_is_measured_by_differences(dtype):
    p, batch = mlp_parameters(dtype), mlp_batch(dtype)
    hand = mlp_gradients(p, batch)
    found = check_training(opaque_loss, hand, p, batch)
    assert found.method == "differences" and found.right, str(found)
    for slip in ("transposed", "sum", "exchanged"):
        first, pattern = MLP_SLIPS[slip]
        found = check_training(opaque_loss, mlp_gradients(p, batch, slip), p, batch)
        assert found.method == "differences" and found[first].pattern.startswith(pattern[:20]), str(found)
        assert set(found.wrong) == set(check_mlp(slip).wrong)


def test_the_layer_agrees_with_differences():
    p, batch = mlp_parameters(np.float64), mlp_batch(np.float64)
    through_layer = differentiate_numpy(mlp_loss, p, batch)
    by_differences = differentiate_numpy(opaque_loss, p, batch)
    assert through_layer.method != by_differences.method
    for k in p:
        assert torch.allclose(through_layer.gradients[k], by_differences.gradients[k], atol=1e-9)


def test_a_layer_that_gives_another_loss_is_not_believed():
    calls = []

    def loss(p, batch):
        calls.append(1)
        scale = 1.0 if type(p["w1"]).__module__ == "numpy" else 2.0  # other numbers for other arrays
        return scale * (p["w1"] ** 2).sum()

    p = {"w1": np.arange(6.0)}
    found = check_training(loss, {"w1": 2 * p["w1"]}, p, None)
    assert found.right and found.method == "differences" and len(calls) > 3


def test_a_parameter_with_too_many_entries_for_differences_is_unknown(monkeypatch):
    monkeypatch.setattr("gradproof.check.truth.SECONDS", 0.0)
    p, batch = mlp_parameters(), mlp_batch()
    found = check_training(opaque_loss, mlp_gradients(p, batch), p, batch)
    assert {line.verdict for line in found.lines} == {"unknown"} and not found.right
    assert "too many for differences" in str(found)


def test_what_is_beside_a_gradient_that_is_zero():
    """Rows of an embedding that the batch does not name have no gradient; memory that was not cleared has."""

    def loss(p, tokens):
        return p["table"][tokens].square().sum()

    table, tokens = torch.randn(9, 3), torch.tensor([1, 2, 2, 5])
    hand = torch.zeros(9, 3).index_add_(0, tokens, 2 * table[tokens])
    assert check_training(loss, {"table": hand}, {"table": table}, tokens).right
    dirty = hand.clone()
    dirty[7] = torch.tensor([0.5, -0.25, 3.0])
    found = check_training(loss, {"table": dirty}, {"table": table}, tokens)
    assert found["table"].pattern.startswith("not cleared: right where there is a gradient, and 3 entries")
    once = torch.zeros(9, 3)
    once[tokens] = 2 * table[tokens]  # what is named twice is written once
    found = check_training(loss, {"table": once}, {"table": table}, tokens)
    assert "only in row" in found["table"].pattern or "row 2" in found["table"].pattern, str(found)


# ---- what is not understood is said in a sentence


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"parameters": {}}, "parameters must be a dict"),
        ({"parameters": {"w": "text"}}, "parameter 'w' is a str, not an array"),
        ({"gradients": [1]}, "gradients is a list; give a dict by the names of parameters"),
        ({"gradients": lambda p, b: None}, "returned a NoneType; return a dict of gradients"),
        (
            {"parameters": {"w": torch.tensor([1.0, math.nan])}},
            r"parameter w is not finite at \(1,\) \(1 of 2",
        ),
        ({"loss": lambda p, b: 1 / 0}, "raised ZeroDivisionError at test_check_training.py:"),
        ({"loss": lambda p, b: p["v"]}, "asks for 'v' at .*, which is not there; weights: w"),
        ({"loss": lambda p, b: p["w"]}, "return the loss as one number"),
        ({"loss": lambda p, b: p["w"].sum() / 0}, "itself gives a loss of "),
        ({"loss": lambda p, b: p["w"].detach().sum()}, "is not connected to its weights"),
        ({"loss": lambda p, b: p["w"].sum() * torch.rand(())}, "is random: two calls"),
    ],
)
def test_bad_input_is_one_sentence(change, sentence):
    given = {
        "loss": lambda p, b: p["w"].sum(),
        "gradients": {"w": torch.ones(2)},
        "parameters": {"w": torch.ones(2)},
    }
    with pytest.raises(UserError, match=sentence) as error:
        check_training(**(given | change), batch=None)
    assert "\n" not in str(error.value)


def test_shapes_that_differ_are_told():
    def loss(p, x):
        return (x @ p["w"]).square().sum()

    x, w = torch.randn(4, 3), torch.randn(3, 2)
    right = 2 * x.T @ (x @ w)
    assert check_training(loss, {"w": right}, {"w": w}, x).right
    assert check_training(loss, {"w": right.flatten()}, {"w": w}, x).right  # a flat buffer
    found = check_training(loss, {"w": right.T}, {"w": w}, x)
    assert found["w"].pattern == "transposed: shape (2, 3) for a parameter of (3, 2)"
    found = check_training(loss, {"w": right[0]}, {"w": w}, x)
    assert found["w"].pattern == "shape (2,) for a parameter of (3, 2)" and found.wrong == ("w",)


def test_notes_and_json():
    p, batch = mlp_parameters(), mlp_batch()
    found = check_training(mlp_loss, mlp_gradients(p, batch, "nan") | {"w9": p["w1"]}, p, batch)
    assert "gradients has 'w9', which is no parameter" in str(found)
    read = json.loads(found.as_json())
    assert read["first"] == "w2" and len(read["lines"]) == 6
    assert gradproof.check_training is check_training


def test_a_reference_that_writes_in_place_is_followed():
    def loss(p, x):
        h = x @ p["w"]
        h += p["b"]
        out = torch.zeros_like(h)
        out[:, 0] = h[:, 0].tanh()
        out[:, 1:] = h[:, 1:]
        return out.square().mean()

    x, p = torch.randn(5, 3), {"w": torch.randn(3, 4), "b": torch.randn(4)}
    leaves = {k: v.clone().requires_grad_() for k, v in p.items()}
    grads = dict(zip(p, torch.autograd.grad(loss(leaves, x), list(leaves.values())), strict=True))
    assert check_training(loss, grads, p, x).right
    found = check_training(loss, grads | {"b": -grads["b"]}, p, x)
    assert found.wrong == ("b",) and found["b"].pattern.startswith("sign")


def test_a_forward_in_numpy_may_stand_in_another_module(tmp_path, monkeypatch):
    (tmp_path / "model_elsewhere.py").write_text(
        "import numpy as np\nW = {'w': np.ones((3, 1))}\ndef forward(P, batch):\n"
        "    x, y = batch\n    return np.square(activation(x @ P['w']) - y).mean(), x\n"
        "def activation(x):\n    return np.tanh(x)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import model_elsewhere as model

    rng = np.random.default_rng(0)
    batch = rng.normal(size=(8, 3)), rng.normal(size=(8, 1))

    def gradients(P, batch):
        out = np.tanh(batch[0] @ P["w"])
        return {"w": batch[0].T @ (2 * (out - batch[1]) / 8 * (1 - out**2))}

    found = gradproof.check_training(lambda P, batch: model.forward(P, batch)[0], gradients, model.W, batch)
    assert found.right and "PyTorch's NumPy layer" in str(found)
