"""What gpt.c is meant to compute, in PyTorch: `gradproof check-dump step.safetensors --against reference.py:loss`."""

import torch
import torch.nn.functional as F

HEADS = 4


def loss(weights, batch):
    """The loss of a batch, and the activations that gpt.c names."""
    tokens, targets = batch["tokens"].long(), batch["targets"].long()
    w, seen = weights, {}
    length, channels = tokens.shape[1], w["wte"].shape[1]
    layers = 1 + max((int(name.split(".")[1]) for name in w if name.startswith("blocks.")), default=-1)

    def linear(x, name):
        return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

    def norm(x, name):
        return F.layer_norm(x, (channels,), w[f"{name}.weight"], w[f"{name}.bias"])

    x = seen["embedded"] = w["wte"][tokens] + w["wpe"][:length]
    future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
    for layer in range(layers):
        at = f"blocks.{layer}"
        h = seen[f"{at}.ln1"] = norm(x, f"{at}.ln1")
        qkv = seen[f"{at}.qkv"] = linear(h, f"{at}.qkv")
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in qkv.chunk(3, -1)
        )  # (B, NH, T, HS)
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(future, -torch.inf)
        att = seen[f"{at}.att"] = scores.softmax(-1)
        heads = seen[f"{at}.heads"] = (att @ v).transpose(1, 2).flatten(2)
        attn = seen[f"{at}.attn"] = linear(heads, f"{at}.proj")
        x = seen[f"{at}.mid"] = x + attn
        h = seen[f"{at}.ln2"] = norm(x, f"{at}.ln2")
        h = seen[f"{at}.fc"] = linear(h, f"{at}.fc")
        h = seen[f"{at}.gelu"] = F.gelu(h)
        h = seen[f"{at}.mlp"] = linear(h, f"{at}.out")
        x = seen[f"{at}.out"] = x + h
    x = seen["lnf"] = norm(x, "lnf")
    logits = seen["logits"] = x @ w.get("head", w["wte"]).mT
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten()), seen
