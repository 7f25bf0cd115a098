"""What a record alone shows of gradients and updates written by hand: planted, and silent on its healthy twin."""

import json
import re
from importlib.util import module_from_spec, spec_from_file_location

import numpy as np
import pytest
from c_programs import GPT, gpt, needs_a_compiler, text_of_the_standard_library, train
from safetensors import safe_open
from test_diagnosis import FALLING, Written, parameter, seen

from gradproof.check.against import check_dump
from gradproof.check.dump import read_dump
from gradproof.diagnosis import by_hand, symptoms
from gradproof.diagnosis.ranking import diagnose
from gradproof.record.run import open_run

NAMES = ("wte", "blocks__0__qkv", "blocks__1__qkv", "head")


class ByHand(Written):
    """A run as gradproof.h writes it: three measured steps of four matrices, of which some are as the test says."""

    def __init__(self, path, weights=None, gradients=None, changed=None, **columns):
        columns = {"loss": FALLING, "lr": np.full(60, 1e-3), **columns}
        super().__init__(path, [], **columns)
        names = [name.replace("__", ".") for name in NAMES]
        known = [parameter(n, changed=c) for n, c in zip(names, changed, strict=True)] if changed else []
        self.writer.set_info(written_by="gradproof.h", parameters=known)
        for number, step in enumerate((0, 20, 40)):
            self.frame(step, "weight", **self._rows(weights or {}, number, 1.0))
            self.frame(step, "gradient", **self._rows(gradients or {}, number, 0.1))

    def _rows(self, given, number, size):
        """Statistics that differ from tensor to tensor and from step to step, unless `given` says how large."""
        rows = {}
        for place, name in enumerate(NAMES):
            x = given.get(name, size * (1 + 0.1 * place + 0.01 * number))
            x = x[number] if isinstance(x, tuple) else x
            rows[name] = {"absmax": x, "min": -x, "max": x, "mean": 0.0, "std": x / 2, "norm": 4 * x}
        return rows


@pytest.fixture
def made(tmp_path):
    count = iter(range(100))
    return lambda **given: ByHand(tmp_path / f"run{next(count)}", **given).read()


def test_a_healthy_run_by_hand_is_silent(made):
    assert seen(made()) == {} and seen(made(changed=[True] * 4)) == {}


def test_a_matrix_that_stays_zero(made):
    run = made(weights={"blocks__0__qkv": 0.0}, gradients={"blocks__0__qkv": 0.0})
    (found,) = diagnose(run).causes
    assert found.id == "bad-init/zeros" and found.where == "blocks.0.qkv" and found.level == "problem"
    moves = made(weights={"blocks__0__qkv": (0.0, 0.1, 0.2)})  # a matrix may begin at zero
    assert not list(by_hand.stays_zero(moves))


def test_a_layer_whose_gradient_is_never_written(made):
    (found,) = diagnose(made(gradients={"blocks__0__qkv": 0.0})).causes
    assert found.id == "wrong-gradient/never-written" and found.where == "blocks.0"
    assert "wte, blocks.1, head is not" in found.evidence[0]
    (found,) = diagnose(made(gradients=dict.fromkeys(NAMES, 0.0))).causes
    assert found.id == "wrong-gradient/never-written" and found.where == "every tensor"
    once = made(gradients={"blocks__0__qkv": (0.0, 0.1, 0.0)})
    assert not list(by_hand.layer_without_gradient(once))


def test_a_gradient_of_nothing_but_nan_is_not_called_zero(tmp_path):
    made = ByHand(tmp_path / "run")
    nan = {"nan": 16, "absmax": 0.0}  # over the finite entries, of which there are none
    for step in (45, 50, 55):
        made.frame(step, "gradient", other=nan)
    assert not list(by_hand.layer_without_gradient(made.read()))


@pytest.mark.parametrize("ended", [True, False], ids=["ended", "killed"])
def test_weights_that_never_move(made, ended):
    constant = {name: 1.0 + place for place, name in enumerate(NAMES)}
    (found,) = diagnose(made(weights=constant, changed=[False] * 4 if ended else None)).causes
    assert found.id == "param-not-updated/no-change" and found.level == "problem"
    but_one = {name: constant[name] for name in NAMES[1:]}
    run = made(weights=but_one, changed=[True, False, False, False] if ended else None)
    (found,) = diagnose(run).causes
    assert found.id == "param-not-updated/not-in-optimizer" and found.where == "blocks.0, blocks.1, head"
    assert "while wte moves" in found.evidence[0]


