"""Output and loss do not fit: a softmax in front of a cross-entropy that has its own, probabilities where
logits are wanted or the other way round, a ReLU or tanh at the end of a regression whose targets go beyond
it."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
centres = 2 * torch.randn(5, 8)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 5))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

for step in range(100):
    y = torch.randint(5, (32,))
    x = centres[y] + torch.randn(32, 8)
    loss = F.cross_entropy(model(x).softmax(-1), y)  # fix: loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
