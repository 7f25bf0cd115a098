"""check-dump: a step that another program wrote, right and with one slip each, against a reference."""

import json
import math
import re
import struct

import numpy as np
import pytest
import torch
from by_hand import gpt_batch, gpt_loss, gpt_named, gpt_parameters, gpt_step
from safetensors import safe_open

import gradproof
from gradproof import dump_step
from gradproof.check.against import check_dump
from gradproof.check.dump import read_dump
from gradproof.cli import main
from gradproof.errors import UserError


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def write(path, slip=None, dtype=torch.float32, seed=0, layers=2, layer=1, **other):
    p, batch = gpt_parameters(dtype, seed, layers), gpt_batch(seed=seed)
    loss, activations, gradients = gpt_step(p, batch, slip, layer)
    given = {
        "weights": p,
        "batch": batch,
        "activations": activations,
        "gradients": gradients,
        "loss": loss.item(),
    }
    return dump_step(path / "step-000003.safetensors", step=3, **(given | other))


def check(path, slip=None, reference=gpt_named, **options):
    return check_dump(read_dump(write(path, slip, **options)), reference)


# ---- the file


def test_a_dump_is_read_as_it_was_written(tmp_path):
    x = {"a": torch.randn(2, 3), "b": np.arange(4, dtype=np.int32), "c": torch.randn(3, dtype=torch.bfloat16)}
    x |= {
        "d": torch.randn(2, 0),
        "e": torch.tensor(2.5, dtype=torch.float64),
        "f": torch.tensor([True, False]),
    }
    x |= {"z": torch.randn(2, 3).to(torch.float8_e4m3fn), "h": torch.randn(4, 5).T}
    path = dump_step(tmp_path, weights=x, batch={"y": [1, 2]}, loss=2.5, step=12, lr=1e-3)
    assert path.name == "step-000012.safetensors"
    found = read_dump(path)
    assert found.step == 12 and found.loss == 2.5 and list(found.weights) == list(x)
    for name, value in x.items():
        value = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        assert found.weights[name].dtype == value.dtype and found.weights[name].shape == value.shape
        assert torch.equal(found.weights[name].double(), value.double())


def test_the_file_is_a_safetensors_file(tmp_path):
    """As the format's own library reads it."""
    path = dump_step(
        tmp_path / "a.safetensors", weights={"w": torch.ones(2, 3)}, batch={"x": torch.arange(5)}, step=1
    )
    with safe_open(path, "pt") as file:
        assert set(file.keys()) == {"weights/w", "batch/x"}
        assert file.metadata() == {"format": "gradproof-dump-1", "byte_order": "little", "step": "1"}
        assert torch.equal(file.get_tensor("weights/w"), torch.ones(2, 3))


def test_what_a_dump_cannot_hold_is_said(tmp_path):
    with pytest.raises(UserError, match=r"weights/w is a torch.complex64, which a dump cannot hold"):
        dump_step(tmp_path / "a", weights={"w": torch.ones(1, dtype=torch.complex64)}, batch={})
    with pytest.raises(UserError, match=r"batch/text is a str"):
        dump_step(tmp_path / "a", weights={}, batch={"text": "abc"})


# ---- what is right stays silent


@pytest.mark.parametrize("reference", [gpt_named, gpt_loss])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_healthy_dump_is_right(dtype, reference, tmp_path):
    for seed in range(2):
        found = check(tmp_path, dtype=dtype, reference=reference, seed=seed)
        assert found.verdict == "right" and found.exit_code == 0, str(found)
        lines = (*found.activations, *found.gradients)
        assert {line.verdict for line in lines} == {"right"} and len(lines) == 25 + 28 and not found.notes
        assert found.loss_verdict == "right"


def test_numbers_that_were_rounded_before_they_were_stored_are_right(tmp_path):
    """Activations kept in bfloat16, dumped as float32."""
    p, batch = gpt_parameters(torch.bfloat16, 0, 2), gpt_batch()
    loss, activations, gradients = gpt_step(p, batch)
    wide = [{k: v.float() for k, v in d.items()} for d in (p, activations, gradients)]
    path = dump_step(
        tmp_path / "a.safetensors",
        weights=wide[0],
        batch=batch,
        activations=wide[1],
        gradients=wide[2],
        loss=loss.item(),
    )
    found = check_dump(read_dump(path), gpt_named)
    assert found.verdict == "right", str(found)


