"""The commands about the reference language models: train, generate."""

from __future__ import annotations

import argparse
import sys
from contextlib import contextmanager
from pathlib import Path

import gradproof
from gradproof.errors import UserError

# option of `gradproof train` -> type, help; the names are those of lm.trainer.Job, which has the defaults
TRAIN_OPTIONS = {
    "data": (
        str,
        "a text file, or a folder of text files (default: the source of Python's standard library)",
    ),
    "tokenizer": (str, "byte, char, word or bpe (default: byte)"),
    "vocabulary": (int, "at most so many words or byte pairs (default: 4096)"),
    "model": (str, "gpt, explicit (every backward written by hand) or cascade (default: gpt)"),
    "context": (int, "tokens in a row"),
    "width": (int, "channels"),
    "heads": (int, "attention heads"),
    "layers": (int, "blocks"),
    "batch": (int, "sequences a step, over all ranks and micro-batches"),
    "accumulate": (int, "micro-batches a step (default: 1)"),
    "steps": (int, "optimizer steps"),
    "lr": (float, "peak learning rate"),
    "warmup": (int, "steps up to it"),
    "schedule": (str, "cosine, linear or constant (default: cosine)"),
    "clip": (float, "limit of the gradient's global norm (default: 1)"),
    "weight-decay": (float, "on matrices; norms and biases have none (default: 0.1)"),
    "seed": (int, "of the first weights and the batches (default: 0)"),
    "dtype": (str, "float32, bfloat16 (activations; weights stay float32) or float64 (default: float32)"),
    "evaluate-every": (int, "steps between validation, checkpoint and sample"),
}
TRAIN_FLAGS = {
    "compile": "torch.compile the model",
    "shard": "FSDP2 instead of DDP under torchrun",
    "recompute": "compute activations again in the backward (--model explicit)",
}
RESUME_MAY_CHANGE = {"steps", "accumulate", "compile", "shard", "recompute", "evaluate_every"}


def add_train(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "train",
        help="train a small language model, everything watched",
        description="Trains a language model, by default a byte-level GPT on the source files of Python's standard "
        "library (a few minutes on two cores), watches every step and ends with a diagnosis.",
        epilog="examples: gradproof train · gradproof train --data book.txt --tokenizer bpe · "
        "gradproof train --resume runs/train-… · torchrun --nproc-per-node=2 -m gradproof train",
    )
    for name, (kind, text) in TRAIN_OPTIONS.items():
        parser.add_argument(f"--{name}", type=kind, help=text)
    for name, text in TRAIN_FLAGS.items():
        parser.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, help=text)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    parser.add_argument(
        "--out", metavar="DIR", help="where the run is written (default: runs/train-DATE-TIME)"
    )
    parser.add_argument("--resume", metavar="RUN", help="go on with a run from its last checkpoint")
    parser.add_argument(
        "--check-data", action="store_true", help="print how targets line up with inputs, and stop"
    )
    parser.set_defaults(function=train)


def train(args: argparse.Namespace) -> int:

    from gradproof.lm import trainer
    from gradproof.lm.data import open_token_files
    from gradproof.lm.progress import TrainingLog
    from gradproof.lm.ranks import joined_ranks
    from gradproof.probes.watch import default_path

    names = [name.replace("-", "_") for name in (*TRAIN_OPTIONS, *TRAIN_FLAGS)]
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    with joined_ranks(args.device) as ranks:
        if args.resume:
            run, job = Path(args.resume), trainer.read_job(Path(args.resume), **given)
            if fixed := sorted(given.keys() - RESUME_MAY_CHANGE):
                raise UserError(
                    f"--{fixed[0].replace('_', '-')} cannot change in a resumed run; start a new one"
                )
        else:
            run, job = Path(args.out) if args.out else default_path("train"), trainer.Job(**given)
            if ranks.rank == 0:
                trainer.start_run(run, job)
            ranks.wait()
        data = open_token_files(run / "data", job.context)
        log = TrainingLog(
            job, sys.stdout if ranks.rank == 0 and (args.check_data or not args.quiet) else None
        )
        log.alignment(trainer.first_alignment(job, data))
        if args.check_data:
            log.duplicates(trainer.count_repeated_batches(job, data))
            return 0
        learner = trainer.build_learner(job, data.tokenizer.vocabulary, ranks)
        log.begin(run, data, learner)
        with watched_training(learner, job, run / "record") as (record, observe, note):

            def on_step(step):
                note(step)
                log.step(step)

            ended_by = trainer.train(run, job, learner, data, ranks, on_step=on_step, observe=observe)
        if ranks.rank == 0:
            report_training(record, run, log, ended_by)
    return 128 + ended_by if ended_by else 0