def test_a_standstill_has_other_reasons_too(made):
    constant = {name: 1.0 + place for place, name in enumerate(NAMES)}
    tiny = made(weights=constant, lr=np.full(60, 1e-9))
    assert diagnose(tiny).causes[0].id == "lr-too-low/tiny-updates"
    assert not list(by_hand.never_moves(made(weights=constant, lr=np.zeros(60))))  # lr_zero says it
    frozen = made(
        weights=constant, gradients=dict.fromkeys(NAMES[1:], 0.0), changed=[True, False, False, False]
    )
    assert not list(by_hand.never_moves(frozen))  # without a gradient there is nothing to follow


def test_matrices_that_begin_alike(made):
    alike = {"blocks__0__qkv": (2.0, 2.1, 2.2), "blocks__1__qkv": (2.0, 2.15, 2.25)}
    (found,) = diagnose(made(weights=alike)).causes
    assert found.id == "bad-init/same-seed" and found.where == "blocks.0.qkv, blocks.1.qkv"
    tied = {"wte": (1.0, 1.1, 1.2), "head": (1.0, 1.1, 1.2)}
    assert not list(by_hand.begins_alike(made(weights=tied)))


def test_a_clip_after_the_step_in_either_way_of_counting(made):
    for order, late in {
        "zbsc": True,
        "zbcs": False,
        "czbs": True,
        "zbcsc": False,
        "zbs": False,
        "sc": True,
    }.items():
        assert symptoms.clipped_after_step(order) is late, order
    assert diagnose(made(order=["zbsc"] * 60)).causes[0].id == "grad-clip-misuse/after-step"
    assert seen(made(order=["zbcs"] * 60)) == {}


def test_only_what_is_written_by_hand_is_asked(tmp_path):
    """A PyTorch training has reasons for each of these; others ask them there."""
    made = ByHand(tmp_path / "run", gradients={"blocks__0__qkv": 0.0})
    made.writer.set_info(written_by=None)
    assert seen(made.read()) == {}


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("blocks.0.qkv.weight", "blocks.0"),
        ("h.11.ln", "h.11"),
        ("lnf.bias", "lnf"),
        ("wte", "wte"),
        ("layer3", "layer3"),
    ],
)
def test_layers_are_read_off_names(name, layer):
    assert by_hand.layer_of(name) == layer


# ---- the GPT in C ----


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    needs_a_compiler()
    return text_of_the_standard_library(tmp_path_factory.mktemp("text"))


@pytest.fixture
def trained(tmp_path, text):
    """Compiles and trains it; returns the run."""
    (tmp_path / "text.bin").symlink_to(text)

    def train_one(slip="", *args):
        train(gpt(tmp_path, slip), tmp_path, *args)
        return open_run(tmp_path / "run")

    return train_one


