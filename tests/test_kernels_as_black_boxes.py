"""Kernels that nobody can look into: right ones are left alone, wrong ones are named, with the defect in words."""

import ctypes
import doctest
import json
import sys

import kernel_library
import pytest
import torch
import torch.nn.functional as F
from experiment_steps import evidence_of
from kernel_library import HEALTHY, WRONG, C, HalfGelu, Relu, Softmax, TailGelu, draw
from torch import nn

from gradproof import GradientMismatch, KernelFault, check_gradient, check_kernel
from gradproof.check import blackbox, device, kernel, textbook, variations
from gradproof.check.blackbox import LAYOUTS, black_box, place, strides_of
from gradproof.check.device import check_device
from gradproof.check.kernel import find_call_faults, find_kernel_faults
from gradproof.cli import main
from gradproof.errors import UserError
from gradproof.experiments.gradients.black_boxes import are_kernels_right
from gradproof.tape import origin
from gradproof.tape.origin import CannotImport, bring_back, origin_of
from gradproof.tape.record import record
from gradproof.tape.shadow import shadow


@pytest.fixture(scope="module", autouse=True)
def library(tmp_path_factory):
    C.build(tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def at_one_size(monkeypatch):
    monkeypatch.setattr(kernel, "SECONDS", 0.0)


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_kernel_is_left_alone(name):
    function, inputs = HEALTHY[name]
    found = check_kernel(function, *inputs)
    assert found.right and found.tried, str(found)


@pytest.mark.parametrize("name", WRONG)
def test_defect_is_named_in_words(name):
    function, inputs, words = WRONG[name]
    with pytest.raises(KernelFault) as caught:
        check_kernel(function, *inputs)
    assert words in caught.value.check.faults[0].what, str(caught.value)


def test_what_a_kernel_refuses_is_said_and_is_no_fault(at_one_size):
    found = check_kernel(kernel_library.softmax_contiguous_only, draw(4, 9))
    assert "x transposed: ValueError: x must be contiguous" in found.refused
    assert "refuses: x sliced" in str(found)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_holds_the_same_numbers_amid_a_margin(layout):
    x = draw(2, 3, 4, 4)
    placed = place(x, layout)
    assert torch.equal(placed.view, x) and not placed.disturbed()
    assert placed.view.stride() == strides_of(x, layout)
    placed.base[-1] = 1.0
    assert placed.disturbed()


def test_a_kernel_is_never_handed_another_dtype(at_one_size):
    seen = []

    def gelu(x):
        seen.append(x.dtype)
        return kernel_library.gelu(x)

    check_kernel(gelu, draw(5, 7))
    assert set(seen) == {torch.float32}


def test_reference_decides_what_no_name_says(at_one_size):
    def mystery(x):
        return kernel_library.gelu(x) * 1.001

    assert check_kernel(lambda x: kernel_library.gelu(x), draw(5, 7), reference=F.gelu).right
    with pytest.raises(KernelFault, match="mystery is not its reference"):
        check_kernel(mystery, draw(5, 7), reference=F.gelu)
    assert find_kernel_faults(mystery, draw(5, 7)).right  # nobody said what it is


def test_names_that_speak_of_more_are_not_held_to_less(at_one_size):
    def linear_relu(x, weight, bias):
        return F.linear(x, weight, bias).relu()

    def softmax_of_half(x):
        return (x / 2).softmax(-1)

    assert find_kernel_faults(linear_relu, draw(5, 8), draw(3, 8), draw(3)).right
    assert find_kernel_faults(softmax_of_half, draw(4, 9)).right
    for formula in (lambda x: F.gelu(x, approximate="tanh"), lambda x: x * torch.sigmoid(1.702 * x)):
        assert find_kernel_faults(formula, draw(4, 9), name="gelu").right
    assert find_kernel_faults(F.leaky_relu, draw(4, 9)).right


def test_a_kernel_that_gets_most_entries_right_means_to_get_all():
    def softmax(x):
        y = x.softmax(-1)
        y[-1] *= 1.5
        return y

    found = find_kernel_faults(softmax, draw(5, 9))
    assert found.faults[0].what == "softmax is softmax in 80% of its entries only"


def test_what_cannot_be_tried_is_one_sentence():
    with pytest.raises(UserError, match="cannot be called with these inputs: RuntimeError"):
        check_kernel(torch.matmul, draw(2, 3), draw(2, 3))
    with pytest.raises(UserError, match="returns no tensor and writes into none"):
        check_kernel(lambda x: None, draw(3))
    with pytest.raises(UserError, match="there is no device 'mps' here"):
        check_device("mps")


@pytest.mark.parametrize("x", [torch.zeros(0, 3), torch.tensor(3.0), torch.full((2, 3), torch.nan)])
def test_nothing_one_number_and_nan_are_no_fault(x, at_one_size):
    assert find_kernel_faults(lambda x: 2 * x, x).right


def test_generators_and_modules_are_as_before(at_one_size):
    module = kernel_library.Dropping()
    before = torch.get_rng_state()
    function = C.lib.gelu
    find_call_faults(kernel_library.gelu, draw(4, 4))
    assert torch.equal(torch.get_rng_state(), before)
    check_kernel(module.eval(), draw(4, 8))
    assert not module.training and function.errcheck is None
    assert not torch.are_deterministic_algorithms_enabled()


# ---- the gradient check and the tape


@pytest.mark.parametrize("function", [Softmax, Relu, kernel_library.GELU])
def test_gradient_check_does_not_hand_float64_to_a_pointer(function):
    found = check_gradient(function, draw(4, 8))
    assert found.decided and found.inputs[0].dtype == "float32", str(found)


def test_gradient_check_still_sees_a_wrong_backward_behind_a_pointer():
    with pytest.raises(GradientMismatch, match=r"0\.5"):
        check_gradient(HalfGelu, draw(4, 8))


def taped(function, *more):
    torch.manual_seed(0)
    first, second = nn.Linear(8, 16), nn.Linear(16, 1)
    named = {p: f"{k}.{n}" for k, m in enumerate((first, second)) for n, p in m.named_parameters()}
    named |= {p: f"more.{k}" for k, p in enumerate(more)}
    with record(named) as tape:
        second(function.apply(first(draw(32, 8)), *more)).square().mean().backward()
    assert not tape.broken
    return shadow(tape)


@pytest.mark.parametrize("function", [kernel_library.GELU, Relu, Softmax, kernel_library.make_rms()])
def test_healthy_kernels_in_a_taped_step_are_right(function):
    more = [nn.Parameter(torch.ones(16))] if function.__name__ == "RMSNorm" else []
    found = taped(function, *more)
    assert found.right and found.audits and all(audit.right for audit in found.audits), str(found)
    assert not found.departed and torch.Tensor.data_ptr.__name__ == "data_ptr"


def test_wrong_kernel_in_a_taped_step_is_a_culprit():
    found = taped(HalfGelu)
    assert [c.what for c in found.culprits] == ["HalfGelu"] and found.culprits[0].confidence == "likely"
    assert taped(TailBackward).culprits[0].kind == "memory never written"


class TailBackward(HalfGelu):
    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        d = torch.empty_like(x)
        C.call("dgelu_blocks", x, g.contiguous(), d, x.numel() - 4)
        return d


# ---- the examination of specimens


def step_with(function):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 1))
    x, y = draw(7, 8), draw(7, 1)
    return evidence_of(model, lambda: F.mse_loss(model[1](function.apply(model[0](x))), y))


