"""Steps in low precision: deep, saturated and healthy ones are right; planted mistakes have two witnesses."""

import math

import pytest
import tape_faults
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from experiment_steps import evidence_of
from tape_faults import WRONG
from torch import nn

from gradproof.experiments.gradients.gradient import is_the_gradient_right
from gradproof.tape.record import record
from gradproof.tape.replay import replay_forward
from gradproof.tape.shadow import shadow
from gradproof.tape.witness import DERIVATIVE, DIFFERENCE, second_witness


def names_of(model):
    return {parameter: name for name, parameter in model.named_parameters()}


def shadow_of(model, make_loss, low=None, scale=1.0):
    with record(names_of(model)) as tape:
        with torch.autocast("cpu", low or torch.bfloat16, enabled=low is not None):
            loss = make_loss()
        (loss * scale).backward()
    assert not tape.broken, tape.broken
    return shadow(tape)


class Block(nn.Module):
    """Attention and a network, after a norm, with weights so large that rounding grows from block to block."""

    def __init__(self, width, gain):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.f1, self.f2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(gain if parameter.dim() > 1 else 1.0)

    def forward(self, x):
        q, k, v = self.qkv(self.ln1(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.f2(F.gelu(self.f1(self.ln2(x))))


def deep(layers=10, gain=3.0, width=16):
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {
            "tokens": nn.Embedding(31, width),
            "positions": nn.Embedding(64, width),
            "blocks": nn.Sequential(*(Block(width, gain) for _ in range(layers))),
            "norm": nn.LayerNorm(width),
            "head": nn.Linear(width, 31),
        }
    )
    ids = torch.randint(0, 31, (4, 13))

    def make_loss():
        x = model["tokens"](ids[:, :-1]) + model["positions"](torch.arange(12))
        logits = model["head"](model["norm"](model["blocks"](x)))
        return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())

    return model, make_loss


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_a_chaotic_network_is_right_node_by_node(low):
    """As a whole its gradient in bfloat16 has little to do with that in float64; each node is right all the same."""
    answer = shadow_of(*deep(), low)
    assert answer.right, str(answer)
    assert not answer.culprits and answer.nodes.right
    if low is torch.bfloat16:
        assert any(p.by_nodes for p in answer.parameters)


def test_a_chaotic_network_with_a_mistake():
    model, make_loss = deep()
    model["blocks"][4].f1.register_full_backward_hook(lambda module, into, out: (into[0] * 1.5,))
    answer = shadow_of(model, make_loss, torch.bfloat16)
    assert [c.kind for c in answer.culprits] == ["changed by a hook"] and answer.culprits[
        0
    ].confidence == "proven"


@pytest.mark.parametrize("low", [None, torch.bfloat16, torch.float16])
def test_what_is_zero_in_truth(low):
    """A bias before a norm, a key's bias under a softmax, rows that nobody reads."""
    torch.manual_seed(0)
    width = 8
    model = nn.ModuleDict(
        {"table": nn.Embedding(50, width), "f": nn.Linear(width, width), "g": nn.Linear(width, width)}
    )
    model["norm"], model["head"] = nn.BatchNorm1d(width), nn.Linear(width, 5)
    ids = torch.randint(0, 20, (64, 3))

    def make_loss():
        x = model["table"](ids)
        weights = (x @ model["f"](x).mT).softmax(-1)
        x = model["norm"](model["g"]((weights @ x).mean(1)))
        return F.cross_entropy(model["head"](x).float(), ids[:, 0] % 5)

    answer = shadow_of(model, make_loss, low)
    assert answer.right, str(answer)
    verdicts = {p.name: p.verdict for p in answer.parameters}
    assert verdicts["g.bias"] == "zero in truth" and verdicts["g.weight"] == "right"


