"""What is found about a kernel: faults in words, what was tried, and what it refused."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong with a kernel, in words, and the numbers that show it."""

    kind: str  # repeat, memory, layout, size, precision, gradient, mode, claim
    what: str
    evidence: str = ""

    def __str__(self) -> str:
        return f"{self.what}\n      {self.evidence}" if self.evidence else self.what


@dataclass
class KernelCheck:
    """What was tried on a kernel, what it refused, and what was found wrong."""

    name: str
    tried: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def right(self) -> bool:
        return not self.faults

    @property
    def exit_code(self) -> int:
        return 0 if self.right else 1

    def add(self, faults: Iterable[Fault]) -> None:
        """Each fault once: what is wrong in one layout is seen in several tests."""
        for fault in faults:
            if all(fault.what != known.what for known in self.faults):
                self.faults.append(fault)

    def as_json(self) -> str:
        return json.dumps({"verdict": "right" if self.right else "wrong", **asdict(self)}, indent=2)

    def __str__(self) -> str:
        if self.faults:
            lines = [f"{self.name} is wrong: {self.faults[0]}"]
            lines += [f"  also: {fault}" for fault in self.faults[1:6]]
        else:
            lines = [f"{self.name}: nothing wrong was found"]
        lines += [f"  tried: {', '.join(self.tried)}"] if self.tried else []
        lines += [f"  refuses: {text}" for text in dict.fromkeys(self.refused)]
        lines += [f"  note: {note}" for note in dict.fromkeys(self.notes)]
        return "\n".join(lines)


class KernelFault(AssertionError):
    """A kernel that does not do what it should; `check` has all that was found."""

    def __init__(self, check: KernelCheck):
        self.check = check
        super().__init__(str(check))
