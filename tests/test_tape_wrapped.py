"""The tape under the wrappers people train with: DDP, torch.compile, Triton kernels, Hugging Face models."""

import os
import subprocess
import sys

import pytest
import tape_faults
import torch
import torch.multiprocessing
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradproof.tape.locate import find_first_bad_operation
from gradproof.tape.record import record
from gradproof.tape.shadow import shadow


def names_of(model):
    return {parameter: name for name, parameter in model.named_parameters()}


@pytest.fixture
def one_process(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def taped(model, wrapped, batch):
    with record(names_of(model)) as tape:
        loss = wrapped(*batch)
        loss.backward()
    assert not tape.broken
    return tape


@pytest.mark.parametrize("wrong", [None, tape_faults.LayerNormSign])
def test_ddp(one_process, wrong):
    model, batch = tape_faults.build("norm" if wrong else None, wrong)
    answer = shadow(taped(model, DistributedDataParallel(model), batch))
    assert answer.right == (wrong is None)
    assert [(c.what, c.module) for c in answer.culprits] == (
        [("LayerNormSign", "layers.1.norm")] if wrong else []
    )
    assert not answer.accumulation


COMPILING = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


@COMPILING
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_model_is_taped_operation_by_operation(backend):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 1))
    compiled = torch.compile(model, backend=backend)
    x = torch.randn(5, 4)
    compiled(x).square().mean().backward()  # compiled before the tape is on
    model.zero_grad()
    with record(names_of(model)) as tape:
        compiled(x).square().mean().backward()
    assert tape.compiled
    assert {op.module for op in tape.operations if op.name == "addmm"} == {"0", "3"}
    answer = shadow(tape)
    assert answer.right and not answer.notes
    before = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    compiled(x).square().mean().backward()  # and again after it
    assert all(torch.allclose(a, p.grad) for a, p in zip(before, model.parameters(), strict=True))


@COMPILING
def test_code_that_insists_on_being_compiled_is_not_disturbed():
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    compiled = torch.compile(lambda x: model(x).tanh().sum(), backend="eager", fullgraph=True)
    x = torch.randn(3, 4)
    plain = compiled(x)
    with record(names_of(model)) as tape:
        compiled(x).backward()
        chosen = torch.cond(x.sum() > 0, lambda a: a.sin(), lambda a: a.cos(), (x,))
    assert not tape.broken and shadow(tape).right
    assert torch.equal(compiled(x), plain)
    assert torch.equal(chosen, x.sin() if x.sum() > 0 else x.cos())


@COMPILING
def test_nan_in_a_compiled_model_is_located():
    class Bad(nn.Module):
        def forward(self, x):
            return (x - x).log()

    model = nn.Sequential(nn.Linear(4, 4), Bad())
    compiled = torch.compile(model, backend="eager")
    tape = taped(model, lambda x: compiled(x).sum(), (torch.randn(2, 4),))
    bad = find_first_bad_operation(tape)
    assert (bad.operator, bad.module) == ("log", "1")


def _train_rank(rank, directory):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=2
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(rank))
    with record(names_of(model)) as tape:
        wrapped(x).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
    assert not tape.broken
    answer = shadow(tape)
    assert answer.right, str(answer)
    assert not answer.accumulation, str(answer)
    assert find_first_bad_operation(tape) is None
    # first: the reducer would free the group, and may wait for gloo's thread for ever
    del wrapped, tape, answer
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_ddp_with_two_processes_never_talks_while_replaying(tmp_path):
    torch.multiprocessing.spawn(_train_rank, (str(tmp_path),), nprocs=2)


@COMPILING
@pytest.mark.slow
def test_compiled_by_inductor():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 1))
    compiled = torch.compile(model)
    x = torch.randn(5, 4)
    compiled(x).square().mean().backward()
    model.zero_grad()
    with record(names_of(model)) as tape:
        compiled(x).square().mean().backward()
    assert tape.compiled and shadow(tape).right


@pytest.mark.slow
def test_triton_kernel_is_judged_by_finite_differences(tmp_path):
    pytest.importorskip("triton")
    code = """
import sys, torch, triton
import triton.language as tl
from gradproof.tape.record import record
from gradproof.tape.shadow import shadow

@triton.jit
def square(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)
    tl.store(y_ptr + at, x * x, mask=at < n)

class Square(torch.autograd.Function):
    slope = 2.0
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        y = torch.empty_like(x)
        square[(1,)](x, y, x.numel(), BLOCK=64)
        return y
    @staticmethod
    def backward(ctx, grad):
        return grad * Square.slope * ctx.saved_tensors[0]

model = torch.nn.Linear(3, 4)
for Square.slope, right in ((2.0, True), (1.9, False)):
    with record({p: n for n, p in model.named_parameters()}) as tape:
        Square.apply(model(torch.randn(5, 3))).sum().backward()
    answer = shadow(tape)
    assert answer.right == right, str(answer)
    assert right or answer.culprits[0].what == "Square"
"""
    script = tmp_path / "kernel.py"
    script.write_text(code)
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }
    subprocess.run([sys.executable, str(script)], check=True, env=environment)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["gpt2", "llama", "llama checkpointed"])
def test_hugging_face_models(kind):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0
        )
        model = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(
            vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=32,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config)
    if "checkpointed" in kind:
        model.gradient_checkpointing_enable()
    model.train()
    ids = torch.randint(0, 50, (2, 10))
    padding = torch.ones_like(ids)
    padding[0, :4] = 0
    with record(names_of(model)) as tape:
        model(input_ids=ids, attention_mask=padding, labels=ids, use_cache=False).loss.backward()
    answer = shadow(tape)
    assert answer.right, str(answer)
    assert answer.error < 1e-6
    assert find_first_bad_operation(tape) is None
