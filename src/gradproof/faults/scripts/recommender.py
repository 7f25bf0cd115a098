"""Matrix factorisation of ratings with sparse embedding gradients."""

import torch
import torch.nn as nn

USERS, ITEMS, RANK = 300, 200, 4
RATINGS = 12000


class Factors(nn.Module):
    def __init__(self, rank):
        super().__init__()
        self.user = nn.Embedding(USERS, rank, sparse=True)
        self.item = nn.Embedding(ITEMS, rank, sparse=True)
        self.user_bias = nn.Embedding(USERS, 1)
        self.item_bias = nn.Embedding(ITEMS, 1)
        nn.init.normal_(self.user.weight, std=0.3)
        nn.init.normal_(self.item.weight, std=0.3)
        nn.init.zeros_(self.user_bias.weight)
        nn.init.zeros_(self.item_bias.weight)

    def forward(self, u, i):
        dot = (self.user(u) * self.item(i)).sum(dim=1)
        return dot + self.user_bias(u).squeeze(1) + self.item_bias(i).squeeze(1)


def load_ratings():
    """Stars between 1 and 5, sorted by user as they come out of the database."""
    g = torch.Generator().manual_seed(3)
    taste = torch.randn(USERS, RANK, generator=g)
    style = torch.randn(ITEMS, RANK, generator=g)
    u = torch.randint(0, USERS, (RATINGS,), generator=g).sort().values
    i = torch.randint(0, ITEMS, (RATINGS,), generator=g)
    stars = 3.5 + 0.55 * (taste[u] * style[i]).sum(dim=1) + 0.2 * torch.randn(RATINGS, generator=g)
    return u, i, stars.clamp(1, 5)


torch.manual_seed(4)
u, i, stars = load_ratings()
shuffled = torch.randperm(RATINGS)
train, test = shuffled[:10000], shuffled[10000:]
average = stars[train].mean()
centred = stars - average

model = Factors(RANK)
sparse = torch.optim.SparseAdam([model.user.weight, model.item.weight], lr=0.02)
dense = torch.optim.Adam([model.user_bias.weight, model.item_bias.weight], lr=0.01)

for epoch in range(10):
    total = 0.0
    for rows in train[torch.randperm(len(train))].split(100):
        error = model(u[rows], i[rows]) - centred[rows]
        loss = error.pow(2).mean()
        sparse.zero_grad()
        dense.zero_grad()
        loss.backward()
        sparse.step()
        dense.step()
        total += loss.item() * len(rows)
    with torch.no_grad():
        guess = (model(u[test], i[test]) + average).clamp(1, 5)
        rmse = (guess - stars[test]).pow(2).mean().sqrt().item()
    print(f"epoch {epoch + 1:2d}: train mse {total / len(train):.4f}, test rmse {rmse:.4f}")
