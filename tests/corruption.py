"""Ruins a run in one of many ways, drawn by a generator: what a disk, a copy or somebody's malice may do to it."""

import json
import os
import random
import shutil
import struct

from gradproof.files import has_file
from gradproof.record.schema import FRAME_HEADER, FRAME_MAGIC, pack_frame

FILES = ("run.json", "steps.csv", "tensors.bin", "events.jsonl", "examination.jsonl", "script.py.txt")
NAMES = (
    b"{{data}}",
    b"\x1b[2J\x1b]0;title\x07",
    b"\xff\xfe",
    b"a;b c",
    b"two\nlines",
    "‮gnp".encode(),
    b"'\"<b>",
)
DEEP = 100_000

# raw JSON, for what json.dumps would not write
ODD_JSON = (
    *(
        "null",
        "true",
        "-1",
        "0",
        "1.5",
        "1e308",
        "1e999",
        "-1e999",
        "NaN",
        "Infinity",
        '""',
        '"text"',
        "[]",
        "{}",
    ),
    *(
        '"nan"',
        '"\\ud800"',
        '"\\u001b[31mred"',
        '"\\u202e"',
        '"a\\nb"',
        "9" * 30,
        "9" * 5000,
        "[[]]",
        "[null]",
    ),
    *(
        '{"a": 1}',
        '["x", "y"]',
        "[1, 2, 3]",
        '"' + "x" * 50_000 + '"',
        "[" * 200 + "]" * 200,
        "18446744073709551615",
    ),
    "[" * DEEP + "]" * DEEP,
)
ODD_CELLS = (
    *(
        "",
        "nan",
        "inf",
        "-inf",
        "-1",
        "1e300",
        "1e19",
        "0.5",
        "abc",
        '"',
        "\x00",
        "9" * 400,
        "0x10",
        " ",
        "\x1b[31m",
    ),
    *("١", "1_000", "z" * 3000, ",", "\r"),
)
MARK = "\ue000"  # where odd JSON goes


def corrupt(run, draw: random.Random, outside):
    """Ruins a run in one to three ways; where it is afterwards, and in words what was done."""
    done = []
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        way = draw.choice(WAYS)
        try:
            run, said = way(run, draw, outside)
        except (
            OSError,
            ValueError,
            IndexError,
            KeyError,
            RecursionError,
        ):  # an earlier one has left nothing to ruin
            continue
        done.append(f"{way.__name__} {said}")
    return run, "; ".join(done)


def there(file):
    """The file, if an earlier way of ruin has left one there."""
    if not has_file(file):
        raise FileNotFoundError(file)
    return file


def pick(run, draw):
    files = [run / name for name in FILES]
    files += sorted(p for p in run.glob("specimens/*/*"))[:6]
    return draw.choice(files)


def flip(run, draw, outside):
    file = there(pick(run, draw))
    data = bytearray(file.read_bytes())
    places = [draw.randrange(len(data)) for _ in range(draw.choice((1, 1, 8, 64)))]
    for place in places:
        data[place] ^= 1 << draw.randrange(8)
    file.write_bytes(data)
    return run, f"{file.name} at {places}"


def truncate(run, draw, outside):
    file = there(pick(run, draw))
    data = file.read_bytes()
    cut = draw.randrange(len(data))
    file.write_bytes(data[:cut])
    return run, f"{file.name} at {cut}"


def insert(run, draw, outside):
    file = there(pick(run, draw))
    data = file.read_bytes()
    place = draw.randrange(len(data))
    odd = draw.choice(
        (
            b"\x00" * 100,
            b"\xff" * 7,
            data[:500],
            b"\n",
            b'"',
            b"[" * 1000,
            draw.randbytes(64),
            b"\xed\xa0\x80",
        )
    )
    file.write_bytes(data[:place] + odd + data[place:])
    return run, f"{odd[:20]!r} into {file.name} at {place}"


def swap_json(run, draw, outside):
    """Another value in some place of run.json, or of a line of events; or a place that is gone."""
    name = draw.choice(("run.json", "run.json", "examination.jsonl", "events.jsonl"))
    lines = there(run / name).read_text().split("\n")
    number = draw.choice([n for n, line in enumerate(lines) if line])
    data = json.loads(lines[number])
    odd = draw.choice(ODD_JSON)
    gone = draw.random() < 0.15
    place = exchange(data, draw, gone)
    lines[number] = json.dumps(data).replace(json.dumps(MARK), odd)
    (run / name).write_text("\n".join(lines))
    return run, f"{name}:{number} {place} is {'gone' if gone else odd[:30]}"


