"""Images mirrored without their maps; and both mirrored, labels, symmetric maps, tasks of putting things back."""

import pytest
import torch
import torch.nn.functional as F
from taped_trainings import examine, ids, plain_step
from torch import nn
from torch.utils.data import DataLoader, Dataset

import gradproof
from gradproof.experiments.data.one_sided import ID, is_one_side_augmented


def found(make_batch, model=None, loss=F.mse_loss, steps=8):
    """Steps over 8 samples, always the same ones, each time augmented by `make_batch(images, maps)`."""
    torch.manual_seed(0)
    model = model or nn.Conv2d(1, 1, 3, padding=1)
    images, maps = torch.randn(8, 1, 8, 8), torch.zeros(8, 1, 8, 8)
    maps[:, :, 1:4, 1:3] = 1
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def make_loss():
        x, y = make_batch(images, maps)
        return loss(model(x), y)

    return examine(
        is_one_side_augmented, model, optimizer, plain_step(model, optimizer, make_loss), steps=steps
    )


def sometimes(turn, x, other=None):
    """Some samples turned: the images, and with them their maps where these are given."""
    chosen = torch.rand(len(x), 1, 1, 1) < 0.5
    turned = torch.where(chosen, turn(x), x)
    return turned if other is None else (turned, torch.where(chosen, turn(other), other))


TURNS = (
    lambda x: x.flip(-1),
    lambda x: x.flip(-2),
    lambda x: x.rot90(1, (-2, -1)),
    lambda x: x.roll(3, -1),
)


@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize("side", ["image", "map", "both"])
def test_one_side_turned(turn, side):
    def batch(x, y):
        if side == "both":
            return sometimes(turn, x, y)
        return (sometimes(turn, x), y) if side == "image" else (x, sometimes(turn, y))

    assert ids(found(batch)) == (set() if side == "both" else {ID})


def test_a_map_that_is_symmetric_may_stay():
    def batch(x, y):
        even = torch.zeros_like(y)
        even[:, :, 2:6, 2:6] = 1
        return sometimes(TURNS[0], x), even

    assert not ids(found(batch))


def test_noise_on_the_image_is_denoising():
    assert not ids(found(lambda x, y: (x + 0.1 * torch.randn_like(x), x)))


def test_turning_back_is_a_task():
    assert not ids(found(lambda x, y: (sometimes(TURNS[0], x), x)))


def test_a_label_stays_when_its_image_is_mirrored():
    model, labels = nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), torch.arange(8) % 3
    assert not found(lambda x, y: (sometimes(TURNS[0], x), labels), model, F.cross_entropy)


class Pictures(Dataset):
    def __init__(self, both):
        self.images, self.maps, self.both = torch.randn(40, 1, 8, 8), torch.zeros(40, 1, 8, 8), both
        self.maps[:, :, 1:4, 1:3] = 1

    def __len__(self):
        return 40

    def __getitem__(self, i):
        image, map = self.images[i], self.maps[i]
        if torch.rand(()) < 0.5:
            image, map = image.flip(-1), map.flip(-1) if self.both else map
        return image, map


@pytest.mark.parametrize("both", [True, False])
def test_what_a_loader_hands_out_twice(tmp_path, both):
    torch.manual_seed(0)
    model = nn.Conv2d(1, 1, 3, padding=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(Pictures(both), batch_size=8, shuffle=True)
    with gradproof.watch(model, optimizer, out=tmp_path / "run"):
        for _ in range(4):
            for image, map in loader:
                optimizer.zero_grad()
                F.mse_loss(model(image), map).backward()
                optimizer.step()
    causes = {c.id: c for c in gradproof.diagnose(tmp_path / "run").causes}
    assert (ID in causes) is not both


def discs(size=24, count=16):
    """Pictures with noise, each with a bright disc somewhere, and the mask of it; never twice the same."""
    y, x = torch.arange(size)[:, None], torch.arange(size)
    down, right, radius = (
        torch.randint(*span, (count, 1, 1)) for span in ((4, size - 4), (4, size - 4), (2, 5))
    )
    mask = ((y - down) ** 2 + (x - right) ** 2 <= radius**2).float()[:, None]
    return mask * (0.5 + torch.rand(count, 1, 1, 1)) + 0.1 * torch.randn(count, 1, size, size), mask


def shift_each(x, by):
    return torch.stack(
        [one.roll(tuple(amount), (-2, -1)) for one, amount in zip(x, by.tolist(), strict=True)]
    )


def moved_apart(image, mask):
    by = torch.randint(-7, 8, (len(image), 2))
    return shift_each(image, by), shift_each(mask, by.flip(1))  # rows and columns exchanged


def moved_together(image, mask):
    by = torch.randint(-7, 8, (len(image), 2))
    return shift_each(image, by), shift_each(mask, by)


def mirrored_alone(image, mask):
    chosen = torch.rand(len(image), 1, 1, 1) < 0.5
    return torch.where(chosen, image.flip(-1), image) * (0.8 + 0.4 * torch.rand(len(image), 1, 1, 1)), mask


def masks(change, loss=F.binary_cross_entropy_with_logits):
    def batch(images, maps):
        image, mask = change(*discs())
        return image, mask

    return ids(found(batch, loss=loss, steps=3))


def test_masks_that_lie_beside_what_they_mark():
    assert masks(moved_apart) == {ID} and masks(mirrored_alone) == {ID}


def test_masks_that_lie_where_they_should():
    assert masks(moved_together) == set() and masks(lambda image, mask: (image, mask)) == set()
    assert masks(lambda image, mask: (torch.randn_like(image), mask)) == set()  # nothing to be seen there
    assert (
        masks(lambda image, mask: (mask, moved_together(mask, mask)[0])) == set()
    )  # the next picture of a film
    film = lambda image, mask: (image, image.roll(4, -1))  # noqa: E731
    assert masks(film, F.mse_loss) == set()
