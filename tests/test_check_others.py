"""compare, check_backward, the pytest helpers, the command line, and the sanity checks of a model."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import nn

from gradproof import GradientMismatch, check_backward, compare
from gradproof.cli import main
from gradproof.errors import UserError
from gradproof.sanity import ModelFault, check_model
from gradproof.testing import assert_gradient_matches, in_layout, tensors

# ---- two implementations


def one_pass_variance(x):
    return (x * x).mean(-1) - x.mean(-1) ** 2


def variance(x):
    return x.var(-1, unbiased=False)


def half_written(x):
    out = torch.empty_like(x)
    out[:-1] = x[:-1].exp()
    return out


class WrongSine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, dout):
        return 1.01 * dout * ctx.saved_tensors[0].cos()


def test_same_functions_agree_over_a_sweep():
    found = compare(
        lambda x: x.exp() / x.exp().sum(-1, keepdim=True),
        lambda x: x.softmax(-1),
        sweep=["float32[4,8]", "bfloat16[4,8]", "float64[3,3]", ("float32[1,1]",), torch.randn(2, 5)],
    )
    assert found.agree and len(found.rows) == 10 and "bfloat16[4, 8]" in str(found)


def test_float64_says_which_is_nearer():
    found = compare(one_pass_variance, variance, torch.randn(4, 50) + 1000)
    row = found.rows[0]
    assert not found.agree and row.nearer == "second" and row.first_error > 1e3 * row.second_error
    assert compare(variance, one_pass_variance, torch.randn(4, 50) + 1000).rows[0].nearer == "first"


def test_wrong_backward_is_told_from_the_right_one():
    found = compare(WrongSine, torch.sin, torch.randn(4, 5))
    values, gradients = found.rows
    assert values.agree and not gradients.agree and gradients.nearer == "second"
    assert any("gradient of WrongSine" in note for note in found.notes)


def test_unwritten_memory_is_found_even_where_it_holds_the_right_numbers():
    found = compare(half_written, torch.exp, torch.randn(4, 5))
    assert any(
        "leaves 5 of 20 entries of output 0 unwritten, first at (3, 0)" in note for note in found.notes
    )
    assert not torch.are_deterministic_algorithms_enabled()


def test_different_functions_and_shapes():
    assert any(
        "do not compute the same" in note for note in compare(torch.sin, torch.cos, torch.randn(4)).notes
    )
    with pytest.raises(UserError, match="same outputs"):
        compare(torch.sin, torch.sum, torch.randn(4))
    with pytest.raises(UserError, match="needs inputs"):
        compare(torch.sin, torch.sin)


# ---- hand-written pairs, NumPy and torch


def layernorm_forward(x, weight, bias):
    mean, rstd = x.mean(-1, keepdims=True), 1 / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    xhat = (x - mean) * rstd
    return xhat * weight + bias, (xhat, rstd, weight)


def layernorm_backward(dout, cache):
    xhat, rstd, weight = cache
    dxhat = dout * weight
    dx = rstd * (dxhat - dxhat.mean(-1, keepdims=True) - xhat * (dxhat * xhat).mean(-1, keepdims=True))
    return dx, (dout * xhat).sum(0), dout.sum(0)


def without_mean(dout, cache):
    xhat, rstd, weight = cache
    dxhat = dout * weight
    _, dweight, dbias = layernorm_backward(dout, cache)
    return rstd * (dxhat - xhat * (dxhat * xhat).mean(-1, keepdims=True)), dweight, dbias


def layernorm_inputs(dtype):
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape).astype(dtype) for shape in ((4, 6), (6,), (6,))]


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_numpy_pair(dtype):
    inputs = layernorm_inputs(dtype)
    found = check_backward(layernorm_forward, layernorm_backward, *inputs)
    assert found.decided and [x.name for x in found.inputs] == ["x", "weight", "bias"]
    with pytest.raises(GradientMismatch, match="gradient of layernorm with respect to x") as caught:
        check_backward(layernorm_forward, without_mean, *inputs)
    assert "constant along columns" in str(caught.value)


def test_torch_pair_with_index_and_two_outputs():
    def forward(weight, index):
        return (weight[index], weight.square()), (weight, index)

    def backward(dout, cache):
        weight, index = cache
        return (2 * dout[1] * weight).index_add(0, index, dout[0])

    def overwriting(dout, cache):
        dweight = 2 * dout[1] * cache[0]
        dweight[cache[1]] += dout[0]
        return dweight

    index = torch.tensor([1, 3, 1])
    assert check_backward(forward, backward, torch.randn(5, 2), index).decided
    with pytest.raises(GradientMismatch, match="only in rows that index names more than once"):
        check_backward(forward, overwriting, torch.randn(5, 2), index)


@pytest.mark.parametrize(
    ("forward", "backward", "words"),
    [
        (lambda x: x * 2, lambda dout, cache: dout, "forward must return"),
        (lambda x: (x * 2, None), lambda dout, cache: (dout, dout), "returned 2 gradients for 1 inputs"),
        (lambda x: (x * 2, None), lambda dout, cache: dout.sum(), "returned a gradient of shape"),
        (lambda x: (3, None), lambda dout, cache: dout, "not a floating-point tensor"),
    ],
)
def test_pair_of_the_wrong_form_is_refused(forward, backward, words):
    with pytest.raises(UserError, match=words):
        check_backward(forward, backward, torch.randn(3))


# ---- for test suites


@settings(max_examples=15, deadline=None, derandomize=True)
@given(tensors(min_dims=2))
def test_strategy_draws_tensors_that_can_be_checked(x):
    assert_gradient_matches(lambda x: x.softmax(-1), x)


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "strided", "offset"])
def test_layouts_hold_the_same_numbers(layout):
    x = torch.randn(3, 4)
    laid_out = in_layout(x, layout)
    assert torch.equal(x, laid_out)
    assert (laid_out.stride(), laid_out.storage_offset()) != (x.stride(), 0) or layout == "contiguous"


def test_assertion_fails_on_wrong_and_on_undecided():
    with pytest.raises(GradientMismatch):
        assert_gradient_matches(WrongSine, torch.randn(3))

    def stuck(x):  # its output never moves
        return (x.bfloat16().mean() + 64).bfloat16()

    with pytest.raises(AssertionError, match="cannot be decided at this precision"):
        assert_gradient_matches(stuck, torch.randn(8))


# ---- the command

FILE = """
import numpy as np, torch

