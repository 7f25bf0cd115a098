"""Checkpoints: a folder each, renamed into place when complete; the last and the best are kept.

RUN/checkpoints/index.json              {"last": "step-000500", "best": "step-000400"}
RUN/checkpoints/step-000500/weights.safetensors · adam.safetensors · state.json
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from torch import Tensor

from gradproof.errors import UserError
from gradproof.lm.data import write_atomically

Tensors = dict[str, Tensor]


def save_checkpoint(run: Path, weights: Tensors, adam: Tensors, state: dict[str, Any], *, best: bool) -> Path:
    """Writes the checkpoint of state["step"], names it last (and best), and removes what neither names."""
    from safetensors.torch import save_file

    folder = run / "checkpoints"
    name = f"step-{state['step']:06d}"
    temporary = folder / f".{name}.{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    save_file({k: v.detach().contiguous() for k, v in weights.items()}, temporary / "weights.safetensors")
    save_file({k: v.detach().contiguous() for k, v in adam.items()}, temporary / "adam.safetensors")
    (temporary / "state.json").write_text(json.dumps(state))
    for path in (*temporary.iterdir(), temporary):
        _flush(path)
    if (
        folder / name
    ).exists():  # this step was saved before, by a run that was then resumed from an earlier one
        shutil.rmtree(folder / name)
    os.replace(temporary, folder / name)
    _flush(folder)
    index = _read_index(run) | {"last": name} | ({"best": name} if best else {})
    write_atomically(folder / "index.json", json.dumps(index).encode())
    for other in folder.iterdir():
        if other.is_dir() and other.name not in index.values():
            shutil.rmtree(other, ignore_errors=True)
    return folder / name


def _flush(path: Path) -> None:
    """Onto the disk, so that a rename never outruns the content."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_index(run: Path) -> dict[str, str]:
    try:
        return json.loads((run / "checkpoints" / "index.json").read_text())
    except FileNotFoundError:
        return {}
    except ValueError:
        raise UserError(
            f"{run / 'checkpoints' / 'index.json'} is damaged: it is not JSON; start a new run"
        ) from None


def find_checkpoint(run: Path, which: str) -> Path | None:
    """The folder of the "last" or the "best" checkpoint, None where a run has none yet."""
    index = _read_index(run)
    return run / "checkpoints" / index[which] if which in index else None


def load_checkpoint(
    path: Path, expected: dict[str, tuple[int, ...]]
) -> tuple[Tensors, Tensors, dict[str, Any]]:
    """Weights, Adam's m and v, and the state; raises before anything is returned unless all of it fits."""
    weights = load_weights(path, expected)
    moments = {f"{moment}.{name}": shape for name, shape in expected.items() for moment in ("m", "v")}
    adam = _load_tensors(path / "adam.safetensors", moments)
    return weights, adam, read_state(path)


def load_weights(path: Path, expected: dict[str, tuple[int, ...]]) -> Tensors:
    return _load_tensors(path / "weights.safetensors", expected)


def read_state(path: Path) -> dict[str, Any]:
    try:
        return json.loads((path / "state.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"checkpoint {path} is damaged: state.json cannot be read ({error})") from None


def _load_tensors(path: Path, expected: dict[str, tuple[int, ...]]) -> Tensors:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        other = (
            "the run's other checkpoint stands beside it" if len(_siblings(path)) > 1 else "no other is kept"
        )
        raise UserError(f"checkpoint file {path} is damaged or missing ({error}); {other}") from None
    unknown, missing = sorted(tensors.keys() - expected.keys()), sorted(expected.keys() - tensors.keys())
    if unknown or missing:
        raise UserError(
            f"checkpoint {path} is of another model: {len(unknown)} unknown tensors ({_some(unknown)}), "
            f"{len(missing)} missing ({_some(missing)}); give the sizes it was trained with"
        )
    for name, shape in expected.items():
        if tuple(tensors[name].shape) != tuple(shape):
            raise UserError(
                f"checkpoint {path} is of another shape: {name} is {tuple(tensors[name].shape)} there and "
                f"{tuple(shape)} in this model; give the sizes it was trained with"
            )
    return tensors


def _siblings(path: Path) -> list[Path]:
    return [p for p in path.parent.parent.glob("step-*") if p.is_dir()]


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "") or "none"
