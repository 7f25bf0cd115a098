"""Texts, tokens, batches and what a batch says about its alignment."""

import numpy as np
import pytest
import torch

from gradproof.errors import UserError
from gradproof.lm.alignment import IGNORED, compare_alignment, find_shift
from gradproof.lm.data import (
    open_token_files,
    read_documents,
    training_batch,
    validation_batches,
    write_token_files,
)
from gradproof.lm.tokenizer import TOKENIZERS, load_tokenizer, train_tokenizer

TEXTS = ["def add(a, b):\n    return a + b\n", "print('Grüße, 世界')\n", "x = 1\n\ty = 2\n" * 20]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_tokenizers_give_the_text_back_and_survive_saving(kind, tmp_path):
    write_token_files(tmp_path, TEXTS, train_tokenizer(kind, TEXTS, 300))
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids.tolist()) == text
        assert ids.min() >= 0 and ids.max() < tokenizer.vocabulary
        assert tokenizer.end_of_text not in ids


@pytest.mark.parametrize("kind", ["char", "word"])
def test_unknown_pieces_are_marked_not_dropped(kind):
    tokenizer = train_tokenizer(kind, ["a b"], 10)
    assert tokenizer.decode(tokenizer.encode("a q b").tolist()) == "a \ufffd b"


def test_words_keep_to_the_vocabulary():
    tokenizer = train_tokenizer("word", TEXTS, 7)
    assert tokenizer.vocabulary == 7 and tokenizer.pieces[2:5] == [" ", "\n", "="]


def test_bpe_needs_room_for_the_bytes():
    with pytest.raises(UserError, match="at least 257"):
        train_tokenizer("bpe", TEXTS, 100)
    with pytest.raises(UserError, match="byte, char, word, bpe"):
        train_tokenizer("syllable", TEXTS, 100)


def test_documents_are_kept_apart_and_the_tail_validates(tmp_path):
    write_token_files(tmp_path, ["ab" * 40, "cd" * 40], train_tokenizer("byte", [], 0))
    data = open_token_files(tmp_path, context=4)
    whole = np.concatenate([data.train, data.validation])
    assert whole.tolist() == [*b"ab" * 40, 256, *b"cd" * 40, 256]
    assert isinstance(data.train, np.memmap) and len(data.validation) == len(whole) // 20


def test_of_many_documents_every_twentieth_validates(tmp_path):
    write_token_files(tmp_path, [f"{i:04d}" for i in range(40)], train_tokenizer("byte", [], 0))
    data = open_token_files(tmp_path, context=4)
    assert bytes(t for t in data.validation if t < 256) == b"00000020"
    assert len(data.train) == 38 * 5


def test_batches_follow_from_seed_and_step_alone():
    tokens = np.arange(1000, dtype=np.uint16)
    inputs, targets = training_batch(tokens, 3, 8, 16, seed=1)
    assert torch.equal(targets, inputs + 1)
    assert torch.equal(inputs, training_batch(tokens, 3, 8, 16, seed=1)[0])
    assert not torch.equal(inputs, training_batch(tokens, 4, 8, 16, seed=1)[0])
    assert not torch.equal(inputs, training_batch(tokens, 3, 8, 16, seed=2)[0])


def test_the_shortest_data_that_fit():
    tokens = np.arange(5, dtype=np.uint16)
    assert training_batch(tokens, 0, 2, 4, seed=0)[1].tolist() == [[1, 2, 3, 4]] * 2
    [(inputs, targets)] = validation_batches(tokens, 8, 4, 3)
    assert inputs.tolist() == [[0, 1, 2, 3]] and targets.tolist() == [[1, 2, 3, 4]]


@pytest.mark.parametrize(
    "content, said",
    [
        (b"", "is empty"),
        (b"  \n ", "is empty"),
        (b"abc\xff\xfe", r"byte 3 \(0xff\) is not UTF-8"),
        (b"abc\0def", "byte 3 is zero"),
    ],
)
def test_files_that_are_no_text(tmp_path, content, said):
    path = tmp_path / "data.txt"
    path.write_bytes(content)
    with pytest.raises(UserError, match=said):
        read_documents(path)
    with pytest.raises(UserError, match="1 files, all of them empty or binary"):
        read_documents(tmp_path)


def test_missing_and_too_short_data(tmp_path):
    with pytest.raises(UserError, match="no data at"):
        read_documents(tmp_path / "nowhere")
    write_token_files(tmp_path, ["hello"], train_tokenizer("byte", [], 0))
    with pytest.raises(UserError, match="train data are too short: 5 tokens, and a context of 64 needs 65"):
        open_token_files(tmp_path, context=64)


def test_tokens_beyond_the_vocabulary_are_named(tmp_path):
    write_token_files(tmp_path, [TEXTS[2]], train_tokenizer("byte", [], 0))
    tokens = np.fromfile(tmp_path / "train.bin", dtype=np.uint16)
    tokens[7] = 300
    tokens.tofile(tmp_path / "train.bin")
    with pytest.raises(UserError, match="token 300 at 7, beyond the tokenizer's vocabulary of 257"):
        open_token_files(tmp_path, context=4)


def test_a_folder_is_read_in_order_without_its_pictures(tmp_path):
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "c.png").write_bytes(b"\x89PNG\0")
    assert read_documents(tmp_path) == ["first", "second"]


def test_without_a_source_there_is_the_standard_library():
    documents = read_documents(None)
    assert len(documents) > 300 and any("class OrderedDict" in text for text in documents)


def next_tokens(shift):
    rows = torch.randint(0, 50, (4, 40), generator=torch.Generator().manual_seed(0))
    return rows[:, 4:20].clone(), rows[:, 4 + shift : 20 + shift].clone()


def test_alignment_of_a_right_batch():
    found = compare_alignment(*next_tokens(1), 50)
    assert found.ok and found.shift == 1 and found.matching == found.compared == 60
    assert "MISMATCH" not in str(found) and "60 of 60 targets are the next input" in str(found)


@pytest.mark.parametrize("shift", [0, 2, 3, -1])
def test_alignment_names_the_wrong_shift(shift):
    found = compare_alignment(*next_tokens(shift), 50)
    assert not found.ok and found.shift == shift
    assert f"MISMATCH: they are the inputs {shift} later" in str(found)


def test_alignment_of_targets_that_belong_elsewhere():
    inputs, targets = next_tokens(1)
    found = compare_alignment(inputs, targets.flip(0), 50)
    assert not found.ok and found.shift is None and "no shift fits" in str(found)


def test_alignment_counts_masks_padding_ranges_and_repeats():
    inputs, targets = next_tokens(1)
    inputs[1], targets[1] = inputs[0], targets[0]
    targets[2, 8:] = IGNORED
    found = compare_alignment(inputs, targets, 50, padding=int(inputs[3, 0]))
    assert found.ok and found.masked == 8 / 64 and found.duplicate_rows == 1 and found.padding >= 1 / 64
    inputs[3, 5] = 50
    found = compare_alignment(inputs, targets, 50)
    assert not found.ok and found.out_of_range == 1
    assert find_shift(inputs[:, :1], targets[:, :1]) is None or inputs[0, 0] == targets[0, 0]
