"""Kernels behind a pointer, in C: right ones in many habits, and the same with one thing wrong each."""

from __future__ import annotations

import ctypes
import math
import subprocess
from pathlib import Path

import torch
from torch import nn
from torch.autograd import Function

SOURCE = r"""
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
typedef long L;

static float gelu1(float x) { return 0.5f * x * (1 + erff(x * 0.70710678f)); }
static float dgelu1(float x) {
  return 0.5f * (1 + erff(x * 0.70710678f)) + x * 0.39894228f * expf(-0.5f * x * x);
}
int gelu(const float *x, float *y, L n) { for (L i = 0; i < n; i++) y[i] = gelu1(x[i]); return 0; }
int gelu_blocks(const float *x, float *y, L n) {  /* whole blocks of eight only */
  for (L i = 0; i < n / 8 * 8; i++) y[i] = gelu1(x[i]);
  return 0;
}
int gelu_small(const float *x, float *y, L n) {  /* at most 1024 at a time, and says so */
  if (n > 1024) return -2;
  return gelu(x, y, n);
}
int gelu_beyond(const float *x, float *y, L n) { for (L i = 0; i <= n; i++) y[i] = i < n ? gelu1(x[i]) : 0; return 0; }
int dgelu(const float *x, const float *g, float *d, L n) {
  for (L i = 0; i < n; i++) d[i] = g[i] * dgelu1(x[i]);
  return 0;
}
int dgelu_blocks(const float *x, const float *g, float *d, L n) { return dgelu(x, g, d, n / 8 * 8); }

int relu_(float *x, L n) { for (L i = 0; i < n; i++) if (x[i] < 0) x[i] = 0; return 0; }
int relu_blocks_(float *x, L n) { return relu_(x, n / 8 * 8); }
int axpy_(float *y, const float *x, float a, L n) { for (L i = 0; i < n; i++) y[i] += a * x[i]; return 0; }
int relu_copy(const float *x, float *y, L n) { memcpy(y, x, n * 4); return relu_(y, n); }
int fill_scaled(float *out, const float *x, L n) { for (L i = 0; i < n; i++) out[i] = 3 * x[i]; return 0; }

int add_strided(const float *x, L sx, L tx, const float *y, L sy, L ty, float *out, L n, L c) {
  for (L i = 0; i < n; i++) for (L j = 0; j < c; j++) out[i * c + j] = x[i * sx + j * tx] + y[i * sy + j * ty];
  return 0;
}

int softmax(const float *x, float *y, L n, L c, int shift) {
  for (L i = 0; i < n; i++) {
    float m = shift ? -INFINITY : 0, s = 0;
    if (shift) for (L j = 0; j < c; j++) m = fmaxf(m, x[i * c + j]);
    for (L j = 0; j < c; j++) s += y[i * c + j] = expf(x[i * c + j] - m);
    for (L j = 0; j < c; j++) y[i * c + j] /= s;
  }
  return 0;
}
int dsoftmax(const float *y, const float *g, float *d, L n, L c) {
  for (L i = 0; i < n; i++) {
    float s = 0;
    for (L j = 0; j < c; j++) s += g[i * c + j] * y[i * c + j];
    for (L j = 0; j < c; j++) d[i * c + j] = y[i * c + j] * (g[i * c + j] - s);
  }
  return 0;
}

static float to_bf16(float x) {
  uint32_t u; memcpy(&u, &x, 4); u = (u + 0x7fff + ((u >> 16) & 1)) & 0xffff0000u; memcpy(&x, &u, 4); return x;
}
int rms(const float *x, const float *w, float *y, float *r, L n, L c, float eps, int how) {
  for (L i = 0; i < n; i++) {
    float s = 0;
    for (L j = 0; j < c; j++) { s += x[i * c + j] * x[i * c + j]; if (how == 2) s = to_bf16(s); }
    r[i] = how == 1 ? 1 / (s / c + eps) : 1 / sqrtf(s / c + eps);
    for (L j = 0; j < c; j++) y[i * c + j] = x[i * c + j] * r[i] * w[j];
  }
  return 0;
}
int drms(const float *x, const float *w, const float *r, const float *g, float *dx, float *dw, L n, L c, int clear) {
  if (clear) for (L j = 0; j < c; j++) dw[j] = 0;
  for (L i = 0; i < n; i++) {
    float d = 0;
    for (L j = 0; j < c; j++) d += g[i * c + j] * w[j] * x[i * c + j];
    for (L j = 0; j < c; j++) {
      dx[i * c + j] = r[i] * (g[i * c + j] * w[j] - x[i * c + j] * r[i] * r[i] * d / c);
      dw[j] += g[i * c + j] * x[i * c + j] * r[i];
    }
  }
  return 0;
}
int layer_norm(const float *x, const float *w, const float *b, float *y, L n, L c, int unbiased) {
  for (L i = 0; i < n; i++) {
    float m = 0, v = 0;
    for (L j = 0; j < c; j++) m += x[i * c + j];
    m /= c;
    for (L j = 0; j < c; j++) v += (x[i * c + j] - m) * (x[i * c + j] - m);
    v = 1 / sqrtf(v / (unbiased ? c - 1 : c) + 1e-5f);
    for (L j = 0; j < c; j++) y[i * c + j] = (x[i * c + j] - m) * v * w[j] + b[j];
  }
  return 0;
}
int linear(const float *x, const float *w, const float *b, float *y, L n, L k, L m, L from) {
  for (L i = 0; i < n; i++) for (L o = 0; o < m; o++) {
    float s = b[o];
    for (L j = 0; j < k - from; j++) s += x[i * k + j] * w[o * k + j];
    y[i * m + o] = s;
  }
  return 0;
}
int attention(const float *q, const float *k, const float *v, float *work, float *out, L b, L t, L d, float scale) {
  for (L n = 0; n < b; n++, q += t * d, k += t * d, v += t * d, out += t * d) for (L i = 0; i < t; i++) {
    for (L j = 0; j < t; j++) {
      work[j] = 0;
      for (L c = 0; c < d; c++) work[j] += q[i * d + c] * k[j * d + c];
      work[j] *= scale;
    }
    softmax(work, work, 1, t, 1);
    for (L c = 0; c < d; c++) {
      float s = 0;
      for (L j = 0; j < t; j++) s += work[j] * v[j * d + c];
      out[i * d + c] = s;
    }
  }
  return 0;
}
int cross_entropy(const float *x, const L *y, float *loss, L n, L c) {
  for (L i = 0; i < n; i++) {
    float m = -INFINITY, s = 0;
    for (L j = 0; j < c; j++) m = fmaxf(m, x[i * c + j]);
    for (L j = 0; j < c; j++) s += expf(x[i * c + j] - m);
    loss[i] = logf(s) + m - x[i * c + y[i]];
  }
  return 0;
}
int segment_sum(const float *x, const L *ids, float *out, L n, L c, int overwrite) {
  for (L i = 0; i < n; i++) for (L j = 0; j < c; j++)
    out[ids[i] * c + j] = x[i * c + j] + (overwrite ? 0 : out[ids[i] * c + j]);
  return 0;
}
int sum_any_order(const float *x, float *out, L n) {  /* begins somewhere else each time */
  L start = rand() % n; float s = 0;
  for (L i = 0; i < n; i++) s += x[(start + i) % n];
  *out = s;
  return 0;
}
int sum_skipping(const float *x, float *out, L n) {  /* what is small beside the largest is not worth an addition */
  float m = 0, s = 0;
  for (L i = 0; i < n; i++) m = fmaxf(m, fabsf(x[i]));
  for (L i = 0; i < n; i++) if (fabsf(x[i]) > 1e-3f * m) s += x[i];
  *out = s;
  return 0;
}
int sum_racing(const float *x, float *out, L n) {  /* as when two threads add to one number, and one is lost */
  static int turn; float s = 0;
  for (L i = 0; i < n; i++) s += x[i];
  *out = s - (turn++ % 3 == 1 ? x[0] : 0);
  return 0;
}
int add_to(const float *x, float *out, L n) { for (L i = 0; i < n; i++) out[i] += 2 * x[i]; return 0; }
int silu_bf16(const uint16_t *x, uint16_t *y, L n) {
  for (L i = 0; i < n; i++) {
    uint32_t u = (uint32_t)x[i] << 16; float v; memcpy(&v, &u, 4);
    v = to_bf16(v / (1 + expf(-v))); memcpy(&u, &v, 4); y[i] = u >> 16;
  }
  return 0;
}
int adamw(float *p, const float *g, float *m, float *v, L n, float lr, float b1, float b2, float eps, float wd, L t,
          int correct) {
  float c1 = correct ? 1 - powf(b1, t) : 1, c2 = correct ? 1 - powf(b2, t) : 1;
  for (L i = 0; i < n; i++) {
    m[i] = b1 * m[i] + (1 - b1) * g[i];
    v[i] = b2 * v[i] + (1 - b2) * g[i] * g[i];
    p[i] = p[i] * (1 - lr * wd) - lr * (m[i] / c1) / (sqrtf(v[i] / c2) + eps);
  }
  return 0;
}
"""


