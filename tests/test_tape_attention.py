"""Every fused attention operator, replayed as the formula or with the dropout it drew; most exist only on a GPU."""

import math

import pytest
import torch
import torch.nn.functional as F

from gradproof.tape import attention, operators
from gradproof.tape.attention import attention_formula
from gradproof.tape.execute import converted, execute
from gradproof.tape.operations import Operation, Ref, Slot
from gradproof.tape.operators import FUSED_ATTENTION, is_random
from gradproof.tape.record import record
from gradproof.tape.replay import replay_exactly
from gradproof.tape.shadow import shadow

ATEN = {name: getattr(torch.ops.aten, name).default for name in sorted(FUSED_ATTENTION)}


def operands(queries=5, keys=5, heads=4, groups=4, dtype=torch.float32):
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(2, h, t, 8, dtype=dtype) for h, t in ((heads, queries), (groups, keys), (groups, keys))
    )
    return q, k, v


def operation_of(func, args, kwargs, frozen=None):
    """A recorded operation, as if it had run on a GPU, and the values behind its slots."""
    values, slots = [], []

    def ref(value):
        if not isinstance(value, torch.Tensor):
            return value
        values.append(value)
        slots.append(Slot(len(slots), tuple(value.shape), value.dtype, value.device))
        return Ref(len(slots) - 1, False)

    refs = tuple(ref(arg) for arg in args)
    named = {key: ref(value) for key, value in kwargs.items()}
    operation = Operation(
        0, func, refs, named, None, (), "forward", "", None, True, None, "", None, None, frozen
    )
    return operation, slots, values


def replayed(func, args, kwargs, dtype=torch.float64, frozen=None):
    operation, slots, values = operation_of(func, args, kwargs, frozen)
    return execute(operation, lambda ref: converted(values[ref.slot], dtype), slots, dtype, 0.0)


def call(name, q, k, v, bias=None, **options):
    """Arguments in the order of each operator's schema."""
    if name.endswith("for_cpu"):
        return (q, k, v), {"attn_mask": bias, **options}
    if "flash" in name:
        return (q, k, v), options
    if "overrideable" in name:
        return (q, k, v, bias), options
    return (q, k, v, bias, True), options


def truth(q, k, v, bias=None, **options):
    q, k, v = (t.double() for t in (q, k, v))
    bias = bias.double() if bias is not None and bias.is_floating_point() else bias
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=bias, enable_gqa=q.shape[1] != k.shape[1], **options
    )


@pytest.mark.parametrize("name", ATEN)
@pytest.mark.parametrize(
    "options, shapes",
    [
        ({}, {}),
        ({"is_causal": True}, {}),
        ({"scale": 0.3}, {}),
        ({}, {"groups": 2}),
        ({"is_causal": True}, {"groups": 1}),
        ({"is_causal": True}, {"queries": 3, "keys": 7}),
    ],
)
def test_formula_is_what_every_fused_operator_computes(name, options, shapes):
    q, k, v = operands(**shapes)
    (out,), note = replayed(ATEN[name], *call(name, q, k, v, **options))
    assert torch.allclose(out, truth(q, k, v, **options), rtol=1e-12, atol=1e-14) and not note
    assert out.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("name", [name for name in ATEN if name != "_scaled_dot_product_flash_attention"])
@pytest.mark.parametrize("kind", ["float", "bool"])
def test_bias_and_mask(name, kind):
    q, k, v = operands()
    bias = torch.randn(2, 1, 5, 5) if kind == "float" else torch.rand(2, 1, 5, 5) > 0.3
    if kind == "bool":
        bias[..., 0] = True
    args, kwargs = call(name, q, k, v, bias)
    (out,), _ = replayed(ATEN[name], args, kwargs)
    assert torch.allclose(out, truth(q, k, v, bias), rtol=1e-6)


def test_a_row_without_keys_is_zero_as_in_the_kernels():
    q, k, v = operands()
    bias = torch.zeros(2, 1, 5, 5)
    bias[1, :, 2] = -math.inf
    name = "_scaled_dot_product_efficient_attention"
    out = attention_formula(ATEN[name], *call(name, q, k, v, bias))[0]
    assert not out[1, :, 2].any() and bool(torch.isfinite(out).all())


