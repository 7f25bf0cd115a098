"""A taped step is the step: bit for bit when recorded, bit for bit when replayed, and cheap to keep."""

import gc
import sys
import types
import weakref

import pytest
import tape_steps
import torch
from tape_steps import STEPS
from torch import nn

from gradproof.tape.record import Recorder, record
from gradproof.tape.replay import differentiate, replay_exactly, replay_forward
from gradproof.tape.roles import find_roles


def tape_of(named, step, seed=1):
    torch.manual_seed(seed)
    with record({p: n for n, p in named.items()}) as tape:
        loss = step()
    assert not tape.broken
    return tape, loss


@pytest.mark.parametrize("name", STEPS)
def test_recorded_step_is_bit_identical_to_an_untaped_one(name):
    named, step = STEPS[name]()
    torch.manual_seed(1)
    plain = step().detach().clone()
    gradients = {n: p.grad.clone() for n, p in named.items()}
    values = {n: p.detach().clone() for n, p in named.items()}
    named, step = STEPS[name]()
    _, taped = tape_of(named, step)
    assert torch.equal(plain, taped.detach())
    assert all(torch.equal(gradients[n], p.grad) for n, p in named.items())
    assert all(torch.equal(values[n], p.detach()) for n, p in named.items())


@pytest.mark.parametrize("name", STEPS)
def test_replay_makes_everything_again_bit_for_bit(name):
    tape, _ = tape_of(*STEPS[name]())
    for fresh in (0.0, float("nan")):
        replay = replay_exactly(tape, fresh=fresh)
        assert replay.departs_at is None, tape.operations[replay.departs_at]
        assert not replay.notes
    own = differentiate(tape)
    assert [float(loss) for loss in own.losses] == [float(loss) for loss in replay.losses]


def test_replay_gives_the_recorded_loss_and_parameters():
    tape, loss = tape_of(*STEPS["gpt"]())
    assert torch.equal(replay_forward(tape).loss, loss.detach())


def test_replay_with_other_leaves_another_precision_and_replaced_results():
    named, step = tape_steps.gpt(dropout=0.0)
    tape, loss = tape_of(named, step)
    with torch.no_grad():
        moved = {n: p + 0.01 * torch.randn_like(p) for n, p in named.items()}
        there = replay_forward(tape, leaves=moved).loss
        for n, p in named.items():
            p.copy_(moved[n])
    assert torch.equal(there, step().detach())
    precise = replay_forward(tape, torch.float64).loss
    assert precise.dtype == torch.float64
    assert float(precise) == pytest.approx(float(loss.detach()), rel=1e-6)
    (ids,) = [slot for slot in tape.inputs if slot.dtype == torch.int64]
    flipped = replay_forward(tape, leaves={ids.index: tape.leaf_value(ids.index).flip(0)})
    assert float(flipped.loss) == pytest.approx(
        float(loss.detach()), rel=1e-4
    )  # the mean over rows does not mind
    softmax = next(op for op in tape.operations if op.name == "_log_softmax")
    kept = replay_forward(tape, keep=softmax.makes).values[softmax.makes[0]]
    assert torch.allclose(kept.exp().sum(-1), torch.ones(kept.shape[0]))
    uniform = replay_forward(tape, replace={softmax.index: lambda x: torch.full_like(x, -2.0)}).loss
    assert float(uniform) == pytest.approx(2.0)


def test_gradient_at_any_slot():
    tape, _ = tape_of(*tape_steps.gpt(dropout=0.0))
    softmax = next(op for op in tape.operations if op.name == "_log_softmax")
    logits = softmax.reads[0]
    gradient = differentiate(tape, torch.float64, gradients_at=[logits]).slot_gradients[logits]
    assert gradient.shape == tape.slots[logits].shape
    assert float(gradient.sum(-1).abs().max()) < 1e-12  # softmax minus one-hot sums to zero


def test_inputs_targets_and_places_are_known():
    named, step = tape_steps.convolutional()
    tape, _ = tape_of(named, step)
    roles = find_roles(tape)
    assert [slot.name for slot in roles.inputs] == ["input0"]
    assert [slot.name for slot in roles.targets] == ["input1"]
    conv = next(op for op in tape.operations if op.name == "convolution")
    assert conv.module == "0"
    assert conv.line.file == tape_steps.__file__
    backward = next(
        op for op in tape.operations if op.name == "convolution_backward" and op.made_from == conv.index
    )
    assert backward.node == "ConvolutionBackward0" and backward.module == "0"


