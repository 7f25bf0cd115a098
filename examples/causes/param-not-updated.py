"""Parameters that should train do not: they are not in the optimizer, were replaced after it was made, sit in
a plain list where no module finds them, are frozen by mistake, or are never used."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        layers = [nn.Linear(8, 32), nn.Linear(32, 32)]
        self.layers = layers  # fix: self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(32, 1)

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x)


torch.manual_seed(0)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(100):
    x = torch.randn(32, 8)
    loss = (model(x) - x.square().sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
