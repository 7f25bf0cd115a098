"""Three-arm spirals and a small MLP, pasted together from a notebook."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)

# %% data
n_classes, per_class = 3, 500
points, labels = [], []
for c in range(n_classes):
    radius = torch.linspace(0.1, 1.0, per_class)
    angle = torch.linspace(0, 4, per_class) + c * 2 * math.pi / 3 + 0.12 * torch.randn(per_class)
    points.append(torch.stack([radius * angle.sin(), radius * angle.cos()], dim=1))
    labels.append(torch.full((per_class,), c))
X = torch.cat(points) / 0.4
y = torch.cat(labels)
order = torch.randperm(len(X))
X, y = X[order], y[order]
X_train, y_train = X[:1200], y[:1200]
X_val, y_val = X[1200:], y[1200:]


# %% model
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(2, 64)
        self.fc2 = nn.Linear(64, 64)
        self.out = nn.Linear(64, n_classes)
        self.drop = nn.Dropout(0.05)

    def forward(self, x):
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        x = self.drop(x)
        return self.out(x)


net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
print(sum(p.numel() for p in net.parameters()), "parameters")

# %% training
batch_size = 48
for epoch in range(40):
    net.train()
    perm = torch.randperm(len(X_train))
    running = 0.0
    for i in range(0, len(X_train), batch_size):
        idx = perm[i : i + batch_size]
        optimizer.zero_grad()
        logits = net(X_train[idx])
        loss = F.cross_entropy(logits, y_train[idx])
        loss.backward()
        optimizer.step()
        running += loss.item() * len(idx)
    if epoch % 5 == 4:
        print(f"epoch {epoch + 1:3d}  loss {running / len(X_train):.4f}")

# %% validation
net.eval()
with torch.no_grad():
    val_logits = net(X_val)
    val_loss = F.cross_entropy(val_logits, y_val).item()
    val_acc = (val_logits.argmax(dim=1) == y_val).float().mean().item()
print(f"val_loss {val_loss:.4f} val_acc {val_acc:.4f}")