@pytest.mark.parametrize("activations", [torch.float32, torch.bfloat16])
def test_the_hand_written_gpt_of_ours_against_our_gpt(activations, tmp_path, capsys, monkeypatch):
    from gradproof.lm.explicit_gpt import ExplicitGPT
    from gradproof.lm.shape import GPTShape

    model = ExplicitGPT(GPTShape(17, 8, 16, 2, 2), seed=1, activations=activations)
    generator = torch.Generator().manual_seed(0)
    tokens, targets = (torch.randint(17, (3, 8), generator=generator) for _ in range(2))
    loss = model.forward(tokens, targets)
    model.backward()
    named = {f"blocks.{l}.feed_forward.w1": b.hidden for l, b in enumerate(model.blocks)}
    path = dump_step(
        tmp_path / "a.safetensors", weights=model.parameters, batch={"tokens": tokens, "targets": targets},
        activations=named, gradients=model.gradients, loss=float(loss),
    )  # fmt: skip
    assert main(["check-dump", str(path), "--against", "gpt", "--heads", "2"]) == 0, capsys.readouterr().out
    if activations == torch.float32:
        monkeypatch.setattr("gradproof.check.forward.SECONDS", 0.1)
        monkeypatch.setattr("gradproof.check.training.SECONDS", 0.1)
        assert main(["check-dump", str(path), "--against", "gpt", "--heads", "4"]) == 1  # another model
    with pytest.raises(UserError, match="heads do not divide"):
        from gradproof.lm.reference import gpt_reference

        check_dump(read_dump(path), gpt_reference(3))


def test_our_cascade_is_a_reference(tmp_path):
    from gradproof.lm.cascade import Cascade, CascadeShape
    from gradproof.lm.reference import cascade_reference

    model = Cascade(CascadeShape(17, 8, 16, 2, (16, 24)))
    generator = torch.Generator().manual_seed(0)
    tokens, targets = (torch.randint(17, (3, 8), generator=generator) for _ in range(2))
    loss = model(tokens, targets)
    loss.backward()
    weights = {k: v.detach() for k, v in model.named_parameters()}
    gradients = {k: v.grad for k, v in model.named_parameters()}
    given = {"weights": weights, "batch": {"tokens": tokens, "targets": targets}, "loss": loss.item()}
    path = dump_step(tmp_path / "a.safetensors", gradients=gradients, **given)
    assert check_dump(read_dump(path), cascade_reference(2)).verdict == "right"
    gradients["norm.weight"] = -gradients["norm.weight"]
    found = check_dump(read_dump(dump_step(path, gradients=gradients, **given)), cascade_reference(2))
    assert found.first_gradient.name == "gradients/norm.weight" and "sign" in found.first_gradient.pattern


# ---- slips of the forward: the first activation that is wrong, and why

FORWARD_SLIPS = {
    "no mask": ("h1.att", "the causal mask is missing: .*masked_fill.*; every position sees the future"),
    "mask off by one": ("h1.att", "the mask is off by one: .* a diagonal of 2 in the triu"),
    "keys of sample 0": ("h1.k", "the batch index is missing: every sample has sample 0 of "),
    "values of sample 0": ("h1.v", "the batch index is missing: every sample has sample 0 of "),
    "no scale": ("h1.att", "left out: it equals the reference without the / of .*math.sqrt"),
    "no residual": ("h1.mid", r"left out: it equals the reference without the \+ of .*mid = x \+"),
    "no gelu forward": ("h1.active", "left out: it equals the reference without the gelu of "),
    "buffer": ("h1.n1", "equals activations/h1.n2: the buffer was overwritten"),
    "ping-pong": ("h0.out", "equals activations/h1.out: the buffer was overwritten"),
    "NaN activation": ("h1.hidden", "not finite: NaN in every entry"),
    "only sample 0": ("h1.q", "the batch index is missing: "),
}


@pytest.mark.parametrize("slip", FORWARD_SLIPS)
def test_a_slip_of_the_forward_is_named(slip, tmp_path):
    name, pattern = FORWARD_SLIPS[slip]
    found = check(tmp_path, slip)
    assert found.exit_code == 1 and found.first_activation.name == f"activations/{name}", str(found)
    assert re.search(pattern, found.first_activation.pattern), str(found)
    assert [line.name for line in found.activations if line.verdict == "wrong"] == [f"activations/{name}"]
    assert found.first_gradient is None, str(found)  # they are right for the numbers as they were run
    assert found.loss_verdict in ("right", "follows")


