"""Where do the numbers come from? The assignments that a batch goes through, read backwards in the script's source.

A tape begins at the step; a table that was never standardised was made long before. The source still says where.
"""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from gradproof.instruments.evidence import Evidence
from gradproof.instruments.flow import Flow
from gradproof.tape.operations import Line

MOST = 4  # lines that are named
DEEPEST = 40  # assignments and calls that are followed
Scope = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def say_where_made(
    evidence: Evidence, slot: int, besides: Line | None = None, target: bool = False
) -> list[str]:
    """A line of evidence for what a step was fed with; none where the source does not tell."""
    line = cut_line(evidence.flow, slot) or besides or forward_line(evidence)
    numbers = lines_behind(line, target)
    if line is None or not numbers:
        return []
    file = line.file.rsplit("/", 1)[-1]
    return [f"these numbers are made at {', '.join(f'{file}:{number}' for number in numbers)}"]


def cut_line(flow: Flow, slot: int) -> Line | None:
    """The line that cut a batch out of its data."""
    return next((op.line for op in flow.chain(slot) if op.line is not None), None)


def forward_line(evidence: Evidence) -> Line | None:
    """The line that calls the model, in the file that calls backward."""
    sites = evidence.facts.lines.get("forward", ())
    for call in evidence.tape.top_backwards:
        for site in sites if call.line is not None else ():
            name, _, number = site.rpartition(":")
            if call.line is not None and call.line.file.endswith(name):
                return Line(call.line.file, int(number), call.line.function)
    return None


def lines_behind(line: Line | None, target: bool = False) -> list[int]:
    """The lines at which what a statement feeds to a model (or compares with) was made, the nearest first."""
    source = read(line.file) if line is not None else None
    statement = source.statement_at(line.number) if source is not None and line is not None else None
    start, part = first_expression(statement, target) if statement is not None else (None, None)
    if line is None or source is None or statement is None or start is None:
        return []
    found = source.lines_of(start, At(source.scope_of(statement), statement.lineno, part))
    return [number for number in found if number != line.number][:MOST]


def lines_of_names(line: Line) -> list[int]:
    """A statement, and the lines at which everything that it names was made, the nearest first."""
    source = read(line.file)
    statement = source.statement_at(line.number)
    found = [line.number]
    if statement is not None:
        at = At(source.scope_of(statement), statement.lineno)
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                found += source.lines_of(node, at)[:MOST]
    return list(dict.fromkeys(found))


def lines_of_argument(line: Line, function: str, name: str) -> list[int]:
    """The lines that made what a call at a line is given under a name, or first."""
    source = read(line.file)
    statement = source.statement_at(line.number)
    calls = (
        [node for node in ast.walk(statement) if isinstance(node, ast.Call)] if statement is not None else []
    )
    for call in (call for call in calls if ast.unparse(call.func).endswith(function)):
        given = [k.value for k in call.keywords if k.arg == name] + call.args
        return source.lines_of(given[0], At(source.scope_of(call), line.number)) if given else []
    return []


def first_expression(statement: ast.stmt, target: bool) -> tuple[ast.expr | None, int | None]:
    """What to follow, and which part of it: of a loop over a loader, inputs are its first value, targets its last."""
    if isinstance(statement, (ast.For, ast.AsyncFor)):
        several = len(statement.target.elts) if isinstance(statement.target, ast.Tuple) else 1
        return statement.iter, several - 1 if target else 0
    if isinstance(statement, ast.Return) and isinstance(statement.value, ast.Tuple):
        return statement.value, len(statement.value.elts) - 1 if target else 0
    if isinstance(statement, (ast.If, ast.While, ast.With, *FUNCTIONS, ast.ClassDef)):
        return None, None
    return (argument_of_loss if target else argument_of_model)(statement), None


def argument_of_model(statement: ast.stmt) -> ast.expr | None:
    """`x[rows]` of `loss = f(model(x[rows]), y)`: the first argument of the innermost call that has one."""
    calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call) and node.args]
    inner = [call for call in calls if not any(c is not call and c in calls for c in ast.walk(call))]
    if inner:
        return inner[0].args[0]
    return getattr(statement, "value", None)


