"""A cascade of small transformer stages that cleans noisy multichannel signals, stage by stage."""

import torch
import torch.nn as nn

STEPS = 200
BATCH, T, D = 16, 24, 16
STAGES = 3
WIDTH = 48


class RMSNormFunction(torch.autograd.Function):
    """y = x / rms(x) * weight, with one saved tensor less than autograd would keep."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        inv = torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, inv)
        return x * inv * weight

    @staticmethod
    def backward(ctx, dy):
        x, weight, inv = ctx.saved_tensors
        normed = x * inv
        dweight = (dy * normed).sum(dim=(0, 1))
        dnormed = dy * weight
        dx = inv * (dnormed - normed * (dnormed * normed).mean(dim=-1, keepdim=True))
        return dx, dweight, None


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        return RMSNormFunction.apply(x, self.weight, self.eps)


def rms(x):
    return x.pow(2).mean(dim=(1, 2), keepdim=True).sqrt()


class Stage(nn.Module):
    def __init__(self, in_dim):
        super().__init__()
        self.input_proj = nn.Linear(in_dim, WIDTH)
        self.pos = nn.Parameter(0.02 * torch.randn(1, T, WIDTH))
        self.norm1 = RMSNorm(WIDTH)
        self.attn = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.norm2 = RMSNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.post_norm = RMSNorm(WIDTH)
        self.output_proj = nn.Linear(WIDTH, D)

    def forward(self, noisy, previous):
        x = self.input_proj(torch.cat([noisy, previous], dim=-1)) + self.pos
        h = self.norm1(x)
        x = x + self.attn(h, h, h, need_weights=False)[0]
        x = x + self.mlp(self.norm2(x))
        out = self.output_proj(self.post_norm(x))
        out = previous + out
        scale = rms(noisy) / (rms(out) + 1e-3)
        return out * scale.clamp(max=2.0)


class Cascade(nn.Module):
    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList([Stage(2 * D) for _ in range(STAGES)])

    def forward(self, noisy):
        outputs = []
        current = torch.zeros_like(noisy)
        for stage in self.stages:
            current = stage(noisy, current)
            outputs.append(current)
        return outputs


def make_batch(generator, count=BATCH):
    """Smooth signals mixed over channels, and the same with noise on top."""
    time = torch.linspace(0, 1, T).view(1, T, 1)
    freq = torch.rand(count, 1, 3, generator=generator) * 4 + 1
    phase = torch.rand(count, 1, 3, generator=generator) * 6.28
    mixing = torch.linspace(-1, 1, 3 * D).view(3, D).sin() * 2
    clean = torch.sin(6.28 * freq * time + phase) @ mixing
    noisy = clean + 0.7 * torch.randn(clean.shape, generator=generator)
    return noisy, clean


def main():
    torch.manual_seed(11)
    generator = torch.Generator().manual_seed(12)
    model = Cascade()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    for step in range(1, STEPS + 1):
        noisy, clean = make_batch(generator)
        outputs = model(noisy)
        loss = sum((out - clean).pow(2).mean() for out in outputs) / STAGES
        optimizer.zero_grad()
        loss.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step} loss {loss.item():.4f} grad norm {grad_norm.item():.3f}")
    with torch.no_grad():
        noisy, clean = make_batch(generator, 128)
        error = (model(noisy)[-1] - clean).pow(2).mean().item()
    print(f"test mse {error:.4f} (noise {(noisy - clean).pow(2).mean().item():.4f})")


if __name__ == "__main__":
    main()
