"""A small convolutional network that tells four kinds of drawn shapes apart."""

import torch
from torch import nn, optim
from torch.utils.data import DataLoader, Dataset

EPOCHS = 6
BATCH = 32
CLASSES = ("row", "column", "square", "cross")


def draw(kind, generator):
    """One 16 x 16 grey image, values 0 to 255."""
    img = torch.randint(0, 120, (16, 16), generator=generator)
    size = int(torch.randint(4, 8, (1,), generator=generator))
    top = int(torch.randint(0, 16 - size, (1,), generator=generator))
    left = int(torch.randint(0, 16 - size, (1,), generator=generator))
    ink = int(torch.randint(110, 256, (1,), generator=generator))
    middle = size // 2
    if kind == 0:
        img[top + middle, left : left + size] = ink
    elif kind == 1:
        img[top : top + size, left + middle] = ink
    elif kind == 2:
        img[top, left : left + size] = ink
        img[top + size - 1, left : left + size] = ink
        img[top : top + size, left] = ink
        img[top : top + size, left + size - 1] = ink
    else:
        img[top + middle, left : left + size] = ink
        img[top : top + size, left + middle] = ink
    return img.to(torch.uint8)


class Shapes(Dataset):
    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(0, len(CLASSES), (count,), generator=generator)
        self.images = torch.stack([draw(int(k), generator) for k in self.labels])

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = self.images[index].float() / 255
        image = (image - 0.27) / 0.2
        return image.unsqueeze(0), self.labels[index]


class ConvNet(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 12, 3, padding=1, bias=False),
            nn.BatchNorm2d(12),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(12, 24, 3, padding=1, bias=False),
            nn.BatchNorm2d(24),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(24, 32, 3, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
        )
        self.dropout = nn.Dropout(0.1)
        self.classifier = nn.Linear(32, num_classes)

    def forward(self, x):
        x = self.features(x)
        x = x.mean(dim=(2, 3))
        x = self.dropout(x)
        return self.classifier(x)


def train_one_epoch(model, loader, criterion, optimizer):
    model.train()
    total, seen = 0.0, 0
    for images, labels in loader:
        optimizer.zero_grad()
        outputs = model(images)
        loss = criterion(outputs, labels)
        loss.backward()
        optimizer.step()
        total += loss.item() * len(labels)
        seen += len(labels)
    return total / seen


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    correct, seen = 0, 0
    for images, labels in loader:
        predicted = model(images).argmax(dim=1)
        correct += (predicted == labels).sum().item()
        seen += len(labels)
    return correct / seen


def main():
    torch.manual_seed(3)
    train_set = Shapes(1200, seed=1)
    val_set = Shapes(400, seed=2)
    train_loader = DataLoader(train_set, batch_size=BATCH, shuffle=True)
    val_loader = DataLoader(val_set, batch_size=100)

    model = ConvNet(len(CLASSES))
    criterion = nn.CrossEntropyLoss()
    optimizer = optim.SGD(model.parameters(), lr=0.03, momentum=0.9, weight_decay=5e-4)
    scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.2)

    print(f"untrained - val acc: {evaluate(model, val_loader):.4f}")
    for epoch in range(EPOCHS):
        loss = train_one_epoch(model, train_loader, criterion, optimizer)
        scheduler.step()
        acc = evaluate(model, val_loader)
        print(f"Epoch {epoch + 1}/{EPOCHS} - train loss: {loss:.4f} - val acc: {acc:.4f}")


if __name__ == "__main__":
    main()
