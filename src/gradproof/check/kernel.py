"""A kernel as a black box: the same input twice, layouts, sizes, memory, modes, its backward, and what it claims to be.

For code whose inside nobody can replay: a shared library through ctypes, an extension, Triton, CUDA, a package without
source. It is called with the dtypes it was given and with no other, and every bound is that of its own precision. A
kernel that refuses an argument by raising is right to do so, and that is said.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gradproof.check.blackbox import (
    Answer,
    BlackBox,
    backward_box,
    black_box,
    c_functions,
    layouts_for,
    same_bits,
    subject_of_box,
)
from gradproof.check.claims import find_claim_faults
from gradproof.check.culprit import scale_of
from gradproof.check.findings import Fault, KernelCheck, KernelFault
from gradproof.check.gradient import UNDECIDED_FROM, GradientMismatch, check_subject, claim_at, measure_lines
from gradproof.check.subject import Subject
from gradproof.check.variations import grown_boxes, permuted
from gradproof.errors import UserError
from gradproof.numerics.difference import Difference, difference

SECONDS = 10.0  # after which no other size is tried
REPEATS = 6
PATTERNS = (-7391.0, math.nan)  # what new memory holds: two numbers that no kernel makes by chance
DRAWS = 6
MODE_DRAWS = 64


def check_kernel(
    kernel: Any, *inputs: Any, reference: Callable | None = None, name: str | None = None
) -> KernelCheck:
    """Raise `KernelFault` if a kernel is wrong as far as can be seen from outside, else say what was tried.

    `kernel` is a function of tensors (it may write into them), an `autograd.Function`, a module, or an optimizer (its
    class or one that was made; then inputs are parameters). `reference` is the same function in PyTorch; without one, a
    kernel that is recognised by its name or its numbers is compared with the textbook.

        check_kernel(torch.tanh, torch.randn(3, 4))
    """
    found = find_kernel_faults(kernel, *inputs, reference=reference, name=name)
    if not found.right:
        raise KernelFault(found)
    return found


def find_kernel_faults(
    kernel: Any, *inputs: Any, reference: Callable | None = None, name: str | None = None
) -> KernelCheck:
    """The same, with the faults in what is returned."""
    if isinstance(kernel, torch.optim.Optimizer) or (
        isinstance(kernel, type) and issubclass(kernel, torch.optim.Optimizer)
    ):
        from gradproof.check.steps import find_step_faults

        return find_step_faults(kernel, inputs, name)
    box = black_box(kernel, inputs, name)
    first = box.ask()
    if first.refused:
        raise UserError(f"{box.name} cannot be called with these inputs: {first.refused}")
    if not first.results:
        raise UserError(f"{box.name} returns no tensor and writes into none; nothing can be compared")
    box = replace(box, functions=c_functions())
    # what is declared to return nothing returns anything
    loud = " ".join(code for _ in range(3) for code in box.ask().codes)
    box = replace(box, functions=[f for f in box.functions if f"{f.__name__} " not in loud])
    check = KernelCheck(box.name)
    began = time.perf_counter()
    _examine(box, check, reference)
    backward = None if check.faults else backward_box(box, first.written)
    if backward is not None:
        _examine(backward, check, None)
    if backward is not None and not check.faults:
        check.add(_wrong_gradient(box, backward, check))
    for words, grown, thorough in grown_boxes(box):
        if check.faults or time.perf_counter() - began > SECONDS:
            break
        _try_size(words, grown, first.written, reference, thorough, check)
    if not check.faults:
        check.add(_other_mode(box, check))
    return check


def _try_size(
    words: str,
    grown: BlackBox,
    written: Sequence[int],
    reference: Callable | None,
    thorough: bool,
    check: KernelCheck,
) -> None:
    """The tests that another size may fail; differences of the forward only where `thorough`."""
    if refused := grown.ask().refused:
        check.refused.append(f"{words}: {refused}")
        return
    check.tried.append(words)
    found = KernelCheck(grown.name)
    found.add(find_habits(grown, found))
    if not found.faults:
        found.add(find_claim_faults(grown, reference, found.notes))
    backward = None if found.faults else backward_box(grown, written)
    if backward is not None:
        found.add(find_habits(backward, found))
        if not found.faults and thorough:
            found.add(_wrong_gradient(grown, backward, found))
    check.add([replace(fault, what=f"{fault.what} ({words})") for fault in found.faults])


def find_call_faults(kernel: Any, *inputs: Any, name: str | None = None) -> KernelCheck:
    """What is wrong with a kernel at the very call that was made: no other sizes, and no layouts but those it had."""
    box = black_box(kernel, inputs, name)
    first = box.ask()
    if first.refused or not first.results:
        raise UserError(f"{box.name} cannot be called again: {first.refused or 'it returns no tensor'}")
    check = KernelCheck(box.name)
    check.add(find_habits(box, check))
    if not check.faults:
        check.add(find_claim_faults(box, None, check.notes))
    for k in box.tensors if not check.faults else ():
        if not box.leaves[k].is_contiguous():
            base = box.with_leaves([x.contiguous() if i == k else x for i, x in enumerate(box.leaves)])
            gaps = box.apart(first, base.ask(), _noise(box, first))
            for result, gap in gaps[:1]:
                what = f"{box.name} is wrong where {box.names[k]} is not contiguous, as it was in the step"
                check.add([Fault("layout", what, f"{result}: {_numbers(gap)}")])
    backward = None if check.faults else backward_box(box, first.written)
    if backward is not None:
        check.add(find_habits(backward, check))
        if not check.faults:
            check.add(_wrong_gradient(box, backward, check))
    return check


def _examine(box: BlackBox, check: KernelCheck, reference: Callable | None) -> None:
    """All tests of one black box at the arguments it was given."""
    check.add(find_habits(box, check))
    if check.faults:
        return
    if not box.part:
        check.add(find_claim_faults(box, reference, check.notes))
    check.add(_other_layouts(box, check))


def find_habits(box: BlackBox, check: KernelCheck) -> Iterator[Fault]:
    """What is wrong whatever the kernel computes: memory first, for what is unwritten changes from call to call."""
    first = box.ask()
    check.tried += [t for t in ("twice", "memory filled beforehand") if t not in check.tried]
    for test in (_memory, _repeats, _untouched, _without_gradient):
        found = list(test(box, first))
        yield from found
        if found:
            return


def _codes(answer: Answer) -> str:
    return f"; {answer.codes[0]}, and nobody looked at it" if answer.codes else ""


def _numbers(gap: Difference) -> str:
    many = f"{gap.disagree} of {gap.total} entries"
    return f"{many}, at {gap.place} {gap.value.real:.6g} in place of {gap.reference.real:.6g}"


def _memory(box: BlackBox, first: Answer) -> Iterator[Fault]:
    """Results must not depend on what memory held before, nor may anything beside them be written."""
    if first.beside:
        yield Fault("memory", f"{box.part}{box.name} writes into memory beside {first.beside}")
    answers = [box.ask(fresh=pattern) for pattern in PATTERNS]
    if any(a.refused or len(a.results) != len(first.results) for a in answers):
        return
    for name, low, nan, own in zip(
        first.names, answers[0].results, answers[1].results, first.results, strict=True
    ):
        if not own.is_floating_point() or low.shape != nan.shape or low.shape != own.shape:
            continue
        pattern = torch.tensor(PATTERNS[0], dtype=low.dtype, device=low.device)
        unwritten = (low == pattern) & nan.isnan()
        if bool(unwritten.any()):
            yield Fault(
                "memory",
                f"{box.part}{box.name} leaves {_entries(unwritten)} of {name} unwritten{_codes(answers[0])}",
                "what is there is what the memory held before",
            )
            return
        nans = own.isnan()
        gap = difference(low.masked_fill(nans, 0), own.masked_fill(nans, 0), absolute=box.allowed(own))
        if not gap.ok and box.apart(box.ask(fresh=PATTERNS[0]), answers[0]):
            return  # it changes by itself
        if not gap.ok or bool((nan.isnan() & ~nans).any()):
            yield Fault(
                "memory",
                f"{box.part}{box.name} reads memory that nothing has written: {name} depends on what it held before",
                _numbers(gap) if not gap.ok else "NaN in new memory reaches the result",
            )
            return
    for k in first.written:
        yield from _unwritten_argument(box, first, k)


def _unwritten_argument(box: BlackBox, first: Answer, k: int) -> Iterator[Fault]:
    """An argument that is overwritten as a whole must be so to its last entry."""
    if not box.leaves[k].is_floating_point():
        return
    after = []
    for pattern in (-7391.0, 4816.0):
        leaves = list(box.leaves)
        leaves[k] = torch.full_like(box.leaves[k], pattern)
        answer = box.with_leaves(leaves).ask()
        place = answer.written.index(k) if k in answer.written else None
        if answer.refused or place is None:
            return
        after.append(answer.results[len(answer.results) - len(answer.written) + place])
    one, other = after
    left = (one == -7391.0) & (other == 4816.0)
    if bool(left.any()) and bool((one == other)[~left].all()) and 2 * int(left.sum()) < left.numel():
        yield Fault(
            "memory",
            f"{box.part}{box.name} leaves {_entries(left)} of {box.names[k]} unwritten",
            "they hold what they held before the call, while all others are overwritten",
        )


def _entries(mask: Tensor) -> str:
    """How many entries, and where: the last ones, or from the first on."""
    flat, count = mask.flatten(), int(mask.sum())
    if count == flat.numel():
        return f"all {count} entries"
    if bool(flat[-count:].all()):
        return f"the last {count} of {flat.numel()} entries"
    if (
        mask.dim() > 1
        and count % mask.shape[0] == 0
        and bool(mask[..., -(count // mask[..., 0].numel()) :].all())
    ):
        return f"the last {count // mask[..., 0].numel()} of {mask.shape[-1]} columns"
    return f"{count} of {flat.numel()} entries (first {tuple(mask.nonzero()[0].tolist())})"


def _repeats(box: BlackBox, first: Answer) -> Iterator[Fault]:
    """The same input twice: apart by rounding at most."""
    for _ in range(REPEATS):
        again = box.ask()
        if again.refused:
            yield Fault("repeat", f"{box.part}{box.name} refuses when it is called again: {again.refused}")
            return
        for name, gap in box.apart(again, first):
            yield Fault(
                "repeat",
                f"{box.part}{box.name} gives another result for the same input, beyond rounding: "
                "a race, or numbers from no generator of torch's",
                f"{name}: {_numbers(gap)}",
            )
            return


def _noise(box: BlackBox, first: Answer) -> list[float]:
    """How far apart results were that only rounding sets apart."""
    again = [box.ask() for _ in range(3)]
    return [
        max(
            float((a.results[k].double() - x.double()).abs().nan_to_num(0.0, 0.0, 0.0).max())
            if x.numel()
            else 0.0
            for a in again
            if len(a.results) == len(first.results) and a.results[k].shape == x.shape
        )
        if again
        else 0.0
        for k, x in enumerate(first.results)
    ]


def _untouched(box: BlackBox, first: Answer) -> Iterator[Fault]:
    """Entries of an argument that is changed in place, and that no input ever changes."""
    if any(not box.leaves[k].is_floating_point() for k in box.tensors):
        return  # indices: what they do not name may stay
    for k in first.written:
        x = box.leaves[k]
        if not x.is_floating_point() or x.numel() < 8:
            continue
        changed = torch.zeros(x.shape, dtype=torch.bool, device=x.device)
        for seed in range(DRAWS):
            drawn = box.with_leaves(permuted(box, seed))
            answer = drawn.ask()
            if k not in answer.written:
                continue
            after = answer.results[len(answer.results) - len(answer.written) + answer.written.index(k)]
            changed |= after != drawn.leaves[k]
        left = ~changed
        if bool(left.any()) and 4 * int(left.sum()) < left.numel() and bool(left.flatten()[-1]):
            yield Fault(
                "memory",
                f"{box.part}{box.name} never changes {_entries(left)} of {box.names[k]}",
                f"{DRAWS} inputs changed all the others",
            )


def _other_layouts(box: BlackBox, check: KernelCheck) -> Iterator[Fault]:
    """The same numbers, laid out otherwise in memory, one argument at a time."""
    first = box.ask()
    noise = _noise(box, first)
    if _is_random(box):
        check.notes.append(
            "it is random: numbers are drawn in the order of memory, so layouts were not compared"
        )
        return
    own = len(box.leaves) - sum(n.startswith("incoming") for n in box.names)
    for k in box.tensors:
        if box.part and k < own:
            continue  # the forward has been asked; of the backward, the incoming gradient is new
        for layout in layouts_for(box.leaves[k]):
            yield from _in_layout(box, box, first, noise, k, layout, check)
        if box.part and box.leaves[k].numel() > 1:
            leaves = list(box.leaves)
            leaves[k] = torch.full_like(leaves[k], 0.75)
            level = box.with_leaves(leaves)
            # one number everywhere may cancel to nothing: rounding is as large as it is for any other
            room = [n + box.allowed(x) for n, x in zip(noise, first.results, strict=True)]
            yield from _in_layout(box, level, level.ask(), room, k, "expanded", check)
    check.tried += [t for t in ("layouts",) if t not in check.tried]


def _is_random(box: BlackBox) -> bool:
    return any(_far(a, b) for a, b in zip(*_draws(box, 2), strict=True))


def _in_layout(
    box: BlackBox, asked: BlackBox, first: Answer, noise: list[float], k: int, layout: str, check: KernelCheck
) -> Iterator[Fault]:
    now = asked.ask({k: layout})
    said = f"{box.names[k]} {layout}" + (", as from .sum()" if layout == "expanded" else "")
    if now.refused:
        check.refused.append(f"{box.part}{said}: {now.refused}" if box.part else f"{said}: {now.refused}")
        return
    if now.beside:
        yield Fault(
            "layout", f"{box.part}{box.name} writes between the entries of {now.beside} where it is {layout}"
        )
        return
    if k in first.written and k not in now.written:
        yield Fault(
            "layout",
            f"{box.part}{box.name} does nothing to {box.names[k]} where it is not contiguous ({layout}){_codes(now)}",
            "it leaves it as it was, and does not say so",
        )
        return
    same = now.names == first.names
    gaps = box.apart(now, first, noise) if same else []
    if gaps or not same:
        name, gap = gaps[0] if gaps else ("", None)
        yield Fault(
            "layout",
            f"{box.part}{box.name} is wrong where {box.names[k]} is {layout}"
            + (" (as from .sum())" if layout == "expanded" else "")
            + _codes(now),
            f"{name}: {_numbers(gap)}"
            if gap
            else f"it writes {', '.join(now.names)}, not {', '.join(first.names)}",
        )


def _without_gradient(box: BlackBox, first: Answer) -> Iterator[Fault]:
    """With and without gradients asked for, the result is one."""
    if first.written or box.part:
        return
    followed = box.ask(followed=True)
    if followed.refused or followed.names != first.names:
        return
    for name, gap in box.apart(first, followed, _noise(box, first)):
        yield Fault(
            "mode",
            f"{box.name} computes something else under torch.no_grad() than where gradients are asked for",
            f"{name}: {_numbers(gap)}",
        )
        return


def _wrong_gradient(box: BlackBox, backward: BlackBox, check: KernelCheck) -> Iterator[Fault]:
    """The backward against directional differences of the forward, with steps and bounds of its own precision."""
    check.tried += [t for t in ("backward against differences",) if t not in check.tried]
    try:
        subject = subject_of_box(_copying(box), backward)
        if _agrees_at_once(subject):
            return
        found = check_subject(subject)
    except GradientMismatch as mismatch:
        culprit = mismatch.culprit
        words = f": {culprit.relation}" if culprit.relation else ""
        yield Fault(
            "gradient",
            f"backward of {box.name} is wrong with respect to {culprit.input}{words}",
            f"{culprit.backward:.6g} in place of {culprit.truth:.6g}: "
            f"{culprit.error:.1e} off, {culprit.allowed:.1e} allowed; {culprit.wrong} of {culprit.total}",
        )
        return
    except UserError as error:
        check.notes.append(f"its backward was not compared with differences: {error}")
        return
    if not found.decided:
        worst = max(found.inputs, key=lambda one: one.allowed)
        check.notes.append(
            f"the gradient of {worst.name} is undecided: in {worst.dtype} an error below "
            f"{worst.allowed:.0%} is noise ({UNDECIDED_FROM:.0%} decides)"
        )


def _agrees_at_once(subject: Subject) -> bool:
    """Whether two lines for each input agree, to a tenth of what would decide: then nobody has to look for stairs."""
    claim = replace(claim_at(subject, subject.point), grain=0.0)
    slopes = [slope for which in range(len(claim.point)) for slope in measure_lines(claim, which)]
    return all(slope.agrees and slope.resolution <= UNDECIDED_FROM / 10 for slope in slopes)


def _copying(box: BlackBox) -> BlackBox:
    """The same kernel, which writes into copies."""
    run = box.run
    return replace(box, run=lambda leaves: run([x.clone() if isinstance(x, Tensor) else x for x in leaves]))


def _other_mode(box: BlackBox, check: KernelCheck) -> Iterator[Fault]:
    """Train and eval: the same where nothing is drawn, and otherwise the same on average."""
    module = box.module
    flags = [k for k, n in enumerate(box.names) if n in ("training", "train", "is_training")]
    flags = [k for k in flags if isinstance(box.leaves[k], bool)]
    if module is None and not flags:
        return

    def in_mode(training: bool) -> BlackBox:
        if module is not None:
            module.train(training)
            return box
        return box.with_leaves([training if k in flags else x for k, x in enumerate(box.leaves)])

    mode = module.training if module is not None else False
    try:
        yield from _modes_differ(box, in_mode, check)
    finally:
        if module is not None:
            module.train(mode)


def _modes_differ(box: BlackBox, in_mode: Callable[[bool], BlackBox], check: KernelCheck) -> Iterator[Fault]:
    evaluated = in_mode(False).ask()
    if evaluated.refused:
        yield Fault("mode", f"{box.name} raises in eval mode: {evaluated.refused}")
        return
    check.tried.append("train and eval mode")
    draws = _draws(in_mode(False), 2)
    if any(not same_bits(a, b) and _far(a, b) for a, b in zip(*draws, strict=True)):
        yield Fault("mode", f"{box.name} is random in eval mode", "two calls with other seeds differ")
        return
    trained = _draws(in_mode(True), 2)
    random = any(_far(a, b) for a, b in zip(*trained, strict=True))
    if not random:
        if box.module is not None and any(True for _ in box.module.buffers()):
            return  # running statistics: the two are meant to differ
        gaps = box.apart(evaluated, in_mode(True).ask())
        for name, gap in gaps[:1]:
            yield Fault(
                "mode",
                f"{box.name} computes something else in eval mode than in train mode, and nothing in it is random",
                f"{name}: {_numbers(gap)}",
            )
        return
    many = [outs[0].double() for outs in _draws(in_mode(True), MODE_DRAWS)]
    mean, out = torch.stack(many).mean(0), draws[0][0].double()
    spread = torch.stack(many).std(0) / math.sqrt(MODE_DRAWS)
    ratio = float((mean * out).sum() / out.square().sum())
    error = float((spread * out).norm() / out.square().sum())
    if abs(ratio - 1) > 6 * error + 0.01:
        yield Fault(
            "mode",
            f"in train mode {box.name} gives {ratio:.3g} × what it gives in eval mode, on average",
            f"over {MODE_DRAWS} draws; ± {error:.1g}",
        )


def _draws(box: BlackBox, count: int) -> list[tuple[Tensor, ...]]:
    """Results with other random numbers each time."""
    found = []
    with torch.no_grad():
        for _ in range(count):
            made = box.run([x.clone() if isinstance(x, Tensor) else x for x in box.leaves])
            outs = made if isinstance(made, (tuple, list)) else [made]
            found.append(tuple(x.detach().clone() for x in outs if isinstance(x, Tensor)))
    return found


def _far(a: Tensor, b: Tensor) -> bool:
    """Farther apart than any order of summation explains."""
    apart = float((a.double() - b.double()).abs().max()) if a.numel() else 0.0
    return not apart <= 1e3 * torch.finfo(torch.float32).eps * scale_of(b)
