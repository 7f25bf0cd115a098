"""A net of single numbers: every weight is a value of its own, after a lecture on backpropagation."""

import math
import random

import torch

random.seed(1337)
torch.manual_seed(1337)


class Neuron:
    def __init__(self, inputs, bent=True):
        self.w = [torch.tensor(random.uniform(-1, 1), requires_grad=True) for _ in range(inputs)]
        self.b = torch.tensor(0.0, requires_grad=True)
        self.bent = bent

    def __call__(self, x):
        act = sum(wi * xi for wi, xi in zip(self.w, x)) + self.b
        return act.tanh() if self.bent else act

    def parameters(self):
        return self.w + [self.b]


class Layer:
    def __init__(self, inputs, outputs, **kwargs):
        self.neurons = [Neuron(inputs, **kwargs) for _ in range(outputs)]

    def __call__(self, x):
        out = [n(x) for n in self.neurons]
        return out[0] if len(out) == 1 else out

    def parameters(self):
        return [p for n in self.neurons for p in n.parameters()]


class MLP:
    def __init__(self, inputs, outputs):
        sizes = [inputs] + outputs
        self.layers = [Layer(sizes[i], sizes[i + 1], bent=i != len(outputs) - 1) for i in range(len(outputs))]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    def parameters(self):
        return [p for layer in self.layers for p in layer.parameters()]

    def zero_grad(self):
        for p in self.parameters():
            p.grad = None


# two moons
half = 60
angle = torch.rand(2 * half) * math.pi
upper = torch.arange(2 * half) < half
px = torch.where(upper, angle.cos(), 1 - angle.cos()) + 0.1 * torch.randn(2 * half) + 0.5
py = torch.where(upper, angle.sin(), 0.5 - angle.sin()) + 0.1 * torch.randn(2 * half)
label = torch.where(upper, 1.0, -1.0)

model = MLP(2, [8, 8, 1])
print(len(model.parameters()), "values")

steps = 150
for k in range(steps):
    pick = torch.randperm(2 * half)[:48]
    score = model([px[pick], py[pick]])
    data_loss = (1 - label[pick] * score).relu().mean()
    reg_loss = 1e-4 * sum(p * p for p in model.parameters())
    total_loss = data_loss + reg_loss

    model.zero_grad()
    total_loss.backward()

    learning_rate = 0.5 - 0.4 * k / steps
    for p in model.parameters():
        p.data -= learning_rate * p.grad

    if k % 25 == 0:
        print(f"step {k} loss {total_loss.item():.4f}")

with torch.no_grad():
    score = model([px, py])
    hinge = (1 - label * score).relu().mean().item()
    accuracy = ((score > 0) == (label > 0)).float().mean().item()
print(f"all points: hinge {hinge:.4f} accuracy {accuracy:.4f}")
