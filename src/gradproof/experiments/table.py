"""The one table of all questions that a taped step can be asked: what each can decide, what it costs, what it needs.

Neither torch nor numpy is imported here: `find` loads the experiment when it is wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

# what an answer costs: the tape is read, its forward pass replayed, differentiated, or training goes on from it
READ, REPLAY, DIFFERENTIATE, TRAIN = COSTS = ("read", "replay", "differentiate", "train")

EVERY = 1_000_000  # taped steps: as many as there are

# what a step must have so that a question makes sense, in words for people
NEEDS = {
    "models": "modules of a model",
    "parameters": "parameters with a .grad",
    "optimizers": "an optimizer that steps",
    "whole updates": "an update of whole parameters",
    "updates by hand": "parameters that the script changes itself",
    "two optimizers": "a second optimizer that takes turns",
    "targets": "a loss that compares with targets",
    "values": "a loss that compares numbers with numbers",
    "yes or no": "a loss over yes and no",
    "tokens": "a sequence of tokens with a target for each",
    "attention": "attention over keys",
    "activations": "rectifiers or squashers",
    "half precision": "numbers in half precision",
    "several backwards": "a second backward",
    "maps": "images with maps as their targets",
    "black boxes": "a Function or an operator that cannot be replayed",
    "losses": "losses of the steps before",
    "facts:_evaluated": "a validation that was seen",
    "facts:_fetched": "a second loader that was seen",
    "facts:_orders": "an order of rows that the script keeps",
    "facts:_samplers": "a sampler with weights",
}


@dataclass(frozen=True)
class Question:
    """What is asked of a taped step, by the function `name` of `module`, a file in one of the rooms beside this one.

    Silence is an answer only after `enough` taped steps: some causes show in the second look, or in the fifth.
    """

    name: str
    module: str
    sentence: str
    # of each family what its verdicts say: "family: what what"; "family" for all of it
    decides: tuple[str, ...]
    cost: str
    steps: int = 1  # taped steps that it wants to see; EVERY: all of them
    needs: tuple[str, ...] = ()
    core: bool = False  # without its answer nobody may say that nothing is wrong
    looks: int = 0  # of those that want EVERY step: after how many silence is an answer
    # steps that must show the same, none between them that excludes it, before it is confirmed
    times: int = 1
    again: str = ""  # for what of its ids; for the others one step is enough. Empty: all of them

    @property
    def causes(self) -> tuple[str, ...]:
        """Families, or family/what, as its verdicts say."""
        parts = (decided.partition(": ") for decided in self.decides)
        return tuple(
            f"{family}{what and '/'}{what}" for family, _, words in parts for what in words.split() or [""]
        )

    @property
    def families(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(cause.partition("/")[0] for cause in self.causes))

    @property
    def enough(self) -> int:
        """Of how many taped steps silence is an answer."""
        return self.looks or (1 if self.steps == EVERY else self.steps)

    def times_of(self, id: str) -> int:
        """How many steps must show a cause before it is confirmed."""
        return self.times if not self.again or id.partition("/")[2] in self.again.split() else 1

    def as_data(self) -> dict[str, Any]:
        """As a record keeps it; see record/schema.py."""
        return {
            "name": self.name,
            "sentence": self.sentence,
            "causes": list(self.causes),
            "cost": self.cost,
            "core": self.core,
            "enough": self.enough,
        }


# fmt: off
READS = (
    Question("is_it_in_train_mode", "network.modes",
        "Is all that is trained in train mode, and does dropout keep most of what it is given?",
        ("train-eval-mode-error: eval-left-on keep-probability",),
        READ, EVERY, ("optimizers",), core=True, looks=2, times=2, again="eval-left-on"),
    Question("does_the_optimizer_hold_everything", "steps.owners",
        "Does the optimizer, or an update by hand, change every parameter that gets a gradient?",
        ("param-not-updated: replaced unregistered not-in-optimizer unfrozen plain-tensor left-out "
         "passed-over frozen",),
        READ, EVERY, ("parameters", "optimizers"), core=True, looks=2, times=2,
        again="replaced unregistered not-in-optimizer left-out"),
    Question("do_shapes_meet", "network.shapes",
        "Does every axis mean what it is used for: in the loss, in views, in a softmax, in norms?",
        ("axis-or-shape-error: broadcast-into-the-loss over-the-batch one-row-for-all view-for-transpose "
         "classes-of-different-places softmax-axis softmax-of-one normalised-over-the-batch",),
        READ, core=True),
    Question("are_units_all_the_same", "network.initial",
        "Do the units of each layer differ from each other?",
        ("bad-init: symmetric",),
        READ, 2, ("parameters",), core=True, times=2),
    Question("does_the_average_follow", "steps.averages",
        "Do averages of the weights, and weights that were tied, follow them, and Adam's averages the gradients?",
        ("weights-state-error: impossible-moments average average-thrown-away average-too-slow untied",
         "low-precision-error: state-overflow lost-updates",
         "aliasing-or-inplace: average-of-itself"),
        READ, EVERY, ("parameters",), core=True, looks=3),
    Question("are_rare_classes_drawn_more_often", "data.samplers",
        "Does the sampler draw rare classes more often?",
        ("data-order-or-sampling: rare-classes-drawn-less weights-of-classes",),
        READ, needs=("facts:_samplers",)),
    Question("has_validation_been_trained_on", "data.leaks",
        "Are the samples of the validation kept out of the training, and prepared like those?",
        ("data-order-or-sampling: leaked-validation",
         "input-or-target-scale: validated-otherwise"),
        READ, EVERY, ("facts:_evaluated",)),
)

REPLAYS = (
    Question("does_gradient_reach_what_it_must_not", "gradients.stop_gradients",
        "Are targets, teachers, baselines and what a ratio is taken against kept out of the gradient?",
        ("missing-stop-gradient: teacher target baseline ratio",),
        REPLAY, core=True),
    Question("do_two_things_share_memory", "data.memory",
        "Does everything that is stacked or compared have memory of its own, a reference network, too?",
        ("aliasing-or-inplace: one-buffer target-changed one-array one-view compared-with-itself",),
        REPLAY, 2, core=True, times=2, again="one-view"),
    Question("where_was_it_born", "numbers.nonfinite",
        "Are loss and gradients finite, and where was the first NaN or Inf born?",
        ("forward-nonfinite",
         "backward-nonfinite",
         "low-precision-error",
         "optimizer-config",
         "lr-too-high: diverged"),
        REPLAY, EVERY, core=True),
    Question("do_batches_differ", "data.batches",
        "Do the batches differ, and does each hold a mixture of the data?",
        ("data-order-or-sampling: same-batch batches-repeated few-samples one-class sorted-by-class "
         "not-shuffled imbalance seeded-every-step",
         "data-target-misaligned: pairs-change"),
        REPLAY, EVERY, core=True, looks=5),
    Question("does_the_output_fit_the_loss", "losses.activation",
        "Does the loss get what it wants: scores, probabilities or logarithms?",
        ("loss-activation-mismatch",
         "axis-or-shape-error: softmax-axis"),
        REPLAY, core=True),
    Question("are_numbers_of_a_fitting_size", "data.scale",
        "Are inputs and targets of a size that a network can take, and do inputs vary?",
        ("input-or-target-scale: pixels-to-255 raw-features tiny-features raw-targets yes-or-no-target "
         "hardly-varies moved",),
        REPLAY, core=True),
    Question("do_targets_line_up", "data.alignment",
        "Is each target the next token, neither this one nor the one after?",
        ("data-target-misaligned: shift no-shift double-shift targets-behind",),
        REPLAY, needs=("tokens",), core=True),
    Question("does_it_see_the_future", "network.future",
        "Does a prediction hear every token before it, and none behind it?",
        ("attention-mask-error: sees-the-future sees-only-the-future sees-nothing-before",
         "axis-or-shape-error: softmax-axis view-for-transpose"),
        REPLAY, needs=("tokens",), core=True),
    Question("where_does_attention_look", "network.attention",
        "Does attention look at words, not at padding, along the keys, in the order of the tokens, with a choice?",
        ("attention-mask-error: padding-attended only-padding-attended tiled-in-another-order "
         "all-masked-row",
         "axis-or-shape-error: softmax-axis",
         "exploding-signal: attention-scores"),
        REPLAY, 2, ("attention",), core=True, times=2, again="attention-scores"),
    Question("are_samples_independent", "network.samples",
        "Is each prediction made from its own sample alone, and compared with that sample's target?",
        ("axis-or-shape-error: coupled-samples batch-first softmax-over-the-batch normalised-over-the-batch "
         "view-for-transpose sum-over-the-batch rows-of-another-sample",),
        REPLAY, needs=("targets",), core=True),
    Question("is_a_path_cut", "gradients.cuts",
        "Does gradient come to every parameter that shapes the loss, through derivatives, too?",
        ("detached-graph: cut part-cut between-modules new-tensor sample derivative",),
        REPLAY, 2, ("parameters", "optimizers"), core=True),
    Question("do_micro_batches_add_up", "gradients.accumulation",
        "Do the micro-batches add up to the batch, each once?",
        ("grad-accumulation-error: not-divided overwritten walked-again unequal-shares",),
        REPLAY, needs=("several backwards",), core=True),
    Question("is_the_step_too_long_or_short", "steps.step_length",
        "Is the step of a length that lowers the loss of its own batch?",
        ("lr-too-high",
         "lr-too-low: tiny-steps"),
        REPLAY, needs=("optimizers", "losses", "whole updates"), core=True),
    Question("does_the_optimizer_do_what_was_meant", "steps.meaning",
        "Does decay take less off the weights than the steps put on, and has each layer the rate that was meant?",
        ("optimizer-config: worn-away decay-share shrinks groups-swapped",),
        REPLAY, 3, ("parameters", "optimizers", "whole updates"), core=True, times=3,
        again="decay-share shrinks"),
    Question("is_the_update_the_textbooks", "steps.update_rule",
        "Does an update by hand follow the rule that it means?",
        ("optimizer-config: state-shared state-not-kept no-bias-correction maximize rule",
         "zero-grad-error: before-step"),
        REPLAY, 4, ("updates by hand",)),
    Question("do_units_respond", "network.units",
        "Do all units respond to some of the samples?",
        ("dead-activation: units saturated",),
        REPLAY, 2, ("activations",), core=True, times=2),
    Question("does_normalisation_help", "network.normalisation",
        "Does every normalisation average enough values, with a small ε, and statistics that move?",
        ("normalization-error: running-statistics-never-move running-statistics-lag "
         "running-statistics-of-one-batch tiny-batch one-sample eps over-the-batch one-value unbounded-rescale",),
        REPLAY, core=True),
    Question("do_targets_belong_to_inputs", "data.targets",
        "Do the targets belong to the inputs that they are compared with?",
        ("data-target-misaligned: rows-of-another-batch targets-independent-of-inputs target-in-the-input "
         "fresh-noise views-of-another-sample two-targets",
         "data-target-misaligned"),
        REPLAY, needs=("targets",), core=True),
    Question("do_the_players_disagree", "losses.players",
        "Do generator and discriminator want different things of a fake?",
        ("loss-scale-or-sign: players-agree",),
        REPLAY, EVERY, ("two optimizers", "yes or no"), looks=2),
    Question("are_data_kept_as_they_were", "data.stored",
        "Do stored data, and the rows of a batch, stay as they were?",
        ("aliasing-or-inplace: one-row stored-data-changed",),
        REPLAY, EVERY, looks=6),
    Question("is_one_side_augmented", "data.one_sided",
        "Is what is done to an image done to its map, too?",
        ("data-target-misaligned: one-side-augmented",),
        REPLAY, EVERY, ("maps",), looks=2),
    Question("are_logarithms_where_they_are_wanted", "losses.logarithms",
        "Does the loss get logarithms of rates, variances and volumes where it wants them, and values elsewhere?",
        ("loss-activation-mismatch: positive-as-log rate-as-log-rate raw-rate",
         "loss-scale-or-sign: log-determinant"),
        REPLAY, 2),
    Question("are_terms_weighed_alike", "losses.weighing",
        "Are all terms of the loss averaged alike, over samples and entries, and rare classes not made rarer?",
        ("loss-scale-or-sign: one-term-not-averaged one-term-drowns class-weights",),
        REPLAY, 4, ("targets",)),
    Question("does_the_loss_run_away", "losses.runaway",
        "Is the loss bounded along every output, and along its own learned weights?",
        ("loss-scale-or-sign: weight-runs-away unbounded",),
        REPLAY, needs=("targets",)),
    Question("where_does_it_start", "network.initial",
        "Do weights, scores and loss start where guessing is?",
        ("bad-init: too-large loss-at-start scores-one-sided",),
        REPLAY, needs=("parameters",)),
    Question("are_predictions_stuck", "network.units",
        "Are predictions free to move, or stuck at the limit of a clamp?",
        ("dead-activation: clamped-output",),
        REPLAY, 2, ("values",), times=2),
    Question("do_two_loaders_go_together", "data.loaders",
        "Do two loaders whose batches are paired hand out one order?",
        ("data-target-misaligned: loaders-shuffled-apart",),
        REPLAY, needs=("targets", "facts:_fetched")),
    Question("are_targets_in_another_order", "data.other_order",
        "Are targets in the order of their inputs?",
        ("data-target-misaligned: other-order",),
        REPLAY, needs=("targets", "facts:_orders")),
    Question("which_digits_are_lost", "numbers.lost_digits",
        "Do positions, times, phases and tables keep the digits that they need?",
        ("low-precision-error: whole-numbers phases stored-phases merged-rows stored-in-half",),
        REPLAY),
)

DIFFERENTIATES = (
    Question("is_the_gradient_right", "gradients.gradient",
        "Is every gradient the derivative of the loss?",
        ("wrong-gradient",
         "zero-grad-error: stale before-step",
         "grad-accumulation-error: overwritten",
         "aliasing-or-inplace: saved-activation never-written lost-in-a-copy"),
        DIFFERENTIATE, needs=("parameters",), core=True),
    Question("are_kernels_right", "gradients.black_boxes",
        "Does code that nobody can replay compute what it should, at the calls it was given?",
        ("wrong-gradient: kernel backward",
         "aliasing-or-inplace: never-written"),
        DIFFERENTIATE, needs=("black boxes",)),
    Question("is_the_loss_the_right_way_up", "losses.terms",
        "Do predictions go to their targets, down the gradient, and is exploring rewarded?",
        ("loss-scale-or-sign: sign policy-sign entropy-sign terms-cancel",
         "optimizer-config: maximize"),
        DIFFERENTIATE, needs=("targets",), core=True),
    Question("which_positions_count", "losses.positions",
        "Do words, sequences, classes and measured entries count in the loss, and padding and gaps not?",
        ("loss-mask-error: padding-counts inverted rest-left-out sequences-without-targets class-left-out "
         "missing-entries-count mean-over-all frames-left-out blank-in-targets",),
        DIFFERENTIATE, needs=("targets",), core=True),
    Question("is_it_precision", "numbers.lost_digits",
        "Do gradients and updates survive half precision?",
        ("low-precision-error: lost-updates underflow",),
        DIFFERENTIATE, 2, ("half precision",), core=True),
    Question("where_does_the_signal_go", "network.signal",
        "Does the signal keep its size through depth and time, both ways, and reach the end of a sequence?",
        ("exploding-signal",
         "vanishing-signal: time",
         "vanishing-signal"),
        DIFFERENTIATE, needs=("models",), core=True),
)

TRAINS = (
    Question("can_it_learn_this_batch", "steps.one_batch",
        "Can it learn one batch by heart, and not better at a tenth of the rate?",
        ("lr-too-high: tenth-learns-better",),
        TRAIN, needs=("optimizers", "whole updates")),
    Question("is_a_random_table_frozen", "network.frozen_tables",
        "Is a frozen table, or a frozen last layer, one that somebody has trained?",
        ("param-not-updated: frozen-table frozen-last-layer",),
        TRAIN, needs=("parameters", "losses")),
)
# fmt: on

# all of them, in the order in which they are asked when nothing is suspected: cheap before dear, core first
QUESTIONS: tuple[Question, ...] = (*READS, *REPLAYS, *DIFFERENTIATES, *TRAINS)
BY_NAME = {question.name: question for question in QUESTIONS}


def order_of(suspected: Iterable[str]) -> list[Question]:
    """The questions that can decide what is suspected first, and of those the cheap ones; then the rest, by cost.

    >>> [question.name for question in order_of(["vanishing-signal", "wrong-gradient/backward"])[:2]]
    ['where_does_the_signal_go', 'is_the_gradient_right']
    """
    families = dict.fromkeys(suspect.partition("/")[0] for suspect in suspected)
    place = {family: number for number, family in enumerate(families)}

    def weight(question: Question) -> tuple[bool, int, int]:
        places = [place[family] for family in question.families if family in place]
        # of two that cost the same, the one for what is suspected most comes first
        return not places, COSTS.index(question.cost), min(places, default=0)

    return sorted(QUESTIONS, key=weight)


def find(question: Question) -> Callable[..., Any]:
    """The function that asks: a generator of verdicts on an Evidence."""
    return getattr(import_module(f"gradproof.experiments.{question.module}"), question.name)