def exchange(data, draw, gone):
    """Puts MARK into some place of plain data, or takes away what is there; the way to it."""
    place = []
    while True:
        keys = list(data) if isinstance(data, dict) else range(len(data))
        key = draw.choice(keys)
        place.append(key)
        inner = data[key]
        if isinstance(inner, (dict, list)) and inner and draw.random() < 0.75:
            data = inner
            continue
        if gone:
            del data[key]
        elif isinstance(data, dict) and draw.random() < 0.1:
            data[MARK] = data.pop(key)
        else:
            data[key] = MARK
        return place


def swap_cell(run, draw, outside):
    lines = there(run / "steps.csv").read_bytes().split(b"\n")
    odd = draw.choice(ODD_CELLS)
    for _ in range(draw.choice((1, 1, 30))):
        number = draw.randrange(len(lines) - 1)
        cells = lines[number].split(b",")
        cells[draw.randrange(len(cells))] = odd.encode()
        lines[number] = b",".join(cells)
    (run / "steps.csv").write_bytes(b"\n".join(lines))
    return run, f"line {number}: {odd[:20]!r}"


def odd_column(run, draw, outside):
    """One column of steps.csv full of one odd value."""
    lines = there(run / "steps.csv").read_bytes().split(b"\n")
    column, odd = draw.randrange(lines[0].count(b",") + 1), draw.choice(ODD_CELLS)
    for number, line in enumerate(lines[1:-1], 1):
        cells = line.split(b",")
        cells[column] = odd.encode()
        lines[number] = b",".join(cells)
    (run / "steps.csv").write_bytes(b"\n".join(lines))
    return run, f"column {column} is {odd[:20]!r}"


def odd_frame(run, draw, outside):
    """Frames whose check sum is right and whose contents are not."""
    import numpy as np

    file = there(run / "tensors.bin")
    data = file.read_bytes()
    columns = 13
    rows = draw.choice((0, 1, 5, 40))
    numbers = np.array([draw.choice((0, 1, 2, 3, 1000, 2**32 - 1)) for _ in range(rows)], dtype=np.uint32)
    values = np.frombuffer(draw.randbytes(4 * rows * columns), dtype="<f4").reshape(rows, columns)
    with np.errstate(all="ignore"):
        frame = bytearray(pack_frame(1, draw.choice((0, 5, 2**31, 2**53, 2**63, 2**64 - 1)), numbers, values))
    if draw.random() < 0.3:  # a header that promises more than there is
        frame = bytearray(FRAME_HEADER.pack(FRAME_MAGIC, draw.choice((1, 2, 9)), 3, 2**32 - 1, 2**32 - 1, 7))
    place = draw.choice((0, len(data)))
    file.write_bytes(data[:place] + bytes(frame) + data[place:])
    return run, f"{rows} rows at {place}"


def other_kind(run, draw, outside):
    """Something else in a file's place."""
    file = draw.choice(
        [run / name for name in (*FILES, "report.html", "csv", "specimens")] + [pick(run, draw)]
    )
    if file.is_dir() and not file.is_symlink():
        shutil.rmtree(file)
    elif os.path.lexists(file):
        file.unlink()
    kind = draw.choice(
        ("nothing", "directory", "pipe", "link", "link to itself", "link to nothing", "zeros", "empty")
    )
    if kind == "directory":
        file.mkdir()
    elif kind == "pipe":
        os.mkfifo(file)
    elif kind == "empty":
        file.touch()
    elif kind != "nothing":
        targets = {"link": outside, "link to itself": file.name, "zeros": "/dev/zero"}
        file.symlink_to(targets.get(kind, "nowhere"))
    return run, f"{file.name}: {kind}"


def rename(run, draw, outside):
    name = draw.choice(NAMES)
    new = os.path.join(os.fsencode(run.parent), name)
    os.rename(run, new)
    return type(run)(os.fsdecode(new)), repr(name)


def long_row(run, draw, outside):
    with open(there(run / "steps.csv"), "ab") as stream:
        stream.write(draw.choice((b"1," * 1_000_000, b"x" * 3_000_000)) + draw.choice((b"\n", b"")))
    return run, ""


def odd_header(run, draw, outside):
    """Of the safetensors of a specimen: a length that is a lie."""
    file = there(draw.choice(sorted(run.glob("specimens/*/tensors.safetensors"))))
    data = file.read_bytes()
    file.write_bytes(struct.pack("<Q", draw.choice((0, 2**63, 2**40))) + data[8:])
    return run, file.parent.name


WAYS = (
    *(flip, flip, truncate, insert, swap_json, swap_json, swap_json, swap_json, swap_cell, odd_column),
    *(odd_frame, other_kind, other_kind, rename, long_row, odd_header),
)
