"""gradproof.h: it compiles everywhere, its numbers are torch's, its run is a run, and it never ends a program."""

import ctypes
import json
import locale
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from c_programs import DTYPES, C, Program, compiled, library, needs_a_compiler
from safetensors import safe_open

from gradproof.cli import main
from gradproof.commands.header import HEADER
from gradproof.diagnosis.ranking import diagnose
from gradproof.errors import plain
from gradproof.kernels.tensor_stats import COLUMNS, look_closely
from gradproof.record.run import open_run
from gradproof.record.schema import FORMAT, STATISTICS, STEP_COLUMNS

ALL = r"""
#include "gradproof.h"

int main(int argc, char **argv) {
    float w[4] = {1, 2, 3, 4}, dw[4] = {0, 0, 1, 2}, x[6] = {0}, m[4] = {0};
    int tokens[2] = {1, 2};
    gp_run *run = gp_open(argc > 1 ? argv[1] : "run", 2);
    gp_command(run, argc, argv);
    gp_tensor(run, GP_WEIGHT, "w", w, GP_F32, gp_2d(2, 2));
    gp_tensor(run, GP_GRADIENT, "w", dw, GP_F32, gp_2d(2, 2));
    gp_tensor(run, GP_ADAM_M, "w", m, GP_F32, gp_2d(2, 2));
    gp_tensor(run, GP_ACTIVATION, "x", x, GP_F32, gp_3d(1, 2, 3));
    gp_tensor(run, GP_ACTIVATION_GRADIENT, "x", x, GP_F32, gp_4d(1, 1, 2, 3));
    gp_tensor(run, GP_BATCH, "tokens", tokens, GP_I32, gp_1d(2));
    gp_updates(run, NULL);
    for (int step = 0; step < 5; step++) {
        gp_zeroed(run);
        gp_backward(run);
        if (gp_measures(run) && step == 2) gp_dump(run, "step.safetensors");
        gp_clipped(run, 2.5, 1);
        gp_will_update(run);
        w[0] += 0.5f;
        gp_step(run, 1.0 / (step + 1), 0.1);
    }
    if (gp_path(run)) puts(gp_path(run));
    gp_close(run);
    return 0;
}
"""

COMPILERS = {
    "c99": (C, ".c"),
    "c99 without optimisation": ((*C, "-O0"), ".c"),
    "c99 -Ofast": ((*C, "-Ofast"), ".c"),
    "c11": (("cc", "-std=c11", "-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Werror", "-O2"), ".c"),
    "c++": (("c++", "-Wall", "-Wextra", "-Werror"), ".cpp"),
    "c++11": (("c++", "-std=c++11", "-pedantic", "-Wall", "-Wextra", "-Werror", "-O2"), ".cpp"),
}


@pytest.fixture(autouse=True)
def compiler():
    needs_a_compiler()


@pytest.fixture(scope="module")
def lib(tmp_path_factory):
    needs_a_compiler()
    return library(tmp_path_factory.mktemp("lib"), "-O2")


@pytest.mark.parametrize("name", COMPILERS)
def test_it_compiles_without_a_warning_and_writes_a_run(name, tmp_path):
    flags, suffix = COMPILERS[name]
    program = compiled(tmp_path, ALL, compiler=flags, suffix=suffix)
    done = subprocess.run([str(program)], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "run\n", "")
    run = open_run(tmp_path / "run")
    assert len(run) == 5 and not run.notes and run.by_hand
    assert run.frames.steps.tolist() == [0, 2, 4] and not run.notes
    assert run.info["command"] == [str(program)] and run.info["ended"] >= run.info["began"]


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("nvcc"), reason="there is no nvcc here")
def test_it_compiles_under_nvcc(tmp_path):
    on_device = ALL.replace(
        "gp_tensor(run, GP_WEIGHT", "gp_device_stream(run, 0), gp_device_tensor(run, GP_WEIGHT"
    )
    for number, source in enumerate((ALL, on_device)):
        place = tmp_path / str(number)
        place.mkdir()
        warnings = ("-Werror", "all-warnings", "-Xcompiler", "-Wall,-Wextra")
        compiled(place, source, compiler=("nvcc", *warnings), suffix=".cu")


