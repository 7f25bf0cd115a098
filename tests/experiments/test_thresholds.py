"""No threshold of an experiment without a sentence of why: whoever doubts the number must know what it rests on."""

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "gradproof"
PLAIN = (0.0, 0.5, 1.0, 2.0)  # nothing, half, all and twice explain themselves
GUARD = 1e-9  # up to here, what is added or given to max() or clamp() keeps a zero out of a division
FOR_TOOLS = ("# noqa", "# fmt:", "# type:")  # comments that give no reason


def without_why(source: str) -> list[str]:
    """'line 3: SIGMAS = 5.0' of the module's constants, 'line 9: share > 0.9' of comparisons."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = [t for t in tokens if t.type == tokenize.COMMENT and not t.string.startswith(FOR_TOOLS)]
    said = {t.start[0] for t in comments}
    said_above = {t.start[0] + 1 for t in comments if t.line.lstrip().startswith("#")}
    tree = ast.parse(source)
    found = {}
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value and any(numbers(node.value)):
            lines = range(node.lineno, node.end_lineno + 1)
            if node.lineno not in said_above and said.isdisjoint(lines):
                found[node.lineno, 0] = node
    guards = {number for node in ast.walk(tree) for number in guards_in(node)}
    for node in ast.walk(tree):
        for number in numbers(node) if isinstance(node, ast.Compare) else ():
            threshold = isinstance(number.value, float) and number.value not in PLAIN and number not in guards
            if threshold and number.lineno not in said:
                found[number.lineno, number.col_offset] = node  # of nested comparisons, the innermost
    return [f"line {line}: {ast.unparse(node)}" for (line, _), node in sorted(found.items())]


def numbers(node: ast.AST) -> Iterator[ast.Constant]:
    """All in an expression, but for what a word names: a table by words, a row or a call that begins with one."""
    match node:
        case ast.Constant(value=bool()):
            return
        case ast.Constant(value=int() | float()):
            yield node
        case (
            ast.Dict(keys=[ast.Constant(value=str()), *_])
            | ast.Tuple(elts=[ast.Constant(value=str()), *_])
            | ast.Call(args=[ast.Constant(value=str()), *_])
        ):
            return
    for child in ast.iter_child_nodes(node):
        yield from numbers(child)


def guards_in(node: ast.AST) -> Iterator[ast.AST]:
    """Tiny numbers that are added to something, or given to a function."""
    match node:
        case ast.Call() | ast.keyword() | ast.BinOp(op=ast.Add()):
            given = (child for child in ast.iter_child_nodes(node) if isinstance(child, ast.Constant))
            yield from (child for child in given if isinstance(child.value, float) and child.value <= GUARD)


ROOMS = [path for room in ("experiments", "instruments") for path in sorted((SOURCE / room).rglob("*.py"))]


@pytest.mark.parametrize("path", ROOMS, ids=lambda path: str(path.relative_to(SOURCE)))
def test_every_threshold_says_why(path):
    assert without_why(path.read_text()) == []


@pytest.mark.parametrize(
    ("planted", "healthy"),
    [
        ("FAR = 8.0", "FAR = 8.0  # e^8: three thousand times"),
        ("FEW = 4  # of fewer, chance\nFAR = 8.0", "FEW = 4  # of fewer, chance\n# e^8\nFAR = 8.0"),
        ("MOST: int = 64  # noqa", "MOST: int = 64  # each is a replay"),
        ("BOTH = {1: 0.1}", "BOTH = {'tanh': 0.1}"),
        ("ROWS = ((3, 'a'),)", "ROWS = (('a', 3), Question('b', steps=3))"),
        ("def f(x):\n    return x.mean() > 0.9", "def f(x):\n    return x.mean() > 0.9  # but for a few"),
        ("def f(x):\n    return (x < 0.02).mean() > 0.5", "def f(x):\n    return (x < NEAR).mean() > 0.5"),
        (
            "def f(x, y):\n    return x < 1e-10",
            "def f(x, y):\n    return x > y + 1e-10 or x / max(y, 1e-10) > 2.0",
        ),
    ],
)
def test_a_bare_threshold_is_found(planted, healthy):
    assert len(without_why(planted)) == 1 and without_why(healthy) == []


def test_the_place_is_named():
    assert without_why("def f(x):\n    return (x < 0.02).mean() > 0.9") == [
        "line 2: x < 0.02",
        "line 2: (x < 0.02).mean() > 0.9",
    ]
