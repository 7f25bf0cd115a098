"""Is everything trained that the loss wants to change? Judged by the identity of tensors, and by what ever changed."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping

from torch import Tensor

from gradproof.experiments.verdict import Verdict, confirmed, excluded, first_of
from gradproof.instruments.evidence import Evidence
from gradproof.instruments.flow import VIEWS, with_line
from gradproof.instruments.update import (
    at_work,
    doubles,
    has_gradient,
    held,
    is_by_hand,
    is_copy,
    line_of_optimizer,
    named_parameters,
    read_update,
    shown,
)
from gradproof.tape.roles import find_unknown_parameters, reaches_unread

FAMILY = "param-not-updated"
UNFREEZE = (
    'after unfreezing, optimizer.add_param_group({"params": ...}), or make the optimizer of all parameters from the '
    "start: frozen ones have no gradient and are passed over"
)
REGISTER = "keep submodules in nn.ModuleList or nn.ModuleDict, parameters in nn.Parameter"
PASSED = 8  # taped steps in a row that leave a parameter as it is: who takes turns comes back sooner
TIMES = 2  # looks at a converted parameter: it has a gradient, and stays as it was at the last look


def does_the_optimizer_hold_everything(evidence: Evidence) -> Iterator[Verdict]:
    """Parameters that get a gradient and stay as they are, and why; else what is frozen and makes nothing but zeros."""
    looks = (plain_tensor, never_changed, passed_over, frozen_at_zero, frozen_in_between)
    yield from first_of(look(evidence) for look in looks)


def not_trained(what: str, said: list[str], where: str, line: str, fix: str) -> Verdict:
    # proven: whose tensors they are
    return confirmed(f"{FAMILY}/{what}", *said, where=with_line(where, line), fix=fix, confidence="proven")


def never_changed(evidence: Evidence) -> Verdict | None:
    """Parameters that get a gradient, that nobody has changed since they were seen, and that no optimizer holds.

    What was frozen is not trained by an optimizer that held it before; of updates by hand nobody knows what they hold.
    """
    known = evidence.memory.setdefault("changed", {"frozen": set(), "ever": set()})
    known["ever"].update(evidence.slot(slot).name for slot in evidence.tape.stepped)
    named, ids = named_parameters(evidence), set(map(id, held(evidence)))
    unknown = find_unknown_parameters(evidence.tape, set(named))
    unknown = {name: place for name, place in unknown.items() if name not in kept_up(evidence, unknown)}
    reached = [name for name, parameter in named.items() if has_gradient(parameter)]
    still = [name for name in reached if name not in known["ever"]]
    unfrozen = [name for name in still if name in known["frozen"] and named[name].requires_grad]
    frozen = {name for name, parameter in named.items() if not parameter.requires_grad}
    known["frozen"] |= frozen
    known["ever"] -= frozen  # by an optimizer of an earlier stage
    if is_by_hand(evidence):
        return left_out(evidence, [n for n in still if not is_data(evidence, named[n])], len(known["ever"]))
    free = [*(name for name in reached if id(named[name]) not in ids), *unknown]
    free = [name for name in free if name not in evidence.facts.waiting]
    missing = unfrozen or [name for name in free if not is_copy(evidence, named, name)]
    return why_not_held(evidence, missing, bool(unfrozen), named, unknown) if missing else None


def left_out(evidence: Evidence, missing: list[str], changed: int) -> Verdict | None:
    """By an update that is written out; one that changes nothing leaves nothing out."""
    if not evidence.tape.stepped:
        return None
    if not missing:
        return excluded(f"{FAMILY}/left-out", f"the update changes all of {changed} parameters")
    line, names = read_update(evidence.tape).line, shown(missing)
    fix = f"let the update at {line or 'the end of the step'} change {names}, too"
    return not_trained(
        "left-out", [f"{names} get a gradient, and no update changes them"], missing[0], line, fix
    )


def why_not_held(
    evidence: Evidence, missing: list[str], unfrozen: bool, named: dict[str, Tensor], unknown: dict[str, str]
) -> Verdict | None:
    """They were unfrozen, replaced, are in a plain list, or in a model that no optimizer was given."""
    facts = evidence.facts
    places = list(dict.fromkeys(unknown.get(name, name) for name in missing))
    places = [p for p in places if not any(other.startswith(f"{p}.") for other in places)]  # named already
    where, line, names = places[0], line_of_optimizer(evidence), shown(places)
    lines = [f"{names} get a gradient, and no optimizer changes them"]
    mine = set(map(id, named.values()))
    orphans = {id(p) for p in held(evidence) if p.grad is None and id(p) not in mine}
    if unfrozen:
        lines.append(f"they were frozen, and require a gradient since step {evidence.step} at the latest")
        return not_trained("unfrozen", lines, where, line, UNFREEZE)
    if orphans:
        lines.append(f"{len(orphans)} tensors that the optimizer holds are no longer part of the model")
        return not_trained(
            "replaced", lines, where, line, "make the optimizer after the model has its final layers"
        )
    listed = not all(name in unknown for name in missing)
    if not listed and facts.holders:
        holder = facts.holders[0]
        lines.append(f"model.parameters() does not list them: {holder['path']} is a plain {holder['kind']}")
        return not_trained("unregistered", lines, holder["path"], holder["line"], REGISTER)
    fix = f"give the optimizer {names} too"
    if not listed:
        shapes = {tuple(slot.shape) for slot in evidence.tape.parameters if slot.name in missing}
        strangers = [s for s in facts.strangers if not shapes.isdisjoint(map(tuple, s["shapes"]))]
        if strangers and not any(stranger["training"] for stranger in strangers):
            return None  # a model that only judges, in eval mode: nobody meant to train it
        where = strangers[0]["name"] if strangers else where
        fix = f"give an optimizer the parameters of {where} too"
        lines += ["two optimizers hold the same parameters"] if doubles(evidence) else []
    return not_trained("not-in-optimizer", lines, where, line, fix)


def is_data(evidence: Evidence, leaf: Tensor) -> bool:
    """A leaf with a row for each row of the loss: a batch whose own gradient is wanted, not something to train."""
    rows = {evidence.slot(s).shape[0] for s in evidence.roles.prediction_slots if evidence.slot(s).shape}
    return leaf.dim() > 0 and len(leaf) > 1 and len(leaf) in rows


def kept_up(evidence: Evidence, unknown: Mapping[str, str]) -> set[str]:
    """Those of no model that somebody does change: other values than when they were first seen, or those that a
    trained tensor has or had, as a target network that is overwritten every so often."""
    if not unknown:
        return set()
    tape = evidence.tape
    trained: set[Hashable] = evidence.memory.setdefault("values of trained", set())
    first: dict[str, Hashable] = evidence.memory.setdefault("first values", {})
    values = {
        slot.name: print_of(tape.leaf_value(slot.index)) for slot in tape.parameters if slot.name in unknown
    }
    trained |= {print_of(tape.leaf_value(slot)) for slot in tape.stepped}
    for name, value in values.items():
        first.setdefault(name, value)
    return {name for name, value in values.items() if value != first[name] or value in trained}


def print_of(value: Tensor) -> Hashable:
    """What two tensors have in common if they are the same, number by number."""
    wide = value.detach().double()
    return tuple(value.shape), float(wide.sum()), float(wide.square().sum())


def passed_over(evidence: Evidence) -> Verdict | None:
    """Parameters that an optimizer holds and used to change; they get a gradient, and its steps leave them alone."""
    # name -> when it was left alone, since it was changed last
    known = evidence.memory.setdefault("passed over", {})
    names = {id(parameter): name for name, parameter in named_parameters(evidence).items()}
    stepped = {evidence.slot(slot).name for slot in evidence.tape.stepped}
    groups = [group for optimizer in at_work(evidence) for group in optimizer.param_groups if group.get("lr")]
    for parameter in (p for group in groups for p in group["params"] if id(p) in names):
        name = names[id(parameter)]
        if name in stepped:
            known[name] = []
        elif name in known and has_gradient(parameter):
            known[name].append(evidence.step)
    passed = [name for name, steps in known.items() if len(steps) >= PASSED]
    if not passed or not stepped:
        return None
    since = known[passed[0]]
    lines = [
        f"{shown(passed)} get a gradient and are held by an optimizer that has changed them before; its steps "
        f"pass over them since step {since[0]}, at all of {len(since)} taped steps, and change {len(stepped)} others"
    ]
    fix = "compare the step with that of torch.optim as it is: what is compiled or traced once may keep an old list"
    return not_trained("passed-over", lines, passed[0], read_update(evidence.tape).line, fix)


def plain_tensor(evidence: Evidence) -> Verdict | None:
    """nn.Parameter(…).to(…) is a plain tensor that the model reads, and the Parameter is nobody's."""
    if not reaches_unread(evidence.tape, set(named_parameters(evidence))):
        return None
    seen = evidence.memory.setdefault("converted", {})
    for kept in evidence.facts.converted:
        name = kept["name"]
        looks, before = seen.get(name, (0, kept["size"]))
        # one that somebody changes by hand is never looked at again
        looks = looks + 1 if before == kept["size"] else -(10**9)
        seen[name] = (looks, kept["size"])
        if looks >= TIMES:
            said = [
                f"{name} {kept['shape']} is a plain tensor that {kept['how']} made of an nn.Parameter: "
                "model.parameters() does not list it, and the Parameter is in no module and no optimizer",
                f"the Parameter has a gradient (norm {kept['gradient']:.3g}) and never changes",
            ]
            fix = (
                f"convert first, then wrap: {name.rpartition('.')[2]} = nn.Parameter(values.to(...)), or move the "
                "whole model with model.to(...)"
            )
            return not_trained("plain-tensor", said, name, kept["line"], fix)
    return None