@pytest.mark.parametrize("slip", ["no mask", "no scale", "no gelu forward", "buffer", "NaN activation"])
def test_a_reference_without_names_is_enough(slip, tmp_path):
    name, pattern = FORWARD_SLIPS[slip]
    found = check(tmp_path, slip, gpt_loss)
    assert found.first_activation.name == f"activations/{name}", str(found)
    assert re.search(pattern, found.first_activation.pattern), str(found)


def test_an_overflow_of_float16_is_named(tmp_path):
    p = {k: 4 * v for k, v in gpt_parameters(torch.float16, 11, 2).items()}
    loss, activations, gradients = gpt_step(p, gpt_batch(seed=11))
    given = {"weights": p, "batch": gpt_batch(seed=11), "activations": activations, "gradients": gradients}
    found = check_dump(read_dump(dump_step(tmp_path / "a", loss=loss.item(), **given)), gpt_named)
    assert re.match("overflow: .* reaches .*, and float16 ends at 65504", found.first_activation.pattern), (
        str(found)
    )


def test_without_activations_the_loss_tells(tmp_path):
    """The mask is missing in every layer, and all that is known is the loss."""
    p, batch = gpt_parameters(layers=1), gpt_batch()
    loss, _, gradients = gpt_step(p, batch, "no mask")
    path = dump_step(
        tmp_path / "a.safetensors", weights=p, batch=batch, gradients=gradients, loss=loss.item()
    )
    found = check_dump(read_dump(path), gpt_loss)
    assert found.loss_verdict == "wrong" and "the causal mask is missing" in found.loss_pattern, str(found)
    assert found.first_gradient is None, str(found)


def test_an_overwritten_buffer_is_what_the_reference_has_elsewhere(tmp_path):
    """The other tensor is not in the dump; its numbers are the reference's."""
    p, batch = gpt_parameters(layers=2), gpt_batch()
    loss, activations, _ = gpt_step(p, batch)
    held = {"h0.n2": activations["h1.n2"], "h1.mid": activations["h0.mid"]}
    path = dump_step(tmp_path / "a.safetensors", weights=p, batch=batch, activations=held, loss=loss.item())
    found = check_dump(read_dump(path), gpt_named)
    assert (
        found["activations/h0.n2"].pattern
        == "equals what the reference has at h1.n2: the buffer was overwritten"
    )
    assert "equals what the reference has at h0.mid: it was never written after that" in str(found)


@pytest.mark.parametrize(
    ("times", "words"),
    [
        (24.0, "factor 24 = (B·T)"),
        (-1.0, "sign: it is minus the loss"),
        (1 / math.log(2), "in bits, not in nats"),
    ],
)
def test_a_loss_that_is_off_by_a_factor(times, words, tmp_path):
    p, batch = gpt_parameters(), gpt_batch()
    loss = times * float(gpt_loss(p, batch))
    found = check_dump(read_dump(dump_step(tmp_path / "a", weights=p, batch=batch, loss=loss)), gpt_loss)
    assert found.loss_verdict == "wrong" and words in found.loss_pattern and found.exit_code == 1


def test_a_loss_printed_with_six_digits_is_right(tmp_path):
    p, batch = gpt_parameters(), gpt_batch()
    loss = float(f"{float(gpt_loss(p, batch)):.6g}")
    found = check_dump(read_dump(dump_step(tmp_path / "a", weights=p, batch=batch, loss=loss)), gpt_loss)
    assert found.verdict == "right"


# ---- slips of the backward: the first gradient that is wrong, and why

