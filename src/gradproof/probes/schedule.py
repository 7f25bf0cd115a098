"""Which steps are measured how deeply: by the user's rules, or by what a budget affords.

Depth 0 is bare (loss, learning rate), 1 light (gradient norms), 2 parameters (every statistic of gradients,
weights and updates), 3 optimizer (also Adam's m and v), 4 all (also every module's output and its gradient, and
distributions).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from gradproof.errors import UserError
from gradproof.record.schema import DEPTHS

BARE, LIGHT, PARAMETERS, OPTIMIZER, EVERYTHING = range(5)


@dataclass(frozen=True)
class Moment:
    """Where training stands when a step begins."""

    step: int
    epoch: int = 0
    batch: int = 0
    rank: int = 0
    steps_since_nonfinite: int | None = None


@dataclass(frozen=True)
class Rule:
    """A depth, and the conditions that must all hold for it; None: no condition."""

    depth: int
    every: int | None = None
    steps: frozenset[int] | None = None
    epochs: frozenset[int] | None = None
    batches: frozenset[int] | None = None
    ranks: frozenset[int] | None = None
    from_nonfinite: bool = False

    def applies(self, now: Moment) -> bool:
        return (
            (self.every is None or now.step % self.every == 0)
            and (self.steps is None or now.step in self.steps)
            and (self.epochs is None or now.epoch in self.epochs)
            and (self.batches is None or now.batch in self.batches)
            and (self.ranks is None or now.rank in self.ranks)
            and (not self.from_nonfinite or now.steps_since_nonfinite is not None)
        )


_NUMBERS = r"(\d+(?:\s*-\s*\d+)?(?:\s*(?:,|and)\s*\d+(?:\s*-\s*\d+)?)*)"
_CONDITIONS = (
    ("every", re.compile(r"every (\d+)(?:st|nd|rd|th)? ?steps?|every (step)")),
    ("batches", re.compile(r"(first) batch(?: of)?|batch(?:es)? " + _NUMBERS)),
    ("steps", re.compile(r"steps? " + _NUMBERS)),
    ("epochs", re.compile(r"epochs? " + _NUMBERS)),
    ("ranks", re.compile(r"ranks? " + _NUMBERS)),
    ("from_nonfinite", re.compile(r"from (?:the )?(first )?non-?finite(?: value)?(?: on)?")),
)
_DEPTH = re.compile(r"^(bare|light|parameters|optimizer|all|everything)\b")
_FILLER = re.compile(r"\b(on|of|the|at)\b|[,\s:]+")


def parse_schedule(text: str) -> tuple[Rule, ...]:
    """Rules from a sentence; `;` separates them, and at each step the deepest that applies counts.

    >>> parse_schedule("all first batch of epochs 1-5 and 8, rank 0; parameters every 10th step")[1]
    Rule(depth=2, every=10, steps=None, epochs=None, batches=None, ranks=None, from_nonfinite=False)
    """
    return tuple(_parse_rule(part.strip()) for part in text.lower().split(";") if part.strip())


def _parse_rule(text: str) -> Rule:
    rest, depth = text, EVERYTHING
    if match := _DEPTH.match(rest):
        word = "all" if match[1] == "everything" else match[1]
        depth, rest = DEPTHS.index(word), rest[match.end() :]
    found: dict = {}
    for name, pattern in _CONDITIONS:
        if match := pattern.search(rest):
            rest = rest[: match.start()] + " " + rest[match.end() :]
            found[name] = _meaning(name, [group for group in match.groups() if group])
    if _FILLER.sub("", rest):
        raise UserError(
            f"cannot read {_FILLER.sub(' ', rest).strip()!r} in the schedule {text!r}; write for example "
            "'every 10th step', 'parameters every step', 'steps 0-20,100', "
            "'first batch of epochs 1-5 and 8, rank 0', or 'all from the first non-finite value on'"
        )
    return Rule(depth, **found)


def _meaning(name: str, groups: list[str]) -> bool | int | frozenset[int]:
    if name == "from_nonfinite":
        return True
    if name == "every":
        return 1 if groups[0] == "step" else max(1, int(groups[0]))
    if groups[0] == "first":
        return frozenset({0})
    numbers: set[int] = set()
    for part in re.split(r",|and", groups[0]):
        low, _, high = part.partition("-")
        numbers.update(range(int(low), int(high or low) + 1))
    return frozenset(numbers)


def parse_budget(text: str) -> float:
    """A share of the wall time: "2%" and "0.02" are the same."""
    try:
        share = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise UserError(f"a budget is a share of the wall time such as 2% or 0.02, not {text!r}")
    return share


class Purse:
    """Decides what a step may cost, so that gradproof's share of the wall time stays within the budget.

    Half of the income buys light measurements, half deep ones, so that neither starves the other.
    """

    GRACE = 0.25  # seconds that may be spent before there is income: the first steps tell most
    FIRST = 3  # steps that are measured whole, unless the very first was dear
    DEAR = (
        1.5  # seconds: after a first step of less, the last of them is, too, and tells what such a step takes
    )
    EARLY = 64  # steps that are measured as long as there is something to spend
    ONCE = 0.75  # of what the first step took, at a guess, is done once: kernels are compiled, tables made

    def __init__(self, budget: float, grace: float | None = None) -> None:
        self.budget = budget
        self.grace = self.GRACE if grace is None else grace
        self.spent = 0.0
        self._deep_spent = 0.0
        self._price = [0.0] * len(DEPTHS)  # seconds a step of each depth costs, as last seen
        self.left_out = 0  # steps that were not even measured lightly
        self.bare_until = 0.0  # seconds of the run: nothing can be afforded before, and need not be asked for
        # one of several ranks: what all of them measure at the same step is waited for once, and parts make a whole
        self.keeps_time = False

    def choose(self, step: int, elapsed: float, taken: float = 0.0) -> int:
        """The deepest depth that is affordable for the step that begins now; `taken` is what the first ones took."""
        if step == 0 or (step < self.FIRST and taken < 2 * self.GRACE):
            return EVERYTHING
        if step == self.FIRST - 1 and taken < self.DEAR:
            return EVERYTHING
        half = (self.grace + self.budget * elapsed) / 2
        deep_left = half - self._deep_spent
        light_left = half - (self.spent - self._deep_spent)
        if self._price[EVERYTHING] <= deep_left and self._is_on_the_beat(step, elapsed, deep_left):
            return EVERYTHING
        if self._price[LIGHT] <= light_left:
            return LIGHT
        self.left_out += 1
        if self.budget > 0:
            light = self._price[LIGHT] + self.spent - self._deep_spent
            deep = self._price[EVERYTHING] + self._deep_spent
            self.bare_until = (2 * min(light, deep) - self.grace) / self.budget
        return BARE

    def _is_on_the_beat(self, step: int, elapsed: float, left: float) -> bool:
        """Ranks that afford a deep step now and then take the multiples of a power of two: nobody has to be asked.

        Who has saved more takes those of a smaller one, and all of the others' among them.
        """
        price, income = self._price[EVERYTHING], self.budget * elapsed / 2 / step
        if not self.keeps_time or (step < self.EARLY and left > 2 * price):
            return True
        between = math.ceil(price / max(income, 1e-12))
        saved = int(left / (4 * price + 1e-12)) if price else between
        return step % max(1, 1 << (between - 1).bit_length() >> saved.bit_length()) == 0

    def overdrawn(self, elapsed: float) -> bool:
        """More was spent than the budget allows, grace apart."""
        return self.spent > self.budget * elapsed

    def pay(self, depth: int, seconds: float) -> None:
        """Book what a step has cost."""
        self.spent += seconds
        if depth >= PARAMETERS:
            self._deep_spent += seconds
        if depth > BARE:
            self.note_price(depth, seconds)

    def note_price(self, depth: int, seconds: float) -> None:
        """What a step of this depth costs; by default, the first ones are not charged."""
        if depth > BARE:
            old = self._price[depth]
            self._price[depth] = seconds if old == 0 else 0.7 * old + 0.3 * seconds
