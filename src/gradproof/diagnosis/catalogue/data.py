"""Causes in what is learned from what: data, targets, masks, axes and the loss."""

from gradproof.diagnosis.catalogue.cause import Cause

CAUSES = (
    Cause(
        "data-target-misaligned",
        "targets do not belong to inputs",
        "lags between inputs and targets; whether targets depend on inputs at all",
        "print the first batch side by side; for next-token prediction targets are inputs shifted by exactly one",
        (
            ("no-shift", "shift by one: inputs tokens[:, :-1], targets tokens[:, 1:]"),
            (
                "double-shift",
                "shift once, either in the data or before the loss, so that targets are the next token",
            ),
            (
                "pairs-change",
                "sort, shuffle and pad inputs and targets together: one list of pairs, taken apart at the very end",
            ),
            ("fresh-noise", "compare with the noise that went into the input: draw it once and use it twice"),
            ("rows-of-another-batch", "index inputs and targets with the same rows"),
            (
                "target-in-the-input",
                "take the target from behind the window, or its column out of the inputs",
            ),
            (
                "views-of-another-sample",
                "put the views in the order that the loss expects: all first views, then all second ones "
                "(torch.cat), or neighbours (torch.stack(dim=1))",
            ),
            (
                "two-targets",
                "store targets in the order in which they are looked up: make them with a loader that does not "
                "shuffle, or by the number of the sample",
            ),
            (
                "from-a-file-on",
                "hold this file against the one before it: units, ranges, classes, and whether labels belong to their "
                "rows (`gradproof ask RUN fed --step N` shows a batch of each); or shuffle over files, if they are to "
                "differ",
            ),
            (
                "targets-independent-of-inputs",
                "check that inputs and targets are shuffled together, and print a batch side by side",
            ),
        ),
        raised_by=("pairs_change", "files_as_text", "leaps_at_a_file", "loss_not_improving"),
        of_structure=True,
    ),
    Cause(
        "loss-mask-error",
        "the wrong positions count in the loss",
        "shares of positions, and the gradient on masked ones",
        "mask the padding, not the text; divide by the number of valid positions",
        (
            ("inverted", "let the masked positions count and ignore the others"),
            ("rest-left-out", "ignore the prompt and let the answer count: labels[:prompt_length] = -100"),
            (
                "sequences-without-targets",
                "count from the front, labels[i, :len(prompt)] = -100, or from the end of the text, not of the "
                "padding",
            ),
            ("mean-over-all", "(loss * mask).sum() / mask.sum()"),
            (
                "blank-in-targets",
                "number the symbols from 1, or give ctc_loss a blank of its own, and the scores one class more: "
                "blank=len(symbols)",
            ),
        ),
        raised_by=("loss_not_improving",),
        of_structure=True,
    ),
    Cause(
        "attention-mask-error",
        "attention sees what it must not, or not what it must",
        "a change in a later input, watched at earlier outputs",
        "pass is_causal=True or a mask whose meaning (True: attend, or True: ignore) fits the call",
        (
            ("only-padding-attended", "invert the mask: hide the padding, not the tokens"),
            (
                "padding-attended",
                "hide the padded keys: scores.masked_fill(is_padding[:, None, None, :], -inf)",
            ),
            (
                "all-masked-row",
                "let each query see at least itself, and check which value of the mask means: hidden",
            ),
        ),
        raised_by=("loss_not_improving",),
        of_structure=True,
    ),
    Cause(
        "loss-activation-mismatch",
        "output and loss do not fit each other",
        "the range of what goes into the loss",
        "cross_entropy and BCE-with-logits want raw logits; a regression wants no ReLU, tanh or sigmoid at its end",
        (
            ("relu-before-cross-entropy", "give cross_entropy the raw scores: remove the last ReLU"),
            (
                "raw-rate",
                "PoissonNLLLoss(log_input=True), which takes the output for the logarithm of the rate; or a softplus",
            ),
        ),
        raised_by=("loss_not_improving", "loss_hardly_falling"),
        of_structure=True,
    ),
    Cause(
        "loss-scale-or-sign",
        "the right loss, wrongly weighted or signed",
        "the terms of the loss and the sizes of their gradients; the loss along −gradient",
        "check the sign of each term, mean against sum, and the weights between terms",
        (
            ("weight-runs-away", "with s = log σ²: exp(-s) * loss + 0.5 * s"),
            (
                "unbounded",
                "turn the sign of the term that this output is alone in: with s = log σ², a Gaussian's loss is 0.5 * "
                "(error² * exp(-s) + s)",
            ),
            ("policy-sign", "minimise the negative: loss = -(log_prob * advantage).mean()"),
            ("sign", "remove the minus sign in front of the loss, or pass maximize=True"),
            (
                "terms-cancel",
                "give each player a loss of its own, and an optimizer that steps what is its own, one after the other",
            ),
            ("entropy-sign", "subtract it: loss = policy_loss - coefficient * entropy"),
            (
                "one-term-drowns",
                "sum both over the entries of a sample and average over the batch: "
                "F.mse_loss(x_hat, x, reduction='sum') / len(x) + kl.sum(1).mean()",
            ),
        ),
        raised_by=("loss_rising",),
    ),
    Cause(
        "axis-or-shape-error",
        "an operation runs over the wrong axis, or broadcasts silently",
        "shapes that go into the loss; whether samples influence each other",
        "make prediction and target the same shape explicitly, and name the dim of every softmax and mean",
        (
            ("batch-first", "pass batch_first=True, or transpose batch and time before and after"),
            (
                "coupled-samples",
                "keep the batch an axis of its own: (batch, heads, time, width), not (heads, batch · time, width)",
            ),
            (
                "rows-of-another-sample",
                "fold both in the same order: transpose(0, 1) before reshape on the one that has the samples second, "
                "x.repeat(k, 1) for rows (k, batch), x.repeat_interleave(k, 0) for rows (batch, k)",
            ),
            ("one-row-for-all", "take the rows of the whole batch of both inputs"),
            (
                "softmax-of-one",
                "take the softmax over all candidates, before one is chosen, or along the axis that they lie on",
            ),
            ("normalised-over-the-batch", "F.normalize(z, dim=1), or dim=-1"),
            ("over-the-batch", "name the other axis: dim=1 or dim=-1"),
            (
                "one-step-of-time",
                "give the layer whole sequences along its axis of time, and read each direction where it has seen all: "
                "h_n, or out[:, -1, :H] beside out[:, 0, H:]",
            ),
        ),
        raised_by=("loss_not_improving", "recurrence_never_used"),
        of_structure=True,
    ),
    Cause(
        "input-or-target-scale",
        "numbers fed in are of the wrong size",
        "statistics of inputs and targets",
        "standardise inputs and targets: subtract the mean, divide by the standard deviation",
        (
            (
                "validated-otherwise",
                "prepare both alike, with the numbers (mean, deviation, divisor) of the training data",
            ),
            (
                "tiny-features",
                "standardise the inputs once: a division by 255 in the data and again in the model is one too many",
            ),
            (
                "moved",
                "hold what was read here against its source: units, formats, a reader that parses it otherwise; "
                "`gradproof ask RUN fed --step N` shows it beside an earlier step's, and the file",
            ),
            ("pixels-to-255", "divide by 255, then subtract the mean and divide by the standard deviation"),
            ("raw-features", "standardise each feature: subtract its mean, divide by its standard deviation"),
        ),
        raised_by=("loss_not_improving", "loss_oscillating"),
    ),
    Cause(
        "data-order-or-sampling",
        "batches do not represent the data",
        "the mix of labels over batches; batches that repeat",
        "shuffle, seed workers differently, and balance or weight rare classes",
        (
            (
                "same-rows-every-pass",
                "seed the generator once, before training: seeded anew for each pass it draws the same first batches",
            ),
            (
                "workers-draw-alike",
                "seed each worker apart: worker_init_fn=lambda worker: np.random.seed(torch.initial_seed() % 2**32), "
                "and make a generator of the data set's own from get_worker_info().seed",
            ),
            ("seeded-every-step", "seed once before training, not inside the loop"),
            (
                "same-batch",
                "draw other rows at every step: a fresh permutation, or a DataLoader with shuffle=True",
            ),
            ("batches-repeated", "give each worker its own seed and its own share of the data"),
            ("few-samples", "draw from the whole range of the data"),
            (
                "sorted-by-class",
                "shuffle: DataLoader(..., shuffle=True), or a permutation of all rows before they are cut",
            ),
            ("not-shuffled", "shuffle the rows before they are cut into batches"),
            (
                "leaked-validation",
                "split once, before training, and keep the parts apart: one permutation, cut in two",
            ),
            (
                "rare-classes-drawn-less",
                "weigh each sample by the inverse of its own class's count: weights = 1 / "
                "torch.bincount(labels).float()[labels]",
            ),
            ("weights-of-classes", "give the sampler a weight for each sample: class_weights[labels]"),
            (
                "changed-on-the-way",
                "hold the batches from after the turn against those from before it: `gradproof ask RUN changed` says "
                "who is worse off and what is different, `gradproof ask RUN fed --step N` files and classes; if they "
                "are harder by design, nothing is wrong",
            ),
        ),
        raised_by=(
            "loss_oscillating",
            "ranks_see_the_same",
            "few_rows_drawn",
            "workers_draw_alike",
            "turned_by_the_data",
        ),
    ),
)
