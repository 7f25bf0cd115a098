"""What must be seen at several steps before it is said: counted by the examiner, over interruptions."""

import doctest
import json

import pytest

from gradproof.diagnosis import verdicts
from gradproof.examination import sightings
from gradproof.examination.examiner import ALL, Examiner
from gradproof.experiments import table
from gradproof.experiments.verdict import confirmed, excluded, undecided
from gradproof.record.schema import json_line

QUESTION = "are_units_all_the_same"
SEEN = confirmed("bad-init/symmetric", "equal", where="fc", confidence="proven")
ELSEWHERE = confirmed("bad-init/symmetric", "equal", where="head", confidence="proven")
NOT = excluded("bad-init/symmetric", "they differ")


class Says:
    """Answers every question of a step with what was planted for it."""

    def __init__(self, *answers):
        self.answers = dict(enumerate(answers))

    def ask(self, limit, **request):
        if request["what"] == "extras":
            return {}
        step = int(request["specimens"][-1].rpartition("-")[2])
        return json.loads(json_line({"verdicts": [vars(v) for v in self.answers[step]], "seconds": 0.0}))

    def close(self):
        pass


def shelve(run, steps, landmarks=True):
    for step in range(steps):
        folder = run / "specimens" / f"step-{step:08d}"
        folder.mkdir(parents=True, exist_ok=True)
        label = {"step": step, "landmark": landmarks, "operations": 1, "bytes": 1, "device": "cpu"}
        (folder / "tape.json").write_text("{}")
        (folder / "label.json").write_text(json.dumps(label))


def examine(run, *answers, question=QUESTION):
    """(outcome, reason) of each step, and the last verdict on bad-init."""
    shelve(run, len(answers))
    examiner = Examiner(run, [Says(*answers)], only=[question])
    examiner.end(None, examiner.ask_all())
    return read(run)


def read(run):
    events = [json.loads(line) for line in (run / "examination.jsonl").read_text().splitlines()]
    asked = [(e["outcome"], e["reason"]) for e in events if e["event"] == "asked"]
    verdicts = [e["verdict"] for e in events if e["event"] == "verdict"]
    return asked, verdicts


def test_seen_twice_is_confirmed(tmp_path):
    asked, verdicts = examine(tmp_path, [SEEN], [SEEN])
    assert asked == [("undecided", "bad-init/symmetric (fc) was seen at 1 of 2 steps"), ("confirmed", "")]
    assert verdicts == ["undecided", "confirmed"]


def test_seen_once_is_not(tmp_path):
    asked, verdicts = examine(tmp_path, [SEEN], [], [])
    assert [outcome for outcome, _ in asked] == ["undecided", "nothing", "nothing"]
    assert "confirmed" not in verdicts


def test_an_exclusion_between_starts_again(tmp_path):
    asked, verdicts = examine(tmp_path, [SEEN], [NOT], [SEEN])
    assert [outcome for outcome, _ in asked] == ["undecided", "excluded", "undecided"]
    assert "confirmed" not in verdicts
    asked, _ = examine(tmp_path, [SEEN], [NOT], [SEEN], [SEEN])  # one step more
    assert asked[-1][0] == "confirmed"


def test_silence_and_doubt_between_do_not(tmp_path):
    """Of two players that take turns, each is seen at every other step."""
    asked, _ = examine(tmp_path, [SEEN], [], [undecided("bad-init", "too few")], [SEEN])
    assert asked[-1][0] == "confirmed"


def test_a_later_step_that_cannot_tell_takes_nothing_back(tmp_path):
    found = confirmed("axis-or-shape-error/one-row-for-all", "seen", confidence="likely", lasting=False)
    answers = [found], [undecided("axis-or-shape-error", "not finite")]
    asked, verdicts = examine(tmp_path, *answers, question="do_shapes_meet")
    assert [outcome for outcome, _ in asked] == ["confirmed", "undecided"] and verdicts == ["confirmed"]


def test_two_places_are_counted_apart(tmp_path):
    asked, verdicts = examine(tmp_path, [SEEN], [ELSEWHERE])
    assert "confirmed" not in verdicts and asked[-1][1].endswith("(head) was seen at 1 of 2 steps")


def test_what_is_seen_once_beside_what_is_certain_does_not_hide_it(tmp_path):
    asked, verdicts = examine(tmp_path, [SEEN], [SEEN, ELSEWHERE])
    assert asked[-1] == ("confirmed", "") and verdicts[-1] == "confirmed"


def test_an_examination_that_is_cut_off_goes_on_counting(tmp_path):
    examine(tmp_path, [SEEN])
    asked, verdicts = examine(tmp_path, [SEEN], [SEEN])
    assert [outcome for outcome, _ in asked] == ["undecided", "confirmed"] and verdicts[-1] == "confirmed"


def test_an_exclusion_before_the_cut_is_remembered(tmp_path):
    examine(tmp_path, [SEEN], [NOT])
    asked, verdicts = examine(tmp_path, [SEEN], [NOT], [SEEN])
    assert asked[-1][0] == "undecided" and "confirmed" not in verdicts


