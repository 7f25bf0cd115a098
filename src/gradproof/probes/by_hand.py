"""What a loop hands in itself, for training code that has neither modules nor optimizers to listen to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradproof.errors import UserError
from gradproof.probes import tensors as measuring
from gradproof.probes.guard import guarded
from gradproof.probes.own_updates import OwnUpdates
from gradproof.probes.session import Session

Named = Mapping[str, Any] | Sequence[Any]


@guarded
def end_step(session: Session, values: dict[str, Any]) -> None:
    """A row, and with it the end of the step."""
    session.current.row.update({key: _number(value) for key, value in values.items()})
    session.close_step()


@guarded
def note(session: Session, values: dict[str, float]) -> None:
    """Columns of the step that is under way."""
    session.current.row.update(values)


@guarded
@torch.no_grad()
def measure_tensors(session: Session, kind: str, named: dict[str, Any]) -> None:
    """Torch tensors, NumPy arrays, anything that torch.as_tensor takes."""
    session.current.measure(kind, {n: measuring.local(torch.as_tensor(t)) for n, t in named.items()})


def _number(value: Any) -> Any:
    return value if isinstance(value, (int, str)) else float(value)


class Handed:
    """Parameters that a loop has named, torch's or NumPy's: read anew at each step, for others may take their place."""

    def __init__(self, session: Session, parameters: Named) -> None:
        self._session = session
        self._given = parameters
        self._own = OwnUpdates(session)
        self._sources: dict[str, Any] = {}
        self._weights: Any = None
        if not named(parameters):
            raise UserError(
                "watch(parameters=…) was given none: a dict or list of tensors or arrays is wanted"
            )
        begin_handed(session, self)

    def step(self, loss: Any, gradients: Named | None, values: Mapping[str, Any]) -> None:
        """The end of a step: the parameters have their new values, `gradients` are those that made them."""
        handed = {} if gradients is None else named(gradients)
        strange = next((name for name in handed if name not in self._own.tensors), None)
        if strange is not None:
            known = ", ".join(list(self._own.tensors)[:5])
            raise UserError(f"there is a gradient for {strange!r}, which is no parameter; those are {known}")
        for name, gradient in handed.items():
            shape, wanted = tuple(torch.as_tensor(gradient).shape), tuple(self._own.tensors[name].shape)
            if shape != wanted:
                raise UserError(f"the gradient of {name!r} is {list(shape)}, the parameter {list(wanted)}")
        row = {"loss": _number(loss), **{key: _number(value) for key, value in values.items()}}
        end_handed_step(self._session, self, handed, row)

    def refresh(self) -> None:
        """The tensors that are the parameters now."""
        for name, value in named(self._given).items():
            if self._sources.get(name) is value:
                continue
            old, tensor = self._own.tensors.get(name), torch.as_tensor(value)
            if old is None:
                self._session.names.call(tensor, name)
            else:
                self._session.names.replace(old, tensor)
            self._own.tensors[name], self._sources[name] = tensor, value
        self._session.own_parameters_replaced(self._own.stand_in, self._own.tensors)

    def take_gradients(self, handed: Mapping[str, Any]) -> None:
        tensors = self._own.tensors
        self._own.stand_in.given = {id(tensors[n]): torch.as_tensor(g).detach() for n, g in handed.items()}
        self._own.follow(self._weights, self._session.step)

    def end(self) -> None:
        """The step is closed: what the next one is compared with."""
        self._weights = self._own.weights()
        self._session.begin_handed_step(self._own.stand_in)

    @property
    def update(self) -> Any:
        return self._own.stand_in


def named(values: Named) -> dict[str, Any]:
    """A dict as it is, a list by its places."""
    return dict(values) if isinstance(values, Mapping) else {str(i): value for i, value in enumerate(values)}


def wants_gradient(parameters: Named) -> bool:
    """Whether autograd brings the gradients: then there is a backward to listen to."""
    return any(isinstance(value, Tensor) and value.requires_grad for value in named(parameters).values())


@guarded
def begin_handed(session: Session, handed: Handed) -> None:
    handed.refresh()
    handed.end()


@guarded
def end_handed_step(
    session: Session, handed: Handed, gradients: Mapping[str, Any], row: dict[str, Any]
) -> None:
    handed.refresh()
    handed.take_gradients(gradients)
    session.end_handed_step(handed.update, row)
    handed.end()
