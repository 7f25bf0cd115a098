"""Causes in how gradients come about: non-finite values, backwards, accumulation, clipping, cut paths."""

from gradproof.diagnosis.catalogue.cause import Cause

CAUSES = (
    Cause(
        "forward-nonfinite",
        "a NaN or Inf is born in the forward pass",
        "the first bad operation on the tape",
        "keep the operand of the named operation inside its domain: clamp what goes into log, sqrt and division "
        "(for example x.clamp_min(1e-6)), and use log_softmax or logsumexp in place of exp, sum and log",
        raised_by=("nonfinite", "steps_skipped", "one_rank_nonfinite"),
        keeps_gradient_out=True,
    ),
    Cause(
        "backward-nonfinite",
        "the forward pass is finite, a NaN or Inf is born in backward",
        "the first bad node on the tape",
        "the derivative is infinite where the value is not: add a small constant inside the root or norm "
        "(torch.sqrt(x + 1e-12)), and make both branches of torch.where safe before choosing",
        raised_by=("nonfinite",),
        keeps_gradient_out=True,
    ),
    Cause(
        "wrong-gradient",
        "a backward is not the derivative of its forward",
        "the float64 shadow of a step, then finite differences of the culprit",
        "correct the named backward and prove it: gradproof.check_gradient(function, *inputs)",
        (
            (
                "never-written",
                "call the backward of the named layer, and let it add to the memory that the update reads; a dump of "
                "the step (gp_dump, `gradproof check-dump`) then says whether it is right",
            ),
        ),
        raised_by=("loss_not_improving", "no_layer_gradient"),
        intervention="autograd",
        of_structure=True,
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
        intervention="zero_grad",
    ),
    Cause(
        "grad-accumulation-error",
        "the micro-batches do not add up to the batch",
        "the accumulated gradient against that of the whole batch",
        "divide each micro-batch's loss by their number, add (not assign) gradients, and step after the last one",
        (
            ("overwritten", "p.grad = g if p.grad is None else p.grad + g"),
            (
                "walked-again",
                "call backward on the loss of each micro-batch alone, without retain_graph; keep the running sum "
                "with loss.item() or loss.detach()",
            ),
        ),
        raised_by=("uneven_windows", "cleared_between_backwards"),
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
        intervention="clip_before_step",
        shortens_steps=("limit-too-small",),
    ),
    Cause(
        "detached-graph",
        "a path that should carry gradient is cut",
        "the replayed step has a gradient where the run has none",
        "remove the detach, .data, .item(), no_grad, argmax or NumPy round trip between the parameter and the loss",
        (
            ("sample", "draw with rsample() instead of sample()"),
            (
                "new-tensor",
                "call backward on what the loss function returned, not on torch.tensor(loss.item())",
            ),
            ("derivative", "torch.autograd.grad(..., create_graph=True)"),
        ),
        raised_by=("no_gradient", "loss_not_improving"),
        of_structure=True,
        keeps_gradient_out=True,
    ),
    Cause(
        "missing-stop-gradient",
        "gradient flows where it must not",
        "gradient reaches parameters whose update it must not drive",
        "compute targets, teachers and baselines under torch.no_grad(), or detach them",
        (
            (
                "teacher",
                "compute the teacher under torch.no_grad(), and leave its parameters out of the optimizer",
            ),
            ("target", "compute the target under torch.no_grad(), or detach() it"),
            ("baseline", "detach the values where the advantage is computed: returns - values.detach()"),
            (
                "ratio",
                "what the ratio is taken against must be a constant: compute the old log-probabilities under "
                "torch.no_grad() when the data are gathered, or detach() them",
            ),
        ),
        raised_by=("loss_not_improving",),
        of_structure=True,
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
                "left-out",
                "let the update change these parameters, too, or set requires_grad_(False) if that is on purpose",
            ),
            (
                "no-gradient",
                "use these parameters in the forward pass, or freeze them; if they are used, look for a cut graph",
            ),
            (
                "no-change",
                "look at what the update loops over (a count that is still 0, a copy of the weights, another pointer) "
                "and at what it writes to",
            ),
            (
                "steps-stopped",
                "look at what decides whether optimizer.step() is called: a flag that stays set, a count that ends",
            ),
        ),
        raised_by=(
            "not_in_optimizer",
            "no_gradient",
            "never_changed",
            "idle_parameters",
            "never_moves",
            "steps_stopped",
        ),
        intervention="all_parameters",
        of_structure=True,
    ),
)
