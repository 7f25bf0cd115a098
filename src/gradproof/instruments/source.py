"""Where do the numbers come from? The assignments that a batch goes through, read backwards in the script's source.

A tape begins at the step; a table that was never standardised was made long before. The source still says where.
"""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Iterator

from gradproof.instruments.evidence import Evidence
from gradproof.instruments.flow import Flow
from gradproof.tape.operations import Line

MOST = 4  # lines that are named
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
    maker = flow.maker(slot)
    while maker is not None and maker.line is None:
        maker = flow.maker(maker.reads[0]) if maker.reads else None
    return maker.line if maker is not None else None


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
    statement = read(line.file).statement_at(line.number) if line is not None else None
    if line is None or statement is None:
        return []
    source, found = read(line.file), list[int]()
    start, part = first_expression(statement, target)
    if start is not None:
        source.follow(start, source.scope_of(statement), statement.lineno, part, found)
    return [number for number in dict.fromkeys(found) if number != line.number][:MOST]


def lines_of_names(line: Line) -> list[int]:
    """A statement, and the lines at which everything that it names was made, the nearest first."""
    source = read(line.file)
    statement = source.statement_at(line.number)
    found = [line.number]
    for node in ast.walk(statement) if statement is not None else ():
        if statement is not None and isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            made: list[int] = []
            source.follow(node, source.scope_of(statement), statement.lineno, None, made)
            found += made[:MOST]
    return list(dict.fromkeys(found))


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

    def follow(
        self, node: ast.expr, scope: Scope, before: int, part: int | None, found: list[int], depth: int = 0
    ) -> None:
        """Note the lines that made an expression; `part` is which of several values is meant."""
        if len(found) >= 2 * MOST or depth > 40:
            return
        again = functools.partial(self.follow, scope=scope, before=before, found=found, depth=depth + 1)
        if isinstance(node, ast.Name):
            self._follow_name(node.id, scope, before, part, found, depth)
        elif isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                self._follow_attribute(node.attr, scope, before, part, found, depth)
            else:
                again(node.value, part=None)
        elif isinstance(node, ast.Call):
            self._follow_call(node, scope, before, part, found, depth)
        elif isinstance(node, ast.Tuple):
            if part is not None and part < len(node.elts):
                again(node.elts[part], part=None)
            elif node.elts:
                again(node.elts[0], part=None)
        elif isinstance(node, ast.BinOp):
            constant = isinstance(node.left, (ast.Constant, ast.UnaryOp))
            again(node.right if constant else node.left, part=None)
        elif isinstance(node, (ast.Subscript, ast.Starred, ast.Await)):
            again(node.value, part=part if isinstance(node, ast.Starred) else None)
        elif isinstance(node, (ast.ListComp, ast.GeneratorExp)):
            again(node.elt, part=None)
        elif isinstance(node, ast.IfExp):
            again(node.body, part=part)
        elif isinstance(node, (ast.List, ast.Set)) and node.elts:
            again(node.elts[0], part=None)

    def _follow_name(
        self, name: str, scope: Scope, before: int, part: int | None, found: list[int], depth: int
    ) -> None:
        made = list(self._assignments(name, scope))
        earlier = [entry for entry in made if entry[0] < before] or made
        if earlier:
            line, value, position = max(earlier, key=lambda entry: entry[0])
            if not _only_wraps(value):
                found.append(line)
            self.follow(value, scope, line, position if position is not None else part, found, depth + 1)
            return
        if isinstance(scope, FUNCTIONS):
            names = [arg.arg for arg in scope.args.args]
            for call in self._calls(scope) if name in names else ():
                place = names.index(name) - (names[0] == "self")
                given = {k.arg: k.value for k in call.keywords}.get(name)
                if given is None and 0 <= place < len(call.args):
                    given = call.args[place]
                if given is not None:
                    self.follow(given, self.scope_of(call), call.lineno, part, found, depth + 1)
                    return
            # from around the function, as it was when the function was last called there
            if name not in names:
                outer = self.scope_of(scope)
                called = [call.lineno for call in self._calls(scope) if self.scope_of(call) is outer]
                self._follow_name(name, outer, max(called, default=10**9), part, found, depth + 1)

    def _assignments(self, name: str, scope: Scope) -> Iterator[tuple[int, ast.expr, int | None]]:
        """Every (line, value, which part of it) that gives a name its value in a scope."""
        for node in ast.walk(scope):
            if self.scope_of(node) is not scope:
                continue
            targets: list[ast.expr] = []
            if isinstance(node, ast.Assign):
                targets, value = node.targets, node.value
            elif isinstance(node, (ast.AugAssign, ast.AnnAssign)) and node.value is not None:
                targets, value = [node.target], node.value
            elif isinstance(node, (ast.For, ast.comprehension)):
                targets, value = [node.target], node.iter
            for target in targets:
                line = getattr(node, "lineno", target.lineno)
                if isinstance(target, ast.Name) and target.id == name:
                    yield line, value, None
                elif isinstance(target, ast.Tuple):
                    for place, part in enumerate(target.elts):
                        if isinstance(part, ast.Name) and part.id == name:
                            yield line, value, place

    def _follow_attribute(
        self, name: str, scope: Scope, before: int, part: int | None, found: list[int], depth: int
    ) -> None:
        """`self.images`: where the class last sets it; from there on, where it was set before."""
        owner = self.parent.get(scope)
        made: list[tuple[int, ast.Assign, int | None]] = []
        for node in ast.walk(owner) if isinstance(owner, ast.ClassDef) else ():
            for target in node.targets if isinstance(node, ast.Assign) else ():
                several = isinstance(target, ast.Tuple)
                for place, one in enumerate(target.elts if isinstance(target, ast.Tuple) else [target]):
                    if isinstance(one, ast.Attribute) and one.attr == name and isinstance(node, ast.Assign):
                        made.append((node.lineno, node, place if several else part))
        here = [entry for entry in made if self.scope_of(entry[1]) is not scope or entry[0] < before]
        if here:
            line, statement, which = max(here, key=lambda entry: entry[0])
            found.append(line)
            self.follow(statement.value, self.scope_of(statement), line, which, found, depth + 1)

    def _follow_call(
        self, node: ast.Call, scope: Scope, before: int, part: int | None, found: list[int], depth: int
    ) -> None:
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        own = isinstance(node.func, ast.Name) or _is_self(node.func)
        inside = self.functions.get(name) if own else None
        if name in self.classes:  # a Dataset of the script's own: what it hands out
            methods = [n for n in self.classes[name].body if isinstance(n, FUNCTIONS)]
            inside = next((m for m in methods if m.name in ("__getitem__", "__iter__")), None)
        if inside is not None:
            for result in ast.walk(inside):
                if isinstance(result, (ast.Return, ast.Yield)) and result.value is not None:
                    found.append(result.lineno)
                    self.follow(result.value, inside, result.lineno, part, found, depth + 1)
                    return
        elif isinstance(node.func, ast.Attribute) and not _is_library(node.func):
            self.follow(node.func.value, scope, before, part, found, depth + 1)
        elif node.args:
            self.follow(node.args[0], scope, before, part, found, depth + 1)

    def _calls(self, function: Scope) -> Iterator[ast.Call]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call):
                name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
                if name == getattr(function, "name", None):
                    yield node


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
