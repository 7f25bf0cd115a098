"""Mixture-of-experts language model in pure bf16 with float32 master weights: two experts a token, balance term."""

import argparse
import hashlib
import json
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
V, T, C, H, L, E, B = (48, 32, 64, 4, 2, 4, 16) if SMALL else (1024, 512, 768, 12, 6, 8, 32)
STEPS = args.steps or (200 if SMALL else 300)
LR, BALANCE = (6e-4 if SMALL else 2e-4), 0.01
torch.manual_seed(0)


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(C, 2 * C, bias=False), nn.Linear(2 * C, C, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.up(x)))


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(C, E, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(E))

    def forward(self, x):
        tokens = x.reshape(-1, C)
        probs = self.router(tokens).float().softmax(-1)
        weight, chosen = probs.topk(2, dim=-1)
        weight = (weight / weight.sum(-1, keepdim=True)).to(x.dtype)
        out = torch.zeros_like(tokens)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == e)
            mine = weight[token, slot][:, None] * expert(tokens[token])
            out = out.index_add(0, token, mine)
        load = F.one_hot(chosen[:, 0], E).float().mean(0)
        balance = E * (load * probs.mean(0)).sum()
        return out.view_as(x), balance


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(C, eps=1e-5), nn.RMSNorm(C, eps=1e-5)
        self.qkv, self.proj = nn.Linear(C, 3 * C, bias=False), nn.Linear(C, C, bias=False)
        self.moe = MoE()

    def forward(self, x):
        n, s, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, s, 3, H, C // H).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(n, s, C))
        mixed, balance = self.moe(self.norm2(x))
        return x + mixed, balance


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(V, C), nn.Embedding(T, C)
        self.blocks = nn.ModuleList(Block() for _ in range(L))
        self.norm, self.head = nn.RMSNorm(C, eps=1e-5), nn.Linear(C, V, bias=False)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=p.shape[1] ** -0.5)

    def forward(self, ids):
        x, balance = self.tok(ids) + self.pos.weight[: ids.shape[1]], 0.0
        for block in self.blocks:
            x, extra = block(x)
            balance = balance + extra / L
        return self.head(self.norm(x)), balance


gen = torch.Generator().manual_seed(1)
follow = torch.randint(0, V, (V, 3), generator=gen)
corpus = torch.randint(0, V, (2048, T + 1), generator=gen)
for t in range(T):
    corpus[:, t + 1] = follow[corpus[:, t], torch.randint(0, 3, (2048,), generator=gen)]
corpus = corpus.to(dev)

model = Model().to(dev, torch.bfloat16)
weights = list(model.parameters())
masters = [p.detach().float().clone() for p in weights]
optimizer = torch.optim.AdamW(masters, lr=LR, betas=(0.9, 0.95), weight_decay=0.01, foreach=True)

losses = []
start = time.time()
for step in range(STEPS):
    optimizer.param_groups[0]["lr"] = LR * min(1.0, (step + 1) / 20)
    rows = torch.randint(0, len(corpus), (B,), device=dev)
    logits, balance = model(corpus[rows, :-1])
    lm_loss = F.cross_entropy(logits.float().view(-1, V), corpus[rows, 1:].reshape(-1))
    loss = lm_loss + BALANCE * balance
    model.zero_grad(set_to_none=True)
    loss.backward()
    for master, p in zip(masters, weights, strict=True):
        master.grad = p.grad.float()
    nn.utils.clip_grad_norm_(masters, 1.0)
    optimizer.step()
    with torch.no_grad():
        torch._foreach_copy_(weights, masters)
    losses.append(lm_loss.detach())
    if step % 25 == 0:
        print(f"step {step} lm {lm_loss.item():.4f} balance {balance.item():.3f}", flush=True)

curve = torch.stack(losses).tolist()
seconds = time.time() - start
digest = hashlib.sha256(b"".join(p.detach().float().cpu().numpy().tobytes() for p in weights))
result = {"first": curve[0], "last": sum(curve[-10:]) / len(curve[-10:])}
result |= {"seconds": seconds, "weights": digest.hexdigest()[:16]}
result["peak_bytes"] = torch.cuda.max_memory_allocated() if dev == "cuda" else 0
print("RESULT " + json.dumps(result))