def test_two_micro_batches_and_their_targets():
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    data = [(torch.randn(2, 3), torch.randint(0, 4, (2,))) for _ in range(2)]
    with record({p: n for n, p in model.named_parameters()}) as tape:
        for x, y in data:
            nn.functional.cross_entropy(model(x), y).backward()
    roles = find_roles(tape)
    assert len(roles.inputs) == len(roles.targets) == 2


def test_tokens_and_targets_of_a_language_model_are_two_slots_of_one_leaf():
    tape, _ = tape_of(*tape_steps.gpt(dropout=0.0))
    roles = find_roles(tape)
    assert roles.inputs == roles.targets == tuple(tape.inputs)
    ids = tape.leaf_value(tape.inputs[0].index)
    tokens, targets = roles.token_slots[0], roles.target_slots[0]
    values = replay_forward(tape, keep=[tokens, targets]).values
    assert torch.equal(values[tokens], ids[:, :-1])
    assert torch.equal(values[targets], ids[:, 1:].flatten())
    same = replay_forward(tape, leaves={targets: values[targets].flip(0)}).loss
    assert float(same) != float(replay_forward(tape).loss)


def test_tape_keeps_leaves_and_random_results_only():
    named, step = tape_steps.gpt(width=32, layers=2)
    tape, _ = tape_of(named, step)
    parameters = sum(p.numel() * 4 for p in named.values())
    masks = sum(op.frozen[0].numel() for op in tape.operations if op.frozen is not None)
    assert tape.bytes() <= parameters + masks + 3 * 13 * 8 + 64


def test_intermediates_are_freed_while_recording():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    with record({p: n for n, p in model.named_parameters()}) as tape, torch.no_grad():
        hidden = model[0](torch.randn(2, 4))
        gone = weakref.ref(hidden.untyped_storage())
        del hidden
        gc.collect()
        assert gone() is None
    assert tape.operations


def test_leaf_keeps_the_value_it_had_before_the_step():
    weight = nn.Parameter(torch.ones(3))
    with record({weight: "w"}) as tape:
        (weight * 2).sum().backward()
        with torch.no_grad():
            weight.add_(5.0)
    assert torch.equal(tape.leaf_value(tape.parameters[0].index), torch.ones(3))
    assert torch.equal(weight.detach(), torch.full((3,), 6.0))


def test_nothing_stays_behind():
    module = sys.modules["torch.nn.modules.module"]
    optimizer = sys.modules["torch.optim.optimizer"]

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * x

        @staticmethod
        def backward(ctx, grad):
            return grad

    def state():
        return (
            len(module._global_forward_hooks),
            len(module._global_forward_pre_hooks),
            len(optimizer._global_optimizer_pre_hooks),
            len(optimizer._global_optimizer_post_hooks),
            torch.autograd._engine_run_backward,
            vars(Square)["forward"],
            torch.utils._python_dispatch._get_current_dispatch_mode(),
        )

    before = state()
    with pytest.raises(ValueError, match="by the script"), record():
        assert state() != before
        raise ValueError("by the script")
    assert state() == before


def test_recorder_from_one_optimizer_step_to_the_next():
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.randn(4, 3)
    recorder = None

    def at_start(*_):
        if recorder is not None:
            recorder.stop()

    handle = optimizer.register_step_pre_hook(at_start)
    for step in range(2):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        if step == 0:
            recorder = Recorder({p: n for n, p in model.named_parameters()})
            recorder.start()
    handle.remove()
    tape = recorder.tape
    assert len(tape.top_backwards) == 1
    assert not any(op.phase == "optimizer" for op in tape.operations)
    assert torch.equal(replay_forward(tape).loss, loss.detach())


def test_recorder_that_fails_does_not_disturb_training(monkeypatch):
    from gradproof.tape.state import State

    def failing(*_, **__):
        raise RuntimeError("planted")

    model = nn.Linear(2, 2)
    with record() as tape:
        monkeypatch.setattr(State, "append", failing)
        model(torch.randn(3, 2)).sum().backward()
    assert "planted" in tape.broken
    assert model.weight.grad is not None


def test_operator_that_cannot_be_replayed_is_named():
    from gradproof.tape.shadow import shadow

    model = nn.Linear(4, 4)
    with record({p: n for n, p in model.named_parameters()}) as tape:
        hidden = model(torch.randn(2, 4))
        noise = (hidden.detach().view(torch.int32) & 1).float()  # bits, not numbers
        (hidden + noise).square().sum().backward()
    answer = shadow(tape)
    assert answer.right
    assert any("view was run in its own precision" in note for note in answer.notes)


