"""The catalogue: every family of causes, what it means, what decides it, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cause:
    """A family of causes. `fixes` holds advice for particular ids; `fix` is for all the others.

    raised_by: symptoms that raise the suspicion; experiments: functions that decide it on a tape (where there are
    none, the symptoms themselves are the proof); intervention: how `--verify` undoes it from outside.
    """

    family: str
    title: str
    decided_by: str
    fix: str
    fixes: tuple[tuple[str, str], ...] = ()
    raised_by: tuple[str, ...] = ()
    experiments: tuple[str, ...] = ()
    intervention: str = ""

    def advice(self, id: str) -> str:
        return dict(self.fixes).get(id.partition("/")[2], self.fix)


CAUSES = (
    Cause(
        "forward-nonfinite",
        "a NaN or Inf is born in the forward pass",
        "the first bad operation on the tape",
        "keep the operand of the named operation inside its domain: clamp what goes into log, sqrt and division "
        "(for example x.clamp_min(1e-6)), and use log_softmax or logsumexp in place of exp, sum and log",
        raised_by=("nonfinite", "steps_skipped"),
        experiments=("where_was_it_born",),
    ),
    Cause(
        "backward-nonfinite",
        "the forward pass is finite, a NaN or Inf is born in backward",
        "the first bad node on the tape",
        "the derivative is infinite where the value is not: add a small constant inside the root or norm "
        "(torch.sqrt(x + 1e-12)), and make both branches of torch.where safe before choosing",
        raised_by=("nonfinite",),
        experiments=("where_was_it_born",),
    ),
    Cause(
        "wrong-gradient",
        "a backward is not the derivative of its forward",
        "the float64 shadow of a step, then finite differences of the culprit",
        "correct the named backward and prove it: gradproof.check_gradient(function, *inputs)",
        raised_by=("loss_not_improving",),
        experiments=("is_the_gradient_right",),
        intervention="autograd",
    ),
    Cause(
        "zero-grad-error",
        "gradients are not cleared, or cleared at the wrong time",
        "the order of zero_grad, backward and step; the gradient against that of one backward",
        "call optimizer.zero_grad() once a step, before backward",
        (
            ("never-cleared", "call optimizer.zero_grad() before each backward: gradients add up otherwise"),
            (
                "before-step",
                "move optimizer.zero_grad() in front of loss.backward(), or behind optimizer.step()",
            ),
        ),
        raised_by=("stale_gradient", "zeroed_before_step"),
        experiments=("is_the_gradient_right",),
        intervention="zero_grad",
    ),
    Cause(
        "grad-accumulation-error",
        "the micro-batches do not add up to the batch",
        "the accumulated gradient against that of the whole batch",
        "divide each micro-batch's loss by their number, add (not assign) gradients, and step after the last one",
        raised_by=("uneven_windows", "cleared_between_backwards"),
        experiments=("do_micro_batches_add_up", "is_the_gradient_right"),
    ),
    Cause(
        "grad-clip-misuse",
        "clipping does not clip what was meant",
        "the order of backward, unscale, clip and step; the norm before and after",
        "clip between backward (after scaler.unscale_) and step, all parameters together, at a limit near the "
        "usual norm",
        (
            ("after-step", "move the clip between loss.backward() and optimizer.step()"),
            ("before-unscale", "call scaler.unscale_(optimizer) before clip_grad_norm_"),
            (
                "limit-too-small",
                "raise the limit to about the median norm before clipping, or adjust the learning rate",
            ),
            ("wrong-parameters", "give clip_grad_norm_ the parameters of the optimizer that steps next"),
            ("per-tensor", "call clip_grad_norm_ once, with all parameters together"),
            (
                "infinity-to-nan",
                "skip the step when the norm that clip_grad_norm_ returns is not finite, or pass "
                "error_if_nonfinite=True; then look for what made the gradient infinite",
            ),
        ),
        raised_by=(
            "late_clip",
            "clip_before_unscale",
            "clip_misses",
            "clip_misses_all",
            "clip_per_tensor",
            "clip_sets_the_step",
            "clipped_always",
            "clip_of_infinity",
        ),
        experiments=("is_the_step_too_long_or_short",),
        intervention="clip_before_step",
    ),
    Cause(
        "detached-graph",
        "a path that should carry gradient is cut",
        "the replayed step has a gradient where the run has none",
        "remove the detach, .data, .item(), no_grad, argmax or NumPy round trip between the parameter and the loss",
        raised_by=("no_gradient", "loss_not_improving"),
        experiments=("is_a_path_cut", "do_derivatives_carry_gradient"),
    ),
    Cause(
        "missing-stop-gradient",
        "gradient flows where it must not",
        "gradient reaches parameters whose update it must not drive",
        "compute targets, teachers and baselines under torch.no_grad(), or detach them",
        raised_by=("loss_not_improving",),
        experiments=("does_gradient_reach_what_it_must_not", "does_a_ratio_cancel"),
    ),
    Cause(
        "param-not-updated",
        "parameters that should train do not",
        "Δθ over the run, and the identity of the optimizer's tensors",
        "give the optimizer all of model.parameters(), after the model has its final layers and device",
        (
            (
                "not-in-optimizer",
                "pass these parameters to the optimizer, or set requires_grad_(False) if they are frozen on purpose",
            ),
            (
                "no-gradient",
                "use these parameters in the forward pass, or freeze them; if they are used, look for a cut graph",
            ),
        ),
        raised_by=("not_in_optimizer", "no_gradient", "never_changed", "idle_parameters"),
        experiments=(
            "does_the_optimizer_do_what_was_meant",
            "does_the_optimizer_hold_everything",
            "is_what_was_unfrozen_trained",
            "are_converted_parameters_trained",
        ),
        intervention="all_parameters",
    ),
    Cause(
        "lr-too-high",
        "the steps overshoot",
        "the loss along the actual update: it falls for a small part of the step and rises at its end",
        "divide the learning rate by ten, and warm it up over the first hundred steps or so",
        raised_by=("loss_rising", "loss_oscillating", "loss_spike", "huge_updates", "nonfinite"),
        experiments=("is_the_step_too_long_or_short", "can_it_learn_this_batch"),
        intervention="lr",
    ),
    Cause(
        "lr-too-low",
        "the steps are far too short",
        "the loss along the actual update: still falling far beyond its end",
        "raise the learning rate by ten until the loss falls visibly within the first hundred steps",
        raised_by=("loss_hardly_falling", "loss_not_improving", "tiny_updates"),
        experiments=("is_the_step_too_long_or_short",),
        intervention="lr",
    ),
    Cause(
        "lr-schedule-error",
        "the schedule does something else than meant",
        "the recorded learning rate over the steps",
        "check whether the schedule counts steps or epochs, and where it ends",
        (
            (
                "ends-at-zero",
                "let the schedule last as long as training: count it in the unit in which scheduler.step() is called",
            ),
            ("dies-early", "call scheduler.step() once an epoch, or give the schedule its lengths in steps"),
            ("warmup-never-ends", "let the warmup end within the first tenth of the run"),
            (
                "multiplied",
                "LambdaLR multiplies the optimizer's own learning rate: return a factor between 0 and 1",
            ),
            ("cycles-too-fast", "give the period in the unit in which scheduler.step() is called"),
        ),
        raised_by=("lr_zero", "dies-early", "warmup-never-ends", "multiplied", "cycles-too-fast"),
        intervention="constant_lr",
    ),
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
            "do_positions_run_along_the_sequence",
            "where_does_attention_look",
        ),
    ),
    Cause(
        "train-eval-mode-error",
        "dropout or BatchNorm is in the wrong mode",
        "module.training; whether running statistics move",
        "call model.train() before training and model.eval() before validating, every epoch",
        (
            ("train-mode", "call model.eval() before validating, and model.train() before training goes on"),
            ("eval-left-on", "call model.train() at the beginning of every epoch, after each validation"),
            ("functional-dropout", "write F.dropout(x, p, training=self.training), or use nn.Dropout"),
            ("keep-probability", "nn.Dropout takes the share that is dropped: 0.1, where 0.9 is to be kept"),
        ),
        raised_by=("validates_in_train_mode", "dropout_always_on"),
        experiments=("is_it_in_train_mode", "is_too_much_dropped"),
        intervention="train_mode",
    ),
    Cause(
        "normalization-error",
        "a normalisation hurts",
        "variance against ε, batch size, scale factors",
        "normalise over more than one value, with ε well below the variance, and bound any rescaling",
        raised_by=("nonfinite", "loss_not_improving"),
        experiments=(
            "is_rescaling_bounded",
            "does_normalisation_help",
            "is_ones_own_norm_over_the_batch",
            "is_one_value_normalised",
        ),
    ),
    Cause(
        "low-precision-error",
        "right in float64, wrong in the precision used",
        "the same step in float64",
        "keep weights, sums and the optimizer in float32; use bfloat16 or a GradScaler instead of bare float16",
        (
            (
                "optimizer-in-half",
                "keep the weights in float32 (model.float()) and use autocast: in float16 Adam's eps of 1e-8 is 0",
            ),
        ),
        raised_by=("nonfinite", "steps_skipped", "never_changed"),
        experiments=(
            "is_it_precision",
            "are_whole_numbers_kept",
            "are_phases_kept",
            "are_tables_kept_whole",
            "where_was_it_born",
        ),
        intervention="float32",
    ),
    Cause(
        "exploding-signal",
        "activations or gradients grow through depth or time",
        "the gain of each block or time step",
        "bound the gain of the named block: full residuals, normalisation, smaller initial weights, clipping",
        raised_by=("gradient_growing", "exploding_gradients", "nonfinite"),
        experiments=(
            "is_attention_healthy",
            "where_does_the_signal_go",
        ),
        intervention="clip",
    ),
    Cause(
        "vanishing-signal",
        "activations or gradients die out through depth or time",
        "the gain of each block or time step",
        "use residuals, normalisation, ReLU-like activations or gated units, and variance-keeping initial weights",
        raised_by=("vanishing_gradients", "loss_not_improving"),
        experiments=("where_does_the_signal_go", "does_the_beginning_reach_the_end"),
    ),
    Cause(
        "bad-init",
        "the starting point is the trouble",
        "step 0: gain, symmetry, the loss against that of a guess",
        "use the layer's default initialisation, scaled so that the first loss is that of guessing",
        raised_by=("never_changed", "loss_not_improving"),
        experiments=(
            "are_units_all_the_same",
            "is_it_too_large",
            "where_does_the_loss_start",
            "where_do_scores_start",
        ),
    ),
    Cause(
        "dead-activation",
        "units never respond",
        "the share of units without gradient, over the steps",
        "lower the learning rate, use a smaller negative bias, or LeakyReLU/GELU in place of ReLU",
        raised_by=("dead_units", "never_changed"),
        experiments=("do_units_respond", "are_predictions_stuck"),
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
    Cause(
        "distributed-desync",
        "the ranks do not train one model",
        "fingerprints of weights and gradients across ranks",
        "wrap the model in DistributedDataParallel, use a DistributedSampler, and leave no_sync before stepping",
        (
            (
                "gradients-not-averaged",
                "call the DDP-wrapped model (not model.module), and leave no_sync before stepping",
            ),
            ("initial-weights", "broadcast rank 0's weights before training, or seed all ranks alike"),
            ("same-data", "give DistributedSampler this process's rank, and call set_epoch at every epoch"),
        ),
        raised_by=("ranks_differ", "ranks_see_the_same"),
    ),
    Cause(
        "weights-state-error",
        "weights or optimizer state are not what they should be",
        "keys, identities and jumps where a state is loaded",
        "load with strict=True, restore the optimizer too, and copy (not reference) the weights to keep",
        (
            (
                "by-reference",
                "keep copy.deepcopy(model.state_dict()): a state_dict is a view of the weights that go on training",
            ),
            ("keys", "make the keys fit (strip or add the prefix) and load with strict=True"),
            ("overwritten", "initialise first (apply, reset_parameters, nn.init), then load the checkpoint"),
            (
                "average-thrown-away",
                "write the average back: target.lerp_(weight, 1 - decay) or target.copy_(...), under no_grad; "
                "`target = ...` only gives a local name another tensor",
            ),
            (
                "average-stays",
                "put the trained weights back after the average has been evaluated (keep a copy, restore it), or "
                "evaluate a copy of the model that holds the average",
            ),
            ("optimizer-state-lost", "save and load optimizer.state_dict() with the model's"),
            ("optimizer-remade", "make the optimizer once, before the loop"),
            (
                "average-too-slow",
                "use a decay that fits the run's length (1 - 10 / steps), or let it rise: "
                "min(decay, (1 + step) / (10 + step))",
            ),
            (
                "statistics-not-copied",
                "copy the buffers, too: for b, c in zip(average.buffers(), model.buffers()): b.copy_(c), as "
                "torch.optim.swa_utils.AveragedModel does; or update_bn(loader, average) before evaluating",
            ),
            (
                "put-back",
                "load the trained weights into the copy, not the copy's into the trained model: "
                "target.load_state_dict(online.state_dict()); or drop the load from the loop",
            ),
        ),
        raised_by=(
            "loads_itself",
            "loads_overwritten",
            "keys_do_not_fit",
            "optimizer_not_restored",
            "optimizer_remade",
            "average_too_slow",
            "statistics_left_behind",
            "weights_put_back",
            "average_stays",
        ),
        experiments=(
            "does_the_optimizer_do_what_was_meant",
            "does_the_average_follow",
            "how_slow_is_the_average",
            "is_the_average_kept",
        ),
    ),
    Cause(
        "aliasing-or-inplace",
        "two things share memory, or memory was changed under someone",
        "storage pointers and versions; the recorded step against its replay",
        "clone what is kept, and do not write into tensors that backward still needs",
        (
            (
                "stored-data-changed",
                "copy before changing: x = self.x[i].copy() (or .clone()), or x = x + noise in place of x += noise",
            ),
        ),
        raised_by=("loss_not_improving", "stored_data_changed"),
        experiments=(
            "do_two_things_share_memory",
            "are_two_views_one",
            "is_every_row_the_same",
            "do_stored_data_drift",
            "is_the_gradient_right",
        ),
    ),
    Cause(
        "optimizer-config",
        "the optimizer is set up wrongly",
        "the parts of the update and the settings of the groups",
        "start from the defaults (Adam: betas 0.9 and 0.999, eps 1e-8; weight decay at most 0.1, none on norms)",
        (
            ("eps", "set Adam's eps well below the gradients' size, for example 1e-8"),
            ("betas", "use betas (0.9, 0.999), or (0.9, 0.95) for language models"),
            ("momentum", "use momentum 0.9"),
            ("weight-decay", "use a weight decay of at most 1e-2 with AdamW, 5e-4 with SGD"),
        ),
        raised_by=("optimizer_settings", "adam_epsilon"),
        experiments=(
            "does_the_optimizer_do_what_was_meant",
            "how_fast_do_weights_shrink",
            "is_the_loss_the_right_way_up",
        ),
        intervention="eps",
    ),
)

BY_FAMILY = {cause.family: cause for cause in CAUSES}
