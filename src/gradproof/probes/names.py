"""Gives every parameter and module the name its author would use, in any script, without being told.

Modules are found by looking through the live objects once, when a parameter is seen that has no name yet.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from types import FrameType

import torch
from torch import Tensor, nn

from gradproof.tape.frames import locals_of
from gradproof.tape.living import Living

STANDARD = tuple({sysconfig.get_path("stdlib"), os.path.dirname(os.__file__)})
LONGEST = 200  # characters; what is longer is cut in its middle, and told from others by a checksum
WRAPPERS = ("_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


class Names:
    """Parameter and module names; `roots` are the models that own what the optimizers train.

    A name is given once: what comes after a model that is gone is called otherwise.
    """

    def __init__(self, models: Iterable[nn.Module] | None = None) -> None:
        self.parameters: Living[str] = Living()
        self._modules: Living[str] = Living()
        self._roots: Living[str] = Living()  # each with what its parameters' names begin with
        self._taken: set[str] = set()  # of parameters
        self._prefixes: set[str] = set()
        self._are_given = models is not None
        if models is not None:
            self._name_models(list(models))

    @property
    def roots(self) -> dict[str, nn.Module]:
        return {prefix: root for root, prefix in self._roots.items()}

    def of_parameter(self, parameter: Tensor) -> str | None:
        return self.parameters.get(parameter)

    def of_module(self, module: nn.Module) -> str | None:
        return self._modules.get(module)

    def is_outermost(self, module: nn.Module) -> bool:
        """A model itself, or the one that a wrapper is around."""
        return module in self._roots or any(module is wrapped_in(root) for root in self._roots)

    def learn(self, parameters: Iterable[Tensor]) -> None:
        """Make sure that all of these have a name, and those that a model has been given since, as adapters are.

        Looks for models only if some of these have none.
        """
        unknown = [p for p in parameters if p not in self.parameters]
        if not unknown:
            self._name_models([root for root in self._roots if self._has_grown(root)])
            return
        self._name_models(list(self._roots) if self._are_given else find_roots(unknown))
        unknown = [parameter for parameter in unknown if parameter not in self.parameters]
        variables = name_variables(user_frames()) if unknown else {}
        for parameter in unknown:
            self.call(parameter, variables.get(id(parameter), ""))

    def add_models(self, models: list[nn.Module]) -> None:
        """Models that were found later than the others."""
        if not self._are_given:
            self._name_models([model for model in models if model not in self._roots])

    def call(self, parameter: Tensor, name: str) -> str:
        """Give a parameter a name of its own; the name that it has got."""
        name = unique(short(name) or f"tensor{len(self._taken)}", self._taken)
        self._taken.add(name)
        self.parameters[parameter] = name
        return name

    def replace(self, old: Tensor, new: Tensor) -> None:
        """Another tensor is called so from here on; the old one may go."""
        name = self.parameters.pop(old)
        if name is not None and new not in self.parameters:
            self.parameters[new] = name

    def trainable(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter of the models that wants a gradient, whether an optimizer has it or not."""
        for prefix, root in self.roots.items():
            for name, parameter in root.named_parameters():
                if parameter.requires_grad:
                    known = self.parameters.get(parameter)
                    yield known or self.call(parameter, join(prefix, clean(name))), parameter

    def _has_grown(self, root: nn.Module) -> bool:
        return any(parameter not in self.parameters for parameter in root.parameters())

    def _name_models(self, models: list[nn.Module]) -> None:
        frames = list(user_frames())
        labels = [find_variable(model, frames) or type(model).__name__.lower() for model in models]
        single = len(models) == 1 and not self._prefixes
        for label, model in zip(labels, models, strict=True):
            prefix = self._roots.get(model)  # of one that has grown, the same as before
            if prefix is None:
                prefix = "" if single else unique(label, self._prefixes)
            self._prefixes.add(prefix)
            self._roots[model] = prefix
            for name, module in model.named_modules():
                # the wrapper and what it wraps have one name; the inner one is what ran
                self._modules[module] = short(join(prefix, clean(name))) or label
            for name, parameter in model.named_parameters():  # a tied weight keeps its first name
                if parameter not in self.parameters:
                    self.call(parameter, join(prefix, clean(name)))


