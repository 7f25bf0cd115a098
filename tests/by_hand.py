"""Trainings whose gradients are written by hand, with slips to plant: a NumPy MLP and a torch transformer block."""

# B batch, T time, C channels, H heads, V vocabulary

from __future__ import annotations

import math

import numpy as np
import torch

# ---- an MLP in NumPy: softmax over tanh


def mlp_batch(dtype=np.float32, samples=8, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((samples, 5)).astype(dtype), rng.integers(0, 3, samples)


def mlp_parameters(dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"w1": (5, 6), "b1": (6,), "w2": (6, 6), "b2": (6,), "w3": (6, 3), "b3": (3,)}
    return {k: (0.5 * rng.standard_normal(s)).astype(dtype) for k, s in shapes.items()}


def log_softmax(z):
    z = z - z.max(axis=1, keepdims=True)
    return z - np.log(np.exp(z).sum(axis=1, keepdims=True))


def mlp_loss(p, batch):
    x, y = batch
    h1 = np.tanh(x @ p["w1"] + p["b1"])
    h2 = np.tanh(h1 @ p["w2"] + p["b2"])
    logp = log_softmax(h2 @ p["w3"] + p["b3"])
    return -logp[np.arange(len(y)), y].mean()


def mlp_gradients(p, batch, slip=None):
    x, y = batch
    B = len(y)
    h1 = np.tanh(x @ p["w1"] + p["b1"])
    h2 = np.tanh(h1 @ p["w2"] + p["b2"])
    dz = np.exp(log_softmax(h2 @ p["w3"] + p["b3"]))
    dz[np.arange(B), y] -= 1
    dz = dz / (1 if slip == "sum" else B * B if slip == "mean twice" else B)
    dz = dz.astype(x.dtype)
    g = {"w3": h2.T @ dz, "b3": dz.sum(0)}
    dh2 = dz @ p["w3"].T
    da2 = dh2 * (1 - h2 * h2 if slip != "no tanh" else 1)
    g |= {
        "w2": (x[:, :1] * h1 if slip == "noise" else h2 if slip == "stale" else h1).T @ da2,
        "b2": da2.sum(0),
    }
    da1 = (da2 @ (p["w2"] if slip == "no transpose" else p["w2"].T)) * (1 - h1 * h1)
    g |= {"w1": x.T @ da1, "b1": da1.sum(0)}
    if slip == "transposed":
        g["w2"] = g["w2"].T.copy()
    if slip == "sign":
        g["b1"] = -g["b1"]
    if slip == "twice":
        g["w1"] = 2 * g["w1"]
    if slip == "zero":
        g["w1"] = np.zeros_like(g["w1"])
    if slip == "never":
        del g["b2"]
    if slip == "nan":
        g["w2"][3:] = np.nan
    if slip == "exchanged":
        g["b1"], g["b2"] = g["b2"], g["b1"]
    if slip == "row":
        g["w1"][4] = 0
    if slip == "garbage":
        g["w1"] = np.full_like(g["w1"], 4.6e-41)
        g["w1"][0, 0] = 1e-41
    return g


# ---- a GPT in torch, its head tied to its embedding


HEADS = 2
LAYER = {"g1": (16,), "c1": (16,), "wq": (16, 16), "wk": (16, 16), "wv": (16, 16), "wo": (16, 16), "g2": (16,),
         "c2": (16,), "w1": (16, 64), "b1": (64,), "w2": (64, 16), "b2": (16,)}  # fmt: skip


def gpt_parameters(dtype=torch.float32, seed=0, layers=1, C=16, V=11, T=6):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"wte": (V, C), "wpe": (T, C)}
    shapes |= {f"h{l}.{k}": s for l in range(layers) for k, s in LAYER.items()} | {"gf": (C,), "cf": (C,)}
    p = {k: 0.3 * torch.randn(s, generator=generator) for k, s in shapes.items()}
    p = {k: v + 1 if k.split(".")[-1].startswith("g") else v for k, v in p.items()}
    return {k: v.to(dtype) for k, v in p.items()}


def gpt_batch(B=4, T=6, V=11, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randint(V - 1, (B, T), generator=generator) for name in ("tokens", "targets")}