BACKWARD_SLIPS = {
    "stops": ("h0.b2", "zero: every entry is 0", "backward stops before gradients/h0.b2"),
    "never called": ("h1.b2", "zero: every entry is 0", "every gradient of h1 is 0"),
    "uninitialised": ("h1.wv", "never written in 128 of 256 entries", ""),
    "sign": ("h1.wo", "sign: it is minus the gradient", ""),
    "transposed": ("h1.wq", "transposed: axes 0 and 1 are swapped", ""),
    "twice": ("h1.b1", "factor 2 = accumulated twice", ""),
    "exchanged": ("h1.w1", "exchanged: it holds the gradient of h0.w1, and h0.w1 holds this one", ""),
    "no B": ("cf", "factor 4 = B", ""),
    "no T": ("cf", "factor 6 = T", ""),
    "no skip back": ("h1.wo", "missing term: what comes back to h1.mid through the +", ""),
    "stale norm": ("gf", "stale: backward took h1.mid where h1.out belongs", ""),
    "other norm": ("h1.w1", "stale: backward took h1.n1 where h1.n2 belongs", ""),
    "no gelu": ("h1.b1", "missing derivative: the gradient of h1.hidden is that of h1.active", ""),
    "softmax": ("h1.wk", "missing term: what comes back to the result of sum in softmax", ""),
    "branch twice": ("h1.wo", "accumulated twice: ", ""),
    "head forgotten": ("wte", "missing term: ", ""),
}


@pytest.mark.parametrize("slip", BACKWARD_SLIPS)
def test_a_slip_of_the_backward_is_named(slip, tmp_path):
    name, pattern, summary = BACKWARD_SLIPS[slip]
    found = check(tmp_path, slip)
    assert found.first_activation is None and found.exit_code == 1
    assert found.first_gradient.name == f"gradients/{name}", str(found)
    assert found.first_gradient.pattern.startswith(pattern), str(found)
    assert summary in str(found) and bool(summary) == bool(found.summary)


def test_memory_nobody_wrote_is_told_from_numbers(tmp_path):
    found = check(tmp_path, "uninitialised")
    assert "256 of 256 entries are numbers like" in found["gradients/h1.wk"].pattern


def test_the_step_before_shows_what_was_not_computed_anew(tmp_path):
    (tmp_path / "before").mkdir()
    before = read_dump(write(tmp_path / "before", seed=1))
    now = read_dump(write(tmp_path, seed=0))
    gradients = now.gradients | {
        "h0.wq": before.gradients["h0.wq"],
        "h0.wk": before.gradients["h0.wk"] + now.gradients["h0.wk"],
    }
    path = write(tmp_path, gradients=gradients)
    found = check_dump(read_dump(path), gpt_named, before=before)
    assert found["gradients/h0.wq"].pattern.startswith("stale: equal to that of the step before")
    assert (
        found["gradients/h0.wk"].pattern == "accumulated: the step before is still in it; it was not cleared"
    )
    assert sum(line.verdict == "wrong" for line in found.gradients) == 2
    assert check_dump(now, gpt_named, before=before).verdict == "right"


def test_gradients_of_activations(tmp_path):
    p, batch = gpt_parameters(layers=2), gpt_batch()
    leaves = {k: v.clone().requires_grad_() for k, v in p.items()}
    loss, named = gpt_named(leaves, batch)
    kept = {k: named[k] for k in ("h0.out", "h1.mid", "h1.att", "logits")}
    right = dict(zip(kept, torch.autograd.grad(loss, list(kept.values())), strict=True))
    given = {"weights": p, "batch": batch, "loss": loss.item()}
    path = dump_step(tmp_path / "a", activation_gradients=right, **given)
    assert check_dump(read_dump(path), gpt_named).verdict == "right"
    wrong = right | {"h1.mid": right["h0.out"], "h0.out": 4 * right["h0.out"]}
    found = check_dump(read_dump(dump_step(path, activation_gradients=wrong, **given)), gpt_named)
    assert found.first_gradient.name == "activation_gradients/h1.mid"  # backward comes to it before h0.out
    assert found.first_gradient.pattern == "it holds the gradient of h0.out"
    assert found["activation_gradients/h0.out"].pattern.startswith("factor 4 = B")


def with_incoming(slip=None, change=None, seed=0):
    """A step with the gradients of its activations by autograd; `change` does something to one of them on its way."""
    p, batch = gpt_parameters(layers=2, seed=seed), gpt_batch(seed=seed)
    leaves = {k: v.clone().requires_grad_() for k, v in p.items()}
    loss, named = gpt_named(leaves, batch)
    for name, x in named.items():
        x.retain_grad()
        if change and name in change:
            x.register_hook(change[name])
    loss.backward()
    gradients = {k: v.grad for k, v in leaves.items()}
    incoming = {k: v.grad for k, v in named.items()}
    given = {"weights": p, "batch": batch, "loss": loss.item(), "activations": named}
    return given | {"gradients": gradients, "activation_gradients": incoming}


