"""A taped step as JSON and named tensors: every kind of value that a tape holds, and how it is spelt.

Plain values stay as they are, tuples, sets, tensors and PyTorch's own words are objects of one key. What another
process could not know (a function, a class of the script) becomes a Foreign that only has its name.
"""

from __future__ import annotations

import dataclasses
import json
import math
import weakref
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from gradproof.tape.execute import CannotReplay
from gradproof.tape.label import Damaged
from gradproof.tape.operations import (
    BackwardCall,
    FunctionCall,
    Line,
    Memory,
    ModuleCall,
    OneArray,
    Operation,
    OperatorFunction,
    Ref,
    Slot,
    Tape,
    line_of_backward,
)
from gradproof.tape.origin import Origin, origin_of, registration_of
from gradproof.tape.replica import ModuleRecord, OptimizerRecord, TensorRecord
from gradproof.tape.tensors import alias, load

KINDS = {
    kind.__name__: kind
    for kind in (
        *(Slot, Operation, ModuleCall, FunctionCall, BackwardCall, Memory, OneArray, Tape),
        *(ModuleRecord, OptimizerRecord, TensorRecord),
    )
}
_FIELDS = {
    kind: tuple(field.name for field in dataclasses.fields(kind) if field.name != "in_place")
    for kind in KINDS.values()
}
_LATER = {ModuleRecord: 1, OptimizerRecord: 1}  # last fields that older specimens do not have
_PARTS = {kind: attrgetter(*names) for kind, names in _FIELDS.items()}
_PLAIN = frozenset((type(None), bool, int, str))
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.bool: "BOOL",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
_COMPRESSED = {str(layout)[6:]: layout for layout in (torch.sparse_csr, torch.sparse_csc)}
_write = json.JSONEncoder(allow_nan=False).encode
_NEVER_RUN = ("aten.from_file",)  # it opens a file, and may make one
_OWN: dict[str, Callable] = {"alias": alias, "load": load}
# operators that an installed package registers when it is imported
_REGISTERED_BY = {
    "gradproof": "gradproof.kernels.cross_entropy",
    "torchvision": "torchvision",
    "torchaudio": "torchaudio",
}


class Foreign:
    """Something of the training's own process, by name: an operator, a Function, an object among its arguments."""

    def __init__(
        self, name: str, namespace: str = "", backward_line: Line | None = None, origin: Origin | None = None
    ) -> None:
        self.__name__ = name
        self.namespace = namespace
        self.backward_line = backward_line
        self.origin = origin

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise CannotReplay(
            f"{self.__name__} is code of the training's own: only its recorded results are here"
        )

    apply = __call__

    def __repr__(self) -> str:
        return self.__name__


