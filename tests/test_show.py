"""Runs in the terminal: what a plot shows is where the numbers are, and every odd run shows something true."""

import re
import subprocess
import sys

import numpy as np
import pytest

from gradproof.cli import main
from gradproof.record.schema import STATISTICS, STATISTICS_FRAME
from gradproof.record.writer import RunWriter
from gradproof.report.plot import Curve, render_plot, sparkline
from gradproof.report.tensor import plain

ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def line(steps, values):
    return Curve("curve", np.asarray(steps), np.asarray(values, dtype=float))


def drawn(text):
    """The part of a plot right of its axis, row by row."""
    return [ESCAPE.sub("", row).partition("┤ ")[2] for row in text.splitlines() if "┤" in row]


def test_a_falling_curve_goes_from_top_left_to_bottom_right():
    rows = drawn(render_plot([line(range(100), np.linspace(5, 1, 100))], width=60, height=6))
    assert rows[0].strip() and rows[0].startswith(rows[0].strip())
    starts = [len(row) - len(row.lstrip()) for row in rows]
    assert starts == sorted(starts) and starts[-1] > starts[0] + 30


def test_one_wild_step_among_many_is_kept():
    values = np.ones(100_000)
    values[70_000] = 50
    text = render_plot([line(range(100_000), values)], width=60, height=5)
    assert text.splitlines()[0].startswith("       50 ┤") and 30 < len(drawn(text)[0]) < 40


def test_what_is_not_finite_is_marked_at_its_step_and_not_drawn_over():
    values = np.ones(10)
    values[5] = np.nan
    text = render_plot([line(range(10), values)], width=112, height=3)
    marks = next(row for row in text.splitlines() if row.startswith(" nan, inf"))
    assert marks.count("!") == 1 and 45 < marks.index("!") - 12 < 60
    middle = drawn(text)[1]
    assert " " in middle.strip(), "the line runs through the NaN"


@pytest.mark.parametrize(
    "values",
    [[], [1.0], [np.nan], [np.inf, -np.inf], [3.0, 3.0], [-1.0, 1e30], [-1e308, 1e308], [5e-324, 1e308]],
)
def test_odd_curves_are_plotted(values):
    text = render_plot([line(range(len(values)), values)], height=4)
    assert ("nothing" in text) == (not values)
    assert ("!" in text) == any(not np.isfinite(v) for v in values)


def test_steps_out_of_order_are_put_in_order():
    steps, values = np.array([5, 6, 7, 0, 1, 2]), np.array([5.0, 6, 7, 0, 1, 2])
    assert render_plot([Curve("a", steps, values)]) == render_plot([line(sorted(steps), sorted(values))])


def test_a_log_scale_is_chosen_and_said():
    assert "log scale" in render_plot([line(range(9), 10.0 ** -np.arange(9))])
    assert "log scale" not in render_plot([line(range(9), np.arange(9))])


def test_without_colour_two_curves_have_two_marks():
    two = [line(range(20), np.zeros(20)), line(range(20), np.ones(20))]
    text = render_plot(two, height=4)
    rows = drawn(text)
    assert set(rows[0]) == {"×"} and set(rows[-1]) == {"•"} and "• curve   × curve" in text
    assert "\x1b" not in text and "\x1b" in render_plot(two, color=True)


def test_sparklines():
    assert sparkline(np.array([1.0, 2.0, 3.0, np.nan])) == "▁▅█!"
    assert sparkline(np.array([])) == "" and len(sparkline(np.arange(1000.0))) == 24