def frozen_at_zero(evidence: Evidence) -> Verdict | None:
    """Matrices that are zero and frozen, as adapters are made and nobody wants them to stay: what they make is zero."""
    named = named_parameters(evidence)
    frozen = [
        name
        for name in matrices(evidence, named)
        if not named[name].requires_grad and not named[name].is_meta
    ]
    zero = [name for name in frozen if not named[name].detach().count_nonzero()]
    if not zero:
        return None
    said = f"{shown(zero)}: all zero, and frozen; whatever they are given, they make zero, and nothing can change that"
    line = next(iter(evidence.facts.lines.get("requires_grad_", ())), "")
    fix = f"set requires_grad = True for {shown(zero)} before the optimizer is made, and give them to it"
    return not_trained("frozen", [said], zero[0], line, fix)  # every entry was looked at


def frozen_in_between(evidence: Evidence) -> Verdict | None:
    """A frozen matrix with trained ones before and behind it, still at the random values that it was made with."""
    facts = evidence.facts
    if any(load.get("fitting") for load in facts.loads) or facts.optimizer_states.get("in_files"):
        return None  # something was loaded: what is frozen may be what was learned before
    named, ids = named_parameters(evidence), set(map(id, held(evidence)))  # now or before
    names = matrices(evidence, named)
    trained = [named[name].requires_grad or id(named[name]) in ids for name in names]
    for place, name in enumerate(names):
        between = any(trained[:place]) and any(trained[place + 1 :])
        if not trained[place] and between and not is_copy(evidence, named, name):
            line = next(iter(facts.lines.get("requires_grad_", ())), "")
            return confirmed(
                f"{FAMILY}/frozen",
                f"{name} is frozen at its first values, with trained layers before and behind it; nothing was loaded",
                where=f"{name} ({line})" if line else name,
                fix=f"set requires_grad_(True) for {name}, or load the weights that are to stay",
                level="warning",
                confidence="possible",
                if_troubled=True,
                lasting=False,
            )
    return None


def matrices(evidence: Evidence, named: Mapping[str, Tensor]) -> list[str]:
    """The names of those that layers read, in the order of use."""
    flow = evidence.flow
    read = [evidence.slot(flow.behind(slot, VIEWS)).name for op in flow.layers for slot in op.reads]
    return [name for name in dict.fromkeys(read) if name in named and named[name].dim() >= 2]
