"""Text to token ids and back: bytes, characters, words, or byte-pair encoding by the `tokenizers` library.

Every vocabulary has an end-of-text token, which stands between documents.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from gradproof.errors import UserError

END_OF_TEXT = "<|endoftext|>"
UNKNOWN = "<|unknown|>"
WORD = re.compile(r"\w+|\s|[^\w\s]")


class Tokenizer(Protocol):
    """What every tokenizer can do; `saved()` is the JSON from which `load_tokenizer` makes it again."""

    vocabulary: int
    end_of_text: int

    def encode(self, text: str) -> np.ndarray: ...
    def decode(self, ids: Sequence[int]) -> str: ...
    def saved(self) -> dict[str, Any]: ...


class ByteTokenizer:
    """The 256 bytes of UTF-8, and the end of text."""

    vocabulary = 257
    end_of_text = 256

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8", "surrogateescape"), dtype=np.uint8)

    def decode(self, ids: Sequence[int]) -> str:
        pieces = bytes(i for i in ids if i < 256)
        return pieces.decode("utf-8", errors="replace")

    def saved(self) -> dict[str, Any]:
        return {"kind": "byte"}


class PieceTokenizer:
    """A list of pieces, the known characters or words; 0 is the end of text, 1 anything unknown."""

    end_of_text = 0

    def __init__(self, kind: str, pieces: list[str]) -> None:
        self.kind, self.pieces = kind, [END_OF_TEXT, UNKNOWN, *pieces]
        self.ids = {piece: i for i, piece in enumerate(self.pieces)}
        self.vocabulary = len(self.pieces)

    def encode(self, text: str) -> np.ndarray:
        return np.array([self.ids.get(piece, 1) for piece in split_text(self.kind, text)], dtype=np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        return "".join("\N{REPLACEMENT CHARACTER}" if i == 1 else self.pieces[i] for i in ids if i != 0)

    def saved(self) -> dict[str, Any]:
        return {"kind": self.kind, "pieces": self.pieces[2:]}


class BpeTokenizer:
    """Byte-level byte-pair encoding, as GPT-2's, from the `tokenizers` library."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.vocabulary = model.get_vocab_size()
        self.end_of_text = model.token_to_id(END_OF_TEXT)

    def encode(self, text: str) -> np.ndarray:
        return np.array(self.model.encode(text).ids, dtype=np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        return self.model.decode(list(ids))

    def saved(self) -> dict[str, Any]:
        return {"kind": "bpe", "tokenizers": self.model.to_str()}


def split_text(kind: str, text: str) -> list[str]:
    """Characters, or words with each white space and each sign apart: joined they are the text again."""
    return list(text) if kind == "char" else WORD.findall(text)


def train_tokenizer(kind: str, documents: Sequence[str], vocabulary: int) -> Tokenizer:
    """A tokenizer of one of TOKENIZERS; `vocabulary` bounds words and byte pairs."""
    if kind == "byte":
        return ByteTokenizer()
    if kind == "bpe":
        return _train_bpe(documents, vocabulary)
    if kind not in TOKENIZERS:
        raise UserError(f"no tokenizer {kind!r}: choose from {', '.join(TOKENIZERS)}")
    counts = Counter(piece for text in documents for piece in split_text(kind, text))
    ranked = sorted(counts, key=lambda piece: (-counts[piece], piece))
    return PieceTokenizer(kind, ranked if kind == "char" else ranked[: max(0, vocabulary - 2)])


def _tokenizers_library() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise UserError(
            "--tokenizer bpe needs the tokenizers library: pip install 'gradproof[tokenizers]'"
        ) from None
    return tokenizers


def _train_bpe(documents: Sequence[str], vocabulary: int) -> BpeTokenizer:
    tokenizers = _tokenizers_library()
    if vocabulary < 257:
        raise UserError(
            f"byte-pair encoding needs a vocabulary of at least 257 (the bytes), not {vocabulary}"
        )
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(documents, trainer)
    return BpeTokenizer(model)


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer that was saved as JSON."""
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        if saved["kind"] == "byte":
            return ByteTokenizer()
        if saved["kind"] == "bpe":
            return BpeTokenizer(_tokenizers_library().Tokenizer.from_str(saved["tokenizers"]))
        return PieceTokenizer(saved["kind"], saved["pieces"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a saved tokenizer ({error}); start a new run") from None


TOKENIZERS = ("byte", "char", "word", "bpe")