class Library:
    """The shared library, compiled once; `call` takes tensors, whole numbers and numbers."""

    def __init__(self) -> None:
        self.lib: ctypes.CDLL | None = None

    def build(self, folder: Path) -> None:
        (folder / "kernels.c").write_text(SOURCE)
        made = folder / "kernels.so"
        command = ["cc", "-O1", "-shared", "-fPIC", str(folder / "kernels.c"), "-o", str(made), "-lm"]
        subprocess.run(command, check=True)
        self.lib = ctypes.CDLL(str(made))

    def call(self, name: str, *args) -> int:
        kinds = {int: ctypes.c_long, float: ctypes.c_float, bool: ctypes.c_int}
        given = [
            ctypes.c_void_p(a.data_ptr()) if isinstance(a, torch.Tensor) else kinds[type(a)](a) for a in args
        ]
        return getattr(self.lib, name)(*given)


C = Library()


def elementwise(name, x, out=None):
    x = x.contiguous()
    out = torch.empty_like(x) if out is None else out
    C.call(name, x, out, x.numel())
    return out


def make_gelu(forward="gelu", backward="dgelu", factor=1.0, contiguous=True, inference="gelu"):
    class Gelu(Function):
        @staticmethod
        def forward(ctx, x):
            x = x.contiguous()
            ctx.save_for_backward(x)
            return elementwise(forward if ctx.needs_input_grad[0] else inference, x)

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            g, d = g.contiguous() if contiguous else g, torch.empty_like(x)
            C.call(backward, x, g, d, x.numel())
            return d * factor

    return Gelu


