"""Faults planted in trainings that are written for an accelerator, and the healthy ones beside them.

The scripts are in trainings/; with SMALL=1 each also runs on one core. benchmarks/gpu_trainings.py runs them all.
"""

from dataclasses import dataclass
from pathlib import Path

from gradproof.faults.fault import Edits, edited

TRAININGS = Path(__file__).parent / "trainings"


@dataclass(frozen=True)
class Planted:
    """One cause, planted in one training by replacing pieces of its text.

    place: a pattern that the line or the module named has to match; empty if there is no one place.
    also: other families that describe the same mistake as truly.
    """

    id: str  # family/what
    script: str  # a file in trainings/, without .py
    place: str
    edits: Edits
    also: tuple[str, ...] = ()

    @property
    def family(self) -> str:
        return self.id.split("/")[0]

    @property
    def name(self) -> str:
        return f"{self.script}-{self.id.split('/')[1]}"


@dataclass(frozen=True)
class Sound:
    """A training in which nothing is a problem, as it stands or with an edit that looks odd."""

    name: str
    script: str
    edits: Edits = ()


def plant(case: Planted | Sound) -> str:
    """The training's source with the edits made."""
    source = (TRAININGS / f"{case.script}.py").read_text()
    return edited(source, case.edits, f"{case.name}: {case.script}.py")


