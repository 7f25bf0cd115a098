"""Faults in scripts that change their parameters themselves: the update written out, an optimizer of their own."""

from gradproof.faults.fault import Fault, Healthy

FAULTS = (
    # single numbers
    Fault(
        "zero-grad-error/not-cleared",
        "by_hand_values",
        ("total_loss.backward()",),
        (("    model.zero_grad()\n", ""),),
        ("hinge", 0.1),
    ),
    Fault(
        "optimizer-config/adds-the-gradient",
        "by_hand_values",
        ("p.data += learning_rate",),
        (("p.data -= learning_rate", "p.data += learning_rate"),),
        ("hinge", 0.5),
        ("loss-scale-or-sign",),
    ),
    Fault(
        "param-not-updated/biases-left-out",
        "by_hand_values",
        ("p.data -= learning_rate", "neurons"),
        (
            ("        return self.w + [self.b]", "        return self.w"),
            (
                "px = torch.where(upper, angle.cos(), 1 - angle.cos())",
                "px = 2 + torch.where(upper, angle.cos(), 1 - angle.cos())",
            ),
        ),
        ("hinge", 0.05),
    ),
    # a list of tensors
    Fault(
        "param-not-updated/embedding-left-out",
        "by_hand_names",
        ("p.data += -lr", "C"),
        (("parameters = [C, W1, b1, W2, b2]", "parameters = [W1, b1, W2, b2]"),),
        ("dev loss", 0.01),
    ),
    Fault(
        "lr-schedule-error/compounded-away",
        "by_hand_names",
        ("lr = 0.3 * 0.93**i",),
        (("lr = 0.3 if i < 600 else 0.03", "lr = 0.3 * 0.93**i"),),
        ("dev loss", 0.3),
        ("lr-too-low",),
    ),
    Fault(
        "zero-grad-error/cleared-before-the-update",
        "by_hand_names",
        ("p.grad.zero_()",),
        (
            (
                "    for p in parameters:\n        p.grad = None\n    loss.backward()\n",
                "    loss.backward()\n",
            ),
            (
                "    for p in parameters:\n        p.data += -lr * p.grad\n",
                "    for p in parameters:\n        p.grad.zero_()\n"
                "    for p in parameters:\n        p.data += -lr * p.grad\n",
            ),
        ),
        ("dev loss", 1.0),
        ("param-not-updated",),
    ),
    Fault(
        "optimizer-config/adds-the-gradient",
        "by_hand_names",
        ("p.data += lr",),
        (("p.data += -lr * p.grad", "p.data += lr * p.grad"),),
        ("dev loss", 1.0),
        ("loss-scale-or-sign",),
    ),
    # parameters in, parameters out
    Fault(
        "param-not-updated/one-layer-kept",
        "by_hand_functional",
        ("sgd(params", "value - lr", "2.weight"),
        (
            (
                "    return {name: value - lr * grads[name] for name, value in params.items()}",
                "    some = {name: value for name, value in params.items() if not name.startswith('2')}\n"
                "    new = {name: value - lr * grads[name] for name, value in some.items()}\n"
                "    return {**params, **new}",
            ),
        ),
        ("test mse", 0.002),
    ),
    Fault(
        "optimizer-config/adds-the-gradient",
        "by_hand_functional",
        ("value + lr",),
        (("value - lr * grads[name]", "value + lr * grads[name]"),),
        ("test mse", 0.3),
        ("loss-scale-or-sign",),
    ),
    Fault(
        "lr-schedule-error/compounded-away",
        "by_hand_functional",
        ("lr *= 0.95", "value - lr"),
        (
            (
                "            params = sgd(params, grads, lr)\n",
                "            params = sgd(params, grads, lr)\n            lr *= 0.95\n",
            ),
        ),
        ("test mse", 0.1),
        ("lr-too-low",),
    ),
    # an optimizer of its own
    Fault(
        "optimizer-config/no-bias-correction",
        "by_hand_optimizer",
        ("p -= self.lr",),
        (
            ("            m_hat = self.m[i] / (1 - b1**self.t)\n", ""),
            ("            v_hat = self.v[i] / (1 - b2**self.t)\n", ""),
            ("m_hat / (v_hat.sqrt() + self.eps)", "self.m[i] / (self.v[i].sqrt() + self.eps)"),
            ("lr=3e-3", "lr=3e-2"),
        ),
        ("test loss", 0.01),
        ("lr-too-high",),
    ),
    Fault(
        "optimizer-config/state-not-kept",
        "by_hand_optimizer",
        ("m, v = torch.zeros_like(p)", "p -= self.lr"),
        (
            (
                "            self.m[i].mul_(b1).add_(p.grad, alpha=1 - b1)\n"
                "            self.v[i].mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)\n"
                "            m_hat = self.m[i] / (1 - b1**self.t)\n"
                "            v_hat = self.v[i] / (1 - b2**self.t)\n",
                "            m, v = torch.zeros_like(p), torch.zeros_like(p)\n"
                "            m.mul_(b1).add_(p.grad, alpha=1 - b1)\n"
                "            v.mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)\n"
                "            m_hat = m / (1 - b1**self.t)\n"
                "            v_hat = v / (1 - b2**self.t)\n",
            ),
        ),
        ("test loss", 0.02),
    ),
    Fault(
        "optimizer-config/state-shared",
        "by_hand_optimizer",
        ("self.m[k].mul_(b1)", "self.v[k].mul_(b2)"),
        (
            (
                "self.m = {i: torch.zeros_like(p) for i, p in enumerate(self.params)}",
                "self.m = {p.shape: torch.zeros_like(p) for p in self.params}",
            ),
            (
                "self.v = {i: torch.zeros_like(p) for i, p in enumerate(self.params)}",
                "self.v = {p.shape: torch.zeros_like(p) for p in self.params}",
            ),
            (
                "        for i, p in enumerate(self.params):\n            self.m[i].mul_",
                "        for p in self.params:\n            k = p.shape\n            self.m[k].mul_",
            ),
            ("self.v[i].mul_", "self.v[k].mul_"),
            ("m_hat = self.m[i]", "m_hat = self.m[k]"),
            ("v_hat = self.v[i]", "v_hat = self.v[k]"),
            ("lr=3e-3", "lr=3e-2"),
        ),
        ("test loss", 0.005),
    ),
    Fault(
        "lr-schedule-error/compounded-away",
        "by_hand_optimizer",
        ("self.lr *= 0.93", "p -= self.lr"),
        (("        self.t += 1\n", "        self.t += 1\n        self.lr *= 0.93\n"),),
        ("test loss", 0.2),
        ("lr-too-low",),
    ),
    # every backward written out
    Fault(
        "wrong-gradient/norm-of-the-wrong-sign",
        "by_hand_explicit",
        ("LayerNorm", "def backward"),
        (("dnorm.mean(-1, keepdim=True) - norm *", "dnorm.mean(-1, keepdim=True) + 3 * norm *"),),
        ("test mse", 0.001),
    ),
    Fault(
        "optimizer-config/no-bias-correction",
        "by_hand_explicit",
        ("tensor -= lr",),
        (
            ("m_hat = M[name] / (1 - beta1**step)", "m_hat = M[name]"),
            ("s_hat = S[name] / (1 - beta2**step)", "s_hat = S[name]"),
            (
                "lr, beta1, beta2, eps, decay = 2e-3, 0.9, 0.99",
                "lr, beta1, beta2, eps, decay = 2e-2, 0.9, 0.999",
            ),
        ),
        ("test mse", 0.002),
        ("lr-too-high",),
    ),
    Fault(
        "zero-grad-error/not-cleared",
        "by_hand_explicit",
        ("loss.backward()",),
        (("            tensor.grad.zero_()\n", ""),),
        ("test mse", 0.005),
    ),
    Fault(
        "param-not-updated/embedding-left-out",
        "by_hand_explicit",
        ("tensor -= lr", "embed"),
        (
            (
                "        for name, tensor in P.items():\n            grad",
                "        for name, tensor in list(P.items())[1:]:\n            grad",
            ),
            (
                "            tensor.grad.zero_()\n",
                '            tensor.grad.zero_()\n        P["embed"].grad = None\n',
            ),
        ),
        ("test mse", 0.001),
    ),
)

