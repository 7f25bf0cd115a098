"""Faults that only several ranks can have are named first, with their place; healthy trainings of ranks are left alone.

All trainings run in one pair of processes (tests/rank_trainings.py); what they left behind is read here.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import rank_trainings
import torch
from conftest import examine_here

import gradproof
from gradproof.examination.parted import do_again
from gradproof.examination.worker import Here
from gradproof.record.prints import PRINTS_FILE, TENSOR_PRINTS_FILE
from gradproof.record.ranks import find_ranks, read_ranks
from gradproof.record.run import open_run
from gradproof.record.schema import OUT_OF_REACH
from gradproof.record.whole import OF_PARAMETERS, open_whole
from gradproof.tape.replay import differentiate
from gradproof.tape.specimen import load

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
TEXT = Path(rank_trainings.__file__).read_text().splitlines()
WHERE_THE_LOG_IS = f"rank_trainings.py:{next(n for n, text in enumerate(TEXT, 1) if 'x.log()' in text)}"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The directory in which every training has left its two runs; gloo may hang at its end, and is run again then."""
    for _ in range(3):
        folder = tmp_path_factory.mktemp("ranks")
        codes, said = run_all_ranks(folder)
        if None not in codes:
            break
    assert codes == [0, 0], said
    assert not any("gradproof stopped" in text for text in said), said
    (folder / "said").write_text("".join(said))
    return folder