def gelu(x):
    return elementwise("gelu", x)


def gelu_tail(x):
    return elementwise("gelu_blocks", x)


def gelu_ignoring(x):
    x, out = x.contiguous(), torch.empty(x.shape)
    C.call("gelu_small", x, out, x.numel())
    return out


def gelu_heeding(x):
    x, out = x.contiguous(), torch.empty(x.shape)
    if code := C.call("gelu_small", x, out, x.numel()):
        raise RuntimeError(f"gelu_small returned {code}")
    return out


def rows(x):
    return x.numel() // x.shape[-1], x.shape[-1]


def softmax_contiguous_only(x):
    if not x.is_contiguous():
        raise ValueError("x must be contiguous")
    out = torch.empty_like(x)
    C.call("softmax", x, out, *rows(x), True)
    return out


def softmax_of_memory(x):
    out = torch.empty(x.shape)
    C.call("softmax", x, out, *rows(x), True)
    return out


def softmax_plain(x):
    x = x.contiguous()
    out = torch.empty_like(x)
    C.call("softmax", x, out, *rows(x), False)
    return out


class Softmax(Function):
    @staticmethod
    def forward(ctx, x):
        y = softmax_contiguous_only(x.contiguous())
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        d = torch.empty_like(y)
        C.call("dsoftmax", y, g.contiguous(), d, *rows(y))
        return d


class HalfGelu(Function):
    """Half the gradient of GELU, in a class that another process can import."""

    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        ctx.save_for_backward(x)
        return elementwise("gelu", x)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        d = torch.empty_like(x)
        C.call("dgelu", x, g.contiguous(), d, x.numel())
        return d / 2


class TailGelu(HalfGelu):
    """A whole gradient, and a tail that is not written."""

    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        ctx.save_for_backward(x)
        return elementwise("gelu_blocks", x)

    @staticmethod
    def backward(ctx, g):
        return 2 * HalfGelu.backward(ctx, g)


class Relu(Function):
    """In place, into a copy: the dispatcher sees a clone and nothing else."""

    @staticmethod
    def forward(ctx, x):
        y = x.clone(memory_format=torch.contiguous_format)
        C.call("relu_", y, y.numel())
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, g):
        return g * (ctx.saved_tensors[0] > 0)