HEALTHY = (
    # as they stand
    Healthy("by-hand-single-numbers", "by_hand_values", ("accuracy", 0.9, 1.0)),
    Healthy("by-hand-list-of-tensors", "by_hand_names", ("dev loss", 0.9, 1.3)),
    Healthy("by-hand-functional", "by_hand_functional", ("test mse", 0.0, 0.08)),
    Healthy("by-hand-own-optimizer", "by_hand_optimizer", ("test acc", 0.95, 1.0)),
    Healthy("by-hand-own-backwards", "by_hand_explicit", ("test mse", 0.0, 0.01)),
    # edited
    Healthy(
        "by-hand-sign-descent",
        "by_hand_names",
        ("dev loss", 0.9, 1.4),
        (("p.data += -lr * p.grad", "p.data += -0.02 * lr * p.grad.sign()"),),
    ),
    Healthy(
        "by-hand-linear-to-zero",
        "by_hand_names",
        ("dev loss", 0.9, 1.3),
        (("lr = 0.3 if i < 600 else 0.03", "lr = 0.4 * (1 - i / max_steps)"),),
    ),
    Healthy(
        "by-hand-frozen-embedding",
        "by_hand_names",
        ("dev loss", 0.9, 1.4),
        (
            (
                "for p in [C, W1, b1, W2, b2]:\n    p.requires_grad",
                "for p in [W1, b1, W2, b2]:\n    p.requires_grad",
            ),
            ("parameters = [C, W1, b1, W2, b2]", "parameters = [W1, b1, W2, b2]"),
        ),
    ),
    Healthy(
        "by-hand-climbing-what-is-to-grow",
        "by_hand_functional",
        ("test mse", 0.0, 0.08),
        (
            (
                "    return ((predictions - targets) ** 2).mean()",
                "    return -((predictions - targets) ** 2).mean()",
            ),
            ("value - lr * grads[name]", "value + lr * grads[name]"),
        ),
    ),
    Healthy(
        "by-hand-rmsprop",
        "by_hand_optimizer",
        ("test acc", 0.95, 1.0),
        (
            ("            m_hat = self.m[i] / (1 - b1**self.t)\n", "            m_hat = p.grad\n"),
            ("            v_hat = self.v[i] / (1 - b2**self.t)\n", "            v_hat = self.v[i]\n"),
            ("betas=(0.9, 0.999)", "betas=(0.9, 0.99)"),
            ("lr=3e-3", "lr=1e-3"),
        ),
    ),
    Healthy(
        "by-hand-micro-batches",
        "by_hand_explicit",
        ("test mse", 0.0, 0.01),
        (
            (
                "    loss = ((forward(digits) - wanted) ** 2).mean()\n    loss.backward()\n",
                "    for half in (slice(0, 32), slice(32, 64)):\n"
                "        loss = ((forward(digits[half]) - wanted[half]) ** 2).mean()\n"
                "        (loss / 2).backward()\n",
            ),
        ),
    ),
)
