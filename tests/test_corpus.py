"""The corpus: recorded once, asked without training, counted; what is damaged in it is a line."""

import json
import re

import pytest

from gradproof.cli import main
from gradproof.faults import corpus as corpus_module
from gradproof.faults import fault as fault_module
from gradproof.faults.confusion import Answered, render
from gradproof.faults.corpus import Elsewhere, choose, code_of, forget, key_of, last_words, read_events
from gradproof.faults.elsewhere import models_of, why_not
from gradproof.faults.fault import Fault, Healthy
from gradproof.faults.scoreboard import Score

TINY = """
import torch
torch.manual_seed(0)
x = torch.randn(256, 4)
y = x @ torch.randn(4, 1)
model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(60):
    rows = torch.randint(0, 256, (32,))
    loss = (model(x[rows]) - y[rows]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
FAULTS = (
    Fault(
        "axis-or-shape-error/column-against-row", "tiny", ("y[rows]",),
        (("model(x[rows])", "model(x[rows]).squeeze(1)"),), ("loss", 0.1),
    ),
    Fault(
        "zero-grad-error/cleared-before-step", "tiny", ("zero_grad",),
        (("    optimizer.zero_grad()\n    loss.backward()\n", "    loss.backward()\n    optimizer.zero_grad()\n"),),
        ("loss", 0.1), ("param-not-updated",),
    ),
)  # fmt: skip
HEALTHY = (Healthy("tiny-as-it-is", "tiny", ("loss", 0, 1)),)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A catalogue of three, and a place for its corpus."""
    scripts = tmp_path_factory.mktemp("scripts")
    (scripts / "tiny.py").write_text(TINY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fault_module, "SCRIPTS", scripts)
        patch.setattr(corpus_module, "FAULTS", FAULTS)
        patch.setattr(corpus_module, "HEALTHY", HEALTHY)
        yield tmp_path_factory.mktemp("corpus")


def scoreboard(capsys, *words):
    assert main(["scoreboard", *map(str, words)]) == 0
    return capsys.readouterr().out


@pytest.mark.slow
def test_recorded_once_asked_and_counted(tiny, capsys):
    said = scoreboard(capsys, "--record", "--corpus", tiny, "--jobs", 2)
    assert "3 recorded, 0 there already, 0 without a specimen" in said
    assert "0 recorded, 3 there already" in scoreboard(capsys, "--record", "--corpus", tiny)

    table = tiny / "table.md"
    scoreboard(capsys, "--specimens", "--corpus", tiny, "--jobs", 2, "--out", table)
    text = table.read_text()
    assert "top-1: 2 of 2" in text and "top-3: 2 of 2" in text and "places: 2 of 2" in text
    assert "healthy accused: 0 of 1" in text and "warnings a healthy run: 0.00" in text
    assert re.search(r"\| do_shapes_meet \| +1 ", text)
    assert re.search(r"\| tiny-cleared-before-step \| zero-grad-error \| zero-grad-error", text)

    # what was asked stays; of one question alone it is forgotten, and asked again
    file = tiny / "cpu" / "tiny-as-it-is" / "run" / "examination.jsonl"
    asked = [event for event in read_events(file) if event["event"] == "asked"]
    scoreboard(capsys, "--specimens", "--corpus", tiny)
    assert [event for event in read_events(file) if event["event"] == "asked"] == asked
    again = ("--specimens", "--corpus", tiny, "--questions", "do_shapes_meet", "--again")
    assert "top-1: 2 of 2" in scoreboard(capsys, *again)
    after = [event for event in read_events(file) if event["event"] == "asked"]
    assert len(after) == len(asked)
    assert {event["question"] for event in after if event not in asked} == {"do_shapes_meet"}

    # answers of another text of a question are said to be that
    answers = file.parent.parent / "answers.json"
    answers.write_text(json.dumps({**json.loads(answers.read_text()), "do_shapes_meet": "0"}))
    said = scoreboard(capsys, "--specimens", "--corpus", tiny)
    assert "answers of earlier code, which --again asks anew: do_shapes_meet" in said

    # a damaged entry is a line, and the others are counted
    (file.parent / "run.json").write_text("{")
    (tiny / "cpu" / "tiny-column-against-row" / "entry.json").write_text("no")
    said = scoreboard(capsys, "--specimens", "--corpus", tiny)
    assert "- tiny-as-it-is: damaged, UserError: " in said and "top-1: 1 of 1" in said
    assert "- tiny-column-against-row: not recorded; gradproof scoreboard --record records it" in said
    assert "1 recorded, 2 there already" in scoreboard(capsys, "--record", "--corpus", tiny)


def test_an_empty_corpus_is_lines(tiny, tmp_path, capsys):
    said = scoreboard(capsys, "--specimens", "--corpus", tmp_path, "--only", "zero-grad")
    assert "tiny-cleared-before-step: not recorded" in said and "top-1: 0 of 0" in said


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--specimens", "--only", "no such fault"), "no fault and no healthy run"),
        (("--specimens", "--only", "("), "no regular expression"),
        (("--specimens", "--questions", "no such question"), "no question is named like"),
        (("--again",), "--again is for a corpus"),
    ],
)
def test_what_cannot_be_meant_is_said(words, complaint, tmp_path, capsys):
    assert main(["scoreboard", "--corpus", str(tmp_path), *words]) != 0
    assert complaint in capsys.readouterr().err


