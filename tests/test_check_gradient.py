"""What check_gradient refuses, steps around, leaves undecided, and how it says what is wrong."""

import random
import time

import numpy
import pytest
import torch
import torch.nn.functional as F

from gradproof import GradientMismatch, check_gradient
from gradproof.errors import UserError


class ScaledSquare(torch.autograd.Function):
    """x² whose backward is off by a factor in rows 0 to 63: large enough to be sampled."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.cumsum(-1) * x

    @staticmethod
    def backward(ctx, dout):
        (x,) = ctx.saved_tensors
        right = dout * x.cumsum(-1) + (dout * x).flip(-1).cumsum(-1).flip(-1)
        right[:64] *= 1.001
        return right


class WrongSecond(torch.autograd.Function):
    """exp with a right backward that is itself wrong when differentiated."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx, dout):
        (x,) = ctx.saved_tensors
        return dout * x.exp().detach()


class OnlyFloat32Wrong(torch.autograd.Function):
    """A kernel that is right in float64 and forgets half of its gradient in float32."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, dout):
        (x,) = ctx.saved_tensors
        return dout * x.cos() * (0.5 if x.dtype == torch.float32 else 1.0)


def scaled_by(factor, fn):
    """fn with a backward that is off by a factor."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return fn(x)

        @staticmethod
        def backward(ctx, dout):
            (x,) = ctx.saved_tensors
            with torch.enable_grad():
                leaf = x.detach().requires_grad_()
                return factor * torch.autograd.grad(fn(leaf), leaf, dout)[0]

    return Scaled


def write_into(x):
    return x.add_(1)


def write_array(x):
    x.detach().numpy()[0] = 5.0
    return x * 2


def truly_random(x):
    return x * random.SystemRandom().random()