def peak_bytes(function):
    """The most memory that was allocated at one time, and what is still allocated at the end."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        kept = function()
    total = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            total += event.nbytes()
            peak = max(peak, total)
    return peak, total, kept


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_memory_while_recording_is_at_most_1_3_times_the_step():
    model = tape_steps.GPT(vocabulary=128, width=64, layers=4, time=64)
    ids = torch.randint(0, 128, (4, 65))
    named, step = tape_steps.backward_step(model, lambda: model(ids[:, :-1], ids[:, 1:]))
    step()

    def clear():
        for parameter in named.values():
            parameter.grad = None

    clear()
    plain, _, _ = peak_bytes(step)
    clear()
    taped, left, tape = peak_bytes(lambda: tape_of(named, step)[0])
    parameters = sum(p.numel() * 4 for p in named.values())
    assert plain > 2 * parameters
    assert taped <= 1.3 * plain
    assert left <= parameters + 1.1 * tape.bytes() + 64 * len(tape.operations)  # the gradients, and the tape


def test_no_tensor_outlives_its_answers():
    from gradproof.tape.locate import find_first_bad_operation
    from gradproof.tape.shadow import shadow

    named, step = tape_steps.gpt()

    def tensors():
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    counts = []
    for _ in range(3):
        tape, _ = tape_of(named, step)
        shadow(tape)
        find_first_bad_operation(tape)
        del tape
        counts.append(tensors())
    assert counts[1] == counts[2]


def test_data_set_is_not_kept_but_the_batch_is(monkeypatch):
    from gradproof.tape import state

    monkeypatch.setattr(state, "_LARGE", 4096)
    torch.manual_seed(0)
    data, labels, model = torch.randn(1000, 8), torch.randint(0, 3, (1000,)), nn.Linear(8, 3)
    with record({p: n for n, p in model.named_parameters()}) as tape:
        x, y = data[16:32], labels[torch.arange(16, 32)]
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
    assert tape.bytes() < 4096
    assert torch.equal(replay_forward(tape).loss, loss.detach())
    assert replay_exactly(tape).departs_at is None


def test_slices_of_one_large_memory_are_leaves_of_their_own(monkeypatch):
    from gradproof.tape import state

    monkeypatch.setattr(state, "_WHOLE_STORAGE", 64)
    torch.manual_seed(0)
    data, model = torch.randn(1000, 8), nn.Linear(8, 3)
    first, second = data[16:32], data[40:56]
    with record({p: n for n, p in model.named_parameters()}) as tape:
        loss = (model(first) * model(second[:, :8].t().t())).sum()
        loss.backward()
    assert len(tape.inputs) == 2
    assert tape.bytes() < 2048
    assert torch.equal(replay_forward(tape).loss, loss.detach())


def test_looking_at_a_step_leaves_no_operations_on_its_tape():
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    with record({p: n for n, p in model.named_parameters()}) as tape:
        model(x)
    assert [op.name for op in tape.operations] == ["t", "addmm"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("lengths_on", ["cpu", "cuda"])
def test_ctc_with_its_lengths_anywhere(device, lengths_on):
    """Below a mode PyTorch hands lengths on as tensors, and raises where they are not on the GPU."""
    if "cuda" in (device, lengths_on) and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(12, 3, 5, generator=generator).to(device).requires_grad_()
    texts = torch.randint(1, 5, (3, 4), generator=generator).to(device)
    sounds, letters = (torch.tensor(n, device=lengths_on) for n in ([12, 11, 9], [4, 3, 2]))

    def step():
        scores.grad = None
        loss = torch.nn.functional.ctc_loss(scores.log_softmax(-1), texts, sounds, letters)
        loss.backward()
        return loss.detach().clone(), scores.grad.clone()

    loss, gradient = step()
    with record() as tape:
        taped = step()
    assert not tape.broken and torch.equal(taped[0], loss) and torch.equal(taped[1], gradient)
    (made,) = [op for op in tape.operations if op.name in ("_ctc_loss", "_cudnn_ctc_loss")]
    assert made.args[2] == [12, 11, 9] and torch.ctc_loss.__name__ == "ctc_loss"
    again = replay_forward(tape, keep=made.makes[:1]).values[made.makes[0]]
    each = again / torch.tensor([4.0, 3.0, 2.0], device=device)
    assert float(each.mean()) == pytest.approx(float(loss), rel=1e-6)


def test_an_interpreter_of_triton_without_a_run_of_its_own_is_left_alone(monkeypatch):
    """Triton 3.2 gives each interpreted kernel a `run`, and the class none."""
    old = types.SimpleNamespace(InterpretedFunction=type("InterpretedFunction", (), {}))
    monkeypatch.setitem(sys.modules, "triton.runtime.interpreter", old)
    tape, _ = tape_of(*STEPS["encoder"]())
    assert tape.operations and not hasattr(old.InterpretedFunction, "run")
