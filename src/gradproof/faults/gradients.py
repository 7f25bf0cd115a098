"""Faults in how gradients come about: non-finite values, backwards, accumulation, clipping, cut paths."""

from gradproof.faults.fault import Fault

FAULTS = (
    # forward-nonfinite
    Fault(
        "forward-nonfinite/log-of-relu",
        "vae_glyphs",
        ("torch.log", "encode", "to_logvar"),
        (
            (
                "return self.to_mu(h), self.to_logvar(h)",
                "return self.to_mu(h), torch.log(F.relu(self.to_logvar(h)))",
            ),
        ),
        ("Average loss", 1.0),
    ),
    Fault(
        "forward-nonfinite/all-masked-row",
        "reverse_seq2seq",
        ("softmax", "memory_mask", "masked_fill", "decoder"),
        (("[None, :] < lengths[:, None]", "[None, :] < lengths[:, None] - 1"),),
        ("exact match", -0.4),
        ("attention-mask-error",),
    ),
    Fault(
        "forward-nonfinite/sqrt-of-negative",
        "moons_diffusion",
        ("a.sqrt()", "alpha_bar"),
        (("alpha_bar = torch.cumprod(alphas, dim=0)", "alpha_bar = 1 - torch.cumsum(betas, dim=0)"),),
        ("loss", 0.1),
    ),
    Fault(
        "forward-nonfinite/division-by-zero-rms",
        "cascade",
        ("scale = ", "out * scale", "stages.0"),
        (
            (
                "        self.output_proj = nn.Linear(WIDTH, D)\n",
                "        self.output_proj = nn.Linear(WIDTH, D)\n"
                "        nn.init.zeros_(self.output_proj.weight)\n"
                "        nn.init.zeros_(self.output_proj.bias)\n",
            ),
            ("rms(noisy) / (rms(out) + 1e-3)", "rms(noisy) / rms(out)"),
            ("return out * scale.clamp(max=2.0)", "return out * scale"),
        ),
        ("test mse", 0.1),
        ("normalization-error",),
    ),
    # backward-nonfinite
    Fault(
        "backward-nonfinite/signed-sqrt",
        "shapes_cnn",
        ("torch.sqrt",),
        (
            (
                "        x = self.dropout(x)\n",
                "        x = self.dropout(x)\n        x = torch.sign(x) * torch.sqrt(torch.abs(x))\n",
            ),
        ),
        ("val acc", -0.3),
    ),
    Fault(
        "backward-nonfinite/rms-of-zeros",
        "cascade",
        ("keepdim=True).sqrt()", "rms(out)", "stages.0"),
        (
            (
                "        self.output_proj = nn.Linear(WIDTH, D)\n",
                "        self.output_proj = nn.Linear(WIDTH, D)\n"
                "        nn.init.zeros_(self.output_proj.weight)\n"
                "        nn.init.zeros_(self.output_proj.bias)\n",
            ),
        ),
        ("test mse", 0.1),
    ),
    Fault(
        "backward-nonfinite/sqrt-penalty",
        "custom_ops_autoencoder",
        ("sqrt()",),
        (("1e-4 * code.pow(2).mean()", "1e-4 * (code * (code > 0)).sqrt().mean()"),),
        ("test error", 0.1),
    ),
    # wrong-gradient
    Fault(
        "wrong-gradient/gelu-sign",
        "custom_ops_autoencoder",
        ("GeluFn", "cdf - x * pdf"),
        (("grad * (cdf + x * pdf)", "grad * (cdf - x * pdf)"),),
        ("test error", 0.02),
    ),
    Fault(
        "wrong-gradient/layernorm-term",
        "custom_ops_autoencoder",
        ("LayerNormFn", "dxhat.mean"),
        (
            (
                "dxhat.mean(dim=-1, keepdim=True) - xhat * (dxhat * xhat).mean(dim=-1, keepdim=True)",
                "dxhat.mean(dim=-1, keepdim=True) + xhat * (dxhat * xhat).mean(dim=-1, keepdim=True)",
            ),
        ),
        ("test error", 0.02),
    ),
    Fault(
        "wrong-gradient/weight-averaged-twice",
        "custom_ops_autoencoder",
        ("LinearFn", "x.size(0)"),
        (
            (
                "grad @ weight, grad.t() @ x, grad.sum(dim=0)",
                "grad @ weight, grad.t() @ x / x.size(0), grad.mean(dim=0)",
            ),
        ),
        ("test error", 0.02),
    ),
    Fault(
        "wrong-gradient/rmsnorm-scale",
        "cascade",
        ("RMSNorm", "dnormed"),
        (
            (
                "dx = inv * (dnormed - normed * (dnormed * normed).mean(dim=-1, keepdim=True))",
                "dx = dnormed / inv - normed * (dnormed * normed).mean(dim=-1, keepdim=True)",
            ),
        ),
        ("test mse", 0.02),
    ),
    # zero-grad-error
    Fault(
        "zero-grad-error/cleared-once-an-epoch",
        "vae_glyphs",
        ("optimizer.zero_grad()", "loss.backward()"),
        (
            ("        optimizer.zero_grad()\n", ""),
            (
                "    model.train()\n    recon_sum",
                "    model.train()\n    optimizer.zero_grad()\n    recon_sum",
            ),
        ),
        ("pixels off per glyph", 3.0),
    ),
    Fault(
        "zero-grad-error/never-cleared",
        "spirals_mlp",
        ("loss.backward()", "optimizer.step()"),
        (("        optimizer.zero_grad()\n", ""),),
        ("val_loss", 0.2),
    ),
    Fault(
        "zero-grad-error/other-optimizer-cleared",
        "ring_gan",
        ("opt_g.zero_grad()", "opt_d"),
        (
            (
                "        opt_d.zero_grad()\n        opt_g.zero_grad()\n",
                "        opt_g.zero_grad()\n        opt_g.zero_grad()\n",
            ),
        ),
        ("near", -0.2),
    ),
    Fault(
        "zero-grad-error/cleared-before-step",
        "house_prices",
        ("optimizer.zero_grad()",),
        (
            (
                "        optimizer.zero_grad()\n        loss.backward()\n        optimizer.step()\n",
                "        loss.backward()\n        optimizer.zero_grad()\n        optimizer.step()\n",
            ),
        ),
        ("r2", -0.5),
        ("param-not-updated",),
    ),
    # grad-accumulation-error
    Fault(
        "grad-accumulation-error/not-divided",
        "deep_residual",
        ("F.cross_entropy(model(x[micro]), y[micro])",),
        (
            ("y[micro]) / ACCUMULATE", "y[micro])"),
            ("total += loss.item()", "total += loss.item() / ACCUMULATE"),
        ),
        ("val acc", -0.15),
        ("lr-too-high", "loss-scale-or-sign"),
    ),
    Fault(
        "grad-accumulation-error/overwritten",
        "deep_residual",
        ("optimizer.zero_grad()",),
        (
            ("        optimizer.zero_grad()\n        total = 0.0\n", "        total = 0.0\n"),
            ("            loss = F.cross", "            optimizer.zero_grad()\n            loss = F.cross"),
        ),
        ("val acc", -0.15),
        ("zero-grad-error",),
    ),
    Fault(
        "grad-accumulation-error/step-at-the-first-window-only",
        "mixer_amp",
        ("// ACCUM",),
        (("if (i + 1) % ACCUM == 0:", "if (i + 1) // ACCUM == 1:"),),
        ("val_acc", -0.2),
        ("zero-grad-error",),
    ),
    # grad-clip-misuse
    Fault(
        "grad-clip-misuse/after-step",
        "recall_rnn",
        ("clip_grad_norm_", "opt.step()"),
        (
            (
                "    nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n    opt.step()\n",
                "    opt.step()\n    nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n",
            ),
        ),
        ("recall", -0.3),
        ("lr-too-high", "exploding-signal"),
    ),
    Fault(
        "grad-clip-misuse/before-unscale",
        "mixer_amp",
        ("clip_grad_norm_",),
        (("            scaler.unscale_(optimizer)\n", ""),),
        ("val_acc", -0.2),
        ("lr-too-low",),
    ),
    Fault(
        "grad-clip-misuse/limit-sets-the-step",
        "char_lstm",
        ("clip_grad_norm_", "--clip"),
        (('"--clip", type=float, default=0.5', '"--clip", type=float, default=0.005'),),
        ("val loss", 0.5),
        ("lr-too-low",),
    ),
    # detached-graph
    Fault(
        "detached-graph/attention-weights-data",
        "tiny_gpt",
        ("att.data", "attn"),
        (("F.softmax(att, dim=-1)", "F.softmax(att.data, dim=-1)"),),
        ("songs continued", -0.1),
    ),
    Fault(
        "detached-graph/sampling-without-grad",
        "vae_glyphs",
        ("reparameterize", "torch.no_grad()"),
        (("    def reparameterize(", "    @torch.no_grad()\n    def reparameterize("),),
        ("pixels off per glyph", 3.0),
    ),
    Fault(
        "detached-graph/log-prob-data",
        "reach_reinforce",
        ("log_prob(action)", "policy"),
        (("log_probs.append(dist.log_prob(action))", "log_probs.append(dist.log_prob(action).data)"),),
        ("return", -1.0),
    ),
    Fault(
        "detached-graph/hidden-data",
        "char_lstm",
        ("self.head(out", "lstm"),
        (("return self.head(out), state", "return self.head(out.data), state"),),
        ("val loss", 0.2),
    ),
    # missing-stop-gradient
    Fault(
        "missing-stop-gradient/student-as-its-own-target",
        "byol",
        ("self.student(b)",),
        (
            (
                "        with torch.no_grad():\n            target = F.normalize(self.teacher(b), dim=1)\n",
                "        target = F.normalize(self.student(b), dim=1)\n",
            ),
        ),
        ("spread", -0.08),
    ),
    Fault(
        "missing-stop-gradient/baseline",
        "reach_reinforce",
        ("advantage =", "log_probs * advantage"),
        (("returns - values.detach()", "returns - values"),),
        ("value loss", 3.0),
    ),
    # param-not-updated
    Fault(
        "param-not-updated/plain-list",
        "tiny_gpt",
        ("self.blocks", "blocks"),
        (
            (
                "nn.ModuleList([Block(cfg) for _ in range(cfg.n_layer)])",
                "[Block(cfg) for _ in range(cfg.n_layer)]",
            ),
        ),
        ("songs continued", -0.2),
    ),
    Fault(
        "param-not-updated/only-the-head-in-the-optimizer",
        "shapes_cnn",
        ("model.classifier.parameters()", "features"),
        (("optim.SGD(model.parameters()", "optim.SGD(model.classifier.parameters()"),),
        ("val acc", -0.2),
    ),
    Fault(
        "param-not-updated/replaced-after-the-optimizer",
        "mixer_amp",
        ("model.blocks", "blocks"),
        (
            (
                "\nfor epoch in range(EPOCHS):\n",
                "model.blocks = nn.Sequential(*[MixerBlock(16, 48) for _ in range(3)])\n\n"
                "for epoch in range(EPOCHS):\n",
            ),
        ),
        ("val_acc", -0.1),
    ),
    Fault(
        "param-not-updated/other-networks-parameters",
        "ring_gan",
        ("opt_d = ",),
        (("opt_d = torch.optim.Adam(D.parameters()", "opt_d = torch.optim.Adam(G.parameters()"),),
        ("near", -0.3),
        ("optimizer-config",),
    ),
)