def softmax(x):
    return x.softmax(-1)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)
    def forward(self, x):
        return self.linear(x).tanh()

def scale_forward(x, w):
    return x * w, (x, w)

def scale_backward(dout, cache):
    x, w = cache
    return dout * w, (dout * x).mean(0)

example_inputs = {
    "scale": (np.linspace(1, 2, 12).reshape(4, 3), np.arange(1.0, 4.0)),
    "Net": lambda: torch.ones(2, 3),
}
"""


@pytest.fixture
def layers(tmp_path):
    path = tmp_path / "layers_under_check.py"
    path.write_text(FILE)
    return path


def test_command_tells_right_from_wrong_by_its_exit_code(layers, capsys):
    assert main(["check", f"{layers}:softmax", "--input", "float32[3,4]"]) == 0
    assert main(["check", f"{layers}:Net"]) == 0
    assert "gradient of Net is right" in capsys.readouterr().out
    assert main(["check", f"{layers}:scale"]) == 1
    assert "a mean where a sum belongs" in capsys.readouterr().out


def test_command_speaks_json(layers, capsys):
    assert main(["check", f"{layers}:scale", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "wrong" and found["input"] == "w" and found["wrong"] == 3
    main(["check", f"{layers}:softmax", "--input", "float64[2,3]", "--json"])
    assert json.loads(capsys.readouterr().out)["verdict"] == "right"


@pytest.mark.parametrize(
    ("target", "options", "words"),
    [
        ("nowhere.py:f", [], "there is no file"),
        ("{}", [], "write FILE.py:NAME"),
        ("{}:nothing", ["--input", "float64[2]"], "has no function nothing; it has softmax, Net"),
        ("{}:softmax", [], "has no example_inputs for softmax"),
        ("{}:softmax", ["--input", "float12[2]"], "cannot read the input 'float12[2]'"),
    ],
)
def test_command_refuses_in_one_sentence(layers, capsys, target, options, words):
    assert main(["check", target.format(layers), *options]) == 2
    assert words in capsys.readouterr().err


def test_command_runs_as_a_program(layers):
    run = subprocess.run(
        [sys.executable, "-m", "gradproof", "check", f"{layers}:softmax", "--input", "float64[2,3]"],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0 and run.stdout.startswith("gradient of softmax is right")


# ---- what any model must be able to do


class Tiny(nn.Module):
    """A causal model of tokens, small enough to train in a second; `fault` breaks one thing."""

    def __init__(self, vocabulary=11, channels=16, fault=""):
        super().__init__()
        self.fault = fault
        self.tokens, self.places = nn.Embedding(vocabulary, channels), nn.Embedding(16, channels)
        self.mix, self.up, self.head = (
            nn.Linear(channels, channels),
            nn.Linear(channels, 32),
            nn.Linear(32, vocabulary),
        )
        if fault == "loud head":
            nn.init.normal_(self.head.weight, std=10.0)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        if self.fault == "frozen":
            x = x.detach()
        if self.fault == "looks ahead":
            x = x + x.flip(1)
        if self.fault == "mixes the batch":
            x = x + x.mean(0, keepdim=True)
        if self.fault == "says nothing":
            x = x * 0
        past = self.mix(x).cumsum(1) / torch.arange(1, tokens.shape[1] + 1)[:, None]
        return self.head(F.relu(self.up(x + past)))


def token_batch():
    torch.manual_seed(0)
    tokens = torch.randint(11, (4, 7))
    return tokens[:, :-1], tokens[:, 1:]


def test_healthy_model_meets_every_expectation():
    found = check_model(Tiny(), token_batch(), lr=1e-2)
    assert found.passed and all(line.passed for line in found.lines) and len(found.lines) == 9


@pytest.mark.parametrize(
    ("fault", "failing"),
    [
        ("loud head", "loss at initialisation is ln V"),
        ("frozen", "a step changes every parameter"),
        ("looks ahead", "no output depends on a later input"),
        ("mixes the batch", "examples of a batch do not see each other"),
        ("says nothing", "learns A B C → B C D"),
    ],
)
def test_each_fault_fails_its_line(fault, failing):
    with pytest.raises(ModelFault) as caught:
        check_model(Tiny(fault=fault), token_batch(), lr=1e-2, steps=60)
    assert failing in [line.name for line in caught.value.check.lines if line.passed is False]


def test_loss_that_does_not_add_up():
    def normalised_by_what_is_there(logits, targets):
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return losses.sum() / (1 + targets[:, 0].sum())

    with pytest.raises(ModelFault) as caught:
        check_model(Tiny(), token_batch(), normalised_by_what_is_there, steps=1)
    assert "micro-batches add up to the batch" in str(caught.value).splitlines()[0]


def test_regression_model_skips_what_is_about_tokens():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 1))
    found = check_model(model, (torch.randn(6, 3), torch.randn(6, 1)), F.mse_loss, lr=1e-2)
    assert found.passed and sum(line.passed is None for line in found.lines) == 4


class KeepsGradients(Tiny):
    def zero_grad(self, set_to_none=True):
        pass


def test_zero_grad_that_does_nothing_is_caught():
    with pytest.raises(ModelFault, match="zero_grad zeroes"):
        check_model(KeepsGradients(), token_batch(), steps=1)
