"""Trains a language model: batches from a seed, checkpoints, exact resume; knows nothing of who watches."""

from __future__ import annotations

import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradproof.errors import UserError
from gradproof.lm.adam import AdamSettings, learning_rate
from gradproof.lm.alignment import Alignment, compare_alignment, count_duplicates
from gradproof.lm.cascade import Cascade, CascadeShape
from gradproof.lm.checkpoint import find_checkpoint, load_checkpoint, load_weights, save_checkpoint
from gradproof.lm.data import (
    TokenData,
    open_token_files,
    read_documents,
    training_batch,
    validation_batches,
    write_atomically,
    write_token_files,
)
from gradproof.lm.explicit_gpt import ExplicitGPT
from gradproof.lm.generate import generate
from gradproof.lm.gpt import GPT
from gradproof.lm.learner import ExplicitLearner, Learner, ModuleLearner
from gradproof.lm.ranks import Ranks
from gradproof.lm.shape import GPTShape
from gradproof.lm.tokenizer import Tokenizer, load_tokenizer, train_tokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
MODELS = ("gpt", "explicit", "cascade")


@dataclass(frozen=True)
class Job:
    """Everything that decides how a training goes; saved as RUN/job.json."""

    model: str = "gpt"
    data: str | None = None
    tokenizer: str = "byte"
    vocabulary: int = 4096  # at most, of words and byte pairs
    context: int = 128
    width: int = 128
    heads: int = 4
    layers: int = 4
    tied: bool = True
    batch: int = 16  # sequences a step, over all ranks and micro-batches
    accumulate: int = 1
    steps: int = 1500
    lr: float = 2e-3
    warmup: int = 100
    schedule: str = "cosine"
    clip: float = 1.0
    weight_decay: float = 0.1
    seed: int = 0
    dtype: str = "float32"
    compile: bool = False
    shard: bool = False
    recompute: bool = False
    evaluate_every: int = 250
    evaluate_batches: int = 20

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise UserError(f"no model {self.model!r}: choose from {', '.join(MODELS)}")
        if self.dtype not in DTYPES:
            raise UserError(f"no dtype {self.dtype!r}: choose from {', '.join(DTYPES)}")
        for name in ("batch", "accumulate", "steps", "evaluate_every", "evaluate_batches"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}")
        for name in ("lr", "clip"):
            if not getattr(self, name) > 0:
                raise UserError(f"--{name} must be above 0, not {getattr(self, name)}")


@dataclass(frozen=True)
class Step:
    """What a step came to; validation and sample only where the model was evaluated after it."""

    step: int  # steps done, this one included
    loss: float
    lr: float
    gradient_norm: float  # before the clip
    tokens: int  # of this step, over all ranks
    seconds: float
    validation: float | None = None
    sample: str | None = None


def start_run(run: Path, job: Job) -> None:
    """Writes the job and its token files into a new run folder."""
    if (run / "job.json").exists():
        raise UserError(
            f"{run} already holds a training run: resume it with --resume {run}, or give another --out"
        )
    documents = read_documents(Path(job.data) if job.data else None)
    tokenizer = train_tokenizer(job.tokenizer, documents, job.vocabulary)
    write_token_files(run / "data", documents, tokenizer)
    open_token_files(run / "data", job.context)  # raises here, before anything is called a run
    write_job(run, job)


def write_job(run: Path, job: Job) -> None:
    write_atomically(run / "job.json", json.dumps(asdict(job), indent=1).encode())


def read_job(run: Path, **changes: Any) -> Job:
    """The job of a run, with what a resume may change: steps, for example."""
    try:
        saved = json.loads((run / "job.json").read_text())
        return Job(**{**saved, **changes})
    except FileNotFoundError:
        raise UserError(
            f"{run} is not a training run: it has no job.json; gradproof train makes one"
        ) from None
    except (ValueError, TypeError) as error:
        raise UserError(f"{run / 'job.json'} is damaged ({error}); start a new run") from None


def build_learner(job: Job, vocabulary: int, ranks: Ranks) -> Learner:
    """The model of a job, ready to train."""
    adam = AdamSettings(weight_decay=job.weight_decay)
    dtype = DTYPES[job.dtype]
    whole = torch.float64 if job.dtype == "float64" else torch.float32  # bfloat16 is for activations only
    if job.model == "explicit":
        if job.shard or job.compile:
            raise UserError(
                "--shard and --compile are for --model gpt and cascade; the explicit model has no modules"
            )
        shape = gpt_shape(job, vocabulary)
        options = {"dtype": whole, "activations": dtype, "recompute": job.recompute, "seed": job.seed}
        return ExplicitLearner(ExplicitGPT(shape, device=ranks.device, **options), adam, ranks)  # type: ignore[arg-type]
    module = build_module(job, vocabulary).to(whole)
    autocast = torch.bfloat16 if job.dtype == "bfloat16" else None
    return ModuleLearner(module, adam, ranks, autocast=autocast, compiled=job.compile, shard=job.shard)


