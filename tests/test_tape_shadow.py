"""Wrong backwards of twenty kinds are found in one step by class, module and line; right ones are silent."""

import inspect

import pytest
import tape_faults
import tape_steps
import torch
import torch.nn.functional as F
from tape_faults import WRONG
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradproof.tape import shadow as shadow_module
from gradproof.tape.record import record
from gradproof.tape.shadow import shadow


def names_of(model):
    return {parameter: name for name, parameter in model.named_parameters()}


def run_step(model, batch, precision):
    if precision == "float32":
        model(*batch).backward()
        return
    low = torch.bfloat16 if precision == "bfloat16" else torch.float16
    with torch.autocast("cpu", dtype=low):
        loss = model(*batch)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=precision == "float16")
    scaler.scale(loss).backward()


def shadow_of(where=None, wrong=None, precision="float32"):
    model, batch = tape_faults.build(where, wrong)
    if wrong is tape_faults.GeluStaleCache:
        model(*batch)  # the step whose activations stay in the cache
    with record(names_of(model)) as tape:
        run_step(model, batch, precision)
    assert not tape.broken
    return shadow(tape)


KINDS = {
    tape_faults.GeluStaleCache: "stale activation", tape_faults.GeluTailUnwritten: "memory never written",
    tape_faults.TanhRecomputedWrong: "recomputed differently", tape_faults.WorkspaceReused:
    "stale activation",
}  # fmt: skip
PATTERNS = {
    tape_faults.LinearTransposed: "transposed", tape_faults.EmbeddingOffByOne: "shifted by one",
    tape_faults.AttentionUnscaled: "2 × expected", tape_faults.AttentionDroppedHead:
    "zero at 3 of dimension 1",
    tape_faults.LinearNoBias: "no gradient comes back", tape_faults.ConvolutionFlipped: "reversed",
    tape_faults.CrossEntropySum: "× expected",
}  # fmt: skip


@pytest.mark.parametrize(("where", "wrong"), WRONG, ids=lambda v: getattr(v, "__name__", v))
def test_wrong_backward_is_named_by_class_module_and_line(where, wrong):
    answer = shadow_of(where, wrong)
    assert not answer.right
    culprit = answer.culprits[0]
    inside = "layers.0" if wrong is tape_faults.WorkspaceReused else "layers.1"
    layered = where not in ("embedding", "loss", "batch_norm")
    assert culprit.what == wrong.__name__
    assert culprit.module == (f"{inside}.{where}" if layered else where)
    lines = [inspect.getsourcelines(c) for c in wrong.__mro__[:2] if "backward" in vars(c) or c is wrong]
    assert culprit.line.file == tape_faults.__file__
    assert any(first <= culprit.line.number < first + len(text) for text, first in lines)
    assert culprit.kind == KINDS.get(wrong, "wrong backward")
    assert PATTERNS.get(wrong, "") in culprit.pattern
    assert len(answer.culprits) == 1
    assert wrong.__name__ in str(answer)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_the_same_functions_written_right_are_right(precision):
    answer = shadow_of(precision=precision)
    assert answer.right, str(answer)
    assert not answer.notes
    assert len(answer.audits) >= 30
    assert answer.loss == pytest.approx(answer.true_loss, rel=1e-2)
    assert "is correct to" in str(answer)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "pair", [WRONG[0], WRONG[6], WRONG[8], WRONG[10], WRONG[15]], ids=lambda p: p[1].__name__
)
def test_gross_mistakes_are_found_in_low_precision_too(pair, precision):
    answer = shadow_of(*pair, precision)
    assert [culprit.what for culprit in answer.culprits] == [pair[1].__name__]


@pytest.mark.parametrize("name", tape_steps.STEPS)
def test_ordinary_steps_are_right(name):
    named, step = tape_steps.STEPS[name]()
    with record({p: n for n, p in named.items()}) as tape:
        step()
    answer = shadow(tape)
    assert answer.right, str(answer)
    assert not answer.accumulation and not answer.cuts
    assert answer.error < (2e-2 if name in ("autocast", "scaled") else 2e-6)


def test_bias_before_batch_norm_is_zero_in_truth_and_no_error():
    named, step = tape_steps.convolutional()
    with record({p: n for n, p in named.items()}) as tape:
        step()
    verdicts = {p.name: p.verdict for p in shadow(tape).parameters}
    assert verdicts["0.bias"] == "zero in truth"
    assert verdicts["0.weight"] == "right"


