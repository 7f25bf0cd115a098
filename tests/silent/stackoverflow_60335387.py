"""A convolutional network for small images of ten kinds."""

import torch
import torch.nn as nn

torch.manual_seed(0)
torch.set_num_threads(1)
prototypes = torch.randn(10, 1, 8, 8)
model = nn.Sequential(
    nn.Conv2d(1, 8, 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Linear(128, 64),
    nn.ReLU(),
    nn.Linear(64, 10),
)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(200):
    y = torch.randint(10, (32,))
    x = prototypes[y] + torch.randn(32, 1, 8, 8)
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
    if step % 50 == 0:
        print(step, round(loss.item(), 4))
