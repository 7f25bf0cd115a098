"""Runs in which nothing is a problem: every script as it stands, and edits that look odd and do no harm."""

from gradproof.faults.fault import Healthy

HEALTHY = (
    # as they stand
    Healthy("spirals", "spirals_mlp", ("val_acc", 0.95, 1.0)),
    Healthy("shapes", "shapes_cnn", ("val acc", 0.8, 1.0)),
    Healthy("state-detached-between-windows", "char_lstm", ("accuracy", 0.85, 1.0)),
    Healthy("minus-infinity-mask-and-tied-weights", "tiny_gpt", ("songs continued", 0.8, 1.0)),
    Healthy("rescaled-stages", "cascade", ("test mse", 0.0, 0.2)),
    Healthy("summed-reconstruction", "vae_glyphs", ("pixels off per glyph", 0.0, 3.0)),
    Healthy("gan-that-oscillates", "ring_gan", ("near", 0.4, 1.0)),
    Healthy("averaged-weights", "moons_diffusion", ("samples to data", 0.0, 0.15)),
    Healthy("minus-infinity-on-the-diagonal", "simclr", ("knn accuracy", 0.95, 1.0)),
    Healthy("teacher-without-gradient", "byol", ("spread", 0.15, 0.3)),
    Healthy("house-prices", "house_prices", ("r2", 0.97, 1.0)),
    Healthy("noisy-reward", "reach_reinforce", ("return", -4.0, 0.0)),
    Healthy("target-network", "grid_dqn", ("success", 0.85, 1.0)),
    Healthy("padded-batches", "reverse_seq2seq", ("exact match", 0.6, 1.0)),
    Healthy("hand-written-backwards", "custom_ops_autoencoder", ("test error", 0.0, 0.1)),
    Healthy("half-precision-with-scaler", "mixer_amp", ("val_acc", 0.9, 1.0)),
    Healthy("two-sittings", "forecaster_resume", ("test mse", 0.0, 0.02)),
    Healthy("two-ranks", "ddp_classifier", ("replica gap", 0.0, 1e-6)),
    Healthy("two-ranks-by-hand", "ddp_manual_gru", ("rank spread", 0.0, 1e-6)),
    Healthy("clipped-recurrence", "recall_rnn", ("recall", 0.9, 1.0)),
    Healthy("micro-batches", "deep_residual", ("val acc", 0.65, 1.0)),
    Healthy("few-positions-in-the-loss", "masked_lm", ("filled in", 0.9, 1.0)),
    Healthy("sparse-gradients", "recommender", ("test rmse", 0.0, 0.4)),
    Healthy("closure-and-flat-at-its-optimum", "lbfgs_fit", ("final loss", 0.0, 0.01)),
    Healthy("frozen-by-intention-and-unused-rows", "finetune_head", ("second task", 0.8, 1.0)),
    # edited
    Healthy(
        "two-ranks-that-accumulate",
        "ddp_classifier",
        ("replica gap", 0.0, 1e-6),
        (
            (
                "            loss = F.cross_entropy(model(x), y)\n            loss.backward()\n",
                "            with model.no_sync():\n"
                "                (F.cross_entropy(model(x[:10]), y[:10]) / 2).backward()\n"
                "            loss = F.cross_entropy(model(x[10:]), y[10:]) / 2\n"
                "            loss.backward()\n",
            ),
        ),
    ),
    Healthy(
        "nan-that-reaches-no-loss",
        "house_prices",
        ("r2", 0.97, 1.0),
        (
            (
                "        total += loss.item()\n",
                "        wanted = y_train[rows]\n"
                "        log_wanted = torch.where(wanted > 0, wanted.log(), torch.zeros_like(wanted))\n"
                "        relative = (prediction.detach() - wanted) / (wanted - wanted.round())\n"
                "        total += loss.item()\n",
            ),
            (
                'mse = {total / 30:.5f}")',
                'mse = {total / 30:.5f} mean log {log_wanted.mean():.3f} worst {relative.max():.1f}")',
            ),
        ),
    ),
    Healthy(
        "empty-before-it-is-filled",
        "forecaster_resume",
        ("test mse", 0.0, 0.02),
        (
            (
                "    x = torch.stack([series[s : s + WINDOW] for s in starts])\n",
                "    x = torch.empty(len(starts), WINDOW)\n"
                "    for row, s in enumerate(starts):\n"
                "        x[row] = series[s : s + WINDOW]\n",
            ),
        ),
    ),
    Healthy(
        "first-steps-skipped-by-the-scaler",
        "mixer_amp",
        ("val_acc", 0.85, 1.0),
        (("init_scale=2.0**14", "init_scale=2.0**24"),),
    ),
    Healthy(
        "clipped-at-every-step",
        "cascade",
        ("test mse", 0.0, 0.2),
        (("clip_grad_norm_(model.parameters(), 5.0)", "clip_grad_norm_(model.parameters(), 0.05)"),),
    ),
    Healthy("long-flat-at-its-optimum", "recall_rnn", ("recall", 0.95, 1.0), (("range(300)", "range(600)"),)),
    Healthy(
        "spiky-batches-of-four",
        "spirals_mlp",
        ("val_acc", 0.95, 1.0),
        (
            ("batch_size = 48", "batch_size = 4"),
            ("lr=0.1, momentum", "lr=0.01, momentum"),
            ("range(40)", "range(15)"),
        ),
    ),
    Healthy(
        "large-norms-that-stay",
        "moons_diffusion",
        ("samples to data", 0.0, 0.15),
        (
            ("(net(xt, t) - noise).pow(2).mean()", "(net(xt, t) - noise).pow(2).sum()"),
            ("{average:.4f}", "{average:.1f}"),
        ),
    ),
    Healthy(
        "warm-restarts",
        "shapes_cnn",
        ("val acc", 0.8, 1.0),
        (
            (
                "optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.2)",
                "optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=3)",
            ),
        ),
    ),
    Healthy("half-dropped", "spirals_mlp", ("val_acc", 0.9, 1.0), (("nn.Dropout(0.05)", "nn.Dropout(0.5)"),)),
    Healthy(
        "recomputed-blocks",
        "tiny_gpt",
        ("songs continued", 0.8, 1.0),
        (
            ("            x = block(x)\n", "            x = checkpoint(block, x, use_reentrant=False)\n"),
            (
                "from torch.nn import functional as F\n",
                "from torch.nn import functional as F\nfrom torch.utils.checkpoint import checkpoint\n",
            ),
        ),
    ),
    Healthy(
        "three-steps",
        "tiny_gpt",
        ("loss", 0.0, 4.0),
        (("max_steps = 220", "max_steps = 3"), ("warmup_steps = 20", "warmup_steps = 1")),
    ),
    Healthy(
        "starts-near-the-optimum",
        "finetune_head",
        ("second task", 0.8, 1.0),
        (
            ("model.head = nn.Linear(48, 2)\n", ""),
            ("(label >= 3).long(), epochs=8", "label, epochs=4"),
            ("== (label >= 3).long()", "== label"),
        ),
    ),
    Healthy(
        "two-backwards-a-step",
        "vae_glyphs",
        ("pixels off per glyph", 0.0, 3.0),
        (
            (
                "        loss.backward()\n",
                "        recon.backward(retain_graph=True)\n        (beta * kl).backward()\n",
            ),
        ),
    ),
    Healthy(
        "tenth-of-the-labels-random",
        "spirals_mlp",
        ("val_acc", 0.8, 1.0),
        (
            (
                "X_val, y_val = X[1200:], y[1200:]\n",
                "X_val, y_val = X[1200:], y[1200:]\ny_train[::10] = torch.randint(0, n_classes, (120,))\n",
            ),
            ("weight_decay=1e-4", "weight_decay=1e-3"),
            ("lr=0.1", "lr=0.03"),
        ),
    ),
    Healthy(
        "head-starts-at-zero",
        "deep_residual",
        ("val acc", 0.6, 1.0),
        (("nn.init.normal_(self.head.weight, std=0.02)", "nn.init.zeros_(self.head.weight)"),),
    ),
    Healthy(
        "bfloat16-without-scaler",
        "mixer_amp",
        ("val_acc", 0.9, 1.0),
        (
            ("PRECISION = torch.float16", "PRECISION = torch.bfloat16"),
            ('GradScaler("cpu", init_scale=2.0**14)', 'GradScaler("cpu", enabled=False)'),
        ),
    ),
    Healthy(
        "maximised-objective",
        "reach_reinforce",
        ("return", -4.0, 0.0),
        (
            ("policy_loss = -(log_probs * advantage).mean()", "policy_gain = (log_probs * advantage).mean()"),
            ("loss = policy_loss + 0.1 * value_loss", "loss = policy_gain - 0.1 * value_loss"),
            ("lr=4e-3)", "lr=4e-3, maximize=True)"),
        ),
    ),
    Healthy(
        "random-data-in-order",
        "reverse_seq2seq",
        ("exact match", 0.6, 1.0),
        (("batch_size=32, shuffle=True", "batch_size=32, shuffle=False"),),
    ),
)