def test_gradients_that_follow_from_a_wrong_one_that_came_in(tmp_path):
    """Two slips, and nothing else is accused: what comes behind them is right for what it was given."""
    path = dump_step(tmp_path / "a", **with_incoming())
    assert check_dump(read_dump(path), gpt_named).verdict == "right"
    change = {"h1.hidden": lambda g: -g, "h0.mid": lambda g: g / 4}
    found = check_dump(read_dump(dump_step(path, **with_incoming(change=change))), gpt_named)
    wrong = {line.name: line.pattern for line in found.gradients if line.verdict == "wrong"}
    assert list(wrong) == ["activation_gradients/h1.hidden", "activation_gradients/h0.mid"], str(found)
    assert wrong["activation_gradients/h1.hidden"].startswith("sign")
    assert wrong["activation_gradients/h0.mid"].startswith("factor 0.25 = 1/B")
    assert found["gradients/h0.wq"].verdict == "follows" and found["gradients/h1.w2"].verdict == "right"
    assert found["gradients/h0.wq"].pattern == "right for the gradient that came in"


def test_memory_of_the_step_before_in_part_of_a_gradient(tmp_path):
    before, now = with_incoming(seed=1), with_incoming()
    left = before["activation_gradients"]["h1.k"].clone()
    left[:2] = 0  # half of it was cleared
    now["activation_gradients"]["h1.k"] = now["activation_gradients"]["h1.k"] + left
    paths = [dump_step(tmp_path / name, **given) for name, given in (("a", before), ("b", now))]
    found = check_dump(read_dump(paths[1]), gpt_named, before=read_dump(paths[0]))
    assert re.match(
        r"accumulated: the step before is still in 19\d of 384 entries.*; they were not cleared",
        found["activation_gradients/h1.k"].pattern,
    ), str(found)
    assert [line.name for line in found.gradients if line.verdict == "wrong"] == ["activation_gradients/h1.k"]


def test_gradients_are_matched_by_like_names_and_shapes(tmp_path):
    p = {"W": torch.randn(3, 4), "c": torch.randn(4)}
    x = torch.randn(5, 3)

    def loss(weights, batch):
        return (batch["x"] @ weights["W"] + weights["c"]).square().mean()

    leaves = {k: v.clone().requires_grad_() for k, v in p.items()}
    dW, dc = torch.autograd.grad(loss(leaves, {"x": x}), list(leaves.values()))
    path = dump_step(tmp_path / "a", weights=p, batch={"x": x}, gradients={"dw": dW.flatten(), "bias": dc})
    assert check_dump(read_dump(path), loss).verdict == "right"
    path = dump_step(tmp_path / "a", weights=p, batch={"x": x}, gradients={"dw": dW, "other": torch.ones(7)})
    with pytest.raises(
        UserError, match="gradients/other belongs to no weight; call it as one of the weights: W, c"
    ):
        check_dump(read_dump(path), loss)


def test_a_weight_that_the_reference_does_not_use_is_not_judged(tmp_path):
    p = {"w": torch.randn(3), "unused": torch.randn(2)}
    given = {"weights": p, "batch": {"x": torch.randn(3)}}
    path = dump_step(tmp_path / "a", gradients={"w": given["batch"]["x"], "unused": torch.ones(2)}, **given)
    found = check_dump(read_dump(path), lambda w, b: (w["w"] * b["x"]).sum())
    assert found["gradients/unused"].verdict == "unknown" and found.exit_code == 0


def test_an_activation_that_the_reference_does_not_have_is_not_judged(tmp_path):
    path = write(tmp_path, activations={"scratch": torch.randn(3, 3)})
    found = check_dump(read_dump(path), gpt_named)
    assert found["activations/scratch"].verdict == "unknown" and found.exit_code == 0


def test_axes_in_another_order_are_the_same_activation(tmp_path):
    p, batch = gpt_parameters(layers=1), gpt_batch()
    loss, activations, _ = gpt_step(p, batch)
    turned = {
        "h0.att": activations["h0.att"].permute(1, 0, 2, 3),
        "h0.q": activations["h0.q"].reshape(24, 16),
    }
    path = dump_step(tmp_path / "a", weights=p, batch=batch, activations=turned, loss=loss.item())
    assert check_dump(read_dump(path), gpt_named).verdict == "right"


