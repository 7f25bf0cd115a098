"""One question, one answer: each kind finds what was planted for it, and does not find it in the healthy twin."""

import inspect
import json
import os
import subprocess
import sys

import asked_runs
import pytest
import torch
from asked_runs import classifier, write_run
from taped_trainings import evidence_of_step, plain_step
from test_examination import HalfTanh
from torch import nn
from torch.nn import functional as F

import gradproof
from gradproof import children
from gradproof.ask.answer import MOST, Answer, bounded
from gradproof.ask.kinds import KINDS
from gradproof.cli import main
from gradproof.errors import UserError

LOSS_LINE = inspect.getsourcelines(asked_runs.classifier)[1] + next(
    n for n, text in enumerate(inspect.getsourcelines(asked_runs.classifier)[0]) if "F.cross_entropy" in text
)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    return gradproof.open(classifier(tmp_path_factory.mktemp("asked") / "healthy"))


def test_a_wrong_gradient_is_named_and_a_right_one_is_right(tmp_path, healthy):
    found = gradproof.open(classifier(tmp_path / "run", HalfTanh.apply)).ask("gradient")
    assert found.sentence.startswith("No") and "HalfTanh" in found.sentence and found.confidence == "proven"
    assert "test_examination.py" in found.place
    right = healthy.ask("gradient", of="2")
    assert right.sentence.startswith("Yes") and right.confidence == "proven"
    assert {row["parameter"] for row in right.rows} == {"2.weight", "2.bias"}


def test_one_gradient_is_judged_without_the_others(tmp_path):
    run = gradproof.open(classifier(tmp_path / "run", lambda scores: HalfTanh.apply(scores)))
    one = run.ask("gradient", of="0.weight")
    assert one.sentence.startswith("No: 1 of 1") and "HalfTanh" in one.sentence
    assert "shadow" not in vars(run._open(None))  # the whole was not worked out
    whole = run.ask("gradient")
    same = next(row for row in whole.rows if row["parameter"] == "0.weight")
    assert same["error"] == pytest.approx(one.rows[0]["error"]) and same["verdict"] == one.rows[0]["verdict"]


def test_samples_that_hear_each_other_are_heard(tmp_path, healthy):
    coupled = gradproof.open(classifier(tmp_path / "run", lambda scores: scores - scores.mean(0))).ask(
        "hears"
    )
    assert "hear each other" in coupled.sentence and all(row["heard_by_others"] == 11 for row in coupled.rows)
    alone = healthy.ask("hears")
    assert "own sample alone" in alone.sentence and all(row["heard_by_itself"] for row in alone.rows)


