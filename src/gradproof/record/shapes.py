"""What a run says, shape by shape: the fields of run.json, what listeners noted, and every kind of event."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from gradproof.record.door import (
    LARGEST_WHOLE,
    Damaged,
    Shape,
    anything,
    finite,
    flag,
    list_of,
    map_of,
    maybe,
    name,
    number,
    one_of,
    pair_of,
    record,
    same_length,
    text,
    whole,
    with_words,
)
from gradproof.record.schema import OUTCOMES

LEVEL = one_of(("problem", "warning", "note"))
CONFIDENCE = one_of(("proven", "likely", "possible", ""))  # empty: of what is not confirmed
NAMES = list_of(name)
STEPS = list_of(whole)
MOST_AXES, MOST_ENTRIES = 64, 1 << 60


def sizes(value: Any) -> Any:
    """The shape of a tensor."""
    found = list_of(whole, most=MOST_AXES)(value)
    if math.prod(found) > MOST_ENTRIES:
        raise Damaged("no tensor is so large")
    return found


def position(value: Any) -> float:
    """A step as a script counts it."""
    found = finite(value)
    if not 0 <= found <= LARGEST_WHOLE:
        raise Damaged("it is no step")
    return found


TENSOR = record({"kind": name, "name": name}, {"shape": sizes, "dtype": name, "module": name})

PARAMETER = record(
    {"name": name, "shape": sizes},
    {
        "dtype": name,
        "trainable": flag,
        "optimizer": maybe(whole),
        "gradient": flag,
        "changed": flag,
        "part": pair_of(
            whole, whole
        ),  # of a sharded one: entries that lie on this rank, parts it is cut into
    },
)


def number_or_list(value: Any) -> Any:
    return list_of(maybe(number))(value) if isinstance(value, list) else number(value)


SETTINGS = record(
    {},
    {
        **{key: maybe(number) for key in ("lr", "weight_decay", "momentum")},
        "betas": maybe(list_of(number, fewest=2)),
        "eps": maybe(number_or_list),  # Adafactor has two
    },
)

OPTIMIZER = record(
    {},
    {
        "name": name,
        "class": name,
        "line": name,
        "base_lr": maybe(number),
        "groups": list_of(SETTINGS),
        "groups_left_out": whole,
    },
)

COST = record(
    {"own_seconds": finite, "share": finite},
    {
        "steps": whole,
        "bare_steps": whole,
        "unseen_steps": whole,
        "taped_steps": whole,
        "budget": maybe(finite),
        "taping_seconds": finite,
    },
)


def parameter(value: Any) -> Any:
    return {"optimizer": None, **PARAMETER(value)}


# what listeners and examinations have noted, by name
FACTS: dict[str, Shape] = {
    "lines": map_of(NAMES),
    "modes": with_words("kind", "line", "module")(
        record(
            {"train": STEPS, "eval": STEPS},
            {
                "functional": map_of(record({"p": number, "module": name}, {"made": flag})),
                "kind": name,
                "line": name,
                "module": name,
            },
        )
    ),
    "loads": list_of(
        record(
            {
                "class": name,
                "fitting": whole,
                "given": whole,
                "keys": whole,
                "line": name,
                "missing": name,
                "model": maybe(name),
                "same_memory": whole,
                "step": whole,
                "strange": name,
            },
            {"taken": name},
        )
    ),
    "overwritten_loads": list_of(record({"class": name, "line": name, "matrices": whole, "step": whole})),
    "optimizer_states": with_words("line", "remade_class", "remade_line")(
        record(
            {"in_files": whole, "loaded": whole, "remade": STEPS},
            {"line": name, "remade_class": name, "remade_line": name},
        )
    ),
    "backwards_after_the_last_step": whole,
    "moved_between_backwards": flag,
    "average": record(
        {
            "decays": list_of(pair_of(whole, number), fewest=1),
            "in_training": flag,
            "module": flag,
            "shapes": number,
            "tensors": whole,
            "where": name,
        }
    ),
    "learned": list_of(pair_of(whole, number)),
    "guessing": list_of(pair_of(whole, number)),
    "copies": list_of(
        record(
            {
                "class": name,
                "follows": flag,
                "line": name,
                "norm": name,
                "ratio": number,
                "shapes": name,
                "shift": number,
                "step": whole,
                "still": flag,
                "times": whole,
                "untouched": flag,
            }
        )
    ),
    "copies_called": map_of(record({"line": name, "times": whole})),
    "data_sets": map_of(
        record(
            {
                "again": whole,
                "changed_again": whole,
                "class": name,
                "drift": number,
                "line": name,
                "reads": whole,
                "reordered": whole,
            }
        )
    ),
    "files": map_of(record({"count": whole, "line": name, "names": list_of(name, fewest=2)})),
    "opened": map_of(whole),
    "rows": map_of(
        record(
            {
                "distinct": whole,
                "drawn": whole,
                "expected": number,
                "line": name,
                "passes": whole,
                "size": whole,
                "trains": flag,
            }
        )
    ),
    "clip": record({"given": whole, "stepped": whole, "steps": whole}, {"copies": whole, "foreign": whole}),
    "pairs": record({"again": whole, "other": whole, "line": name}),
    "returns": record(
        {
            "initial": flag,
            "line": name,
            "loaded": flag,
            "moments": flag,
            "source": maybe(record({"class": name, "shapes": name})),
            "steps": list_of(whole, fewest=2),
            "times": whole,
            "writes": whole,
        }
    ),
    "taken_back": with_words("line")(
        same_length("shares", "steps")(record({"shares": list_of(number), "steps": STEPS}, {"line": name}))
    ),
    "own_updates": same_length("change", "gradient", "steps")(
        record({"change": list_of(number), "gradient": list_of(number), "steps": STEPS})
    ),
    "one_batch": record({"start": number, "end": number, "steps": whole}),
    "sharded": flag,
    "fully_sharded": flag,
    "sharded_late": flag,
    "small_batch_norm": record({"rows": whole, "modules": whole, "name": name}),
    "worker_draws": record({"generator": name, "alike": whole, "workers": whole, "line": name}),
    "spectral_norm": record({"share": number}, {"module": name, "line": name, "step": whole}),
    "collective_failed": record({"step": whole, "what": name, "line": name, "text": name}),
    "sampler_epochs": record({"passes": whole, "line": maybe(name)}),
    "policy_loss": flag,
    "said": list_of(record({"who": name, "text": text, "line": name, "step": whole, "times": whole})),
}


def print_of_tensor(value: Any) -> Any:
    """Kind, name, and of a sharded tensor into how many parts it is cut."""
    if not isinstance(value, list) or len(value) != 3:
        raise Damaged("it is no fingerprint")
    return [name(value[0]), name(value[1]), whole(value[2])]


# the fields of run.json; `tensors` is read tensor by tensor, `facts` fact by fact
INFO: dict[str, Shape] = {
    "command": NAMES,
    "directory": name,
    "script": name,
    "began": finite,
    "ended": finite,
    "failure": maybe(text),
    "raised": record({}, {"type": name, "text": text, "line": name}),
    "stopped_after": whole,  # steps, by whoever watched
    "cost": COST,
    "parameters": list_of(parameter),
    "optimizers": list_of(OPTIMIZER),
    "cells": map_of(name),  # of a notebook: the file name of a cell's code -> what it is called
    "source": record({}, {"file": maybe(name), "sha256": maybe(name), "commit": maybe(name)}),
    "versions": map_of(name),
    "events_seen": map_of(whole),
    "rank": whole,
    "world": whole,
    "threads": whole,
    "taping": map_of(anything),
    "written_by": maybe(name),
    "thinned": whole,
    "prints": list_of(print_of_tensor),
    "frames_ended": whole,
    "tensors_left_out": whole,
    "parameters_left_out": whole,
    "optimizers_left_out": whole,
}

VERDICT = record(
    {"verdict": one_of(("confirmed", "excluded", "undecided")), "family": name},
    {
        "step": maybe(whole),
        "experiment": name,
        "id": name,
        "level": LEVEL,
        "confidence": maybe(CONFIDENCE),
        "evidence": list_of(text),
        "reason": text,
        "about": maybe(name),
        "fix": maybe(text),
        "title": maybe(name),
        "where": maybe(name),
        "numbers": maybe(map_of(number)),
        "if_troubled": flag,
        "lasting": flag,
    },
)

QUESTION = record(
    {"name": name}, {"sentence": name, "core": flag, "enough": maybe(whole), "causes": NAMES, "cost": name}
)

EVENTS: dict[str, Shape] = {
    "verdict": VERDICT,
    "asked": record(
        {"question": name, "outcome": one_of(OUTCOMES)},
        {"step": whole, "reason": maybe(text), "seconds": number},
    ),
    "table": record({"questions": list_of(QUESTION)}),
    "specimen": record({"step": whole}, {"operations": whole}),
    "random": record({"step": whole}, {"torch": whole, "numpy": whole, "python": whole}),
    "averaging": same_length("local", "final")(
        record({"step": whole, "local": list_of(number), "final": list_of(number), "clip": number})
    ),
    "seen": record({"question": name, "id": name, "times": whole}, {"where": maybe(name), "step": whole}),
    "proven": record({"id": name}, {"step": maybe(whole), "where": maybe(name), "evidence": list_of(text)}),
    "gains": record(
        {"step": whole, "modules": map_of(record({}, {"forward": maybe(number), "backward": maybe(number)}))}
    ),
    "shadow": record(
        {
            "step": whole,
            "parameters": list_of(record({"name": name}, {"error": number, "tolerance": number})),
        },
        {"loss": number, "true_loss": number, "notes": list_of(text)},
    ),
    "done again": record(
        {"step": whole, "name": name, "outcome": one_of(("memory", "code", "undecided"))},
        {
            **{
                "rank": maybe(whole),
                "done": whole,
                "entries": whole,
                "why": text,
                "what": name,
                "where": name,
            },
            **{"place": list_of(whole), "bits": list_of(whole), "was": number, "now": number},
        },
    ),
    "swapped": record(
        {"blame": one_of(("data", "weights", "both", "neither", ""))},
        {
            **{
                "turned": whole,
                "passing": flag,
                "early": list_of(whole),
                "late": list_of(whole),
                "why": text,
                "spoilt": name,
                "written": name,
                "moved": number,
                "explained": number,
                "changed": list_of(text),
            },
            "losses": map_of(number),
            "put_back": list_of(record({"part": name, "loss": number, "share": number})),
        },
    ),
    "trial": record(
        {"id": name, "words": name, "step": whole, "before": number, "after": number, "helped": flag}
    ),
    "fact": record({"name": name}),
    "experiment_failed": record({}, {"experiment": name, "error": text, "step": whole}),
    "examination_ended": record({}, {"limit": maybe(finite), "left": whole}),
    "examiner_lost": record({"signal": name}, {"step": whole, "question": name}),
    "watching_failed": record({}, {"step": whole, "error": maybe(text), "place": name}),
    "first_nonfinite": record({"step": whole}),
    "log": record({}, {"step": position}),
}


def clean_info(data: dict[str, Any], say: Callable[[str], None]) -> dict[str, Any]:
    """The fields of run.json that are what they should be; `say` hears of the others."""
    found: dict[str, Any] = {}
    for key, value in data.items():
        if key in ("tensors", "facts"):
            continue
        _keep(found, key, value, INFO.get(key, anything), say)
    tensors = data.get("tensors", [])
    found["tensors"] = (
        [_tensor(number, value) for number, value in enumerate(tensors)] if isinstance(tensors, list) else []
    )
    bad = sum(tensor["kind"] == NO_KIND for tensor in found["tensors"])
    if bad or not isinstance(tensors, list):
        say(f"what describes {bad} tensors" if bad else "the list of tensors")
    facts = data.get("facts")
    if isinstance(facts, dict):
        found["facts"] = {}
        for key, value in facts.items():
            _keep(found["facts"], key, value, FACTS.get(key, anything), say)
    elif facts is not None:
        say("facts")
    return found


NO_KIND = "unknown"  # of a tensor whose description is damaged; frames count on its place


def _tensor(number: int, value: Any) -> dict[str, Any]:
    try:
        return TENSOR(value)
    except Damaged:
        pass
    try:  # what says what it is, without the rest
        return TENSOR({key: value[key] for key in ("kind", "name")})
    except (Damaged, TypeError, KeyError):
        return {"kind": NO_KIND, "name": f"tensor {number}"}


def _keep(found: dict[str, Any], key: str, value: Any, shape: Shape, say: Callable[[str], None]) -> None:
    try:
        found[name(key)] = shape(value)
    except Damaged as error:
        say(f"{name(key)[:40]} ({error})")


def clean_event(data: Any) -> dict[str, Any]:
    """One event; Damaged if it is none, or not what its kind has to be."""
    if not isinstance(data, dict) or not isinstance(data.get("event"), str):
        raise Damaged("it is no event")
    found = EVENTS.get(data["event"], anything)(data)
    if data["event"] == "fact":
        found["value"] = FACTS.get(found["name"], anything)(data.get("value"))
    return found
