"""Causes in the network itself: modes, normalisation, growing and dying signals, the start, dead units."""

from gradproof.diagnosis.catalogue.cause import Cause

CAUSES = (
    Cause(
        "train-eval-mode-error",
        "dropout or BatchNorm is in the wrong mode",
        "module.training; whether running statistics move",
        "call model.train() before training and model.eval() before validating, every epoch",
        (
            ("train-mode", "call model.eval() before validating, and model.train() before training goes on"),
            ("eval-left-on", "call model.train() at the beginning of every epoch, after each validation"),
            (
                "functional-dropout",
                "write F.dropout(x, p, training=self.training), or use nn.Dropout; of attention, dropout_p=p if "
                "self.training else 0.0",
            ),
            ("keep-probability", "nn.Dropout takes the share that is dropped: 0.1, where 0.9 is to be kept"),
        ),
        raised_by=("validates_in_train_mode", "dropout_always_on"),
        intervention="train_mode",
    ),
    Cause(
        "normalization-error",
        "a normalisation hurts",
        "variance against ε, batch size, scale factors",
        "normalise over more than one value, with ε well below the variance, and bound any rescaling",
        (
            (
                "not-synchronised",
                "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) before it is wrapped, or GroupNorm",
            ),
            (
                "not-yet-updated",
                "pass some batches in train mode before the first evaluation, or use "
                "torch.nn.utils.parametrizations.spectral_norm, which begins with vectors that fit",
            ),
            (
                "unbounded-rescale",
                "limit the factor: scale.clamp(max=10.0), or add 1e-2 or so to the size it is divided by",
            ),
            ("running-statistics-never-move", "use momentum=0.1, the share of the new batch"),
            ("tiny-batch", "use LayerNorm or GroupNorm, or more samples in each forward pass"),
            ("one-sample", "use GroupNorm or InstanceNorm, or more samples in each forward pass"),
            ("eps", "use eps=1e-5"),
            ("over-the-batch", "take them over the features: x.mean(-1, keepdim=True), as nn.LayerNorm does"),
        ),
        raised_by=("nonfinite", "loss_not_improving", "small_batch_norm", "evaluated_too_soon"),
    ),
    Cause(
        "exploding-signal",
        "activations or gradients grow through depth or time",
        "the gain of each block or time step",
        "bound the gain of the named block: full residuals, normalisation, smaller initial weights, clipping",
        (
            (
                "attention-scores",
                "divide the scores by the root of the head's size, and start query and key weights smaller",
            ),
        ),
        raised_by=("gradient_growing", "exploding_gradients", "nonfinite"),
        intervention="clip",
        explained_by=(
            "input-or-target-scale",
            "loss-scale-or-sign",
            "grad-accumulation-error",
            "zero-grad-error",
        ),
        keeps_gradient_out=True,
    ),
    Cause(
        "vanishing-signal",
        "activations or gradients die out through depth or time",
        "the gain of each block or time step",
        "use residuals, normalisation, ReLU-like activations or gated units, and variance-keeping initial weights",
        (
            (
                "time",
                "keep the state by default: an LSTM's forget-gate bias of 1 or more, orthogonal recurrent weights of "
                "gain 1, decays near 1 (0.99 a step remembers 100 steps), or attention over all time steps",
            ),
        ),
        raised_by=("vanishing_gradients", "loss_not_improving"),
        explained_by=("lr-too-high", "normalization-error"),
        keeps_gradient_out=True,
    ),
    Cause(
        "bad-init",
        "the starting point is the trouble",
        "step 0: gain, symmetry, the loss against that of a guess",
        "use the layer's default initialisation, scaled so that the first loss is that of guessing",
        (
            (
                "zeros",
                "draw the named weights at random: of two layers that are multiplied, at most one may begin at zero",
            ),
            ("same-seed", "seed the generator once, before the first tensor, not before each"),
        ),
        raised_by=("never_changed", "loss_not_improving", "stays_zero", "begins_alike"),
        explained_by=("input-or-target-scale", "loss-scale-or-sign"),
    ),
    Cause(
        "dead-activation",
        "units never respond",
        "the share of units without gradient, over the steps",
        "lower the learning rate, use a smaller negative bias, or LeakyReLU/GELU in place of ReLU",
        (("clamped-output", "remove the clamp from what the loss sees; clamp only what is shown or used"),),
        raised_by=("dead_units", "never_changed"),
        keeps_gradient_out=True,
    ),
)