def norm(x, g, c):
    centred = x - x.mean(-1, keepdim=True)
    rstd = (centred.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    return centred * rstd * g + c


def gelu(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def heads(x):
    B, T, C = x.shape
    return x.view(B, T, HEADS, C // HEADS).transpose(1, 2)


def merged(x):
    B, H, T, D = x.shape
    return x.transpose(1, 2).reshape(B, T, H * D)


def attention(q, k, v):
    scores = heads(q) @ heads(k).mT / math.sqrt(q.shape[-1] // HEADS)
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    scores = scores.masked_fill(future, -math.inf)
    att = torch.softmax(scores, -1)
    return att, merged(att @ heads(v))


def layers_of(p):
    return len({k.split(".")[0] for k in p if k.startswith("h")})


def gpt_loss(p, batch):
    """The reference without names."""
    x = p["wte"][batch["tokens"]] + p["wpe"]
    for l in range(layers_of(p)):
        n1 = norm(x, p[f"h{l}.g1"], p[f"h{l}.c1"])
        q, k, v = n1 @ p[f"h{l}.wq"], n1 @ p[f"h{l}.wk"], n1 @ p[f"h{l}.wv"]
        _, mixed = attention(q, k, v)
        mid = x + mixed @ p[f"h{l}.wo"]
        n2 = norm(mid, p[f"h{l}.g2"], p[f"h{l}.c2"])
        hidden = n2 @ p[f"h{l}.w1"] + p[f"h{l}.b1"]
        active = gelu(hidden)
        x = mid + active @ p[f"h{l}.w2"] + p[f"h{l}.b2"]
    nf = norm(x, p["gf"], p["cf"])
    logits = nf @ p["wte"].T
    logp = torch.log_softmax(logits, -1)
    return -logp.gather(-1, batch["targets"][..., None]).mean()


def gpt_named(p, batch):
    """The same reference with names: (loss, activations)."""
    named = {}
    x = named["x"] = p["wte"][batch["tokens"]] + p["wpe"]
    for l in range(layers_of(p)):
        n1 = norm(x, p[f"h{l}.g1"], p[f"h{l}.c1"])
        q, k, v = n1 @ p[f"h{l}.wq"], n1 @ p[f"h{l}.wk"], n1 @ p[f"h{l}.wv"]
        att, mixed = attention(q, k, v)
        mid = x + mixed @ p[f"h{l}.wo"]
        n2 = norm(mid, p[f"h{l}.g2"], p[f"h{l}.c2"])
        hidden = n2 @ p[f"h{l}.w1"] + p[f"h{l}.b1"]
        active = gelu(hidden)
        x = mid + active @ p[f"h{l}.w2"] + p[f"h{l}.b2"]
        found = {"n1": n1, "q": q, "k": k, "v": v, "att": att, "mixed": mixed, "mid": mid, "n2": n2,
                 "hidden": hidden, "active": active, "out": x}  # fmt: skip
        named |= {f"h{l}.{name}": value for name, value in found.items()}
    nf = named["nf"] = norm(x, p["gf"], p["cf"])
    logits = named["logits"] = nf @ p["wte"].T
    logp = torch.log_softmax(logits, -1)
    return -logp.gather(-1, batch["targets"][..., None]).mean(), named


# the same by hand, with one slip in one layer


def norm_backward(dout, x, g, slip=None):
    centred = x - x.mean(-1, keepdim=True)
    rstd = (centred.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    normal = centred * rstd
    dnormal = dout * g
    mean = 0 if slip == "no mean" else dnormal.mean(-1, keepdim=True)
    dx = (dnormal - mean - normal * (dnormal * normal).mean(-1, keepdim=True)) * rstd
    return dx, (dout * normal).sum((0, 1)), dout.sum((0, 1))


def dgelu(x):
    t = torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x * x)


def layer_forward(p, x, slip):
    n1 = norm(x, p["g1"], p["c1"])
    q, k, v = n1 @ p["wq"], n1 @ p["wk"], n1 @ p["wv"]
    k = k[:1].expand_as(k) if slip == "keys of sample 0" else k
    v = v[:1].expand_as(v) if slip == "values of sample 0" else v
    scores = heads(q) @ heads(k).mT * (1 if slip == "no scale" else 1 / math.sqrt(q.shape[-1] // HEADS))
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(2 if slip == "mask off by one" else 1)
    scores = scores if slip == "no mask" else scores.masked_fill(future, -math.inf)
    att = torch.softmax(scores, -1)
    mixed = merged(att @ heads(v))
    mid = mixed @ p["wo"] if slip == "no residual" else x + mixed @ p["wo"]
    n2 = norm(mid, p["g2"], p["c2"])
    hidden = n2 @ p["w1"] + p["b1"]
    active = hidden if slip == "no gelu forward" else gelu(hidden)
    out = mid + active @ p["w2"] + p["b2"]
    return {"n1": n1, "q": q, "k": k, "v": v, "att": att, "mixed": mixed, "mid": mid, "n2": n2, "hidden": hidden,
            "active": active, "out": out}  # fmt: skip


def layer_backward(p, x, a, dout, slip):
    """(dx, gradients of the layer)."""
    g = {"w2": torch.einsum("btf,btc->fc", a["active"], dout), "b2": dout.sum((0, 1))}
    dactive = dout @ p["w2"].T
    dhidden = dactive * {"no gelu": 1, "gelu of output": dgelu(a["active"])}.get(slip, dgelu(a["hidden"]))
    n2 = a["n1"] if slip == "other norm" else a["n2"]
    g |= {"w1": torch.einsum("btc,btf->cf", n2, dhidden), "b1": dhidden.sum((0, 1))}
    branch, g["g2"], g["c2"] = norm_backward(dhidden @ p["w1"].T, a["mid"], p["g2"], slip)
    skip = torch.zeros_like(dout) if slip == "no skip back" else dout
    dmid = skip + {"branch twice": 2, "branch sign": -1}.get(slip, 1) * branch
    dmixed = dmid @ p["wo"].T
    g["wo"] = torch.einsum("btc,btd->cd", a["mixed"], dmid)
    datt, dv = heads(dmixed) @ heads(a["v"]).mT, merged(a["att"].mT @ heads(dmixed))
    inner = 0 if slip == "softmax" else (datt * a["att"]).sum(-1, keepdim=True)
    dscores = a["att"] * (datt - inner) / math.sqrt(x.shape[-1] // HEADS)
    dq, dk = merged(dscores @ heads(a["k"])), merged(dscores.mT @ heads(a["q"]))
    g |= {k: torch.einsum("btc,btd->cd", a["n1"], d) for k, d in (("wq", dq), ("wk", dk), ("wv", dv))}
    dn1 = dq @ p["wq"].T + dv @ p["wv"].T + (0 if slip == "no key path" else dk @ p["wk"].T)
    dx, g["g1"], g["c1"] = norm_backward(dn1, x, p["g1"])
    return dmid + dx, g


def gpt_step(p, batch, slip=None, layer=0):
    """(loss, activations, gradients) by hand, the slip in one layer."""
    tokens, targets = batch["tokens"], batch["targets"]
    B, T = tokens.shape
    L = layers_of(p)
    parts = [{k: p[f"h{l}.{k}"] for k in LAYER} for l in range(L)]
    x = p["wte"][tokens] + p["wpe"]
    inputs, caches = [], []
    for l in range(L):
        inputs.append(x)
        caches.append(layer_forward(parts[l], x, slip if l == layer else None))
        x = caches[-1]["out"]
    nf = norm(x, p["gf"], p["cf"])
    logits = nf @ p["wte"].T
    logp = torch.log_softmax(logits, -1)
    loss = -logp.gather(-1, targets[..., None]).mean()

    dlogits = logp.exp()
    dlogits.scatter_add_(-1, targets[..., None], -torch.ones_like(targets[..., None]).to(dlogits))
    dlogits = dlogits / {"no B": T, "no T": B, "sum": 1}.get(slip, B * T)
    g = {}
    head = torch.einsum("btv,btc->vc", dlogits, nf)
    dx, g["gf"], g["cf"] = norm_backward(
        dlogits @ p["wte"], caches[-1]["mid"] if slip == "stale norm" else x, p["gf"]
    )
    for l in reversed(range(L)):
        if slip == "never called" and l == layer:
            own = {k: torch.zeros_like(v) for k, v in parts[l].items()}
        else:
            dx, own = layer_backward(parts[l], inputs[l], caches[l], dx, slip if l == layer else None)
        dx = torch.zeros_like(dx) if slip == "stops" and l == layer else dx
        g |= {f"h{l}.{k}": v for k, v in own.items()}
    g["wpe"] = dx.sum(0)
    into = torch.zeros_like(head).index_add_(0, tokens.reshape(-1), dx.reshape(-1, dx.shape[-1]))
    g["wte"] = {"head forgotten": into, "embedding forgotten": head}.get(slip, head + into)
    named = {"x": inputs[0]} | {f"h{l}.{k}": v for l in range(L) for k, v in caches[l].items()}
    named |= {"nf": nf, "logits": logits}
    if slip == "buffer":
        named[f"h{layer}.n1"] = named[f"h{layer}.n2"]
    if slip == "ping-pong":
        named["h0.out"] = named["h1.out"].clone()
    if slip == "uninitialised":
        g[f"h{layer}.wk"] = torch.linspace(1e-41, 9e-41, 256).reshape(16, 16)
        g[f"h{layer}.wv"][8:] = math.nan
    if slip == "not zeroed":
        g["wte"][10] += 3.0
    if slip == "sign":
        g[f"h{layer}.wo"] = -g[f"h{layer}.wo"]
    if slip == "transposed":
        g[f"h{layer}.wq"] = g[f"h{layer}.wq"].T.contiguous()
    if slip == "twice":
        g[f"h{layer}.b1"] = 2 * g[f"h{layer}.b1"]
    if slip == "exchanged":
        g["h0.w1"], g["h1.w1"] = g["h1.w1"], g["h0.w1"]
    if slip == "NaN activation":
        named[f"h{layer}.hidden"] = torch.full_like(named[f"h{layer}.hidden"], math.nan)
    if slip == "only sample 0":
        named[f"h{layer}.q"] = named[f"h{layer}.q"][:1].expand(B, -1, -1).contiguous()
    return loss, named, {k: g[k].contiguous() for k in p}