def load_reference():
    """The function of examples/c_gpt/reference.py, from its file: a check names its lines."""
    spec = spec_from_file_location("reference", GPT / "reference.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.loss


def errors_of(dump):
    """|theirs - ours| / |ours| of every activation and gradient of a dump; ours is reference.py in float64."""
    with safe_open(dump, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        told = float(file.metadata()["loss"])

    def part(folder):
        return {n.partition("/")[2]: t for n, t in tensors.items() if n.startswith(folder + "/")}

    weights = {name: tensor.double().requires_grad_() for name, tensor in part("weights").items()}
    loss, seen = load_reference()(weights, part("batch"))
    for tensor in seen.values():
        tensor.retain_grad()
    loss.backward()
    truth = {f"activations/{name}": tensor.detach() for name, tensor in seen.items()}
    truth |= {f"activation_gradients/{name}": tensor.grad for name, tensor in seen.items()}
    truth |= {f"gradients/{name}": tensor.grad for name, tensor in weights.items()}
    assert set(truth) | {n for n in tensors if n.startswith(("weights/", "batch/"))} == set(tensors)
    found = {name: ((tensors[name] - want).norm() / want.norm()).item() for name, want in truth.items()}
    return {"loss": abs(told - loss.item()) / loss.item(), **found}


@pytest.mark.parametrize(
    "flags", [[], pytest.param(["-DTIED"], marks=pytest.mark.slow)], ids=["untied", "tied"]
)
def test_every_activation_and_gradient_of_the_gpt_is_right(tmp_path, text, flags):
    (tmp_path / "text.bin").symlink_to(text)
    train(gpt(tmp_path, "", "-DGPT_DOUBLE", *flags), tmp_path, "--steps", "3", "--dump-step", "2")
    errors = errors_of(tmp_path / "step.safetensors")
    assert len(errors) > 70 and max(errors.values()) < 1e-12, max(errors, key=errors.get)


def test_the_healthy_gpt_learns_is_silent_and_trains_alike_unwatched(tmp_path, text):
    (tmp_path / "text.bin").symlink_to(text)
    program = gpt(tmp_path)
    watched = train(program, tmp_path)
    run = open_run(tmp_path / "run")
    assert diagnose(run).causes == () and seen(run) == {}
    assert run.steps["loss"][-5:].mean() < 0.75 * run.steps["loss"][0]
    assert watched == train(program, tmp_path, "--out", "") and watched.count("\n") == 80


SEEN_IN_THE_RECORD = {
    "NO_LAYER_BACKWARD": ("wrong-gradient/never-written", "blocks.0"),
    "NO_COUNT": ("param-not-updated/no-change", "every weight"),
    "ZERO_INIT": ("bad-init/zeros", "blocks.0.qkv.weight"),
    "COMPOUNDED": ("lr-schedule-error/dies-early", None),
    "SAME_SEED": ("bad-init/same-seed", "wte, head"),
    "LATE_CLIP": ("grad-clip-misuse/after-step", None),
    "EMBEDDINGS_ONLY": ("param-not-updated/not-in-optimizer", "blocks.0, blocks.1, lnf, head"),
}


@pytest.mark.slow
@pytest.mark.parametrize("slip", SEEN_IN_THE_RECORD)
def test_every_slip_that_the_record_shows_is_named_first(trained, slip):
    found = diagnose(trained(slip)).causes[0]
    assert (found.id, found.where) == SEEN_IN_THE_RECORD[slip]


# slip -> the first wrong tensor, its layer in the name, and words of the pattern
SEEN_IN_A_DUMP = {
    "OVERWRITTEN": ("activations/blocks.0.ln1", "equals activations/blocks.0.ln2"),
    "UNBATCHED": ("activations/blocks.0.att", "the batch index is missing"),
    "NO_MASK": ("activations/blocks.0.att", "the causal mask is missing"),
    # K and V, two thirds of qkv
    "UNINITIALISED": ("activation_gradients/blocks.1.qkv", "accumulated: the step before is still in 76"),
    "SIGN": ("activation_gradients/blocks.1.fc", "sign"),
    "NO_LAYER_BACKWARD": ("activation_gradients/blocks.0.mlp", "its backward were never called"),
}
SMALL = ("--steps", "7", "--channels", "16", "--time", "8", "--batch", "3")


def check_step(directory):
    """`gradproof check-dump step.safetensors --before before.safetensors --against reference.py:loss`"""
    now, before = (read_dump(directory / f"{name}.safetensors") for name in ("step", "before"))
    return check_dump(now, load_reference(), before=before)


@pytest.mark.slow
@pytest.mark.parametrize("slip", SEEN_IN_A_DUMP)
def test_every_slip_that_a_dump_shows_is_named_first(trained, tmp_path, slip):
    trained(slip, *SMALL)
    found = check_step(tmp_path)
    first = found.first_activation or found.first_gradient
    name, words = SEEN_IN_A_DUMP[slip]
    assert found.verdict == "wrong" and first.name == name and words in first.pattern


@pytest.mark.slow
def test_the_healthy_step_is_right(trained, tmp_path):
    trained("", *SMALL)
    assert check_step(tmp_path).verdict == "right"


def test_the_slips_are_those_of_the_source():
    source = (GPT / "gpt.c").read_text()
    planted = set(re.findall(r"^#ifn?def SLIP_(\w+)", source, re.M))
    assert len(planted) == 12 and planted == set(SEEN_IN_THE_RECORD) | set(SEEN_IN_A_DUMP)


def test_a_run_of_c_says_what_was_not_asked(made):
    found = diagnose(made())
    assert "check-dump" in found.conclusion and not found.examination.complete
    stuck = made(loss=np.full(60, 2.0) + 1e-3 * np.arange(60) % 2)
    assert ["check-dump" in line for line in diagnose(stuck).next_steps] == [True]
    assert json.dumps(found.as_data())


def test_steps_whose_update_is_not_known_do_not_hide_the_others(tmp_path):
    """Without gp_will_update nobody knows what the first step changed."""
    made = ByHand(tmp_path / "updates", changed=[True] * 4)
    for step in (20, 40):
        made.frame(step, "update", **{name: {"norm": 1e-3} for name in reversed(NAMES)})
    names, ratios = symptoms.update_ratios(made.read())
    assert names == ["head", "blocks.1.qkv", "blocks.0.qkv", "wte"]
    np.testing.assert_allclose(
        ratios, [1e-3 / (4 * (1.015 + 0.1 * place)) for place in (3, 2, 1, 0)], rtol=1e-3
    )
