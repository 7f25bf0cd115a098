"""Digit sums from sequences of digits: every layer with its own forward and backward, and the update written out."""

import torch

torch.manual_seed(11)

V, T, D, H = 10, 6, 24, 64  # digits, length, width, hidden


class Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return x @ weight + bias

    @staticmethod
    def backward(ctx, dout):
        x, weight = ctx.saved_tensors
        return dout @ weight.T, x.T @ dout, dout.sum(0)


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        gate = torch.sigmoid(x)
        ctx.save_for_backward(x, gate)
        return x * gate

    @staticmethod
    def backward(ctx, dout):
        x, gate = ctx.saved_tensors
        return dout * (gate + x * gate * (1 - gate))


class LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gain, shift):
        mean = x.mean(-1, keepdim=True)
        rstd = (x.var(-1, unbiased=False, keepdim=True) + 1e-5).rsqrt()
        norm = (x - mean) * rstd
        ctx.save_for_backward(norm, gain, rstd)
        return norm * gain + shift

    @staticmethod
    def backward(ctx, dout):
        norm, gain, rstd = ctx.saved_tensors
        dnorm = dout * gain
        inner = dnorm - dnorm.mean(-1, keepdim=True) - norm * (dnorm * norm).mean(-1, keepdim=True)
        return inner * rstd, (dout * norm).sum(0), dout.sum(0)


P = {
    "embed": torch.randn(V, D) * 0.3,
    "w1": torch.randn(T * D, H) / (T * D) ** 0.5,
    "b1": torch.zeros(H),
    "gain": torch.ones(H),
    "shift": torch.zeros(H),
    "w2": torch.randn(H, H) / H**0.5,
    "b2": torch.zeros(H),
    "w3": torch.randn(H, 1) / H**0.5,
    "b3": torch.zeros(1),
}
for tensor in P.values():
    tensor.requires_grad_()


def forward(digits):
    x = P["embed"][digits].flatten(1)
    h = Swish.apply(Linear.apply(x, P["w1"], P["b1"]))
    h = LayerNorm.apply(h, P["gain"], P["shift"])
    h = Swish.apply(Linear.apply(h, P["w2"], P["b2"]))
    return Linear.apply(h, P["w3"], P["b3"])[:, 0]


lr, beta1, beta2, eps, decay = 2e-3, 0.9, 0.99, 1e-8, 0.01
M = {name: torch.zeros_like(tensor) for name, tensor in P.items()}
S = {name: torch.zeros_like(tensor) for name, tensor in P.items()}

for step in range(1, 501):
    digits = torch.randint(0, V, (64, T))
    wanted = (digits.sum(1) - 4.5 * T) / (3 * T**0.5)
    loss = ((forward(digits) - wanted) ** 2).mean()
    loss.backward()
    with torch.no_grad():
        for name, tensor in P.items():
            grad = tensor.grad
            M[name] = beta1 * M[name] + (1 - beta1) * grad
            S[name] = beta2 * S[name] + (1 - beta2) * grad * grad
            m_hat = M[name] / (1 - beta1**step)
            s_hat = S[name] / (1 - beta2**step)
            tensor -= lr * (m_hat / (s_hat.sqrt() + eps) + decay * tensor)
            tensor.grad.zero_()
    if step % 100 == 1:
        print(f"step {step} loss {loss.item():.4f}")

with torch.no_grad():
    digits = torch.randint(0, V, (1000, T))
    wanted = (digits.sum(1) - 4.5 * T) / (3 * T**0.5)
    print(f"test mse {((forward(digits) - wanted) ** 2).mean().item():.4f}")
