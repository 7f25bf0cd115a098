"""A next-token model is trained, then asked to go on from a prompt that is longer than its context."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
torch.set_num_threads(1)
CONTEXT, WORDS = 12, 20


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, 32)
        self.rnn = nn.GRU(32, 48, batch_first=True)
        self.head = nn.Linear(48, WORDS)

    def forward(self, ids):
        return self.head(self.rnn(self.embed(ids))[0])

    @torch.no_grad()
    def generate(self, prompt, max_new_tokens):
        """At most so many tokens after the prompt, of which the end is read."""
        kept = prompt[-CONTEXT // 2 :]
        total = len(kept) + max_new_tokens
        ids = kept
        while len(ids) < total:
            ids = torch.cat([ids, self(ids[None, -CONTEXT:])[0, -1].argmax()[None]])
        return ids[len(kept) :]


def batch(n=32):
    start, stride = torch.randint(WORDS, (n, 1)), torch.randint(1, 4, (n, 1))
    return (start + stride * torch.arange(CONTEXT + 1)) % WORDS


model = Model()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(150):
    ids = batch()
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0:
        print(step, round(loss.item(), 4))
model.eval()
print(len(model.generate(torch.arange(40) % WORDS, max_new_tokens=10)), "tokens")