FAULTS = (
    # numbers that are not finite
    Planted(
        "forward-nonfinite/zero-over-zero",
        "forecast_graph",
        r"/ std",
        (("x = (past - mean) / (std + 1e-3)", "x = (past - mean) / std"),),
    ),
    Planted(
        "backward-nonfinite/root-at-zero",
        "point_graph",
        r"sqrt\(\)",
        (
            (
                "(offset.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt()",
                "offset.pow(2).sum(-1, keepdim=True).sqrt()",
            ),
        ),
    ),
    # gradients
    Planted(
        "wrong-gradient/missing-term",
        "tied_accum",
        r"SwiGLU|dgate",
        (("dgate = dout * up * (s + gate * s * (1 - s))", "dgate = dout * up * s * (1 - s)"),),
    ),
    Planted(
        "zero-grad-error/never-cleared",
        "ctc_speech",
        r"loss\.backward\(\)|optimizer\.step\(\)|optimizer = ",
        (("    optimizer.zero_grad()\n", ""),),
    ),
    Planted(
        "zero-grad-error/cleared-before-the-step",
        "vae_conv",
        r"zero_grad|optimizer\.step",
        (
            (
                "    optimizer.zero_grad()\n    loss.backward()\n",
                "    loss.backward()\n    optimizer.zero_grad()\n",
            ),
        ),
        ("param-not-updated",),
    ),
    Planted(
        "grad-accumulation-error/cleared-between-micro-batches",
        "tied_accum",
        r"zero_grad",
        (
            (
                "    optimizer.zero_grad(set_to_none=True)\n    for _ in range(MICRO):\n",
                "    for _ in range(MICRO):\n        optimizer.zero_grad(set_to_none=True)\n",
            ),
        ),
        ("zero-grad-error",),
    ),
    Planted(
        "grad-clip-misuse/before-unscale",
        "resnet_amp",
        r"clip_grad_norm_",
        (("    scaler.unscale_(optimizer)\n", ""),),
    ),
    Planted(
        "grad-clip-misuse/limit-sets-the-step",
        "detector",
        r"clip_grad_norm_",
        (("clip_grad_norm_(model.parameters(), 5.0)", "clip_grad_norm_(model.parameters(), 5e-3)"),),
        ("lr-too-low",),
    ),
    Planted(
        "detached-graph/time-embedding",
        "ddpm_unet",
        r"self\.time|no_grad|\btime\b",
        (
            (
                "        emb = self.time(torch.cat([angle.sin(), angle.cos()], dim=1))\n",
                "        with torch.no_grad():\n"
                "            emb = self.time(torch.cat([angle.sin(), angle.cos()], dim=1))\n",
            ),
        ),
        ("param-not-updated",),
    ),
    Planted(
        "detached-graph/sampled-latent",
        "vae_conv",
        r"\.sample\(\)",
        (
            (
                "z = mean + (0.5 * logvar).exp() * torch.randn_like(mean)",
                "z = torch.distributions.Normal(mean, (0.5 * logvar).exp()).sample()",
            ),
        ),
    ),
    Planted(
        "detached-graph/router",
        "moe_bf16",
        r"topk|router",
        (("weight, chosen = probs.topk(2, dim=-1)", "weight, chosen = probs.detach().topk(2, dim=-1)"),),
    ),
    Planted(
        "missing-stop-gradient/goal-from-the-online-network",
        "dqn_maze",
        r"future = |goal = ",
        (
            (
                "    with torch.no_grad():\n"
                "        future = target(nexts).max(1).values\n"
                "        goal = rewards + GAMMA * (1 - dones) * future\n",
                "    future = online(nexts).max(1).values\n"
                "    goal = rewards + GAMMA * (1 - dones) * future\n",
            ),
        ),
    ),
    Planted(
        "param-not-updated/head-replaced",
        "vit_stem",
        r"\bhead\b",
        (
            (
                "criterion = nn.CrossEntropyLoss()\n",
                "model.head = nn.Linear(C, CLASSES).to(dev)\ncriterion = nn.CrossEntropyLoss()\n",
            ),
        ),
    ),
    Planted(
        "param-not-updated/adapters-frozen",
        "lora_tune",
        r"lora_|requires_grad",
        (('p.requires_grad = "lora_" in name', 'p.requires_grad = "adapter" in name'),),
    ),
    # the step
    Planted(
        "lr-too-high/large-learning-rate",
        "gpt_compiled",
        "",
        (("3e-3 if SMALL else 6e-4", "3e-1 if SMALL else 6e-2"),),
    ),
    Planted(
        "lr-too-high/large-learning-rate",
        "dpo_pref",
        "",
        (("(3e-4 if SMALL else 2e-5) * min", "(1e-1 if SMALL else 1e-2) * min"),),
    ),
    Planted(
        "lr-too-low/small-learning-rate",
        "forecast_graph",
        "",
        (("LR = 2e-3 if SMALL else 3e-4", "LR = 2e-6 if SMALL else 3e-7"),),
    ),
    Planted(
        "lr-too-low/small-learning-rate",
        "clip_towers",
        "",
        (("LR = 3e-3 if SMALL else 5e-4", "LR = 3e-6 if SMALL else 5e-7"),),
    ),
    Planted(
        "lr-schedule-error/multiplied-twice",
        "translate_noam",
        r"LambdaLR|noam|lr=1e-3|scheduler",
        (("lr=1.0, betas", "lr=1e-3, betas"),),
        ("lr-too-low",),
    ),
    Planted(
        "lr-schedule-error/decay-meant-for-epochs",
        "resnet_amp",
        r"ExponentialLR|scheduler",
        (("CosineAnnealingLR(optimizer, T_max=STEPS)", "ExponentialLR(optimizer, gamma=0.8)"),),
        ("lr-too-low",),
    ),
    Planted(
        "optimizer-config/weight-decay",
        "resnet_amp",
        r"weight_decay|optimizer = ",
        (("weight_decay=5e-4", "weight_decay=5e-1"),),
    ),
    Planted(
        "optimizer-config/adam-eps",
        "bert_mlm",
        r"eps=|optimizer = ",
        (("weight_decay=0.01, foreach=True", "weight_decay=0.01, eps=1.0, foreach=True"),),
        ("lr-too-low",),
    ),
    Planted(
        "low-precision-error/no-master-weights",
        "moe_bf16",
        r"masters|bfloat16|AdamW",
        (
            ("masters = [p.detach().float().clone() for p in weights]", "masters = weights"),
            (
                "    for master, p in zip(masters, weights, strict=True):\n"
                "        master.grad = p.grad.float()\n",
                "",
            ),
            ("    with torch.no_grad():\n        torch._foreach_copy_(weights, masters)\n", ""),
        ),
    ),
    # data and targets
    Planted(
        "data-target-misaligned/no-shift",
        "gpt_compiled",
        r"x, y = |cross_entropy",
        (("x, y = data[rows, :-1], data[rows, 1:]", "x, y = data[rows, :-1], data[rows, :-1]"),),
    ),
    Planted(
        "data-target-misaligned/decoder-sees-its-target",
        "translate_noam",
        r"model\(source, target|criterion\(",
        (("logits = model(source, target[:, :-1])", "logits = model(source, target[:, 1:])"),),
    ),
    Planted(
        "data-target-misaligned/captions-of-other-pictures",
        "clip_towers",
        r"captions\[|randperm",
        (
            (
                "model(pictures[rows], captions[rows])",
                "model(pictures[rows], captions[torch.randperm(N, device=dev)[:B]])",
            ),
        ),
    ),
    Planted(
        "data-target-misaligned/noise-drawn-again",
        "ddpm_unet",
        r"randn_like|mse_loss",
        (("F.mse_loss(predicted.float(), noise)", "F.mse_loss(predicted.float(), torch.randn_like(x0))"),),
    ),
    Planted(
        "data-target-misaligned/target-inside-the-past",
        "forecast_graph",
        r"ahead = series|mse_loss",
        (("begin + PAST + torch.arange(AHEAD", "begin + PAST - AHEAD + torch.arange(AHEAD"),),
    ),
    Planted(
        "input-or-target-scale/pixels-to-255",
        "vae_conv",
        r"images = |x = images|binary_cross_entropy",
        (
            (
                "images = torch.sigmoid((thickness - distance) * 30)",
                "images = (255 * torch.sigmoid((thickness - distance) * 30)).round()",
            ),
        ),
        ("forward-nonfinite",),  # the exponential of a log-variance overflows
    ),
    Planted(
        "input-or-target-scale/not-standardised",
        "forecast_graph",
        r"\bpast\b|\bahead\b|mse_loss|embed",
        (
            ("x = (past - mean) / (std + 1e-3)", "x = past"),
            (".flatten(1)) * (std + 1e-3) + mean", ".flatten(1))"),
            (
                "        mean = past.mean(1, keepdim=True)\n        std = past.std(1, keepdim=True)\n",
                "",
            ),
        ),
    ),
    Planted(
        "data-order-or-sampling/sorted-by-class",
        "vit_stem",
        r"DataLoader|shuffle|in loader",
        (("train_set, batch_size=B, shuffle=True", "train_set, batch_size=B, shuffle=False"),),
    ),
    # masks
    Planted(
        "attention-mask-error/no-causal-mask",
        "gpt_compiled",
        r"scaled_dot_product_attention",
        (("scaled_dot_product_attention(q, k, v, is_causal=True)", "scaled_dot_product_attention(q, k, v)"),),
    ),
    Planted(
        "attention-mask-error/decoder-looks-ahead",
        "translate_noam",
        r"transformer",
        (("            tgt_mask=causal,\n", ""),),
    ),
    Planted(
        "attention-mask-error/inverted-padding-mask",
        "bert_mlm",
        r"padding|encoder|self_attn",
        (("padding = ids == PAD", "padding = ids != PAD"),),
    ),
    Planted(
        "loss-mask-error/every-position-asked",
        "bert_mlm",
        r"labels = |cross_entropy",
        (("labels = ids.masked_fill(~chosen, -100)", "labels = ids.clone()"),),
    ),
    Planted(
        "loss-mask-error/padding-counted",
        "translate_noam",
        r"CrossEntropyLoss|criterion",
        (("ignore_index=PAD, ", ""),),
    ),
    # the loss
    Planted(
        "loss-activation-mismatch/sigmoid-twice",
        "detector",
        r"sigmoid|binary_cross_entropy_with_logits|focal_loss|cls_out",
        (
            (
                "scores = self.cls_out(self.cls_tower(features))",
                "scores = self.cls_out(self.cls_tower(features)).sigmoid()",
            ),
        ),
    ),
    Planted(
        "loss-activation-mismatch/softmax-before-cross-entropy",
        "vit_stem",
        r"softmax|criterion|head",
        (("return self.head(self.norm(x)[:, 0])", "return self.head(self.norm(x)[:, 0]).softmax(-1)"),),
    ),
    Planted(
        "loss-scale-or-sign/overlap-made-small",
        "detector",
        r"overlap|box_loss",
        (("box_loss = ((1 - overlap) * positive)", "box_loss = (overlap * positive)"),),
    ),
    Planted(
        "loss-scale-or-sign/policy-sign",
        "ppo_reacher",
        r"policy_loss",
        (("policy_loss = -torch.min(", "policy_loss = torch.min("),),
    ),
    Planted(
        "loss-scale-or-sign/kl-dwarfs-the-pixels",
        "vae_conv",
        r"reconstruction|\bkl\b",
        (('reduction="sum") / len(x)', 'reduction="mean")'),),
    ),
    Planted(
        "loss-scale-or-sign/balance-dwarfs-the-text",
        "moe_bf16",
        r"balance|BALANCE",
        (("(6e-4 if SMALL else 2e-4), 0.01", "(6e-4 if SMALL else 2e-4), 300.0"),),
    ),
    Planted(
        "axis-or-shape-error/softmax-over-the-batch",
        "ctc_speech",
        r"log_softmax",
        (("F.log_softmax(logits, dim=-1)", "F.log_softmax(logits, dim=1)"),),
    ),
    Planted(
        "axis-or-shape-error/value-against-returns",
        "ppo_reacher",
        r"value_loss = ",
        (
            (
                'F.mse_loss(model.value(mb["obs"]), mb["return"])',
                '(model.critic(mb["obs"]) - mb["return"]).pow(2).mean()',
            ),
        ),
    ),
    Planted(
        "axis-or-shape-error/normalised-over-the-batch",
        "clip_towers",
        r"F\.normalize",
        (
            (
                "F.normalize(self.image(pictures).float(), dim=-1)",
                "F.normalize(self.image(pictures).float(), dim=0)",
            ),
            (
                "F.normalize(self.text(captions).float(), dim=-1)",
                "F.normalize(self.text(captions).float(), dim=0)",
            ),
        ),
        ("normalization-error",),
    ),
    Planted(
        "axis-or-shape-error/view-for-transpose",
        "vit_stem",
        r"reshape\(len|pos\b",
        (("x = x.flatten(2).transpose(1, 2)", "x = x.contiguous().reshape(len(x), -1, C)"),),
    ),
    # the network
    Planted(
        "train-eval-mode-error/eval-left-on",
        "resnet_amp",
        r"model\.eval\(\)|validate|bn",
        (("    model.train()\n", ""),),
    ),
    Planted(
        "train-eval-mode-error/eval-from-the-start",
        "point_graph",
        r"\.eval\(\)|norm",
        (("model = PointGraph().to(dev)\n", "model = PointGraph().to(dev).eval()\n"),),
    ),
    Planted(
        "normalization-error/over-time",
        "tied_accum",
        r"rsqrt|RMSNorm|norm",
        ((".pow(2).mean(-1, keepdim=True) + 1e-5", ".pow(2).mean(1, keepdim=True) + 1e-5"),),
        ("axis-or-shape-error", "attention-mask-error"),
    ),
    Planted(
        "vanishing-signal/sigmoid-stack",
        "vae_conv",
        r"Sigmoid|act\(\)|encoder|decoder",
        (("act = nn.ReLU\n", "act = nn.Sigmoid\n"),),
        ("dead-activation",),
    ),
    Planted(
        "bad-init/unit-variance",
        "gpt_compiled",
        r"init\.normal_|wte|lm_head",
        (("nn.init.normal_(module.weight, std=0.02)", "nn.init.normal_(module.weight)"),),
    ),
    Planted(
        "bad-init/prior-with-the-other-sign",
        "detector",
        r"constant_|cls_out",
        (("bias, -math.log((1 - 0.01) / 0.01)", "bias, math.log((1 - 0.01) / 0.01)"),),
    ),
    Planted(
        "bad-init/both-factors-zero",
        "lora_tune",
        r"lora_",
        (("nn.init.normal_(self.lora_A, std=base.in_features**-0.5)", "nn.init.zeros_(self.lora_A)"),),
        ("param-not-updated",),
    ),
    # what is kept
    Planted(
        "weights-state-error/average-formula",
        "ddpm_unet",
        r"slow\.mul_|average",
        (("slow.mul_(DECAY).add_(fast, alpha=1 - DECAY)", "slow.mul_(DECAY).add_(fast)"),),
    ),
    Planted(
        "weights-state-error/target-never-synced",
        "dqn_maze",
        r"\btarget\b",
        (("    if step % SYNC == 0:\n        target.load_state_dict(online.state_dict())\n", ""),),
        ("param-not-updated",),
    ),
    Planted(
        "aliasing-or-inplace/data-noised-in-place",
        "ddpm_unet",
        r"x0\.mul_|images\[at",
        (
            (
                "noisy = a.sqrt() * x0 + (1 - a).sqrt() * noise",
                "noisy = x0.mul_(a.sqrt()).add_((1 - a).sqrt() * noise)",
            ),
        ),
    ),
    Planted(
        "aliasing-or-inplace/rollout-of-one-state",
        "ppo_reacher",
        r"return self\.state|append|torch\.stack|env\.observe",
        (("return self.state.clone()", "return self.state"),),
    ),
    Planted(
        "aliasing-or-inplace/reference-is-the-policy",
        "dpo_pref",
        r"reference",
        (("copy.deepcopy(policy).eval().requires_grad_(False)", "policy"),),
        ("weights-state-error", "missing-stop-gradient"),
    ),
)