@pytest.mark.parametrize("flags", [["-O2"], ["-Ofast"]], ids=" ".join)
def test_two_files_of_a_program_may_include_it(flags, tmp_path):
    (tmp_path / "other.c").write_text(
        '#include "gradproof.h"\nvoid watch(gp_run *run, float *w) '
        '{ gp_tensor(run, GP_WEIGHT, "w", w, GP_F32, gp_1d(4)); }\n'
    )
    source = (
        '#include "gradproof.h"\nvoid watch(gp_run *run, float *w);\nint main(void) { float w[4] = {0}; '
        'gp_run *run = gp_open("run", 1); watch(run, w); gp_step(run, 1, 1); gp_close(run); return 0; }\n'
    )
    program = compiled(tmp_path, source, *flags, str(tmp_path / "other.c"))
    subprocess.run([str(program)], cwd=tmp_path, check=True)
    assert open_run(tmp_path / "run").table("weight", "zero").values.tolist() == [[4]]


# ---- statistics ----

MEASURED = ("count", "nan", "inf", "zero", "subnormal", "min", "max", "sum", "sumsq")


def measured(lib, tensor, before=None):
    out = (ctypes.c_double * len(MEASURED))()
    old = before.data_ptr() if before is not None else None
    lib.x_measure(tensor.data_ptr(), old, DTYPES[str(tensor.dtype)[6:]], tensor.numel(), out)
    return dict(zip(MEASURED, out, strict=True))


def assert_same(found, tensor):
    """Counts and ends exactly; sums to what float32 can hold of the sum of magnitudes."""
    want = dict(zip(COLUMNS, look_closely(tensor.reshape(1, -1))[0].tolist(), strict=True))
    for name in ("count", "nan", "inf", "zero", "subnormal", "min", "max"):
        assert found[name] == want[name], (name, found[name], want[name])
    finite = tensor.double().nan_to_num(0, 0, 0)
    assert abs(found["sum"] - want["sum"]) <= 1e-6 * finite.abs().sum().item()
    assert abs(found["sumsq"] - want["sumsq"]) <= 1e-6 * want["sumsq"]


