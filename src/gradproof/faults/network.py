"""Faults in the network itself: modes, normalisation, growing and dying signals, the start, dead units."""

from gradproof.faults.fault import Fault

FAULTS = (
    # train-eval-mode-error
    Fault(
        "train-eval-mode-error/keep-probability",
        "spirals_mlp",
        ("nn.Dropout", "self.drop"),
        (("nn.Dropout(0.05)", "nn.Dropout(0.95)"),),
        ("val_loss", 0.3),
    ),
    Fault(
        "train-eval-mode-error/eval-left-on",
        "shapes_cnn",
        ("model.eval()", "features"),
        (
            ("    model.train()\n    total, seen = 0.0, 0\n", "    total, seen = 0.0, 0\n"),
            ('    print(f"untrained', '    model.train()\n    print(f"untrained'),
        ),
        ("val acc", -0.1),
    ),
    Fault(
        "train-eval-mode-error/dropout-always-on",
        "spirals_mlp",
        ("F.dropout",),
        (
            ("x = F.relu(self.fc1(x))", "x = F.dropout(F.relu(self.fc1(x)))"),
            ("x = self.drop(x)", "x = F.dropout(x)"),
        ),
        ("val_loss", 0.08),
    ),
    Fault(
        "train-eval-mode-error/keep-probability",
        "shapes_cnn",
        ("nn.Dropout", "dropout"),
        (("nn.Dropout(0.1)", "nn.Dropout(0.9)"),),
        ("val acc", -0.1),
    ),
    # normalization-error
    Fault(
        "normalization-error/running-statistics-never-move",
        "shapes_cnn",
        ("BatchNorm2d", "features"),
        (
            ("nn.BatchNorm2d(12)", "nn.BatchNorm2d(12, momentum=0.0)"),
            ("nn.BatchNorm2d(24)", "nn.BatchNorm2d(24, momentum=0.0)"),
            ("nn.BatchNorm2d(32)", "nn.BatchNorm2d(32, momentum=0.0)"),
        ),
        ("val acc", -0.3),
        ("train-eval-mode-error",),
    ),
    Fault(
        "normalization-error/layernorm-eps",
        "masked_lm",
        ("nn.LayerNorm", "norm1", "norm2"),
        (
            ("self.norm1 = nn.LayerNorm(dim)", "self.norm1 = nn.LayerNorm(dim, eps=1e3)"),
            ("self.norm2 = nn.LayerNorm(dim)", "self.norm2 = nn.LayerNorm(dim, eps=1e3)"),
        ),
        ("filled in", -0.2),
        ("vanishing-signal",),
    ),
    Fault(
        "normalization-error/batchnorm-of-two",
        "deep_residual",
        ("BatchNorm1d", "self.norm(x)"),
        (
            ("        self.norm = nn.LayerNorm(width)\n", "        self.norm = nn.BatchNorm1d(width)\n"),
            ("MICRO = 16\n", "MICRO = 2\n"),
            ("ACCUMULATE = 4\n", "ACCUMULATE = 8\n"),
        ),
        ("val acc", -0.2),
    ),
    # exploding-signal
    Fault(
        "exploding-signal/no-clipping",
        "recall_rnn",
        ("loss.backward()", "cell"),
        (("    nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n", ""),),
        ("recall", -0.3),
        ("lr-too-high", "grad-clip-misuse"),
    ),
    Fault(
        "exploding-signal/gain-above-one",
        "recall_rnn",
        ("gain=", "cell.wh"),
        (("gain=1.0", "gain=4.0"),),
        ("recall", -0.3),
        ("bad-init",),
    ),
    Fault(
        "exploding-signal/residual-growth",
        "deep_residual",
        ("blocks", "self.fc2(h)"),
        (
            ("F.relu(self.fc1(self.norm(x)))", "F.relu(self.fc1(x))"),
            ("return x + self.fc2(h) / DEPTH**0.5", "return x + self.fc2(h)"),
        ),
        ("val acc", -0.3),
        ("bad-init", "normalization-error"),
    ),
    # vanishing-signal
    Fault(
        "vanishing-signal/sigmoid-stack",
        "deep_residual",
        ("torch.sigmoid", "blocks"),
        (
            ("F.relu(self.fc1(self.norm(x)))", "torch.sigmoid(self.fc1(x))"),
            ("return x + self.fc2(h) / DEPTH**0.5", "return torch.sigmoid(self.fc2(h))"),
        ),
        ("val acc", -0.3),
    ),
    Fault(
        "vanishing-signal/gain-below-one",
        "recall_rnn",
        ("gain=", "cell.wh"),
        (("gain=1.0", "gain=0.4"),),
        ("recall", -0.3),
        ("bad-init",),
    ),
    # bad-init
    Fault(
        "bad-init/zeros",
        "spirals_mlp",
        ("fc1", "fc2", "zeros_"),
        (("net = Net()\n", "net = Net()\nfor p in net.parameters():\n    nn.init.zeros_(p)\n"),),
        ("val_loss", 0.5),
    ),
    Fault(
        "bad-init/too-large",
        "tiny_gpt",
        ("std=", "_init_weights"),
        (("std=0.04", "std=2.0"),),
        ("loss", 0.5),
        ("exploding-signal",),
    ),
    Fault(
        "bad-init/zero-factors",
        "recommender",
        ("user", "item", "zeros_"),
        (
            ("nn.init.normal_(self.user.weight, std=0.3)", "nn.init.zeros_(self.user.weight)"),
            ("nn.init.normal_(self.item.weight, std=0.3)", "nn.init.zeros_(self.item.weight)"),
        ),
        ("test rmse", 0.3),
    ),
    Fault(
        "bad-init/head-scale",
        "deep_residual",
        ("head", "std="),
        (("nn.init.normal_(self.head.weight, std=0.02)", "nn.init.normal_(self.head.weight, std=20)"),),
        ("val acc", -0.2),
    ),
    # dead-activation
    Fault(
        "dead-activation/prior-bias-on-hidden-layers",
        "vae_glyphs",
        ("encoder", "decoder", "constant_"),
        (
            (
                "model = VAE()\n",
                "model = VAE()\n"
                "for module in model.modules():\n"
                "    if isinstance(module, nn.Linear):\n"
                "        nn.init.constant_(module.bias, -4.6)\n",
            ),
        ),
        ("pixels off per glyph", 3.0),
        ("bad-init",),
    ),
    Fault(
        "dead-activation/prior-bias-on-hidden-layers",
        "grid_dqn",
        ("fc1", "fc2", "constant_"),
        (
            (
                "        self.q = nn.Linear(96, len(MOVES))\n",
                "        self.q = nn.Linear(96, len(MOVES))\n"
                "        for layer in (self.fc1, self.fc2, self.q):\n"
                "            nn.init.constant_(layer.bias, -2.0)\n",
            ),
        ),
        ("success", -0.3),
        ("bad-init",),
    ),
    Fault(
        "dead-activation/clamped-output",
        "house_prices",
        ("clamp", "layers"),
        (("return self.layers(x).squeeze(-1)", "return self.layers(x).squeeze(-1).clamp(0, 1)"),),
        ("r2", -0.2),
        ("loss-activation-mismatch",),
    ),
)
