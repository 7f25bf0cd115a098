"""Causes in what is learned from what: data, targets, masks, axes and the loss."""

from gradproof.diagnosis.catalogue.cause import Cause

CAUSES = (
    Cause(
        "data-target-misaligned",
        "targets do not belong to inputs",
        "lags between inputs and targets; whether targets depend on inputs at all",
        "print the first batch side by side; for next-token prediction targets are inputs shifted by exactly one",
        raised_by=("pairs_change", "files_as_text", "loss_not_improving"),
        experiments=(
            "do_targets_line_up",
            "do_targets_belong_to_inputs",
            "do_two_loaders_go_together",
            "is_one_side_augmented",
        ),
    ),
    Cause(
        "loss-mask-error",
        "the wrong positions count in the loss",
        "shares of positions, and the gradient on masked ones",
        "mask the padding, not the text; divide by the number of valid positions",
        raised_by=("loss_not_improving",),
        experiments=(
            "which_positions_count",
            "does_every_sequence_count",
            "is_the_mean_over_what_counts",
            "do_missing_entries_count",
            "is_a_class_left_out",
        ),
    ),
    Cause(
        "attention-mask-error",
        "attention sees what it must not, or not what it must",
        "a change in a later input, watched at earlier outputs",
        "pass is_causal=True or a mask whose meaning (True: attend, or True: ignore) fits the call",
        raised_by=("loss_not_improving",),
        experiments=(
            "is_attention_healthy",
            "does_it_see_the_future",
            "where_does_attention_look",
            "is_the_mask_tiled_like_the_tokens",
        ),
    ),
    Cause(
        "loss-activation-mismatch",
        "output and loss do not fit each other",
        "the range of what goes into the loss",
        "cross_entropy and BCE-with-logits want raw logits; a regression wants no ReLU, tanh or sigmoid at its end",
        raised_by=("loss_not_improving", "loss_hardly_falling"),
        experiments=("does_the_output_fit_the_loss", "are_logarithms_where_they_are_wanted"),
    ),
    Cause(
        "loss-scale-or-sign",
        "the right loss, wrongly weighted or signed",
        "the terms of the loss and the sizes of their gradients; the loss along −gradient",
        "check the sign of each term, mean against sum, and the weights between terms",
        raised_by=("loss_rising",),
        experiments=(
            "is_the_loss_the_right_way_up",
            "are_terms_weighed_alike",
            "do_class_weights_favour_the_rare",
            "do_the_players_disagree",
            "is_exploring_rewarded",
            "does_a_weight_of_the_loss_run_away",
            "does_an_output_run_away",
        ),
    ),
    Cause(
        "axis-or-shape-error",
        "an operation runs over the wrong axis, or broadcasts silently",
        "shapes that go into the loss; whether samples influence each other",
        "make prediction and target the same shape explicitly, and name the dim of every softmax and mean",
        raised_by=("loss_not_improving",),
        experiments=(
            "is_it_normalised_over_features",
            "do_shapes_meet",
            "do_the_rows_meet",
            "are_samples_independent",
            "is_a_view_in_place_of_a_transpose",
            "do_classes_stay_together",
            "do_positions_run_along_the_sequence",
            "where_does_attention_look",
        ),
    ),
    Cause(
        "input-or-target-scale",
        "numbers fed in are of the wrong size",
        "statistics of inputs and targets",
        "standardise inputs and targets: subtract the mean, divide by the standard deviation",
        raised_by=("loss_not_improving", "loss_oscillating"),
        experiments=("are_numbers_of_a_fitting_size", "do_inputs_vary"),
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
        ),
        raised_by=("loss_oscillating", "ranks_see_the_same", "few_rows_drawn"),
        experiments=(
            "do_batches_differ",
            "is_all_of_the_range_drawn",
            "has_validation_been_trained_on",
            "are_rare_classes_drawn_more_often",
        ),
    ),
)
