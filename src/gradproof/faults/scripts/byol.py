"""Self-supervised features of short waveforms with a momentum teacher."""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

LENGTH = 64
CLASSES = 6


def waveforms(count, seed):
    """Classes differ in frequency and in the strength of a harmonic; phase and volume do not matter."""
    g = torch.Generator().manual_seed(seed)
    label = torch.randint(0, CLASSES, (count,), generator=g)
    time = torch.linspace(0, 1, LENGTH)
    freq = (2 + 1.5 * label.float())[:, None]
    phase = 6.28 * torch.rand(count, 1, generator=g)
    volume = 0.5 + torch.rand(count, 1, generator=g)
    wave = torch.sin(6.28 * freq * time + phase) + 0.5 * (label % 2)[:, None] * torch.sin(
        12.56 * freq * time + phase
    )
    return volume * wave + 0.3 * torch.randn(count, LENGTH, generator=g), label


def view(x):
    shift = int(torch.randint(0, LENGTH, (1,)))
    gain = 0.5 + torch.rand(len(x), 1)
    return gain * torch.roll(x, shift, dims=1) + 0.2 * torch.randn_like(x)


class Backbone(nn.Module):
    def __init__(self, out=32):
        super().__init__()
        self.conv1 = nn.Conv1d(1, 16, 9, padding=4)
        self.bn1 = nn.BatchNorm1d(16)
        self.conv2 = nn.Conv1d(16, 32, 5, stride=2, padding=2)
        self.bn2 = nn.BatchNorm1d(32)
        self.fc = nn.Linear(32, out)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x.unsqueeze(1))))
        x = F.relu(self.bn2(self.conv2(x)))
        return self.fc(x.mean(dim=2))


class Projected(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = Backbone()
        self.projector = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 16))

    def forward(self, x):
        return self.projector(self.backbone(x))


class BYOL(nn.Module):
    def __init__(self, momentum=0.98):
        super().__init__()
        self.student = Projected()
        self.teacher = copy.deepcopy(self.student)
        self.predictor = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 16))
        self.momentum = momentum

    def loss(self, a, b):
        predicted = F.normalize(self.predictor(self.student(a)), dim=1)
        with torch.no_grad():
            target = F.normalize(self.teacher(b), dim=1)
        return (2 - 2 * (predicted * target).sum(dim=1)).mean()

    @torch.no_grad()
    def update_teacher(self):
        for slow, fast in zip(self.teacher.parameters(), self.student.parameters()):
            slow.lerp_(fast, 1 - self.momentum)


def evaluate(model, train, test):
    """Five nearest neighbours in the backbone's features, and how much the features vary."""
    model.eval()
    with torch.no_grad():
        raw = model.student.backbone(train[0])
        a, b = F.normalize(raw, dim=1), F.normalize(model.student.backbone(test[0]), dim=1)
        votes = train[1][(b @ a.t()).topk(5, dim=1).indices]
        spread = F.normalize(model.student(train[0]), dim=1).std(dim=0).mean().item()
    model.train()
    return (votes.mode(dim=1).values == test[1]).float().mean().item(), spread


def main():
    torch.manual_seed(23)
    train, test = waveforms(480, 1), waveforms(240, 2)
    model = BYOL()
    trainable = list(model.student.parameters()) + list(model.predictor.parameters())
    optimizer = torch.optim.Adam(trainable, lr=2e-3)
    for epoch in range(1, 31):
        total = 0.0
        for idx in torch.randperm(480).split(60):
            x = train[0][idx]
            a, b = view(x), view(x)
            loss = model.loss(a, b) + model.loss(b, a)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            model.update_teacher()
            total += loss.item()
        if epoch % 5 == 0:
            knn, spread = evaluate(model, train, test)
            print(f"epoch {epoch} loss {total / 8:.4f} knn {knn:.3f} spread {spread:.4f}")


if __name__ == "__main__":
    main()
