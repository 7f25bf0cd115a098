"""An autoencoder whose layers are hand-written autograd functions, to save activations."""

import math

import torch
import torch.nn as nn


class LinearFn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return x @ weight.t() + bias

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x, grad.sum(dim=0)


class GeluFn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        cdf = 0.5 * (1 + torch.erf(x / math.sqrt(2)))
        pdf = torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
        return grad * (cdf + x * pdf)


class LayerNormFn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gain, shift, eps):
        mean = x.mean(dim=-1, keepdim=True)
        inv = torch.rsqrt(x.var(dim=-1, keepdim=True, unbiased=False) + eps)
        xhat = (x - mean) * inv
        ctx.save_for_backward(xhat, inv, gain)
        return xhat * gain + shift

    @staticmethod
    def backward(ctx, grad):
        xhat, inv, gain = ctx.saved_tensors
        dxhat = grad * gain
        dx = dxhat - dxhat.mean(dim=-1, keepdim=True) - xhat * (dxhat * xhat).mean(dim=-1, keepdim=True)
        return dx * inv, (grad * xhat).sum(dim=0), grad.sum(dim=0), None


class Linear(nn.Module):
    def __init__(self, fan_in, fan_out):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(fan_out, fan_in) / math.sqrt(fan_in))
        self.bias = nn.Parameter(torch.zeros(fan_out))

    def forward(self, x):
        return LinearFn.apply(x, self.weight, self.bias)


class Norm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(dim))
        self.shift = nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        return LayerNormFn.apply(x, self.gain, self.shift, 1e-5)


class Gelu(nn.Module):
    def forward(self, x):
        return GeluFn.apply(x)


def block(a, b):
    return nn.Sequential(Linear(a, b), Norm(b), Gelu())


class AutoEncoder(nn.Module):
    def __init__(self, dim=40, hidden=64, code=5):
        super().__init__()
        self.encoder = nn.Sequential(block(dim, hidden), block(hidden, hidden), Linear(hidden, code))
        self.decoder = nn.Sequential(block(code, hidden), block(hidden, hidden), Linear(hidden, dim))

    def forward(self, x):
        code = self.encoder(x)
        return self.decoder(code), code


def make_data(n, generator):
    """Points on a curved five-dimensional sheet in forty dimensions."""
    fixed = torch.Generator().manual_seed(77)
    first = torch.randn(5, 30, generator=fixed) / math.sqrt(5)
    second = torch.randn(30, 40, generator=fixed) / math.sqrt(10)
    return torch.tanh(1.5 * torch.randn(n, 5, generator=generator) @ first) @ second


def train(steps=600, batch=64):
    torch.manual_seed(13)
    g = torch.Generator().manual_seed(14)
    test = make_data(500, g)
    model = AutoEncoder()
    opt = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    print("variance of the data", round(test.var().item(), 4))
    for step in range(steps):
        x = make_data(batch, g)
        reconstruction, code = model(x)
        loss = (reconstruction - x).pow(2).mean() + 1e-4 * code.pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 50 == 0:
            print(f"iter={step} loss={loss.item():.5f}")
    with torch.no_grad():
        print(f"test error={(model(test)[0] - test).pow(2).mean().item():.5f}")


if __name__ == "__main__":
    train()