def verdicts_on(function):
    return list(are_kernels_right(step_with(function)))


def test_examination_names_a_wrong_kernel_and_lets_a_right_one_be():
    (right,) = verdicts_on(Softmax)
    assert right.verdict == "excluded" and right.about == "wrong-gradient/kernel", right
    (half,) = verdicts_on(HalfGelu)
    assert (half.id, half.confidence) == ("wrong-gradient/backward", "likely")
    assert "a factor 0.500" in half.evidence[0] and "kernel" in half.where
    (tail,) = verdicts_on(TailGelu)
    assert (tail.id, tail.confidence) == ("aliasing-or-inplace/never-written", "proven")
    assert "leaves the last 3 of 35 entries of the output unwritten" in tail.evidence[0]


def test_what_a_name_claims_is_a_problem_only_where_there_is_trouble():
    (found,) = verdicts_on(UnevenSoftmax)
    assert (found.id, found.confidence, found.if_troubled) == ("wrong-gradient/kernel", "likely", True)
    assert "divides by the sum of all rows, not of each" in found.evidence[0]


class UnevenSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = kernel_library.softmax_contiguous_only(x.reshape(1, -1)).view(x.shape)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return y * (g - (g * y).sum())


def test_examination_calls_operators_again():
    class Applied:
        apply = kernel_library.operator

    (found,) = verdicts_on(Applied)
    assert found.verdict == "excluded" and "gradproof_kernels.gelu" in found.reason, found


