"""The pace of watching: how deeply each step is measured, by the user's rules, the budget, and what was seen.

After the first non-finite value a few steps are measured whole, unless rules say what is wanted. Under a budget that
was asked for, a step that even its own row would make too dear is passed over.
"""

from __future__ import annotations

import time
from typing import Any

from gradproof.probes.distributed import ranks_a_core
from gradproof.probes.schedule import BARE, EVERYTHING, LIGHT, Moment, Purse, Rule
from gradproof.probes.step import OpenStep

CLOSE_LOOK = 5  # steps measured whole after the first non-finite value
BETWEEN_SAMPLES = 1.0  # seconds between two steps whose distributions are taken
SHARE = 0.02  # of the wall time, where no budget was asked for


class Pace:
    """Opens each step at its depth, and keeps the account of what watching costs."""

    def __init__(self, rules: tuple[Rule, ...], budget: float | None, rank: int, world: int = 1) -> None:
        # of a step's wall time, ranks that share a core have a part each
        self.purse = Purse(SHARE / ranks_a_core(world)) if budget is None else Purse(budget, grace=0.0)
        self.purse.keeps_time = world > 1
        self.began = time.perf_counter()
        self.nonfinite_step: int | None = None  # the first
        self.passed_over = 0  # steps
        self._rules = rules
        self._rank = rank
        self._limited = budget is not None or not rules
        self.strict = budget is not None  # a budget that was asked for is kept, if need be by not looking
        self._paid = 0.0
        self._last_sampled = 0.0

    def elapsed(self) -> float:
        return time.perf_counter() - self.began

    def open_step(self, number: int, epoch: int, batch: int) -> OpenStep:
        """The step that begins now, as deep as it may be."""
        depth = self._choose_depth(number, epoch, batch)
        return OpenStep(depth, sampled=depth >= EVERYTHING and self._is_time_to_sample(number))

    def stays_bare(self, now: float) -> bool:
        """Whether nothing can be afforded for the step that begins, as was known at an earlier one."""
        if now >= self.purse.bare_until or self._rules or self.nonfinite_step is not None:
            return False
        self.purse.left_out += 1
        return True

    def must_pass_over(self, number: int) -> bool:
        return self.strict and number >= Purse.FIRST and self.purse.overdrawn(self.elapsed())

    def looks_closely(self, number: int) -> bool:
        """Whether a non-finite value was seen a few steps ago, and no rules say what is wanted."""
        seen = self.nonfinite_step
        return seen is not None and number - seen < CLOSE_LOOK and not self._rules

    def pay(self, number: int, depth: int, own_seconds: float) -> None:
        """Book what watching has taken in all; by default, what is measured in any case is not charged."""
        seconds = own_seconds - self._paid
        if depth == BARE and number > Purse.FIRST:
            self.purse.spent += seconds  # as `Purse.pay` does
        elif number > Purse.FIRST or self.strict:
            self.purse.pay(depth, seconds)
        else:
            self.purse.note_price(depth, seconds * (1 - Purse.ONCE) if number == 0 else seconds)
        self._paid = own_seconds

    def cost(self, own_seconds: float) -> dict[str, Any]:
        """What watching has cost, and what the budget left out."""
        wall = self.elapsed()
        return {
            "own_seconds": round(own_seconds, 4),
            "wall_seconds": round(wall, 4),
            "share": round(own_seconds / wall, 5) if wall else 0.0,
            "bare_steps": self.purse.left_out,
            "unseen_steps": self.passed_over,
            "budget": self.purse.budget if self._limited else None,
        }

    def _choose_depth(self, number: int, epoch: int, batch: int) -> int:
        if self.nonfinite_step is not None and self.looks_closely(number):
            return EVERYTHING
        if not self._rules:
            return self.purse.choose(number, self.elapsed(), self._paid)
        since = None if self.nonfinite_step is None else number - self.nonfinite_step
        now = Moment(number, epoch, batch, self._rank, since)
        wanted = max((rule.depth for rule in self._rules if rule.applies(now)), default=LIGHT)
        if not self._limited:
            return wanted
        return min(wanted, self.purse.choose(number, self.elapsed(), self._paid))

    def _is_time_to_sample(self, number: int) -> bool:
        now = time.perf_counter()
        if number >= Purse.FIRST and now - self._last_sampled <= BETWEEN_SAMPLES:
            return False
        self._last_sampled = now
        return True
