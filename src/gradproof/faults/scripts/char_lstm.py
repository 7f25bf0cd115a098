"""Character-level language model with an LSTM, trained by truncated backpropagation through time."""

import argparse
import math
import random

import torch
import torch.nn as nn
from torch.nn.utils import clip_grad_norm_

SUBJECTS = ["the cat", "a dog", "my sister", "the old king", "our teacher"]
VERBS = ["sees", "likes", "paints", "follows"]
OBJECTS = ["the moon", "a red house", "the river", "an apple tree", "a small boat"]


def make_text(sentences, seed):
    rng = random.Random(seed)
    return "".join(
        f"{rng.choice(SUBJECTS)} {rng.choice(VERBS)} {rng.choice(OBJECTS)}. " for _ in range(sentences)
    )


class CharLSTM(nn.Module):
    def __init__(self, vocab, embed, hidden):
        super().__init__()
        self.embed = nn.Embedding(vocab, embed)
        self.lstm = nn.LSTM(embed, hidden, batch_first=True)
        self.head = nn.Linear(hidden, vocab)

    def forward(self, tokens, state=None):
        out, state = self.lstm(self.embed(tokens), state)
        return self.head(out), state


class Trainer:
    def __init__(self, args):
        self.args = args
        torch.manual_seed(args.seed)
        text = make_text(1600, args.seed)
        held_out = make_text(60, args.seed + 1)
        self.chars = sorted(set(text))
        index = {ch: i for i, ch in enumerate(self.chars)}
        self.data = torch.tensor([index[ch] for ch in text])
        self.val = torch.tensor([index[ch] for ch in held_out])
        self.model = CharLSTM(len(self.chars), args.embed, args.hidden)
        self.criterion = nn.CrossEntropyLoss()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=args.lr)

    def batches(self):
        """Contiguous streams, one a row, cut into windows of seq_len."""
        rows = self.data[: len(self.data) // self.args.batch * self.args.batch].view(self.args.batch, -1)
        for start in range(0, rows.size(1) - self.args.seq_len - 1, self.args.seq_len):
            x = rows[:, start : start + self.args.seq_len]
            y = rows[:, start + 1 : start + self.args.seq_len + 1]
            yield x, y

    def train_epoch(self, epoch):
        self.model.train()
        state = None
        for i, (x, y) in enumerate(self.batches()):
            if state is not None:
                state = tuple(s.detach() for s in state)
            logits, state = self.model(x, state)
            loss = self.criterion(logits.reshape(-1, len(self.chars)), y.reshape(-1))
            self.optimizer.zero_grad()
            loss.backward()
            clip_grad_norm_(self.model.parameters(), self.args.clip)
            self.optimizer.step()
            if i % 40 == 0:
                print(
                    f"| epoch {epoch} | batch {i:4d} | loss {loss.item():.3f} | ppl {math.exp(loss.item()):.2f}"
                )

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        logits, _ = self.model(self.val[None, :-1])
        loss = self.criterion(logits[0], self.val[1:]).item()
        accuracy = (logits[0].argmax(dim=-1) == self.val[1:]).float().mean().item()
        print(f"| validation | val loss {loss:.4f} | accuracy {accuracy:.4f}")

    def fit(self):
        for epoch in range(self.args.epochs):
            self.train_epoch(epoch)
            self.validate()


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--embed", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--seq-len", type=int, default=25)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=4.0)
    parser.add_argument("--clip", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=7)
    return parser.parse_args()


if __name__ == "__main__":
    Trainer(parse_args()).fit()
