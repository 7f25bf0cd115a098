"""Language model with tied embeddings, recomputed blocks, a hand-written SwiGLU, and micro-batches."""

import argparse
import hashlib
import json
import os
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=0)
args = parser.parse_args()
SMALL = bool(os.environ.get("SMALL"))
dev = "cuda" if torch.cuda.is_available() else "cpu"
V, T, C, H, L, B, MICRO = (48, 32, 64, 4, 2, 8, 4) if SMALL else (4096, 1024, 1024, 16, 10, 8, 4)
STEPS = args.steps or (110 if SMALL else 120)
LR = 4e-3 if SMALL else 6e-4
torch.manual_seed(0)


class SwiGLU(torch.autograd.Function):
    """silu(gate) * up, which keeps its inputs only."""

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx, dout):
        gate, up = ctx.saved_tensors
        s = gate.sigmoid()
        dgate = dout * up * (s + gate * s * (1 - s))
        dup = dout * gate * s
        return dgate, dup


class RMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(C))

    def forward(self, x):
        scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)
        return (x.float() * scale).to(x.dtype) * self.weight


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(), RMSNorm()
        self.qkv, self.out = nn.Linear(C, 3 * C, bias=False), nn.Linear(C, C, bias=False)
        self.gate_up, self.down = nn.Linear(C, 6 * C, bias=False), nn.Linear(3 * C, C, bias=False)

    def forward(self, x):
        n, s, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, s, 3, H, C // H).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(n, s, C))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(SwiGLU.apply(gate, up))


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(V, C), nn.Embedding(T, C)
        self.blocks = nn.ModuleList(Block() for _ in range(L))
        self.norm, self.head = RMSNorm(), nn.Linear(C, V, bias=False)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02 if not SMALL else 0.06)
        self.head.weight = self.tok.weight

    def forward(self, ids):
        x = self.tok(ids) + self.pos.weight[: ids.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x))


gen = torch.Generator().manual_seed(1)
follow = torch.randint(0, V, (V, 4), generator=gen)
text = torch.randint(0, V, (4096, T + 1), generator=gen)
for t in range(T):
    text[:, t + 1] = follow[text[:, t], (4 * torch.rand(4096, generator=gen) ** 2).long()]
text = text.to(dev)

model = LM().to(dev)
optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.05, foreach=True)

losses = []
start = time.time()
for step in range(STEPS):
    for group in optimizer.param_groups:
        group["lr"] = LR * min(1.0, (step + 1) / 10, 0.1 + 2 * (STEPS - step) / STEPS)
    total = 0.0
    optimizer.zero_grad(set_to_none=True)
    for _ in range(MICRO):
        rows = torch.randint(0, len(text), (B,), device=dev)
        with torch.autocast(dev, dtype=torch.bfloat16):
            logits = model(text[rows, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), text[rows, 1:].flatten()) / MICRO
        loss.backward()
        total = total + loss.detach()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    losses.append(total)
    if step % 10 == 0:
        print(f"step {step} loss {total.item():.4f}", flush=True)

curve = torch.stack(losses).tolist()
seconds = time.time() - start
digest = hashlib.sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters()))
result = {"first": curve[0], "last": sum(curve[-10:]) / len(curve[-10:])}
result |= {"seconds": seconds, "weights": digest.hexdigest()[:16]}
result["peak_bytes"] = torch.cuda.max_memory_allocated() if dev == "cuda" else 0
print("RESULT " + json.dumps(result))
