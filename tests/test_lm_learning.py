"""The models learn what a working trainer must learn, in seconds."""

import math

import pytest
import torch

from gradproof.errors import UserError
from gradproof.lm.adam import AdamSettings, FlatAdamW, clip_global_norm, learning_rate
from gradproof.lm.cascade import Cascade, CascadeShape
from gradproof.lm.explicit_gpt import ExplicitGPT
from gradproof.lm.generate import generate
from gradproof.lm.gpt import GPT
from gradproof.lm.shape import GPTShape, parameter_shapes

NO_DECAY = AdamSettings(weight_decay=0.0)


def train_explicit(model, batch_of, steps, lr=3e-3):
    """The losses of each step."""
    optimizer = FlatAdamW(model.flat_parameters, parameter_shapes(model.shape), NO_DECAY)
    rate, losses = learning_rate("cosine", lr, 10, steps), []
    for step in range(steps):
        model.zero_gradients()
        losses.append(model.forward(*batch_of(step)).item())
        model.backward()
        clip_global_norm(model.flat_gradients, 1.0)
        optimizer.step(model.flat_gradients, rate(step))
    return losses


def alphabet(step):
    """A B C D … Z A B …, from another letter in each row."""
    rows = (
        torch.arange(17) + torch.randint(0, 26, (8, 1), generator=torch.Generator().manual_seed(step))
    ) % 26
    return rows[:, :-1], rows[:, 1:]


def test_the_alphabet_is_learned():
    model = ExplicitGPT(GPTShape(vocabulary=26, context=16, width=32, heads=2, layers=2))
    losses = train_explicit(model, alphabet, 250, lr=1e-2)
    assert losses[0] > 3 and losses[-1] < 0.01
    said = generate(model.logits, [0, 1], 8, context=16, temperature=0)
    assert said == [2, 3, 4, 5, 6, 7, 8, 9]


def test_without_targets_that_follow_nothing_is_learned():
    def shuffled(step):
        inputs, targets = alphabet(step)
        order = torch.randperm(targets.numel(), generator=torch.Generator().manual_seed(step))
        return inputs, targets.flatten()[order].view_as(targets)

    model = ExplicitGPT(GPTShape(vocabulary=26, context=16, width=32, heads=2, layers=2))
    assert train_explicit(model, shuffled, 150)[-1] > 2


def test_a_sequence_is_copied():
    """Eight random digits, a separator, the digits again: only attention can know the second half."""

    def batch_of(step):
        digits = torch.randint(0, 10, (32, 8), generator=torch.Generator().manual_seed(step))
        rows = torch.cat([digits, torch.full((32, 1), 10), digits], 1)
        return rows[:, :-1], rows[:, 1:]

    shape = GPTShape(vocabulary=11, context=16, width=48, heads=4, layers=2)
    model = ExplicitGPT(shape)
    train_explicit(model, batch_of, 500, lr=4e-3)
    inputs, targets = batch_of(10**6)
    right = (model.logits(inputs).argmax(-1) == targets)[:, 8:]
    assert right.float().mean() > 0.99


def test_one_batch_is_overfitted():
    rows = torch.randint(0, 64, (4, 33), generator=torch.Generator().manual_seed(0))
    model = ExplicitGPT(GPTShape(vocabulary=64, context=32, width=64, heads=4, layers=2))
    losses = train_explicit(model, lambda step: (rows[:, :-1], rows[:, 1:]), 120, lr=4e-3)
    assert losses[0] > 4 and losses[-1] < 0.05


def test_generation_is_the_same_for_the_same_seed():
    module = GPT(GPTShape(vocabulary=26, context=16, width=32, heads=2, layers=1)).eval()
    first, again, other = (generate(module, [3], 40, context=16, seed=seed) for seed in (1, 1, 2))
    assert first == again != other and len(first) == 40  # longer than the context
    assert generate(module, [3], 40, context=16, seed=1, end_of_text=first[4]) == first[:4]
    with pytest.raises(UserError, match="at least one token"):
        generate(module, [], 4, context=16)
    with pytest.raises(UserError, match="top-k at least 1"):
        generate(module, [1], 4, context=16, top_k=0)


@pytest.mark.parametrize(
    "module",
    [
        GPT(GPTShape(vocabulary=30, context=16, width=24, heads=3, layers=2)),
        Cascade(CascadeShape(vocabulary=30, context=16, width=24, heads=4, stage_widths=(24, 32))),
    ],
    ids=["gpt", "cascade"],
)
def test_no_model_sees_the_future(module):
    tokens = torch.randint(0, 30, (2, 16), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % 30
    with torch.no_grad():
        before, after = module(tokens), module(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9:], after[:, 9:])


STAGES = {"vocabulary": 26, "context": 16, "width": 32, "heads": 2, "stage_widths": (32, 48, 64)}


def train_cascade(shape, steps):
    """Losses and gradient norms."""
    module = Cascade(shape)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    losses, norms = [], []
    for step in range(steps):
        optimizer.zero_grad()
        loss = module(*alphabet(step))
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms


def test_the_cascade_learns_and_stays_stable():
    losses, norms = train_cascade(CascadeShape(**STAGES), 80)
    assert losses[-1] < 0.1 and max(norms) < 20


def test_the_unstable_cascade_explodes_where_the_stable_one_does_not():
    """Where a stage's own output is small, an unbounded rescale multiplies gradients by its inverse."""

    def stage_gradient(**options):
        module = Cascade(CascadeShape(**STAGES, **options))
        with torch.no_grad():
            module.cascade_stages[2].output_proj.weight *= 1e-4  # as after some unlucky steps
        module(*alphabet(0)).backward()
        return module.cascade_stages[2].output_proj.weight.grad.norm().item()

    stable = stage_gradient()
    unstable = stage_gradient(residuals=(1.0, 1.0, 0.0), rescale_limit=None)
    assert math.isfinite(unstable) and unstable > 100 * stable


def test_cascade_shapes_that_do_not_fit():
    with pytest.raises(UserError, match="4 heads do not divide a stage width of 30"):
        CascadeShape(vocabulary=10, heads=4, stage_widths=(24, 30))
    with pytest.raises(UserError, match="2 residual weights for 3 stages"):
        CascadeShape(vocabulary=10, residuals=(1.0, 0.1))
