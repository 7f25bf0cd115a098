"""Encoder-decoder transformer for a toy translation: padding on both sides, Noam schedule, Adam as in the paper."""

import argparse
import hashlib
import json
import os
import time

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=0)
args = parser.parse_args()
SMALL = bool(os.environ.get("SMALL"))
dev = "cuda" if torch.cuda.is_available() else "cpu"
V, T, C, H, L, B = (24, 10, 64, 4, 2, 64) if SMALL else (512, 40, 512, 8, 6, 256)
STEPS = args.steps or (260 if SMALL else 500)
WARMUP, FACTOR = (60, 0.5) if SMALL else (200, 0.25)
PAD, BOS, EOS, FIRST = 0, 1, 2, 3
torch.manual_seed(0)
lexicon = torch.cat([torch.arange(FIRST), FIRST + torch.randperm(V - FIRST)]).to(dev)


def make_batch(n):
    """The target says every word of the source in the other language, in the same order, and ends with EOS."""
    length = torch.randint(2, T + 1, (n, 1), device=dev)
    source = torch.randint(FIRST, V, (n, T), device=dev)
    place = torch.arange(T, device=dev)
    source = source.masked_fill(place >= length, PAD)
    target = torch.full((n, T + 2), PAD, device=dev)
    target[:, 0] = BOS
    target[:, 1:-1] = lexicon[source]
    target.scatter_(1, length + 1, EOS)
    return source, target


class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.source, self.target = nn.Embedding(V, C, PAD), nn.Embedding(V, C, PAD)
        self.place = nn.Parameter(0.1 * torch.randn(T + 2, C))
        self.transformer = nn.Transformer(C, H, L, L, 4 * C, dropout=0.0, batch_first=True, norm_first=True)
        self.out = nn.Linear(C, V)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.xavier_uniform_(p)

    def forward(self, source, target):
        size = target.shape[1]
        causal = torch.ones(size, size, dtype=torch.bool, device=dev).triu(1)
        source_padding, target_padding = source == PAD, target == PAD
        x = self.transformer(
            self.source(source) + self.place[: source.shape[1]],
            self.target(target) + self.place[:size],
            tgt_mask=causal,
            src_key_padding_mask=source_padding,
            tgt_key_padding_mask=target_padding,
            memory_key_padding_mask=source_padding,
        )
        return self.out(x)


def noam(step):
    return FACTOR * C**-0.5 * min((step + 1) ** -0.5, (step + 1) * WARMUP**-1.5)


@torch.no_grad()
def translate(model, source):
    written = torch.full((len(source), 1), BOS, device=dev)
    for _ in range(T + 1):
        word = model(source, written)[:, -1].argmax(-1, keepdim=True)
        written = torch.cat([written, word], dim=1)
    return written[:, 1:]


model = Translator().to(dev)
optimizer = torch.optim.Adam(model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9)
scheduler = LambdaLR(optimizer, noam)
criterion = nn.CrossEntropyLoss(ignore_index=PAD, label_smoothing=0.05)

losses = []
start = time.time()
for step in range(STEPS):
    source, target = make_batch(B)
    with torch.autocast(dev, dtype=torch.bfloat16, enabled=dev == "cuda"):
        logits = model(source, target[:, :-1])
    loss = criterion(logits.float().transpose(1, 2), target[:, 1:])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    losses.append(loss.detach())
    if step % 25 == 0:
        print(f"step {step} loss {loss.item():.4f} lr {scheduler.get_last_lr()[0]:.2e}", flush=True)

curve = torch.stack(losses).tolist()
seconds = time.time() - start
source, target = make_batch(64)
real = target[:, 1:] != PAD
metric = (translate(model, source) == target[:, 1:])[real].float().mean().item()
digest = hashlib.sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters()))
result = {"first": curve[0], "last": sum(curve[-10:]) / len(curve[-10:]), "metric": metric}
result |= {"seconds": seconds, "weights": digest.hexdigest()[:16]}
result["peak_bytes"] = torch.cuda.max_memory_allocated() if dev == "cuda" else 0
print("RESULT " + json.dumps(result))
