"""The one table of questions against the code that asks them."""

import ast
import doctest
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from experiment_steps import evidence_of
from torch import nn

from gradproof.diagnosis.causes import BY_FAMILY
from gradproof.diagnosis.findings import CONFIDENCES
from gradproof.experiments import table
from gradproof.experiments.needs import why_not
from gradproof.experiments.table import BY_NAME, COSTS, EVERY, NEEDS, QUESTIONS, find, order_of

EXPERIMENTS = Path(table.__file__).parent
MODULES = sorted({question.module for question in QUESTIONS})
# what it notes is judged at the run's end, by the diagnosis
NOTED = {"steps.averages": {"weights-state-error/average-too-slow"}}


def file_of(module: str) -> Path:
    return EXPERIMENTS.joinpath(*module.split(".")).with_suffix(".py")


def strings_of(tree: ast.Module) -> set[str]:
    """Every string of a file that begins with a family: ids, with the file's own constants filled in.

    What is only known while it runs ends an id: f"{FAMILY}/{name}-at-the-end" is FAMILY.
    """
    constants = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name) and isinstance(node.value.value, str)
    }

    def text(node: ast.expr) -> str | None:
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, str) else None
        if isinstance(node, ast.Name):
            return constants.get(node.id)
        if isinstance(node, ast.FormattedValue):
            return text(node.value)
        if isinstance(node, ast.JoinedStr):
            parts = [text(part) for part in node.values]
            known = parts[: parts.index(None)] if None in parts else parts
            whole = "".join(part for part in known if part)
            return whole if None not in parts else whole.rpartition("/")[0]
        return None

    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    inside |= {id(node.value) for node in tree.body if isinstance(node, ast.Assign)}  # used, or not an id
    used = {
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    found = {constants[name] for name in used & set(constants) if "/" in constants[name]}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant | ast.JoinedStr) and id(node) not in inside and (said := text(node)):
            found.add(said)
    return {said for said in found if said.partition("/")[0] in BY_FAMILY}


def said_in_calls(tree: ast.Module) -> set[str]:
    """The families that confirmed(…), excluded(…) and undecided(…) are called with, as far as the text tells."""
    names = {"confirmed", "excluded", "undecided"}
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
    arguments = [call.args[0] for call in calls if call.func.id in names and call.args]
    holder = ast.Module([*tree.body[:0], *(ast.Expr(a) for a in arguments)], [])
    constants = [n for n in tree.body if isinstance(n, ast.Assign) and isinstance(n.value, ast.Constant)]
    used = {n.id for a in arguments for n in ast.walk(a) if isinstance(n, ast.Name)}
    values = [
        n.value.value for n in constants if isinstance(n.targets[0], ast.Name) and n.targets[0].id in used
    ]
    direct = [n.value for n in ast.walk(holder) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    found = {str(said).partition("/")[0] for said in (*values, *direct)}
    return {family for family in found if family in BY_FAMILY}


@pytest.mark.parametrize("module", MODULES)
def test_the_table_says_what_the_verdicts_of_a_file_say(module):
    tree = ast.parse(file_of(module).read_text())
    listed = {cause for question in QUESTIONS if question.module == module for cause in question.causes}
    listed -= NOTED.get(module, set())
    families = {cause.partition("/")[0] for cause in listed}
    assert said_in_calls(tree) <= families
    said = strings_of(tree)
    for id in said:  # an id is listed itself, or with its whole family
        family, _, what = id.partition("/")
        known = id in listed or family in listed or (not what and family in families)
        assert known, f"{module} says {id}, the table does not"
    for cause in listed:
        family = cause.partition("/")[0]
        assert cause in said or family in said or cause in {s.partition("/")[0] for s in said}, cause


def test_every_verdict_of_the_experiments_is_in_a_file_of_the_table():
    for file in EXPERIMENTS.rglob("*.py"):
        if file not in (*map(file_of, MODULES), file_of("table")):
            assert not said_in_calls(ast.parse(file.read_text())), file.name


def test_an_id_that_the_table_does_not_list_is_found():
    tree = ast.parse(
        'FAMILY = "bad-init"\nID = "lr-too-low/x"\nconfirmed(f"{FAMILY}/new")\nexcluded(ID)\nkey = id_'
    )
    assert strings_of(tree) == {"bad-init/new", "lr-too-low/x"}
    assert said_in_calls(tree) == {"bad-init", "lr-too-low"}
    tree = ast.parse('FAMILY = "bad-init"\nconfirmed(f"{FAMILY}/{name}-at-the-end")')
    assert strings_of(tree) == {"bad-init"} == said_in_calls(tree)


def test_whoever_confirms_says_how_sure_it_is():
    from gradproof.experiments.verdict import confirmed

    with pytest.raises(TypeError, match="confidence"):
        confirmed("bad-init/x", "seen")
    for file in EXPERIMENTS.rglob("*.py"):
        for call in (n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Call)):
            if getattr(call.func, "id", "") == "confirmed":
                given = [k.value for k in call.keywords if k.arg in ("confidence", None)]
                words = {n.value for value in given for n in ast.walk(value) if isinstance(n, ast.Constant)}
                assert (given and words & {*CONFIDENCES}) or isinstance(given[0], ast.Call), file.name


