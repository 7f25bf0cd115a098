"""What is shipped for programs and agents: the page for AGENTS.md, and the schemas of what --json writes."""

from __future__ import annotations

from pathlib import Path

from gradproof.errors import UserError

HERE = Path(__file__).resolve().parent
SCHEMAS = HERE.parent / "schemas"
DESCRIPTION = (
    "Find out why a PyTorch training does not train (loss stuck, NaN, wrong gradients, nothing learned): record a run "
    "with gradproof, read its brief, ask its recorded steps questions, and try a patch."
)


def read_page() -> str:
    """At most 60 lines."""
    return (HERE / "agents.md").read_text(encoding="utf-8")


def write_skill(directory: Path) -> Path:
    """The page as a skill: a folder with a SKILL.md, which nothing that is there already is overwritten by."""
    file = directory / "gradproof" / "SKILL.md"
    head = f"---\nname: gradproof\ndescription: {DESCRIPTION}\n---\n\n"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file, "x", encoding="utf-8") as stream:
            stream.write(head + read_page())
    except FileExistsError:
        raise UserError(f"{file} is there already; take it away first") from None
    except OSError as error:
        raise UserError(f"cannot write {file}: {error}; choose another file") from None
    return file


def schema_names() -> list[str]:
    return sorted(file.stem.rpartition("-")[0] for file in SCHEMAS.glob("*.json"))


def read_schema(name: str) -> str:
    if name not in schema_names():
        raise UserError(f"there is no schema {name!r}; there are {', '.join(schema_names())}")
    return (SCHEMAS / f"{name}-1.json").read_text(encoding="utf-8").rstrip("\n")