def find_roots(parameters: Iterable[Tensor]) -> list[nn.Module]:
    """The outermost modules that own any of these parameters, in the order in which they were made."""
    wanted = {id(p) for p in parameters}
    # issubclass of the type, not isinstance: a lazy proxy may run code when it is asked for its class
    modules = [obj for obj in gc.get_objects() if issubclass(type(obj), nn.Module)]
    children = {id(child) for module in modules for child in module.__dict__.get("_modules", {}).values()}
    roots = []
    for module in modules:
        if id(module) in children:
            continue
        if any(id(p) in wanted for p in module.parameters()):
            roots.append(module)
    return roots


def wrapped_in(root: nn.Module) -> nn.Module | None:
    """What DDP or DataParallel is around; a ScriptModule keeps its parts in something that is no dict."""
    parts = root.__dict__.get("_modules")
    return parts.get("module") if isinstance(parts, dict) else None


def user_frames() -> Iterator[FrameType]:
    """The frames of the user's code that are running now, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    inside = (torch.__name__, "gradproof")
    while frame is not None:
        if frame.f_globals.get("__name__", "").split(".")[0] not in inside:
            yield frame
        frame = frame.f_back


def own_frames() -> Iterator[FrameType]:
    """The frames of code that is installed nowhere, innermost first; where all of it is (a trainer), of libraries."""
    frames = list(user_frames())
    own = [frame for frame in frames if not is_installed(frame.f_code.co_filename)]
    yield from own or [frame for frame in frames if is_library(frame.f_code.co_filename)]


@functools.cache
def is_installed(file: str) -> bool:
    """A library's file, or Python's own: not where a user would change something."""
    return file.startswith(("<frozen", *STANDARD)) or is_library(file)


def is_library(file: str) -> bool:
    return "/site-packages/" in file or "/dist-packages/" in file


def user_line() -> str:
    """file.py:line of the user's code that is running."""
    return line_of(next(own_frames(), None))


def line_of(frame: FrameType | None) -> str:
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}" if frame is not None else ""


def find_variable(value: object, frames: Iterable[FrameType]) -> str | None:
    """The name of the variable, attribute of `self`, or entry of a list or dict that holds a value."""
    return next((name for name, found in variables_of(frames) if found is value), None)


def name_variables(frames: Iterable[FrameType]) -> dict[int, str]:
    """The name of each value, by its id, as `find_variable` finds it: one look for very many values."""
    names: dict[int, str] = {}
    for name, found in variables_of(frames):
        names.setdefault(id(found), name)
    return names


def variables_of(frames: Iterable[FrameType]) -> Iterator[tuple[str, object]]:
    for frame in frames:
        variables = locals_of(frame)
        for scope in (variables, frame.f_globals):
            yield from ((name, found) for name, found in list(scope.items()) if not name.startswith("_"))
        yield from list(getattr(variables.get("self"), "__dict__", {}).items())
        for name, found in list(variables.items()):
            if isinstance(found, (list, tuple)) and len(found) < 1000:
                yield from ((f"{name}.{index}", item) for index, item in enumerate(found))
            elif isinstance(found, dict) and len(found) < 1000:
                yield from (
                    (f"{name}.{key}", item) for key, item in list(found.items()) if isinstance(key, str)
                )


def clean(name: str) -> str:
    """A name without the layers that DDP, FSDP and torch.compile put around a model."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def short(name: str) -> str:
    """A name that can be printed and kept by the thousand.

    >>> short("layer." * 1000 + "weight")[-27:]
    'layer.layer.weight~fb8731cc'
    """
    if len(name) <= LONGEST:
        return name
    return f"{name[:120]}…{name[-60:]}~{zlib.crc32(name.encode()):08x}"


def join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name


def unique(name: str, taken: set[str]) -> str:
    if name not in taken:
        return name
    return next(f"{name}#{i}" for i in range(2, 10**6) if f"{name}#{i}" not in taken)
