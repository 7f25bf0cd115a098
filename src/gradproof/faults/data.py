"""Faults in what is learned from what: data, targets, masks, axes and the loss."""

from gradproof.faults.fault import Fault

FAULTS = (
    # data-target-misaligned
    Fault(
        "data-target-misaligned/no-shift",
        "tiny_gpt",
        ("get_batch", "data[i"),
        (("data[i + 1 : i + cfg.block_size + 1]", "data[i : i + cfg.block_size]"),),
        ("songs continued", -0.4),
    ),
    Fault(
        "data-target-misaligned/double-shift",
        "char_lstm",
        ("start + 2", "batches"),
        (
            ("start + self.args.seq_len + 1]", "start + self.args.seq_len + 2]"),
            ("rows[:, start + 1 :", "rows[:, start + 2 :"),
            ("rows.size(1) - self.args.seq_len - 1", "rows.size(1) - self.args.seq_len - 2"),
        ),
        ("val loss", 1.0),
    ),
    Fault(
        "data-target-misaligned/labels-of-another-batch",
        "spirals_mlp",
        ("y_train[i", "F.cross_entropy"),
        (("F.cross_entropy(logits, y_train[idx])", "F.cross_entropy(logits, y_train[i : i + batch_size])"),),
        ("val_loss", 0.5),
    ),
    Fault(
        "data-target-misaligned/images-shuffled-alone",
        "shapes_cnn",
        ("torch.randperm", "self.images"),
        (
            (
                "for k in self.labels])\n",
                "for k in self.labels])\n"
                "        self.images = self.images[torch.randperm(count, generator=generator)]\n",
            ),
        ),
        ("val acc", -0.4),
    ),
    Fault(
        "data-target-misaligned/fresh-noise",
        "moons_diffusion",
        ("torch.randn_like", "net(xt, t)"),
        (("(net(xt, t) - noise).pow(2)", "(net(xt, t) - torch.randn_like(x0)).pow(2)"),),
        ("samples to data", 0.2),
    ),
    Fault(
        "data-target-misaligned/window-holds-the-target",
        "forecaster_resume",
        ("windows", "s + WINDOW"),
        (("series[s + WINDOW] for", "series[s + WINDOW - 1] for"),),
        ("test mse", -0.005),
    ),
    # loss-mask-error
    Fault(
        "loss-mask-error/inverted",
        "masked_lm",
        ("torch.where(chosen", "mask_tokens"),
        (("torch.where(chosen, tokens, IGNORE)", "torch.where(chosen, IGNORE, tokens)"),),
        ("filled in", -0.4),
    ),
    Fault(
        "loss-mask-error/padding-id-as-ignored",
        "masked_lm",
        ("ignore_index", "torch.where(chosen"),
        (("torch.where(chosen, tokens, IGNORE)", "torch.where(chosen, tokens, PAD)"),),
        ("filled in", -0.1),
    ),
    Fault(
        "loss-mask-error/end-ignored",
        "reverse_seq2seq",
        ("ignore_index",),
        (("ignore_index=PAD", "ignore_index=EOS"),),
        ("exact match", -0.4),
    ),
    # attention-mask-error
    Fault(
        "attention-mask-error/not-causal",
        "tiny_gpt",
        ("attn", "att ="),
        (('        att = att.masked_fill(self.mask[:, :, :T, :T] == 0, float("-inf"))\n', ""),),
        ("songs continued", -0.3),
    ),
    Fault(
        "attention-mask-error/upper-triangle",
        "tiny_gpt",
        ("torch.triu", "masked_fill", "attn"),
        (("torch.tril(", "torch.triu("),),
        ("songs continued", -0.3),
    ),
    Fault(
        "attention-mask-error/only-padding-attended",
        "reverse_seq2seq",
        ("masked_fill", "memory_mask"),
        (
            (
                'masked_fill(~memory_mask[:, None, :], float("-inf"))',
                "masked_fill(memory_mask[:, None, :], -1e9)",
            ),
        ),
        ("exact match", -0.2),
    ),
    Fault(
        "attention-mask-error/padding-mask-inverted",
        "masked_lm",
        ("key_mask", "scores"),
        (
            (
                'scores.masked_fill(~key_mask[:, None, None, :], float("-inf"))',
                "scores + key_mask[:, None, None, :].float() * -1e9",
            ),
        ),
        ("filled in", -0.3),
    ),
    # loss-activation-mismatch
    Fault(
        "loss-activation-mismatch/softmax-before-cross-entropy",
        "spirals_mlp",
        ("F.softmax",),
        (("return self.out(x)", "return F.softmax(self.out(x), dim=1)"),),
        ("val_loss", 0.3),
    ),
    Fault(
        "loss-activation-mismatch/sigmoid-before-bce-with-logits",
        "vae_glyphs",
        ("nn.Sigmoid()", "binary_cross_entropy_with_logits"),
        (("nn.Linear(hidden, 64)\n", "nn.Linear(hidden, 64), nn.Sigmoid()\n"),),
        ("Average loss", 5.0),
    ),
    Fault(
        "loss-activation-mismatch/relu-output",
        "house_prices",
        ("torch.relu", "layers"),
        (("return self.layers(x).squeeze(-1)", "return torch.relu(self.layers(x)).squeeze(-1)"),),
        ("r2", -0.1),
        ("dead-activation",),
    ),
    Fault(
        "loss-activation-mismatch/nll-of-logits",
        "shapes_cnn",
        ("nn.NLLLoss",),
        (("nn.CrossEntropyLoss()", "nn.NLLLoss()"),),
        ("train loss", -10.0),
    ),
    # loss-scale-or-sign
    Fault(
        "loss-scale-or-sign/kl-not-averaged",
        "vae_glyphs",
        ("kl = ", "torch.sum"),
        (("- logvar.exp()) / x.size(0)", "- logvar.exp())"),),
        ("pixels off per glyph", 3.0),
    ),
    Fault(
        "loss-scale-or-sign/sign",
        "reach_reinforce",
        ("policy_loss",),
        (("policy_loss = -(log_probs", "policy_loss = (log_probs"),),
        ("return", -2.0),
    ),
    Fault(
        "loss-scale-or-sign/labels-swapped",
        "ring_gan",
        ("g_loss",),
        (("bce(D(fake), ones)", "bce(D(fake), zeros)"),),
        ("near", -0.3),
    ),
    Fault(
        "loss-scale-or-sign/sum-instead-of-mean",
        "house_prices",
        ("** 2).sum()", "loss = mse("),
        (("((prediction - target) ** 2).mean()", "((prediction - target) ** 2).sum()"),),
        ("mse", 1.0),
        ("lr-too-high",),
    ),
    # axis-or-shape-error
    Fault(
        "axis-or-shape-error/column-against-row",
        "house_prices",
        ("prediction - target", "loss = mse("),
        (("return self.layers(x).squeeze(-1)", "return self.layers(x)"),),
        ("r2", -0.5),
    ),
    Fault(
        "axis-or-shape-error/heads-not-transposed-back",
        "tiny_gpt",
        ("y.reshape", "attn"),
        (("y = y.transpose(1, 2).reshape(B, T, C)", "y = y.reshape(B, T, C)"),),
        ("songs continued", -0.3),
    ),
    Fault(
        "axis-or-shape-error/softmax-over-queries",
        "masked_lm",
        ("softmax(dim=-2)", "layers"),
        (("scores.softmax(dim=-1)", "scores.softmax(dim=-2)"),),
        ("filled in", -0.1),
    ),
    Fault(
        "axis-or-shape-error/batch-first",
        "char_lstm",
        ("nn.LSTM", "lstm"),
        (("nn.LSTM(embed, hidden, batch_first=True)", "nn.LSTM(embed, hidden)"),),
        ("val loss", 0.3),
    ),
    Fault(
        "axis-or-shape-error/normalised-over-the-batch",
        "simclr",
        ("F.normalize(z, dim=0)", "projector"),
        (("F.normalize(z, dim=1)", "F.normalize(z, dim=0)"),),
        ("knn accuracy", -0.1),
    ),
    Fault(
        "axis-or-shape-error/column-against-row",
        "grid_dqn",
        ("gather", "smooth_l1_loss"),
        ((".gather(1, actions[:, None]).squeeze(1)", ".gather(1, actions[:, None])"),),
        ("success", -0.2),
    ),
    # input-or-target-scale
    Fault(
        "input-or-target-scale/raw-features",
        "house_prices",
        ("x = features",),
        (("x = (features - mean) / std", "x = features"),),
        ("r2", -0.3),
    ),
    Fault(
        "input-or-target-scale/raw-prices",
        "house_prices",
        ("y = price",),
        (("y = (price - price_mean) / price_std", "y = price"),),
        ("r2", -0.3),
        ("lr-too-high",),
    ),
    Fault(
        "input-or-target-scale/pixels-to-255",
        "vae_glyphs",
        ("make_glyphs", "255"),
        (("return glyphs.view(count, 64)", "return 255 * glyphs.view(count, 64)"),),
        ("pixels off per glyph", 1.0),
    ),
    Fault(
        "input-or-target-scale/raw-series",
        "forecaster_resume",
        ("series = raw",),
        (("series = (raw - raw[:2300].mean()) / raw[:2300].std()", "series = raw"),),
        ("test mse", 1.0),
    ),
    # data-order-or-sampling
    Fault(
        "data-order-or-sampling/sorted-by-class",
        "shapes_cnn",
        ("DataLoader", "shuffle"),
        (
            ("(count,), generator=generator)\n", "(count,), generator=generator).sort().values\n"),
            ("shuffle=True", "shuffle=False"),
        ),
        ("val acc", -0.3),
    ),
    Fault(
        "data-order-or-sampling/same-batch",
        "spirals_mlp",
        ("idx = perm",),
        (
            ("    perm = torch.randperm(len(X_train))\n", ""),
            ("batch_size = 48\n", "batch_size = 48\nperm = torch.randperm(len(X_train))\n"),
            ("perm[i : i + batch_size]", "perm[:batch_size]"),
        ),
        ("val_loss", 0.2),
    ),
    Fault(
        "data-order-or-sampling/same-batch",
        "masked_lm",
        ("manual_seed(20)",),
        (
            (
                "        inputs, labels = mask_tokens(",
                "        g = torch.Generator().manual_seed(20)\n        inputs, labels = mask_tokens(",
            ),
        ),
        ("filled in", -0.3),
    ),
    Fault(
        "data-order-or-sampling/start-of-the-text-only",
        "tiny_gpt",
        ("torch.randint", "get_batch"),
        (
            (
                "torch.randint(len(data) - cfg.block_size - 1, (batch_size,))",
                "torch.randint(batch_size, (batch_size,))",
            ),
        ),
        ("songs continued", -0.3),
    ),
    Fault(
        "data-order-or-sampling/not-shuffled",
        "recommender",
        ("torch.arange", "split"),
        (
            ("shuffled = torch.randperm(RATINGS)", "shuffled = torch.arange(RATINGS)"),
            ("train[torch.randperm(len(train))].split(100)", "train.split(100)"),
        ),
        ("test rmse", 0.2),
    ),
)
