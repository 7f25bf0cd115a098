"""The one table of what can be asked of a run: a name, a sentence, what it costs and what it needs. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

READ, REPLAY, DIFFERENTIATE, TRAIN = "read", "replay", "differentiate", "train"


@dataclass(frozen=True)
class Kind:
    """Answered by the function `answer` of ask/`module`.py."""

    name: str
    module: str
    sentence: str
    cost: str
    of: str = ""  # what --of may name; empty: nothing
    needs: str = "specimen"  # specimen, two steps, run or two runs


KINDS = (
    Kind(
        "gradient",
        "gradient",
        "Is every gradient the derivative of the loss, against float64?",
        DIFFERENTIATE,
        "a parameter or a module",
    ),
    Kind("hears", "hears", "Who hears whom: which predictions change with which sample?", REPLAY, "an input"),
    Kind(
        "origin",
        "origin",
        "Where does a number come from: through which lines, from which sample?",
        REPLAY,
        "a tensor or a line",
    ),
    Kind(
        "weighs",
        "weighs",
        "What weighs how much: terms of the loss, samples, parameters?",
        DIFFERENTIATE,
        "a prediction",
    ),
    Kind(
        "update", "update", "Is the update what the optimizer's rule says?", REPLAY, "a parameter or a module"
    ),
    Kind("what-if", "what_if", "What if a setting were another: two trainings from this step?", TRAIN),
    Kind("digits", "digits", "Which digits are lost, against float64?", REPLAY, "a module or a line"),
    Kind("fed", "fed", "What was the model fed?", READ),
    Kind(
        "tensor",
        "tensor",
        "Show a tensor: statistics, histogram, a part, the largest entries with their samples",
        REPLAY,
        "a parameter, NAME.grad, a module, input, target, prediction, loss or FILE:LINE",
    ),
    Kind("line", "line", "What ran at a line, with shapes and values?", REPLAY, "FILE:LINE"),
    Kind(
        "course",
        "course",
        "What left its course, and when: loss, rates, every statistic of every tensor?",
        READ,
        "a tensor, a module or a column",
        "run",
    ),
    Kind(
        "swap",
        "swap",
        "Is it the data or the weights: two steps, each with the other's weights?",
        REPLAY,
        "",
        "two steps",
    ),
    Kind(
        "changed",
        "changed",
        "What is different about the batches: columns, ranges, what one column says of another?",
        READ,
        "",
        "two steps",
    ),
    Kind("parting", "parting", "Where do two runs part?", READ, "", "two runs"),
)
BY_NAME = {kind.name: kind for kind in KINDS}


def find(kind: Kind) -> Callable[..., Any]:
    return import_module(f"gradproof.ask.{kind.module}").answer
