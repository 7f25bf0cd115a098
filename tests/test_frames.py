"""What a look into a running function finds, and that the function lets go of its objects afterwards all the same."""

import gc
import sys
import weakref

import torch
from torch import nn

import gradproof
from gradproof.tape.frames import locals_of


class Thing:
    pass


def test_the_variables_stay_and_what_they_held_goes():
    thing, number = Thing(), 3
    gone = weakref.ref(thing)
    found = locals_of(sys._getframe())
    assert found["thing"] is thing and found["number"] == number == 3
    del found, thing
    gc.collect()
    assert gone() is None and number == 3


def test_a_modules_variables_are_its_own():
    space = {"locals_of": locals_of, "sys": sys}
    exec("x = 1\nfound = locals_of(sys._getframe())\ny = x + 1", space)
    assert space["y"] == 2 and space["found"]["x"] == 1


def test_a_watched_function_keeps_no_tensor_of_its_first_step(tmp_path):
    model = nn.Linear(4, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradproof.watch(model, optimizer, out=tmp_path / "run"):
        for _ in range(12):
            outputs = model(torch.randn(8, 4))
            first = weakref.ref(outputs)
            optimizer.zero_grad()
            outputs.square().mean().backward()
            optimizer.step()
            del outputs
    gc.collect()
    assert first() is None
