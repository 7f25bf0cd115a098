"""The activations of a dumped step beside a reference: which is which, and what was run where they are wrong."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradproof.check.dump import Dump
from gradproof.check.forward import find_change, finite_part, shifted
from gradproof.check.graph import Graph, Operation, ancestors
from gradproof.check.slip import Allowance, Case, describe_slip, name_factor, other_relation
from gradproof.check.training import SHORT, measures, sizes_of
from gradproof.check.truth import Truth
from gradproof.errors import UserError

PRINTED = 5e-6  # relative: a loss that was printed with six digits
CHANGES = 12  # forward slips that are looked for, one after the other


@dataclass(frozen=True)
class TensorLine:
    """One dumped tensor beside the reference's."""

    name: str  # "activations/ln1.0"
    against: str  # what the reference calls it, or the line that makes it
    error: float | None  # |dumped - right| / |right|
    ratio: float | None  # |dumped| / |right|
    cosine: float | None
    verdict: str  # right, wrong, follows, unknown
    pattern: str = ""

    @property
    def cells(self) -> tuple[str, ...]:
        numbers = ["–" if x is None else f"{x:.2g}" for x in (self.error, self.ratio)]
        cosine = "–" if self.cosine is None else f"{self.cosine:+.4f}"
        short = self.pattern if len(self.pattern) <= SHORT else self.pattern.partition(":")[0]
        return self.name, *numbers, cosine, self.verdict, short


def relative_error(hand: Tensor, right: Tensor) -> float | None:
    size = float(right.norm())
    return float((hand - right).norm()) / size if size else None


@dataclass(frozen=True)
class _Match:
    """A dumped activation and the slot of the reference that it is held against."""

    name: str
    dumped: Tensor  # float64, in the slot's shape
    dtype: torch.dtype
    slot: int
    label: str


