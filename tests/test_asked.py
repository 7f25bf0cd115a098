"""Nothing is claimed that was not asked: what a report says about its own questions, planted and healthy."""

import doctest
import json

import numpy as np
import pytest
from examined import write_examination

from gradproof.diagnosis import examination
from gradproof.diagnosis.examination import Open, judge
from gradproof.diagnosis.findings import Diagnosis
from gradproof.diagnosis.ranking import diagnose
from gradproof.experiments.table import BY_NAME, QUESTIONS
from gradproof.record.run import open_run
from gradproof.record.schema import json_line
from gradproof.record.writer import RunWriter
from gradproof.report import text
from gradproof.report.columns import Columns
from gradproof.report.payload import gather_facts
from gradproof.report.text import render_text

FINE = "Nothing is wrong that this record could show."
ALL = len(QUESTIONS)
CORE = [question.name for question in QUESTIONS if question.core]


@pytest.fixture
def path(tmp_path):
    """A run of 60 steps whose loss falls."""
    writer = RunWriter(tmp_path / "run", {"ended": 1.0})
    for step, loss in enumerate(2.0 * 0.97 ** np.arange(60)):
        writer.write_step({"step": step, "loss": float(loss), "order": "zbs"})
    writer.close()
    return writer.path


def headline(path):
    """Without what counts, and without the notes."""
    lines = render_text(diagnose(path)).split("\n\n")[0].split("\n")[1:]
    return " ".join(line for line in lines if not line.startswith("note: "))


def section(path):
    parts = render_text(diagnose(path)).split("\n\n")
    (found,) = [part for part in parts if part.startswith("Asked\n")]
    return [line.strip() for line in found.split("\n")[1:]]


def test_all_asked_and_answered_is_nothing_wrong(path):
    write_examination(path)
    found = diagnose(path)
    assert headline(path) == str(found) == found.conclusion == FINE
    assert found.examination.complete and found.examination.command == ""
    assert section(path) == [f"{ALL} questions of 6 steps: all answered"]


@pytest.mark.parametrize("name", CORE)
def test_each_core_question_is_missed(path, name):
    write_examination(path, without=(name,))
    assert FINE not in str(diagnose(path)) and diagnose(path).examination.core_open == (name,)
    said = f"No problem was found, but 1 of {len(CORE)} core questions is open: {name.replace('_', ' ')}; "
    assert headline(path) == f"{said}`gradproof examine {path}` asks it."


@pytest.mark.parametrize("outcome", ["failed", "undecided", "not asked"])
def test_a_core_question_without_an_answer_is_open_and_told(path, outcome):
    write_examination(path, is_the_gradient_right=(outcome, "because of this"))
    found = diagnose(path).examination
    assert found.core_open == ("is_the_gradient_right",) and not found.complete
    (told,) = getattr(found, outcome.replace(" ", "_"))
    assert told == Open("Is every gradient the derivative of the loss?", "because of this", True)
    asked = ALL - 1 if outcome == "not asked" else ALL
    count, line, *_ = section(path)
    assert count == f"{asked} questions of 6 steps: 1 {outcome}"
    assert line == f"{outcome}: Is every gradient the derivative of the loss? (because of this)"
    assert (found.command != "") == (outcome != "undecided")  # to ask again does not help


def test_a_question_that_is_not_core_leaves_the_claim_alone(path):
    write_examination(path, where_does_it_start=("failed", "ValueError: no"))
    assert headline(path) == FINE
    assert section(path)[1] == "failed: Do weights, scores and loss start where guessing is? (ValueError: no)"


def test_what_this_training_does_not_have_is_not_open(path):
    reason = "does not apply: a sequence of tokens with a target for each is not there"
    tokens = {q.name: ("not asked", reason) for q in QUESTIONS if "tokens" in q.needs}
    write_examination(path, **tokens)
    found = diagnose(path).examination
    assert found.complete and found.not_applicable == len(tokens) == 2 and found.not_asked == ()
    assert section(path) == [f"{ALL - 2} questions of 6 steps: 2 without an object here"]