# ---- from the shell

REFERENCE = """
import torch
import by_hand

def loss(weights, batch):
    return by_hand.gpt_named(weights, batch)

def raises(weights, batch):
    raise ValueError("no such layer")

def text(weights, batch):
    return "2.5"

def asks(weights, batch):
    return weights["nothing"]

def named_badly(weights, batch):
    return weights["cf"].sum(), {"x": 3}

number = 5
"""


@pytest.fixture
def reference(tmp_path):
    path = tmp_path / "reference.py"
    path.write_text(REFERENCE)
    return path


def test_the_command(tmp_path, reference, capsys):
    step = str(write(tmp_path))
    assert main(["check-dump", step, "--against", f"{reference}:loss"]) == 0
    assert "all that can be compared is right" in capsys.readouterr().out
    step = str(write(tmp_path, "no mask"))
    assert main(["check-dump", step, "--against", f"{reference}:loss"]) == 1
    said = capsys.readouterr().out
    assert "first wrong activation: activations/h1.att: the causal mask is missing" in said
    assert main(["check-dump", step, "--against", f"{reference}:loss", "--json"]) == 1
    read = json.loads(capsys.readouterr().out)
    assert read["verdict"] == "wrong" and read["first_activation"] == "activations/h1.att"
    assert read["step"] == 3 and read["first_gradient"] is None


def test_json_of_numbers_that_are_not_finite(tmp_path, reference, capsys):
    step = str(write(tmp_path, "uninitialised", loss=math.nan))
    assert main(["check-dump", step, "--against", f"{reference}:loss", "--json"]) == 1
    read = json.loads(capsys.readouterr().out, parse_constant=lambda text: pytest.fail(text))
    assert read["loss"] == "nan" and read["loss_pattern"] == "it is not finite"


# ---- bad input: one sentence each, and exit code 2


def tampered(path, change):
    """The file with something done to its bytes."""
    content = bytearray(path.read_bytes())
    path.write_bytes(change(content))
    return path


def with_header(content, change):
    (length,) = struct.unpack("<Q", content[:8])
    header = change(json.loads(content[8 : 8 + length]))
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(content[8 + length :])


def metadata(**values):
    return lambda c: with_header(c, lambda h: h | {"__metadata__": h["__metadata__"] | values})


def entry(name, **values):
    return lambda c: with_header(c, lambda h: h | {name: h[name] | values})


FILES = {
    "nothing in it": (lambda c: b"", "is cut off: it has 0 bytes"),
    "text": (lambda c: b"these are no tensors at all", "is no safetensors file; write it with"),
    "torch.save": (lambda c: b"PK\x03\x04" + bytes(60), "is a file of torch.save"),
    "header cut": (lambda c: c[:200], "is cut off: its header has [0-9]+ bytes, the whole file 200"),
    "data cut": (lambda c: c[:-1000], "is cut off: gradients/.* ends at byte [0-9]+ of the data, and there are"),
    "no JSON": (lambda c: c[:8] + b"!" + c[9:], "its header is not JSON"),
    "a list": (lambda c: struct.pack("<Q", 2) + b"[]", "its header is not an object"),
    "swapped": (lambda c: bytes(reversed(c[:8])) + c[8:], "another byte order: safetensors are little-endian"),
    "says big": (metadata(byte_order="big"), "says byte_order 'big'"),
    "later format": (metadata(format="gradproof-dump-9"), "is of format 'gradproof-dump-9'; this gradproof reads"),
    "no number": (metadata(loss="low"), "says loss 'low', which is no number"),
    "odd dtype": (entry("weights/cf", dtype="F4"), "weights/cf is of dtype 'F4', none of F64"),
    "odd shape": (entry("weights/cf", shape=[-1]), r"weights/cf has the shape \[-1\]"),
    "wrong shape": (entry("weights/cf", shape=[17]), r"weights/cf has 64 bytes, but 68 are needed for F32 of shape"),
    "no offsets": (entry("weights/cf", data_offsets=None), "weights/cf has no data_offsets"),
}  # fmt: skip


