"""check_module names the module whose backward is wrong, and leaves the model as it was."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gradproof import GradientMismatch, check_module
from gradproof.errors import UserError

# B batch, T time, C channels, V vocabulary


class HalfGelu(torch.autograd.Function):
    """GELU whose backward forgets the density term."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return F.gelu(x)

    @staticmethod
    def backward(ctx, dout):
        (x,) = ctx.saved_tensors
        return dout * 0.5 * (1 + torch.erf(x / 2**0.5))


class Gelu(nn.Module):
    def __init__(self, wrong: bool):
        super().__init__()
        self.wrong = wrong

    def forward(self, x):
        return HalfGelu.apply(x) if self.wrong else F.gelu(x)


class Block(nn.Module):
    def __init__(self, channels: int, heads: int, wrong: bool):
        super().__init__()
        self.norm = nn.LayerNorm(channels)
        self.qkv = nn.Linear(channels, 3 * channels)
        self.up, self.act, self.down = (
            nn.Linear(channels, 4 * channels),
            Gelu(wrong),
            nn.Linear(4 * channels, channels),
        )
        self.drop = nn.Dropout(0.1)
        self.heads = heads

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (z.view(B, T, self.heads, -1).transpose(1, 2) for z in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, C)
        return x + self.drop(self.down(self.act(self.up(x))))


class GPT(nn.Module):
    def __init__(self, vocabulary=23, channels=8, heads=2, layers=3, time=12, wrong_block=None):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, channels), nn.Embedding(time, channels)
        self.blocks = nn.ModuleList(Block(channels, heads, k == wrong_block) for k in range(layers))
        self.norm, self.head = nn.LayerNorm(channels), nn.Linear(channels, vocabulary, bias=False)
        self.head.weight = self.tokens.weight  # tied

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_fn(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch(vocabulary=23, rows=2, time=6):
    return torch.randint(vocabulary, (rows, time)), torch.randint(vocabulary, (rows, time))


def test_healthy_model_gets_a_line_for_each_kind_of_module():
    model = GPT()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    found = check_module(model, batch(), loss_fn)
    verdicts = {line.path: line.verdict for line in found.lines}
    assert found.decided and set(verdicts.values()) == {"right"}
    assert {"tokens", "blocks.1.norm", "blocks.1.qkv", "blocks.1", "head", "loss", "whole model"} <= set(
        verdicts
    )
    assert "blocks.*.qkv" in str(found) and "3      right" in str(found)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(p.grad is None for p in model.parameters())


def test_wrong_backward_is_found_in_its_module_and_nowhere_else():
    with pytest.raises(GradientMismatch) as caught:
        check_module(GPT(wrong_block=1), batch(), loss_fn)
    message = str(caught.value)
    assert message.startswith("gradient of blocks.1.act with respect to x is wrong at (")
    lines = {
        line.split()[0]: line for line in message.splitlines() if line.startswith(("blocks", "whole", "head"))
    }
    assert " wrong " in lines["blocks.1.act"]
    assert "contains blocks.1.act" in lines["blocks.1"] and "contains blocks.1.act" in lines["whole"]
    assert " right " in lines["head"] and message.count(" wrong ") == 2


def test_wrong_loss_is_named():
    def wrong_loss(logits, targets):
        class Wrong(torch.autograd.Function):
            @staticmethod
            def forward(ctx, logits):
                ctx.save_for_backward(logits)
                return loss_fn(logits, targets)

            @staticmethod
            def backward(ctx, dout):
                return dout * ctx.saved_tensors[0].softmax(-1)

        return Wrong.apply(logits)

    with pytest.raises(GradientMismatch, match="gradient of loss with respect to output"):
        check_module(GPT(), batch(), wrong_loss)


def test_convolutions_in_place_and_batch_statistics():
    features = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2)
    model = nn.Sequential(*features, nn.Flatten(), nn.Linear(36, 3))
    found = check_module(model, torch.randn(4, 1, 8, 8))
    assert {line.verdict for line in found.lines} == {"right"} and len(found.lines) == 7


def test_frozen_parts_say_so():
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2))
    model[0].weight.requires_grad_(False)
    found = check_module(model, torch.tensor([[1, 2]]))
    assert [line.verdict for line in found.lines] == ["nothing to differentiate", "right", "right"]


def test_batch_of_the_wrong_form_is_refused():
    with pytest.raises(UserError, match=r"batch must be \(inputs, targets\)"):
        check_module(GPT(), torch.zeros(1, 4, dtype=torch.long), loss_fn)


@pytest.mark.slow
def test_124_million_parameters_in_under_a_minute():
    import time

    model = GPT(50257, 768, 12, 12, 1024)
    assert sum(p.numel() for p in model.parameters()) > 110e6
    start = time.process_time()
    found = check_module(model, batch(50257, 1, 16), loss_fn)
    assert {line.verdict for line in found.lines} == {"right"}
    assert time.process_time() - start < 60
