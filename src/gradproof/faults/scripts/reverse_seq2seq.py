"""Sequence to sequence: read digits, write them reversed. Padded batches, attention over the encoder."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

PAD, BOS, EOS = 0, 1, 2
VOCAB = 13
STEPS = 350


class ReverseDigits(Dataset):
    def __init__(self, size, seed):
        g = torch.Generator().manual_seed(seed)
        self.items = []
        for _ in range(size):
            length = int(torch.randint(1, 9, (1,), generator=g))
            self.items.append(torch.randint(3, VOCAB, (length,), generator=g))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        source = self.items[i]
        target = torch.cat([torch.tensor([BOS]), source.flip(0), torch.tensor([EOS])])
        return source, target


def collate(batch):
    sources, targets = zip(*batch)
    lengths = torch.tensor([len(s) for s in sources])
    return (
        pad_sequence(sources, batch_first=True, padding_value=PAD),
        lengths,
        pad_sequence(targets, batch_first=True, padding_value=PAD),
    )


class Encoder(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim, padding_idx=PAD)
        self.place = nn.Embedding(16, dim)
        self.gru = nn.GRU(dim, dim, batch_first=True)

    def forward(self, tokens, lengths):
        positions = torch.arange(tokens.size(1))
        x = self.embed(tokens) + self.place(positions)
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, last = self.gru(packed)
        out, _ = nn.utils.rnn.pad_packed_sequence(out, batch_first=True, total_length=tokens.size(1))
        return out + x, last


class Decoder(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim, padding_idx=PAD)
        self.gru = nn.GRU(dim, dim, batch_first=True)
        self.query = nn.Linear(dim, dim)
        self.combine = nn.Linear(2 * dim, dim)
        self.out = nn.Linear(dim, VOCAB)

    def forward(self, tokens, memory, memory_mask, state):
        h, state = self.gru(self.embed(tokens), state)
        scores = self.query(h) @ memory.transpose(1, 2)
        scores = scores.masked_fill(~memory_mask[:, None, :], float("-inf"))
        weights = scores.softmax(dim=-1)
        context = weights @ memory
        return self.out(torch.tanh(self.combine(torch.cat([h, context], dim=-1)))), state


class Seq2Seq(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.encoder = Encoder(dim)
        self.decoder = Decoder(dim)

    def memory_mask(self, source, lengths):
        return torch.arange(source.size(1))[None, :] < lengths[:, None]

    def forward(self, source, lengths, target_in):
        memory, state = self.encoder(source, lengths)
        logits, _ = self.decoder(target_in, memory, self.memory_mask(source, lengths), state)
        return logits

    @torch.no_grad()
    def translate(self, source, lengths, max_len=10):
        memory, state = self.encoder(source, lengths)
        mask = self.memory_mask(source, lengths)
        token = torch.full((len(source), 1), BOS)
        result = []
        for _ in range(max_len):
            logits, state = self.decoder(token, memory, mask, state)
            token = logits.argmax(dim=-1)
            result.append(token)
        return torch.cat(result, dim=1)


def exact_match(model, loader):
    model.eval()
    right = total = 0
    for source, lengths, target in loader:
        answer = model.translate(source, lengths)
        for row, want in zip(answer.tolist(), target.tolist()):
            want = [t for t in want[1:] if t != PAD]
            right += row[: len(want)] == want
            total += 1
    model.train()
    return right / total


def main():
    torch.manual_seed(51)
    loader = DataLoader(ReverseDigits(4000, 1), batch_size=32, shuffle=True, collate_fn=collate)
    test_loader = DataLoader(ReverseDigits(200, 2), batch_size=50, collate_fn=collate)
    model = Seq2Seq()
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    step = 0
    while step < STEPS:
        for source, lengths, target in loader:
            step += 1
            logits = model(source, lengths, target[:, :-1])
            labels = target[:, 1:]
            loss = F.cross_entropy(logits.reshape(-1, VOCAB), labels.reshape(-1), ignore_index=PAD)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 50 == 0:
                print(f"step {step} | train loss {loss.item():.4f}")
            if step == STEPS:
                break
    print(f"exact match {exact_match(model, test_loader):.3f}")


if __name__ == "__main__":
    main()
