"""A plain recurrent network has to remember the first symbol of a long sequence."""

import torch
import torch.nn as nn

SYMBOLS, LENGTH, HIDDEN = 10, 30, 48


class Cell(nn.Module):
    def __init__(self, inputs, hidden):
        super().__init__()
        self.wx = nn.Linear(inputs, hidden, bias=False)
        self.wh = nn.Linear(hidden, hidden, bias=False)
        nn.init.orthogonal_(self.wh.weight, gain=1.0)

    def forward(self, x, h):
        return torch.tanh(self.wx(x) + self.wh(h))


class RNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(SYMBOLS, 16, padding_idx=8)
        self.cell = Cell(16, HIDDEN)
        self.readout = nn.Linear(HIDDEN, SYMBOLS)

    def forward(self, seq):
        h = torch.zeros(seq.size(0), HIDDEN)
        for t in range(seq.size(1)):
            h = self.cell(self.embed(seq[:, t]), h)
        return self.readout(h)


def batch(n, g):
    """The first symbol is one of eight; then comes silence (8), with a click (9) now and then."""
    seq = 8 + (torch.rand(n, LENGTH, generator=g) < 0.05).long()
    first = torch.randint(0, 8, (n,), generator=g)
    seq[:, 0] = first
    return seq, first


torch.manual_seed(81)
g = torch.Generator().manual_seed(82)
model = RNN()
criterion = nn.CrossEntropyLoss()
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
history = []
for step in range(300):
    seq, first = batch(32, g)
    loss = criterion(model(seq), first)
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    history.append(loss.item())
    if (step + 1) % 50 == 0:
        print("step", step + 1, "loss", round(sum(history[-50:]) / 50, 4))

seq, first = batch(500, g)
with torch.no_grad():
    print("recall", round((model(seq).argmax(1) == first).float().mean().item(), 4))