def test_a_saturated_loss_in_float32():
    """The discriminator of a GAN that is sure of itself: what is left of its loss is rounding."""
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(3, 8, 4, 2, 1),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(8, 16, 4, 2, 1),
        nn.BatchNorm2d(16),
    ]
    model = nn.Sequential(*layers, nn.LeakyReLU(0.2, inplace=True), nn.Conv2d(16, 1, 4), nn.Sigmoid())
    x = torch.randn(8, 3, 16, 16)
    for size in (1.0, 20.0, 300.0):
        with torch.no_grad():
            model[5].weight.normal_(std=size)
        y = (model(x).flatten() > 0.5).float()
        answer = shadow_of(model, lambda y=y: F.binary_cross_entropy(model(x).flatten(), y))
        assert answer.right, (size, str(answer))


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_label_smoothing_is_no_wrong_division(low):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 40))
    x, y = torch.randn(64, 16), torch.randint(0, 40, (64,))
    y[::3] = 0
    answer = shadow_of(
        model, lambda: F.cross_entropy(model(x).float(), y, ignore_index=0, label_smoothing=0.05), low, 1024.0
    )
    assert answer.right, str(answer)


# 0.3 % of one term, and a term of 2.7 %: half precision rounds by as much
SMALL = {tape_faults.GeluNearlyRight, tape_faults.BlockNormTermMissing}
LOW = ("bfloat16", "float16", "pure")


def faulty(where, wrong, precision):
    model, batch = tape_faults.build(where, wrong)
    if wrong is tape_faults.GeluStaleCache:
        model(*batch)
    if precision == "pure":
        model = model.bfloat16()
        return shadow_of(model, lambda: model(*batch[:2], batch[2].bfloat16()))
    return shadow_of(model, lambda: model(*batch), getattr(torch, precision), 256.0)


@pytest.mark.parametrize("precision", LOW)
@pytest.mark.parametrize(
    ("where", "wrong"), [p for p in WRONG if p[1] not in SMALL], ids=lambda v: getattr(v, "__name__", v)
)
def test_wrong_backwards_are_found_in_low_precision(where, wrong, precision):
    if wrong is tape_faults.GeluStaleCache and precision == "pure":
        tape_faults.GeluStaleCache.cache.clear()
    answer = faulty(where, wrong, precision)
    tape_faults.GeluStaleCache.cache.clear()
    assert [culprit.what for culprit in answer.culprits] == [wrong.__name__], str(answer)
    assert answer.culprits[0].confidence == "proven", str(answer)


@pytest.mark.parametrize("precision", LOW)
def test_the_same_functions_written_right_are_silent(precision):
    answer = faulty(None, None, precision)
    assert answer.right and not answer.culprits, str(answer)


