"""Custom functions and operators in all the ways people write them: right ones pass, wrong ones are named."""

import pytest
import torch
from torch import nn
from torch.autograd import Function

from gradproof.tape.locate import find_first_bad_operation
from gradproof.tape.record import record
from gradproof.tape.shadow import shadow


class WithSetup(Function):
    @staticmethod
    def forward(x, k):
        return x.sin() * k

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])
        ctx.k = inputs[1]

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].cos() * ctx.k, None


class Dirty(Function):
    @staticmethod
    def forward(ctx, x):
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Several(Function):
    @staticmethod
    def forward(ctx, a, b, flag):
        ctx.save_for_backward(a, b)
        best = a.argmax(-1)
        ctx.mark_non_differentiable(best)
        return a * b, a + b, best

    @staticmethod
    def backward(ctx, product, total, best):
        a, b = ctx.saved_tensors
        return product * b + total, product * a + total if ctx.needs_input_grad[1] else None, None


class Recompute(Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return (x @ weight.t()).tanh()

    @staticmethod
    def backward(ctx, grad):
        x, weight = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            y = (x @ weight.t()).tanh()
        return torch.autograd.grad(y, [x, weight], grad)


class Mixed(Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sigmoid()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, grad):
        y = ctx.saved_tensors[0].sigmoid()
        return grad * y * (1 - y)


class Same(Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class Twice(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        return 3 * grad * ctx.saved_tensors[0] ** 2


def exponential(slope):
    class Local(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.exp()

        @staticmethod
        def backward(ctx, grad):
            return grad * slope * ctx.saved_tensors[0].exp()

    return Local


def in_low_precision(h):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return Mixed.apply(h)


def twice_differentiated(h):
    y = Twice.apply(h).sum()
    (slope,) = torch.autograd.grad(y, h, create_graph=True)
    return slope.square() + y


WAYS = {
    "setup_context": lambda h, w: WithSetup.apply(h, 3.0),
    "class made in the step": lambda h, w: exponential(1.0).apply(h),
    "mark_dirty": lambda h, w: Dirty.apply(h * 1),
    "several results": lambda h, w: sum(Several.apply(h, torch.ones_like(h), True)[:2]),
    "unused results": lambda h, w: Several.apply(h, h * 2, True)[1],
    "recomputed by autograd": lambda h, w: Recompute.apply(h, w),
    "custom_fwd": lambda h, w: in_low_precision(h),
    "input returned as it is": lambda h, w: Same.apply(h),
    "twice differentiable": lambda h, w: twice_differentiated(h),
}


def shadow_of(model, make):
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    with record({p: n for n, p in model.named_parameters()}) as tape:
        make(model(x), model.weight).square().sum().backward()
    assert not tape.broken
    assert find_first_bad_operation(tape) is None
    return shadow(tape)


@pytest.fixture
def linear():
    torch.manual_seed(0)
    return nn.Linear(4, 4)


@pytest.mark.parametrize("way", WAYS)
def test_right_functions_are_right(way, linear):
    answer = shadow_of(linear, WAYS[way])
    assert answer.right, str(answer)
    assert answer.audits and not answer.notes


def test_wrong_class_made_inside_the_step_is_named(linear):
    answer = shadow_of(linear, lambda h, w: exponential(0.5).apply(h))
    assert [(c.what, c.line.function) for c in answer.culprits] == [("Local", "backward")]
    assert "0.5 × expected" in answer.culprits[0].pattern


@torch.library.custom_op("gradproof_tests::cube", mutates_args=())
def cube(x: torch.Tensor, slope: float) -> torch.Tensor:
    return x**3


def _cube_backward(ctx, grad):
    return grad * ctx.slope * ctx.saved_tensors[0] ** 2, None


def _cube_setup(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])
    ctx.slope = inputs[1]


cube.register_autograd(_cube_backward, setup_context=_cube_setup)


@pytest.mark.parametrize(("slope", "right"), [(3.0, True), (2.9, False)])
def test_operator_from_outside_is_judged_by_finite_differences(slope, right, linear):
    answer = shadow_of(linear, lambda h, w: cube(h, slope))
    assert answer.right == right, str(answer)
    assert [c.what for c in answer.culprits] == ([] if right else ["gradproof_tests.cube"])
    assert any("gradproof_tests.cube was called as it is" in note for note in answer.notes)


def test_sparse_and_complex_gradients():
    torch.manual_seed(0)
    table, wave = nn.Embedding(10, 4, sparse=True), nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))
    with record({table.weight: "table", wave: "wave"}) as tape:
        h = table(torch.tensor([1, 2, 2])).to(torch.complex64) @ wave
        h.abs().square().sum().backward()
    answer = shadow(tape)
    assert answer.right, str(answer)
    assert {p.name: p.verdict for p in answer.parameters} == {"table": "right", "wave": "right"}


def test_teacher_without_gradient_is_a_cut_not_a_wrong_gradient(linear):
    teacher = nn.Linear(4, 4)
    names = {p: f"student.{n}" for n, p in linear.named_parameters()}
    names |= {p: f"teacher.{n}" for n, p in teacher.named_parameters()}
    x = torch.randn(5, 4)
    with record(names) as tape:
        with torch.no_grad():
            target = teacher(x)
        (linear(x) - target).square().mean().backward()
    answer = shadow(tape)
    assert answer.right
    assert {cut.parameter for cut in answer.cuts} == {"teacher.weight", "teacher.bias"}
    assert "no_grad" in answer.cuts[0].how


def test_empty_tape_and_step_without_backward(linear):
    with record() as tape:
        pass
    assert shadow(tape).right and find_first_bad_operation(tape) is None
    with record() as tape:
        linear(torch.ones(1, 4))
    assert shadow(tape).right and find_first_bad_operation(tape) is None
    assert "no parameter received a gradient" in str(shadow(tape))
