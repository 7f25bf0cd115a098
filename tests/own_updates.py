"""Small scripts that change their parameters themselves, run as `gradproof run` runs them, in this process."""

import json
import runpy
import sys
from dataclasses import dataclass

from gradproof.experiments.table import BY_NAME, find
from gradproof.instruments.evidence import Evidence
from gradproof.probes.script import Outcome, load_script, run_program
from gradproof.record.run import Run, open_run
from gradproof.tape.label import find_specimens
from gradproof.tape.specimen import load

START = """
import json, pathlib, torch
g = torch.Generator().manual_seed(0)
X = torch.randn(96, 4, generator=g)
Y = X @ torch.tensor([[1.0], [-2.0], [0.5], [1.5]]) + 0.3
W, b = torch.randn(4, 1, generator=g), torch.zeros(1)
losses = []
def predict(x, W, b):
    return x @ W + b
def batch():
    ix = torch.randint(0, 96, (16,), generator=g)
    return X[ix], Y[ix]
"""
END = """
pathlib.Path("losses.json").write_text(json.dumps([loss.hex() for loss in losses]))
"""


@dataclass(frozen=True)
class Watched:
    outcome: Outcome
    run: Run
    losses: list[str]  # as hexadecimal: to the bit
    plain: list[str]  # those of the same script without gradproof

    def ask(self, name, steps=(1, 2, 3, 4, 10)):
        """The last verdicts of a question on some taped steps, and what was noted beside them."""
        memory, answers, noted = {}, [], {}
        for path in find_specimens(self.outcome.path):
            specimen = load(path)
            if specimen.step in steps:
                evidence = Evidence(specimen, memory, noted=noted)
                answers = list(find(BY_NAME[name])(evidence))
        return answers, noted


def watch_script(tmp_path, monkeypatch, text, **options):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    (tmp_path / "train.py").write_text(text)
    runpy.run_path("train.py")
    plain = read_losses(tmp_path)
    options = {"examine": 0, "quiet": True, **options}
    outcome = run_program(load_script("train.py"), [], out=str(tmp_path / "run"), **options)
    assert outcome.error is None and outcome.broken is None
    return Watched(outcome, open_run(outcome.path), read_losses(tmp_path), plain)


def read_losses(path):
    file = path / "losses.json"
    return json.loads(file.read_text()) if file.exists() else []
