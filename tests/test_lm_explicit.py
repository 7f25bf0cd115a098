"""The explicit model's gradients against autograd and finite differences, its optimizer against PyTorch's."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gradproof.errors import UserError
from gradproof.lm import explicit_gpt, layers
from gradproof.lm.adam import AdamSettings, FlatAdamW, clip_global_norm, global_norm, learning_rate
from gradproof.lm.explicit_gpt import ExplicitGPT
from gradproof.lm.gpt import GPT
from gradproof.lm.memory import memory_report
from gradproof.lm.shape import GPTShape, count_parameters, parameter_shapes

SHAPE = GPTShape(vocabulary=37, context=16, width=24, heads=3, layers=3)
UNTIED = GPTShape(vocabulary=37, context=16, width=24, heads=3, layers=3, tied=False)


def batch(shape=SHAPE, size=6, time=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, shape.vocabulary, (size, time + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def rough(model):
    """Weights far from the tidy start, where many gradients would be too small to test anything."""
    generator = torch.Generator().manual_seed(7)
    model.flat_parameters += 0.2 * torch.randn(model.flat_parameters.shape, generator=generator)
    return model


def worst_against_autograd(model, tokens, targets):
    """The largest relative error of a parameter's gradient, and its name."""
    module = GPT(model.shape).to(model.flat_parameters.dtype)
    module.load_state_dict(model.parameters)
    module(tokens, targets).backward()
    model.zero_gradients()
    model.forward(tokens, targets)
    model.backward()
    return max(
        ((model.gradients[name] - p.grad).norm() / p.grad.norm()).item()
        for name, p in module.named_parameters()
    )


