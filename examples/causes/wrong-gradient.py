"""A hand-written backward is not the derivative of its forward: a term is missing, a sign or factor is wrong,
an axis is summed that should not be. The loss often still falls, to a worse place."""

import torch
from torch import nn


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return grad * s * (1 - s)  # fix: return grad * (s + x * s * (1 - s))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 32), nn.Linear(32, 1)

    def forward(self, x):
        return self.outer(Swish.apply(self.inner(x)))


torch.manual_seed(0)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(100):
    x = torch.randn(32, 8)
    loss = (model(x) - x.square().mean(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
