"""Runs the experiments on taped steps of a training, and writes their verdicts into the run.

An experiment is a generator of verdicts; one that fails says nothing and is noted. The list is at the end.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from gradproof.experiments.accumulation import do_micro_batches_add_up
from gradproof.experiments.activation import does_the_output_fit_the_loss
from gradproof.experiments.alignment import do_targets_line_up
from gradproof.experiments.attention import where_does_attention_look
from gradproof.experiments.averages import how_slow_is_the_average
from gradproof.experiments.batches import do_batches_differ
from gradproof.experiments.cancelled import does_a_ratio_cancel
from gradproof.experiments.class_axis import do_classes_stay_together
from gradproof.experiments.class_weights import do_class_weights_favour_the_rare
from gradproof.experiments.converted import are_converted_parameters_trained
from gradproof.experiments.cuts import is_a_path_cut
from gradproof.experiments.decay import how_fast_do_weights_shrink
from gradproof.experiments.derivatives import do_derivatives_carry_gradient
from gradproof.experiments.draws import is_all_of_the_range_drawn
from gradproof.experiments.drift import do_stored_data_drift
from gradproof.experiments.echo import does_the_beginning_reach_the_end
from gradproof.experiments.empty_rows import does_every_sequence_count
from gradproof.experiments.evidence import Evidence, Verdict
from gradproof.experiments.exploration import is_exploring_rewarded
from gradproof.experiments.fillings import do_missing_entries_count
from gradproof.experiments.frozen_tables import is_a_random_table_frozen
from gradproof.experiments.future import does_it_see_the_future
from gradproof.experiments.gains import gains_by_module
from gradproof.experiments.gradient import is_the_gradient_right
from gradproof.experiments.initial import are_units_all_the_same, is_it_too_large
from gradproof.experiments.leaks import has_validation_been_trained_on
from gradproof.experiments.left_out import is_a_class_left_out
from gradproof.experiments.loaders import do_two_loaders_go_together
from gradproof.experiments.logarithms import are_logarithms_where_they_are_wanted
from gradproof.experiments.lost_average import is_the_average_kept
from gradproof.experiments.meaning import does_the_optimizer_do_what_was_meant
from gradproof.experiments.memory import do_two_things_share_memory, does_the_average_follow
from gradproof.experiments.merged_rows import have_neighbours_become_one
from gradproof.experiments.modes import is_it_in_train_mode, is_too_much_dropped
from gradproof.experiments.nonfinite import where_was_it_born
from gradproof.experiments.normalisation import (
    does_normalisation_help,
    is_it_normalised_over_features,
    is_rescaling_bounded,
)
from gradproof.experiments.one_array import are_arrays_kept_as_they_were
from gradproof.experiments.one_batch import can_it_learn_this_batch
from gradproof.experiments.one_row import is_every_row_the_same
from gradproof.experiments.one_sided import is_one_side_augmented
from gradproof.experiments.one_view import are_two_views_one
from gradproof.experiments.other_order import are_targets_in_another_order
from gradproof.experiments.own_norms import is_ones_own_norm_over_the_batch
from gradproof.experiments.owners import does_the_optimizer_hold_everything
from gradproof.experiments.phases import are_phases_kept
from gradproof.experiments.players import do_the_players_disagree
from gradproof.experiments.position_ids import do_positions_run_along_the_sequence
from gradproof.experiments.positions import is_the_mean_over_what_counts, which_positions_count
from gradproof.experiments.precision import is_it_precision
from gradproof.experiments.rounding import are_whole_numbers_kept
from gradproof.experiments.rows import do_the_rows_meet
from gradproof.experiments.runaway import does_a_weight_of_the_loss_run_away
from gradproof.experiments.samplers import are_rare_classes_drawn_more_often
from gradproof.experiments.samples import are_samples_independent
from gradproof.experiments.saturation import is_attention_healthy
from gradproof.experiments.scale import are_numbers_of_a_fitting_size
from gradproof.experiments.shapes import do_shapes_meet
from gradproof.experiments.signal import where_does_the_signal_go
from gradproof.experiments.single_values import is_one_value_normalised
from gradproof.experiments.start import where_does_the_loss_start
from gradproof.experiments.start_of_scores import where_do_scores_start
from gradproof.experiments.step_length import is_the_step_too_long_or_short
from gradproof.experiments.stop_gradients import does_gradient_reach_what_it_must_not
from gradproof.experiments.tables import are_tables_kept_whole
from gradproof.experiments.targets import do_targets_belong_to_inputs
from gradproof.experiments.terms import are_terms_weighed_alike, is_the_loss_the_right_way_up
from gradproof.experiments.tiles import is_the_mask_tiled_like_the_tokens
from gradproof.experiments.unbounded import does_an_output_run_away
from gradproof.experiments.unfrozen import is_what_was_unfrozen_trained
from gradproof.experiments.units import are_predictions_stuck, do_units_respond
from gradproof.experiments.variety import do_inputs_vary
from gradproof.experiments.views import is_a_view_in_place_of_a_transpose
from gradproof.experiments.walked_again import is_a_loss_walked_again
from gradproof.record.writer import RunWriter
from gradproof.tape.shadow import Shadow

LONGEST = 8.0  # seconds of one examination, but for the experiment that is under way
MOST_GAINS = 64  # steps whose gains are written into a run

Experiment = Callable[[Evidence], Iterator[Verdict]]

# glances look at every taped step and must be quick; experiments run at landmarks and in trouble
GLANCES: tuple[Experiment, ...] = (
    where_was_it_born,
    do_batches_differ,
    do_the_players_disagree,
    is_it_in_train_mode,
    is_every_row_the_same,
    is_one_side_augmented,
    do_stored_data_drift,
    is_all_of_the_range_drawn,
)
EXPERIMENTS: tuple[Experiment, ...] = (
    # what can be read off the tape, before what has to be replayed: of a long step not all fit into one examination
    do_micro_batches_add_up,
    is_a_loss_walked_again,
    are_arrays_kept_as_they_were,
    do_shapes_meet,
    does_a_ratio_cancel,
    does_the_optimizer_hold_everything,
    is_what_was_unfrozen_trained,
    are_converted_parameters_trained,
    do_derivatives_carry_gradient,
    is_the_gradient_right,
    is_the_step_too_long_or_short,
    can_it_learn_this_batch,
    is_a_random_table_frozen,
    does_the_output_fit_the_loss,
    are_logarithms_where_they_are_wanted,
    do_targets_line_up,
    do_targets_belong_to_inputs,
    are_targets_in_another_order,
    do_two_loaders_go_together,
    do_the_rows_meet,
    does_it_see_the_future,
    is_a_view_in_place_of_a_transpose,
    do_classes_stay_together,
    do_positions_run_along_the_sequence,
    are_samples_independent,
    where_does_attention_look,
    is_the_mask_tiled_like_the_tokens,
    which_positions_count,
    does_every_sequence_count,
    is_a_class_left_out,
    is_the_mean_over_what_counts,
    do_missing_entries_count,
    is_the_loss_the_right_way_up,
    are_terms_weighed_alike,
    do_class_weights_favour_the_rare,
    is_exploring_rewarded,
    does_a_weight_of_the_loss_run_away,
    does_an_output_run_away,
    are_numbers_of_a_fitting_size,
    do_inputs_vary,
    where_does_the_loss_start,
    where_do_scores_start,
    is_a_path_cut,
    has_validation_been_trained_on,
    are_rare_classes_drawn_more_often,
    are_units_all_the_same,
    is_it_too_large,
    is_too_much_dropped,
    does_normalisation_help,
    is_rescaling_bounded,
    is_it_normalised_over_features,
    is_ones_own_norm_over_the_batch,
    is_one_value_normalised,
    is_attention_healthy,
    does_the_optimizer_do_what_was_meant,
    how_fast_do_weights_shrink,
    do_units_respond,
    are_predictions_stuck,
    is_it_precision,
    are_whole_numbers_kept,
    are_phases_kept,
    are_tables_kept_whole,
    have_neighbours_become_one,
    where_does_the_signal_go,
    does_the_beginning_reach_the_end,
    does_gradient_reach_what_it_must_not,
    do_two_things_share_memory,
    are_two_views_one,
    does_the_average_follow,
    how_slow_is_the_average,
    is_the_average_kept,
)


MOST_SHADOWS = 12  # taped steps whose gradients are kept parameter by parameter


class Examination:
    """All experiments of one training; `memory` is theirs to keep between steps."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self._writer: RunWriter = session.writer
        self._memory: dict[str, Any] = {"facts": session.facts}
        self._said: dict[tuple[str, str], dict[str, Any]] = {}
        self._failed: set[str] = set()
        self._gains_written = 0
        self._shadows = 0
        self._turn = 0
        self.seconds: dict[str, float] = {}

    def __call__(self, tape: Any, step: int, thorough: bool) -> None:
        evidence = self._evidence(tape, step)
        for experiment in GLANCES:
            self._run(experiment, evidence)
        if thorough:
            self._run_for_a_while(evidence)
        if thorough and self._gains_written < MOST_GAINS:
            self._write_gains(evidence)
        if "shadow" in vars(evidence) and self._shadows < MOST_SHADOWS:  # one of them asked for it
            self._shadows += 1
            self._writer.write_event("shadow", step=step, **describe_shadow(evidence.shadow))

    def _run_for_a_while(self, evidence: Evidence) -> None:
        """The experiments in turn, from where the last examination ended: of a large model not all fit into one."""
        began = time.perf_counter()
        for _ in EXPERIMENTS:
            self._run(EXPERIMENTS[self._turn], evidence)
            self._turn = (self._turn + 1) % len(EXPERIMENTS)
            if time.perf_counter() - began > LONGEST:
                return

    def locate(self, tape: Any, step: int, again: Any = None) -> bool:
        """A step that is bad before its update, or one made again: True once the place of birth is known."""
        evidence = self._evidence(tape, step)
        evidence.before_update, evidence.again = True, again
        self._run(where_was_it_born, evidence)
        return bool(self._memory.get("located"))

    def _evidence(self, tape: Any, step: int) -> Evidence:
        session = self._session
        return Evidence(
            tape=tape,
            step=step,
            models=dict(session.names.roots),
            optimizers=session.parameters.optimizers,
            losses=session.losses,
            directory=None if self._writer.broken else self._writer.path,
            memory=self._memory,
        )

    def _write_gains(self, evidence: Evidence) -> None:
        """The gain of each module, for the history that the diagnosis reads."""
        self._gains_written += 1
        with suppress(Exception):
            modules = gains_by_module(evidence.tape)
            if modules:
                self._writer.write_event("gains", step=evidence.step, modules=modules)

    def _run(self, experiment: Experiment, evidence: Evidence) -> None:
        name = experiment.__name__
        if name in self._failed:
            return
        start = time.perf_counter()
        try:
            for verdict in experiment(evidence):
                self._say(name, evidence.step, verdict)
        except Exception as error:
            self._failed.add(name)
            place = traceback.extract_tb(error.__traceback__)[-1]
            self._writer.write_event(
                "experiment_failed",
                experiment=name,
                step=evidence.step,
                error=f"{type(error).__name__}: {error}",
                place=f"{place.filename.rsplit('/', 1)[-1]}:{place.lineno}",
            )
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def _say(self, experiment: str, step: int, verdict: Verdict) -> None:
        key = (experiment, verdict.family)
        before = self._said.get(key)
        if before is not None and before["verdict"] == "confirmed" and before["lasting"]:
            return
        facts = asdict(verdict)
        if before == facts:
            return
        self._said[key] = facts
        self._writer.write_event("verdict", experiment=experiment, step=step, **facts)


def describe_shadow(found: Shadow) -> dict[str, Any]:
    """The gradients of a step against float64, parameter by parameter, as the run keeps them."""
    return {
        "loss": found.loss,
        "true_loss": found.true_loss,
        "parameters": [
            {
                "name": p.name,
                "verdict": p.verdict,
                "error": p.error,
                "tolerance": p.tolerance,
                "cosine": p.cosine,
                "pattern": p.pattern,
            }
            for p in found.parameters
        ],
        "notes": found.notes,
    }
