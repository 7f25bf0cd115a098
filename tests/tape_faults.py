"""Hand-written autograd functions the way people write them, each right, and with one mistake in backward."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function

WIDTH, HEADS, TIME, BATCH, VOCABULARY = 16, 4, 6, 4, 11


class Gelu(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        cdf = 0.5 * (1 + torch.erf(x / math.sqrt(2)))
        return grad * (cdf + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi))


class GeluMissingTerm(Gelu):
    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


class GeluNearlyRight(Gelu):
    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        cdf = 0.5 * (1 + torch.erf(x / math.sqrt(2)))
        return grad * (cdf + 0.997 * x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi))


class GeluStaleCache(Gelu):
    cache: dict = {}  # noqa: RUF012

    @staticmethod
    def forward(ctx, x):
        ctx.cache = GeluStaleCache.cache
        ctx.cache.setdefault("x", x.detach().clone() + 1.0)
        return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))

    @staticmethod
    def backward(ctx, grad):
        x = ctx.cache["x"]
        cdf = 0.5 * (1 + torch.erf(x / math.sqrt(2)))
        return grad * (cdf + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi))


class GeluTailUnwritten(Gelu):
    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        cdf = 0.5 * (1 + torch.erf(x / math.sqrt(2)))
        slope = cdf + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
        out = torch.empty_like(x)
        out[..., :-1] = (grad * slope)[..., :-1]
        return out


class Tanh(Function):
    @staticmethod
    def forward(ctx, x, gain):
        ctx.gain = gain
        ctx.save_for_backward(x)
        return torch.tanh(gain * x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        y = torch.tanh(ctx.gain * x)
        return grad * ctx.gain * (1 - y * y), None


class TanhRecomputedWrong(Tanh):
    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        y = torch.tanh(x)  # the gain is forgotten
        return grad * ctx.gain * (1 - y * y), None


class Workspace(Function):
    """A sigmoid that keeps its result in memory of its own."""

    buffers: dict = {}  # noqa: RUF012

    @classmethod
    def workspace(cls, x):
        return torch.empty_like(x)

    @staticmethod
    def forward(ctx, x, cls):
        ctx.y = cls.workspace(x)
        torch.sigmoid(x, out=ctx.y)
        return ctx.y.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.y * (1 - ctx.y), None


class WorkspaceReused(Workspace):
    """The same memory for every call: a second layer overwrites what the first has saved."""

    buffers: dict = {}  # noqa: RUF012

    @classmethod
    def workspace(cls, x):
        return cls.buffers.setdefault((x.shape, x.dtype), torch.empty_like(x))


class Linear(Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return x @ weight.t().to(x.dtype) + bias.to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        flat, dflat = x.flatten(0, -2), grad.flatten(0, -2)
        return grad @ weight.to(grad.dtype), dflat.t() @ flat.to(grad.dtype), dflat.sum(0)


class LinearTransposed(Linear):
    @staticmethod
    def backward(ctx, grad):
        dx, dweight, dbias = Linear.backward(ctx, grad)
        return dx, dweight.t(), dbias


class LinearNoBias(Linear):
    @staticmethod
    def backward(ctx, grad):
        dx, dweight, _ = Linear.backward(ctx, grad)
        return dx, dweight, None


class LayerNorm(Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        mean = x.mean(-1, keepdim=True)
        rstd = (x.var(-1, keepdim=True, unbiased=False) + 1e-5).rsqrt()
        xhat = (x - mean) * rstd
        ctx.save_for_backward(xhat, rstd, weight)
        return xhat * weight + bias

    @staticmethod
    def backward(ctx, grad, sign=-1.0, mixed=False):
        xhat, rstd, weight = ctx.saved_tensors
        dxhat = grad * weight
        along = dxhat.mean(-1, keepdim=True)
        across = (dxhat * xhat).mean(-1, keepdim=True)
        if mixed:
            across = across.mean(0, keepdim=True)
        dx = rstd * (dxhat - along + sign * xhat * across)
        flat, dflat = xhat.flatten(0, -2), grad.flatten(0, -2)
        return dx, (dflat * flat).sum(0), dflat.sum(0)


class LayerNormSign(LayerNorm):
    @staticmethod
    def backward(ctx, grad):
        return LayerNorm.backward(ctx, grad, sign=1.0)


class LayerNormSamplesMixed(LayerNorm):
    @staticmethod
    def backward(ctx, grad):
        return LayerNorm.backward(ctx, grad, mixed=True)


class Attention(Function):
    """softmax(q kᵀ / √d + causal mask) v; (B, H, T, D)."""

    @staticmethod
    def forward(ctx, q, k, v):
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        p = scores.masked_fill(~mask, -math.inf).softmax(-1)
        ctx.save_for_backward(q, k, v, p)
        return p.to(v.dtype) @ v

    @staticmethod
    def backward(ctx, grad, scaled=True, heads=None):
        q, k, v, p = ctx.saved_tensors
        p = p.to(grad.dtype)
        dv = p.mT @ grad
        dp = grad @ v.mT
        dscores = p * (dp - (p * dp).sum(-1, keepdim=True))
        if scaled:
            dscores = dscores / math.sqrt(q.shape[-1])
        dq, dk = dscores @ k, dscores.mT @ q
        if heads is not None:
            dq = dq.clone()
            dq[:, heads:] = 0
        return dq, dk, dv


class AttentionUnscaled(Attention):
    @staticmethod
    def backward(ctx, grad):
        return Attention.backward(ctx, grad, scaled=False)


class AttentionDroppedHead(Attention):
    @staticmethod
    def backward(ctx, grad):
        return Attention.backward(ctx, grad, heads=HEADS - 1)


class Embedding(Function):
    @staticmethod
    def forward(ctx, weight, ids):
        ctx.save_for_backward(ids)
        ctx.rows = len(weight)
        return weight[ids]

    @staticmethod
    def backward(ctx, grad, shift=0):
        (ids,) = ctx.saved_tensors
        dweight = torch.zeros(ctx.rows, grad.shape[-1], dtype=grad.dtype)
        dweight.index_add_(0, (ids.flatten() + shift) % ctx.rows, grad.flatten(0, -2))
        return dweight, None


class EmbeddingOffByOne(Embedding):
    @staticmethod
    def backward(ctx, grad):
        return Embedding.backward(ctx, grad, shift=1)


class EmbeddingOverwritten(Embedding):
    @staticmethod
    def backward(ctx, grad):
        (ids,) = ctx.saved_tensors
        dweight = torch.zeros(ctx.rows, grad.shape[-1], dtype=grad.dtype)
        dweight[ids.flatten()] = grad.flatten(0, -2)  # a repeated token must add, not overwrite
        return dweight, None


class CrossEntropy(Function):
    """Mean over the positions that count."""

    @staticmethod
    def forward(ctx, logits, targets, mask):
        logp = torch.log_softmax(logits.float(), -1)
        ctx.save_for_backward(logp, targets, mask)
        picked = logp.gather(-1, targets[..., None]).squeeze(-1)
        return -(picked * mask).sum() / mask.sum()

    @staticmethod
    def backward(ctx, grad, masked=True, mean=True):
        logp, targets, mask = ctx.saved_tensors
        d = logp.exp()
        d.scatter_add_(-1, targets[..., None], -torch.ones_like(d[..., :1]))
        if masked:
            d = d * mask[..., None]
        return grad * (d / mask.sum() if mean else d), None, None


class CrossEntropyUnmasked(CrossEntropy):
    @staticmethod
    def backward(ctx, grad):
        return CrossEntropy.backward(ctx, grad, masked=False)


class CrossEntropySum(CrossEntropy):
    @staticmethod
    def backward(ctx, grad):
        return CrossEntropy.backward(ctx, grad, mean=False)


class BatchNorm(Function):
    """Over (B, T), with the statistics of the batch."""

    @staticmethod
    def forward(ctx, x, weight):
        mean, var = x.mean((0, 1)), x.var((0, 1), unbiased=False)
        rstd = (var + 1e-5).rsqrt()
        xhat = (x - mean) * rstd
        ctx.save_for_backward(xhat, rstd, weight)
        return xhat * weight

    @staticmethod
    def backward(ctx, grad):
        xhat, rstd, weight = ctx.saved_tensors
        d = grad * weight
        dx = rstd * (d - d.mean((0, 1)) - xhat * (d * xhat).mean((0, 1)))
        return dx, (grad * xhat).sum((0, 1))


class BatchNormEvalGradient(BatchNorm):
    @staticmethod
    def backward(ctx, grad):
        xhat, rstd, weight = ctx.saved_tensors
        return grad * weight * rstd, (grad * xhat).sum((0, 1))


class Convolution(Function):
    """Along time, kernel of three, same length; (B, C, T)."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return F.conv1d(x, weight.to(x.dtype), padding=1)

    @staticmethod
    def backward(ctx, grad, flip=False):
        x, weight = ctx.saved_tensors
        dx = F.conv_transpose1d(grad, weight.to(grad.dtype), padding=1)
        patches = F.pad(x, (1, 1)).unfold(-1, 3, 1)  # (B, C, T, 3)
        dweight = torch.einsum("bot,bctk->ock", grad, patches.to(grad.dtype))
        return dx, dweight.flip(-1) if flip else dweight