def test_the_form_of_the_cpu_agrees_with_its_kernel_forward_and_backward():
    q, k, v = (t.requires_grad_() for t in operands())
    with record({q: "q", k: "k", v: "v"}) as tape:
        F.scaled_dot_product_attention(q, k, v, is_causal=True).square().sum().backward()
    names = {operation.name for operation in tape.operations}
    assert "_scaled_dot_product_flash_attention_for_cpu" in names
    assert "_scaled_dot_product_flash_attention_for_cpu_backward" in names
    assert replay_exactly(tape).departs_at is None
    answer = shadow(tape)
    assert answer.right and not answer.notes, str(answer)


# -- with dropout: a stand-in for the kernels of a GPU, which draws its mask from the generator


@torch.library.custom_op(
    "seeded_test::_scaled_dot_product_flash_attention",
    mutates_args=(),
    tags=(torch.Tag.nondeterministic_seeded,),
)
def flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    weights = torch.softmax(query @ key.mT / math.sqrt(query.shape[-1]), -1)
    mask = (torch.rand_like(weights) >= dropout_p) / (1 - dropout_p)
    return (weights * mask) @ value, mask.clone()


def flash_backward(ctx, gradient, _):
    query, key, value, mask = ctx.saved_tensors
    with torch.enable_grad():
        inputs = [t.detach().requires_grad_() for t in (query, key, value)]
        out = (torch.softmax(inputs[0] @ inputs[1].mT / math.sqrt(query.shape[-1]), -1) * mask) @ inputs[2]
        return (*torch.autograd.grad(out, inputs, gradient), None, None)


def setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:3], output[1])


flash.register_autograd(flash_backward, setup_context=setup)


def test_dropout_is_drawn_again_from_where_it_was():
    func = torch.ops.seeded_test._scaled_dot_product_flash_attention.default
    q, k, v = operands()
    assert is_random(func, (q, k, v, 0.5), {}) and not is_random(func, (q, k, v, 0.0), {})
    torch.manual_seed(3)
    before = torch.get_rng_state()
    out, _ = func(q, k, v, 0.5)
    after = torch.get_rng_state()
    (again, _), note = replayed(func, (q, k, v, 0.5), {}, frozen=(before,))
    assert torch.equal(again.float(), out) and "its own precision" in note
    assert torch.equal(torch.get_rng_state(), after)
    (exact, _), note = replayed(func, (q, k, v, 0.5), {}, dtype=None, frozen=(before,))
    assert torch.equal(exact, out) and not note


@pytest.mark.parametrize("name", ["_flash_attention_forward", "_efficient_attention_forward"])
def test_kernels_called_by_themselves_are_random_only_with_dropout(name):
    func = getattr(torch.ops.aten, name).default
    assert is_random(func, (), {"dropout_p": 0.1}) and not is_random(func, (), {"dropout_p": 0.0})


@pytest.mark.parametrize("wrong", [False, True])
def test_a_step_with_dropout_in_its_attention_is_judged_with_the_mask_that_was_drawn(wrong, monkeypatch):
    monkeypatch.setattr(operators, "OWN_NAMESPACES", {*operators.OWN_NAMESPACES, "seeded_test"})
    if wrong:
        monkeypatch.setattr(attention, "_set_generator", lambda state, device: None)
    torch.manual_seed(0)
    linear = torch.nn.Linear(8, 24)
    x = torch.randn(2, 4, 5, 8)
    with record({p: n for n, p in linear.named_parameters()}) as tape:
        q, k, v = linear(x).chunk(3, -1)
        out, _ = torch.ops.seeded_test._scaled_dot_product_flash_attention(q, k, v, 0.3)
        out.square().sum().backward()
    assert not tape.broken
    answer = shadow(tape)
    assert (abs(answer.loss - answer.true_loss) < 1e-4) == (not wrong)
    if not wrong:
        assert answer.right and answer.error < 1e-6 and len(answer.parameters) == 2, str(answer)
    assert any("only the kernel knows" in note for note in answer.notes)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels exist only on a GPU")
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"])
def test_kernels_of_a_gpu(backend, dropout):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    torch.manual_seed(0)
    linear = torch.nn.Linear(64, 192, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(2, 32, 64, device="cuda", dtype=torch.bfloat16)
    with (
        record({p: n for n, p in linear.named_parameters()}) as tape,
        sdpa_kernel(getattr(SDPBackend, backend)),
    ):
        q, k, v = linear(x).view(2, 32, 3, 4, 16).permute(2, 0, 3, 1, 4).unbind(0)
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        out.float().square().mean().backward()
    assert any(operation.name in FUSED_ATTENTION for operation in tape.operations)
    assert replay_exactly(tape).departs_at is None
    answer = shadow(tape)
    assert answer.right, str(answer)
    assert any("only the kernel knows" in note for note in answer.notes) == (dropout > 0)