def argument_of_loss(statement: ast.stmt) -> ast.expr | None:
    """`y` of `loss = f(model(x), y)`: the last argument of the outermost call that has two."""
    for node in ast.walk(statement):
        if isinstance(node, ast.Call) and len(node.args) >= 2:
            return node.args[-1]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
            return node.right
    return getattr(statement, "value", None)


@dataclass(frozen=True)
class At:
    """From where an expression is read, and which of several values is meant."""

    scope: Scope
    before: int
    part: int | None = None
    depth: int = 0

    def on(self, **changes: Any) -> At:
        return replace(self, depth=self.depth + 1, **changes)


class Source:
    """One file: its functions, its classes, and who is inside of whom."""

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.parent = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        self.functions = {n.name: n for n in ast.walk(tree) if isinstance(n, FUNCTIONS)}
        self.classes = {n.name: n for n in ast.walk(tree) if isinstance(n, ast.ClassDef)}

    def statement_at(self, number: int) -> ast.stmt | None:
        """The smallest statement that covers a line; of a compound one only its head."""
        best = None
        for node in ast.walk(self.tree):
            if isinstance(node, ast.stmt) and node.lineno <= number <= (node.end_lineno or node.lineno):
                best = node if best is None or node.lineno >= best.lineno else best
        return best

    def scope_of(self, node: ast.AST) -> Scope:
        while node in self.parent:
            node = self.parent[node]
            if isinstance(node, FUNCTIONS):
                return node
        return self.tree

    def lines_of(self, node: ast.expr, at: At) -> list[int]:
        """The lines that made an expression, the nearest first."""
        found: list[int] = []
        self._follow(node, at, found)
        return list(dict.fromkeys(found))

    def _follow(self, node: ast.expr, at: At, found: list[int]) -> None:
        if len(found) >= 2 * MOST or at.depth > DEEPEST:
            return
        match node:
            case ast.Name():
                self._follow_name(node.id, at, found)
            case ast.Attribute(value=ast.Name(id="self")):
                self._follow_attribute(node.attr, at, found)
            case ast.Call():
                self._follow_call(node, at, found)
            case ast.Tuple(elts=[first, *_]):
                inside = at.part is not None and at.part < len(node.elts)
                self._follow(node.elts[at.part or 0] if inside else first, at.on(part=None), found)
            case ast.BinOp():
                constant = isinstance(node.left, (ast.Constant, ast.UnaryOp))
                self._follow(node.right if constant else node.left, at.on(part=None), found)
            case ast.Starred():
                self._follow(node.value, at.on(), found)
            case ast.Attribute() | ast.Subscript() | ast.Await():
                self._follow(node.value, at.on(part=None), found)
            case ast.ListComp() | ast.GeneratorExp():
                self._follow(node.elt, at.on(part=None), found)
            case ast.IfExp():
                self._follow(node.body, at.on(), found)
            case ast.List(elts=[first, *_]) | ast.Set(elts=[first, *_]):
                self._follow(first, at.on(part=None), found)

    def _follow_name(self, name: str, at: At, found: list[int]) -> None:
        made = list(self._assignments(name, at.scope))
        earlier = [entry for entry in made if entry[0] < at.before] or made
        if earlier:
            line, value, position = max(earlier, key=lambda entry: entry[0])
            if not _only_wraps(value):
                found.append(line)
            self._follow(value, at.on(before=line, part=at.part if position is None else position), found)
            return
        if not isinstance(at.scope, FUNCTIONS):
            return
        names = [arg.arg for arg in at.scope.args.args]
        for call in self._calls(at.scope) if name in names else ():
            place = names.index(name) - (names[0] == "self")
            given = {k.arg: k.value for k in call.keywords}.get(name)
            if given is None and 0 <= place < len(call.args):
                given = call.args[place]
            if given is not None:
                self._follow(given, at.on(scope=self.scope_of(call), before=call.lineno), found)
                return
        # from around the function, as it was when the function was last called there
        if name not in names:
            outer = self.scope_of(at.scope)
            called = [call.lineno for call in self._calls(at.scope) if self.scope_of(call) is outer]
            self._follow_name(name, at.on(scope=outer, before=max(called, default=10**9)), found)

    def _assignments(self, name: str, scope: Scope) -> Iterator[tuple[int, ast.expr, int | None]]:
        """Every (line, value, which part of it) that gives a name its value in a scope."""
        for node in (node for node in ast.walk(scope) if self.scope_of(node) is scope):
            targets: list[ast.expr] = []
            if isinstance(node, ast.Assign):
                targets, value = node.targets, node.value
            elif isinstance(node, (ast.AugAssign, ast.AnnAssign)) and node.value is not None:
                targets, value = [node.target], node.value
            elif isinstance(node, (ast.For, ast.comprehension)):
                targets, value = [node.target], node.iter
            for target, place in _each(targets):
                if isinstance(target, ast.Name) and target.id == name:
                    yield getattr(node, "lineno", target.lineno), value, place

    def _follow_attribute(self, name: str, at: At, found: list[int]) -> None:
        """`self.images`: where the class last sets it; from there on, where it was set before."""
        owner = self.parent.get(at.scope)
        nodes = ast.walk(owner) if isinstance(owner, ast.ClassDef) else ()
        made = [
            (node.lineno, node, at.part if place is None else place)
            for node in nodes
            if isinstance(node, ast.Assign)
            for target, place in _each(node.targets)
            if isinstance(target, ast.Attribute) and target.attr == name
        ]
        here = [entry for entry in made if self.scope_of(entry[1]) is not at.scope or entry[0] < at.before]
        if here:
            line, statement, which = max(here, key=lambda entry: entry[0])
            found.append(line)
            self._follow(
                statement.value, at.on(scope=self.scope_of(statement), before=line, part=which), found
            )

    def _follow_call(self, node: ast.Call, at: At, found: list[int]) -> None:
        name = _name_of(node)
        own = isinstance(node.func, ast.Name) or _is_self(node.func)
        inside = self.functions.get(name) if own else None
        if name in self.classes:  # a Dataset of the script's own: what it hands out
            methods = [n for n in self.classes[name].body if isinstance(n, FUNCTIONS)]
            inside = next((m for m in methods if m.name in ("__getitem__", "__iter__")), None)
        results = (n for n in ast.walk(inside) if isinstance(n, (ast.Return, ast.Yield))) if inside else ()
        result = next((n for n in results if n.value is not None), None)
        if inside is not None and result is not None and result.value is not None:
            found.append(result.lineno)
            self._follow(result.value, at.on(scope=inside, before=result.lineno), found)
        elif inside is not None:
            return
        elif isinstance(node.func, ast.Attribute) and not _is_library(node.func):
            self._follow(node.func.value, at.on(), found)
        elif node.args:
            self._follow(node.args[0], at.on(), found)

    def _calls(self, function: Scope) -> Iterator[ast.Call]:
        calls = (node for node in ast.walk(self.tree) if isinstance(node, ast.Call))
        yield from (call for call in calls if _name_of(call) == getattr(function, "name", None))


def _each(targets: list[ast.expr]) -> Iterator[tuple[ast.expr, int | None]]:
    """What an assignment sets: a target, or each of several, with its place among them."""
    for target in targets:
        several = target.elts if isinstance(target, ast.Tuple) else []
        yield from ((part, place) for place, part in enumerate(several)) if several else ((target, None),)


def _name_of(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")


def _only_wraps(value: ast.expr) -> bool:
    """`DataLoader(train)`, `make_table()`: what it hands on is made elsewhere."""
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Name)


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def _is_library(node: ast.Attribute) -> bool:
    """`torch.stack`, `np.array`, `F.pad`: the numbers are in the arguments, not in front of the dot."""
    base: ast.expr = node
    while isinstance(base, ast.Attribute):
        base = base.value
    return isinstance(base, ast.Name) and base.id in ("torch", "np", "numpy", "F", "nn", "data", "transforms")


@functools.lru_cache(maxsize=8)
def read(file: str) -> Source:
    """A file of Python; one that is none, or is not there, is empty."""
    try:
        return Source(ast.parse("".join(linecache.getlines(file))))
    except (SyntaxError, ValueError, RecursionError):
        return Source(ast.parse(""))
