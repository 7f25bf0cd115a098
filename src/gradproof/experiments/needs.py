"""What a step must have so that a question makes sense: one look for each word of the table, read off tape and facts.

In doubt a look says yes: a question that is asked in vain is silent, one that is not asked has missed something.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from gradproof.experiments.data.one_sided import image_and_map
from gradproof.experiments.network.units import RECTIFIERS, SQUASHERS
from gradproof.experiments.table import NEEDS, Question
from gradproof.instruments.choices import policy_terms
from gradproof.instruments.evidence import Evidence
from gradproof.instruments.flow import SOFTMAXES
from gradproof.instruments.grids import find_tokens
from gradproof.instruments.update import is_by_hand
from gradproof.record.schema import DOES_NOT_APPLY, OUT_OF_REACH
from gradproof.tape.operators import FUSED_ATTENTION, is_collective
from gradproof.tape.shards import PARTS

HALF = (torch.float16, torch.bfloat16)
# of a tensor-parallel step, those that look at values as they pass this rank; derivatives lead through the others
OF_PARTS = {"where_was_it_born", "do_batches_differ", "are_numbers_of_a_fitting_size", "is_it_in_train_mode"}
# of a stage of a pipeline, those that follow a sample from the data to its target, or the step as a whole
OF_ALL_STAGES = {"do_targets_belong_to_inputs", "is_the_step_too_long_or_short", "can_it_learn_this_batch"}
ARTICLES = ("a ", "an ", "the ")


def why_not(question: Question, evidence: Evidence) -> str:
    """Why a question does not apply to a step; empty where it does."""
    if evidence.facts.sharded == PARTS and question.name not in OF_PARTS:
        return f"{OUT_OF_REACH}: it has a part of each layer, and this takes the parts of all"
    if question.name in OF_ALL_STAGES and is_stage(evidence):
        return f"{OUT_OF_REACH}: it has one stage of the model, and this takes the others"
    if evidence.facts.sharded and "whole updates" in question.needs:
        return f"{OUT_OF_REACH}: it changes a part of each parameter, and this takes the whole update"
    lacking = next((need for need in question.needs if not HAS[need](evidence)), None)
    return say_lacking(lacking) if lacking is not None else ""


def is_stage(evidence: Evidence) -> bool:
    """Whether the step hands tensors on to another rank, or is given some."""
    return any(
        is_collective(op.func) and op.name.startswith(("send", "recv")) for op in evidence.tape.operations
    )


def say_lacking(need: str) -> str:
    """
    >>> say_lacking("values")
    'does not apply: the step has no loss that compares numbers with numbers'
    """
    words = NEEDS[need]
    article = next((article for article in ARTICLES if words.startswith(article)), "")
    return f"{DOES_NOT_APPLY}: the step has no {words.removeprefix(article)}"


def has_optimizers(evidence: Evidence) -> bool:
    return bool(evidence.specimen.optimizer_records or evidence.tape.stepped)


def has_targets(evidence: Evidence) -> bool:
    flow = evidence.flow
    found = flow.comparisons or flow.picks or evidence.roles.target_slots or policy_terms(flow)
    return bool(found) or any(op.name == "_ctc_loss" for op in flow.operations)


def has_values(evidence: Evidence) -> bool:
    floats = (evidence.slot(slot).dtype.is_floating_point for slot in evidence.roles.target_slots)
    return compares(evidence, "value") or any(floats)


def compares(evidence: Evidence, kind: str) -> bool:
    return any(comparison.kind == kind for comparison in evidence.flow.comparisons)


def token_slots(evidence: Evidence) -> list[int]:
    """What is looked up in tables, (rows, positions)."""
    return list(find_tokens(evidence.flow, (op for op in evidence.forward if op.grad_enabled)))


def has_tokens(evidence: Evidence) -> bool:
    """Tokens, and classes wanted for as many places, or for some in each row."""
    comparisons = [c for c in (*evidence.flow.comparisons, *evidence.flow.picked) if c.kind == "class"]
    wanted = {math.prod(evidence.slot(c.target).shape) for c in comparisons}
    for slot in token_slots(evidence):
        shape = evidence.slot(slot).shape
        if any(max(shape) < places <= math.prod(shape) for places in wanted):
            return True
    return False


def has_attention(evidence: Evidence) -> bool:
    """A fused attention, or a softmax of something like scores (…, queries, keys)."""
    flow = evidence.flow
    for op in flow.operations:
        if op.name in FUSED_ATTENTION:
            return True
        if op.name in SOFTMAXES and len(evidence.slot(flow.makes(op)[0]).shape) >= 3:
            return True
    return False


def uses(*names: str) -> Callable[[Evidence], bool]:
    return lambda evidence: any(op.name in names for op in evidence.forward)


# for each word of the table whether a step has it
HAS: dict[str, Callable[[Evidence], bool]] = {
    "models": lambda evidence: bool(evidence.specimen.roots or evidence.tape.modules),
    "parameters": lambda evidence: bool(evidence.tape.parameters or evidence.specimen.roots),
    "optimizers": has_optimizers,
    "whole updates": lambda evidence: not evidence.facts.sharded,
    "updates by hand": is_by_hand,
    "two optimizers": lambda evidence: len(evidence.specimen.optimizer_records) > 1,
    "targets": has_targets,
    "values": has_values,
    "yes or no": lambda evidence: compares(evidence, "binary"),
    "tokens": has_tokens,
    "attention": has_attention,
    "activations": uses(*RECTIFIERS, *SQUASHERS),
    "half precision": lambda evidence: any(slot.dtype in HALF for slot in evidence.tape.slots),
    "several backwards": lambda evidence: len(evidence.tape.top_backwards) > 1,
    "maps": lambda evidence: image_and_map(evidence) is not None,
    "black boxes": lambda evidence: any(call.opaque for call in evidence.tape.functions),
    "losses": lambda evidence: bool(evidence.losses),
    "facts:_evaluated": lambda evidence: bool(evidence.facts.evaluated),
    "facts:_fetched": lambda evidence: len(evidence.facts.fetched) > 1,
    "facts:_orders": lambda evidence: bool(evidence.facts.orders),
    "facts:_samplers": lambda evidence: bool(evidence.facts.samplers),
}
