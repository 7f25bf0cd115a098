"""Names made of syllables, one character after another: embedding, hidden layer, softmax, and a loop with no frills."""

import random

import torch
import torch.nn.functional as F

random.seed(42)
g = torch.Generator().manual_seed(2147483647)

# some names
heads = ["ma", "li", "jo", "an", "ka", "el", "ro", "ti", "su", "be"]
tails = ["na", "ra", "lia", "nn", "tta", "rik", "bert", "lin", "dra", "mo"]
words = sorted({random.choice(heads) + random.choice(heads) + random.choice(tails) for _ in range(700)})
random.shuffle(words)
chars = sorted(set("".join(words)))
stoi = {s: i + 1 for i, s in enumerate(chars)}
stoi["."] = 0
vocab_size = len(stoi)
block_size = 3


def build_dataset(words):
    X, Y = [], []
    for w in words:
        context = [0] * block_size
        for ch in w + ".":
            X.append(context)
            Y.append(stoi[ch])
            context = context[1:] + [stoi[ch]]
    return torch.tensor(X), torch.tensor(Y)


n1 = int(0.85 * len(words))
Xtr, Ytr = build_dataset(words[:n1])
Xdev, Ydev = build_dataset(words[n1:])

n_embd, n_hidden = 8, 64
C = torch.randn((vocab_size, n_embd), generator=g)
W1 = torch.randn((n_embd * block_size, n_hidden), generator=g) * (5 / 3) / (n_embd * block_size) ** 0.5
b1 = torch.randn(n_hidden, generator=g) * 0.01
W2 = torch.randn((n_hidden, vocab_size), generator=g) * 0.01
b2 = torch.randn(vocab_size, generator=g) * 0
for p in [C, W1, b1, W2, b2]:
    p.requires_grad = True
parameters = [C, W1, b1, W2, b2]
print(sum(p.nelement() for p in parameters), "parameters")


def forward(X):
    emb = C[X]
    h = torch.tanh(emb.view(emb.shape[0], -1) @ W1 + b1)
    return h @ W2 + b2


max_steps, batch_size = 800, 32
for i in range(max_steps):
    ix = torch.randint(0, Xtr.shape[0], (batch_size,), generator=g)
    logits = forward(Xtr[ix])
    loss = F.cross_entropy(logits, Ytr[ix])

    for p in parameters:
        p.grad = None
    loss.backward()

    lr = 0.3 if i < 600 else 0.03
    for p in parameters:
        p.data += -lr * p.grad

    if i % 100 == 0:
        print(f"{i:7d}/{max_steps:7d}: loss {loss.item():.4f}")

with torch.no_grad():
    print(f"dev loss {F.cross_entropy(forward(Xdev), Ydev).item():.4f}")