def make_rms(how=0, clear=True):
    class RMSNorm(Function):
        @staticmethod
        def forward(ctx, x, weight):
            x, weight = x.contiguous(), weight.contiguous()
            y, r = torch.empty_like(x), torch.empty(rows(x)[0])
            C.call("rms", x, weight, y, r, *rows(x), 1e-6, how)
            ctx.save_for_backward(x, weight, r)
            return y

        @staticmethod
        def backward(ctx, g):
            x, weight, r = ctx.saved_tensors
            dx, dw = torch.empty_like(x), torch.empty_like(weight)
            C.call("drms", x, weight, r, g.contiguous(), dx, dw, *rows(x), clear)
            return dx, dw

    return RMSNorm


def make_rms_forward(how):
    def rms_norm(x, weight):
        x, weight = x.contiguous(), weight.contiguous()
        y, r = torch.empty_like(x), torch.empty(rows(x)[0])
        C.call("rms", x, weight, y, r, *rows(x), 1e-6, how)
        return y

    return rms_norm


def make_layer_norm(unbiased=False):
    def layer_norm(x, weight, bias):
        x, y = x.contiguous(), torch.empty(x.shape)
        C.call("layer_norm", x, weight.contiguous(), bias.contiguous(), y, *rows(x), unbiased)
        return y

    return layer_norm


def make_linear(left_out=0):
    def linear(x, weight, bias):
        (n, k), m = rows(x), weight.shape[0]
        y = torch.empty(n, m)
        C.call("linear", x.contiguous(), weight.contiguous(), bias.contiguous(), y, n, k, m, left_out)
        return y

    return linear


def make_attention(scaled=True):
    def attention(q, k, v):
        b, t, d = q.shape
        out, workspace = torch.empty(q.shape), torch.empty(t)
        scale = 1 / math.sqrt(d) if scaled else 1.0
        C.call("attention", q.contiguous(), k.contiguous(), v.contiguous(), workspace, out, b, t, d, scale)
        return out

    return attention


def make_cross_entropy(by_classes=False):
    def cross_entropy(logits, targets):
        losses = torch.empty(len(logits))
        C.call("cross_entropy", logits.contiguous(), targets.contiguous(), losses, *logits.shape)
        return losses.sum() / logits.shape[1 if by_classes else 0]

    return cross_entropy


def make_segment_sum(overwrite=False):
    def segment_sum(x, ids, count):
        out = torch.zeros(count, x.shape[1])
        C.call("segment_sum", x.contiguous(), ids.contiguous(), out, *x.shape, overwrite)
        return out

    return segment_sum


def make_sum(name):
    def sum_all(x):
        x, out = x.contiguous(), torch.empty(())
        C.call(name, x, out, x.numel())
        return out

    return sum_all


def twice_into_empty(x):
    return elementwise("add_to", x)


def twice_into_zeros(x):
    return elementwise("add_to", x, torch.zeros(x.shape))


def make_relu_(name="relu_"):
    def relu_inplace(x):
        work = x.contiguous()
        C.call(name, work, work.numel())
        return x if work is x else x.copy_(work)

    return relu_inplace


def axpy_(y, x):
    if not y.is_contiguous() or not x.is_contiguous():
        raise ValueError("axpy_ takes contiguous tensors")
    C.call("axpy_", y, x, 0.5, y.numel())


def axpy_of_contiguous_(y, x):
    if y.is_contiguous() and x.is_contiguous():
        C.call("axpy_", y, x, 0.5, y.numel())


def fill_scaled(out, x):
    work = torch.empty(out.shape)
    C.call("fill_scaled", work, x.contiguous(), x.numel())
    out.copy_(work)


def gelu_beyond(out, x):
    if not out.is_contiguous():
        raise ValueError("out must be contiguous")
    C.call("gelu_beyond", x.contiguous(), out, x.numel())


def add_strided(x, y):
    out = torch.empty(x.shape)
    C.call("add_strided", x, *x.stride(), y, *y.stride(), out, *x.shape)
    return out


def silu(x):
    return elementwise("silu_bf16", x)


def make_adamw(correct=True):
    def adamw_step(p, g, m, v, lr, beta1, beta2, eps, weight_decay, step):
        work = [x.contiguous() for x in (p, g, m, v)]
        C.call("adamw", *work, p.numel(), lr, beta1, beta2, eps, weight_decay, step, correct)
        for own, new in zip((p, m, v), (work[0], work[2], work[3]), strict=True):
            if own is not new:
                own.copy_(new)

    return adamw_step


