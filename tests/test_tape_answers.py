"""The smaller questions a tape answers: gains, descent, digits left, and a bundle that stands alone."""

import runpy
from functools import partial

import pytest
import tape_faults
import tape_nans
import tape_steps
import torch
from torch import nn

from gradproof.errors import UserError
from gradproof.tape.bundle import write_bundle
from gradproof.tape.descent import descent_test
from gradproof.tape.gain import compare_gains, measure_gains, measure_operation_gains
from gradproof.tape.locate import find_first_bad_operation
from gradproof.tape.precision import find_digit_losses
from gradproof.tape.record import record


def names_of(model):
    return {parameter: name for name, parameter in model.named_parameters()}


def blocks_tape(scale=1.0):
    torch.manual_seed(0)
    model = tape_steps.GPT(layers=4, dropout=0.0)
    with torch.no_grad():
        model.blocks[2].f2.weight.mul_(scale)
    ids = torch.randint(0, 17, (3, 13))
    with record(names_of(model)) as tape:
        model(ids[:, :-1], ids[:, 1:]).backward()
    return tape


def test_gain_points_at_the_block_that_explodes_not_at_the_largest_norm():
    calm, wild = measure_gains(blocks_tape()), measure_gains(blocks_tape(100.0))
    assert wild.odd_one.path in ("blocks.2", "blocks.2.f2")
    change = compare_gains(calm, wild)
    assert change.path in ("blocks.2", "blocks.2.f2")
    assert max(change.after / change.before, change.before / change.after) > 10
    assert compare_gains(calm, calm).before == compare_gains(calm, calm).after


def test_gain_of_an_operation_points_at_its_line():
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    with record(names_of(model)) as tape:
        h = model(torch.randn(3, 4)) * 1e6
        h.tanh().mean().backward()
    first = measure_operation_gains(tape)[0]
    assert (first.kind, first.call) == ("mul", 0) and first.forward == pytest.approx(1e6, rel=1e-3)
    assert "test_tape_answers.py" in first.line


def test_gain_of_a_recurrent_cell_over_time():
    torch.manual_seed(0)
    cell = nn.RNNCell(3, 5, nonlinearity="relu")
    with torch.no_grad():
        cell.weight_hh.copy_(3 * torch.eye(5))
        cell.weight_ih.abs_()
    x = torch.rand(6, 2, 3)
    with record(names_of(cell)) as tape:
        h = torch.zeros(2, 5)
        for part in x:
            h = cell(part, h)
        h.sum().backward()
    gains = measure_gains(tape).over_time("")
    assert [gain.call for gain in gains] == list(range(6))
    assert gains[-1].forward > 2.5


def descent_of(where=None, wrong=None):
    model, batch = tape_faults.build(where, wrong)
    model(*batch).backward()
    return descent_test(lambda: model(*batch), dict(model.named_parameters()))


def test_descent_test_is_one_for_a_true_gradient():
    answer = descent_of()
    assert answer.right, str(answer)
    assert answer.whole.ratio == pytest.approx(1.0, abs=0.01)


def test_descent_test_points_at_the_room_of_the_fault():
    answer = descent_of(
        "block", tape_faults.BlockResidualLost
    )  # the end of layers.1: wrong for what lies before it
    assert not answer.right
    assert answer.suspect.name == "layers.1"
    assert [g.name for g in answer.groups if g.right] == ["head", "batch_norm.weights"]


def test_descent_test_does_not_call_right_what_rounding_hides():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    x, y = torch.randn(32, 4), torch.randn(32, 1)
    for offset, says in ((1e5, "not decided"), (0.0, "the loss changes as the gradient says")):
        model.zero_grad()
        loss = partial(lambda offset: (model(x) + offset - offset - y).square().mean(), offset)
        loss().backward()
        said = str(descent_test(loss, dict(model.named_parameters())))
        assert said.startswith(says), said


def test_descent_test_leaves_parameters_and_generator_alone():
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)), torch.randn(4, 3)
    model(x).sum().backward()
    before, state = model[0].weight.detach().clone(), torch.get_rng_state()
    descent_test(lambda: model(x).sum(), dict(model.named_parameters()))
    assert torch.equal(before, model[0].weight.detach())
    assert torch.equal(state, torch.get_rng_state())


def test_digits_are_lost_where_large_numbers_cancel():
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    with record(names_of(model)) as tape:
        x = model(torch.randn(3, 4))
        y = (x + 1e5) - 1e5
        y.square().mean().backward()
    worst = find_digit_losses(tape)[0]
    assert worst.operator == "sub"
    assert worst.lost > 3
    assert worst.line.file == __file__


@pytest.mark.parametrize(
    "origin",
    [
        tape_nans.LogZero,
        tape_nans.HalfOverflow,
        tape_nans.RootAtZero,
        tape_nans.AllMasked,
        tape_nans.WhereBranch,
    ],
)
def test_bundle_reproduces_the_bad_operation_alone(origin, tmp_path, capsys):
    model, batch = tape_nans.build(origin)
    with record(names_of(model)) as tape:
        model(*batch).backward()
    bad = find_first_bad_operation(tape)
    directory = write_bundle(tape, bad, tmp_path / "bundle")
    script = directory / "reproduce.py"
    assert len(script.read_text().splitlines()) < 60
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(script))
    assert f"{bad.count} results are not finite; in the run: {bad.count}" in capsys.readouterr().out


def test_bundle_of_memory_never_written_is_refused_with_a_reason(tmp_path):
    model, batch = tape_nans.build(tape_nans.UnfilledMemory)
    with record(names_of(model)) as tape:
        model(*batch).backward()
    with pytest.raises(UserError, match="cannot be bundled"):
        write_bundle(tape, find_first_bad_operation(tape), tmp_path)