@pytest.mark.parametrize("shape", [SHAPE, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype, allowed", [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_gradients_agree_with_autograd(shape, recompute, dtype, allowed):
    model = rough(ExplicitGPT(shape, dtype=dtype, recompute=recompute))
    for size, time in ((6, 16), (1, 5)):  # the second reallocates, and is shorter than the context
        assert worst_against_autograd(model, *batch(shape, size, time)) <= allowed


def test_gradients_agree_when_the_rows_take_several_blocks(monkeypatch):
    monkeypatch.setattr(layers, "TALL_ROWS", 10)
    monkeypatch.setattr(layers, "CACHED_ELEMENTS", 24 * 7)
    model = rough(ExplicitGPT(SHAPE, dtype=torch.float64))
    assert worst_against_autograd(model, *batch()) <= 1e-12


def without_mean_term(dout, xhat, rstd, weight, dx, dweight, dbias, scratch):
    dbias += dout.sum(0)
    dweight += (dout * xhat).sum(0)
    dxhat = dout * weight
    dx += rstd * (dxhat - xhat * (dxhat * xhat).mean(1, keepdim=True))


def overwriting(dout, x, weight, dx, dweight, dbias):
    dweight.copy_(dout.mT @ x)
    torch.mm(dout, weight, out=dx)


@pytest.mark.parametrize(
    "name, planted",
    [("layernorm_backward", without_mean_term), ("gelu_backward", lambda dout, x: dout.mul_(x > 0))],
)
def test_a_wrong_backward_is_caught(monkeypatch, name, planted):
    model = rough(ExplicitGPT(SHAPE, dtype=torch.float64))
    monkeypatch.setattr(explicit_gpt, name, planted)
    assert worst_against_autograd(model, *batch()) > 1e-3


@pytest.mark.parametrize("dtype, allowed", [(torch.float64, 1e-8), (torch.float32, 1e-5)])
def test_gradients_agree_with_finite_differences(dtype, allowed):
    """Along a random direction of each parameter tensor; the differences themselves are always float64."""
    model = rough(ExplicitGPT(SHAPE, dtype=dtype))
    tokens, targets = batch()
    model.forward(tokens, targets)
    model.backward()
    exact = ExplicitGPT(SHAPE, dtype=torch.float64)
    exact.load(model.parameters)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in exact.parameters.items():
        gradient = model.gradients[name].double()
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        direction = (
            gradient / gradient.norm() + noise / noise.norm()
        )  # never nearly orthogonal to the gradient
        start, h = parameter.clone(), 1e-3

        def loss(t, parameter=parameter, start=start, direction=direction):
            parameter.copy_(start + t * direction)
            return exact.forward(tokens, targets).item()

        slope = (8 * (loss(h) - loss(-h)) - (loss(2 * h) - loss(-2 * h))) / (12 * h)  # error h⁴
        parameter.copy_(start)
        said = (gradient * direction).sum().item()
        assert abs(said - slope) <= allowed * abs(slope), f"{name}: backward {said}, difference {slope}"


def accumulated(model, tokens, targets, parts):
    model.zero_gradients()
    for x, y in zip(tokens.chunk(parts), targets.chunk(parts), strict=True):
        model.forward(x, y)
        model.backward(scale=1 / parts)
    return model.flat_gradients.clone()


@pytest.mark.parametrize("parts", [2, 3, 6])
def test_micro_batches_add_up_to_the_batch(parts):
    model = rough(ExplicitGPT(SHAPE, dtype=torch.float64))
    whole = accumulated(model, *batch(), 1)
    assert (accumulated(model, *batch(), parts) - whole).norm() <= 1e-12 * whole.norm()


def test_a_gradient_that_is_overwritten_does_not_add_up(monkeypatch):
    model = rough(ExplicitGPT(SHAPE, dtype=torch.float64))
    whole = accumulated(model, *batch(), 1)
    monkeypatch.setattr(explicit_gpt, "linear_backward", overwriting)
    assert (accumulated(model, *batch(), 2) - whole).norm() > 1e-2 * whole.norm()


def test_bf16_activations_stay_near_float32():
    exact, model = rough(ExplicitGPT(SHAPE)), rough(ExplicitGPT(SHAPE, activations=torch.bfloat16))
    for m in (exact, model):
        m.forward(*batch())
        m.backward()
    assert model.flat_gradients.dtype == torch.float32
    for name, gradient in exact.gradients.items():
        assert (model.gradients[name] - gradient).norm() <= 0.05 * gradient.norm(), name


def test_every_weight_of_every_layer_has_a_gradient_and_moves():
    model = ExplicitGPT(SHAPE)
    optimizer = FlatAdamW(model.flat_parameters, parameter_shapes(SHAPE))
    before = {name: p.clone() for name, p in model.parameters.items()}
    tokens = torch.arange(6 * 16).view(6, 16) % 37  # every token occurs
    model.forward(tokens, tokens.roll(-1, 1))
    model.backward()
    optimizer.step(model.flat_gradients, 1e-3)
    views = model.gradient_views()
    for part in ("query.weight", "key.weight", "value.weight", "value.bias", "out.weight", "out.bias"):
        assert views[f"blocks.2.attention.{part}"].abs().max() > 0
    for name, parameter in model.parameters.items():
        assert model.gradients[name].abs().max() > 0, name
        assert not torch.equal(parameter, before[name]), name
    assert sum(v.numel() for v in views.values()) == count_parameters(SHAPE) == model.flat_gradients.numel()
    model.zero_gradients()
    assert not any(g.any() for g in model.gradients.values())


def test_clip_and_adam_follow_torch():
    shapes, module = parameter_shapes(SHAPE), GPT(SHAPE).double()
    model = ExplicitGPT(SHAPE, dtype=torch.float64)
    model.load(module.state_dict())
    mine = FlatAdamW(model.flat_parameters, shapes, AdamSettings(weight_decay=0.3))
    matrices = [p for p in module.parameters() if p.dim() > 1]
    vectors = [p for p in module.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}]
    theirs = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    for step in range(5):
        module.zero_grad()
        module(*batch(seed=step)).backward()
        for name, parameter in module.named_parameters():
            model.gradients[name].copy_(parameter.grad)
        norm = clip_global_norm(model.flat_gradients, 0.5)
        mine.step(model.flat_gradients, 0.01 * (step + 1))
        torch_norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        for group in theirs.param_groups:
            group["lr"] = 0.01 * (step + 1)
        theirs.step()
        assert norm > 0.5  # the clip was at work
        assert abs(norm - torch_norm) <= 1e-12 * torch_norm
    for name, parameter in module.named_parameters():
        # torch's clip divides by norm + 1e-6
        assert (model.parameters[name] - parameter).norm() <= 1e-5 * parameter.norm(), name


def test_clip_leaves_a_small_gradient_alone_and_sees_a_nan():
    small = torch.full((100_000,), 1e-3)
    kept = small.clone()
    assert global_norm(small).item() == pytest.approx(1e-3 * 100_000**0.5, rel=1e-6)
    clip_global_norm(small, 1.0)
    assert torch.equal(small, kept)
    small[7] = float("nan")
    assert clip_global_norm(small, 1.0).isnan() and small.isnan().all()


def test_schedules():
    at = learning_rate("cosine", 1.0, warmup=9, steps=110)
    assert [round(at(step), 3) for step in (0, 4, 9, 109)] == [0.1, 0.5, 1.0, 0.1]
    assert at(60) == pytest.approx(0.55, abs=0.02)
    assert learning_rate("linear", 1.0, 0, 101)(50) == pytest.approx(0.55)
    assert {learning_rate("constant", 0.3, 0, 10)(step) for step in range(10)} == {0.3}
    with pytest.raises(UserError, match="cosine, linear, constant"):
        learning_rate("square", 1.0, 0, 10)


@pytest.mark.parametrize("shape", [SHAPE, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize("activations", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
@pytest.mark.parametrize("recompute", [False, True])
def test_memory_report_agrees_to_the_byte(shape, activations, recompute):
    model = ExplicitGPT(shape, activations=activations, recompute=recompute)
    optimizer = FlatAdamW(model.flat_parameters, parameter_shapes(shape))
    report = memory_report(model, optimizer, 5, 16)
    assert report.computed == report.allocated
    assert "they agree" in str(report) and "feed_forward" in str(report)
    model.work.logits.untyped_storage().resize_(4)
    assert memory_report(model, optimizer, 5, 16).total[0] != memory_report(model, optimizer, 5, 16).total[1]


def test_recomputation_saves_memory():
    def activations(recompute):
        model = ExplicitGPT(SHAPE, recompute=recompute)
        optimizer = FlatAdamW(model.flat_parameters, parameter_shapes(SHAPE))
        return sum(memory_report(model, optimizer, 5, 16).computed["activations"].values())

    assert activations(True) < 0.7 * activations(False)


class LargestNewStorage(TorchDispatchMode):
    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not func._schema.returns[0].alias_info:
            self.bytes = max(self.bytes, out.untyped_storage().nbytes())
        return out


def test_a_step_allocates_nothing_large():
    shape = GPTShape(vocabulary=50, context=64, width=64, heads=4, layers=2)
    model = ExplicitGPT(shape)
    optimizer = FlatAdamW(model.flat_parameters, parameter_shapes(shape))

    def step():
        model.zero_gradients()
        model.forward(*batch(shape, 64, 64))
        model.backward()
        clip_global_norm(model.flat_gradients, 1.0)
        optimizer.step(model.flat_gradients, 1e-3)

    step()
    with LargestNewStorage() as largest:
        step()
    assert 0 < largest.bytes <= 1 << 18 < model.work.stream.nbytes


def test_impossible_shapes_are_named():
    with pytest.raises(UserError, match="5 heads do not divide a width of 24"):
        GPTShape(vocabulary=10, width=24, heads=5)
    with pytest.raises(UserError, match="layers of at least 1, not 0"):
        GPTShape(vocabulary=10, layers=0)
    for model in (ExplicitGPT(SHAPE).forward, GPT(SHAPE)):
        with pytest.raises(UserError, match="17 tokens in a row do not fit a context of 16"):
            model(*batch(SHAPE, 2, 17))
