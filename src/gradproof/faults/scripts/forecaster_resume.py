"""Forecast a seasonal series with dilated convolutions; train in two sittings with a checkpoint between."""

import copy
import os
import tempfile

import torch
import torch.nn as nn

WINDOW = 48
STEPS_PER_SITTING = 150


def make_series(length=3000):
    g = torch.Generator().manual_seed(71)
    t = torch.arange(length).float()
    season = 3 * torch.sin(2 * torch.pi * t / 24) + 1.5 * torch.sin(2 * torch.pi * t / 7)
    drift = torch.cumsum(0.05 * torch.randn(length, generator=g), dim=0)
    return 180 + 25 * season + 10 * drift + 4 * torch.randn(length, generator=g)


class CausalConv(nn.Module):
    def __init__(self, channels, dilation):
        super().__init__()
        self.pad = 2 * dilation
        self.conv = nn.Conv1d(channels, channels, 3, dilation=dilation)

    def forward(self, x):
        return x + torch.relu(self.conv(nn.functional.pad(x, (self.pad, 0))))


class Forecaster(nn.Module):
    def __init__(self, channels=24):
        super().__init__()
        self.inp = nn.Conv1d(1, channels, 1)
        self.body = nn.Sequential(*[CausalConv(channels, d) for d in (1, 2, 4, 8)])
        self.out = nn.Linear(channels, 1)

    def forward(self, window):
        h = self.body(self.inp(window.unsqueeze(1)))
        return self.out(h[:, :, -1]).squeeze(1)


def windows(series, starts):
    x = torch.stack([series[s : s + WINDOW] for s in starts])
    y = torch.stack([series[s + WINDOW] for s in starts])
    return x, y


def build():
    model = Forecaster()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.995)
    return model, optimizer, scheduler


def validation_loss(model, series):
    x, y = windows(series, range(2400, 2900, 5))
    with torch.no_grad():
        return (model(x) - y).pow(2).mean().item()


def fit(model, optimizer, scheduler, series, best, first_step):
    for step in range(first_step, first_step + STEPS_PER_SITTING):
        x, y = windows(series, torch.randint(0, 2300, (32,)).tolist())
        loss = (model(x) - y).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if step % 10 == 9:
            val = validation_loss(model, series)
            if val < best["val"]:
                best = {"val": val, "weights": copy.deepcopy(model.state_dict())}
            print(
                f"step {step + 1} train {loss.item():.5f} val {val:.5f} lr {scheduler.get_last_lr()[0]:.2e}"
            )
    return best


def main():
    torch.manual_seed(72)
    raw = make_series()
    series = (raw - raw[:2300].mean()) / raw[:2300].std()
    path = os.path.join(tempfile.mkdtemp(), "checkpoint.pt")

    model, optimizer, scheduler = build()
    best = fit(model, optimizer, scheduler, series, {"val": float("inf"), "weights": None}, 0)
    torch.save(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
        },
        path,
    )

    print("resuming from checkpoint")
    model, optimizer, scheduler = build()
    saved = torch.load(path)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"])
    print(f"val at resume {validation_loss(model, series):.5f}")
    best = fit(model, optimizer, scheduler, series, best, STEPS_PER_SITTING)

    model.load_state_dict(best["weights"])
    x, y = windows(series, range(2850, 2950))
    with torch.no_grad():
        print(f"best val {best['val']:.5f}, reloaded val {validation_loss(model, series):.5f}")
        print(f"test mse {(model(x) - y).pow(2).mean().item():.5f}")


if __name__ == "__main__":
    main()
