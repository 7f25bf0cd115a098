"""Direct preference optimisation: a language model tuned on demonstrations, then on pairs against a frozen copy."""

import argparse
import copy
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
V, PROMPT, ANSWER, C, H, L, B = (32, 6, 8, 64, 4, 2, 32) if SMALL else (512, 64, 128, 768, 12, 8, 48)
STEPS = args.steps or (80 if SMALL else 150)
SFT_STEPS = min(STEPS, 100)
BETA = 0.1
torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.qkv, self.out = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.mlp = nn.Sequential(nn.Linear(C, 4 * C), nn.GELU(), nn.Linear(4 * C, C))

    def forward(self, x):
        n, s, _ = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(n, s, 3, H, C // H).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(n, s, C))
        return x + self.mlp(self.ln2(x))


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(V, C), nn.Embedding(PROMPT + ANSWER, C)
        self.blocks = nn.ModuleList(Block() for _ in range(L))
        self.norm, self.head = nn.LayerNorm(C), nn.Linear(C, V, bias=False)

    def forward(self, ids):
        x = self.tok(ids) + self.pos.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).float()


def write_answers(prompt, politeness):
    """The answer counts on from the last word of the prompt; polite ones prefer even steps to odd ones."""
    polite = torch.rand(len(prompt), ANSWER, device=dev) < politeness
    stride = torch.where(polite, 2, 3)
    return (prompt[:, -1:] + stride.cumsum(1)) % V


def sequence_logp(model, prompt, answer):
    ids = torch.cat([prompt, answer], dim=1)
    with torch.autocast(dev, dtype=torch.bfloat16, enabled=dev == "cuda"):
        logits = model(ids[:, :-1])
    logp = logits.log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
    return logp[:, PROMPT - 1 :].sum(1)


def new_prompts():
    return torch.randint(0, V, (B, PROMPT), device=dev)


policy = LM().to(dev)
optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3 if SMALL else 3e-4, weight_decay=0.01)
for _ in range(SFT_STEPS):
    prompt = new_prompts()
    loss = -sequence_logp(policy, prompt, write_answers(prompt, 0.5)).mean() / ANSWER
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
print(f"tuned on demonstrations, loss {loss.item():.4f}")

reference = copy.deepcopy(policy).eval().requires_grad_(False)
optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-4 if SMALL else 2e-5, weight_decay=0.0)
losses, wins = [], []
start = time.time()
for step in range(STEPS):
    optimizer.param_groups[0]["lr"] = (3e-4 if SMALL else 2e-5) * min(1.0, (step + 1) / 10)
    prompt = new_prompts()
    chosen, rejected = write_answers(prompt, 0.8), write_answers(prompt, 0.2)
    with torch.no_grad():
        ref_chosen = sequence_logp(reference, prompt, chosen)
        ref_rejected = sequence_logp(reference, prompt, rejected)
    pi_chosen = sequence_logp(policy, prompt, chosen)
    pi_rejected = sequence_logp(policy, prompt, rejected)
    margin = (pi_chosen - ref_chosen) - (pi_rejected - ref_rejected)
    loss = -F.logsigmoid(BETA * margin).mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.detach())
    wins.append((margin > 0).float().mean())
    if step % 10 == 0:
        print(f"step {step} dpo {loss.item():.4f} margin {margin.mean().item():.3f}", flush=True)

curve = torch.stack(losses).tolist()
seconds = time.time() - start
digest = hashlib.sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in policy.parameters()))
result = {"first": curve[0], "last": sum(curve[-10:]) / len(curve[-10:])}
result["metric"] = torch.stack(wins[-10:]).mean().item()
result |= {"seconds": seconds, "weights": digest.hexdigest()[:16]}
result["peak_bytes"] = torch.cuda.max_memory_allocated() if dev == "cuda" else 0
print("RESULT " + json.dumps(result))