def run_all_ranks(folder, world=rank_trainings.WORLD):
    """What each rank ended with, None where it did not end, and what it said."""
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    group = {"WORLD_OF_TEST": str(world), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(ROOT / "tests" / "rank_trainings.py"), str(folder)],
            cwd=folder,
            env={**os.environ, **group, "RANK_OF_TEST": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        said = [process.communicate(timeout=400)[0] for process in ranks]
    except subprocess.TimeoutExpired:
        return [None], []
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return [process.returncode for process in ranks], said


@pytest.mark.parametrize("training", rank_trainings.PLANTED, ids=lambda training: training.__name__)
def test_what_only_ranks_can_get_wrong_is_named_first(trained, training):
    id, where = rank_trainings.PLANTED[training]
    found = gradproof.diagnose(trained / training.__name__)
    assert found.causes and found.causes[0].id == id, found
    expected = ("note",) if training in rank_trainings.NOTES else ("problem", "warning")
    assert where in (found.causes[0].where or "") and found.causes[0].level in expected
    assert "rank" in found.causes[0].evidence[0]


@pytest.mark.parametrize("training", rank_trainings.HEALTHY, ids=lambda training: training.__name__)
def test_healthy_ranks_are_left_alone(trained, training):
    run = trained / training.__name__
    assert len(read_ranks(run).steps) >= rank_trainings.STEPS
    for place in find_ranks(run).values():
        assert not gradproof.diagnose(place).causes


def test_the_first_step_is_the_right_one(trained):
    steps = {
        "bit_flip": 6,
        "written_on_rank_1": 6,
        "nan_on_rank_1": 6,
        "other_rates": 6,
        "other_weights": 0,
        "lost_state": 8,
    }
    assert {name: gradproof.diagnose(trained / name).causes[0].step for name in steps} == steps


def test_one_flipped_bit_is_told_from_what_code_writes(trained):
    flipped, written = (
        gradproof.diagnose(trained / name).causes[0].evidence[0] for name in ("bit_flip", "written_on_rank_1")
    )
    assert "Bit 4 of one entry is all that is different" in flipped and "--until 6" in flipped
    assert "More than one bit is different: code that writes on one rank only" in written


@pytest.mark.parametrize("training", rank_trainings.COMPARED, ids=lambda training: training.__name__)
def test_losses_and_weights_are_the_same_to_the_last_bit(trained, training):
    lines = [
        line
        for line in (trained / "said").read_text().splitlines()
        if line.startswith(f"{training.__name__}: ")
    ]
    assert lines == [f"{training.__name__}: identical"] * rank_trainings.WORLD
    taped = [open_run(trained / f"{training.__name__}_again{end}").info["cost"] for end in ("", ".rank1")]
    assert all(cost["steps"] == rank_trainings.STEPS for cost in taped)
    assert all(cost["taped_steps"] > 1 for cost in taped)


@pytest.mark.parametrize("training", rank_trainings.TAPED, ids=lambda training: training.__name__)
def test_the_specimen_of_a_rank_names_the_operation_and_its_line(trained, training):
    place = trained / f"{training.__name__}.rank1"
    assert (place / "specimens" / "step-00000006").is_dir()
    examine_here(place, only=["where_was_it_born"])
    found = gradproof.diagnose(place).causes[0]
    assert (found.id, found.confidence, found.step) == ("forward-nonfinite/log", "proven", 6)
    assert found.where == WHERE_THE_LOG_IS
    merged = gradproof.diagnose(trained / training.__name__).causes[0]
    if training is rank_trainings.log_in_tensor_parallel:  # both ranks have it
        assert merged.id.startswith("forward-nonfinite")
        return
    assert merged.id == "forward-nonfinite/one-rank" and merged.where == WHERE_THE_LOG_IS
    assert "rank 1 is the first" in merged.evidence[0] and "nan from log in forward" in merged.evidence[0]


@pytest.mark.parametrize("training", rank_trainings.DONE_AGAIN, ids=lambda training: training.__name__)
def test_a_step_that_is_done_again_tells_memory_from_code(trained, training):
    """The replay gives what the other rank has, or what this one had."""
    run = trained / f"{training.__name__}_taped"
    do_again(run, Here())
    (found,) = [event for event in open_run(run).events if event["event"] == "done again"]
    id, where = rank_trainings.DONE_AGAIN[training]
    cause = gradproof.diagnose(run).causes[0]
    assert cause.id == id and where in cause.where, (found, cause)
    assert cause.step == (6 if training is rank_trainings.written_on_rank_1 else 7)
    assert "done again from what was recorded" in cause.evidence[0]
    if id.endswith("bit-flip"):
        assert (found["outcome"], found["rank"], found["entries"]) == ("memory", 1, 1)
        flipped = ([4], [0, 3]) if training is rank_trainings.flipped_in_memory else ([19, 21], [1, 1])
        assert (found["bits"], found["place"]) == flipped
    else:
        line = int(cause.where.rpartition(":")[2].rstrip(")"))
        done = {
            "flipped_by_code": "^= 1 << 4",
            "flipped_by_an_address": "model",
            "written_on_rank_1": "clamp_",
        }
        done["other_decay"] = "optimizer.step()"
        assert found["outcome"] == "code" and done[training.__name__] in TEXT[line - 1]
    do_again(run, Here())
    assert sum(event["event"] == "done again" for event in open_run(run).events) == 1, "it is done once"


@pytest.mark.parametrize("training", rank_trainings.NOTHING_PARTS, ids=lambda training: training.__name__)
def test_where_nothing_parts_no_step_is_done_again(trained, training):
    run = trained / f"{training.__name__}_taped"
    do_again(run, Here())
    assert not [event for event in open_run(run).events if event["event"] == "done again"]
    assert not gradproof.diagnose(run).causes


def test_without_the_step_before_it_stays_open_what_has_flipped_a_bit(trained, tmp_path):
    for rank, place in find_ranks(trained / "flipped_in_memory_taped").items():
        copy = shutil.copytree(place, tmp_path / f"run.rank{rank}")
        for step in (4, 6):
            shutil.rmtree(copy / "specimens" / f"step-{step:08d}")
        (copy / "examination.jsonl").unlink(missing_ok=True)
    do_again(tmp_path / "run.rank0", Here())
    cause = gradproof.diagnose(tmp_path / "run.rank0").causes[0]
    assert cause.id == "distributed-desync/bit-flip"
    assert "the step before it was not taped" in cause.evidence[0]


SHARED_OUT = (
    rank_trainings.fully_sharded,
    rank_trainings.sharded_by_layer,
    rank_trainings.tensor_parallel,
    rank_trainings.pipeline,
    rank_trainings.scheduled_pipeline,
)


@pytest.mark.parametrize("training", SHARED_OUT, ids=lambda training: training.__name__)
def test_of_a_part_of_a_healthy_model_nothing_is_said_and_what_takes_the_whole_is_left_open(
    trained, training
):
    place = trained / f"{training.__name__}_again.rank1"
    examine_here(place)
    found = gradproof.diagnose(place)
    assert not found.causes and not found.examination.failed, found
    assert found.examination.asked >= (4 if training is rank_trainings.tensor_parallel else 20)
    reasons = {each.reason for each in found.examination.not_asked}
    assert reasons and all(reason.startswith(OUT_OF_REACH) for reason in reasons), reasons
    assert "is_the_step_too_long_or_short" in found.examination.core_open and not found.examination.complete
    assert not found.examination.command  # nobody could ask the rest of this rank


def test_the_gathered_parameters_of_a_specimen_are_those_of_the_model(trained):
    """And the gradients on its tape are the rank's own, before they are averaged."""
    specimen = load(trained / "fully_sharded_again.rank1" / "specimens" / "step-00000000")
    model = rank_trainings.net()
    rank_trainings.loss_of(model, *rank_trainings.batch(1, 0)).backward()
    [root] = specimen.models.values()
    assert {name: p.shape for name, p in root.named_parameters()} == {
        name: p.shape for name, p in model.named_parameters()
    }
    replayed = differentiate(specimen.tape)
    by_name = {specimen.tape.slots[slot].name: value for slot, value in replayed.gradients.items()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            specimen.tape.leaf_value(specimen.tape.leaf_named[name]), parameter.detach()
        )
        torch.testing.assert_close(by_name[name], parameter.grad)


def test_norms_of_shards_are_those_of_the_whole_model(trained):
    """FSDP2 and tensor parallel against one process that trains the same model on the batches of both."""
    for name, batches in (("fully_sharded", (0, 1)), ("tensor_parallel", (0,))):
        ranks = read_ranks(trained / name)
        assert ranks.sharded
        model = rank_trainings.net()
        momentum = 0.9 if name == "fully_sharded" else 0.0
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
        gradients, weights = ranks.whole_norm("gradient"), ranks.whole_norm("weight")
        by_name = ranks.whole_tensor_norms("gradient")
        for step in range(rank_trainings.STEPS):
            optimizer.zero_grad()
            losses = [rank_trainings.loss_of(model, *rank_trainings.batch(rank, step)) for rank in batches]
            (sum(losses) / len(losses)).backward()
            if name == "fully_sharded":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for key, p in model.named_parameters():
                assert by_name[step][key] == pytest.approx(float(p.grad.norm()), rel=2e-6, abs=1e-7)
            whole = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
            assert gradients[step] == pytest.approx(whole, rel=2e-6)
            norm = float(torch.nn.utils.get_total_norm([p.detach() for p in model.parameters()]))
            assert weights[step] == pytest.approx(norm, rel=2e-6)
            optimizer.step()


def test_a_rank_that_ended_early_costs_its_own_rows(trained, tmp_path):
    for rank, place in find_ranks(trained / "wrapped").items():
        copy = tmp_path / f"run.rank{rank}"
        copy.mkdir()
        for file in place.iterdir():
            if file.is_file():
                data = file.read_bytes()
                if rank and file.name in (PRINTS_FILE, TENSOR_PRINTS_FILE):
                    data = data[: len(data) // 2 + 5]  # in the middle of a row
                (copy / file.name).write_bytes(data)
    ranks = read_ranks(tmp_path / "run.rank0")
    assert ranks.last[0] == rank_trainings.STEPS - 1 > ranks.last[1] > 0
    assert not gradproof.diagnose(tmp_path / "run.rank0").causes


@pytest.fixture(scope="module")
def trained_by_four(tmp_path_factory):
    for _ in range(3):  # gloo may hang at its end
        folder = tmp_path_factory.mktemp("four")
        codes, said = run_all_ranks(folder, 4)
        if None not in codes:
            break
    assert codes == [0] * 4, said
    assert not any("gradproof stopped" in text for text in said), said
    (folder / "said").write_text("".join(said))
    return folder


@pytest.mark.parametrize("training", rank_trainings.OF_FOUR, ids=lambda training: training.__name__)
def test_four_ranks_are_the_same_to_the_last_bit(trained_by_four, training):
    assert (trained_by_four / "said").read_text().count(f"{training.__name__}: identical") == 4
    place = trained_by_four / f"{training.__name__}_again"
    ranks = read_ranks(place)
    assert ranks.numbers == [0, 1, 2, 3] and list(ranks.last.values()) == [rank_trainings.STEPS - 1] * 4
    assert not gradproof.diagnose(place).causes
    for path in find_ranks(place).values():
        assert open_run(path).info["cost"]["taped_steps"] > 1
    examine_here(place.with_name(f"{place.name}.rank1"))
    found = gradproof.diagnose(place.with_name(f"{place.name}.rank1"))
    assert not found.causes and not found.examination.failed and found.examination.asked >= 4, found


WHOLE = {
    rank_trainings.fully_sharded: (rank_trainings.net, 4),
    rank_trainings.hybrid_sharded: (rank_trainings.normed_net, 4),
    rank_trainings.sharded_and_split: (rank_trainings.deeper_net, 2),
}


def train_whole(training, out):
    """One process, with the batches of all ranks."""
    make, feeds = WHOLE[training]
    model = make()
    with rank_trainings.watched(out):
        optimizer = rank_trainings.optimizer_of(training, model)
        for step in range(rank_trainings.STEPS):
            optimizer.zero_grad()
            losses = [
                rank_trainings.loss_of(model, *rank_trainings.batch(rank, step)) for rank in range(feeds)
            ]
            (sum(losses) / feeds).backward()
            if training is rank_trainings.fully_sharded:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return open_run(out)


@pytest.mark.parametrize("training", WHOLE, ids=lambda training: training.__name__)
def test_every_statistic_of_shards_is_that_of_the_whole_parameter(trained_by_four, tmp_path, training):
    """FSDP2, HSDP, and FSDP2 of a tensor-parallel model: weights, gradients, updates and moments, counted once."""
    alone = train_whole(training, tmp_path / "alone")
    whole = open_whole(trained_by_four / f"{training.__name__}_again")
    assert whole.frames and whole.frames[0].step == 0
    for column in ("grad_norm", "weight_norm", "update_norm"):
        both = np.isfinite(whole.steps[column]) & np.isfinite(alone.steps[column])
        assert both[0]
        np.testing.assert_allclose(whole.steps[column][both], alone.steps[column][both], rtol=1e-6)
    kinds = {tensor["kind"] for tensor in alone.tensors} & set(OF_PARAMETERS)
    assert kinds >= {"weight", "gradient", "update", "adam_m"}
    for kind in kinds:
        largest = alone.table(kind, "absmax")
        for statistic in ("nan", "inf", "zero", "subnormal", "min", "max", "absmax", "mean", "std", "norm"):
            one, other = whole.table(kind, statistic), alone.table(kind, statistic)
            order = [one.names.index(name) for name in other.names]
            _, here, there = np.intersect1d(one.steps, other.steps, return_indices=True)
            found = one.values[here][:, order]
            measured = ~np.isnan(found)  # by every rank that holds a part of it
            assert measured[0].all()
            # an entry's rounding is that of the largest; the std of one entry is what its square root has left
            slack = 1e-3 if statistic == "std" else 1e-6
            allowed = 1e-6 * np.abs(other.values[there]) + slack * largest.values[there]
            assert (np.abs(found - other.values[there]) <= allowed)[measured].all(), (kind, statistic)


TRAIN = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
torch.manual_seed(1 + dist.get_rank())
for step in range(9):
    x = torch.randn(8, 4)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""


def test_one_step_is_taped_on_every_rank_and_examined_under_torchrun(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    command += ["gradproof", "run", "--until", "5", "--quiet", "--examine", "off", "--out", "run", "train.py"]
    answer = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert answer.returncode == 0 and answer.stderr.count("2 ranks, 6 steps") == 1, answer.stderr
    for name in ("run", "run.rank1"):
        assert [path.name for path in (tmp_path / name / "specimens").iterdir()] == ["step-00000005"]
        examine_here(tmp_path / name)
        assert gradproof.diagnose(tmp_path / name).examination.asked > 20
