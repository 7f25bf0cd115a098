"""Do the targets belong to the inputs? What a batch says before any training."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

IGNORED = -100  # a target that does not count in the loss, as in torch's cross-entropy


@dataclass(frozen=True)
class Alignment:
    """Of one batch: how often a target is the next input, and what else could be wrong; str() is a table."""

    inputs: tuple[int, ...]
    targets: tuple[int, ...]
    matching: int
    compared: int
    shift: int | None  # by how many places the targets are the inputs later; None where no small shift fits
    out_of_range: int
    vocabulary: int
    padding: float
    masked: float
    duplicate_rows: int

    @property
    def ok(self) -> bool:
        return self.matching == self.compared and self.out_of_range == 0

    def __str__(self) -> str:
        pairs = zip(self.inputs[1:], self.targets, strict=False)
        marks = ["masked" if t == IGNORED else "OK" if i == t else "MISMATCH" for i, t in pairs]
        rows = [("inputs", self.inputs), ("targets", self.targets), ("", marks)]
        lines = ["".join([f"{name:9s}", *(f"{v!s:>9s}" for v in values)]) for name, values in rows]
        share = f"{self.matching} of {self.compared} targets are the next input"
        if self.matching < self.compared:
            fits = "no shift fits" if self.shift is None else f"they are the inputs {self.shift} later"
            share += f" (MISMATCH: {fits})"
        lines.append(f"{share}; {self.out_of_range} ids outside 0…{self.vocabulary - 1}")
        lines.append(
            f"padding {self.padding:.1%}, masked {self.masked:.1%}, {self.duplicate_rows} rows occur twice"
        )
        return "\n".join(lines)


def compare_alignment(
    inputs: Tensor, targets: Tensor, vocabulary: int, *, padding: int | None = None, shown: int = 8
) -> Alignment:
    """Holds (B, T) targets against the inputs one place later."""
    counted = targets != IGNORED
    both = counted[:, :-1]
    matching = int(((targets[:, :-1] == inputs[:, 1:]) & both).sum())
    bad = ((inputs < 0) | (inputs >= vocabulary)).sum() + (
        counted & ((targets < 0) | (targets >= vocabulary))
    ).sum()
    return Alignment(
        inputs=tuple(inputs[0, :shown].tolist()),
        targets=tuple(targets[0, :shown].tolist()),
        matching=matching,
        compared=int(both.sum()),
        shift=find_shift(inputs, targets),
        out_of_range=int(bad),
        vocabulary=vocabulary,
        padding=0.0 if padding is None else float((inputs == padding).double().mean()),
        masked=float((~counted).double().mean()),
        duplicate_rows=count_duplicates(inputs),
    )


def find_shift(inputs: Tensor, targets: Tensor, furthest: int = 4) -> int | None:
    """The shift at which every counted target is the input so many places later; a language model has 1."""
    for shift in sorted(range(-furthest, furthest + 1), key=lambda s: (s != 1, abs(s))):
        T = inputs.shape[1] - abs(shift)
        if T < 1:
            continue
        later = inputs[:, shift:] if shift >= 0 else inputs[:, :T]
        those = targets[:, :T] if shift >= 0 else targets[:, -shift:]
        if bool(((later == those) | (those == IGNORED)).all()):
            return shift
    return None


def count_duplicates(rows: Iterable[Tensor]) -> int:
    """How many rows repeat an earlier one."""
    keys = [tuple(row.tolist()) for row in rows]
    return len(keys) - len(set(keys))