def build_module(job: Job, vocabulary: int) -> GPT | Cascade:
    """The model of a job as an nn.Module; the explicit one's weights fit the GPT."""
    if job.model == "cascade":
        widths = tuple(job.heads * math.ceil(job.width * grow / job.heads) for grow in (1.0, 1.5, 2.0))
        shape = CascadeShape(
            vocabulary,
            job.context,
            job.width,
            job.heads,
            widths,
            stage_layers=max(1, job.layers // len(widths)),
        )
        return Cascade(shape, seed=job.seed)
    return GPT(gpt_shape(job, vocabulary), seed=job.seed)


def gpt_shape(job: Job, vocabulary: int) -> GPTShape:
    return GPTShape(vocabulary, job.context, job.width, job.heads, job.layers, job.tied)


def first_alignment(job: Job, data: TokenData) -> Alignment:
    """Whether the first batch's targets are its inputs, one token later."""
    inputs, targets = training_batch(data.train, 0, job.batch, job.context, job.seed)
    return compare_alignment(inputs, targets, data.tokenizer.vocabulary)


def count_repeated_batches(job: Job, data: TokenData, steps: int = 100) -> int:
    """How many of the first steps' batches repeat an earlier one."""
    batches = (training_batch(data.train, step, job.batch, job.context, job.seed)[0] for step in range(steps))
    return count_duplicates(batch.flatten() for batch in batches)


def load_trained(run: Path, which: str) -> tuple[GPT | Cascade, Tokenizer]:
    """The model of a run's "best" or "last" checkpoint, as an nn.Module on the CPU, and its tokenizer."""
    job = read_job(run)
    tokenizer = load_tokenizer(run / "data" / "tokenizer.json")
    path = find_checkpoint(run, which)
    if path is None:
        raise UserError(
            f"{run} has no checkpoint yet: the first comes after {job.evaluate_every} steps; "
            "start it again with more --steps"
        )
    module = build_module(job, tokenizer.vocabulary)
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    module.load_state_dict(load_weights(path, shapes))
    return module.eval(), tokenizer


def resume(run: Path, learner: Learner, job: Job) -> tuple[int, float]:
    """Takes over the last checkpoint, if there is one: the steps done and the best validation loss."""
    path = find_checkpoint(run, "last")
    if path is None:
        return 0, math.inf
    weights, adam, state = load_checkpoint(path, learner.shapes)
    if state["step"] > job.steps:
        raise UserError(f"{run} has done {state['step']} steps already: give more than --steps {job.steps}")
    learner.load(weights, adam, state["step"])
    return state["step"], state["best"]


Observe = Callable[[str, Tensor], None]


def train(
    run: Path,
    job: Job,
    learner: Learner,
    data: TokenData,
    ranks: Ranks,
    *,
    on_step: Callable[[Step], None] = lambda step: None,
    observe: Observe = lambda moment, value: None,
) -> int | None:
    """Trains from where the run stands to job.steps; the signal that ended it early, if one did.

    `observe` is called in each step with "accumulated" and the loss, then with "clipped" and with "updated",
    both with the gradient's norm before the clip.
    """
    done, best = resume(run, learner, job)
    if ranks.rank == 0:
        write_job(run, job)  # a resume may have changed it
    rate = learning_rate(job.schedule, job.lr, job.warmup, job.steps)
    batch_of = batches_of_rank(job, data, ranks)
    validation = validation_batches(data.validation, job.batch, job.context, job.evaluate_batches)
    with caught_signals() as caught:
        for step in range(done, job.steps):
            began = time.perf_counter()
            loss = learner.accumulate(batch_of(step))
            observe("accumulated", loss)
            norm = learner.clip(job.clip)
            observe("clipped", norm)
            learner.update(rate(step))
            observe("updated", norm)
            loss_value, norm_value = torch.stack([loss.double(), norm.double()]).tolist()  # the one transfer
            seconds = time.perf_counter() - began
            ended = ranks.any(bool(caught))
            last = step + 1 == job.steps or ended
            entry = Step(step + 1, loss_value, rate(step), norm_value, job.batch * job.context, seconds)
            if last or (step + 1) % job.evaluate_every == 0:
                losses = [learner.evaluate(*batch) for batch in validation]
                value = float(torch.stack(losses).double().mean())
                is_best, best = value < best, min(best, value)
                save(run, job, learner, ranks, step + 1, best, is_best)
                sample = sample_text(learner, data, job, step, ranks)
                entry = Step(**{**asdict(entry), "validation": value, "sample": sample})
            on_step(entry)
            if ended:
                return caught[0] if caught else signal.SIGTERM
    return None


def batches_of_rank(job: Job, data: TokenData, ranks: Ranks) -> Callable[[int], list]:
    """A function from the step to this rank's micro-batches of it."""
    parts = ranks.world * job.accumulate
    if job.batch % parts:
        raise UserError(
            f"a batch of {job.batch} sequences does not divide into {ranks.world} ranks × {job.accumulate} "
            f"micro-batches: choose a multiple of {parts}"
        )

    def batch_of(step: int) -> list:
        inputs, targets = training_batch(data.train, step, job.batch, job.context, job.seed)
        mine = list(zip(inputs.chunk(parts), targets.chunk(parts), strict=True))
        return mine[ranks.rank * job.accumulate : (ranks.rank + 1) * job.accumulate]

    return batch_of


def save(run: Path, job: Job, learner: Learner, ranks: Ranks, step: int, best: float, is_best: bool) -> None:
    """A checkpoint by rank 0; the others help to gather it and wait."""
    weights, adam = learner.state()
    if ranks.rank == 0:
        save_checkpoint(run, weights, adam, {"step": step, "best": best, "job": asdict(job)}, best=is_best)
    ranks.wait()


def sample_text(
    learner: Learner, data: TokenData, job: Job, step: int, ranks: Ranks, count: int = 160
) -> str:
    """Some text of the model's own, after the end of another."""
    tokens = generate(
        learner.logits,
        [data.tokenizer.end_of_text],
        count,
        context=job.context,
        seed=step,
        device=ranks.device,
    )
    return data.tokenizer.decode(tokens)


@contextmanager
def caught_signals() -> Iterator[list[int]]:
    """SIGINT and SIGTERM are noted: the step in progress ends and is saved; a second one acts as usual."""
    caught: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # nobody sends signals here
        yield caught
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def note(number: int, frame: Any) -> None:
        caught.append(number)
        signal.signal(number, before[signal.Signals(number)])

    for number in before:
        signal.signal(number, note)
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