SCRIPTS = (
    *("gpt_compiled", "bert_mlm", "vit_stem", "resnet_amp", "ddpm_unet", "detector", "ctc_speech"),
    *("translate_noam", "ppo_reacher", "dqn_maze", "moe_bf16", "clip_towers", "dpo_pref", "lora_tune"),
    *("vae_conv", "point_graph", "forecast_graph", "tied_accum"),
)

HEALTHY = (
    *(Sound(f"{script}-as-it-is", script) for script in SCRIPTS),
    Sound(
        "residual-branch-starts-at-zero",
        "gpt_compiled",
        (
            (
                "nn.init.normal_(block.c_proj.weight, std=0.02 / math.sqrt(2 * L))",
                "nn.init.zeros_(block.c_proj.weight)",
            ),
        ),
    ),
    Sound(
        "first-rates-tiny",
        "gpt_compiled",
        (("return LR * (step + 1) / WARMUP", "return LR * ((step + 1) / WARMUP) ** 4"),),
    ),
    Sound(
        "positions-frozen",
        "bert_mlm",
        (
            (
                "model = Bert().to(dev)\n",
                "model = Bert().to(dev)\nmodel.position.weight.requires_grad_(False)\n",
            ),
        ),
    ),
    Sound("labels-smoothed", "vit_stem", (("CrossEntropyLoss()", "CrossEntropyLoss(label_smoothing=0.1)"),)),
    Sound(
        "big-batch",
        "vit_stem",
        (("(16, 48, 4, 3, 64, 6)", "(16, 48, 4, 3, 192, 6)"), ("512, 8, 12, 256", "512, 8, 8, 768")),
    ),
    Sound(
        "last-norm-starts-at-zero",
        "resnet_amp",
        (
            (
                "        self.bn2 = nn.BatchNorm2d(cout)\n",
                "        self.bn2 = nn.BatchNorm2d(cout)\n        nn.init.zeros_(self.bn2.weight)\n",
            ),
            ("(60 if SMALL", "(160 if SMALL"),
        ),
    ),
    Sound("first-steps-skipped-by-the-scaler", "resnet_amp", (("init_scale=2.0**14", "init_scale=2.0**24"),)),
    Sound(
        "last-layer-starts-at-zero",
        "ddpm_unet",
        (
            (
                "model = UNet().to(dev)\n",
                "model = UNet().to(dev)\nnn.init.zeros_(model.last[-1].weight)\nnn.init.zeros_(model.last[-1].bias)\n",
            ),
        ),
    ),
    Sound(
        "first-layer-frozen",
        "detector",
        (
            (
                "optimizer = torch.optim.SGD(",
                "model.backbone[0].requires_grad_(False)\noptimizer = torch.optim.SGD(",
            ),
        ),
    ),
    Sound(
        "hardly-ever-clipped", "ctc_speech", (("(model.parameters(), 5.0)", "(model.parameters(), 500.0)"),)
    ),
    Sound("strongly-smoothed", "translate_noam", (("label_smoothing=0.05", "label_smoothing=0.2"),)),
    Sound(
        "objective-maximised",
        "ppo_reacher",
        (
            ("policy_loss = -torch.min(", "gain = torch.min("),
            ("loss = policy_loss + 0.5 * value_loss - 0.001 *", "loss = gain - 0.5 * value_loss + 0.001 *"),
            ("eps=1e-5)", "eps=1e-5, maximize=True)"),
        ),
    ),
    Sound(
        "target-follows-slowly",
        "dqn_maze",
        (
            (
                "    if step % SYNC == 0:\n        target.load_state_dict(online.state_dict())\n",
                "    with torch.no_grad():\n"
                "        for slow, fast in zip(target.parameters(), online.parameters(), strict=True):\n"
                "            slow.lerp_(fast, 0.02)\n",
            ),
        ),
    ),
    Sound(
        "clipped-at-every-step",
        "moe_bf16",
        (("clip_grad_norm_(masters, 1.0)", "clip_grad_norm_(masters, 0.1)"),),
    ),
    Sound(
        "temperature-frozen",
        "clip_towers",
        (
            (
                "model = TwoTowers().to(dev)\n",
                "model = TwoTowers().to(dev)\nmodel.logit_scale.requires_grad_(False)\n",
            ),
        ),
    ),
    Sound(
        "some-preferences-doubted",
        "dpo_pref",
        (
            (
                "loss = -F.logsigmoid(BETA * margin).mean()",
                "loss = -(0.9 * F.logsigmoid(BETA * margin) + 0.1 * F.logsigmoid(-BETA * margin)).mean()",
            ),
        ),
    ),
    Sound(
        "starts-at-its-optimum",
        "lora_tune",
        (("train(model, dialect(2), LR,", "train(model, dialect(1), LR,"),),
    ),
    Sound(
        "few-adapters",
        "lora_tune",
        (('for name in ("qkv", "proj", "up", "down")', 'for name in ("qkv", "down")'),),
    ),
    Sound(
        "sigmoid-with-its-own-loss",
        "vae_conv",
        (
            (
                "            nn.Conv2d(C, 1, 3, padding=1),\n        )",
                "            nn.Conv2d(C, 1, 3, padding=1), nn.Sigmoid(),\n        )",
            ),
            ("F.binary_cross_entropy_with_logits(", "F.binary_cross_entropy("),
        ),
    ),
    Sound(
        "gradient-penalty",
        "point_graph",
        (
            (
                "    logits = model(clouds[rows])\n    loss = F.cross_entropy(logits, labels[rows])\n",
                "    points = clouds[rows].requires_grad_()\n"
                "    logits = model(points)\n"
                "    loss = F.cross_entropy(logits, labels[rows])\n"
                "    (slope,) = torch.autograd.grad(loss, points, create_graph=True)\n"
                "    loss = loss + 0.1 * slope.pow(2).sum((1, 2)).mean()\n",
            ),
        ),
    ),
    Sound(
        "huber-instead-of-squares", "forecast_graph", (("loss = F.mse_loss(", "loss = F.smooth_l1_loss("),)
    ),
    Sound("recomputed-the-old-way", "tied_accum", (("use_reentrant=False", "use_reentrant=True"),)),
    Sound(
        "micro-batches-of-two",
        "tied_accum",
        (("64, 4, 2, 8, 4)", "64, 4, 2, 2, 16)"), ("16, 10, 8, 4)", "16, 10, 2, 16)")),
    ),
)