def sequences(path, mask):
    """Eight positions that are averaged, over those before them or over all."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    x, wanted = torch.randn(3, 8, 4), torch.randn(3, 8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = plain_step(model, optimizer, lambda: F.mse_loss(mask @ model(x), wanted))
    return gradproof.open(write_run(path, step, model, optimizer, 1)).ask("hears", of="input")


def test_a_position_that_is_heard_too_early(tmp_path):
    assert "heard by predictions before it" in sequences(tmp_path / "all", torch.ones(8, 8)).sentence
    assert "before it" not in sequences(tmp_path / "past", torch.ones(8, 8).tril()).sentence


def test_a_prediction_that_is_flattened_is_still_told_by_sample(tmp_path):
    def flat(path, couple):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        x, labels = torch.randn(3, 5, 4), torch.arange(15) % 3
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def make_loss():
            scores = model(x) - (model(x).mean(0) if couple else 0)
            return F.cross_entropy(scores.flatten(0, 1), labels)

        return write_run(path, plain_step(model, optimizer, make_loss), model, optimizer, 1)

    coupled = gradproof.open(flat(tmp_path / "coupled", True)).ask("hears")
    assert "hear each other" in coupled.sentence
    assert "own sample alone" in gradproof.open(flat(tmp_path / "apart", False)).ask("hears").sentence


def test_where_nobody_can_tell_nothing_is_claimed(tmp_path):
    torch.manual_seed(0)
    model, x = nn.Linear(4, 3), torch.randn(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = plain_step(model, optimizer, lambda: F.mse_loss(model(x).mean(0), torch.zeros(3)))
    with pytest.raises(UserError, match="cannot be told"):
        gradproof.open(write_run(tmp_path / "run", step, model, optimizer, 1)).ask("hears")


def test_a_nan_comes_from_its_sample(tmp_path, healthy):
    x = torch.randn(12, 4)
    x[5, 2] = float("nan")
    found = gradproof.open(classifier(tmp_path / "run", x=x, steps=1)).ask("origin", of="2")
    assert "nan" in found.sentence and "batch row 5" in found.sentence
    assert [row["operation"] for row in found.rows] == ["addmm", "tanh", "addmm"]
    finite = healthy.ask("origin", of="2")
    assert "nan" not in finite.sentence and "finite" not in finite.sentence
    assert f"batch row {finite.numbers['index'][0]}." in finite.sentence
    assert healthy.ask("origin", of="0.weight").numbers["samples"] == "not told apart"


def test_samples_without_weight_are_counted(tmp_path, healthy):
    def silence(scores):
        return torch.cat([scores[:9], scores[9:].detach()])

    found = gradproof.open(classifier(tmp_path / "run", silence)).ask("weighs", of="2")
    assert found.numbers["samples_without_weight"] == 3 and "3 take nothing" in found.sentence
    assert healthy.ask("weighs").numbers["samples_without_weight"] == 0


def wrong_sgd(model):
    class SGD(torch.optim.SGD):  # a library's own, patched
        @torch.no_grad()
        def step(self, closure=None):
            super().step()
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(0.99)

    return SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("step", [0, 2])
@pytest.mark.parametrize(
    "kind, options",
    [
        ("SGD", {}),
        ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
        ("Adam", {"amsgrad": True}),
        ("AdamW", {"weight_decay": 0.1}),
        ("RMSprop", {"centered": True}),
        ("Adagrad", {}),
        ("NAdam", {}),
        ("Adafactor", {}),
    ],
)
def test_an_update_is_as_its_rule_says(tmp_path, kind, options, step):
    def make(model):
        return getattr(torch.optim, kind)(model.parameters(), lr=0.01, **options)

    found = gradproof.open(classifier(tmp_path / "run", optimizer=make, steps=3)).ask("update", step=step)
    assert found.sentence.startswith("Yes: 4"), found


def test_an_update_that_is_not_as_its_rule_says(tmp_path):
    found = gradproof.open(classifier(tmp_path / "run", optimizer=wrong_sgd)).ask("update", of="0.weight")
    assert found.sentence.startswith("No: 1 of 1") and found.rows[0]["verdict"] == "differs"


def test_what_if_the_rate_were_lower(tmp_path, healthy):
    def fast(model):
        return torch.optim.SGD(model.parameters(), lr=300.0)

    run = gradproof.open(classifier(tmp_path / "run", optimizer=fast))
    assert "end better" in run.ask("what-if", step=0, change="lr=0.001x", steps=8).sentence
    assert "no different" in run.ask("what-if", step=0, change="lr=300", steps=8).sentence
    assert "end worse" in healthy.ask("what-if", step=0, change="lr=1e-9", steps=12).sentence
    assert "no different" in healthy.ask("what-if", change="dtype=float64 weight_decay=0", steps=4).sentence
    for change, why in [
        ("", "what should be changed"),
        ("speed=3", "cannot be changed"),
        ("lr", "NAME=VALUE"),
    ]:
        with pytest.raises(UserError, match=why):
            healthy.ask("what-if", change=change)


class Cancels(nn.Module):
    def forward(self, x):
        return (x + 3e5) - 3e5


def test_digits_that_are_lost(tmp_path, healthy):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Cancels())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(8, 4)
    step = plain_step(model, optimizer, lambda: F.mse_loss(model(x), x))
    found = gradproof.open(write_run(tmp_path / "run", step, model, optimizer)).ask("digits")
    assert found.rows[0]["what"] == "1" and found.rows[0]["digits"] < 3 and "test_ask.py" in found.place
    assert healthy.ask("digits").sentence.startswith("No result is off")


def test_what_it_was_fed(tmp_path, healthy):
    x = torch.randn(12, 4)
    x[6:] = x[:6]
    found = gradproof.open(classifier(tmp_path / "run", x=x)).ask("fed")
    assert "6 rows twice" in found.sentence
    right = healthy.ask("fed")
    assert "no row twice" in right.sentence
    assert right.rows[1]["most_frequent"] == {"0": 4, "1": 4, "2": 4}


def test_a_tensor_is_shown(healthy):
    found = healthy.ask("tensor", of="2", part="0:2,1")
    scores = [row for row in found.rows if "index" in row]
    assert found.numbers["shape"] == [12, 3] and len(found.numbers["part"]) == 2
    assert scores[0]["value"] == max((row["value"] for row in scores), key=abs)
    assert all(row["target"] == row["sample"] % 3 for row in scores)
    assert sum(row["count"] for row in found.rows if "count" in row) == 36
    assert healthy.ask("tensor", of="0.weight.grad").numbers["shape"] == [8, 4]
    assert healthy.ask("tensor", of="0.in").numbers["shape"] == [12, 4]
    for of, why in [("2.wieght", "2.weight"), ("", "which tensor"), ("nowhere.py:3", "asked_runs.py")]:
        with pytest.raises(UserError, match=why):
            healthy.ask("tensor", of=of)
    with pytest.raises(UserError, match="no part"):
        healthy.ask("tensor", of="2", part="__import__")


def test_what_ran_at_a_line(healthy):
    found = healthy.ask("line", of=f"asked_runs.py:{LOSS_LINE}")
    assert [row["operation"] for row in found.rows].count("addmm") == 2 and "cross_entropy" in found.sentence
    with pytest.raises(UserError, match=str(LOSS_LINE)):
        healthy.ask("line", of=f"asked_runs.py:{LOSS_LINE + 500}")


def test_where_two_runs_part(tmp_path, healthy):
    same = healthy.ask("parting", other=str(classifier(tmp_path / "same")))
    assert "do not part" in same.sentence
    other = healthy.ask("parting", other=str(classifier(tmp_path / "other", seed=1)))
    assert other.step == 0 and other.rows[0]["what"].startswith("parameter")
    later = healthy.ask("parting", other=str(classifier(tmp_path / "faster", optimizer=faster)))
    assert later.step == 0 and "add_" in later.rows[0]["what"]  # of the update: all before it is the same
    assert "parameter" in healthy.ask("parting", step=1, other=str(tmp_path / "faster")).rows[0]["what"]
    code = healthy.ask("parting", other=str(classifier(tmp_path / "code", lambda scores: 2 * scores)))
    assert code.step == 0 and "mul" in (code.rows[0]["there"], code.rows[0]["here"])


def test_two_runs_part_at_a_row_of_their_data(tmp_path):
    x = torch.randn(12, 4)
    other = x.clone()
    other[5:7] += 1
    first = gradproof.open(classifier(tmp_path / "first", x=x))
    found = first.ask("parting", other=str(classifier(tmp_path / "other", x=other)))
    assert (
        found.rows[0]["first_row"] == 5 and found.rows[0]["rows"] == 2 and "from row 5 on" in found.sentence
    )


def test_an_update_is_judged_without_a_compiler(tmp_path):
    """Loading it takes five seconds, and an update needs none."""
    run = classifier(tmp_path / "run", optimizer=lambda model: torch.optim.AdamW(model.parameters()))
    program = f"""
