"""A curve fitted without objects: parameters in, gradients out, new parameters."""

import torch
from torch import nn
from torch.func import functional_call, grad_and_value

torch.manual_seed(3)
x = torch.rand(512, 1) * 6 - 3
y = torch.sin(2 * x) + 0.3 * x + 0.05 * torch.randn_like(x)
x_test = torch.linspace(-3, 3, 200)[:, None]
y_test = torch.sin(2 * x_test) + 0.3 * x_test

net = nn.Sequential(nn.Linear(1, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 1))


def compute_loss(params, inputs, targets):
    predictions = functional_call(net, params, (inputs,))
    return ((predictions - targets) ** 2).mean()


def sgd(params, grads, lr):
    return {name: value - lr * grads[name] for name, value in params.items()}


def fit(params, epochs, lr):
    for epoch in range(epochs):
        order = torch.randperm(len(x))
        for rows in order.split(64):
            grads, loss = grad_and_value(compute_loss)(params, x[rows], y[rows])
            params = sgd(params, grads, lr)
        if epoch % 20 == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")
    return params


start = {name: value.detach() for name, value in net.named_parameters()}
fitted = fit(start, epochs=100, lr=0.1)
with torch.no_grad():
    error = ((functional_call(net, fitted, (x_test,)) - y_test) ** 2).mean().item()
print(f"test mse {error:.4f}")