def test_silence_counts_after_as_many_steps_as_the_question_wants(path):
    write_examination(path, steps=(0, 1))
    found = diagnose(path).examination
    wants = {q.name for q in QUESTIONS if q.core and q.enough > 2}
    assert set(found.core_open) == wants and "do_batches_differ" in wants
    assert "it wants to see 5 steps, and saw 2" in {each.reason for each in found.undecided}
    write_examination(path, steps=(2, 3, 10))  # a second examination goes on where the first ended
    assert diagnose(path).examination.complete


def test_what_is_decided_counts_at_once(path):
    said = dict.fromkeys(BY_NAME, ("excluded", ""))
    write_examination(path, steps=(0,), **said)
    assert headline(path) == FINE


def test_one_reason_for_many_questions_is_one_line(path):
    late = [question.name for question in QUESTIONS[20:]]
    write_examination(path, limit=30.0, without=late)
    lines = section(path)
    assert lines[0] == f"20 questions of 6 steps: {ALL - 20} not asked"
    whole = " ".join(lines[1:])
    assert whole.count(f"and {ALL - 21} more (the limit of 30 s came first)") == 1
    assert lines[-1] == f"`gradproof examine {path}` asks the rest" and len(lines) <= 5
    assert f"of {len(CORE)} core questions are open" in headline(path) and " more; " in headline(path)


def test_the_section_stays_short(path):
    many = {q.name: ("failed", f"reason {n} " + 300 * "x") for n, q in enumerate(QUESTIONS)}
    write_examination(path, **many)
    lines = section(path)
    assert f"… {ALL - 6} more; --json has them all" in lines and len(lines) <= 18
    assert len(diagnose(path).as_data()["examination"]["failed"]) == ALL


def test_an_examination_that_was_cut_short_is_no_answer(path):
    write_examination(path, ended=False, without=CORE[:1])
    (told,) = diagnose(path).examination.not_asked
    assert told.reason == "the examination has not ended, or was cut short"
    with open(path / "examination.jsonl", "a") as stream:
        stream.write(
            '{"event": "examiner_lost", "signal": "SIGSEGV", "step": 10, "question": "Is it right?"}\n'
        )
    (told,) = diagnose(path).examination.not_asked
    assert told.reason == "the examination was cut short by SIGSEGV while it asked 'Is it right?' of step 10"


def test_a_run_without_a_taped_step_says_so(path):
    assert headline(path) == (
        "No problem was found in the recorded numbers, but no step was taped: nothing was tested."
    )
    assert section(path) == ["nothing: no step was taped"]
    assert not diagnose(path).examination.complete


def test_a_run_that_does_not_say_what_was_asked(tmp_path):
    writer = RunWriter(tmp_path / "run", {"cost": COST})
    writer.write_step({"step": 0, "loss": 1.0, "order": "zbs"})
    writer.write_event("experiment_failed", experiment="is_a_path_cut", step=0, error="ValueError: no")
    writer.close()
    assert headline(tmp_path / "run") == (
        "No problem was found; 5 steps were taped, but the record does not say which questions were asked."
    )
    assert section(tmp_path / "run") == [
        "5 steps taped; which questions they were asked is not recorded; 1 failed",
        "failed: is_a_path_cut (ValueError: no)",
    ]


COST = {"own_seconds": 1.0, "share": 0.01, "taped_steps": 5, "experiment_seconds": 2.0}


def test_specimens_that_nobody_asked(path):
    (path / "examination.jsonl").write_text('{"event":"specimen","step":3,"operations":9}\n')
    said = "No problem was found, but nothing was asked yet: 1 step was taped; "
    assert headline(path) == f"{said}`gradproof examine {path}` asks."


def test_a_problem_is_the_headline_whatever_is_open(path):
    verdict = {"experiment": "is_a_path_cut", "verdict": "confirmed", "family": "detached-graph"}
    verdict |= {"event": "verdict", "step": 3, "id": "detached-graph/cut", "confidence": "proven"}
    write_examination(path, without=CORE[:3], is_a_path_cut=("confirmed", ""))
    with open(path / "examination.jsonl", "a") as stream:
        stream.write(json_line(verdict) + "\n")
    assert headline(path) == "A path that should carry gradient is cut (proven)"
    assert "3 not asked" in section(path)[0]
    assert "core questions" not in str(diagnose(path))


