"""The planted faults are real: they apply, give nothing away, and hurt; their healthy twins learn."""

import functools
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest

from gradproof.faults.catalogue import FAULTS, HEALTHY
from gradproof.faults.fault import SCRIPTS, Fault, Healthy, plant, read_script

FAMILIES = [
    "forward-nonfinite",
    "backward-nonfinite",
    "wrong-gradient",
    "zero-grad-error",
    "grad-accumulation-error",
    "grad-clip-misuse",
    "detached-graph",
    "missing-stop-gradient",
    "param-not-updated",
    "lr-too-high",
    "lr-too-low",
    "lr-schedule-error",
    "data-target-misaligned",
    "loss-mask-error",
    "attention-mask-error",
    "loss-activation-mismatch",
    "loss-scale-or-sign",
    "axis-or-shape-error",
    "train-eval-mode-error",
    "normalization-error",
    "low-precision-error",
    "exploding-signal",
    "vanishing-signal",
    "bad-init",
    "dead-activation",
    "input-or-target-scale",
    "data-order-or-sampling",
    "distributed-desync",
    "weights-state-error",
    "aliasing-or-inplace",
    "optimizer-config",
]
GIVE_AWAY = r"\b(?:bug|buggy|wrong|broken|fault|mistake|incorrect|oops|fixme|todo|hack|healthy|gradproof)\b"
NUMBER = r"[-+]?(?:\d[\d.]*(?:e[-+]?\d+)?|nan|inf)"


def by_name(entry):
    return entry.name


def test_every_family_is_planted_in_two_scripts_or_more():
    scripts = {family: {f.script for f in FAULTS if f.family == family} for family in FAMILIES}
    assert {f.family for f in FAULTS} == set(FAMILIES)
    assert [family for family, found in scripts.items() if len(found) < 2] == []
    assert len(FAULTS) >= 75
    assert sum(1 for h in HEALTHY if h.edits) >= 16


def test_names_are_unique_and_equivalents_are_families():
    for table in (FAULTS, HEALTHY):
        names = [entry.name for entry in table]
        assert len(set(names)) == len(names)
    for fault in FAULTS:
        assert set(fault.also) <= set(FAMILIES) - {fault.family}


def test_every_script_is_listed_as_it_stands_among_the_healthy():
    plain = sorted(h.script for h in HEALTHY if not h.edits)
    assert plain == sorted(path.stem for path in SCRIPTS.glob("*.py"))


@pytest.mark.parametrize("entry", [*FAULTS, *HEALTHY], ids=by_name)
def test_edits_apply_compile_and_give_nothing_away(entry):
    source = plant(entry)
    compile(source, entry.script, "exec")
    assert (source != read_script(entry.script)) == bool(entry.edits)
    assert re.findall(GIVE_AWAY, source, flags=re.IGNORECASE) == []


@pytest.mark.parametrize("fault", [f for f in FAULTS if f.where], ids=by_name)
def test_a_place_is_a_piece_of_the_planted_source(fault):
    source = plant(fault)
    assert [piece for piece in fault.where if piece in source]


def test_an_edit_that_does_not_occur_exactly_once_is_refused():
    missing = Healthy("x", "spirals_mlp", ("loss", 0, 1), (("no such text", ""),))
    twice = Healthy("x", "spirals_mlp", ("loss", 0, 1), (("F.relu", "F.gelu"),))
    for entry in (missing, twice):
        with pytest.raises(ValueError, match="not once"):
            plant(entry)


def last_printed(output: str, metric: str) -> float:
    """The value after the last mention of a metric: 'loss 0.3', 'loss: 0.3', 'loss=0.3'."""
    values = re.findall(rf"{re.escape(metric)}\s*[:=]?\s*({NUMBER})", output)
    assert values, f"{metric!r} was not printed:\n{output[-500:]}"
    return float(values[-1])


def hurts(fault: Fault, twin: float, planted: float) -> bool:
    """Whether the metric moved at least as far, and in the direction, that the fault says; NaN hurts."""
    change = fault.harm[1]
    return not math.isfinite(planted) or (planted - twin) / change >= 1


def test_harm_is_directed_and_nan_is_harm():
    fault = Fault("lr-too-low/x", "spirals_mlp", (), (), ("val_acc", -0.2))
    assert hurts(fault, 0.9, 0.6) and hurts(fault, 0.9, math.nan)
    assert not hurts(fault, 0.9, 0.8) and not hurts(fault, 0.6, 0.9)
    assert last_printed("step 1 loss: 2.5e-01\nstep 2 loss: nan", "loss") != 0.25


@functools.cache
def run(source: str) -> str:
    """What a script prints, run by itself on one thread, from a file because some start processes.

    Those may hang or abort when gloo's threads meet or outlive Python's: then they are run again, twice at most.
    """
    several = "torch.distributed" in source or "multiprocessing" in source
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.py"
        path.write_text(source)
        for _ in range(3 if several else 1):
            code, said, complaint = run_alone(path) if several else nursery().run(path)
            if code == 0:
                break
    assert code == 0, complaint[-2000:]
    return said


def run_alone(path: Path) -> tuple[int, str, str]:
    process = subprocess.Popen(
        [sys.executable, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"},
        start_new_session=True,
    )
    try:
        said, complaint = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGABRT)  # with the processes it has started; each says where it stood
        time.sleep(1)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        said, complaint = process.communicate()
        return 1, "", f"it did not end within a minute, and had said:\n{said}\n{complaint}"
    return process.returncode, said, complaint


NURSERY = """
import os, runpy, sys, traceback
import torch

torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)  # imports what the first optimizer imports
for line in sys.stdin:
    path = line.rstrip()
    child = os.fork()
    if not child:
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{path}.{name}", os.O_WRONLY | os.O_CREAT), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        code, sys.argv = 0, [path]
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Nursery:
    """A process that has imported torch, and forks for each script: half of a small training is that import."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", NURSERY],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def run(self, path: Path) -> tuple[int, str, str]:
        self.process.stdin.write(f"{path}\n")
        self.process.stdin.flush()
        code = int(self.process.stdout.readline())
        return code, Path(f"{path}.out").read_text(), Path(f"{path}.err").read_text()

    def close(self) -> None:
        self.process.communicate()


@functools.cache
def nursery() -> Nursery:
    return Nursery()


@pytest.fixture(scope="module", autouse=True)
def nursery_ends_with_the_module():
    yield
    if nursery.cache_info().currsize:
        nursery().close()
        nursery.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("healthy", HEALTHY, ids=by_name)
def test_a_healthy_run_learns(healthy, record_property):
    metric, low, high = healthy.good
    value = last_printed(run(plant(healthy)), metric)
    record_property("measured", f"{metric} {value:g}")
    assert low <= value <= high


@pytest.mark.slow
@pytest.mark.parametrize("fault", sorted(FAULTS, key=by_name), ids=by_name)
def test_a_fault_hurts_against_its_twin(fault, record_property):
    metric, change = fault.harm
    twin = last_printed(run(read_script(fault.script)), metric)
    planted = last_printed(run(plant(fault)), metric)
    record_property(
        "measured", f"{fault.id} | {fault.script} | {metric} | {twin:g} | {planted:g} | {change:+g}"
    )
    assert hurts(fault, twin, planted)
