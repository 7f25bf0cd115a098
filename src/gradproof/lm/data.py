"""Text files to memory-mapped token files, and token files to batches that follow from a seed and a step."""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gradproof.errors import UserError
from gradproof.lm.tokenizer import Tokenizer, load_tokenizer

VALIDATION_SHARE = 20  # one document of so many is kept for validation, or the last part of a single one
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class TokenData:
    """A run's own tokens: training and validation, mapped from disk, and the tokenizer that made them."""

    train: np.ndarray
    validation: np.ndarray
    tokenizer: Tokenizer


def read_documents(source: Path | None) -> list[str]:
    """The texts of a file or of all text files in a folder; without a source, Python's standard library."""
    if source is None:
        folder = Path(sysconfig.get_paths()["stdlib"])
        paths = [p for p in folder.rglob("*.py") if not SKIPPED_FOLDERS & set(p.relative_to(folder).parts)]
    elif source.is_dir():
        paths = [p for p in source.rglob("*") if p.is_file() and not p.name.startswith(".")]
    elif source.exists():
        return [_read_text(source)]
    else:
        raise UserError(f"no data at {source}: give a text file or a folder of text files")
    documents = []
    for path in sorted(paths):
        try:
            documents.append(_read_text(path))
        except UserError:
            continue  # a picture or an empty file in a folder of texts
    if not documents:
        raise UserError(
            f"no text in {source}: {len(paths)} files, all of them empty or binary; give a folder of text files"
        )
    return documents


def _read_text(path: Path) -> str:
    try:
        content = path.read_bytes()
        text = content.decode("utf-8")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; give another file with --data") from None
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not text: byte {error.start} ({content[error.start]:#04x}) is not UTF-8; "
            "give a text file, or convert it"
        ) from None
    if "\0" in text:
        raise UserError(f"{path} is not text: byte {content.index(0)} is zero; give a text file")
    if not text.strip():
        raise UserError(f"{path} is empty: there is nothing to learn from; give another file with --data")
    return text


def write_token_files(folder: Path, documents: Sequence[str], tokenizer: Tokenizer) -> None:
    """train.bin, validation.bin and tokenizer.json; the last one makes them complete."""
    folder.mkdir(parents=True, exist_ok=True)
    encoded = [np.append(tokenizer.encode(text), tokenizer.end_of_text) for text in documents]
    if len(encoded) >= VALIDATION_SHARE:
        parts = {
            "train": [e for i, e in enumerate(encoded) if i % VALIDATION_SHARE],
            "validation": encoded[::VALIDATION_SHARE],
        }
    else:
        tokens = np.concatenate(encoded)
        cut = len(tokens) - max(1, len(tokens) // VALIDATION_SHARE)
        parts = {"train": [tokens[:cut]], "validation": [tokens[cut:]]}
    dtype = np.uint16 if tokenizer.vocabulary <= 2**16 else np.uint32
    for name, arrays in parts.items():
        write_atomically(folder / f"{name}.bin", np.concatenate(arrays).astype(dtype).tobytes())
    write_atomically(folder / "tokenizer.json", json.dumps(tokenizer.saved()).encode())


def write_atomically(path: Path, content: bytes) -> None:
    """The whole file or none of it, whenever the process ends."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def open_token_files(folder: Path, context: int) -> TokenData:
    """The token files of a run, long enough for windows of context + 1 tokens."""
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    dtype = np.uint16 if tokenizer.vocabulary <= 2**16 else np.uint32
    parts = {}
    for name in ("train", "validation"):
        path = folder / f"{name}.bin"
        try:
            tokens = np.memmap(path, dtype=dtype, mode="r")
        except (OSError, ValueError) as error:
            raise UserError(f"cannot map the tokens of {path} ({error})") from None
        if len(tokens) <= context:
            raise UserError(
                f"the {name} data are too short: {len(tokens)} tokens, and a context of {context} needs "
                f"{context + 1}; give more text or a smaller --context"
            )
        if int(tokens.max()) >= tokenizer.vocabulary:
            raise UserError(
                f"{path} has token {tokens.max()} at {tokens.argmax()}, beyond the tokenizer's vocabulary of "
                f"{tokenizer.vocabulary}: the two do not belong together"
            )
        parts[name] = tokens
    return TokenData(parts["train"], parts["validation"], tokenizer)


def windows(tokens: np.ndarray, starts: np.ndarray, context: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets (len(starts), context): the targets are the inputs one token later."""
    rows = np.stack([tokens[start : start + context + 1] for start in starts]).astype(np.int64)
    both = torch.from_numpy(rows)
    return both[:, :-1], both[:, 1:]


def training_batch(
    tokens: np.ndarray, step: int, size: int, context: int, seed: int
) -> tuple[Tensor, Tensor]:
    """The batch of a step: the same for the same seed, whatever ran before and on however many ranks."""
    generator = np.random.default_rng((seed, step))
    return windows(tokens, generator.integers(0, len(tokens) - context, size), context)


def validation_batches(
    tokens: np.ndarray, size: int, context: int, count: int
) -> list[tuple[Tensor, Tensor]]:
    """The same evenly spread windows every time, at most count × size of them, in batches of one size."""
    many = min(count * size, max(1, (len(tokens) - 1) // context))
    many = many // size * size or many
    starts = np.linspace(0, len(tokens) - context - 1, many).astype(np.int64)
    return [windows(tokens, starts[i : i + size], context) for i in range(0, many, size)]