@pytest.mark.parametrize("losses", [[1.0, 0.9, 0.8], 60 * [float("nan")]])
def test_a_watch_that_stopped_early_is_the_headline(tmp_path, losses):
    writer = RunWriter(tmp_path / "run", {"failure": "ValueError: no such thing"})
    for step, loss in enumerate(losses):
        writer.write_step({"step": step, "loss": loss, "order": "zbs"})
    writer.close()
    write_examination(tmp_path / "run")
    said = f"Watching stopped early, after {len(losses)} steps (ValueError: no such thing): "
    assert headline(tmp_path / "run").startswith(f"{said}what came after was not seen. ")
    found = diagnose(tmp_path / "run")
    assert str(found).startswith(said) and FINE not in str(found) and FINE not in render_text(found)
    if len(losses) == 3:
        assert found.conclusion == "No problem was found until then."
    else:
        assert "NaN" in headline(tmp_path / "run") and len(str(found).splitlines()) > 1


def test_the_page_and_the_data_say_the_same(path):
    write_examination(path, limit=30.0, without=CORE[:2], which_digits_are_lost=("failed", "ValueError: no"))
    found = diagnose(path)
    data = json.loads(json_line(found.as_data()))
    assert (
        gather_facts(open_run(path), found, Columns())["diagnosis"]["examination"]
        == found.examination.as_data()
    )
    asked = data["examination"]
    assert asked["core_open"] == CORE[:2] and asked["taped"] == 6 and asked["core"] == len(CORE)
    assert (
        asked["not_asked"][0]["core"] is True
        and asked["not_asked"][0]["reason"] == "the limit of 30 s came first"
    )
    assert asked["failed"] == [
        {
            "question": "Do positions, times, phases and tables keep the digits that they need?",
            "reason": "ValueError: no",
            "core": False,
        }
    ]
    assert (
        asked["summary"] == f"{ALL - 2} questions of 6 steps: 1 failed, 2 not asked" and not asked["complete"]
    )
    assert data["conclusion"] == found.conclusion == asked["conclusion"]


def test_the_last_word_of_a_question_counts():
    def said(*outcomes):
        return judge([{"outcome": o, "step": n, "reason": o} for n, o in enumerate(outcomes)], 2, "late")

    assert said() == ("not asked", "late")
    assert said("not asked") == ("not asked", "not asked")
    assert said("nothing") == ("undecided", "it wants to see 2 steps, and saw 1")
    assert said("nothing", "nothing") == said("undecided", "nothing", "nothing") == ("answered", "")
    assert said("nothing", "nothing", "undecided") == ("undecided", "undecided")
    assert said("nothing", "failed") == ("failed", "failed")
    assert said("failed", "excluded", "not asked") == said("confirmed", "failed") == ("answered", "")


def test_events_and_facts_of_an_examination_join_the_runs(tmp_path):
    writer = RunWriter(tmp_path / "run", {"facts": {"lines": {"forward": []}, "sharded": True}})
    writer.write_event("note", text="of the training")
    writer.close()
    file = tmp_path / "run" / "examination.jsonl"
    file.write_text("")
    assert len(open_run(tmp_path / "run").events) == 1 and open_run(tmp_path / "run").notes == []
    lines = [
        '{"event":"fact","name":"sharded","value":false}',
        '{"event":"fact","name":"policy_loss","value":true}',
        '{"event":"fact"}',
        '{"event":"specimen","step":3}',
    ]
    file.write_text("\n".join(lines) + '\n{"event":"asked","ques')
    run = open_run(tmp_path / "run")
    assert [event["event"] for event in run.events] == ["note", "fact", "fact", "specimen"]
    assert run.info["facts"] == {"lines": {"forward": []}, "sharded": False, "policy_loss": True}
    assert run.notes == ["examination.jsonl: 2 damaged lines are left out"]


def test_a_bare_diagnosis_claims_nothing():
    assert str(Diagnosis("runs/a", 3)).endswith("no step was taped: nothing was tested.")
    assert str(Diagnosis("runs/a", 0)).startswith("No step was recorded")


@pytest.mark.parametrize("module", [examination, text])
def test_examples_hold(module):
    assert doctest.testmod(module).failed == 0
