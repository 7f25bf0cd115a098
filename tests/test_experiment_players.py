"""A GAN whose generator is trained with the discriminator's own label for fakes, and one that is not."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gradproof.experiments.evidence import Evidence
from gradproof.experiments.players import do_the_players_disagree
from gradproof.tape.record import record

REAL = torch.randn(12, 2) + 3


def train(label, made_again):
    models = {"G": nn.Linear(3, 2), "D": nn.Linear(2, 1)}
    G, D = models["G"], models["D"]
    names = {p: f"{m}.{n}" for m, model in models.items() for n, p in model.named_parameters()}
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models.values()]
    bce, ones, zeros = F.binary_cross_entropy_with_logits, torch.ones(12, 1), torch.zeros(12, 1)
    memory, said = {}, []
    for _ in range(2):
        with record(names) as judging:
            on_real = bce(D(REAL), ones)
            fake = G(torch.randn(12, 3))
            (on_real + bce(D(fake.detach()), zeros)).backward()
            optimizers[1].step()
        with record(names) as making:
            fake = G(torch.randn(12, 3)) if made_again else fake
            bce(D(fake), torch.full((12, 1), label)).backward()
            optimizers[0].step()
        for tape in (judging, making):
            evidence = Evidence(tape, 1, models, optimizers, [1.0], memory=memory)
            said += do_the_players_disagree(evidence)
    return [v.id for v in said if v.id], [v.family for v in said if not v.id]


@pytest.mark.parametrize("made_again", [True, False])
def test_players(made_again):
    assert train(0.0, made_again)[0][:1] == ["loss-scale-or-sign/players-agree"]
    wrong, right = train(1.0, made_again)
    assert not wrong and right[:1] == ["loss-scale-or-sign"]
