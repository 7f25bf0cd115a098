"""Planted origins of NaN and Inf are named by operator, module and line; healthy infinities are silent."""

import math

import pytest
import tape_nans
import torch
from torch import nn

from gradproof.tape.locate import find_first_bad_operation
from gradproof.tape.record import record


def names_of(model):
    return {parameter: name for name, parameter in model.named_parameters()}


def taped(model, batch):
    with record(names_of(model)) as tape:
        loss = model(*batch)
        loss.backward()
    assert not tape.broken
    return tape, float(loss.detach())


@pytest.mark.filterwarnings("ignore:var")
@pytest.mark.parametrize("origin", tape_nans.FORWARD + tape_nans.BACKWARD, ids=lambda c: c.__name__)
def test_first_bad_operation_is_named_by_operator_module_and_line(origin):
    model, batch = tape_nans.build(origin)
    tape, loss = taped(model, batch)
    unwritten = origin in (tape_nans.UnfilledMemory, tape_nans.UnfilledCache)
    if origin in tape_nans.BACKWARD:
        assert math.isfinite(loss), "planted for the backward"
    elif not unwritten:
        assert not math.isfinite(loss)
    bad = find_first_bad_operation(tape)
    file, line = tape_nans.marked_line(origin)
    assert (bad.operator, bad.module, bad.line.file, bad.line.number) == (
        tape_nans.OPERATORS[origin], "bad", file, line,
    )  # fmt: skip
    assert bad.phase == ("backward" if origin in tape_nans.BACKWARD else "forward")
    assert bad.reaches == ("the loss" if origin in tape_nans.FORWARD else bad.reaches)
    assert bad.reaches != "the loss" or origin in tape_nans.FORWARD
    assert bad.kind == ("memory never written" if unwritten else "operation")
    assert str(line) in str(bad)


ONE_ROW = [
    tape_nans.LogZero, tape_nans.ZeroOverZero, tape_nans.HalfOverflow, tape_nans.AllMasked, tape_nans.TinyRms,
    tape_nans.RootAtZero, tape_nans.NormAtZero, tape_nans.HandWritten,
]  # fmt: skip


@pytest.mark.parametrize("origin", ONE_ROW, ids=lambda c: c.__name__)
def test_bad_value_is_followed_to_its_batch_row(origin):
    tape, _ = taped(*tape_nans.build(origin))
    assert f"batch row {tape_nans.BAD_ROW}" in find_first_bad_operation(tape).rows


def test_bad_row_in_the_data():
    tape, _ = taped(*tape_nans.build(nn.Identity, bad_row=True))
    bad = find_first_bad_operation(tape)
    assert (bad.kind, bad.where, bad.count) == ("data", (tape_nans.BAD_ROW, 1, 3), 1)
    assert f"row {tape_nans.BAD_ROW}" in bad.rows


def test_parameter_that_was_bad_before_the_step():
    model, batch = tape_nans.build(nn.Identity)
    with torch.no_grad():
        model.after.qkv.weight[3, 2] = math.inf
    tape, _ = taped(model, batch)
    bad = find_first_bad_operation(tape)
    assert (bad.kind, bad.where) == ("parameter", (3, 2))
    assert "after.qkv.weight" in bad.why


@pytest.mark.parametrize(
    "origin", [tape_nans.LogZero, tape_nans.ZeroOverZero, tape_nans.AllMasked], ids=lambda c: c.__name__
)
def test_what_has_spoiled_the_weights_is_named_where_it_happens_again(origin):
    model, batch = tape_nans.build(origin)
    with torch.no_grad():
        model.after.qkv.weight.fill_(math.nan)
    bad = find_first_bad_operation(taped(model, batch)[0])
    assert (bad.kind, bad.operator, bad.module) == ("operation", tape_nans.OPERATORS[origin], "bad")
    assert bad.line.number == tape_nans.marked_line(origin)[1] and "after.qkv.weight" in bad.notes[0]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_spoiled_weights_make_everything_behind_them_bad_and_nothing_else_is_named(value):
    model, batch = tape_nans.build(nn.Identity)
    with torch.no_grad():
        model.after.qkv.weight.fill_(value)
    assert find_first_bad_operation(taped(model, batch)[0]).kind == "parameter"


