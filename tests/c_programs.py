"""Compiles what the tests of gradproof.h need: programs of their own, gradproof.h as a library, and examples/c_gpt."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from gradproof.commands.header import HEADER

ROOT = Path(__file__).parent.parent
GPT = ROOT / "examples" / "c_gpt"
C = ("cc", "-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror")

DTYPES = {"float32": 0, "float64": 1, "bfloat16": 2, "float16": 3, "int32": 4, "int64": 5, "uint8": 6}
KINDS = {"weight": 0, "gradient": 1, "output": 2, "output_gradient": 3, "batch": 6}

# each function of the header behind a symbol, so that Python can be the program that trains
LIBRARY = r"""
#include "gradproof.h"
gp_run *x_open(const char *path, int every) { return gp_open(path, every); }
void x_command(gp_run *run, int argc, char **argv) { gp_command(run, argc, argv); }
void x_tensor(gp_run *run, int kind, const char *name, const void *data, int dtype, int dims, const int64_t *size) {
    gp_shape shape;
    shape.dims = dims;
    for (int i = 0; i < dims && i < 8; i++) shape.size[i] = size[i];
    gp_tensor(run, (gp_kind)kind, name, data, (gp_dtype)dtype, shape);
}
void x_updates(gp_run *run, const char *name) { gp_updates(run, name); }
int x_measures(gp_run *run) { return gp_measures(run); }
void x_mark(gp_run *run, char what) {
    if (what == 'z') gp_zeroed(run);
    if (what == 'b') gp_backward(run);
    if (what == 's') gp_will_update(run);
}
void x_clipped(gp_run *run, double norm, double limit) { gp_clipped(run, norm, limit); }
void x_step(gp_run *run, double loss, double lr) { gp_step(run, loss, lr); }
void x_dump(gp_run *run, const char *path) { gp_dump(run, path); }
void x_close(gp_run *run) { gp_close(run); }
void x_measure(const void *data, const void *before, int dtype, size_t count, double *out) {
    gp_stats s = gp_measure(data, before, (gp_dtype)dtype, count);
    memcpy(out, &s, sizeof s);
}
"""


def needs_a_compiler() -> None:
    if not shutil.which("cc") or not shutil.which("c++"):
        pytest.skip("there is no C compiler here (cc and c++): gradproof.h cannot be tried")


def compiled(
    directory: Path, source: str, *flags: str, compiler: tuple[str, ...] = C, suffix: str = ".c"
) -> Path:
    """A program from its text; a warning is an error."""
    file = directory / f"program{suffix}"
    file.write_text(source)
    program = directory / "program"
    command = [*compiler, f"-I{HEADER.parent}", *flags, str(file), "-o", str(program), "-lm"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return program


def library(directory: Path, *flags: str) -> ctypes.CDLL:
    """The header as a library."""
    program = compiled(directory, LIBRARY, "-shared", "-fPIC", *flags)
    found = ctypes.CDLL(str(program))
    found.x_open.restype = ctypes.c_void_p
    found.x_open.argtypes = [ctypes.c_char_p, ctypes.c_int]
    run, text, number = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_double
    found.x_tensor.argtypes = [
        run,
        ctypes.c_int,
        text,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.POINTER(ctypes.c_int64),
    ]
    for name, types in {
        "updates": [run, text],
        "measures": [run],
        "mark": [run, ctypes.c_char],
        "clipped": [run, number, number],
        "step": [run, number, number],
        "dump": [run, text],
        "close": [run],
        "command": [run, ctypes.c_int, ctypes.POINTER(text)],
        "measure": [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t, ctypes.POINTER(number)],
    }.items():
        getattr(found, f"x_{name}").argtypes = types
    return found


class Program:
    """A program that trains, in Python, through the header."""

    def __init__(self, library: ctypes.CDLL, path: Path, every: int = 1) -> None:
        self._library = library
        self.run = library.x_open(os.fsencode(path), every)

    def tensor(self, kind, name, tensor) -> None:
        """Names a torch tensor; it has to outlive the run."""
        dtype, shape = str(tensor.dtype)[6:], list(tensor.shape)
        self.tensor_at(kind, name, tensor.data_ptr(), DTYPES[dtype], shape)

    def tensor_at(self, kind, name, address, dtype, shape) -> None:
        sizes = (ctypes.c_int64 * max(1, len(shape)))(*shape)
        name = name.encode() if isinstance(name, str) else name
        self._library.x_tensor(self.run, KINDS.get(kind, kind), name, address, dtype, len(shape), sizes)

    def __getattr__(self, name):
        function = getattr(self._library, f"x_{name}")
        return lambda *args: function(
            self.run, *(os.fsencode(a) if isinstance(a, (str, Path)) else a for a in args)
        )


def gpt(directory: Path, slip: str = "", *flags: str) -> Path:
    """examples/c_gpt, with a mistake planted or without."""
    program = directory / f"gpt{slip}"
    planted = [f"-DSLIP_{slip}"] if slip else []
    sources = [str(GPT / "gpt.c"), str(GPT / "loss.c")]
    command = [*C, "-O1", f"-I{HEADER.parent}", *planted, *flags, *sources, "-o", str(program), "-lm"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return program


def text_of_the_standard_library(directory: Path) -> Path:
    """A part of what `make text` writes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:20]
    file = directory / "text.bin"
    file.write_bytes(b"".join(each.read_bytes() for each in files)[:400_000])
    return file


def train(program: Path, directory: Path, *args: str) -> str:
    """What it prints; the run is at directory / "run", the dump at directory / "step.safetensors"."""
    options = {"--out": "run", "--text": "text.bin", "--steps": "80", "--every": "4", "--print": "1"}
    options.update(zip(args[::2], args[1::2], strict=True))
    words = [word for pair in options.items() for word in pair]
    done = subprocess.run([str(program), *words], cwd=directory, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout
