"""BERT-like masked language model on padded sentences: bf16 autocast, foreach AdamW, linear warmup and decay."""

import argparse
import hashlib
import json
import os
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=0)
args = parser.parse_args()
SMALL = bool(os.environ.get("SMALL"))
dev = "cuda" if torch.cuda.is_available() else "cpu"
V, T, C, H, L, B = (48, 32, 64, 4, 2, 32) if SMALL else (256, 256, 768, 12, 12, 64)
STEPS = args.steps or 350
LR = 4e-3 if SMALL else 2e-4
PAD, MASK, FIRST = 0, 1, 2
torch.manual_seed(42)


class Sentences(Dataset):
    """Runs that walk along a ring of words with a stride of their own, so that neighbours give a word away."""

    def __init__(self, n):
        gen = torch.Generator().manual_seed(5)
        stride = torch.randint(1, 4, (n, 1), generator=gen)
        offset = torch.randint(0, V, (n, 1), generator=gen)
        ring = FIRST + torch.randperm(V - FIRST, generator=gen)
        self.ids = ring[(offset + stride * torch.arange(T)) % len(ring)]
        length = torch.randint(T // 3, T, (n, 1), generator=gen)
        self.ids[torch.arange(T) >= length] = PAD

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return self.ids[i]


def mask_tokens(ids):
    """A fifth of the words is hidden; only these are asked for."""
    chosen = (torch.rand(ids.shape) < 0.2) & (ids != PAD)
    labels = ids.masked_fill(~chosen, -100)
    hidden = ids.masked_fill(chosen & (torch.rand(ids.shape) < 0.8), MASK)
    return hidden, labels


def collate(batch):
    return mask_tokens(torch.stack(batch))


class Bert(nn.Module):
    def __init__(self):
        super().__init__()
        self.word = nn.Embedding(V, C, padding_idx=PAD)
        self.position = nn.Embedding(T, C)
        self.norm = nn.LayerNorm(C)
        layer = nn.TransformerEncoderLayer(
            C, H, 4 * C, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, L, norm=nn.LayerNorm(C), enable_nested_tensor=False)
        self.transform = nn.Sequential(nn.Linear(C, C), nn.GELU(), nn.LayerNorm(C))
        self.decoder = nn.Linear(C, V)
        nn.init.normal_(self.word.weight, std=0.1)
        nn.init.normal_(self.position.weight, std=0.1)

    def forward(self, ids):
        padding = ids == PAD
        x = self.norm(self.word(ids) + self.position.weight[: ids.shape[1]])
        x = self.encoder(x, src_key_padding_mask=padding)
        return self.decoder(self.transform(x))


data = Sentences(2048 if SMALL else 16384)
loader = DataLoader(data, batch_size=B, shuffle=True, drop_last=True, collate_fn=collate)
model = Bert().to(dev)
optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01, foreach=True)
warmup = max(1, STEPS // 10)
scheduler = LambdaLR(
    optimizer, lambda s: min((s + 1) / warmup, max(0.05, (STEPS - s) / max(1, STEPS - warmup)))
)

losses, right, asked = [], 0, 0
start = time.time()
while len(losses) < STEPS:
    for ids, labels in loader:
        ids, labels = ids.to(dev), labels.to(dev)
        with torch.autocast(dev, dtype=torch.bfloat16):
            logits = model(ids)
            loss = F.cross_entropy(logits.view(-1, V), labels.view(-1), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(loss.detach())
        if len(losses) > STEPS - 10:
            hidden = ids == MASK
            right += ((logits.argmax(-1) == labels) & hidden).sum().item()
            asked += hidden.sum().item()
        if len(losses) % 50 == 1:
            print(f"step {len(losses)} mlm loss {loss.item():.4f}", flush=True)
        if len(losses) == STEPS:
            break

curve = torch.stack(losses).tolist()
seconds = time.time() - start
digest = hashlib.sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters()))
result = {"first": curve[0], "last": sum(curve[-10:]) / len(curve[-10:]), "metric": right / max(1, asked)}
result |= {"seconds": seconds, "weights": digest.hexdigest()[:16]}
result["peak_bytes"] = torch.cuda.max_memory_allocated() if dev == "cuda" else 0
print("RESULT " + json.dumps(result))