def odd_values(dtype):
    """What tensors hold in bad hours, by name."""
    torch.manual_seed(0)
    info = torch.finfo(dtype)
    x = torch.randn(5000, dtype=torch.float64)
    some = {"normal": x, "shifted": x * 1e-3 + 7, "zeros": x * 0, "relu": x.clamp_min(0), "empty": x[:0]}
    some |= {f"{n} entries": x[:n] for n in (1, 7, 1023, 1024, 1025, 2048)}
    some["tiny"] = x * info.tiny * 4  # some of them subnormal
    some["smallest"] = torch.full((3000,), info.smallest_normal / 2, dtype=torch.float64)
    most = (
        1e150 if dtype is torch.float64 else 0.9 * info.max
    )  # there is nothing wider to square a float64 in
    some["huge"] = x.clamp(-1, 1) * most
    some["all nan"] = torch.full((2000,), torch.nan, dtype=torch.float64)
    some["one nan"] = x.clone().index_fill_(0, torch.tensor(3333), torch.nan)
    some["infinities"] = (
        x.clone()
        .index_fill_(0, torch.tensor([0, 1500]), torch.inf)
        .index_fill_(0, torch.tensor([4999]), -torch.inf)
    )
    some["large beside small"] = torch.cat((x * 1e-6, x[:3] * 1e3))
    return {name: values.to(dtype) for name, values in some.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_statistics_are_those_of_the_definition(lib, dtype):
    for name, tensor in odd_values(dtype).items():
        try:
            assert_same(measured(lib, tensor), tensor)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


def test_every_float16_and_bfloat16_is_read_right(lib):
    bits = torch.arange(65536, dtype=torch.int32).to(torch.uint16)
    for dtype in (torch.float16, torch.bfloat16):
        values = bits.view(dtype)
        for start in range(0, 65536, 4096):  # in pieces: the sum over all of them is of the largest alone
            assert_same(measured(lib, values[start : start + 4096]), values[start : start + 4096])


def test_statistics_survive_fast_math_and_a_plain_processor(tmp_path):
    """-Ofast takes every number to be finite; without AVX2 another loop runs."""
    for number, flags in enumerate((["-Ofast"], ["-O2", "-DGP__NO_WIDE"], ["-O0"])):
        place = tmp_path / str(number)
        place.mkdir()
        lib = library(place, *flags)
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            for name, tensor in odd_values(dtype).items():
                if flags == ["-Ofast"] and name in ("tiny", "smallest"):
                    continue  # it may switch the processor to flushing subnormal numbers
                assert_same(measured(lib, tensor), tensor)
        torch.set_flush_denormal(False)  # and back


def test_a_change_is_measured_as_one(lib):
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        before = torch.randn(3000).to(dtype)
        after = (before + 1e-2 * torch.randn(3000)).to(dtype)
        after[:100] = before[:100]
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        assert_same(measured(lib, after, before), after.to(wide) - before.to(wide))
        assert measured(lib, before, before)["zero"] == 3000


# ---- the run ----


def test_what_is_written_reads_back(lib, tmp_path):
    torch.manual_seed(0)
    w, dw = torch.randn(40, 30), torch.randn(40, 30)
    program = Program(lib, tmp_path / "run", every=2)
    program.tensor("weight", "fc", w)
    program.tensor("gradient", "fc", dw)
    program.updates(None)
    kept = []
    for step in range(6):
        program.mark(b"z")
        program.mark(b"b")
        program.clipped(3.5, 1.0)
        program.mark(b"s")
        kept.append(w.clone())
        w.sub_(0.1 * dw)
        program.step(2.0 - step / 10, 0.1)
    program.close()
    run = open_run(tmp_path / "run")
    assert run.notes == [] and run.info["statistics"] == list(STATISTICS)
    assert (tmp_path / "run" / "steps.csv").read_text().startswith(",".join(STEP_COLUMNS) + "\n")
    assert run.steps["step"].tolist() == list(range(6)) and set(run.steps["order"]) == {"zbcs"}
    np.testing.assert_allclose(run.steps["loss"], 2.0 - np.arange(6) / 10, rtol=1e-8)
    assert run.steps["depth"].tolist() == [2, 0, 2, 0, 2, 0]
    assert run.seen["grad_norm"].tolist() == [True, False] * 3 and run.seen["clip_limit"].all()
    assert run.steps["grad_norm"][0] == pytest.approx(dw.norm().item(), rel=1e-6)
    assert run.steps["weight_norm"][4] == pytest.approx(
        kept[4].norm().item(), rel=1e-6
    )  # as the forward used it
    assert run.steps["update_norm"][4] == pytest.approx(0.1 * dw.norm().item(), rel=1e-5)
    for statistic, want in (("mean", dw.mean()), ("std", dw.std(correction=0)), ("absmax", dw.abs().max())):
        assert run.series("gradient", "fc", statistic)[1][0] == pytest.approx(want.item(), rel=1e-5, abs=1e-7)
    (parameter,) = run.info["parameters"]
    assert parameter["changed"] and parameter["gradient"] and parameter["shape"] == [40, 30]


def test_without_will_update_gp_step_measures_what_it_finds(lib, tmp_path):
    w = torch.ones(10)
    program = Program(lib, tmp_path / "run")
    program.tensor("weight", "w", w)
    program.updates("w")
    for _ in range(4):
        w += 1
        program.step(1.0, 0.1)
    program.close()
    run = open_run(tmp_path / "run")
    assert run.series("weight", "w", "max")[1].tolist() == [2, 3, 4, 5]
    assert run.series("update", "w", "max")[0].tolist() == [
        1,
        2,
        3,
    ]  # what the first step changed is not known
    assert run.series("update", "w", "max")[1].tolist() == [1, 1, 1]


def test_the_first_loss_that_is_not_finite_is_measured_whatever_the_schedule(lib, tmp_path):
    dw = torch.ones(10)
    program = Program(lib, tmp_path / "run", every=100)
    program.tensor("gradient", "fc", dw)
    for step in range(30):
        dw[3] = float("nan") if step >= 20 else 1.0
        program.step(float("nan") if step >= 20 else 1.0, 0.1)
    program.close()
    run = open_run(tmp_path / "run")
    assert run.frames.steps.tolist() == [0, 20] and run.series("gradient", "fc", "nan")[1].tolist() == [0, 1]
    found = diagnose(run).causes[0]
    assert found.family == "forward-nonfinite" and found.step == 20 and "gradient of fc" in found.where


def test_every_command_reads_it(lib, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        dw = torch.randn(10, 10)
        program = Program(lib, Path("runs") / name)
        program.tensor("gradient", "fc", dw)
        for step in range(20):
            program.step(1 / (step + 1), 0.1)
        program.close()
    for command in (
        "diagnose runs/a",
        "diagnose runs/a --json",
        "report runs/a",
        "report runs/a runs/b",
        "show runs/a",
        "compare runs/a runs/b",
        "export runs/a --to csv",
    ):
        assert main(command.split()) == 0, command
    said = capsys.readouterr().out
    assert "losses, 1 gradients; no weights, no updates, no activations" in " ".join(said.split())
    assert "gradproof check-dump" in said
    assert (tmp_path / "runs" / "a" / "report.html").stat().st_size > 10_000


def test_a_killed_program_loses_at_most_the_row_in_flight(tmp_path):
    source = (
        '#include "gradproof.h"\nint main(void) { float w[64] = {0}; gp_run *run = gp_open("run", 1);\n'
        'gp_tensor(run, GP_WEIGHT, "w", w, GP_F32, gp_1d(64));\n'
        'for (int i = 0;; i++) { gp_step(run, 1, 1); printf("%d\\n", i); fflush(stdout); } }\n'
    )
    program = compiled(tmp_path, source)
    with subprocess.Popen([str(program)], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if int(line) > 300:
                break
        process.send_signal(signal.SIGKILL)
        last = max([int(line), *(int(rest) for rest in process.stdout if rest.endswith("\n"))])
    run = open_run(tmp_path / "run")
    assert len(run) >= last + 1 and len(run.frames) >= last + 1
    assert "ended" not in run.info and run.tensors[0]["name"] == "w"


def test_two_runs_never_share_a_directory(lib, tmp_path):
    (tmp_path / "run").mkdir()  # an empty one is taken
    for _ in range(3):
        program = Program(lib, f"{tmp_path}/run/")
        program.step(1.0, 1.0)
        program.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run", "run-2", "run-3"]


def test_a_forked_child_is_not_recorded(lib, tmp_path):
    program = Program(lib, tmp_path / "run")
    child = os.fork()
    if child == 0:
        program.step(9.0, 1.0)
        os._exit(0)
    os.waitpid(child, 0)
    program.step(1.0, 1.0)
    program.close()
    assert open_run(tmp_path / "run").steps["loss"].tolist() == [1.0]


# ---- what goes wrong ----


def test_a_full_disk_costs_one_line(tmp_path):
    source = (
        '#include "gradproof.h"\n'
        "int main(void) { float x[4000] = {0}; struct rlimit limit = {8000, 8000}; setrlimit(RLIMIT_FSIZE, &limit);\n"
        'gp_run *run = gp_open("run", 100000); gp_tensor(run, GP_WEIGHT, "x", x, GP_F32, gp_1d(4000));\n'
        'gp_dump(run, "step.safetensors"); for (int i = 0; i < 5000; i++) gp_step(run, 1, 1);\n'
        'gp_close(run); puts("trained"); return 0; }\n'
    )
    program = compiled(tmp_path, source)
    done = subprocess.run([str(program)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "trained\n"
    assert ["the dump" in line for line in done.stderr.splitlines()] == [True, False]
    assert done.stderr.count("training goes on") == 2 and not list(tmp_path.glob("step*"))
    assert 20 < len(open_run(tmp_path / "run")) < 400


@pytest.mark.parametrize("tensors", [1, 40])
def test_the_file_of_statistics_has_a_bound(tmp_path, tensors):
    """What is rare later on is whole at the beginning; a NaN is measured while one frame has room."""
    source = (
        '#include "gradproof.h"\nint main(void) { static float x[40][4]; char name[9]; int i;\n'
        'gp_run *run = gp_open("run", 1); for (i = 0; i < TENSORS; i++) { snprintf(name, 9, "x%d", i);\n'
        "gp_tensor(run, GP_WEIGHT, name, x[i], GP_F32, gp_1d(4)); }\n"
        "for (i = 0; i < 3000; i++) gp_step(run, 1, 1);\ngp_close(run);\nreturn 0; }\n"
    )
    program = compiled(tmp_path, source, "-DGP_MOST_FRAMES=8400.0", f"-DTENSORS={tensors}")
    done = subprocess.run([str(program)], cwd=tmp_path, capture_output=True, text=True)
    run = open_run(tmp_path / "run")
    steps = run.frames.steps.tolist()
    assert done.returncode == 0 and done.stderr == "" and run.notes == [] and len(run) == 3000
    assert (tmp_path / "run" / "tensors.bin").stat().st_size <= 8400
    if tensors == 1:  # of 84 bytes each: 25 fill a quarter
        assert steps[:26] == list(range(26)) and steps[26:40] == list(range(26, 54, 2)) and steps[-1] > 1000
        assert "frames_ended" not in run.info and run.info["schedule"] != "every 1 steps"
    else:  # of which three have room
        assert len(steps) == 3 and run.info["frames_ended"] > steps[-1]


def test_a_place_that_cannot_be_written_costs_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    program = compiled(tmp_path, ALL)
    done = subprocess.run([str(program), "file/run"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stdout
    assert done.stderr.count("\n") == 1 and "cannot make the directory file/run" in done.stderr


def test_what_makes_no_sense_is_said_and_left_out(lib, tmp_path, capfd):
    w = torch.zeros(4)
    program = Program(lib, tmp_path / "run")
    program.tensor("weight", "good", w)
    program.tensor_at("weight", "null", None, 0, [4])
    program.tensor_at("weight", "", w.data_ptr(), 0, [4])
    program.tensor_at("weight", "negative", w.data_ptr(), 0, [-4])
    program.tensor_at("weight", "many", w.data_ptr(), 0, [1] * 9)
    program.tensor_at("weight", "odd", w.data_ptr(), 77, [4])
    program.tensor_at("weight", "whole", w.data_ptr(), DTYPES["int32"], [4])
    program.tensor_at("weight", "good", w.data_ptr(), 0, [2])
    program.updates("stranger")
    program.step(1.0, 1.0)
    program.close()
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 8 and all(line.startswith("gradproof: ") for line in lines)
    for word in (
        "NULL",
        "no name",
        "negative",
        "dimensions",
        "dtype",
        "batches only",
        "another shape",
        "stranger",
    ):
        assert any(word in line for line in lines), word
    assert [t["name"] for t in open_run(tmp_path / "run").tensors] == ["good"]


def test_nothing_is_done_for_no_run(lib, capfd):
    program = Program(lib, "")
    assert not program.run
    program.tensor("weight", "w", torch.zeros(4))
    program.mark(b"s")
    program.step(1.0, 1.0)
    program.dump("nowhere.safetensors")
    program.close()
    assert capfd.readouterr().err.count("\n") == 1 and not os.path.exists("nowhere.safetensors")


@pytest.mark.parametrize(
    "name", [b'quote"back\\slash', b"new\nline\x01", "Gewicht ö ✓ 🙂".encode(), b"bad \xff\xc3( utf"]
)
def test_any_name_is_json(lib, tmp_path, name):
    w = torch.zeros(4)
    program = Program(lib, tmp_path / "run")
    program.tensor("weight", name, w)
    program.dump(tmp_path / "step.safetensors")
    program.step(1.0, 1.0)
    program.close()
    want = name.decode(errors="replace").replace("\ufffd", "?")
    assert open_run(tmp_path / "run").tensors[0]["name"] == plain(want)
    with safe_open(tmp_path / "step.safetensors", "pt") as dump:
        assert list(dump.keys()) == [f"weights/{want}"]


def test_a_decimal_comma_does_no_harm(tmp_path):
    commas = [name for name in ("de_DE.UTF-8", "fr_FR.UTF-8", "de_DE") if _is_installed(name)]
    if not commas:
        pytest.skip("no locale with a decimal comma is installed")
    chosen = f'setlocale(LC_ALL, "{commas[0]}"); gp_run *run'
    source = "#include <locale.h>\n" + ALL.replace("gp_run *run", chosen, 1)
    subprocess.run([str(compiled(tmp_path, source))], cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
    assert open_run(tmp_path / "run").steps["lr"].tolist() == [0.1] * 5


def _is_installed(name):
    before = locale.setlocale(locale.LC_NUMERIC)
    try:
        locale.setlocale(locale.LC_NUMERIC, name)
    except locale.Error:
        return False
    locale.setlocale(locale.LC_NUMERIC, before)
    return True


# ---- the dump ----


def test_a_dump_is_what_was_there_before_the_update(lib, tmp_path):
    torch.manual_seed(0)
    tensors = {
        ("weight", "a"): torch.randn(3, 5),
        ("gradient", "a"): torch.randn(3, 5).double(),
        ("output", "x"): torch.randn(2, 3, 4).bfloat16(),
        ("output_gradient", "x"): torch.randn(2, 3, 4).half(),
        ("batch", "tokens"): torch.randint(0, 9, (2, 3)).int(),
        ("batch", "targets"): torch.randint(0, 9, (2, 3)),
        ("batch", "bytes"): torch.randint(0, 9, (7,)).to(torch.uint8),
        ("weight", "nothing"): torch.zeros(0, 4),
    }
    folders = {"weight": "weights", "gradient": "gradients", "output": "activations", "batch": "batch"}
    folders["output_gradient"] = "activation_gradients"
    program = Program(lib, tmp_path / "run")
    for (kind, name), tensor in tensors.items():
        program.tensor(kind, name, tensor)
    program.step(9.0, 1.0)
    want = {f"{folders[kind]}/{name}": tensor.clone() for (kind, name), tensor in tensors.items()}
    program.dump(tmp_path / "step.safetensors")
    program.mark(b"s")
    tensors["weight", "a"].zero_()
    assert not (tmp_path / "step.safetensors").exists()  # its loss is not known yet
    program.step(2.5, 0.001)
    with safe_open(tmp_path / "step.safetensors", "pt") as dump:
        assert set(dump.keys()) == set(want)
        for name, tensor in want.items():
            found = dump.get_tensor(name)
            assert found.dtype == tensor.dtype and torch.equal(found, tensor), name
        facts = dump.metadata()
    assert facts.pop("format") == "gradproof-dump-1" and facts.pop("byte_order") == "little"
    assert {name: float(text) for name, text in facts.items()} == {"step": 1, "loss": 2.5, "lr": 0.001}
    program.close()
    assert list(tmp_path.glob("*.tmp")) == []


def test_a_dump_that_cannot_be_written_costs_one_line(lib, tmp_path, capfd):
    w = torch.zeros(4)
    program = Program(lib, tmp_path / "run")
    program.tensor("weight", "w", w)
    program.dump(tmp_path / "missing" / "step.safetensors")
    program.step(1.0, 1.0)
    program.dump(tmp_path / "other.safetensors")
    program.tensor("gradient", "w", w)
    program.step(1.0, 1.0)
    program.dump(tmp_path / "late.safetensors")
    program.close()  # no step followed
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 3 and "missing" in lines[0] and "named between" in lines[1]
    assert "no gp_step followed" in lines[2] and len(open_run(tmp_path / "run")) == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run"]


def test_a_dump_after_the_update_is_doubted(lib, tmp_path, capfd):
    program = Program(lib, tmp_path / "run")
    program.tensor("weight", "w", torch.zeros(4))
    program.mark(b"s")
    program.dump(tmp_path / "step.safetensors")
    assert "were the weights those of the forward" in capfd.readouterr().err
    program.close()


def test_the_command_prints_where_the_header_is(capsys):
    assert main(["header"]) == 0
    path = Path(capsys.readouterr().out.strip())
    assert path == HEADER and path.read_text().startswith("/* gradproof.h")


def test_the_header_writes_what_the_reader_reads():
    """The one place where the format is spelt twice."""
    text = HEADER.read_text()
    assert f"#define GP__FORMAT {FORMAT} " in text
    assert f'"{",".join(STEP_COLUMNS)}\\n"' in text.replace('"\n        "', "")
    assert "[" + ",".join(f'\\"{name}\\"' for name in STATISTICS) + "]" in text.replace(
        '"\n            "', ""
    )


@pytest.mark.slow
def test_the_table_of_its_cost_is_printed():
    """At one size, with few numbers: that it runs. What it says is in docs/benchmarks.md."""
    source = (Path(__file__).parent.parent / "benchmarks" / "header.py").read_text()
    small = source.replace("256u << 20", "1u << 20").replace("ROUNDS = 9", "ROUNDS = 2")
    out = subprocess.run(
        [
            sys.executable,
            "-c",
            small.replace("Path(__file__).parent.parent", f"Path({str(HEADER.parents[3])!r})"),
        ],
        capture_output=True,
        text=True,
    )
    assert out.returncode == 0, out.stderr
    assert out.stdout.count("GB/s") == 24 and "a step that is not measured" in out.stdout


def test_run_json_is_standard_json(lib, tmp_path):
    program = Program(lib, tmp_path / "run")
    program.tensor("weight", "w", torch.zeros(4))
    program.step(float("inf"), float("nan"))
    program.close()
    text = (tmp_path / "run" / "run.json").read_text()
    json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} in JSON"))
    run = open_run(tmp_path / "run")
    assert run.steps["loss"].tolist() == [np.inf] and np.isnan(run.steps["lr"][0]) and run.seen["lr"][0]