def test_examination_says_what_it_cannot_call(monkeypatch):
    (found,) = verdicts_on(kernel_library.GELU)
    assert found.verdict == "undecided" and "it is made inside a function" in found.reason
    monkeypatch.setattr(origin, "_digest", lambda path: "another")
    evidence = step_with(Softmax)
    monkeypatch.undo()
    (found,) = are_kernels_right(evidence)
    assert found.verdict == "undecided" and "kernel_library.py has changed since" in found.reason


SCRIPT = """
import ctypes
import torch
lib = ctypes.CDLL({path!r})
lib.gelu.restype = ctypes.c_int
address = lambda t: ctypes.c_void_p(t.data_ptr())
print("this trains")
raise SystemExit("and must not run again")
class Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = torch.empty_like(x)
        lib.gelu(address(x), address(y), ctypes.c_long(x.numel()))
        return y
"""


def test_of_a_script_only_what_a_class_needs_is_run_again(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(path=C.lib._name))
    found = bring_back(origin.Origin("__main__", "Gelu", str(script), origin._digest(script)))
    assert torch.allclose(found.apply(torch.ones(3)), F.gelu(torch.ones(3))) and not capsys.readouterr().out
    script.write_text("for k in range(3):\n    class Gelu: ...\n")
    with pytest.raises(CannotImport, match="needs a loop of the script"):
        bring_back(origin.Origin("__main__", "Gelu", str(script), origin._digest(script)))
    script.unlink()
    with pytest.raises(CannotImport, match=r"train\.py is not here"):
        bring_back(origin.Origin("__main__", "Gelu", str(script), ""))
    assert origin_of(None) is None


# ---- PyTorch's own operators, and the command


def test_operators_of_the_host_are_right():
    found = check_device("cpu")
    # torch 2.13's fused AdamW reads a gradient as if it were laid out like its parameter
    assert all("fused" in fault.what and "gradient" in fault.what for fault in found.faults), str(found)


def test_an_operator_that_writes_nothing_into_a_transposed_tensor_is_named(monkeypatch):
    own = torch.Tensor.addcmul_
    monkeypatch.setattr(
        torch.Tensor, "addcmul_", lambda x, *a, **k: own(x if x.is_contiguous() else x.clone(), *a, **k)
    )
    monkeypatch.setattr(device, "OUT_OF_PLACE", {})
    monkeypatch.setattr(device, "OPTIMIZERS", ())
    found = check_device("cpu")
    assert found.faults[0].what == "addcmul_ in float32, written transposed: writes nothing"
    assert all("addcmul_" in fault.what for fault in found.faults)


def test_optimizers_of_torch_step_alike_in_every_layout():
    for made in (
        torch.optim.AdamW,
        torch.optim.Adam,
        torch.optim.NAdam,
        torch.optim.RMSprop,
        torch.optim.SGD,
    ):
        assert check_kernel(made).right
    momentum = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)
    assert "recognised as SGD with momentum" in check_kernel(momentum).notes


FILE = """
import torch
def half(x):
    out = torch.empty_like(x)
    out[:-1] = x[:-1].tanh()
    return out
def whole(x):
    return x.tanh()
def reference_other(x):
    return x.sin()
def other(x):
    return x.cos()
example_inputs = (torch.linspace(-2, 2, 20).view(4, 5),)
"""