class FusedAdamW(torch.optim.Optimizer):
    """AdamW in C; a parameter that is not contiguous goes through a copy."""

    correct, copies, decays = True, True, True

    def __init__(self, params, lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            decay = group["weight_decay"] if self.decays else 0.0
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(t=0, m=torch.zeros(p.shape), v=torch.zeros(p.shape))
                state["t"] += 1
                work = p.contiguous()
                numbers = (group["lr"], *group["betas"], group["eps"], decay)
                moments = (p.grad.contiguous(), state["m"], state["v"])
                C.call("adamw", work, *moments, p.numel(), *numbers, state["t"], self.correct)
                if self.copies and work is not p:
                    p.copy_(work)


class IdleAdamW(FusedAdamW):
    copies = False


class UndecayedAdamW(FusedAdamW):
    decays = False


class Scaled(nn.Module):
    """GELU with a weight, by the library; `slip` multiplies what comes out in eval mode."""

    def __init__(self, slip=1.0):
        super().__init__()
        self.weight, self.slip = nn.Parameter(torch.ones(8)), slip

    def forward(self, x):
        out = GELU.apply(x) * self.weight
        return out if self.training else out * self.slip


class Dropping(nn.Module):
    """Dropout before GELU; what is kept is not scaled up where `scaled` is false."""

    def __init__(self, scaled=True):
        super().__init__()
        self.scaled = scaled

    def forward(self, x):
        if not self.training:
            return GELU.apply(x)
        kept = torch.rand(x.shape) < 0.75
        return GELU.apply(x) * kept / (0.75 if self.scaled else 1.0)


GELU = make_gelu()


@torch.library.custom_op("gradproof_kernels::gelu", mutates_args=())
def operator(x: torch.Tensor) -> torch.Tensor:
    return elementwise("gelu", x)


def _operator_setup(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])


def _operator_backward(ctx, g):
    (x,) = ctx.saved_tensors
    x, g, d = x.contiguous(), g.contiguous(), torch.empty(x.shape)
    C.call("dgelu", x, g, d, x.numel())
    return d


operator.register_autograd(_operator_backward, setup_context=_operator_setup)


def draw(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(11)).to(dtype)


def moments(shape=(5, 7)):
    """A parameter, its gradient, both moments, and the numbers of a second step."""
    p, g, m, v = (draw(*shape).roll(k) for k in range(4))
    return p, g, 0.1 * m, 0.1 * v.square(), 1e-2, 0.9, 0.999, 1e-8, 0.1, 2


IDS = torch.tensor([0, 3, 1, 3, 0, 2])
TARGETS = torch.tensor([3, 0, 9, 2, 2, 7])

# name -> (kernel, inputs)
HEALTHY = {
    "autograd.Function": (GELU, (draw(5, 8),)),
    "no backward": (gelu, (draw(5, 7),)),
    "contiguous-only, and says so": (softmax_contiguous_only, (draw(4, 9),)),
    "contiguous-only, made contiguous": (Softmax, (draw(4, 9),)),
    "RMSNorm with backward": (make_rms(), (draw(5, 8), torch.ones(8))),
    "LayerNorm": (make_layer_norm(), (draw(5, 8), torch.ones(8), torch.zeros(8))),
    "linear": (make_linear(), (draw(5, 8), draw(3, 8), draw(3))),
    "with a workspace": (make_attention(), (draw(2, 5, 4), draw(2, 5, 4).roll(1), draw(2, 5, 4).roll(2))),
    "cross-entropy": (make_cross_entropy(), (draw(6, 10), TARGETS)),
    "segment sum": (make_segment_sum(), (draw(6, 5), IDS, 4)),
    "another order each time": (make_sum("sum_any_order"), (draw(300),)),
    "accumulates into zeros": (twice_into_zeros, (draw(5, 7),)),
    "in place": (make_relu_(), (draw(5, 9),)),
    "in place, two arguments, contiguous-only": (axpy_, (draw(5, 7), draw(5, 7).roll(1))),
    "writes into an argument": (fill_scaled, (torch.zeros(5, 7), draw(5, 7))),
    "takes strides": (add_strided, (draw(5, 7), draw(5, 7).roll(1))),
    "bfloat16 only": (silu, (draw(5, 7, dtype=torch.bfloat16),)),
    "heeds its return code": (gelu_heeding, (draw(5, 7),)),
    "a step in place": (make_adamw(), moments()),
    "an optimizer": (FusedAdamW, ()),
    "a module": (Scaled(), (draw(5, 8),)),
    "a module that draws": (Dropping(), (draw(5, 8),)),
    "an operator": (operator, (draw(5, 7),)),
}

