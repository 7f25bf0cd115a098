"""What leaves a run arrives: tables read back, TensorBoard and W&B read by their own code, live and afterwards."""

import csv
import os
import random
import struct
import time
import warnings

import numpy as np
import pytest
import torch
from pages import run_apart, run_line
from trainings import mlp

import gradproof
from gradproof.cli import main
from gradproof.integrations.tensorboard import TensorBoard, masked_crc, varint
from gradproof.integrations.wandb import WandB
from gradproof.record.run import open_run
from gradproof.record.schema import STATISTICS
from gradproof.record.writer import RunWriter


def train(path, steps=12, schedule="all every step", sinks=()):
    torch.manual_seed(0)
    model, optimizer, losses = mlp(steps)
    with gradproof.watch(model, optimizer, out=path, schedule=schedule, sinks=sinks, experiments=False):
        found = list(losses)
    return found, [p.detach().clone() for p in model.parameters()]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "a"
    train(path)
    return open_run(path)


def read_events(directory):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = accumulator.EventAccumulator(str(directory), size_guidance={"scalars": 0, "histograms": 0})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own
        found.Reload()
    return found


def scalars(events, tag):
    return {event.step: event.value for event in events.Scalars(tag)}


def test_csv(run, tmp_path, capsys):
    assert main(["export", str(run.path), "--to", "csv", "--out", str(tmp_path / "csv")]) == 0
    assert "12 steps" in capsys.readouterr().out
    assert (tmp_path / "csv" / "steps.csv").read_bytes() == (run.path / "steps.csv").read_bytes()
    with open(tmp_path / "csv" / "tensors.csv", newline="") as stream:
        rows = [
            row for row in csv.DictReader(stream) if (row["kind"], row["name"]) == ("gradient", "0.weight")
        ]
    steps, norms = run.series("gradient", "0.weight", "norm")
    assert [int(row["step"]) for row in rows] == steps.tolist()
    np.testing.assert_allclose([float(row["norm"]) for row in rows], norms, rtol=1e-6)
    assert rows[0]["eps_share"] == "", "what was not measured is empty"


def test_parquet(run, tmp_path, capsys):
    pq = pytest.importorskip("pyarrow.parquet")
    assert main(["export", str(run.path), "--to", "parquet", "--out", str(tmp_path)]) == 0
    steps = pq.read_table(tmp_path / "steps.parquet").to_pydict()
    np.testing.assert_array_equal(steps["loss"], run.steps["loss"])
    assert steps["step"] == list(range(12)) and steps["clip_limit"] == [None] * 12
    tensors = pq.read_table(tmp_path / "tensors.parquet")
    assert tensors.column_names == ["step", "kind", "name", *STATISTICS]
    rows = [row for row in tensors.to_pylist() if (row["kind"], row["name"]) == ("gradient", "0.weight")]
    np.testing.assert_array_equal(
        [row["norm"] for row in rows], run.series("gradient", "0.weight", "norm")[1]
    )
    assert rows[0]["eps_share"] is None


@pytest.mark.parametrize("to", ["csv", "parquet", "tensorboard"])
def test_an_empty_run_is_exported(to, tmp_path, capsys):
    RunWriter(tmp_path / "run", {}).close()
    assert main(["export", str(tmp_path / "run"), "--to", to]) == 0
    assert "0 steps, 0 tensors" in capsys.readouterr().out and (tmp_path / "run" / to).is_dir()


def test_tensorboard_reads_what_was_exported(run, tmp_path, capsys):
    assert main(["export", str(run.path), "--to", "tensorboard", "--out", str(tmp_path)]) == 0
    assert f"tensorboard --logdir {tmp_path}" in capsys.readouterr().out
    events = read_events(tmp_path)
    losses = scalars(events, "loss")
    assert list(losses) == list(range(12))
    np.testing.assert_allclose(list(losses.values()), run.steps["loss"], rtol=1e-6)
    norms = scalars(events, "norm/gradient/0.weight")
    np.testing.assert_allclose(list(norms.values()), run.series("gradient", "0.weight", "norm")[1], rtol=1e-6)
    found = events.Histograms("weight/0.weight")[0].histogram_value
    weights = run.table("weight", "max")
    assert found.num == 96 and sum(found.bucket) == pytest.approx(96)
    assert found.max == pytest.approx(weights.values[0, weights.names.index("0.weight")])
    assert found.bucket_limit == sorted(found.bucket_limit) and found.min < found.bucket_limit[0]


def test_exporting_twice_leaves_one_file(run, tmp_path):
    for _ in range(2):
        main(["export", str(run.path), "--to", "tensorboard", "--out", str(tmp_path)])
    assert len(list(tmp_path.iterdir())) == 1 and len(scalars(read_events(tmp_path), "loss")) == 12


