"""Faults in the step: learning rate, schedule, optimizer, precision, ranks, and weights kept from before."""

from gradproof.faults.fault import Fault

FAULTS = (
    # lr-too-high
    Fault(
        "lr-too-high/large-learning-rate",
        "spirals_mlp",
        (),
        (("lr=0.1, momentum=0.9", "lr=3.0, momentum=0.9"),),
        ("val_loss", 0.3),
    ),
    Fault(
        "lr-too-high/large-learning-rate",
        "tiny_gpt",
        (),
        (("learning_rate = 4e-3", "learning_rate = 0.4"),),
        ("loss", 0.5),
    ),
    Fault(
        "lr-too-high/no-warmup",
        "tiny_gpt",
        (),
        (
            ("learning_rate = 4e-3", "learning_rate = 2e-2"),  # trains well with the warmup
            ("    if step < warmup_steps:\n        return learning_rate * (step + 1) / warmup_steps\n", ""),
        ),
        ("loss", 0.5),
    ),
    Fault(
        "lr-too-high/large-learning-rate",
        "cascade",
        (),
        (("lr=2e-3, weight_decay", "lr=0.2, weight_decay"),),
        ("test mse", 0.1),
    ),
    # lr-too-low
    Fault(
        "lr-too-low/small-learning-rate",
        "moons_diffusion",
        (),
        (("lr=2e-3", "lr=2e-6"),),
        ("loss", 0.2),
    ),
    Fault(
        "lr-too-low/small-learning-rate",
        "vae_glyphs",
        (),
        (("lr=2e-3", "lr=1e-6"),),
        ("Average loss", 5.0),
    ),
    Fault(
        "lr-too-low/small-learning-rate",
        "spirals_mlp",
        (),
        (("lr=0.1, momentum=0.9", "lr=1e-4, momentum=0.9"),),
        ("val_loss", 0.5),
    ),
    # lr-schedule-error
    Fault(
        "lr-schedule-error/stepped-every-batch",
        "shapes_cnn",
        ("scheduler.step()",),
        (
            (
                "def train_one_epoch(model, loader, criterion, optimizer):",
                "def train_one_epoch(model, loader, criterion, optimizer, scheduler):",
            ),
            ("        optimizer.step()\n", "        optimizer.step()\n        scheduler.step()\n"),
            ("        scheduler.step()\n        acc =", "        acc ="),
            (
                "train_one_epoch(model, train_loader, criterion, optimizer)",
                "train_one_epoch(model, train_loader, criterion, optimizer, scheduler)",
            ),
        ),
        ("val acc", -0.2),
        ("lr-too-low",),
    ),
    Fault(
        "lr-schedule-error/warmup-never-ends",
        "tiny_gpt",
        ("get_lr", "warmup_steps"),
        (("warmup_steps = 20\n", "warmup_steps = 20000\n"),),
        ("loss", 0.5),
        ("lr-too-low",),
    ),
    Fault(
        "lr-schedule-error/multiplied-twice",
        "masked_lm",
        ("LambdaLR",),
        (("lambda s: min(1.0, (s + 1) / 30)", "lambda s: 3e-3 * min(1.0, (s + 1) / 30)"),),
        ("filled in", -0.3),
        ("lr-too-low",),
    ),
    Fault(
        "lr-schedule-error/decay-meant-for-epochs",
        "forecaster_resume",
        ("scheduler.step()", "ExponentialLR"),
        (("gamma=0.995", "gamma=0.8"),),
        ("test mse", 0.02),
        ("lr-too-low",),
    ),
    # optimizer-config
    Fault(
        "optimizer-config/weight-decay",
        "spirals_mlp",
        ("weight_decay",),
        (("weight_decay=1e-4", "weight_decay=0.1"),),
        ("val_loss", 0.3),
    ),
    Fault(
        "optimizer-config/weight-decay",
        "shapes_cnn",
        ("weight_decay",),
        (("weight_decay=5e-4", "weight_decay=0.5"),),
        ("val acc", -0.2),
    ),
    Fault(
        "optimizer-config/adam-eps",
        "masked_lm",
        ("eps=",),
        (("lr=3e-3)", "lr=3e-3, eps=1.0)"),),
        ("filled in", -0.3),
        ("lr-too-low",),
    ),
    Fault(
        "optimizer-config/betas",
        "tiny_gpt",
        ("betas",),
        (("betas=(0.9, 0.95)", "betas=(0.9, 0.1)"),),
        ("loss", 0.1),
    ),
    Fault(
        "optimizer-config/momentum",
        "house_prices",
        ("momentum",),
        (("momentum=0.9)", "momentum=0.999)"),),
        ("r2", -0.1),
        ("lr-too-high",),
    ),
    # low-precision-error
    Fault(
        "low-precision-error/average-kept-in-bf16",
        "moons_diffusion",
        ("bfloat16", "slow.mul_", "ema"),
        (
            ("self.model = copy.deepcopy(model)\n", "self.model = copy.deepcopy(model).bfloat16()\n"),
            ("sample(ema.model, 500)", "sample(ema.model.float(), 500)"),
        ),
        ("samples to data", 0.03),
        ("weights-state-error",),
    ),
    Fault(
        "low-precision-error/adam-eps-in-half",
        "vae_glyphs",
        (),
        (
            ("return glyphs.view(count, 64)", "return glyphs.view(count, 64).half()"),
            ("model = VAE()\n", "model = VAE().half()\n"),
        ),
        ("Average loss", 5.0),
        ("optimizer-config",),
    ),
    Fault(
        "low-precision-error/adam-eps-in-half",
        "spirals_mlp",
        (),
        (
            ("net = Net()\n", "net = Net().half()\n"),
            (
                "optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)",
                "optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)",
            ),
            ("X = torch.cat(points) / 0.4", "X = torch.cat(points).half() / 0.4"),
        ),
        ("val_loss", 0.3),
        ("optimizer-config",),
    ),
    # distributed-desync
    Fault(
        "distributed-desync/forward-around-the-wrapper",
        "ddp_classifier",
        ("model.module(x)",),
        (("F.cross_entropy(model(x), y)", "F.cross_entropy(model.module(x), y)"),),
        ("replica gap", 1e-3),
    ),
    Fault(
        "distributed-desync/no-sync-left-on",
        "ddp_classifier",
        ("no_sync",),
        (
            (
                "            loss = F.cross_entropy(model(x), y)\n            loss.backward()\n",
                "            with model.no_sync():\n"
                "                loss = F.cross_entropy(model(x), y)\n"
                "                loss.backward()\n",
            ),
        ),
        ("replica gap", 1e-3),
    ),
    Fault(
        "distributed-desync/same-data-on-all-ranks",
        "ddp_classifier",
        ("DistributedSampler", "rank=0"),
        (
            ("num_replicas=WORLD, rank=rank, shuffle=True", "num_replicas=WORLD, rank=0, shuffle=True"),
            ("        sampler.set_epoch(epoch)\n", ""),
        ),
        ("val acc", -0.04),
        ("data-order-or-sampling",),
    ),
    Fault(
        "distributed-desync/different-initial-weights",
        "ddp_manual_gru",
        ("broadcast_parameters", "manual_seed"),
        (("    broadcast_parameters(model)\n", ""),),
        ("rank spread", 1e-2),
    ),
    Fault(
        "distributed-desync/only-the-head-averaged",
        "ddp_manual_gru",
        ("average_gradients", "model.head"),
        (("        average_gradients(model)\n", "        average_gradients(model.head)\n"),),
        ("rank spread", 1e-2),
    ),
    Fault(
        "distributed-desync/no-sync-on-the-last-half",
        "ddp_classifier",
        ("no_sync",),
        (
            (
                "            loss = F.cross_entropy(model(x), y)\n            loss.backward()\n",
                "            (F.cross_entropy(model(x[:10]), y[:10]) / 2).backward()\n"
                "            with model.no_sync():\n"
                "                loss = F.cross_entropy(model(x[10:]), y[10:]) / 2\n"
                "                loss.backward()\n",
            ),
        ),
        ("replica gap", 1e-3),
    ),
    Fault(
        "distributed-desync/rate-of-one-rank",
        "ddp_classifier",
        ("lr=", "torch.optim.SGD"),
        (("lr=0.05, momentum=0.9)", "lr=0.05 if rank == 0 else 0.02, momentum=0.9)"),),
        ("replica gap", 1e-3),
    ),
    Fault(
        "distributed-desync/averaged-now-and-then",
        "ddp_manual_gru",
        ("average_gradients", "all_reduce"),
        (
            (
                "        average_gradients(model)\n",
                "        if step % 4 == 0:\n            average_gradients(model)\n",
            ),
        ),
        ("rank spread", 1e-2),
    ),
    # weights-state-error
    Fault(
        "weights-state-error/best-by-reference",
        "forecaster_resume",
        ("state_dict()",),
        (("copy.deepcopy(model.state_dict())", "model.state_dict()"),),
        ("reloaded val", 5e-4),
        ("aliasing-or-inplace",),
    ),
    Fault(
        "weights-state-error/checkpoint-keys",
        "forecaster_resume",
        ("load_state_dict",),
        (
            (
                '"model": model.state_dict()',
                '"model": {f"module.{k}": v for k, v in model.state_dict().items()}',
            ),
            ('model.load_state_dict(saved["model"])', 'model.load_state_dict(saved["model"], strict=False)'),
        ),
        ("val at resume", 0.05),
    ),
    Fault(
        "weights-state-error/ema-formula",
        "moons_diffusion",
        ("slow.mul_", "ema"),
        (
            (
                "slow.mul_(self.decay).add_(fast, alpha=1 - self.decay)",
                "slow.mul_(1 - self.decay).add_(fast, alpha=1 - self.decay)",
            ),
        ),
        ("samples to data", 0.2),
    ),
    Fault(
        "weights-state-error/target-never-synced",
        "grid_dqn",
        ("self.target.load_state_dict", "target"),
        (
            (
                "self.target.load_state_dict(self.online.state_dict())",
                "self.target.load_state_dict(self.target.state_dict())",
            ),
        ),
        ("success", -0.2),
        ("param-not-updated",),
    ),
    # aliasing-or-inplace
    Fault(
        "aliasing-or-inplace/replay-of-one-buffer",
        "grid_dqn",
        ("self.state.flatten()", "memory.append"),
        (("return self.state.flatten().clone()", "return self.state.flatten()"),),
        ("success", -0.2),
    ),
    Fault(
        "aliasing-or-inplace/noise-scaled-in-place",
        "moons_diffusion",
        ("noise.mul_",),
        (("(1 - a).sqrt() * noise\n", "noise.mul_((1 - a).sqrt())\n"),),
        ("samples to data", 0.1),
    ),
    Fault(
        "aliasing-or-inplace/one-reward-buffer",
        "reach_reinforce",
        ("self.reward", "rewards.append"),
        (
            (
                "    def reset(self):\n",
                "    def __init__(self):\n        self.reward = torch.zeros(ENVS)\n\n    def reset(self):\n",
            ),
            (
                "        reward = -(self.goal - self.position).abs()\n"
                "        return self.observe(), reward\n",
                "        self.reward.copy_(-(self.goal - self.position).abs())\n"
                "        return self.observe(), self.reward\n",
            ),
        ),
        ("return", -0.5),
    ),
)