def test_names_in_a_corpus_are_unique_and_every_script_is_there():
    for elsewhere in (Elsewhere(), Elsewhere("cuda"), Elsewhere("cuda", "bf16")):
        names = [case.name for case in choose(elsewhere)]
        assert len(set(names)) == len(names)
    accelerated = choose(Elsewhere("cuda"), "^accelerated-")
    assert accelerated and not choose(Elsewhere("cuda", "bf16"), "^accelerated-")


def test_a_key_is_of_the_text_the_place_and_the_versions():
    case, other = choose(Elsewhere())[:2]
    keys = {
        key_of(case, Elsewhere(), "torch 2"),
        key_of(other, Elsewhere(), "torch 2"),
        key_of(case, Elsewhere("cuda"), "torch 2"),
        key_of(case, Elsewhere(), "torch 3"),
    }
    assert len(keys) == 4


def test_the_code_of_a_question_has_what_it_imports():
    assert code_of("network.shapes") != code_of("data.memory")
    found: set = set()
    corpus_module._collect(corpus_module.SOURCE / "experiments" / "network" / "shapes.py", found)
    assert {"network", "instruments", "tape"} <= {path.parent.name for path in found}


def test_forgetting_takes_the_answers_of_one_question(tmp_path):
    file = tmp_path / "examination.jsonl"
    events = [
        {"event": "table"},
        {"event": "asked", "question": "a"},
        {"event": "verdict", "experiment": "a", "id": "x/a", "family": "x"},
        {"event": "proven", "id": "x/a"},
        {"event": "asked", "question": "b"},
        {"event": "verdict", "experiment": "b", "id": "x/b", "family": "x"},
        {"event": "proven", "id": "x/b"},
        {"event": "fact", "name": "f"},
    ]
    file.write_text("".join(json.dumps(event) + "\n" for event in events) + '{"cut o')
    forget(file, ["a"])
    assert read_events(file) == events[4:]
    forget(tmp_path / "none.jsonl", ["a"])
    assert read_events(tmp_path / "none.jsonl") == []


def verdict(question, id, **more):
    family = id.partition("/")[0]
    said = {"verdict": "confirmed", "level": "problem", "if_troubled": False, **more}
    return {"event": "verdict", "experiment": question, "id": id, "family": family, **said}


def answered(name, family, *events, top1=True):
    healthy = family == "healthy"
    score = Score(name, family, healthy, top1, top1, None, 1.0, "nothing")
    asked = [
        {"event": "asked", "question": e["experiment"], "outcome": "confirmed", "seconds": 2.0}
        for e in events
    ]
    return Answered(score, frozenset() if healthy else frozenset({family}), [], [*asked, *events])


def test_the_tables_tell_right_from_other_and_from_healthy():
    found = [
        answered("one", "bad-init", verdict("q", "bad-init/x"), verdict("q", "dead-activation/y")),
        answered(
            "two", "bad-init", verdict("q", "bad-init/x"), verdict("q", "bad-init/x", verdict="excluded")
        ),
        answered("three", "healthy", verdict("q", "bad-init/x"), top1=False),
        answered(
            "four", "healthy", verdict("r", "bad-init/x", if_troubled=True), verdict("r", "a/b", level="note")
        ),
    ]
    text = render(found, ["five: damaged"], 1.0)
    assert "| question | bad-init | healthy |\n| --- | --- | --- |\n| q | 1 +1 | +1 |\n\n" in text
    assert "| q | 10.0 | 5 | 0 | 0 | 2 | three bad-init | one dead-activation |  |" in text
    assert "- healthy accused: 1 of 2 (three)" in text and "- five: damaged" in text
    assert render([], [], 0.0).startswith("## In all\n\n- top-1: 0 of 0")


def test_what_cannot_be_moved_says_why():
    spawned, closure = "mp.spawn(worker)", "torch.optim.LBFGS(p)"
    assert why_not(spawned, "cpu", "") == "" and "starts processes" in why_not(spawned, "cuda", "")
    assert why_not(closure, "cuda", "bf16") == "" and "closure" in why_not(closure, "cuda", "fp16")


def test_last_words_are_the_error():
    said = "Traceback (most recent call last):\n  File 'x'\nRuntimeError: no kernel\ngradproof: 3 steps\n"
    assert last_words(said) == "RuntimeError: no kernel" and last_words("all well\n") == ""


def test_models_are_the_outermost_modules_that_an_optimizer_holds():
    import torch

    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.nn.Linear(2, 2))
    other = torch.nn.Linear(2, 2)
    assert models_of(torch.optim.SGD(model.parameters(), lr=0.1)) == [model]
    assert models_of(torch.optim.SGD(other.parameters(), lr=0.1)) == [other]