# name -> (kernel, inputs, words of the first sentence)
WRONG = {
    "unwritten tail": (gelu_tail, (draw(5, 7),), "leaves the last 3 of 35 entries of the output unwritten"),
    "missing term": (
        make_linear(1),
        (draw(5, 8), draw(3, 8), draw(3)),
        "leaves the last of 8 terms out of each sum",
    ),
    "wrong for a layout": (softmax_of_memory, (draw(4, 9),), "is wrong where x is transposed"),
    "rounded accumulator": (
        make_rms_forward(2),
        (draw(5, 300), torch.ones(300)),
        "bits only, as if something inside were bfloat16",
    ),
    "lost small addends": (
        make_sum("sum_skipping"),
        (1 + draw(300).abs(),),
        "loses small addends beside a large one",
    ),
    "wrong in eval": (Scaled(0.5), (draw(5, 8),), "something else in eval mode than in train mode"),
    "drops without scaling": (Dropping(False), (draw(5, 8),), "in train mode Dropping gives 0.7"),
    "a race": (make_sum("sum_racing"), (draw(300),), "another result for the same input, beyond rounding"),
    "a step that does nothing": (
        IdleAdamW,
        (),
        "does nothing for a parameter that is not contiguous (transposed)",
    ),
    "does nothing in place": (
        axpy_of_contiguous_,
        (draw(5, 7), draw(5, 7).roll(1)),
        "does nothing to y where it is not contiguous (transposed)",
    ),
    "return code ignored": (gelu_ignoring, (draw(5, 7),), "gelu_small returned -2, and nobody looked at it"),
    "backward by a factor": (
        make_gelu(factor=0.5),
        (draw(5, 8),),
        "backward of Gelu is wrong with respect to x",
    ),
    "backward's unwritten tail": (
        make_gelu(backward="dgelu_blocks"),
        (draw(5, 7),),
        "backward of Gelu leaves the last 3 of 35 entries of the gradient of x unwritten",
    ),
    "backward for a layout": (
        make_gelu(contiguous=False),
        (draw(5, 7),),
        "backward of Gelu is wrong where incoming gradient is transposed",
    ),
    "accumulates into dirt": (twice_into_empty, (draw(5, 7),), "reads memory that nothing has written"),
    "backward into dirt": (
        make_rms(clear=False),
        (draw(5, 8), torch.ones(8)),
        "backward of RMSNorm reads memory that nothing has written: the gradient of weight depends",
    ),
    "mean square": (
        make_rms_forward(1),
        (draw(5, 8), torch.ones(8)),
        "divides by the mean square, not by its root",
    ),
    "n - 1": (
        make_layer_norm(True),
        (draw(5, 8), torch.ones(8), torch.zeros(8)),
        "takes the variance over n - 1, not n",
    ),
    "no maximum": (softmax_plain, (draw(4, 9),), "the largest of a row is not subtracted first"),
    "no scale": (
        make_attention(False),
        (draw(2, 5, 4), draw(2, 5, 4).roll(1), draw(2, 5, 4).roll(2)),
        "does not scale the scores by 1/√d",
    ),
    "by classes": (
        make_cross_entropy(True),
        (draw(6, 10), TARGETS),
        "divides by the 10 classes, not by the 6 rows",
    ),
    "overwritten segments": (
        make_segment_sum(True),
        (draw(6, 5), IDS, 4),
        "keeps the last of a segment, not the sum",
    ),
    "beside its output": (
        gelu_beyond,
        (torch.zeros(5, 7), draw(5, 7)),
        "writes into memory beside out",
    ),
    "in place, but its tail": (
        make_relu_("relu_blocks_"),
        (draw(5, 9),),
        "never changes the last 5 of 45 entries of x",
    ),
    "no bias correction": (make_adamw(False), moments(), "leaves the bias correction out"),
    "no weight decay": (UndecayedAdamW, (), "leaves the weight decay out"),
    "another path for inference": (
        make_gelu(inference="relu_copy"),
        (draw(5, 8),),
        "something else under torch.no_grad()",
    ),
}