@pytest.fixture
def run(tmp_path):
    """Two tensors over ten steps; the gradient of `a.weight` is not finite at step 7."""
    writer = RunWriter(tmp_path / "run", {"command": ["train.py"]})
    for step in range(10):
        tensors = [("gradient", "a.weight"), ("weight", "a.weight"), ("gradient", "b<\x1b[31m>\u202e")]
        numbers = np.array([writer.add_tensor(kind, name, shape=[2, 3]) for kind, name in tensors])
        rows = np.full((3, len(STATISTICS)), 0.0)
        rows[:, STATISTICS.index("norm")] = (np.inf if step == 7 else 1.0 + step, 5.0, 2.0)
        rows[:, STATISTICS.index("nan")] = (step == 7, 0, 0)
        writer.write_frame(STATISTICS_FRAME, step, numbers, rows)
        writer.write_step({"step": step, "loss": 10.0 - step, "lr": 0.1, "order": "zbs"})
    writer.close()
    return str(writer.path)


def show(capsys, *arguments):
    code = main(["show", *arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_show_without_a_name_lists_what_there_is(run, capsys):
    code, out, _ = show(capsys, run)
    assert code == 0 and "loss ·" in out and "10 at 0 to 1 at 9" in out
    assert "  a.weight" in out and "columns: loss, lr" in out and f"gradproof show {run}" in out


def test_show_a_tensor(run, capsys):
    code, out, _ = show(capsys, run, "a.weight")
    assert code == 0 and "a.weight · [2, 3]" in out
    assert "norm of the gradient: 10 steps" in out and "not finite at 1 steps, first 7" in out
    assert "norm of the weight" in out and "!" in out


def test_show_takes_parts_of_names_patterns_and_columns(run, capsys):
    assert "norm of the weight" in show(capsys, run, "weight")[1]
    assert "norm of the weight" in show(capsys, run, r"^a\..*t$")[1]
    assert "2 tensors match" in show(capsys, run, "a.weight|b<")[1]
    assert show(capsys, run, "lr")[1].startswith("lr ·")
    assert "has no tensor" in show(capsys, run, "(")[2]


def test_show_says_what_is_wrong_with_the_question(run, capsys):
    code, _, err = show(capsys, run, "nothing-like-it")
    assert code == 2 and "a.weight" in err and "gradproof show" in err
    code, _, err = show(capsys, run, "a.weight", "--statistic", "median")
    assert code == 2 and "absmax" in err
    code, _, err = show(capsys, run, "a.weight", "--statistic", "nan")
    assert code == 0


def test_names_are_shown_as_text(run, capsys):
    _, out, _ = show(capsys, run)
    assert "b<\\x1b[31m>\\u202e" in out and "\x1b" not in out and "\u202e" not in out
    assert plain("a\nb\tc") == "a\\nb\\tc"


def test_an_empty_run_is_shown(tmp_path, capsys):
    RunWriter(tmp_path / "run", {}).close()
    code, out, _ = show(capsys, str(tmp_path / "run"))
    assert code == 0 and "not measured" in out and "tensors: 0" in out


def test_compare_in_the_terminal(run, tmp_path, capsys):
    other = RunWriter(tmp_path / "other", {"command": ["train.py", "--lr", "3"]})
    for step in range(10):
        other.write_step({"step": step, "loss": 10.0 - min(step, 4), "order": "zbs"})
    other.close()
    assert main(["compare", run, str(other.path)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"parts from the first at +step 5", out)
    assert re.search(r"--lr +– +3", out) and "• run   × other" in out and "\x1b" not in out
    assert main(["compare", run, str(other.path), "--json"]) == 0
    assert '"apart_since": [\n    null,\n    5\n  ]' in capsys.readouterr().out


def test_looking_at_runs_needs_no_torch(run, tmp_path):
    commands = [["show", run], ["show", run, "a.weight"], ["compare", run, run]]
    commands += [["export", run, "--to", to, "--out", str(tmp_path / to)] for to in ("csv", "tensorboard")]
    code = f"import sys\nfrom gradproof.cli import main\nfor c in {commands!r}: assert main(c) == 0\n"
    code += "sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_compare_needs_two(run, capsys):
    assert main(["compare", run]) == 2 and "nothing to be compared" in capsys.readouterr().err
