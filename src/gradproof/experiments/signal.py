"""Where does the signal grow or die? Its size along blocks of one kind and along time, forward and backward."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from gradproof.experiments.evidence import Evidence, Verdict, confirmed
from gradproof.experiments.initial import place_of_start
from gradproof.tape.replay import Replay, differentiate

FEWEST_BLOCKS = 4
FEWEST_TIMES = 6
GROWS = 1e2  # forward, from the first block to the last
EXPLODES = 1e3  # backward, from the last block to the first
DIES = 1e-6
MOST_LINKS = 64
EARLY = 3


@dataclass(frozen=True)
class Chain:
    """Modules that the signal passes one after another: blocks of a stack, or one cell at each time step."""

    name: str
    kind: str  # blocks or time steps
    paths: tuple[str, ...]
    slots: tuple[int, ...]


def where_does_the_signal_go(evidence: Evidence) -> Iterator[Verdict]:
    """The first chain along which the signal or its gradient changes by orders of magnitude."""
    chains = find_chains(evidence)
    if not chains:
        return
    slots = [slot for chain in chains for slot in chain.slots]
    found = differentiate(evidence.tape, keep=slots, gradients_at=slots)
    for chain in chains:
        verdict = judge(evidence, chain, found)
        if verdict is not None:
            yield verdict
            return


def find_chains(evidence: Evidence) -> list[Chain]:
    """Numbered modules of one kind in a first pass, and modules whose output comes back to them at a later call."""
    stacks: dict[str, dict[str, int]] = {}
    calls: dict[str, list[int]] = {}
    for call in evidence.tape.modules:
        if not call.outputs or not evidence.slot(call.outputs[0]).dtype.is_floating_point:
            continue
        if not evidence.slot(call.outputs[0]).followed:
            continue  # a validation between two steps
        calls.setdefault(call.path, []).append(call.outputs[0])
        if re.search(r"\d", call.path):  # blocks.0, blocks.1, …, or fc1, fc2, …
            name = re.sub(r"\d+", "*", call.path)
            stacks.setdefault(f"{name}:{call.kind}", {}).setdefault(call.path, call.outputs[0])
    chains = []
    for name, links in stacks.items():
        slots = tuple(links.values())
        if len(links) >= FEWEST_BLOCKS and slots[-1] in reached_from(evidence, slots[0]):
            first = next(iter(links))
            title = (
                name.split(":")[0].removesuffix(".*").replace("*", f"{first} and its like", name[0] == "*")
            )
            chains.append(thin(Chain(title, "blocks", tuple(links), slots)))
    for path, found in sorted(calls.items(), key=lambda item: item[0].count(".")):
        if len(found) >= FEWEST_TIMES and found[-1] in reached_from(evidence, found[0]):
            chains.append(thin(Chain(path, "time steps", (path,) * len(found), tuple(found))))
    return chains[:4]


def reached_from(evidence: Evidence, slot: int) -> set[int]:
    """Everything that depends on a slot."""
    reach = {slot}
    for operation in evidence.forward:
        if not reach.isdisjoint(operation.reads):
            reach.update((*operation.makes, *operation.writes))
    return reach


def thin(chain: Chain) -> Chain:
    """At most so many links, evenly spread, the first and the last among them."""
    count = len(chain.slots)
    if count <= MOST_LINKS:
        return chain
    places = [round(i * (count - 1) / (MOST_LINKS - 1)) for i in range(MOST_LINKS)]
    return Chain(
        chain.name, chain.kind, tuple(chain.paths[i] for i in places), tuple(chain.slots[i] for i in places)
    )


def judge(evidence: Evidence, chain: Chain, found: Replay) -> Verdict | None:
    forward = sizes(chain.slots, found.values)
    backward = sizes(chain.slots, found.slot_gradients)
    if len(forward) < 2:
        return None
    steps = len(chain.slots) - 1
    growth = forward[-1] / forward[0] if forward[0] > 0 else math.nan
    # exactly nothing is a gate that is shut, or units that are off; what dies out leaves a trail that grows smaller
    trail = [size for size in backward if size > 0]
    flow = trail[0] / trail[-1] if len(trail) > 1 and backward[-1] > 0 else math.nan
    numbers = f"along {len(chain.slots)} {chain.kind} of {chain.name} "
    numbers += f"the signal goes from {forward[0]:.2g} to {forward[-1]:.2g}"
    if len(backward) > 1:
        numbers += f", its gradient from {backward[-1]:.2g} at the end to {backward[0]:.2g} at the beginning"
    how = "depth" if chain.kind == "blocks" else "time"
    link = chain.kind.removesuffix("s")
    if growth > GROWS or flow > EXPLODES or growth == math.inf:
        gain = max(x for x in (growth, flow) if x == x) ** (1 / steps)
        return confirmed(
            f"exploding-signal/{how}",
            numbers,
            f"a factor of {gain:.3g} a {link}",
            where=place_in(evidence, chain, worst_link(chain, forward)),
            if_troubled=not (growth > 10 * GROWS and flow > EXPLODES),  # both at once is no matter of scale
        )
    if flow < DIES or growth < DIES:
        gain = min(x for x in (growth, flow) if x == x) ** (1 / steps)
        return confirmed(
            f"vanishing-signal/{how}",
            numbers,
            f"a factor of {gain:.3g} a {link}",
            where=place_in(evidence, chain, chain.name),
            # what begins late is what training did to it: steps that were too long, units that died
            if_troubled=chain.kind != "blocks" or not flow < 1e-10 or evidence.step > EARLY,
        )
    return None


def place_in(evidence: Evidence, chain: Chain, link: str) -> str:
    """Of a recurrence, the weight that what comes back is multiplied with, and the line that gave it its values."""
    if chain.kind != "time steps":
        return link
    weight = recurrent_weight(evidence, chain)
    return place_of_start(evidence, weight) if weight else link


def recurrent_weight(evidence: Evidence, chain: Chain) -> str:
    """The matrix that meets the last call's output on its way to this call's."""
    first, second = chain.slots[0], chain.slots[1]
    reach = {first}
    weights = {slot.index: slot.name for slot in evidence.tape.parameters if len(slot.shape) == 2}
    for operation in evidence.forward:
        met = [weights[slot] for slot in operation.reads if slot in weights]
        if not reach.isdisjoint(operation.reads):
            if met:
                return met[0]
            reach.update((*operation.makes, *operation.writes))
        elif met and operation.makes:  # a transposed weight is still the weight
            weights.update(dict.fromkeys(operation.makes, met[0]) if operation.name == "t" else {})
        if second in operation.makes:
            break
    return ""


def sizes(slots: tuple[int, ...], values: dict) -> list[float]:
    """Root mean square at each slot that is known, in order."""
    return [float(values[s].double().square().mean().sqrt()) for s in slots if s in values]


def worst_link(chain: Chain, forward: list[float]) -> str:
    if len(forward) != len(chain.paths):
        return chain.name
    ratios = [b / a if a > 0 else 0.0 for a, b in pairwise(forward)]
    return chain.paths[max(range(len(ratios)), key=ratios.__getitem__) + 1]
