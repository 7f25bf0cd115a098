"""The fix of a finding as a change to the script's text, where there is only one way to write it.

Each edit is a function of the script that gives its new text, or None where the script is not as simple as the edit
supposes. Rather none than one that guesses: a branch, a second backward, an unusual name is reason enough.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePosixPath

from gradproof.diagnosis.findings import Diagnosis, Finding
from gradproof.diagnosis.places import lines_of
from gradproof.files import read_file
from gradproof.record.run import Run
from gradproof.record.source import LARGEST_COPY, SCRIPT_COPY


@dataclass(frozen=True)
class Edit:
    """One finding's fix: the script before and after."""

    finding: Finding
    before: str
    after: str

    def diff(self, name: str) -> str:
        """As `git diff` writes it, `name` being the path from the directory that it is applied in."""
        before, after = (text.splitlines(keepends=True) for text in (self.before, self.after))
        return "".join(difflib.unified_diff(before, after, f"a/{name}", f"b/{name}"))


def find_edit(found: Diagnosis, run: Run) -> Edit | None:
    """The first finding that has a certain fix, gravest first."""
    edits = (edit_of(cause, run) for cause in found.causes if cause.level != "note")
    return next((edit for edit in edits if edit is not None), None)


def edit_of(finding: Finding, run: Run) -> Edit | None:
    make = EDITS.get(finding.id)
    script = read_script(run) if make is not None and finding.confidence != "possible" else None
    if make is None or script is None:
        return None
    text = make(script, finding)
    if text is None or not compiles(text):
        return None
    return Edit(finding, script.text, text)


def compiles(text: str) -> bool:
    try:
        compile(text, "fixed", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def read_script(run: Run) -> Script | None:
    """The script as it ran; None where it was not kept, or is no text that could be put back as it was."""
    name = PurePosixPath(str((run.info.get("source") or {}).get("file") or "")).name
    try:
        text = read_file(run.path / SCRIPT_COPY, LARGEST_COPY).decode("utf-8")
        tree = ast.parse(text)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):  # the last two: nested too deep
        return None
    plain = text.isascii() or not any(mark in text for mark in "\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029")
    return (
        Script(name, text, tree, run) if name and plain and "\r" not in text and text[-1:] == "\n" else None
    )


class Script:
    """A script's text and its tree, and where the run saw it do what."""

    def __init__(self, name: str, text: str, tree: ast.Module, run: Run) -> None:
        self.name, self.text, self.tree, self.run = name, text, tree, run
        self.lines = text.splitlines(keepends=True)
        self.parent = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}

    def number(self, place: str | None) -> int | None:
        """The line that a place names, if it is one of this script alone."""
        found = re.findall(rf"(?<![\w/.-]){re.escape(self.name)}:(\d+)", place or "")
        return int(found[0]) if len(set(found)) == 1 else None

    def only(self, what: str) -> ast.stmt | None:
        """The statement that does something, if one alone was seen to do it, and it has its lines for itself."""
        sites = lines_of(self.run, what)
        number = self.number(sites[0]) if len(sites) == 1 else None
        return self.statement(number) if number is not None else None

    def statement(self, number: int) -> ast.stmt | None:
        found = [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Expr) and node.lineno <= number <= (node.end_lineno or node.lineno)
        ]
        return found[0] if len(found) == 1 and self.is_alone(found[0]) else None

    def is_alone(self, node: ast.stmt) -> bool:
        """Nothing but a comment shares its lines."""
        last = (
            self.lines[(node.end_lineno or node.lineno) - 1].encode()[node.end_col_offset :].decode().strip()
        )
        first = self.lines[node.lineno - 1].encode()[: node.col_offset].decode().strip()
        return not first and (not last or last.startswith("#"))

    def block(self, node: ast.stmt) -> list[ast.stmt]:
        """The statements that it stands among."""
        for _, value in ast.iter_fields(self.parent[node]):
            if isinstance(value, list) and node in value:
                return value
        return []

    def segment(self, node: ast.AST) -> str:
        return ast.get_source_segment(self.text, node) or ""

    def indent(self, node: ast.stmt) -> str:
        return self.lines[node.lineno - 1][: node.col_offset]

    def insert(self, text: str, before: ast.stmt) -> str:
        at = before.lineno - 1
        return "".join([*self.lines[:at], f"{self.indent(before)}{text}\n", *self.lines[at:]])

    def move(self, node: ast.stmt, before: ast.stmt) -> str:
        """A statement from below another one to above it."""
        at, begin, end = before.lineno - 1, node.lineno - 1, node.end_lineno or node.lineno
        lines = self.lines
        return "".join([*lines[:at], *lines[begin:end], *lines[at:begin], *lines[end:]])

    def replaced(self, changes: list[tuple[ast.expr, str]]) -> str:
        """Expressions, none inside of another, by other texts."""
        starts = [0]
        for line in self.lines:
            starts.append(starts[-1] + len(line.encode()))
        data = self.text.encode()
        for node, new in sorted(changes, key=lambda change: (-change[0].lineno, -change[0].col_offset)):
            begin = starts[node.lineno - 1] + node.col_offset
            end = starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
            data = data[:begin] + new.encode() + data[end:]
        return data.decode()


