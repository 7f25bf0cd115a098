"""What a planted fault is: a healthy script, a few replacements of its text, and the harm they do."""

from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"

Edits = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Fault:
    """One cause, planted in one script; the script without the edits is its healthy twin.

    where: pieces of a module path or of a source line, any of which names the place; empty if there is none.
    harm: a printed metric, and how far it moves at least from the twin's, with its sign; NaN is harm too.
    also: other families that describe the same mistake as truly.
    """

    id: str  # family/what
    script: str  # a file in scripts/, without .py
    where: tuple[str, ...]
    edits: Edits
    harm: tuple[str, float]
    also: tuple[str, ...] = ()

    @property
    def family(self) -> str:
        return self.id.split("/")[0]

    @property
    def name(self) -> str:
        return f"{self.script}-{self.id.split('/')[1]}"


@dataclass(frozen=True)
class Healthy:
    """A run that looks odd and is well: nothing in it is a problem."""

    name: str
    script: str
    good: tuple[str, float, float]  # a printed metric, and the range it ends in
    edits: Edits = ()


def read_script(script: str) -> str:
    """The source of a healthy script."""
    return (SCRIPTS / f"{script}.py").read_text()


def plant(fault: Fault | Healthy) -> str:
    """The script's source with the edits made."""
    return edited(read_script(fault.script), fault.edits, f"{fault.name}: {fault.script}.py")


def edited(source: str, edits: Edits, whose: str) -> str:
    """A source with the edits made; each old text has to occur exactly once."""
    for old, new in edits:
        if source.count(old) != 1:
            raise ValueError(f"{whose} has {old!r} {source.count(old)} times, not once")
        source = source.replace(old, new)
    return source
