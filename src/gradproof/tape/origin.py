"""Where a Function or an operator of the training's own comes from, and how another process gets it back.

A specimen keeps the file and its digest. Only a file that is still the same is read again. One that was imported is
imported; of a script, which would train if it ran, the statements are run that the class needs, and no others.
"""

from __future__ import annotations

import ast
import hashlib
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

LOOPS = (ast.For, ast.While, ast.AsyncFor)


class Origin(NamedTuple):
    """A name in a file; module is "__main__" for a script."""

    module: str
    name: str
    file: str
    digest: str


def origin_of(thing: Any) -> Origin | None:
    """Of an autograd.Function's class, or of the function that an operator was registered with."""
    module, name = getattr(thing, "__module__", ""), getattr(thing, "__qualname__", "")
    file = getattr(sys.modules.get(module), "__file__", None)
    if not file or not file.endswith(".py") or not name:
        return None
    try:
        return Origin(module, name, str(Path(file).resolve()), _digest(Path(file)))
    except OSError:
        return None


def registration_of(operator: Any) -> Any:
    """The Python function behind an operator of torch.library, or None."""
    from torch._library.custom_ops import OPDEFS

    known = OPDEFS.get(str(getattr(operator, "_name", operator)).removesuffix(".default").replace(".", "::"))
    return getattr(known, "_init_fn", None)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


class CannotImport(Exception):
    """Why something of the training's own cannot be had in this process."""


def bring_back(origin: Origin | None) -> Any:
    """The class or function itself, or CannotImport with the reason."""
    if origin is None:
        raise CannotImport("nobody knows which file it comes from")
    path = Path(origin.file)
    if "<locals>" in origin.name:
        raise CannotImport("it is made inside a function")
    if not path.is_file():
        raise CannotImport(f"{path.name} is not here")
    if _digest(path) != origin.digest:
        raise CannotImport(f"{path.name} has changed since")
    try:
        if origin.module == "__main__":
            module = _part_of_script(path, origin.name.partition(".")[0])
        else:
            module = _imported(origin, path)
        found: Any = module
        for part in origin.name.split("."):
            found = getattr(found, part)
    except CannotImport:
        raise
    except Exception as error:
        said = (str(error).splitlines() or [""])[0][:120]
        raise CannotImport(f"importing {path.name} raises {type(error).__name__}: {said}") from error
    return found


def _imported(origin: Origin, path: Path) -> ModuleType:
    depth = origin.module.count(".") + (path.name == "__init__.py")
    root = str(path.parents[depth])
    if root not in sys.path:
        sys.path.append(root)
    module = import_module(origin.module)
    if Path(getattr(module, "__file__", None) or "").resolve() != path:
        raise CannotImport(f"{origin.module} is another file here")
    return module


def _part_of_script(path: Path, name: str) -> ModuleType:
    """A module made of the statements of a script that a name needs."""
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    tree = ast.parse(path.read_text(encoding="utf-8"))
    chosen = needed_statements(tree, name)
    if any(isinstance(node, LOOPS) for node in chosen):
        raise CannotImport(f"{name} needs a loop of the script")
    module = ModuleType("gradproof_part_of_script")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # torch.library looks a function's module up by its name
    part = ast.Module(chosen, [])
    exec(compile(part, str(path), "exec"), module.__dict__)
    return module


def needed_statements(tree: ast.Module, name: str) -> list[ast.stmt]:
    """The statements at a script's top level that bind a name, what it reads, or set something on it.

    >>> script = "import m\\nlib = m.load('k')\\nlib.f.kind = int\\nx = m.train()\\ndef call(): return lib.f()"
    >>> [ast.unparse(node) for node in needed_statements(ast.parse(script), "call")][:3]
    ['import m', "lib = m.load('k')", 'lib.f.kind = int']
    """
    chosen: set[int] = set()
    wanted = {name}
    while True:
        more = [
            k
            for k, node in enumerate(tree.body)
            if k not in chosen and not _is_main_guard(node) and not wanted.isdisjoint(_bound(node))
        ]
        if not more:
            return [tree.body[k] for k in sorted(chosen)]
        chosen.update(more)
        wanted |= {part.id for k in more for part in ast.walk(tree.body[k]) if isinstance(part, ast.Name)}


def _is_main_guard(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)


def _bound(node: ast.stmt) -> Iterator[str]:
    """Names that a statement binds, or sets attributes of, or calls a method of that registers something."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        yield from ((alias.asname or alias.name).partition(".")[0] for alias in node.names)
    elif isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
        yield node.name
    elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from (part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name))
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        called = node.value.func
        if isinstance(called, ast.Attribute) and called.attr.startswith("register_"):
            yield from (part.id for part in ast.walk(called) if isinstance(part, ast.Name))
    elif isinstance(node, (ast.If, ast.Try, ast.With, *LOOPS)):
        blocks = [getattr(node, field, []) for field in ("body", "orelse", "finalbody")]
        blocks += [handler.body for handler in getattr(node, "handlers", [])]
        yield from (name for block in blocks for inner in block for name in _bound(inner))


def operator_called(name: str) -> Any:
    """`torch.ops.a.b` for "a.b", once the file that registers it was read."""
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part)
    return found
