"""`gradproof check-loss` catches ten planted kernel bugs by name, and passes a right kernel.

Point the last test at your own kernel: GRADPROOF_LOSS=my_module:my_loss pytest tests/test_loss_checks.py
"""

import os

import pytest
import torch

from gradproof.cli import main
from gradproof.commands.checking import _find_function
from gradproof.kernels.cross_entropy import cross_entropy
from gradproof.kernels.loss_checks import render_outcomes, run_checks


def kernel(forward):
    """A loss whose gradient is hand-written: forward(logits, targets, valid) -> (loss, gradient)."""

    class Hand(torch.autograd.Function):
        @staticmethod
        def forward(ctx, logits, targets, mask):
            valid = targets != -100
            valid = valid if mask is None else valid & mask
            loss, ctx.gradient = forward(logits.detach(), torch.where(valid, targets, 0), valid)
            return loss

        @staticmethod
        def backward(ctx, dloss):
            return ctx.gradient * dloss, None, None

    def loss(logits, targets, mask=None):
        return Hand.apply(logits, targets, mask)

    return loss


def right(x, y, valid):
    p = torch.softmax(x, 1)
    losses = torch.logsumexp(x, 1) - x.gather(1, y[:, None])[:, 0]
    count = valid.sum().clamp_min(1)
    p = p - torch.nn.functional.one_hot(y, x.shape[1]).to(p.dtype)
    return torch.where(valid, losses, 0).sum() / count, torch.where(valid[:, None], p, 0) / count


def block_limit(x, y, valid):
    loss, gradient = right(x[:, :1024], y.clamp_max(1023), valid)
    return loss, torch.nn.functional.pad(gradient, (0, x.shape[1] - gradient.shape[1]))


def tail_off_by_one(x, y, valid):
    cut = x.clone()
    if x.shape[1] % 32:
        cut[:, -1] = -torch.inf
    return right(torch.where(torch.arange(x.shape[1]) == y[:, None], x, cut), y, valid)


def missing_mask(x, y, valid):
    return right(x, y, torch.ones_like(valid))


def scale_by_all(x, y, valid):
    loss, gradient = right(x, y, valid)
    share = valid.sum() / len(valid)
    return loss * share, gradient * share


def unwritten_tail(x, y, valid):
    loss, gradient = right(x, y, valid)
    out = torch.empty_like(gradient)
    full = x.shape[1] // 256 * 256 or x.shape[1]
    out[:, :full] = gradient[:, :full]
    out[:, full:] = torch.where(out[:, full:].isnan(), out[:, full:], gradient[:, full:])  # lucky memory
    return loss, out


RUNS = [0]


def race(x, y, valid):
    RUNS[0] += (
        1  # which half of the row arrives first changes from run to run, and the sum's last bits with it
    )
    half = x.shape[1] // 2
    e = torch.exp(x - x.amax(1, keepdim=True))
    parts = [e[:, :half].flip(1).cumsum(1)[:, -1:], e[:, half:].cumsum(1)[:, -1:]] if half else [e[:, :1]]
    d = sum(parts) if RUNS[0] % 2 else sum(e[:, i::7].sum(1, keepdim=True) for i in range(min(7, x.shape[1])))
    loss, _ = right(x, y, valid)
    hot = torch.nn.functional.one_hot(y, x.shape[1])
    return loss, torch.where(valid[:, None], (e / d - hot) / valid.sum().clamp_min(1), 0)


def max_not_subtracted(x, y, valid):
    e = torch.exp(x)
    d = e.sum(1)
    losses = d.log() - x.gather(1, y[:, None])[:, 0]
    count = valid.sum().clamp_min(1)
    p = e / d[:, None] - torch.nn.functional.one_hot(y, x.shape[1])
    return torch.where(valid, losses, 0).sum() / count, torch.where(valid[:, None], p, 0) / count


def bf16_accumulator(x, y, valid):
    m = x.amax(1, keepdim=True)
    e = torch.exp(x - m)
    d = torch.zeros(len(x), dtype=torch.bfloat16)
    for part in e.split(64, 1):
        d = d + part.sum(1).bfloat16()
    shifted = x - m
    losses = d.to(x.dtype).log() - shifted.gather(1, y[:, None])[:, 0]
    count = valid.sum().clamp_min(1)
    p = e / d.to(x.dtype)[:, None] - torch.nn.functional.one_hot(y, x.shape[1])
    return torch.where(valid, losses, 0).sum() / count, torch.where(valid[:, None], p, 0) / count


def target_shifted(x, y, valid):
    return right(x, (y + 1) % x.shape[1], valid)


def sign(x, y, valid):
    loss, gradient = right(x, y, valid)
    return loss, -gradient


PLANTED = [
    (block_limit, "vocabulary 1025"),
    (tail_off_by_one, "vocabulary 33"),
    (missing_mask, "mask: random"),
    (scale_by_all, "mask: random"),
    (unwritten_tail, "every entry written, 1000"),
    (race, "repeatable"),
    (max_not_subtracted, "extreme: ±1e4"),
    (bf16_accumulator, "vocabulary 2000"),
    (target_shifted, "vocabulary 2"),
    (sign, "finite differences"),
]


@pytest.mark.parametrize(("bug", "check"), PLANTED, ids=[bug.__name__ for bug, _ in PLANTED])
def test_planted_bug_is_caught(bug, check):
    failed = {outcome.check: outcome.detail for outcome in run_checks(kernel(bug)) if not outcome.ok}
    assert failed.get(check)


@pytest.mark.parametrize("loss", [kernel(right), cross_entropy], ids=["by hand", "gradproof"])
def test_a_right_kernel_passes(loss):
    outcomes = run_checks(loss)
    assert len(outcomes) >= 35
    assert all(outcome.ok for outcome in outcomes), render_outcomes(outcomes)


def test_a_kernel_that_raises_has_failed():
    def broken(logits, targets):
        raise ZeroDivisionError("no")

    assert any("ZeroDivisionError: no" in outcome.detail for outcome in run_checks(broken))


def test_command_prints_failures_with_their_place(tmp_path, capsys):
    (tmp_path / "mine.py").write_text("def loss(x, y):\n    return -x.log_softmax(1)[:, 0].mean()\n")
    assert main(["check-loss", f"{tmp_path}/mine.py:loss"]) == 1
    printed = capsys.readouterr().out
    assert "vocabulary 50 " in printed and "FAILED" in printed and "checks failed" in printed


@pytest.mark.parametrize("spec", ["nothing", "no_such_module:loss", "missing.py:loss", "math:no_such"])
def test_command_names_what_it_cannot_find(spec, capsys):
    assert main(["check-loss", spec]) == 2
    assert spec.partition(":")[0] in capsys.readouterr().err


@pytest.mark.skipif(
    "GRADPROOF_LOSS" not in os.environ, reason="GRADPROOF_LOSS=module:function names your kernel"
)
def test_your_kernel():
    outcomes = run_checks(_find_function(os.environ["GRADPROOF_LOSS"]))
    assert all(outcome.ok for outcome in outcomes), render_outcomes(outcomes)
