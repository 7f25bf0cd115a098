"""Two loaders that hand out the halves of pairs, in one order or each in its own."""

import pytest
import torch
import torch.nn.functional as F
from experiment_steps import confirmed_ids, evidence_of
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gradproof.diagnosis.ranking import diagnose
from gradproof.experiments.data.loaders import ID, do_two_loaders_go_together
from gradproof.experiments.data.targets import do_targets_belong_to_inputs
from gradproof.probes.loaders import describe
from gradproof.probes.watch import watch

SCENES, CAPTIONS, NUMBERS = torch.randn(40, 6), torch.randn(40, 5), torch.randn(40, 3)


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.scene, self.caption = nn.Linear(6, 4), nn.Linear(5, 4)

    def forward(self, scene, caption):
        return self.scene(scene) @ self.caption(caption).t()


def contrast(model, scene, caption):
    return F.cross_entropy(model(scene, caption), torch.arange(len(scene)))


def batches(*halves):
    """Rows of data as loaders hand them out, and the facts that the probe notes of them."""
    parts = [data[rows] for data, rows in halves]
    noted = {
        i: describe(rows.tolist(), range(40), part)
        for i, ((_, rows), part) in enumerate(zip(halves, parts, strict=True))
    }
    return parts, {"_fetched": noted}


def test_halves_of_pairs_from_two_loaders():
    model, rows = Towers(), torch.randperm(40)
    (scene, caption), facts = batches((SCENES, rows[:10]), (CAPTIONS, rows[10:20]))
    wrong = evidence_of(model, lambda: contrast(model, scene, caption), facts=facts)
    assert confirmed_ids(do_two_loaders_go_together, wrong) == [ID]
    (scene, caption), facts = batches((SCENES, rows[:10]), (CAPTIONS, rows[:10]))
    right = evidence_of(model, lambda: contrast(model, scene, caption), facts=facts)
    assert not confirmed_ids(do_two_loaders_go_together, right)


def test_targets_from_a_loader_of_their_own():
    model, rows = nn.Linear(6, 3), torch.randperm(40)
    (x, y), facts = batches((SCENES, rows[:10]), (NUMBERS, rows[10:20]))
    wrong = evidence_of(model, lambda: F.mse_loss(model(x.float()), 0.5 * y), facts=facts)
    assert confirmed_ids(do_two_loaders_go_together, wrong) == [ID]


def test_loaders_that_are_not_meant_as_pairs():
    """Two domains with labels of their own, noise and data with the way from one to the other, features on average."""
    model, rows = nn.Linear(6, 6), torch.randperm(40)
    domains = (SCENES, rows[:10]), (SCENES + 1, rows[10:20])
    (a, b), facts = batches(*domains)

    def flow_matching():
        return F.mse_loss(model(0.3 * a + 0.7 * b), b - a)

    def on_average():
        return F.mse_loss(model(a).mean(0), b.mean(0))

    def each_its_own():
        return F.mse_loss(model(a), a) + F.mse_loss(model(b), b)

    for loss in (flow_matching, on_average, each_its_own):
        assert not confirmed_ids(do_two_loaders_go_together, evidence_of(model, loss, facts=facts)), loss


def diagnosed(path, loader):
    torch.manual_seed(0)
    model = Towers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with watch(model, optimizer, out=path):
        for _ in range(2):
            for scene, caption in loader:
                optimizer.zero_grad()
                contrast(model, scene, caption).backward()
                optimizer.step()
    return {cause.id for cause in diagnose(path).causes if cause.level == "problem"}


class Zipped:
    def __init__(self, shuffle, **options):
        self.loaders = [DataLoader(d, batch_size=10, shuffle=shuffle, **options) for d in (SCENES, CAPTIONS)]

    def __iter__(self):
        return zip(*self.loaders, strict=True)


def test_loaders_of_a_training(tmp_path):
    assert ID in diagnosed(tmp_path / "a", Zipped(shuffle=True))
    assert ID not in diagnosed(tmp_path / "b", Zipped(shuffle=False))
    together = DataLoader(TensorDataset(SCENES, CAPTIONS), batch_size=10, shuffle=True)
    assert ID not in diagnosed(tmp_path / "c", together)


@pytest.mark.parametrize("persistent", [True, False])
def test_loaders_with_workers_that_read_ahead(tmp_path, persistent):
    """What a worker has read is handed out later; an epoch that is left early leaves some of it behind."""
    options = {"num_workers": 1, "prefetch_factor": 3, "persistent_workers": persistent}
    apart, in_order = (Zipped(shuffle, **options) for shuffle in (True, False))
    for loaders in (apart, in_order):
        next(iter(loaders))
    assert ID in diagnosed(tmp_path / "a", apart)
    assert ID not in diagnosed(tmp_path / "b", in_order)


def test_halves_of_pairs_cut_with_different_rows():
    model = Towers()

    def step(one, other):
        return evidence_of(model, lambda: contrast(model, SCENES[one], CAPTIONS[other]))

    rows = torch.randperm(40)
    ids = confirmed_ids(do_targets_belong_to_inputs, step(rows[:10], rows[10:20]))
    assert ids == ["data-target-misaligned/rows-of-another-batch"]
    assert not confirmed_ids(do_targets_belong_to_inputs, step(rows[:10], rows[:10]))
