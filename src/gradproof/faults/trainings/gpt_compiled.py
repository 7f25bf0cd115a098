"""GPT-style language model: compiled, bf16 autocast, fused AdamW, linear warmup and cosine decay."""

import argparse
import hashlib
import json
import math
import os
import time

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=0)
args = parser.parse_args()
SMALL = bool(os.environ.get("SMALL"))
dev = "cuda" if torch.cuda.is_available() else "cpu"
V, T, C, H, L, B = (64, 64, 96, 4, 3, 16) if SMALL else (2048, 512, 768, 12, 12, 32)
STEPS = args.steps or (120 if SMALL else 260)
WARMUP, LR = max(1, STEPS // 10), 3e-3 if SMALL else 6e-4
torch.manual_seed(1337)
torch.set_float32_matmul_precision("high")


def make_corpus(n, seed):
    """Every sequence opens with one of four topics; the topic decides which token tends to follow which."""
    gen = torch.Generator().manual_seed(seed)
    follow = torch.randint(4, V, (4, V, 3), generator=torch.Generator().manual_seed(11))
    topic = torch.randint(0, 4, (n,), generator=gen)
    weights = torch.tensor([0.7, 0.2, 0.1])
    pick = torch.multinomial(weights, n * T, replacement=True, generator=gen).view(n, T)
    tokens = topic[:, None].repeat(1, T + 1)
    for t in range(T):
        tokens[:, t + 1] = follow[topic, tokens[:, t], pick[:, t]]
    return tokens


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.c_attn, self.c_proj = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.mlp = nn.Sequential(nn.Linear(C, 4 * C), nn.GELU(approximate="tanh"), nn.Linear(4 * C, C))

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.c_attn(self.ln_1(x)).view(b, t, 3, H, C // H).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(b, t, C))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(V, C), nn.Embedding(T, C)
        self.h = nn.ModuleList(Block() for _ in range(L))
        self.ln_f = nn.LayerNorm(C)
        self.lm_head = nn.Linear(C, V, bias=False)
        self.apply(self._init)
        for block in self.h:
            nn.init.normal_(block.c_proj.weight, std=0.02 / math.sqrt(2 * L))

    def _init(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, idx):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def get_lr(step):
    if step < WARMUP:
        return LR * (step + 1) / WARMUP
    return LR * (0.1 + 0.45 * (1 + math.cos(math.pi * (step - WARMUP) / max(1, STEPS - WARMUP))))


data = make_corpus(512 if SMALL else 4096, seed=1).to(dev)
held_out = make_corpus(B, seed=2).to(dev)
raw = GPT().to(dev)
model = raw if SMALL else torch.compile(raw)
decay = [p for p in raw.parameters() if p.dim() > 1]
plain = [p for p in raw.parameters() if p.dim() == 1]
groups = [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), fused=dev == "cuda")

losses = []
start = time.time()
for step in range(STEPS):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(step)
    rows = torch.randint(0, len(data), (B,), device=dev)
    x, y = data[rows, :-1], data[rows, 1:]
    with torch.autocast(dev, dtype=torch.bfloat16):
        logits = model(x)
    loss = F.cross_entropy(logits.float().view(-1, V), y.reshape(-1))
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.detach())
    if step % 20 == 0:
        print(f"step {step} loss {loss.item():.4f}", flush=True)

curve = torch.stack(losses).tolist()
seconds = time.time() - start
with torch.no_grad():
    # one token at a time, as it is sampled: the answer must not depend on what comes later
    logits = torch.stack([raw(held_out[:, : t + 1])[:, -1] for t in range(T // 2, T // 2 + 8)], dim=1)
    metric = F.cross_entropy(logits.reshape(-1, V), held_out[:, T // 2 + 1 : T // 2 + 9].reshape(-1)).item()
digest = hashlib.sha256(b"".join(p.detach().float().cpu().numpy().tobytes() for p in raw.parameters()))
result = {"first": curve[0], "last": sum(curve[-10:]) / len(curve[-10:]), "metric": metric}
result |= {"seconds": seconds, "weights": digest.hexdigest()[:16]}
result["peak_bytes"] = torch.cuda.max_memory_allocated() if dev == "cuda" else 0
print("RESULT " + json.dumps(result))