def test_one_step_is_enough_for_other_questions(tmp_path):
    found = confirmed(
        "axis-or-shape-error/broadcast-into-the-loss", "seen", confidence="proven", lasting=False
    )
    asked, _ = examine(tmp_path, [found], question="do_shapes_meet")
    assert asked == [("confirmed", "")]


def test_what_does_not_apply_is_written_and_not_asked_again(tmp_path):
    class Refuses(Says):
        def ask(self, limit, **request):
            return {"not_asked": "does not apply: the step has no x", "seconds": 0.0}

    shelve(tmp_path, 1)
    for _ in range(2):
        examiner = Examiner(tmp_path, [Refuses()], only=[QUESTION])
        examiner.end(None, examiner.ask_all())
    assert read(tmp_path)[0] == [("not asked", "does not apply: the step has no x")]


def test_one_step_may_show_several_causes(tmp_path):
    """Each is kept, also when one is said again; what a later step does not show any more is gone."""
    ids = [f"axis-or-shape-error/{what}" for what in ("view-for-transpose", "one-row-for-all")]
    one, two = (confirmed(id, "seen", where="fc", confidence="likely", lasting=False) for id in ids)
    for answers, left in (([[one, two]], ids), ([[one], [one, two]], ids), ([[one, two], [two]], ids[1:])):
        run = tmp_path / str(len(list(tmp_path.iterdir())))
        run.mkdir()
        examine(run, *answers, question="do_shapes_meet")
        events = [json.loads(line) for line in (run / "examination.jsonl").read_text().splitlines()]
        stands = []
        for event in events:
            stands = verdicts.standing(stands, event) if event["event"] == "verdict" else stands
        assert [said["id"] for said in stands] == left


def test_the_table_says_how_often_and_of_what():
    for question in table.QUESTIONS:
        assert 1 <= question.times <= question.enough
        assert set(question.again.split()) <= {cause.partition("/")[2] for cause in question.causes}
        assert not question.again or question.times > 1
    assert doctest.testmod(sightings).failed == 0 == doctest.testmod(verdicts).failed


@pytest.mark.parametrize(
    "device, size, free, lanes", [("cpu", 1 << 30, 0, 4), ("cuda", 1 << 20, 0, 4), ("cuda", 1 << 30, 120 << 30, 4),
                                  ("cuda", 1 << 30, 30 << 30, 2), ("cuda", 18 << 30, 120 << 30, 1)],
)  # fmt: skip
def test_a_large_step_is_shared_by_as_many_workers_as_the_gpu_has_room_for(
    device, size, free, lanes, tmp_path
):
    class Lane(Says):
        def __init__(self):
            self.shares = []

        def ask(self, limit, what, **request):
            if what == "ask":
                self.shares.append(request["share"])
            return {"free": free} if what == "room" else {"verdicts": [], "seconds": 0.0}

        def warm_up(self):
            pass

    shelve(tmp_path, 1)
    label = next(tmp_path.rglob("label.json"))
    label.write_text(json.dumps({**json.loads(label.read_text()), "device": device, "bytes": size}))
    workers = [Lane() for _ in range(4)]
    assert Examiner(tmp_path, workers).ask_all() == 0
    assert [bool(worker.shares) for worker in workers] == [True] * lanes + [False] * (4 - lanes)
    assert set(workers[0].shares) == {ALL / lanes}


@pytest.mark.parametrize("needs, outcome", [(0.2, "nothing"), (0.5, "nothing"), (0.95, "failed")])
def test_what_has_no_room_beside_other_workers_is_asked_alone(needs, outcome, tmp_path):
    rested = []

    class Lane(Says):
        def __init__(self, number):
            self.number = number

        def ask(self, limit, what, **request):
            if what == "rest":
                rested.append(self.number)
            crowded = what == "ask" and request["share"] < needs and request["question"] == QUESTION
            if crowded:
                return {"error": "OutOfMemoryError: CUDA out of memory", "seconds": 0.0}
            return {"free": 120 << 30} if what == "room" else {"verdicts": [], "seconds": 0.0}

    shelve(tmp_path, 1)
    label = next(tmp_path.rglob("label.json"))
    label.write_text(json.dumps({**json.loads(label.read_text()), "device": "cuda", "bytes": 1 << 30}))
    examiner = Examiner(tmp_path, [Lane(number) for number in range(4)])
    assert examiner.ask_all() == 0
    events = map(json.loads, (tmp_path / "examination.jsonl").read_text().splitlines())
    assert [e["outcome"] for e in events if e["event"] == "asked" and e["question"] == QUESTION] == [outcome]
    assert len(set(rested)) == (0 if needs < ALL / 4 else 3)


@pytest.mark.parametrize("complete, expected", [(False, []), (True, [("excluded", "")])])
def test_of_a_short_training_without_landmarks_the_last_step_is_asked_everything(
    tmp_path, complete, expected
):
    shelve(tmp_path, 2, landmarks=False)
    examiner = Examiner(tmp_path, [Says([NOT], [NOT])], only=[QUESTION])
    examiner.complete = complete  # a landmark may still come
    examiner.end(None, examiner.ask_all())
    assert read(tmp_path)[0] == expected