class Half(torch.autograd.Function):
    """x², with half of its slope."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0]


def test_the_experiment_says_who_its_witnesses_are():
    torch.manual_seed(0)
    model, x = nn.Linear(4, 3), torch.randn(8, 4)
    (verdict,) = is_the_gradient_right(evidence_of(model, lambda: Half.apply(model(x)).mean()))
    assert verdict.confidence == "proven" and any(
        DERIVATIVE in line and DIFFERENCE in line for line in verdict.evidence
    )
    (verdict,) = is_the_gradient_right(evidence_of(model, lambda: model(x).square().mean()))
    assert verdict.verdict == "excluded" and verdict.confidence == "proven"


def test_a_function_that_cannot_be_looked_into_is_not_judged_elsewhere():
    class Sine(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return torch.from_numpy(x.detach().numpy() ** 2)

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.saved_tensors[0]

    torch.manual_seed(0)
    model, x = nn.Linear(4, 3), torch.randn(8, 4)
    verdicts = list(is_the_gradient_right(evidence_of(model, lambda: Sine.apply(model(x)).mean())))
    assert [v.verdict for v in verdicts] == ["undecided"] and "code of the training's own" in verdicts[
        0
    ].reason


def test_the_second_witness():
    x = torch.tensor([0.3, -1.2, 2.0], dtype=torch.float64)
    one, slope = torch.ones(3, dtype=torch.float64), x.cos()
    forward = lambda at: [at.sin()]  # noqa: E731
    assert second_witness(forward, [one], x, 1.1 * slope, slope) is True
    assert second_witness(forward, [one], x, slope, 1.1 * slope) is False
    assert second_witness(forward, [one], x, None, slope) is True
    assert second_witness(forward, [one], x, slope, slope) is None
    assert second_witness(lambda at: [at.float()], [one], x, 2 * slope, slope) is None
    assert second_witness(lambda at: 1 / 0, [one], x, 2 * slope, slope) is None
    rough = lambda at: [(at * 1e9).round() * 1e-3 + at.sin()]  # noqa: E731
    assert second_witness(rough, [one], x, 2 * slope, slope) is not True
    assert second_witness(forward, [one], x, torch.full((3,), math.nan), slope) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_intervention_on_a_step_in_bfloat16_is_replayed_in_more_digits(dtype):
    """A change of a millionth is below what bfloat16 sees, and has its slope in float32."""
    model, make_loss = deep(layers=2, gain=1.0)
    with record(names_of(model)) as tape, torch.autocast("cpu", torch.bfloat16):
        make_loss().backward()
    weight = model["head"].weight.detach()
    moved = {"head.weight": weight - 1e-3 * model["head"].weight.grad}
    before, after = (replay_forward(tape, dtype=dtype, leaves=leaves) for leaves in (None, moved))
    expected = -1e-3 * float(model["head"].weight.grad.square().sum())
    assert not before.notes
    assert float(after.loss - before.loss) == pytest.approx(expected, rel=0.05)


def again(model, x):
    for block in model:
        x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
    return x


def saved_elsewhere(model, x):
    with torch.autograd.graph.save_on_cpu():
        return model(x)


@pytest.mark.parametrize("low", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("run", [again, saved_elsewhere])
def test_activations_that_are_made_again_or_brought_back_accuse_nobody(run, low):
    """What is brought back has another tensor's place in autograd's graph, and no reader on the tape."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Block(16, 2.0) for _ in range(4)), nn.Linear(16, 3)), torch.randn(4, 8, 16)
    answer = shadow_of(model, lambda: run(model, x).float().square().mean(), low)
    assert not answer.culprits, str(answer)
    assert not any(p.verdict == "wrong" for p in answer.parameters), str(answer)


def test_a_scale_that_changes_at_the_beginning_of_a_step_is_known_in_float64():
    """GradScaler.update() runs behind the optimizer's step: on a tape it comes first, and the loss is scaled by it."""
    torch.manual_seed(0)
    model, x = nn.Linear(4, 3), torch.randn(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)

    def loss():
        with torch.autocast("cpu", torch.float16):
            return model(x).float().square().mean()

    scaler.scale(loss()).backward()
    scaler.step(optimizer)
    with record(names_of(model)) as tape:
        scaler.update()
        optimizer.zero_grad()
        scaler.scale(loss()).backward()
    answer = shadow(tape)
    assert scaler.get_scale() == 8.0
    assert answer.right and not answer.notes, str(answer)


def test_what_was_computed_before_the_tape_began_is_not_judged():
    """A GAN's generator: its forward is on the tape of the step before, its backward on this one."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"g": nn.Linear(3, 4), "d": nn.Linear(4, 1), "both": nn.Linear(4, 4)})
    fake = model["both"](model["g"](torch.randn(8, 3)))
    with record(names_of(model)) as tape:
        model["d"](model["both"](fake).tanh()).square().mean().backward()
    answer = shadow(tape)
    assert not answer.culprits, str(answer)
    verdicts = {p.name: p.verdict for p in answer.parameters}
    assert (
        verdicts["d.weight"] == "right"
        and verdicts["both.weight"] == "undecided"
        and "g.weight" not in verdicts
    )
