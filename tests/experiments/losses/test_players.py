"""A GAN whose generator is trained with the discriminator's own label for fakes, and one that is not."""

import pytest
import torch
import torch.nn.functional as F
from taped_trainings import evidence_of_step
from torch import nn

from gradproof.experiments.losses.players import do_the_players_disagree

REAL = torch.randn(12, 2) + 3


def train(label, made_again):
    models = {"G": nn.Linear(3, 2), "D": nn.Linear(2, 1)}
    G, D = models["G"], models["D"]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models.values()]
    bce, ones, zeros = F.binary_cross_entropy_with_logits, torch.ones(12, 1), torch.zeros(12, 1)
    memory, said, fakes = {}, [], []

    def judging():
        on_real = bce(D(REAL), ones)
        fakes[:] = [G(torch.randn(12, 3))]
        (on_real + bce(D(fakes[0].detach()), zeros)).backward()
        optimizers[1].step()

    def making():
        fake = G(torch.randn(12, 3)) if made_again else fakes[0]
        bce(D(fake), torch.full((12, 1), label)).backward()
        optimizers[0].step()

    for step in (judging, making) * 2:
        evidence = evidence_of_step(step, models, optimizers, losses=[1.0], memory=memory)
        said += do_the_players_disagree(evidence)
    return [v.id for v in said if v.id], [v.family for v in said if not v.id]


@pytest.mark.parametrize("made_again", [True, False])
def test_players(made_again):
    assert train(0.0, made_again)[0][:1] == ["loss-scale-or-sign/players-agree"]
    wrong, right = train(1.0, made_again)
    assert not wrong and right[:1] == ["loss-scale-or-sign"]