def test_activation_overwritten_behind_autograds_back():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    x = torch.randn(4, 3)
    with record(names_of(model)) as tape:
        hidden = model[1](model[0](x))
        loss = model[2](hidden).square().mean()
        hidden.data.mul_(0.5)  # tanh's saved result
        loss.backward()
    answer = shadow(tape)
    assert not answer.right
    assert answer.culprits[0].kind == "stale activation"
    assert "mul_" in answer.culprits[0].evidence


def test_gradient_changed_by_a_hook():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    with record(names_of(model)) as tape:
        hidden = model[0](torch.randn(4, 3))
        hidden.register_hook(lambda g: g * 0.5)
        model[2](model[1](hidden)).square().mean().backward()
    answer = shadow(tape)
    assert not answer.right
    assert answer.culprits[0].kind == "changed by a hook"
    assert answer.culprits[0].line.file == __file__
    assert {p.name for p in answer.parameters if not p.right} == {"0.weight", "0.bias"}


CUTS = {
    "detach": lambda h: h.detach() * 2,
    "data": lambda h: h.data * 2,
    "item": lambda h: torch.ones(4, 5) * h.mean().item(),
    "argmax": lambda h: F.one_hot(h.argmax(-1), 5).float(),
    "integer": lambda h: h.long().float(),
    "numpy": lambda h: torch.from_numpy(h.detach().numpy() * 2),
}


@pytest.mark.parametrize("name", [*CUTS, "no_grad"])
def test_cut_path_is_named_with_its_line(name):
    torch.manual_seed(0)
    first, second = nn.Linear(3, 5), nn.Linear(5, 1)
    names = {first.weight: "first.weight", first.bias: "first.bias", **names_of(second)}
    with record(names) as tape:
        hidden = first(torch.randn(4, 3))
        if name == "no_grad":
            with torch.no_grad():
                cut = hidden.tanh()
        else:
            cut = CUTS[name](hidden)
        second(cut).square().mean().backward()
    answer = shadow(tape)
    cuts = {cut.parameter: cut for cut in answer.cuts}
    assert set(cuts) == {"first.weight", "first.bias"}
    assert cuts["first.weight"].line.file == __file__
    words = {
        "detach": "detach",
        "data": "detach",
        "item": ".item()",
        "argmax": "argmax",
        "integer": "_to_copy",
    }
    assert words.get(name, "") in cuts["first.weight"].how


def test_uncut_twin_has_no_cut():
    first, second = nn.Linear(3, 5), nn.Linear(5, 1)
    with record({**names_of(first), **names_of(second)}) as tape:
        second(first(torch.randn(4, 3)).tanh()).square().mean().backward()
    assert not shadow(tape).cuts


def two_backwards(model, x):
    with record(names_of(model)) as tape:
        for part in x.split(2):
            model(part).square().mean().backward()
    return shadow(tape).accumulation


def test_overwritten_and_stale_gradients():
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    assert not two_backwards(model, x)
    held = two_backwards(model, x)  # .grad of the step before was not cleared
    assert "earlier step" in held[0].how
    model.zero_grad()

    with record(names_of(model)) as tape:
        for part in x.split(2):
            for parameter in model.parameters():
                parameter.grad = None
            model(part).square().mean().backward()
    assert "overwritten" in shadow(tape).accumulation[0].how


@pytest.mark.parametrize("to_none", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
def test_gradients_cleared_between_backward_and_step(layers, to_none):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(layers)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record(names_of(model)) as tape:
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.zero_grad(set_to_none=to_none)
        optimizer.step()
    assert "cleared between backward and step" in shadow(tape).accumulation[0].how


@pytest.mark.parametrize("to_none", [False, True])
@pytest.mark.parametrize("turn", [0, 1])
def test_a_player_that_is_cleared_at_the_others_turn(turn, to_none):
    """One optimizer holds both: what the other's loss has brought here is not to be stepped."""
    torch.manual_seed(0)
    generator, critic = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), nn.Linear(3, 1)
    both = nn.ModuleList([generator, critic])
    optimizer = torch.optim.AdamW(both.parameters(), lr=0.1)
    with record(names_of(both)) as tape:
        critic(generator(torch.randn(4, 3))).sigmoid().mean().backward()
        both[turn].zero_grad(set_to_none=to_none)
        optimizer.step()
    assert not shadow(tape).accumulation


class Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return grad


def test_straight_through_estimator_is_told_from_a_mistake():
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    with record(names_of(model)) as tape:
        Round.apply(model(torch.randn(4, 3)) * 5).square().mean().backward()
    answer = shadow(tape)
    assert answer.right
    assert "straight-through" in answer.surrogates[0].surrogate
    assert answer.worst is None and str(answer).startswith("no gradient here means to be the derivative")


class NumpySine(torch.autograd.Function):
    """Opaque to the tape: NumPy computes it."""

    slope = 1.0

    @staticmethod
    def forward(ctx, x):
        import numpy

        ctx.save_for_backward(x)
        return torch.from_numpy(numpy.sin(x.detach().numpy()))

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * NumpySine.slope * x.cos()


@pytest.mark.parametrize("slope", [1.0, 0.9])
def test_opaque_function_is_decided_by_finite_differences(slope, monkeypatch):
    monkeypatch.setattr(NumpySine, "slope", slope)
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    with record(names_of(model)) as tape:
        NumpySine.apply(model(torch.randn(5, 3))).square().mean().backward()
    answer = shadow(tape)
    assert answer.audits[0].method.startswith("finite differences")
    assert answer.right == (slope == 1.0), str(answer)
    assert any("NumpySine was called as it is" in note for note in answer.notes)
    if slope != 1.0:
        assert answer.culprits[0].what == "NumpySine"


class KernelSine(torch.autograd.Function):
    """Like a Triton or C++ kernel, it fills memory that PyTorch allocated, unseen by the dispatcher."""

    written = None

    @staticmethod
    def forward(ctx, x):
        import numpy

        ctx.save_for_backward(x)
        out = torch.empty_like(x)
        out.numpy()[..., : KernelSine.written] = numpy.sin(x.detach().numpy())[..., : KernelSine.written]
        return out

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x.cos()


@pytest.mark.parametrize("written", [None, -1], ids=["all", "all but the tail"])
def test_kernel_that_fills_fresh_memory(written, monkeypatch):
    monkeypatch.setattr(KernelSine, "written", written)
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    with record(names_of(model)) as tape:
        KernelSine.apply(model(torch.randn(5, 3))).square().mean().backward()
    answer = shadow(tape)
    assert answer.right == (written is None), str(answer)
    assert any("KernelSine was called as it is" in note for note in answer.notes)
    if written is not None:
        assert answer.culprits[0].kind == "memory never written"
        assert "5 of 20 elements" in answer.culprits[0].pattern


def test_checkpoint_that_recomputes_other_dropout_is_found():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 2))
    x = torch.randn(4, 6, requires_grad=True)
    for keep, right in ((True, True), (False, False)):
        with record(names_of(model)) as tape:
            out = checkpoint(model, x, use_reentrant=True, preserve_rng_state=keep)
            out.square().sum().backward()
        assert shadow(tape).right == right


class NearestCode(torch.autograd.Function):
    """A lookup in a codebook: a step function of what is looked up, with a gradient that is passed straight on."""

    @staticmethod
    def forward(ctx, z, codes):
        nearest = torch.cdist(z, codes).argmin(1)
        return codes[nearest]

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def test_a_codebook_passed_straight_through_is_meant():
    torch.manual_seed(0)
    model, codes, x = nn.Linear(4, 3), torch.randn(5, 3), torch.randn(8, 4)
    with record({p: n for n, p in model.named_parameters()}) as tape:
        NearestCode.apply(model(x), codes).square().mean().backward()
    answer = shadow(tape)
    assert not answer.culprits and "straight-through" in answer.surrogates[0].surrogate


@pytest.mark.parametrize("wrong", [None, tape_faults.LinearTransposed])
def test_where_a_gpu_has_no_room_for_float64_half_precision_is_compared_with_float32(wrong, monkeypatch):
    real = shadow_module.differentiate

    def without_room(tape, dtype=None, **options):
        if dtype == torch.float64:
            raise torch.OutOfMemoryError("no room")
        return real(tape, dtype, **options)

    monkeypatch.setattr(shadow_module, "differentiate", without_room)
    answer = shadow_of("linear" if wrong else None, wrong, "bfloat16")
    assert answer.right == (wrong is None) and "float32" in answer.notes[0]
    with pytest.raises(torch.OutOfMemoryError):  # nothing to compare a step in float32 with
        shadow_of()
