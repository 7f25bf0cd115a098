"""Speech recogniser: strided convolutions, a bidirectional LSTM, CTC on utterances of different lengths, OneCycleLR."""

import argparse
import hashlib
import json
import os
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=0)
args = parser.parse_args()
SMALL = bool(os.environ.get("SMALL"))
dev = "cuda" if torch.cuda.is_available() else "cpu"
PHONES, MELS, HID, LAYERS, WORDS, B, N = (
    (6, 12, 32, 1, 5, 16, 256) if SMALL else (40, 80, 512, 3, 40, 64, 2048)
)
STEPS = args.steps or (160 if SMALL else 600)
LR = 6e-3 if SMALL else 2e-3
BLANK = 0
torch.manual_seed(0)


def make_utterances(n, seed):
    """Each phone sounds for four to seven frames, always the same spectrum, with noise; label 0 is the blank."""
    gen = torch.Generator().manual_seed(seed)
    spectra = torch.randn(PHONES + 1, MELS, generator=torch.Generator().manual_seed(8))
    sounds, scripts = [], []
    for _ in range(n):
        count = int(torch.randint(WORDS // 2, WORDS + 1, (1,), generator=gen))
        phones = torch.randint(1, PHONES + 1, (count,), generator=gen)
        frames = torch.randint(4, 8, (count,), generator=gen)
        sound = spectra[phones].repeat_interleave(frames, dim=0)
        sounds.append(sound + 0.5 * torch.randn(sound.shape, generator=gen))
        scripts.append(phones)
    return sounds, scripts


class Recogniser(nn.Module):
    def __init__(self):
        super().__init__()
        self.front = nn.Sequential(
            nn.Conv1d(MELS, HID, 3, padding=1), nn.BatchNorm1d(HID), nn.ReLU(),
            nn.Conv1d(HID, HID, 3, stride=2, padding=1), nn.BatchNorm1d(HID), nn.ReLU(),
        )  # fmt: skip
        self.rnn = nn.LSTM(HID, HID, LAYERS, bidirectional=True, batch_first=True)
        self.out = nn.Linear(2 * HID, PHONES + 1)

    def forward(self, sound):
        x = self.front(sound.transpose(1, 2)).transpose(1, 2)  # (B, frames / 2, HID)
        x, _ = self.rnn(x)
        return self.out(x).transpose(0, 1)  # (frames / 2, B, PHONES + 1)


def greedy(log_probs, lengths):
    best = log_probs.argmax(-1).T.cpu()
    return [
        [int(p) for p in torch.unique_consecutive(b[:n]) if p != BLANK]
        for b, n in zip(best, lengths, strict=True)
    ]


sounds, scripts = make_utterances(N, seed=1)
model = Recogniser().to(dev)
optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=1e-3)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=LR, total_steps=STEPS + 1, pct_start=0.3)

losses, exact = [], []
start = time.time()
for step in range(STEPS):
    rows = torch.randint(0, N, (B,)).tolist()
    sound = pad_sequence([sounds[i] for i in rows], batch_first=True).to(dev)
    script = pad_sequence([scripts[i] for i in rows], batch_first=True).to(dev)
    sound_lengths = torch.tensor([(len(sounds[i]) + 1) // 2 for i in rows])
    script_lengths = torch.tensor([len(scripts[i]) for i in rows])
    logits = model(sound)
    log_probs = F.log_softmax(logits, dim=-1)
    loss = F.ctc_loss(log_probs, script, sound_lengths, script_lengths, blank=BLANK)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    optimizer.step()
    scheduler.step()
    losses.append(loss.detach())
    if step >= STEPS - 5:
        heard = greedy(log_probs, sound_lengths)
        merged = [torch.unique_consecutive(scripts[i]).tolist() for i in rows]
        exact.append(sum(h == m for h, m in zip(heard, merged, strict=True)) / B)
    if step % 20 == 0:
        print(f"step {step} ctc {loss.item():.4f} grad-lr {scheduler.get_last_lr()[0]:.1e}", flush=True)

curve = torch.stack(losses).tolist()
seconds = time.time() - start
digest = hashlib.sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters()))
result = {"first": curve[0], "last": sum(curve[-10:]) / len(curve[-10:]), "metric": sum(exact) / len(exact)}
result |= {"seconds": seconds, "weights": digest.hexdigest()[:16]}
result["peak_bytes"] = torch.cuda.max_memory_allocated() if dev == "cuda" else 0
print("RESULT " + json.dumps(result))