class ConvolutionFlipped(Convolution):
    @staticmethod
    def backward(ctx, grad):
        return Convolution.backward(ctx, grad, flip=True)


class Block(Function):
    """A whole block by hand: x + w2 relu(w1 norm(x)), RMS-normalised."""

    @staticmethod
    def forward(ctx, x, w1, w2):
        r = (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        n = x * r
        h = torch.relu(n @ w1.t().to(n.dtype))
        ctx.save_for_backward(x, r, n, h, w1, w2)
        return x + h @ w2.t().to(h.dtype)

    @staticmethod
    def backward(ctx, grad, residual=True, norm=True):
        x, r, n, h, w1, w2 = ctx.saved_tensors
        # forward was out = x + h @ w2.T, so:
        dh = grad @ w2.to(grad.dtype)
        dw2 = grad.flatten(0, -2).t() @ h.flatten(0, -2).to(grad.dtype)
        # forward was h = relu(n @ w1.T), so:
        dpre = dh * (h > 0)
        dw1 = dpre.flatten(0, -2).t() @ n.flatten(0, -2).to(dpre.dtype)
        dn = dpre @ w1.to(dpre.dtype)
        # forward was n = x * r(x), so:
        dx = dn * r
        if norm:
            dx = dx - x * r**3 * (dn * x).mean(-1, keepdim=True)
        if residual:
            dx = dx + grad
        return dx, dw1, dw2


class BlockResidualLost(Block):
    @staticmethod
    def backward(ctx, grad):
        return Block.backward(ctx, grad, residual=False)


class BlockNormTermMissing(Block):
    @staticmethod
    def backward(ctx, grad):
        return Block.backward(ctx, grad, norm=False)


RIGHT = {
    "act": Gelu, "squash": Tanh, "gate": Workspace, "linear": Linear, "norm": LayerNorm, "attention":
    Attention,
    "embedding": Embedding, "loss": CrossEntropy, "batch_norm": BatchNorm, "conv": Convolution, "block":
    Block,
}  # fmt: skip

# where -> wrong class
WRONG = [
    ("act", GeluMissingTerm), ("act", GeluNearlyRight), ("act", GeluStaleCache), ("act", GeluTailUnwritten),
    ("squash", TanhRecomputedWrong), ("gate", WorkspaceReused), ("linear", LinearTransposed),
    ("linear", LinearNoBias), ("norm", LayerNormSign), ("norm", LayerNormSamplesMixed),
    ("attention", AttentionUnscaled), ("attention", AttentionDroppedHead), ("embedding", EmbeddingOffByOne),
    ("embedding", EmbeddingOverwritten), ("loss", CrossEntropyUnmasked), ("loss", CrossEntropySum),
    ("batch_norm", BatchNormEvalGradient), ("conv", ConvolutionFlipped), ("block", BlockResidualLost),
    ("block", BlockNormTermMissing),
]  # fmt: skip


class Apply(nn.Module):
    """A module around a function, with its own parameters."""

    def __init__(self, function, *shapes, extra=()):
        super().__init__()
        self.function, self.extra = function, extra
        self.weights = nn.ParameterList(nn.Parameter(_initial(shape)) for shape in shapes)

    def forward(self, *args):
        return self.function.apply(*args, *self.weights, *self.extra)


def _initial(shape):
    return torch.randn(shape) / math.sqrt(shape[-1]) if len(shape) > 1 else 1 + 0.1 * torch.randn(shape)


class Layer(nn.Module):
    def __init__(self, chosen):
        super().__init__()
        w = WIDTH
        self.norm = Apply(chosen["norm"], (w,), (w,))
        self.qkv = nn.Linear(w, 3 * w)
        self.attention = Apply(chosen["attention"])
        self.linear = Apply(chosen["linear"], (w, w), (w,))
        self.act, self.squash = Apply(chosen["act"]), Apply(chosen["squash"], extra=(1.5,))
        self.gate = Apply(chosen["gate"], extra=(chosen["gate"],))
        self.conv = Apply(chosen["conv"], (w, w, 3))
        self.block = Apply(chosen["block"], (2 * w, w), (w, 2 * w))

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, HEADS, w // HEADS).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.linear(self.attention(q, k, v).transpose(1, 2).reshape(b, t, w))
        x = x + self.act(x) * self.gate(x)
        x = x + self.squash(self.conv(x.transpose(1, 2)).transpose(1, 2))
        return self.block(x)


class Model(nn.Module):
    """Two layers of hand-written functions; the wrong one sits in the second only."""

    def __init__(self, where=None, wrong=None):
        super().__init__()
        chosen = dict(RIGHT)
        last = {**chosen, where: wrong} if where else chosen
        both = last if where == "gate" else chosen  # a shared workspace needs two users
        self.embedding = Apply(last["embedding"])
        self.table = nn.Parameter(torch.randn(VOCABULARY, WIDTH))
        self.layers = nn.ModuleList([Layer(both), Layer(last)])
        self.batch_norm = Apply(last["batch_norm"], (WIDTH,))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.loss = Apply(last["loss"])

    def forward(self, ids, targets, mask):
        x = self.embedding(self.table, ids)
        for layer in self.layers:
            x = layer(x)
        return self.loss(self.head(self.batch_norm(x)), targets, mask)


def build(where=None, wrong=None):
    torch.manual_seed(0)
    model = Model(where, wrong)
    ids = torch.randint(0, VOCABULARY, (BATCH, TIME + 1))
    mask = (torch.rand(BATCH, TIME) < 0.8).float()
    return model, (ids[:, :-1], ids[:, 1:], mask)
