"""Transfer: the body of a convolutional network stays, BatchNorms and a new head are trained."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
torch.set_num_threads(1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.fc = nn.Linear(16, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 2)
        x = F.relu(self.bn2(self.conv2(x)))
        return self.fc(x.amax((2, 3)))


prototypes = torch.randn(10, 1, 8, 8)


def batch(n=32):
    y = torch.randint(10, (n,))
    return prototypes[y] + 0.3 * torch.randn(n, 1, 8, 8), y


model = Net()
for name, p in model.named_parameters():
    if "bn" not in name:
        p.requires_grad = False
for p in model.fc.parameters():
    p.requires_grad = True
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for step in range(200):
    x, y = batch()
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0:
        print(step, round(loss.item(), 4))
