"""What a tape asks of Python's garbage collector, and what it leaves as it was."""

import gc
import json

import pytest
import torch
from torch import nn

from gradproof.probes.capture import capture
from gradproof.tape.codec import Encoder
from gradproof.tape.operations import Line, Ref, references
from gradproof.tape.pins import Pins
from gradproof.tape.record import Recorder
from gradproof.tape.tensors import fingerprint


@pytest.fixture(autouse=True)
def thresholds():
    before = gc.get_threshold()
    yield before
    gc.set_threshold(*before)


def taped(step=lambda: None):
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), torch.randn(3, 4)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    recorder = Recorder({p: n for n, p in model.named_parameters()})
    recorder.start()
    model(x).square().mean().backward()
    step()
    optimizer.step()
    recorder.stop()
    assert not recorder.tape.broken
    return recorder, capture(recorder.state, 1, {"": model}, [optimizer])


def test_full_collections_are_rare_while_a_step_is_taped(thresholds):
    seen = []
    taped(lambda: seen.append(gc.get_threshold()))
    assert seen[0][:2] == thresholds[:2] and seen[0][2] == 10 * thresholds[2]
    assert gc.get_threshold() == thresholds


def test_what_the_script_says_to_the_collector_meanwhile_stays():
    taped(lambda: gc.set_threshold(500, 5, 5))
    assert gc.get_threshold() == (500, 5, 5)


def test_a_slot_has_one_reference_of_each_kind_and_a_line_one_object():
    recorder, _ = taped()
    named: dict[object, set[int]] = {}
    for operation in recorder.tape.operations:
        for ref in references((operation.args, operation.kwargs, operation.results)):
            named.setdefault(ref, set()).add(id(ref))
        if operation.line is not None:
            named.setdefault(operation.line, set()).add(id(operation.line))
    assert {type(what) for what in named} == {Ref, Line}
    assert all(len(objects) == 1 for objects in named.values())


def test_a_tape_spelt_in_pieces_is_the_tape_spelt_at_once():
    _, specimen = taped()
    for value in (
        specimen.tape,
        specimen.modules,
        specimen.optimizer_records,
        [[1, 2.5], [], None],
        {"a": (1,)},
    ):
        assert Encoder().text(value) == json.dumps(Encoder().encode(value), allow_nan=False)


def test_a_pinned_address_is_not_used_twice():
    pins, known = Pins(), torch.zeros(3)
    tensor, storage = known._cdata, known.untyped_storage()._cdata
    pins.tensor(known)
    pins.storage(known.untyped_storage())
    del known
    others = [torch.zeros(3) for _ in range(50)]
    assert tensor not in {other._cdata for other in others}
    assert storage not in {other.untyped_storage()._cdata for other in others}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_many_numbers_have_the_fingerprint_of_their_sums(dtype):
    numbers = [torch.tensor(value, dtype=dtype) for value in (3, 5, -7)]
    rows = [number.reshape(1) for number in numbers]
    assert torch.equal(fingerprint(numbers), fingerprint(rows))
    assert fingerprint(numbers[:1]).data_ptr() != numbers[0].data_ptr()  # it may change before the tape ends