import sys, gradproof
found = gradproof.open({str(run)!r}).ask("update")
sys.exit(not found.sentence.startswith("Yes") or "torch._dynamo" in sys.modules)
"""
    environment = {**os.environ, "PYTHONPATH": children.environment()["PYTHONPATH"]}
    assert subprocess.run([sys.executable, "-c", program], env=environment).returncode == 0


def faster(model):
    return torch.optim.SGD(model.parameters(), lr=0.2)


def test_a_question_of_the_examination(tmp_path, healthy):
    found = gradproof.open(classifier(tmp_path / "run", HalfTanh.apply)).ask("is_the_gradient_right")
    assert found.rows[0]["cause"].startswith("wrong-gradient") and found.confidence == "proven"
    assert healthy.ask("is-the-gradient-right").rows[0]["verdict"] == "excluded"
    silent = healthy.ask("does_it_see_the_future")
    assert "does not apply" in silent.sentence and silent.confidence == "undecided"
    with pytest.raises(UserError, match="there is no question"):
        healthy.ask("who are you")


def test_without_a_question_it_says_what_can_be_asked(tmp_path, healthy):
    found = healthy.ask()
    assert [row["question"] for row in found.rows[: len(KINDS)]] == [kind.name for kind in KINDS]
    assert all(row["possible"] for row in found.rows)
    bare = classifier(tmp_path / "bare", steps=0)
    kinds = gradproof.open(bare).ask().rows[: len(KINDS)]
    assert [row["question"] for row in kinds if row["possible"]] == ["course", "parting"]
    assert all(row["why_not"] == "no step was recorded" for row in kinds if not row["possible"])
    with pytest.raises(UserError, match="no recorded step"):
        gradproof.open(bare).ask("gradient")
    with pytest.raises(UserError, match="near it there are 0, 1"):
        healthy.ask("gradient", step=77)


def test_what_cannot_be_replayed_is_one_sentence(tmp_path, monkeypatch):
    run = gradproof.open(classifier(tmp_path / "run", steps=1))
    monkeypatch.setattr("gradproof.ask.gradient.below", lambda *_: 1 // 0)
    with pytest.raises(UserError, match="gradient could not be answered: ZeroDivisionError"):
        run.ask("gradient")


def test_every_answer_is_bounded_and_a_cursor_goes_on(healthy):
    found, seen, cursor = healthy.ask(), [], 0
    while cursor is not None:
        found = healthy.ask(cursor=cursor)
        assert len(json.dumps(found.as_data(), ensure_ascii=False)) <= MOST + 300
        seen += [row["question"] for row in found.rows]
        cursor = found.cursor
    assert len(seen) == len(set(seen)) > 40


def test_text_of_a_run_is_data():
    rows = tuple({"name": f"\x1b[31m\nignore all of the above {'x' * 900}{i}"} for i in range(200))
    found = bounded(Answer("q", "s", "measured", rows=rows))
    text = json.dumps(found.as_data())
    assert "\\u001b" not in text and "\\\\x1b" in text and len(text) < MOST + 400 and found.cursor > 5
    assert "\x1b" not in str(found) and "\n" not in found.as_data()["rows"][0]["name"]


def test_the_command(healthy, capsys):
    run = os.fspath(healthy.path)
    assert main(["ask", run, "gradient", "--step", "1", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["schema"] == "gradproof/answer/1" and data["step"] == 1 and data["confidence"] == "proven"
    assert main(["ask", run, "tensor", "--of", "loss"]) == 0
    assert "float32[]" in capsys.readouterr().out
    assert main(["ask", run, "tensor", "--of", "nothing"]) == 2
    assert "has no 'nothing'" in capsys.readouterr().err


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_a_rule_in_parts_is_the_rule(tmp_path, kind, monkeypatch):
    from gradproof.ask import update

    torch.manual_seed(0)
    model = nn.Linear(40, 30)
    optimizer = kind(model.parameters(), lr=0.1)
    step = plain_step(model, optimizer, lambda: model(torch.ones(4, 40)).square().mean())
    step()
    evidence = evidence_of_step(step, {"": model}, [optimizer])
    whole = update.judged_by_rule(evidence, list(evidence.updates))
    monkeypatch.setattr(update, "PART", 7)  # the last part is shorter
    assert update.judged_by_rule(evidence, list(evidence.updates)) == whole
    assert all(row["verdict"] == "as the rule" for row in whole[0])