@pytest.mark.parametrize("foreach", [False, True])
def test_adam_without_epsilon_is_found_in_the_optimizer_step(foreach):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.Adam(model.parameters(), eps=0.0, foreach=foreach)
    x = torch.randn(5, 3)
    x[:, 1] = 0.0  # a feature that is always zero: its weights have no gradient
    with record(names_of(model)) as tape:
        model(x).square().mean().backward()
        optimizer.step()
    bad = find_first_bad_operation(tape)
    assert bad.phase == "optimizer"
    assert "div" in bad.operator
    assert bad.module == "0.weight"
    assert bad.line.file == __file__
    assert "after the optimizer's step" in bad.reaches


@pytest.mark.parametrize("healthy", tape_nans.HEALTHY, ids=lambda c: c.__name__)
def test_harmless_infinities_are_silent(healthy):
    tape, loss = taped(*tape_nans.build(healthy))
    assert math.isfinite(loss)
    assert find_first_bad_operation(tape) is None


def test_forward_run_again_alone_is_enough_for_a_bad_output():
    model, (ids, features, _) = tape_nans.build(tape_nans.LogZero)
    stem = nn.ModuleDict({"tok": model.tok, "bad": model.bad})
    stem.forward = lambda ids, features: stem["bad"](stem["tok"](ids) + features)
    with record(names_of(stem)) as tape, torch.no_grad():
        stem(ids, features)
    bad = find_first_bad_operation(tape)
    assert (bad.operator, bad.module, bad.reaches) == ("log", "bad", "the model's output")
    with record(names_of(stem)) as tape, torch.no_grad():
        stem["tok"](ids)
    assert find_first_bad_operation(tape) is None


def test_overflow_before_a_mask_is_not_blamed_on_the_softmax():
    torch.manual_seed(0)
    q = nn.Linear(4, 4)
    with record(names_of(q)) as tape:
        h = 300 * q(torch.randn(1, 3, 4) + 1).abs() + 100
        scores = h.half() @ h.half().mT
        mask = torch.ones(3, 3, dtype=torch.bool).triu(1)
        scores.masked_fill(mask, -math.inf).float().softmax(-1).sum().backward()
    assert find_first_bad_operation(tape).operator == "bmm"


def test_mask_that_reaches_the_loss_is_named():
    torch.manual_seed(0)
    head = nn.Linear(4, 5)
    with record(names_of(head)) as tape:
        logits = head(torch.randn(3, 4)).masked_fill(torch.arange(5) == 2, -math.inf)
        nn.functional.cross_entropy(logits, torch.tensor([0, 2, 1])).backward()
    bad = find_first_bad_operation(tape)
    assert bad.operator == "nll_loss_forward"
    assert bad.reaches == "the loss"


def test_token_behind_a_bad_value_is_named():
    torch.manual_seed(0)
    tok = nn.Embedding(7, 4)
    with torch.no_grad():
        tok.weight[5] = 300.0
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    with record(names_of(tok)) as tape:
        tok(ids).exp().mean().backward()
    bad = find_first_bad_operation(tape)
    assert bad.operator == "exp"
    assert "batch row 1" in bad.rows and "positions 1" in bad.rows and "token 5" in bad.rows


def test_scaled_overflow_says_that_the_step_is_skipped():
    model = nn.Linear(4, 4)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    with record(names_of(model)) as tape:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(torch.randn(3, 4)).square().sum()
        scaler.scale(loss).backward()
    bad = find_first_bad_operation(tape)
    assert bad.scaled and bad.phase == "backward"