def test_command_tries_a_kernel(tmp_path, capsys, at_one_size):
    file = tmp_path / "kernels_of_a_file.py"
    file.write_text(FILE)
    assert main(["check", f"{file}:whole", "--kernel"]) == 0
    assert "nothing wrong was found" in capsys.readouterr().out
    assert main(["check", f"{file}:half", "--kernel", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert "leaves the last 5 of 20 entries" in found["faults"][0]["what"] and found["verdict"] == "wrong"
    assert main(["check", f"{file}:other", "--kernel"]) == 1
    assert "other is not its reference" in capsys.readouterr().out
    assert main(["check"]) == 2
    assert "say what to check" in capsys.readouterr().err


def test_examples_in_docstrings_hold():
    for module in (blackbox, textbook, variations, origin):
        assert doctest.testmod(module).failed == 0


def test_return_codes_are_looked_at_only_where_zero_is_usual():
    box = black_box(kernel_library.gelu, (draw(3),))
    box.ask()
    names = [f.__name__ for f in blackbox.c_functions()]
    assert "gelu" in names and isinstance(C.lib, ctypes.CDLL) and "kernel_library" in sys.modules


# ---- Triton and extensions


@pytest.mark.slow
def test_healthy_triton_kernels_are_left_alone(monkeypatch):
    kernels = pytest.importorskip("triton_library")
    monkeypatch.setattr(variations, "MANY", 67)  # the interpreter takes a millisecond for each program
    monkeypatch.setattr(kernel, "SECONDS", 3.0)
    assert check_kernel(kernels.Twice, draw(4, 8)).right
    assert check_kernel(kernels.make_twice(lambda n: -(-n // kernels.BLOCK)), draw(4, 8)).right
    assert check_kernel(kernels.make_softmax(True), draw(3, 8)).right


def test_wrong_triton_kernels_are_named(monkeypatch):
    kernels = pytest.importorskip("triton_library")
    monkeypatch.setattr(variations, "MANY", 67)
    found = find_kernel_faults(kernels.make_softmax(False), draw(3, 7))  # what lies beyond a row counts as 0
    assert "counts what lies beyond the end of a row" in found.faults[0].what, str(found)
    found = find_kernel_faults(kernels.make_twice(lambda n: n // kernels.BLOCK), draw(4, 8))
    assert "leaves the last 8 of 40 entries of the output unwritten" in found.faults[0].what, str(found)
    found = find_kernel_faults(kernels.TwiceByFour, draw(4, 8))
    assert "backward of TwiceByFour is wrong with respect to x: a factor 2.00" in found.faults[0].what


EXTENSION = r"""
#include <torch/extension.h>
torch::Tensor relu(torch::Tensor x) {
  TORCH_CHECK(x.is_contiguous(), "relu takes contiguous tensors");
  auto out = torch::empty_like(x);
  const float *a = x.data_ptr<float>();
  float *b = out.data_ptr<float>();
  for (int64_t i = 0; i < x.numel(); i++) b[i] = a[i] > 0 ? a[i] : 0;
  return out;
}
torch::Tensor relu_tail(torch::Tensor x) {
  x = x.contiguous();
  auto out = torch::empty_like(x);
  const float *a = x.data_ptr<float>();
  float *b = out.data_ptr<float>();
  for (int64_t i = 0; i < x.numel() / 4 * 4; i++) b[i] = a[i] > 0 ? a[i] : 0;
  return out;
}
torch::Tensor sum_rows(torch::Tensor x) {
  auto out = torch::zeros({x.size(0)});
  auto a = x.accessor<float, 2>();
  auto b = out.accessor<float, 1>();
  for (int64_t i = 0; i < x.size(0); i++) for (int64_t j = 0; j < x.size(1); j++) b[i] += a[i][j];
  return out;
}
torch::Tensor sum_rows_half(torch::Tensor x) {
  auto out = torch::zeros({x.size(0)});
  for (int64_t i = 0; i < x.size(0); i++) {
    at::BFloat16 s = 0;
    for (int64_t j = 0; j < x.size(1); j++) s = s + at::BFloat16(x[i][j].item<float>());
    out[i] = (float)s;
  }
  return out;
}
void scale_(torch::Tensor x) { x.mul_(0.5); }
void scale_dense_(torch::Tensor x) {
  if (x.is_contiguous()) x.mul_(0.5);
}
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_kernels_of_an_extension(tmp_path):
    from torch.utils import cpp_extension

    names = ["relu", "relu_tail", "sum_rows", "sum_rows_half", "scale_", "scale_dense_"]
    made = cpp_extension.load_inline(
        "gradproof_kernels", EXTENSION, functions=names, build_directory=str(tmp_path), extra_cflags=["-O0"]
    )
    assert check_kernel(made.relu, draw(5, 7), name="relu").right
    assert check_kernel(made.sum_rows, draw(5, 7), name="sum_rows").right
    assert check_kernel(made.scale_, draw(5, 7), name="scale_").right
    words = {
        "relu_tail": (draw(5, 7), "leaves the last 3 of 35 entries of the output unwritten"),
        "sum_rows_half": (1 + draw(5, 64).abs(), "as if something inside were bfloat16"),
        "scale_dense_": (draw(5, 7), "where it is not contiguous (transposed)"),
    }
    for name, (x, said) in words.items():
        found = find_kernel_faults(getattr(made, name), x, name=name)
        assert said in found.faults[0].what, str(found)