class Forward:
    """The forward of the dump beside that of the reference, value by value."""

    def __init__(self, dump: Dump, truth: Truth, eps: float) -> None:
        assert truth.graph is not None
        self.dump, self.truth, self.graph, self.eps = dump, truth, truth.graph, eps
        self.allowed = truth.slot_allowances(eps)[1] if truth.backward is not None else {}
        self.samples = next((x.shape[0] for x in dump.batch.values() if x.dim()), 0)
        self.sizes = sizes_of(dump.batch, dump.weights)
        self.matches, self.unmatched = self._matched()

    def allowance(self, slot: int) -> Allowance:
        if slot in self.allowed:
            return self.allowed[slot]
        size = float(finite_part(self.graph.values[slot]).nan_to_num(0.0, 0.0, 0.0).norm())
        entries = max(self.graph.values[slot].numel(), 1)
        return Allowance(1000 * self.eps * size / math.sqrt(entries), 200 * self.eps * size)

    def name_of_slot(self, slot: int) -> str:
        given = {s: n for n, s in (self.truth.activations or {}).items()}
        return given.get(slot) or self.graph.name_value(slot)

    # -- which slot a dumped tensor is

    def _matched(self) -> tuple[list[_Match], list[str]]:
        """By the reference's names, by its variables, by content; a variable's name gives way to content."""
        named = {name: slot for name in self.dump.activations if (slot := self._by_name(name)) is not None}
        variables = self._variables()
        called = {
            name: slot
            for name, x in self.dump.activations.items()
            if name not in named
            and (slot := _by_variable(name, x.numel(), variables, self.graph)) is not None
        }
        sure = {name: s for name, s in called.items() if self._holds(name, s)}
        claimed = {*named.values(), *sure.values()}
        found, unmatched = [], []
        for name, x in self.dump.activations.items():
            slot = named.get(name, sure.get(name))
            if slot is None:
                slot = self._alike(x.double(), claimed if name in called else set())
            slot = called.get(name) if slot is None else slot
            if slot is None:
                unmatched.append(name)
            else:
                label = name if name in named else self.graph.name_value(slot)
                found.append(_Match(name, self.shaped(x.double(), slot), x.dtype, slot, label))
        makers = self.graph.makers
        found.sort(key=lambda m: makers[m.slot].index if m.slot in makers else -1)
        return found, unmatched

    def _by_name(self, name: str) -> int | None:
        given = self.truth.activations or {}
        slot = given.get(name, {plain_name(k): s for k, s in given.items()}.get(plain_name(name)))
        x = self.dump.activations[name]
        if slot is not None and self.graph.values[slot].numel() != x.numel():
            raise UserError(
                f"{self.dump.path}: activations/{name} has the shape {tuple(x.shape)}, the reference's {name} has "
                f"{tuple(self.graph.values[slot].shape)}"
            )
        return slot

    def _holds(self, name: str, slot: int) -> bool:
        return self._near(self.shaped(self.dump.activations[name].double(), slot), slot)

    def shaped(self, x: Tensor, slot: int) -> Tensor:
        """In the slot's shape; where only the order of the axes differs, in the slot's order."""
        own = self.graph.values[slot]
        if x.shape == own.shape or sorted(x.shape) != sorted(own.shape) or x.dim() > 4:
            return x.reshape(own.shape)
        for axes in itertools.permutations(range(x.dim())):
            turned = x.permute(axes)
            if turned.shape == own.shape and self._near(turned, slot):
                return turned
        return x.reshape(own.shape)

    def _variables(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for operation in self.graph.operations:
            for slot in operation.outputs:
                assigned = re.match(r"(\w+) \(", self.graph.name_value(slot))
                if assigned:
                    found.setdefault(assigned[1], []).append(slot)
        return found

    def _near(self, x: Tensor, slot: int) -> bool:
        right = finite_part(self.graph.values[slot])
        return self.allowance(slot).admits(finite_part(x) - right.reshape(x.shape))

    def _alike(self, x: Tensor, claimed: set[int]) -> int | None:
        """The slot that holds these numbers, whatever it is called."""
        size = float(finite_part(x).norm())
        for slot, value in enumerate(self.graph.values):
            other = not value.is_floating_point() or value.numel() != x.numel() or slot in claimed
            if other or slot not in self.graph.makers or not size:
                continue
            alike = abs(float(finite_part(value).norm()) - size) <= self.allowance(slot).norm
            if alike and self._near(self.shaped(x, slot), slot):
                return slot
        return None

    # -- what is wrong with it

    def judged(self) -> tuple[tuple[TensorLine, ...], Graph]:
        """A line for each activation, and the forward as it was run, as far as it could be found out."""
        current, lines, right = self.graph, [], {}
        changes = 0
        for match in self.matches:
            case, now = self.case(match, self.graph), self.case(match, current)
            if case.right:
                right[match.slot] = self.allowance(match.slot)
                lines.append(self._line(match, case, "right", ""))
            elif now.right:
                right[match.slot] = self.allowance(match.slot)
                lines.append(self._line(match, case, "follows", "as it must, after the first wrong one"))
            else:
                words, after = self._buffer(match, now), None
                if changes < CHANGES:
                    changes += 1
                    words, after = self._explained(match, now, current, right, words)
                pattern = words or describe_slip(now) or other_relation(now) or ""
                lines.append(self._line(match, case, "wrong", pattern))
                if after is not None:
                    current = after
                    right[match.slot] = self.allowance(match.slot)
        unknown = "nothing in the reference is like it: give it a name there, return (loss, activations)"
        lines += [
            TensorLine(f"activations/{name}", "", None, None, None, "unknown", unknown)
            for name in self.unmatched
        ]
        return tuple(lines), current

    def case(self, match: _Match, graph: Graph) -> Case:
        right = graph.values[match.slot]
        return Case(
            match.name, finite_part(match.dumped), match.dtype, finite_part(right).reshape(match.dumped.shape),
            self.allowance(match.slot), kind="activation", sizes=self.sizes,
        )  # fmt: skip

    def _line(self, match: _Match, case: Case, verdict: str, pattern: str) -> TensorLine:
        ratio, cosine = measures(case.hand, case.truth)
        error = relative_error(case.hand, case.truth)
        against = match.label if match.label != match.name else ""
        return TensorLine(f"activations/{match.name}", against, error, ratio, cosine, verdict, pattern)

    def _explained(
        self, match: _Match, case: Case, current: Graph, right: Mapping[int, Allowance], words: str | None
    ) -> tuple[str | None, Graph | None]:
        """In words, and the forward with that change; without words, the forward with the dump's numbers in place."""
        backward = self.truth.backward
        if backward is None or not bool(torch.isfinite(case.hand).all()):
            return words, None
        later = [m for m in self.matches if m.slot > match.slot]
        if (later or self.dump.loss is not None) and self._count_right(later, current) == len(later) + 1:
            return words, None  # what came afterwards was computed from the right numbers
        overflow, found = self._overflow(match), None
        if overflow is None and bool((case.hand != 0).any()):
            found = find_change(backward, current, match.slot, case, right, self.samples)
        changed = found[1] if found else shifted(current, match.slot, match.dumped)
        if not changed:
            return words, None
        twin = current.changed(changed)
        gained = self._count_right(later, twin) - self._count_right(later, current)
        went_on = gained >= 0 if found else gained > 0
        return overflow or (found[0] if found else words), twin if went_on else None

    def _count_right(self, matches: Sequence[_Match], graph: Graph) -> int:
        """How many of these agree with that forward, and the loss."""
        return sum(self.case(m, graph).right for m in matches) + self._loss_right(graph)

    def _buffer(self, match: _Match, case: Case) -> str | None:
        """Whether it holds what another activation should: a buffer that was used again."""
        for other, value in self.dump.activations.items():
            same = other != match.name and value.numel() == match.dumped.numel()
            if same and torch.equal(
                value.double().reshape(-1), self.dump.activations[match.name].double().reshape(-1)
            ):
                mine = next((m for m in self.matches if m.name == other), None)
                if mine is not None and not case.allowed.admits(
                    finite_part(self.graph.values[mine.slot]).reshape(case.truth.shape) - case.truth
                ):
                    return f"equals activations/{other}: the buffer was overwritten, or both are one"
        makers = self.graph.makers
        shape = self.graph.values[match.slot].shape
        for slot, value in enumerate(self.graph.values):
            if slot == match.slot or value.shape != shape or not value.is_floating_point():
                continue
            if case.is_(finite_part(value).reshape(case.truth.shape)):
                later = (
                    slot in makers and match.slot in makers and makers[slot].index > makers[match.slot].index
                )
                why = "the buffer was overwritten" if later else "it was never written after that"
                return f"equals what the reference has at {self.name_of_slot(slot)}: {why}"
        return None

    def say_twins(self) -> list[str]:
        """Two dumped tensors that are one value of the reference, where nothing says which of them should be."""
        given = self.truth.activations or {}
        by_slot: dict[int, list[str]] = {}
        for match in self.matches:
            if match.name not in given and self._near(match.dumped, match.slot):
                by_slot.setdefault(match.slot, []).append(f"activations/{match.name}")
        return [
            f"{' and '.join(names)} hold the same numbers, {self.name_of_slot(slot)}: if they should differ, one "
            "buffer was overwritten"
            for slot, names in by_slot.items()
            if len(names) > 1
        ]

    def _overflow(self, match: _Match) -> str | None:
        """Whether float16 cannot hold what this is made from."""
        limit = torch.finfo(torch.float16).max
        for slot in sorted(ancestors(self.graph, [match.slot])) if match.dtype == torch.float16 else ():
            value = self.graph.values[slot]
            largest = (
                float(finite_part(value).abs().max()) if value.is_floating_point() and value.numel() else 0.0
            )
            if limit < largest < math.inf:
                return f"overflow: {self.name_of_slot(slot)} reaches {largest:.3g}, and float16 ends at 65504"
        return None

    # -- the loss

    def _loss_right(self, graph: Graph) -> bool:
        if self.dump.loss is None:
            return True
        right = float(graph.values[self.truth.loss_slot])
        allowed = max(self.allowance(self.truth.loss_slot).largest, PRINTED * abs(right))
        return abs(self.dump.loss - right) <= allowed

    def judged_loss(self, current: Graph) -> tuple[str, str, Graph]:
        """Verdict, pattern, and the forward as it was run."""
        if self.dump.loss is None:
            return "unknown", "", current
        if self._loss_right(self.graph):
            return "right", "", current
        if self._loss_right(current):
            return "follows", "from the first wrong activation", current
        right = float(current.values[self.truth.loss_slot])
        if not math.isfinite(self.dump.loss):
            return "wrong", "it is not finite", current
        times = self.dump.loss / right if right else math.nan
        named = name_factor(times, self.sizes, kind="loss") if math.isfinite(times) and times else ""
        if "=" in named or named.startswith("sign"):
            return "wrong", named, current
        found = self._change_of_loss(current) if current is self.graph else None
        if found is not None:
            return "wrong", found[0], current.changed(found[1])
        return "wrong", f"{abs(times - 1):.2g} off" if math.isfinite(times) else "", current

    def _change_of_loss(self, current: Graph) -> tuple[str, list[Operation]] | None:
        """A plain change that explains the one number, where that is known to enough digits to be no chance."""
        slot, backward = self.truth.loss_slot, self.truth.backward
        right = current.values[slot]
        allowed = max(self.allowance(slot).largest, PRINTED * float(right.abs()))
        if backward is None or self.dump.loss is None or not allowed <= 1e-4 * float(right.abs()):
            return None
        hand = torch.full_like(right, self.dump.loss)
        case = Case("loss", hand, torch.float32, right, Allowance(allowed, allowed), kind="activation")
        seen = {m.slot: self.allowance(m.slot) for m in self.matches if self.case(m, current).right}
        return find_change(backward, current, slot, case, seen, self.samples, only_plain=True)


def _by_variable(name: str, entries: int, variables: Mapping[str, list[int]], graph: Graph) -> int | None:
    """The variable of that name, where there is one of that size; `h2.ln1` and `ln1.2` are the third `ln1`."""
    for key in (name, *reversed(re.findall(r"[A-Za-z_]\w*", name))):
        slots = [s for s in variables.get(key, []) if graph.values[s].numel() == entries]
        numbers = re.findall(r"\d+", name.replace(key, "", 1))
        which = int(numbers[0]) if numbers else 0
        if (len(slots) == 1 or numbers) and which < len(slots):
            return slots[which]
    return None


def plain_name(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", ".", name.lower()).strip(".")
