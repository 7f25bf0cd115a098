"""Causes in the step: learning rate, schedule, optimizer, precision, ranks, and weights kept from before."""

from gradproof.diagnosis.catalogue.cause import Cause

CAUSES = (
    Cause(
        "lr-too-high",
        "the steps overshoot",
        "the loss along the actual update: it falls for a small part of the step and rises at its end",
        "divide the learning rate by ten, and warm it up over the first hundred steps or so",
        raised_by=("loss_rising", "loss_oscillating", "loss_spike", "huge_updates", "nonfinite"),
        intervention="lr",
        explained_by=(
            "input-or-target-scale",
            "loss-scale-or-sign",
            "grad-accumulation-error",
            "zero-grad-error",
            "exploding-signal",
            "bad-init",
        ),
    ),
    Cause(
        "lr-too-low",
        "the steps are far too short",
        "the loss along the actual update: still falling far beyond its end",
        "raise the learning rate by ten until the loss falls visibly within the first hundred steps",
        raised_by=("loss_hardly_falling", "loss_not_improving", "tiny_updates"),
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
            (
                "dies-early",
                "call scheduler.step() once an epoch, or give the schedule its lengths in steps; let it multiply the "
                "base rate, not what is left of it",
            ),
            ("warmup-never-ends", "let the warmup end within the first tenth of the run"),
            (
                "multiplied",
                "LambdaLR multiplies the optimizer's own learning rate: let its function return a factor, not the rate",
            ),
            (
                "below-zero",
                "let the schedule end where training does, and stop at zero: max(0, ...) of what it computes",
            ),
            ("cycles-too-fast", "give the period in the unit in which scheduler.step() is called"),
        ),
        raised_by=(
            "lr_zero",
            "dies-early",
            "warmup-never-ends",
            "multiplied",
            "below-base",
            "below-zero",
            "cycles-too-fast",
        ),
        intervention="constant_lr",
        shortens_steps=("dies-early", "warmup-never-ends", "multiplied"),
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
            (
                "worn-away",
                "use AdamW, which keeps the decay apart from the gradient, or a decay of 1e-5 or less, and none on "
                "embeddings",
            ),
            (
                "shrinks",
                "decay by lr * weight_decay at a step, not by weight_decay alone; 0.01 to 0.1 is usual for AdamW",
            ),
            (
                "state-shared",
                "give each parameter a state of its own, for example [torch.zeros_like(p) for p in parameters]",
            ),
            ("maximize", "subtract: p -= lr * p.grad, or turn the loss round: one of them, not both"),
            ("state-not-kept", "make the averages once, before the loop, and keep them from step to step"),
            ("no-bias-correction", "divide m by 1 - β1 ** t and v by 1 - β2 ** t, t counted from 1"),
        ),
        raised_by=("optimizer_settings", "adam_epsilon"),
        intervention="eps",
        shortens_steps=("eps",),
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
            (
                "lost-updates",
                "keep the weights (and their averages) in float32, and use autocast for the computing",
            ),
            (
                "state-overflow",
                "keep what the optimizer remembers in the range of its format: store the average itself, not one "
                "divided by a power that shrinks, or rescale it now and then; weights whose state is infinite move no "
                "more",
            ),
            ("underflow", "use torch.amp.GradScaler, or bfloat16 in place of float16"),
            (
                "whole-numbers",
                "keep positions, times and ids in float32 or int64, and cast what is computed from them",
            ),
            (
                "phases",
                "compute the phases in float32: with torch.autocast(device, enabled=False) around them, .float() on "
                "what they are made of; cast their sines",
            ),
            (
                "stored-phases",
                "keep times and coordinates in float32 (or float64) from the start; cast what is made of them",
            ),
            (
                "merged-rows",
                "count positions, times and ids in float32 or int64 (torch.arange(n, dtype=torch.float32)), compute "
                "their phases in float32 too, and cast the result",
            ),
            (
                "stored-in-half",
                "keep the column in float32 or float64 from the start: casting it back brings no digits back",
            ),
        ),
        raised_by=("nonfinite", "steps_skipped", "never_changed"),
        intervention="float32",
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
            (
                "set-epoch",
                "call sampler.set_epoch(epoch) at the begin of every epoch: it draws its order by that",
            ),
            (
                "parameters-outside",
                "put every parameter that is trained into the module that is wrapped, or average its gradient as well",
            ),
            ("learning-rates", "let every rank make the same schedule, from the same numbers"),
            (
                "weights-drift",
                "load the same checkpoint, with its optimizer state, on every rank; change weights on all or none",
            ),
            (
                "bit-flip",
                "look for a line that writes on one rank only; if there is none, test that machine's memory, and go on "
                "from the last checkpoint before",
            ),
            (
                "summed-gradients",
                "divide by the number of ranks after all_reduce, or use ReduceOp.AVG; else lower the learning rate",
            ),
            ("averaged-twice", "leave out one division: DistributedDataParallel has averaged already"),
            (
                "different-lengths",
                "sum the losses, and divide by the number of tokens of all ranks; or fill batches to the same length",
            ),
            ("mode", "call model.train() on every rank"),
            ("dtype", "make the model in the same precision on every rank"),
            ("code", "start every rank from the same files and the same environment"),
            (
                "buffers",
                "leave broadcast_buffers on, or send rank 0's buffers to all before evaluating",
            ),
            (
                "own-clip",
                "clip by one norm on all ranks, and every gradient by it: of sharded parameters clip_grad_norm_ adds "
                "up the shards' norms",
            ),
            (
                "lost-on-the-way",
                "test the links between the devices (NCCL_P2P_DISABLE=1 goes around them), and average every gradient "
                "at every step; go on from the last checkpoint before",
            ),
            (
                "sharded-late",
                "call fully_shard first, and make the optimizer from the parameters that it leaves",
            ),
            (
                "same-random-numbers",
                "seed the ranks apart once the model is made: torch.manual_seed(seed + rank)",
            ),
            ("straggler", "see what that rank does before backward: its data, its disk, its machine"),
            ("without-no-sync", "run all but the last backward of a step under model.no_sync()"),
            (
                "lost-rank",
                "see why that process ended: its own output, the kernel's log (out of memory), its machine",
            ),
            (
                "hang",
                "let every rank take the same branches, or leave together: each collective waits for all of them",
            ),
        ),
        raised_by=(
            *(
                "ranks_differ",
                "ranks_see_the_same",
                "sampler_stays",
                "ranks_fed_unevenly",
                "ranks_set_up_differently",
            ),
            *(
                "ranks_add_up",
                "ranks_clip_apart",
                "rank_straggles",
                "reduces_each_part",
                "sharded_late",
                "ranks_draw_alike",
                "rank_lost",
                "ranks_hang",
            ),
        ),
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
            (
                "impossible-moments",
                "go on from a checkpoint before this step, or clear the optimizer's state; then find who wrote it: "
                "compiled code in this process, the machine's memory, or how the state was saved and put together",
            ),
            (
                "one-tensor-spoilt",
                "go on from a checkpoint before this step (`gradproof checkpoint RUN --step N` writes one); then find "
                "who wrote into it: code that changes or loads this tensor, compiled code, the machine's memory",
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
            ("average", "average = decay * average + (1 - decay) * weights"),
        ),
        raised_by=(
            "one_tensor_spoilt",
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
            (
                "compared-with-itself",
                "make the reference a copy before training begins: "
                "reference = copy.deepcopy(model).requires_grad_(False)",
            ),
            (
                "average-of-itself",
                "copy the weights when the average is made: v.detach().clone(), or copy.deepcopy(model)",
            ),
            (
                "lost-in-a-copy",
                "test the memory and the links between the devices (NCCL_P2P_DISABLE=1 goes around them), and look "
                "for code that writes to this memory past PyTorch",
            ),
            ("one-buffer", "keep a clone() of what changes later"),
            ("one-array", "keep a copy: torch.from_numpy(array.copy()), torch.tensor(array) or .clone()"),
            (
                "one-view",
                "let the augmentation make a new tensor: x = x + noise in place of x += noise, or x = x.clone() "
                "first",
            ),
            ("one-row", "keep a copy of what changes later: append(state.copy()), or .clone() of a tensor"),
        ),
        raised_by=("loss_not_improving", "stored_data_changed"),
        of_structure=True,
    ),
)
