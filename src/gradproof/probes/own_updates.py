"""Updates that a script makes by hand: `p.data -= lr * p.grad`, `params = {k: v - lr * g[k] …}`, its own optimizer.

There is no call to listen to. That an update was made shows when the next backward begins: by then a parameter has
other values, another version, or another tensor in its place. Until then the step waits, and the next one is open.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradproof.probes.guard import inside_handler
from gradproof.probes.names import find_roots, own_frames
from gradproof.probes.paths import Path, find_paths, is_parameter, leaves_behind, scopes_of
from gradproof.probes.step import OpenStep
from gradproof.probes.update_watch import Touch, UpdateWatch
from gradproof.tape.living import alive

WATCHED_UPDATES = 3  # from the start: to know its lines, and how many operations it takes
MOST_FOLLOWED = 48  # entries of the parameters whose way is kept
HISTORY = 64  # updates for which it is kept
MOST_POINTS = 512  # of the whole run, in the facts
VISIBLE = 64  # times the rounding of a weight: a change that tells its size to some per cent
# variables that hold data: a leaf whose gradient is wanted for itself (a derivative in the loss), not a parameter
DATA = frozenset(("x", "xs", "xb", "t", "inputs", "input", "images", "data", "coords", "points", "batch"))
TIGHT = 1e-3  # how far an update may be from a multiple of the gradient and still tell the rate


class UpdatesByHand:
    """Stands where an optimizer stands: the parameters that a script changes itself, and their gradients."""

    def __init__(self) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": []}]
        self.state: dict[Tensor, dict[str, Any]] = {}
        self.defaults: dict[str, Any] = {}
        self.changed: list[Tensor] = []  # those that were seen to change
        self.given: dict[int, Tensor] = {}  # id of a parameter -> a gradient that is not in its .grad

    def let_go(self) -> None:
        self.param_groups[0]["params"], self.changed, self.given = [], [], {}


class OwnUpdates:
    """Finds the parameters, notices their updates, and tells the session where a step ends."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self.stand_in = UpdatesByHand()
        self.tensors: dict[str, Tensor] = {}  # name -> the tensor that is trained now
        self._paths: dict[str, Path] = {}
        self._leaves: list[Tensor] = []
        self._models: list[weakref.ref[nn.Module]] = []
        self._looks = 0
        self._held: tuple[OpenStep, int, dict[str, int]] | None = None
        self._backwards = 0  # since the last update
        self._usual = 1  # backwards of a step
        self._updates = 0
        self._versions: list[int] = []
        self._cleared_from: list[Tensor | None] = []
        self._moved: set[str] = set()
        self._entries: dict[str, Tensor] = {}  # name -> places whose values are followed
        self._then: tuple[np.ndarray, np.ndarray] | None = (
            None  # gradients and weights at the end of backward
        )
        self._history: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self._points: list[tuple[int, float, float]] = []  # (step, size of the change, of the gradient)
        self._stride = 1
        self._largest_rate = 0.0
        self._climbs = True  # every update so far went up the gradient
        self._watch: UpdateWatch | None = None
        self._count: int | None = None  # touches that make an update
        self._made_at: dict[str, int] = {}  # name -> the touch that makes the tensor that takes its place

    @property
    def replaces(self) -> bool:
        """Whether other tensors take the parameters' places, in an update as it was seen last."""
        return bool(self._made_at)

    # what the session hears; each inside one of its handlers ----------------------------------------------

    def backward_begins(self, roots: Iterable[Any], wanted: list[Tensor] | None) -> None:
        """`wanted`: the parameters, where gradients are asked for."""
        if self._watch is not None:
            self._session.afterwards.append(self.leave_watch)
        leaves = wanted
        if wanted is None and (self._looks < 3 or self._looks & (self._looks - 1) == 0):
            leaves = leaves_behind(roots)  # rarely: a graph may be large
        self._looks += 1
        self._leaves = [leaf for leaf in leaves or () if is_parameter(leaf)]
        self.settle(at_backward=True)
        if self._session.taping is not None:  # before the engine asks what a parameter is
            self._session.taping.name_parameters(self.tensors)

    def gradients_arrived(self, given: list[tuple[Tensor, Tensor]] | None) -> None:
        """A backward has ended, or gradients that were asked for have come."""
        session = self._session
        self._learn(self._leaves)
        self._leaves = []
        if not self.tensors:
            return
        if session.taping is not None:
            session.taping.name_parameters(self.tensors)
        self.stand_in.given = {id(p): g for p, g in given or ()}
        self.stand_in.param_groups[0]["params"] = list(self.tensors.values())
        self._backwards += 1
        if self._backwards >= self._usual:
            session.update_follows(self.stand_in)
        self._remember()
        self._held = session.hold_step()
        session.afterwards.append(self._begin_watch)

    def clipped(self) -> OpenStep | None:
        """The step that waits for its update, which will be made with these gradients; none if it was made before."""
        self.settle(at_backward=False)
        if self._held is None:
            return None
        self._remember()
        return self._held[0]

    def settle(self, at_backward: bool) -> None:
        """Has the update been made? If so the step that waits for it ends; if not, the next backward adds to it."""
        if self._held is None:
            return
        replaced = self._follow()
        if replaced or self._has_moved() or (at_backward and self._has_begun_anew()):
            self._finish()
        elif at_backward:
            self._session.take_back(*self._held)
            self._held = None

    def close(self) -> None:
        """The script has ended: its last update is the end of its last step."""
        if self._held is None:
            return
        moved = self._follow() or self._has_moved()
        if moved or (self._updates and self._backwards >= self._usual):
            self._then = self._then if moved else None  # where the new tensors were is gone with the script
            self._finish()
        else:
            self._session.take_back(*self._held)
            self._held = None

    def give_way(self) -> None:
        """An optimizer makes the update: the step that waits for one by hand goes on."""
        if self._held is not None:
            self._session.take_back(*self._held)
            self._held = None
        self._session.afterwards.append(self.leave_watch)

    def facts(self) -> dict[str, Any]:
        """For specimens: the way of some entries over the first updates, gradient, weight before and after."""
        if not self._history:
            return {}
        gradients, before, after = (
            torch.from_numpy(np.stack(part)) for part in zip(*self._history, strict=True)
        )
        names = [name for name, places in self._entries.items() for _ in range(len(places))]
        return {"names": names, "gradients": gradients, "before": before, "after": after}

    def name_given(self, parameters: dict[str, Tensor]) -> None:
        """The script has said what they are."""
        for name, tensor in parameters.items():
            self.tensors[
                self._session.names.of_parameter(tensor) or self._session.names.call(tensor, name)
            ] = tensor

    def follow(self, before: np.ndarray | None, number: int) -> None:
        """An update whose gradients were handed in: how far the followed entries went since `before`."""
        if not self._entries:
            self._choose_entries()
        elif before is not None:
            self._then = (self._gradients(), before)
            self._note_change(number)
            self._updates += 1

    # which parameters -------------------------------------------------------------------------------------

    def _learn(self, leaves: list[Tensor]) -> None:
        known = {id(tensor) for tensor in self.tensors.values()}
        fresh = [leaf for leaf in leaves if id(leaf) not in known]
        if not fresh:
            return
        self._let_go()
        names = self._session.names
        paths = find_paths({id(leaf) for leaf in fresh}, own_frames())
        if roots := find_roots(leaf for leaf in fresh if names.of_parameter(leaf) is None):
            names.add_models(roots)
            self._session.listen_to_calls()
        for leaf in fresh:
            path = paths.get(id(leaf))
            if path is not None and not path.keys and path.root.lower() in DATA:
                continue
            name = names.of_parameter(leaf) or names.call(leaf, path.name if path else "")
            self.tensors[name] = leaf
            if path is not None:
                self._paths[name] = path
        self._models = [self._mourned(model) for model in names.roots.values()]
        self._entries = {}  # others are followed from here on
        self._history.clear()

    def _mourned(self, model: nn.Module) -> weakref.ref[nn.Module]:
        """Where a model dies inside of a handler, its tensors stay until others are trained."""
        held = (self._session.names.of_parameter(parameter) for parameter in model.parameters())
        names = frozenset(name for name in held if name is not None)
        session = self._session
        return weakref.ref(model, lambda _: None if inside_handler() else session.own_model_died(names))

    def drop(self, names: frozenset[str]) -> None:
        """The model of these parameters is gone; its last update was made."""
        if names.isdisjoint(self.tensors):
            return
        self.close()
        self._session.parameters.look()  # the last time that they can be seen
        self.tensors = {name: tensor for name, tensor in self.tensors.items() if name not in names}
        self._paths = {name: path for name, path in self._paths.items() if name in self.tensors}
        self._leaves, self._cleared_from, self._entries = [], [], {}
        self._looks = 0  # whatever is trained next is looked for at once
        self._history.clear()
        self.stand_in.let_go()

    def _let_go(self) -> None:
        """Others are trained from here on: of those so far only the ones stay that the script itself still holds."""
        known = {name: weakref.ref(tensor) for name, tensor in self.tensors.items()}
        self.tensors.clear()
        self.stand_in.let_go()
        self._cleared_from = []
        self.tensors.update(
            (name, tensor) for name, ref in known.items() if (tensor := alive(ref)) is not None
        )
        self._paths = {name: path for name, path in self._paths.items() if name in self.tensors}

    def _follow(self) -> bool:
        """Puts tensors that have taken another's place into it; whether there are any."""
        scopes = scopes_of(own_frames())
        main = sys.modules.get("__main__")
        scopes += [vars(main)] if main is not None else []
        found = False
        for name, path in self._paths.items():
            old = self.tensors[name]
            now = path.follow(scopes)
            if now is not old and is_parameter(now) and now.shape == old.shape and now.dtype == old.dtype:
                self.tensors[name] = now
                self._session.names.replace(old, now)
                found = True
        found = self._adopt() or found
        if found:
            self._session.own_parameters_replaced(self.stand_in, self.tensors)
        return found

    def _adopt(self) -> bool:
        """Tensors that backward is about to reach in place of all that were known: those have been replaced elsewhere.

        A script may hold its first parameters twice (`W`, and `params["W"]`), and go on with one of them.
        """
        known = {id(tensor) for tensor in self.tensors.values()}
        fresh = [leaf for leaf in self._leaves if id(leaf) not in known]
        gone = self._leaves and known.isdisjoint(map(id, self._leaves))
        if not gone or not fresh or any(isinstance(leaf, nn.Parameter) for leaf in fresh):
            return False
        paths = find_paths({id(leaf) for leaf in fresh}, own_frames())
        named = {str(paths[id(leaf)].name).rpartition(".")[2]: leaf for leaf in fresh if id(leaf) in paths}
        old = {name.rpartition(".")[2]: name for name in self.tensors}
        alike = named.keys() == old.keys() and all(
            named[key].shape == self.tensors[name].shape for key, name in old.items()
        )
        if not alike:
            return False
        for key, name in old.items():
            self._session.names.replace(self.tensors[name], named[key])
            self.tensors[name], self._paths[name] = named[key], paths[id(named[key])]
        return True

    # whether it was made ----------------------------------------------------------------------------------

    def _remember(self) -> None:
        self._versions = [tensor._version for tensor in self.tensors.values()]
        self._cleared_from = [tensor.grad for tensor in list(self.tensors.values())[:8]]
        if not self._entries:
            self._choose_entries()
        far = any(tensor.device.type != "cpu" for tensor in self.tensors.values())
        self._then = None if far and self._updates >= HISTORY else (self._gradients(), self.weights())

    def _has_moved(self) -> bool:
        if self._versions != [tensor._version for tensor in self.tensors.values()]:
            return True
        if self._watch is not None and any(map(self._watch.is_written, self._watch.touches)):
            return True
        return self._then is not None and not np.array_equal(self.weights(), self._then[1], equal_nan=True)

    def _has_begun_anew(self) -> bool:
        """As many backwards as usual, and the gradients are gone: a step that has moved nothing."""
        if self._backwards < self._usual or not self._updates:
            return False
        now = [tensor.grad for tensor in list(self.tensors.values())[:8]]
        return all(
            g is None or g is not old or not g.any() for g, old in zip(now, self._cleared_from, strict=False)
        )

    def _finish(self) -> None:
        assert self._held is not None
        step, number, where = self._held
        self._held = None
        self._usual, self._backwards = self._backwards, 0
        if self._watch is not None:
            self._learn_from(self._watch)
        self._note_change(number)
        self._updates += 1
        line = next(iter(self._session.lines.sites.get("step", ())), "")
        self._session.facts["_optimizers_made"][self.stand_in] = line
        self._session.finish_own_step(step, number, where, self.stand_in)

    # the way of some entries ------------------------------------------------------------------------------

    def _choose_entries(self) -> None:
        """Those with the largest gradients, a few of each parameter: what gets none does not move."""
        names = list(self.tensors)
        stride = max(1, -(-len(names) // MOST_FOLLOWED))
        chosen = names[::stride]
        each = max(1, MOST_FOLLOWED // max(1, len(chosen)))
        for name in chosen:
            gradient = self._gradient_of(self.tensors[name])
            if gradient is not None and gradient.layout == torch.strided and gradient.numel():
                flat = gradient.detach().reshape(-1).abs()
                self._entries[name] = flat.topk(min(each, flat.numel())).indices

    def _gradient_of(self, tensor: Tensor) -> Tensor | None:
        return self.stand_in.given.get(id(tensor), tensor.grad)

    def _gradients(self) -> np.ndarray:
        found = []
        for name, places in self._entries.items():
            gradient = self._gradient_of(self.tensors[name])
            found.append(np.zeros(len(places)) if gradient is None else _at(gradient, places))
        return np.concatenate(found) if found else np.zeros(0)

    def weights(self) -> np.ndarray:
        """The followed entries as they are."""
        found = [_at(self.tensors[name], places) for name, places in self._entries.items()]
        return np.concatenate(found) if found else np.zeros(0)

    def _slices(self) -> Iterator[tuple[str, slice]]:
        """Where the followed entries of each parameter lie."""
        start = 0
        for name, places in self._entries.items():
            yield name, slice(start, start + len(places))
            start += len(places)

    def _note_change(self, number: int) -> None:
        """The rate, where the change is a multiple of the gradient; and the way of the followed entries."""
        group = self.stand_in.param_groups[0]
        group.pop("lr", None)
        if self._then is None or not self._entries:
            return
        gradient, before = self._then
        now = self._gradients()
        scaled = bool(((now != gradient) & (now != 0)).any())  # by the script; before its update, or after it
        after = self.weights()
        change = after - before
        if len(self._history) == self._updates < HISTORY:
            self._history.append((gradient, before, after))
        moved = change != 0
        self._moved.update(name for name, here in self._slices() if moved[here].any())
        self.stand_in.changed = [tensor for name, tensor in self.tensors.items() if name in self._moved]
        if float(change @ gradient) <= 0:
            self._climbs = False
        group["maximize"] = self._climbs
        rate = None if scaled else rate_of(change, gradient, before, self._largest_rate)
        if rate is not None:
            group["lr"] = float(f"{abs(rate):.3g}")  # what rounding makes of it is no schedule
            self._largest_rate = max(self._largest_rate, abs(rate))
        if number % self._stride == 0:
            self._points.append((number, _size(change), _size(gradient)))
            if len(self._points) > MOST_POINTS:
                self._points, self._stride = self._points[::2], 2 * self._stride
        self._session.facts["own_updates"] = {
            "steps": [point[0] for point in self._points],
            "change": [point[1] for point in self._points],
            "gradient": [point[2] for point in self._points],
        }

    # the tape ---------------------------------------------------------------------------------------------

    def _begin_watch(self) -> None:
        taping = self._session.taping
        if self._held is None or self._backwards < self._usual:
            return
        taped = taping is not None and (taping.active or taping.will_tape(self._session.step))
        if not taped and self._updates >= WATCHED_UPDATES:
            return
        if taping is not None and taping.active:
            taping.own_update_begins(self.stand_in)
        self._watch = UpdateWatch(self.tensors.values(), self._touched)
        self._watch.__enter__()

    def leave_watch(self) -> None:
        """Nothing of ours is on the way of the script's operations any more; not from inside of one of them."""
        if self._watch is not None and self._watch.leave():
            self._watch = None

    def _touched(self, watch: UpdateWatch, touch: Touch) -> None:
        """An operation of the script's has just changed a parameter, or made something of it."""
        session = self._session
        if session.taping is None or session.examining:
            pass
        elif len(watch.touches) == self._count:
            session.own_update_made()
        elif self._count is None and watch.is_written(touch):
            session.own_update_goes_on()
        if self._count is None or len(watch.touches) <= self._count:
            session.lines.note("step")

    def renewals(self) -> list[tuple[Tensor, int]]:
        """(parameter, address of the tensor that is about to take its place), of the update that was just made."""
        touches = self._watch.touches if self._watch is not None else []
        return [
            (self.tensors[name], touches[number - 1].tensor)
            for name, number in self._made_at.items()
            if number <= len(touches)
        ]

    def _learn_from(self, watch: UpdateWatch) -> None:
        """How many operations an update takes; where it takes another number each time, no step is taped."""
        taping = self._session.taping
        count = watch.last_touch_of(self.tensors.values())
        if taping is not None and self._count is not None and count != self._count:
            self._session.afterwards.append(taping.stop)
        self._count = count or None
        self._made_at = {
            name: number
            for name, tensor in self.tensors.items()
            if (number := watch.made_at(tensor)) and not watch.touches[number - 1].writes
        }
        if not count and self._has_changed_unseen() and taping is not None:
            taping.refused = "parameters are changed outside of PyTorch's operators: no step has an end"

    def _has_changed_unseen(self) -> bool:
        return self._then is not None and not np.array_equal(self.weights(), self._then[1])


def _at(tensor: Tensor, places: Tensor) -> np.ndarray:
    flat = tensor.detach().reshape(-1)[places]
    return (flat.real if flat.is_complex() else flat).double().cpu().numpy()


def _size(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values)))) if values.size else 0.0


def rate_of(
    change: np.ndarray, gradient: np.ndarray, weight: np.ndarray, largest: float = 0.0
) -> float | None:
    """The rate of plain descent, where the change is the gradient times one number; None where it is not.

    Nor where even the largest rate so far would leave a change that is lost in the weights' rounding.

    >>> rate_of(np.array([-0.1, 0.2]), np.array([1.0, -2.0]), np.zeros(2))
    0.1
    """
    square = float(gradient @ gradient)
    if not np.isfinite(square) or not np.isfinite(change).all() or square == 0:
        return None
    rate = -float(change @ gradient) / square
    rounding = 2.0**-23 * np.abs(weight)
    if (max(abs(rate), largest) * np.abs(gradient) <= VISIBLE * rounding).all():
        return None
    off = np.abs(change + rate * gradient) - rounding
    return rate if off.max() <= TIGHT * np.abs(change).max() or not change.any() else None