BAD = {
    "no differentiable input": (torch.neg, (torch.arange(3),), "no differentiable input: got int64[3]"),
    "no input at all": (lambda: torch.ones(2), (), "no differentiable input: got no inputs"),
    "not finite": (
        torch.log,
        (torch.tensor([1.0, -1.0]),),
        "output 0 of log is not finite at this point (1 of 2",
    ),
    "in place": (write_into, (torch.ones(3),), "write_into writes into its input x"),
    "in place through numpy": (write_array, (torch.ones(3),), "write_array writes into its input x"),
    "random beyond seeds": (
        truly_random,
        (torch.ones(3),),
        "is random even with torch's, NumPy's and Python's",
    ),
    "a number": (lambda x: float(x.sum()), (torch.ones(3),), "returned a float, not a floating-point tensor"),
    "nothing": (lambda x: None, (torch.ones(3),), "returned None, not a floating-point tensor"),
    "detached": (
        lambda x: x.detach() * 2,
        (torch.ones(3),),
        "no output of <lambda> is connected to its inputs",
    ),
    "complex": (torch.abs, (torch.ones(3, dtype=torch.cfloat),), "pass torch.view_as_real(z)"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_input_is_refused_in_one_sentence(kind):
    fn, inputs, words = BAD[kind]
    with pytest.raises(UserError) as caught:
        check_gradient(fn, *inputs)
    message = str(caught.value)
    assert words in message and "\n" not in message and len(message) < 250


def test_message_has_the_shape_of_the_house():
    with pytest.raises(GradientMismatch) as caught:
        check_gradient(scaled_by(2.0, torch.sin), torch.randn(4, 3, dtype=torch.float64), name="sine")
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("gradient of sine with respect to x is wrong at (")
    assert [line.split("  ")[1].split(" ")[0] for line in lines[1:]] == [
        "backward", "finite", "relative", "pattern", "next",
    ]  # fmt: skip
    assert "allowed; 12 of 12 entries, every entry" in lines[3] and "a factor 2.000" in lines[4]


def test_autograd_function_and_its_apply_have_the_class_name():
    for fn in (ScaledSquare, ScaledSquare.apply):
        with pytest.raises(GradientMismatch, match="gradient of ScaledSquare with respect to"):
            check_gradient(fn, torch.randn(70, 2, dtype=torch.float64))


def test_large_input_is_cut_into_slices():
    with pytest.raises(GradientMismatch) as caught:
        check_gradient(ScaledSquare, torch.randn(512, 96))
    assert "all in rows 0 to 63" in str(caught.value) and "a factor 1.001" in str(caught.value)


def test_scalar_gradient_is_reported_as_the_user_knows_it():
    with pytest.raises(GradientMismatch) as caught:
        check_gradient(scaled_by(-1.0, lambda x: (x * x).sum()), torch.tensor([3.0], dtype=torch.float64))
    assert caught.value.culprit.truth == pytest.approx(
        6.0
    ) and caught.value.culprit.backward == pytest.approx(-6.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_input_without_axes(dtype):
    assert check_gradient(torch.sin, torch.tensor(0.7, dtype=dtype)).decided
    with pytest.raises(GradientMismatch, match=r"wrong at \(\)"):
        check_gradient(scaled_by(2.0, torch.sin), torch.tensor(0.7, dtype=dtype))


def test_kink_is_stepped_around_and_reported():
    found = check_gradient(torch.relu, torch.zeros(6))
    assert found.decided and any("is at a kink" in note for note in found.notes)


def test_wrong_gradient_at_a_kink_is_still_wrong():
    with pytest.raises(GradientMismatch, match="is at a kink"):
        check_gradient(scaled_by(1.5, torch.relu), torch.randn(30, dtype=torch.float64).round())


@pytest.mark.parametrize("chance", [torch.rand_like, lambda x: torch.from_numpy(numpy.random.rand(*x.shape))])
def test_seeded_chance_is_fixed_and_reported(chance):
    torch_state, numpy_state = torch.get_rng_state(), numpy.random.get_state()[1].copy()
    found = check_gradient(lambda x: x * chance(x.detach()), torch.randn(5, dtype=torch.float64))
    assert any("same seeds" in note for note in found.notes)
    assert (
        not torch.equal(torch_state, torch.get_rng_state())
        or (numpy_state != numpy.random.get_state()[1]).any()
    )


def test_only_inputs_that_require_gradients_are_checked():
    x, y = torch.randn(3, requires_grad=True), torch.randn(3)
    assert [found.name for found in check_gradient(torch.atan2, x, y).inputs] == ["input 0"]


def test_masks_with_minus_infinity_are_not_differentiated():
    mask = torch.full((3, 3), float("-inf")).triu(1)

    def masked(x, mask):
        return (x + mask).softmax(-1)

    assert [found.name for found in check_gradient(masked, torch.randn(3, 3), mask).inputs] == ["x"]


def test_second_order():
    x = torch.randn(4, dtype=torch.float64)
    assert check_gradient(torch.tanh, x, order=2).decided
    check_gradient(WrongSecond, x)
    with pytest.raises((GradientMismatch, UserError), match="backward of WrongSecond"):
        check_gradient(WrongSecond, x, order=2)
    with pytest.raises(UserError, match="order is 1"):
        check_gradient(torch.tanh, x, order=3)


def test_infinite_gradient_is_named():
    with pytest.raises(GradientMismatch, match="is not finite at"):
        check_gradient(torch.sqrt, torch.zeros(3))


def test_right_in_float64_and_wrong_in_float32():
    assert check_gradient(OnlyFloat32Wrong, torch.randn(9, dtype=torch.float64)).decided
    with pytest.raises(GradientMismatch, match="right in float64, 50"):
        check_gradient(OnlyFloat32Wrong, torch.randn(9))


WEIGHT = torch.linspace(-1, 1, 20).reshape(
    5, 4
)  # float32, so that a function that closes over it stays there


def float32_only(x):
    return torch.tanh(x @ WEIGHT)


def test_float32_only_function_is_checked_at_its_own_precision():
    found = check_gradient(float32_only, torch.randn(6, 5))
    assert found.decided and 1e-7 < found.inputs[0].allowed < 1e-3
    assert any("runs in float32 only" in note for note in found.notes)
    with pytest.raises(GradientMismatch):
        check_gradient(scaled_by(1.003, float32_only), torch.randn(6, 5))


def bfloat16_only(x):
    if x.dtype != torch.bfloat16:
        raise TypeError("this kernel takes bfloat16")
    return torch.tanh(x @ WEIGHT.bfloat16())


@pytest.mark.parametrize("seed", range(5))
def test_bfloat16_kernel_is_treated_fairly(seed):
    torch.manual_seed(seed)
    x = torch.randn(8, 5).bfloat16()
    check_gradient(bfloat16_only, x)
    with pytest.raises(GradientMismatch):
        check_gradient(scaled_by(-1.0, bfloat16_only), x)


def test_what_cannot_be_decided_is_not_called_wrong():
    found = check_gradient(
        lambda x: (bfloat16_only(x).float().mean() + 64).bfloat16(), torch.randn(8, 5).bfloat16()
    )
    assert not found.decided and "cannot be decided at this precision" in str(found)


def coarse(x):
    return (x.bfloat16() @ WEIGHT.bfloat16()).to(x.dtype).tanh()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_bfloat16_inside_is_a_staircase_and_no_alarm(dtype, seed):
    torch.manual_seed(seed)
    x = torch.randn(6, 5, dtype=dtype)
    check_gradient(coarse, x)
    check_gradient(lambda x: coarse(x).square().mean(), x)
    with pytest.raises(GradientMismatch):
        check_gradient(scaled_by(-1.0, coarse), x)


def test_layout_reaches_the_function():
    seen = set()

    def spy(x):
        seen.add(x.stride())
        return x.sin()

    check_gradient(spy, torch.randn(4, 6, dtype=torch.float64)[:, ::2])
    assert seen == {(6, 2)}


def test_module_parameters_and_inputs_are_checked_and_left_alone():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    found = check_gradient(model, torch.randn(5, 3))
    assert {"0.weight", "2.bias", "1.weight", "input"} <= {x.name for x in found.inputs}
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_wrong_factor_per_input_is_the_right_input():
    class Swapped(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k):
            ctx.save_for_backward(q, k)
            return q * k.exp()

        @staticmethod
        def backward(ctx, dout):
            _, k = ctx.saved_tensors
            return dout * k.exp(), dout * k.exp()

    with pytest.raises(GradientMismatch, match="with respect to k is wrong"):
        check_gradient(Swapped, torch.randn(3), torch.randn(3))


def test_cross_entropy_of_a_confident_target_is_no_false_alarm_in_float64():
    logits = torch.zeros(2, 34, dtype=torch.float64)
    logits[:, 3] = 12.0
    assert check_gradient(lambda x: F.cross_entropy(x, torch.tensor([3, 3])), logits).decided


def test_twenty_times_faster_than_gradcheck_at_ten_thousand_inputs():
    x = torch.randn(100, 100, dtype=torch.float64, requires_grad=True)

    def loss(x):
        return F.cross_entropy(x, torch.arange(100))

    start = time.process_time()
    check_gradient(loss, x)
    middle = time.process_time()
    torch.autograd.gradcheck(loss, (x,))
    assert time.process_time() - middle > 20 * (middle - start)