@contextmanager
def watched_training(learner, job, out):
    """Watches a training: where it is recorded, the trainer's `observe`, and what to call after each step."""
    from gradproof.lm.learner import ExplicitLearner

    if not isinstance(learner, ExplicitLearner):  # hooks see everything
        watched = learner.model if job.compile else learner.module  # a compiled model has to be seen as one
        with gradproof.watch(watched, learner.optimizer, out=out) as monitor:
            yield monitor.path, lambda moment, value: None, lambda step: None
        return
    model, optimizer = learner.model, learner.optimizer
    with gradproof.watch(out=out) as monitor:

        def observe(moment, value):
            if moment == "accumulated":
                monitor.tensors("gradient", model.gradient_views())
            elif moment == "clipped":
                monitor.clip(before=float(value), after=min(float(value), job.clip), limit=job.clip)
            elif optimizer.steps % 10 == 1:
                monitor.adam(optimizer.m, optimizer.v, param=model.parameters)

        def note(step):
            monitor.log(loss=step.loss, lr=step.lr, grad_norm=step.gradient_norm)

        yield monitor.path, observe, note


def report_training(record, run, log, ended_by: int | None) -> None:
    """The end of a training: what its record says about its health, and how to go on."""
    from gradproof.commands.viewing import offer_page
    from gradproof.diagnosis.ranking import diagnose as diagnose_run
    from gradproof.report.text import render_text, wants_color

    log.end()
    found = diagnose_run(record)
    print(f"\n{render_text(found, wants_color(sys.stdout))}{offer_page(found, Path(record))}")
    if ended_by:
        print(f"ended by signal {ended_by} and saved; go on with: gradproof train --resume {run}")
    else:
        print(f"next: gradproof generate {run} --prompt 'def '")


def add_generate(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "generate",
        help="text from a model that `gradproof train` trained",
        description="Continues a prompt with the best checkpoint of a training run.",
        epilog="example: gradproof generate runs/train-… --prompt 'def main('",
    )
    parser.add_argument("run", metavar="RUN", help="the folder of a training run")
    parser.add_argument(
        "--prompt", default="", help="the text to continue (default: the start of a document)"
    )
    parser.add_argument("--tokens", type=int, default=300, help="at most so many (default: 300)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest (default: 0.8)")
    parser.add_argument("--top-k", type=int, default=40, help="choose among so many (default: 40)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", choices=("best", "last"), default="best")
    parser.set_defaults(function=generate)


def generate(args: argparse.Namespace) -> int:

    from gradproof.lm.generate import generate as generate_tokens
    from gradproof.lm.trainer import load_trained

    module, tokenizer = load_trained(Path(args.run), args.checkpoint)
    prompt = [int(i) for i in tokenizer.encode(args.prompt)] or [tokenizer.end_of_text]
    tokens = generate_tokens(
        module,
        prompt,
        args.tokens,
        context=module.shape.context,
        temperature=args.temperature,
        top_k=args.top_k,
        seed=args.seed,
        end_of_text=tokenizer.end_of_text,
    )
    print(args.prompt + tokenizer.decode(tokens))
    return 0