def call_of(node: ast.stmt | None, method: str) -> ast.Call | None:
    """The call that a statement consists of, if it is of that name: `optimizer.step()`, `clip_grad_norm_(…)`."""
    call = node.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None
    return call if call is not None and re.fullmatch(method, name_of(call)) else None


def name_of(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def is_path(node: ast.expr) -> bool:
    """`optimizer`, `self.optimizer`."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name)


def stepper(script: Script, step: ast.stmt | None) -> tuple[str, str] | None:
    """Of `optimizer.step()`: ("", "optimizer"); of `scaler.step(optimizer)`: ("scaler", "optimizer")."""
    call = call_of(step, "step")
    if (
        call is None
        or not isinstance(call.func, ast.Attribute)
        or not is_path(call.func.value)
        or call.keywords
    ):
        return None
    owner = script.segment(call.func.value)
    if not call.args:
        return "", owner
    if len(call.args) == 1 and "scaler" in owner.lower() and is_path(call.args[0]):
        return owner, script.segment(call.args[0])
    return None


def in_one_block(script: Script, first: ast.stmt | None, *others: ast.stmt | None) -> bool:
    return first is not None and all(other in script.block(first) for other in others)


# the edits ---------------------------------------------------------------------------------------------------


def clear_before_backward(script: Script, finding: Finding) -> str | None:
    """`optimizer.zero_grad()` in front of the one backward; one that stands between it and the step is moved there."""
    backward, step = script.only("backward"), script.only("step")
    names = stepper(script, step)
    if backward is None or step is None or names is None or not in_one_block(script, backward, step):
        return None
    block = script.block(backward)
    first, last = block.index(backward), block.index(step)
    cleared = [node for node in block if call_of(node, "zero_grad")]
    calls = [node for each in block for node in ast.walk(each) if isinstance(node, ast.Call)]
    if sum(name_of(call) == "zero_grad" for call in calls) > len(cleared):
        return None  # one on a condition: gradients may be meant to add up over some steps
    if first >= last or any(block.index(node) < first for node in cleared):
        return None
    between = [node for node in cleared if block.index(node) < last]
    if not between:
        return script.insert(f"{names[1]}.zero_grad()", before=backward) if not cleared else None
    return (
        script.move(between[0], before=backward)
        if len(between) == 1 and script.is_alone(between[0])
        else None
    )


def clip_before_step(script: Script, finding: Finding) -> str | None:
    clip, step = script.only("clip"), script.only("step")
    names = stepper(script, step)
    if clip is None or step is None or names is None or names[0] or not in_one_block(script, step, clip):
        return None
    block = script.block(step)
    if not call_of(clip, "clip_grad_(norm|value)_") or block.index(clip) != block.index(step) + 1:
        return None
    return script.move(clip, before=step)


def unscale_before_clip(script: Script, finding: Finding) -> str | None:
    clip, step = script.only("clip"), script.only("step")
    names = stepper(script, step)
    if clip is None or step is None or names is None or not names[0] or not in_one_block(script, step, clip):
        return None
    block = script.block(step)
    if "unscale_" in script.text or block.index(clip) >= block.index(step):
        return None
    return script.insert(f"{names[0]}.unscale_({names[1]})", before=clip)


def without_activation(script: Script, finding: Finding) -> str | None:
    """`F.softmax(x, dim=1)`, `x.softmax(1)` → `x`, where the finding names its line and it is the only one there."""
    number = script.number(finding.where)
    calls = [
        node
        for node in ast.walk(script.tree)
        if isinstance(node, ast.Call) and node.lineno == number and name_of(node) in ("softmax", "sigmoid")
    ]
    inside = argument_of(calls[0]) if len(calls) == 1 and finding.confidence == "proven" else None
    if inside is None:
        return None
    text = script.segment(inside)
    simple = isinstance(inside, (ast.Name, ast.Attribute, ast.Call, ast.Subscript))
    return script.replaced([(calls[0], text if simple else f"({text})")])


def argument_of(call: ast.Call) -> ast.expr | None:
    """What a softmax is of; None where that is not plain."""
    if not isinstance(call.func, ast.Attribute) or any(word.arg != "dim" for word in call.keywords):
        return None
    base = ast.unparse(call.func.value)
    if base in ("F", "torch", "torch.nn.functional", "nn.functional"):
        return (
            call.args[0] if 1 <= len(call.args) <= 2 and not isinstance(call.args[0], ast.Starred) else None
        )
    return call.func.value if len(call.args) <= 1 else None


def dropout_as_the_model(script: Script, finding: Finding) -> str | None:
    """`F.dropout(x)` → `F.dropout(x, training=self.training)`, in methods of modules; all of them, or none."""
    changes: list[tuple[ast.expr, str]] = []
    for node in ast.walk(script.tree):
        if (
            not isinstance(node, ast.Call)
            or name_of(node) != "dropout"
            or not isinstance(node.func, ast.Attribute)
        ):
            continue
        if ast.unparse(node.func.value) not in ("F", "torch.nn.functional", "nn.functional"):
            continue
        if len(node.args) > 2 or any(word.arg in ("training", None) for word in node.keywords):
            continue
        if not is_in_a_module(script, node) or script.segment(node)[-1:] != ")":
            return None
        text = script.segment(node)[:-1].rstrip().removesuffix(",")
        changes.append((node, f"{text}, training=self.training)"))
    inner = {id(each) for node, _ in changes for each in ast.walk(node) if each is not node}
    return script.replaced(changes) if changes and not any(id(node) in inner for node, _ in changes) else None


def is_in_a_module(script: Script, node: ast.AST) -> bool:
    """Inside of a method with a `self`, of a class that names some Module as its base."""
    while node in script.parent:
        node = script.parent[node]
        if isinstance(node, ast.FunctionDef):
            owner = script.parent[node]
            first = [arg.arg for arg in node.args.args][:1]
            is_module = isinstance(owner, ast.ClassDef) and any(
                "Module" in ast.unparse(b) for b in owner.bases
            )
            return first == ["self"] and is_module
        if isinstance(node, (ast.Lambda, ast.AsyncFunctionDef)):
            return False
    return False


EDITS: dict[str, Callable[[Script, Finding], str | None]] = {
    "zero-grad-error/never-cleared": clear_before_backward,
    "zero-grad-error/stale": clear_before_backward,
    "zero-grad-error/before-step": clear_before_backward,
    "grad-clip-misuse/after-step": clip_before_step,
    "grad-clip-misuse/before-unscale": unscale_before_clip,
    "loss-activation-mismatch/softmax-twice": without_activation,
    "loss-activation-mismatch/sigmoid-twice": without_activation,
    "train-eval-mode-error/functional-dropout": dropout_as_the_model,
}