def test_every_question_is_a_function_that_is_there():
    for question in QUESTIONS:
        assert find(question).__name__ == question.name
    assert len(BY_NAME) == len(QUESTIONS) <= 45


def test_what_is_written_is_of_the_words_that_exist():
    for question in QUESTIONS:
        assert question.cost in COSTS and set(question.needs) <= set(NEEDS), question.name
        assert question.causes and set(question.families) <= set(BY_FAMILY), question.name
        assert len(set(question.causes)) == len(question.causes), question.name
        assert question.sentence.endswith("?") and question.sentence[0].isupper(), question.name
        assert 1 <= question.enough < 10 and (not question.looks or question.steps == EVERY), question.name
    assert len({question.sentence for question in QUESTIONS}) == len(QUESTIONS)
    assert {need for question in QUESTIONS for need in question.needs} == set(NEEDS)


def test_questions_stand_cheap_before_dear():
    costs = [COSTS.index(question.cost) for question in QUESTIONS]
    assert costs == sorted(costs)


def test_what_can_be_decided_on_a_tape_has_a_question_that_must_be_answered():
    """Nothing is wrong: said only where each family that a question can decide was asked for."""
    decided = {family for question in QUESTIONS for family in question.families}
    core = {family for question in QUESTIONS if question.core for family in question.families}
    assert core == decided and 20 <= sum(question.core for question in QUESTIONS) <= 28
    # these are read off the record alone
    assert set(BY_FAMILY) - decided == {"grad-clip-misuse", "lr-schedule-error", "distributed-desync"}


def test_suspicion_and_cost_decide_the_order():
    assert order_of([]) == list(QUESTIONS)
    asked = order_of(["vanishing-signal", "data-target-misaligned/no-shift"])
    assert sorted(asked, key=str) == sorted(QUESTIONS, key=str)
    suspected = {"vanishing-signal", "data-target-misaligned"}
    first = [question for question in asked if not suspected.isdisjoint(question.families)]
    assert asked[: len(first)] == first
    for part in (first, asked[len(first) :]):
        costs = [COSTS.index(question.cost) for question in part]
        assert costs == sorted(costs)
    # of what costs the same, that for the first suspicion comes first
    names = [question.name for question in order_of(["attention-mask-error", "lr-too-low"])]
    assert names.index("does_it_see_the_future") < names.index("is_the_step_too_long_or_short")
    names = [question.name for question in order_of(["lr-too-low", "attention-mask-error"])]
    assert names.index("is_the_step_too_long_or_short") < names.index("does_it_see_the_future")


def test_examples_of_the_table_hold():
    assert doctest.testmod(table).failed == 0


def test_the_table_needs_neither_torch_nor_numpy():
    code = (
        "import sys, gradproof.experiments.table; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_page_of_questions_is_of_the_table():
    import make_questions

    assert make_questions.PAGE.read_text() == make_questions.render(), "python docs/make_questions.py"


def test_labels_of_a_byte_each_are_read_as_numbers():
    """The cross-entropy takes them, gather does not, and an index would take them for a mask."""
    torch.manual_seed(0)
    x, y = torch.randn(24, 6), torch.randint(0, 4, (24,))
    said = {}
    for labels in (y, y.byte()):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        model[2].weight.data *= 40
        evidence = evidence_of(model, lambda: F.cross_entropy(model(x), labels), step=100)  # noqa: B023
        for question in QUESTIONS:
            if not why_not(question, evidence):
                evidence.memory = {}
                ask = getattr(import_module(f"gradproof.experiments.{question.module}"), question.name)
                told = sorted((v.verdict, v.family, v.id) for v in ask(evidence))
                assert said.setdefault(question.name, told) == told
    assert len(said) > 15 and any(told for told in said.values())