class Encoder:
    """Collects tensors while it spells a value; `tensors` are to be stored beside the JSON."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._names: dict[int, str] = {}
        self._alive: list[torch.Tensor] = []  # an id is only good as long as its object lives

    def encode(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        spell = self._SPELLINGS.get(kind)
        if spell is not None:
            return spell(self, value)
        if kind in _FIELDS:
            return {"k": kind.__name__, "v": self._list(_PARTS[kind](value))}
        return self._other(value)

    def text(self, value: Any) -> str:
        """The same as JSON. A tape is spelt piece by piece: as one tree of lists it would be 100,000 objects, and
        Python, which looks through all there are where so many are added, would stop the training for 0.2 s.
        """
        if type(value) is Tape:
            parts = ", ".join(map(self.text, _PARTS[Tape](value)))
            return f'{{"k": "Tape", "v": [{parts}]}}'
        if type(value) is list:
            return f"[{', '.join(map(self.text, value))}]"
        return _write(self.encode(value))

    def _float(self, value: float) -> Any:
        return value if math.isfinite(value) else {"f": str(value)}

    def _list(self, value: list | tuple | set) -> list:
        return [part if type(part) in _PLAIN else self.encode(part) for part in value]

    def _tuple(self, value: tuple) -> dict:
        return {"t": self._list(value)}

    def _set(self, value: set) -> dict:
        return {"s": self._list(value)}

    def _dict(self, value: dict) -> dict:
        return {"d": [[self.encode(key), self.encode(part)] for key, part in value.items()]}

    def _ref(self, value: Ref) -> dict:
        return {"r": 2 * value.slot + value.tracked}

    def _line(self, value: Line) -> dict:
        return {"l": list(value)}

    def tensor(self, value: torch.Tensor) -> dict:
        if value.is_complex():
            return {"C": self.tensor(torch.view_as_real(value.detach().resolve_conj()))["T"]}
        if value.layout == torch.sparse_coo:  # never dense: an adjacency matrix would not fit
            parts = (value.detach()._indices(), value.detach()._values())
            return {"S": [self.tensor(p) for p in parts], "n": list(value.shape), "c": value.is_coalesced()}
        if value.layout in (torch.sparse_csr, torch.sparse_csc):
            by_row = value.layout == torch.sparse_csr
            parts = (
                (value.crow_indices(), value.col_indices())
                if by_row
                else (value.ccol_indices(), value.row_indices())
            )
            stored = [self.tensor(part.detach()) for part in (*parts, value.detach().values())]
            return {"R": stored, "n": list(value.shape), "layout": str(value.layout)[6:]}
        if value.layout != torch.strided or value.is_quantized or value.dtype not in DTYPES:
            return {"x": f"a tensor of {value.layout} and {value.dtype}"}
        name = self._names.get(id(value))
        if name is None:
            name = self._names[id(value)] = f"t{len(self.tensors)}"
            self._alive.append(value)
            self.tensors[name] = value.detach()
        return {"T": name}

    def _array(self, value: np.ndarray) -> dict:
        if value.dtype.kind not in "fiub":
            return {"x": f"array of {value.dtype}"}
        return {"A": self.tensor(torch.from_numpy(np.ascontiguousarray(value)))["T"], "n": list(value.shape)}

    def _other(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        if value in _OWN.values() if callable(value) else False:
            return {"own": value.__name__}
        if isinstance(value, torch._ops.OpOverload):
            return {"op": str(value)}
        if isinstance(value, OperatorFunction):
            namespace = str(getattr(value.func, "namespace", ""))
            return self._foreign(value.__name__, namespace, None, origin_of(registration_of(value.func)))
        if isinstance(value, Foreign):
            return self._foreign(value.__name__, value.namespace, value.backward_line, value.origin)
        if isinstance(value, type) and issubclass(value, torch.autograd.Function):
            return self._foreign(value.__name__, "", line_of_backward(value), origin_of(value))
        if isinstance(value, str):  # torch.__version__ is of a class of its own
            return str.__str__(value)
        if isinstance(value, np.bool_):
            return bool(value)
        if isinstance(value, (int, torch.SymInt, np.integer)):
            return int(value)
        if isinstance(value, (torch.SymFloat, np.floating, float)):
            return self._float(float(value))
        if isinstance(value, (tuple, torch.Size)):
            return self._tuple(tuple(value))
        if isinstance(value, list):
            return self._list(value)
        if isinstance(value, (set, frozenset)):
            return self._set(set(value))
        if isinstance(value, dict):
            return self._dict(dict(value))
        name = getattr(value, "__name__", None) or f"a {type(value).__name__}"
        return {"x": str(name)}

    def _foreign(self, name: str, namespace: str, line: Line | None, origin: Origin | None) -> dict:
        found: dict[str, Any] = {"x": name, "ns": namespace}
        found |= {} if line is None else {"at": list(line)}
        return found if origin is None else {**found, "from": list(origin)}

    _SPELLINGS: dict[type, Callable[[Encoder, Any], Any]] = {  # noqa: RUF012
        float: _float,
        list: _list,
        tuple: _tuple,
        set: _set,
        dict: _dict,
        Ref: _ref,
        Line: _line,
        np.ndarray: _array,
        complex: lambda self, value: {"c": [value.real, value.imag]},
        slice: lambda self, value: {"slice": self.encode((value.start, value.stop, value.step))},
        torch.dtype: lambda self, value: {"torch": str(value)[6:]},
        torch.layout: lambda self, value: {"torch": str(value)[6:]},
        torch.memory_format: lambda self, value: {"torch": str(value)[6:]},
        torch.device: lambda self, value: {"device": str(value)},
        type(Ellipsis): lambda self, value: {"dots": 1},
        weakref.ref: lambda self, value: None,
    }


class Decoder:
    """Reads what an Encoder has spelt; `device` is put in place of every accelerator."""

    def __init__(self, tensors: Callable[[str], torch.Tensor], device: torch.device | None = None) -> None:
        self._tensor = tensors
        self._device = device
        self._lines: dict[tuple, Line] = {}  # one object for each line: a tape has few
        self._complexes: dict[str, torch.Tensor] = {}

    def decode(self, value: Any) -> Any:
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, list):
            return self._list(value)
        if not isinstance(value, dict) or not value:
            raise Damaged(f"a value is spelt {str(value)[:40]!r}")
        key = next(iter(value))
        read = self._READINGS.get(key)
        if read is None:
            raise Damaged(f"a value is spelt {key!r}")
        return read(self, value[key], value)

    def _list(self, parts: list) -> list:
        return [part if type(part) in _PLAIN else self.decode(part) for part in parts]  # most are plain

    def _kind(self, name: str, whole: dict) -> Any:
        kind, parts = KINDS.get(name), whole.get("v")
        missing = len(_FIELDS[kind]) - len(parts) if kind is not None and isinstance(parts, list) else -1
        if kind is None or parts is None or not 0 <= missing <= _LATER.get(kind, 0):
            raise Damaged(f"there is no {name!r} of such fields in this version")
        return kind(**dict(zip(_FIELDS[kind], self._list(parts), strict=False)))

    def _ref(self, number: int, whole: dict) -> Ref:
        return Ref(number >> 1, bool(number & 1))

    def _line(self, parts: list, whole: dict) -> Line:
        key = tuple(parts)
        return self._lines.setdefault(key, Line(*parts))

    def _complex(self, name: str, whole: dict) -> torch.Tensor:
        if name not in self._complexes:  # a copy: in the file it may lie between two numbers
            self._complexes[name] = torch.view_as_complex(self._tensor(name).clone())
        return self._complexes[name]

    def _sparse(self, parts: list, whole: dict) -> torch.Tensor:
        indices, values = map(self.decode, parts)
        made = torch.sparse_coo_tensor(indices, values, whole["n"], check_invariants=True)
        return made._coalesced_(bool(whole["c"]))

    def _compressed(self, parts: list, whole: dict) -> torch.Tensor:
        outer, inner, values = map(self.decode, parts)
        layout = _COMPRESSED[whole["layout"]]
        return torch.sparse_compressed_tensor(
            outer, inner, values, whole["n"], layout=layout, check_invariants=True
        )

    def _array(self, name: str, whole: dict) -> np.ndarray:
        return self._tensor(name).numpy().reshape(whole["n"])

    def _op(self, name: str, whole: dict) -> Any:
        namespace, _, rest = name.partition(".")
        packet, _, overload = rest.rpartition(".")
        if namespace in _REGISTERED_BY:
            with suppress(ImportError):
                import_module(_REGISTERED_BY[namespace])
        try:
            found = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
        except (AttributeError, RuntimeError):
            found = None
        known = isinstance(found, torch._ops.OpOverload) and f"{namespace}.{packet}" not in _NEVER_RUN
        return found if known else Foreign(packet, namespace)

    def _foreign(self, name: str, whole: dict) -> Foreign:
        line = Line(*whole["at"]) if "at" in whole else None
        return Foreign(name, whole.get("ns", ""), line, Origin(*whole["from"]) if "from" in whole else None)

    def _torch(self, name: str, whole: dict) -> Any:
        found = getattr(torch, name, None)
        if not isinstance(found, (torch.dtype, torch.layout, torch.memory_format)):
            raise Damaged(f"PyTorch has no {name!r}")
        return found

    def _where(self, name: str, whole: dict) -> torch.device:
        device = torch.device(name)
        return device if device.type == "cpu" or self._device is None else self._device

    def _own(self, name: str, whole: dict) -> Callable:
        if name not in _OWN:
            raise Damaged(f"there is no operation {name!r}")
        return _OWN[name]

    _READINGS: dict[str, Callable[[Decoder, Any, dict], Any]] = {  # noqa: RUF012
        "t": lambda self, parts, _: tuple(self._list(parts)),
        "s": lambda self, parts, _: set(map(self.decode, parts)),
        "d": lambda self, parts, _: {self.decode(key): self.decode(part) for key, part in parts},
        "f": lambda self, text, _: float(text),
        "c": lambda self, parts, _: complex(*parts),
        "slice": lambda self, parts, _: slice(*self.decode(parts)),
        "dots": lambda self, parts, _: Ellipsis,
        "T": lambda self, name, _: self._tensor(name),
        "C": _complex,
        "S": _sparse,
        "R": _compressed,
        "A": _array,
        "r": _ref,
        "l": _line,
        "k": _kind,
        "op": _op,
        "own": _own,
        "x": _foreign,
        "torch": _torch,
        "device": _where,
    }