@pytest.mark.parametrize("kind", FILES)
def test_a_file_that_is_no_dump(kind, tmp_path, reference, capsys):
    change, sentence = FILES[kind]
    path = tampered(write(tmp_path), change)
    assert main(["check-dump", str(path), "--against", f"{reference}:loss"]) == 2
    said = capsys.readouterr().err
    assert re.search(sentence, said) and len(said.strip().splitlines()) == 1, said


def nan_in(d, name):
    x = d[name].clone()
    x.view(-1)[5] = math.nan
    return d | {name: x}


DUMPS = {
    "NaN weight": (lambda p, b: {"weights": nan_in(p, "wpe")}, r"weights/wpe is nan at \(0, 5\) \(1 of 96 entries"),
    "no weights": (lambda p, b: {"weights": {}}, "has no weights/NAME to run a reference from; it has batch/tokens"),
    "a weight missing": (
        lambda p, b: {"weights": {k: v for k, v in p.items() if k != "h1.w2"}, "gradients": {}},
        "asks for 'h1.w2' at by_hand.py:[0-9]+, which is not there; weights: wte, wpe",
    ),
    "the batch missing": (lambda p, b: {"batch": {}}, "asks for 'tokens' at by_hand.py"),
    "a weight of another shape": (
        lambda p, b: {"weights": p | {"gf": torch.ones(7)}}, "raised RuntimeError at by_hand.py"
    ),
    "a gradient of another shape": (
        lambda p, b: {"gradients": {"gf": torch.ones(7)}},
        r"gradients/gf has the shape \(7,\), weights/gf has \(16,\)",
    ),
    "an activation of another shape": (
        lambda p, b: {"activations": {"nf": torch.ones(7)}},
        r"activations/nf has the shape \(7,\), the reference's nf has \(4, 6, 16\)",
    ),
    "nothing to compare": (
        lambda p, b: {"activations": {}, "gradients": {}, "loss": None},
        "has neither gradients/… nor activations/… nor a loss",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", DUMPS)
def test_a_dump_that_cannot_be_compared(kind, tmp_path, reference, capsys):
    change, sentence = DUMPS[kind]
    path = write(tmp_path, **change(gpt_parameters(layers=2), gpt_batch()))
    assert main(["check-dump", str(path), "--against", f"{reference}:loss"]) == 2
    said = capsys.readouterr().err
    assert re.search(sentence, said) and len(said.strip().splitlines()) == 1, said


REFERENCES = {
    "reference.py:raises": "raised ValueError at reference.py:9: no such layer",
    "reference.py:text": "returned a str; return the loss as one number",
    "reference.py:asks": "asks for 'nothing' at reference.py:15, which is not there",
    "reference.py:named_badly": "returned a int as activation 'x', not a tensor",
    "reference.py:number": "has no function number; it has loss, raises",
    "reference.py:none": "has no function none; it has loss, raises",
    "elsewhere.py:loss": "there is no file .*elsewhere.py",
    "broken.py:loss": "broken.py cannot be loaded: SyntaxError",
    "llama": "cannot read --against .*llama; write FILE.py:FUNCTION, or one of gpt, cascade",
}


@pytest.mark.parametrize("against", REFERENCES)
def test_a_reference_that_is_none(against, tmp_path, reference, capsys):
    (tmp_path / "broken.py").write_text("def loss(:\n")
    path = write(tmp_path)
    assert (
        main(["check-dump", str(path), "--against", str(tmp_path / against) if ":" in against else against])
        == 2
    )
    said = capsys.readouterr().err
    assert re.search(REFERENCES[against], said) and len(said.strip().splitlines()) == 1, said


def test_our_gpt_says_what_it_misses(tmp_path, capsys):
    path = write(tmp_path)
    assert main(["check-dump", str(path), "--against", "gpt"]) == 2
    assert (
        "the dump has no weights/token_embedding.weight; its weights are wte, wpe" in capsys.readouterr().err
    )
    assert main(["check-dump", str(tmp_path), "--against", "gpt"]) == 2
    assert "is a directory; name one of its files: step-000003.safetensors" in capsys.readouterr().err
    assert main(["check-dump", str(tmp_path / "no"), "--against", "gpt"]) == 2
    assert "there is no file" in capsys.readouterr().err


def test_the_public_names():
    assert gradproof.dump_step is dump_step and "check_training" in dir(gradproof)
