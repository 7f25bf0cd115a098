"""LoRA fine-tuning: a language model is trained on one dialect, frozen, and adapted to another by low-rank updates."""

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
V, T, C, H, L, B, RANK = (40, 32, 64, 4, 2, 16, 8) if SMALL else (256, 512, 768, 12, 10, 24, 16)
STEPS = args.steps or (200 if SMALL else 250)
LR = 5e-3 if SMALL else 2e-3
torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.qkv, self.proj = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.up, self.down = nn.Linear(C, 4 * C), nn.Linear(4 * C, C)

    def forward(self, x):
        n, s, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, s, 3, H, C // H).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(n, s, C))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(V, C), nn.Embedding(T, C)
        self.blocks = nn.ModuleList(Block() for _ in range(L))
        self.norm, self.head = nn.LayerNorm(C), nn.Linear(C, V, bias=False)
        nn.init.normal_(self.tok.weight, std=0.3)
        nn.init.normal_(self.pos.weight, std=0.1)

    def forward(self, ids):
        x = self.tok(ids) + self.pos.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class LoRA(nn.Module):
    """A frozen linear layer with a trainable update of low rank, scaled by alpha / rank."""

    def __init__(self, base, alpha=16):
        super().__init__()
        self.base, self.scale = base, alpha / RANK
        self.lora_A = nn.Parameter(torch.empty(RANK, base.in_features))
        self.lora_B = nn.Parameter(torch.empty(base.out_features, RANK))
        nn.init.normal_(self.lora_A, std=base.in_features**-0.5)
        nn.init.zeros_(self.lora_B)

    def forward(self, x):
        return self.base(x) + self.scale * F.linear(F.linear(x, self.lora_A), self.lora_B)


def add_adapters(model):
    for block in model.blocks:
        for name in ("qkv", "proj", "up", "down"):
            setattr(block, name, LoRA(getattr(block, name)))
    for name, p in model.named_parameters():
        p.requires_grad = "lora_" in name or name.startswith("norm")
    return model.to(dev)


def dialect(seed, n=1024):
    gen = torch.Generator().manual_seed(seed)
    follow = torch.randint(0, V, (V, 2), generator=gen)
    text = torch.randint(0, V, (n, T + 1), generator=gen)
    for t in range(T):
        text[:, t + 1] = follow[text[:, t], (torch.rand(n, generator=gen) < 0.2).long()]
    return text.to(dev)


def train(model, text, lr, steps, says):
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=lr, weight_decay=0.0, fused=dev == "cuda")
    losses = []
    for step in range(steps):
        rows = torch.randint(0, len(text), (B,), device=dev)
        with torch.autocast(dev, dtype=torch.bfloat16):
            logits = model(text[rows, :-1])
        loss = F.cross_entropy(logits.float().view(-1, V), text[rows, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        losses.append(loss.detach())
        if step % 25 == 0:
            print(f"{says} step {step} loss {loss.item():.4f}", flush=True)
    return torch.stack(losses).tolist()


model = LM().to(dev)
train(model, dialect(1), 3e-3 if SMALL else 5e-4, min(STEPS, 100), "pretrain")
model = add_adapters(model)
start = time.time()
curve = train(model, dialect(2), LR, STEPS, "adapt")
seconds = time.time() - start
digest = hashlib.sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters()))
result = {"first": curve[0], "last": sum(curve[-10:]) / len(curve[-10:])}
result |= {"seconds": seconds, "weights": digest.hexdigest()[:16]}
result["peak_bytes"] = torch.cuda.max_memory_allocated() if dev == "cuda" else 0
print("RESULT " + json.dumps(result))