def test_nan_and_inf_reach_tensorboard_as_they_are(tmp_path):
    writer = RunWriter(tmp_path / "run", {}, [TensorBoard()])
    for step, loss in enumerate([1.0, float("nan"), float("inf"), 1e39]):
        writer.write_step({"step": step, "loss": loss})
    writer.close()
    found = scalars(read_events(tmp_path / "run" / "tensorboard"), "loss")
    assert found[0] == 1.0 and np.isnan(found[1]) and found[2] == np.inf
    assert found[3] == np.finfo(np.float32).max  # large, and finite


def test_the_event_format():
    assert masked_crc(b"123456789") == ((0xE3069283 >> 15 | 0xE3069283 << 17) + 0xA282EAD8) & 0xFFFFFFFF
    assert varint(0) == b"\0" and varint(300) == b"\xac\x02"


def test_live_sinks_hear_what_the_export_says_and_change_nothing(run, tmp_path):
    plain = train(tmp_path / "plain")
    watched = train(tmp_path / "live", sinks=[TensorBoard()])
    assert watched[0] == plain[0]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(watched[1], plain[1], strict=True))
    events = read_events(tmp_path / "live" / "tensorboard")
    recorded = open_run(tmp_path / "live")
    np.testing.assert_allclose(list(scalars(events, "loss").values()), recorded.steps["loss"], rtol=1e-6)
    assert events.Histograms("gradient/0.weight")


class Broken:
    """A sink that raises at one of its calls."""

    def __init__(self, at):
        self.at, self.heard = at, []

    def __getattr__(self, event):
        if event not in ("begin", "step", "tensors", "distributions", "end"):
            raise AttributeError(event)

        def hear(*args):
            self.heard.append(event)
            if event == self.at:
                raise OSError("no space left")

        return hear


@pytest.mark.parametrize("at", ["begin", "step", "tensors", "distributions", "end"])
def test_a_sink_that_fails_is_one_warning_and_no_more(at, tmp_path):
    broken = Broken(at)
    with pytest.warns(UserWarning, match=r"Broken failed \(OSError: no space left\)") as caught:
        losses, _ = train(tmp_path / "run", sinks=[broken])
    assert len(caught) == 1 and broken.heard.count(at) == 1
    recorded = open_run(tmp_path / "run")
    np.testing.assert_allclose(recorded.steps["loss"], losses, rtol=1e-6)
    assert recorded.info["failure"] is None


def test_run_to_tensorboard(tmp_path):
    (tmp_path / "train.py").write_text(
        "import torch\nw = torch.nn.Linear(2, 1)\no = torch.optim.SGD(w.parameters(), lr=0.1)\n"
        "for _ in range(5):\n    o.zero_grad(); w(torch.ones(3, 2)).square().mean().backward(); o.step()\n"
    )
    run_apart(run_line, "gradproof run --no-experiments --to tensorboard --out run train.py", tmp_path)
    assert len(scalars(read_events(tmp_path / "run" / "tensorboard"), "loss")) == 5


def read_wandb(file):
    """The history records of an offline run: 32 KiB blocks of (crc, length, type, data), as LevelDB logs have them."""
    from wandb.proto import wandb_internal_pb2

    data, whole, rows = file.read_bytes(), b"", []
    place = 7  # the file's own header
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        if place + 7 + length > len(data):  # still being written
            break
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the last piece of one
            record = wandb_internal_pb2.Record.FromString(whole)
            whole = b""
            if record.WhichOneof("record_type") == "history":
                rows.append({"/".join(i.nested_key) or i.key: i.value_json for i in record.history.item})
    return rows


def test_wandb_offline_live_and_exported(tmp_path, monkeypatch, capsys):
    wandb = pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # wandb's and pydantic's own
        before = random.getstate()
        sink = WandB()
        losses, _ = train(tmp_path / "run", steps=6, sinks=[sink])
        assert random.getstate() == before and wandb.run is None and "WANDB_MODE" not in os.environ
        assert main(["export", str(tmp_path / "run"), "--to", "wandb"]) == 0
    assert "wandb sync" in capsys.readouterr().out
    files = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2 and sink.directory in [file.parent for file in files]
    for file in files:
        deadline = time.monotonic() + 30
        while len(read_wandb(file)) < 12 and time.monotonic() < deadline:
            time.sleep(0.1)  # its own process writes the last records some time after finish()
        rows = [row for row in read_wandb(file) if "loss" in row]
        np.testing.assert_allclose([float(row["loss"]) for row in rows], losses, rtol=1e-6)
        assert [int(row["step"]) for row in rows] == list(range(6))
        assert any("norm/gradient/0.weight" in row for row in read_wandb(file))


def test_a_missing_library_is_named(run, monkeypatch, capsys):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["export", str(run.path), "--to", "wandb"]) == 2
    assert "pip install 'gradproof[wandb]'" in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_named(run, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["export", str(run.path), "--to", "csv", "--out", str(tmp_path / "file")]) == 2
    assert "cannot write to" in capsys.readouterr().err
