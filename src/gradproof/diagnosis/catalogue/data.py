"""Causes in what is learned from what: data, targets, masks, axes and the loss."""

from gradproof.diagnosis.catalogue.cause import Cause

CAUSES = (
    Cause(
        "data-target-misaligned",
        "targets do not belong to inputs",
        "lags between inputs and targets; whether targets depend on inputs at all",
        "print the first batch side by side; for next-token prediction targets are inputs shifted by exactly one",
        raised_by=("pairs_change", "files_as_text", "loss_not_improving"),
    ),
    Cause(
        "loss-mask-error",
        "the wrong positions count in the loss",
        "shares of positions, and the gradient on masked ones",
        "mask the padding, not the text; divide by the number of valid positions",
        raised_by=("loss_not_improving",),
    ),
    Cause(
        "attention-mask-error",
        "attention sees what it must not, or not what it must",
        "a change in a later input, watched at earlier outputs",
        "pass is_causal=True or a mask whose meaning (True: attend, or True: ignore) fits the call",
        raised_by=("loss_not_improving",),
    ),
    Cause(
        "loss-activation-mismatch",
        "output and loss do not fit each other",
        "the range of what goes into the loss",
        "cross_entropy and BCE-with-logits want raw logits; a regression wants no ReLU, tanh or sigmoid at its end",
        raised_by=("loss_not_improving", "loss_hardly_falling"),
    ),
    Cause(
        "loss-scale-or-sign",
        "the right loss, wrongly weighted or signed",
        "the terms of the loss and the sizes of their gradients; the loss along −gradient",
        "check the sign of each term, mean against sum, and the weights between terms",
        raised_by=("loss_rising",),
    ),
    Cause(
        "axis-or-shape-error",
        "an operation runs over the wrong axis, or broadcasts silently",
        "shapes that go into the loss; whether samples influence each other",
        "make prediction and target the same shape explicitly, and name the dim of every softmax and mean",
        raised_by=("loss_not_improving",),
    ),
    Cause(
        "input-or-target-scale",
        "numbers fed in are of the wrong size",
        "statistics of inputs and targets",
        "standardise inputs and targets: subtract the mean, divide by the standard deviation",
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
        ),
        raised_by=("loss_oscillating", "ranks_see_the_same", "few_rows_drawn", "workers_draw_alike"),
    ),
)
