"""Small trainings of two ranks, faulty and healthy; one pair of processes runs them all, each into a run of its own.

A function's name is its run's. PLANTED says what each faulty one must be called, and a part of where.
"""

import contextlib
import ctypes
import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

WORLD, STEPS = int(os.environ.get("WORLD_OF_TEST", "2")), 12


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(rank, step, rows=8):
    made = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(rows, 4, generator=made)
    return x, x.sum(1, keepdim=True) + 0.1 * torch.randn(rows, 1, generator=made)


def loss_of(model, x, y):
    return (model(x) - y).square().mean()


def sgd(model, lr=0.05):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def average(model, divide=WORLD):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= divide


def loop(model, optimizer, rank, forward=None, between=None, after=None, data=batch, steps=STEPS):
    """Trains; gives back every loss, and what the rank has of the weights and buffers at the end."""
    losses = []
    for step in range(steps):
        x, y = data(rank, step)
        optimizer.zero_grad()
        loss = loss_of(forward or model, x, y)
        loss.backward()
        losses.append(loss.detach())
        if between:
            between(model)
        optimizer.step()
        if after:
            after(step)
    return losses + parts_of(model)


def parts_of(model):
    tensors = [t.detach() for t in (*model.parameters(), *model.buffers())]
    return [t.to_local().clone() if hasattr(t, "to_local") else t.clone() for t in tensors]


# planted ---------------------------------------------------------------------------------------------------


def never_wrapped(rank):
    model = net()
    loop(model, sgd(model), rank)


def around_the_wrapper(rank):
    model = DDP(net())
    loop(model, sgd(model), rank, forward=model.module)


def no_sync_on_the_last(rank):
    model = DDP(net())
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, *batch(rank, 2 * step)).backward()
        with model.no_sync():
            loss_of(model, *batch(rank, 2 * step + 1)).backward()
        optimizer.step()


def head_outside(rank):
    body, head = DDP(nn.Linear(4, 8)), nn.Linear(8, 1)
    with torch.no_grad():
        head.weight.fill_(0.1)
        head.bias.fill_(0.0)
    model = nn.Sequential(body, nn.Tanh(), head)
    loop(model, sgd(model), rank)


def other_weights(rank):
    model = net()
    with torch.no_grad():
        model[0].weight.add_(0.1 * rank)
    loop(model, sgd(model), rank, between=average)


def other_rates(rank):
    model = DDP(net())
    optimizer = sgd(model)

    def after(step):
        if rank == 1 and step == 5:
            optimizer.param_groups[0]["lr"] = 0.01

    loop(model, optimizer, rank, after=after)


def summed(rank):
    model = net()
    loop(model, sgd(model, 0.01), rank, between=lambda m: average(m, 1))


def averaged_twice(rank):
    model = DDP(net())

    def divide(model):
        for p in model.parameters():
            p.grad /= WORLD

    loop(model, sgd(model), rank, between=divide)


def same_data(rank):
    model = DDP(nn.Sequential(net(), nn.Dropout(0.1)))
    torch.manual_seed(rank)
    loop(model, sgd(model), 0)


def no_set_epoch(rank):
    data = TensorDataset(*batch(0, 0, 48))
    sampler = DistributedSampler(data, WORLD, rank, shuffle=True)
    model = DDP(net())
    optimizer = sgd(model)
    for _ in range(4):
        for x, y in DataLoader(data, 6, sampler=sampler):
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()


def other_lengths(rank):
    model = DDP(net())
    loop(model, sgd(model), rank, data=lambda rank, step: batch(rank, step, 8 + 24 * rank))


def other_mode(rank):
    model = DDP(nn.Sequential(net(), nn.Dropout(0.1)))
    model.train(rank == 0)
    loop(model, sgd(model), rank)


def other_dtype(rank):
    model = net().to(torch.float64 if rank else torch.float32)

    def average_wide(model):
        for p in model.parameters():
            total = p.grad.double()
            dist.all_reduce(total)
            p.grad.copy_(total / WORLD)

    def data(rank, step):
        return [t.to(next(model.parameters()).dtype) for t in batch(rank, step)]

    loop(model, sgd(model), rank, between=average_wide, data=data)


def small_batch_norm(rank):
    model = DDP(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)))
    loop(model, sgd(model, 0.01), rank, data=lambda rank, step: batch(rank, step, 2))


def own_buffers(rank):
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)), broadcast_buffers=False)
    loop(model, sgd(model), rank, data=lambda r, s: [(1 + r) * t for t in batch(r, s, 32)])


def nan_on_rank_1(rank):
    def data(rank, step):
        x, y = batch(rank, step)
        return (x, y.fill_(torch.nan)) if rank == 1 and step == 6 else (x, y)

    model = DDP(net())
    loop(model, sgd(model), rank, data=data)


def bit_flip(rank):
    model = DDP(net())

    def after(step):
        if rank == 1 and step == 5:
            model.module[2].weight.data.view(torch.int32)[0, 3] ^= 1 << 4

    loop(model, sgd(model), rank, after=after)


def written_on_rank_1(rank):
    model = DDP(net())

    def after(step):
        if rank == 1 and step == 5:
            with torch.no_grad():
                model.module[2].weight.clamp_(-0.1, 0.1)

    loop(model, sgd(model), rank, after=after)


def lost_state(rank):
    model = DDP(net())
    optimizer = sgd(model)

    def after(step):
        if rank == 1 and step == 6:
            for state in optimizer.state.values():
                state["momentum_buffer"].zero_()

    loop(model, optimizer, rank, after=after)


def clip_of_the_shard(rank):
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(net())

    def clip(model):
        parts = [p.grad.to_local() for p in model.parameters()]
        total = torch.nn.utils.get_total_norm(parts)
        torch.nn.utils.clip_grad_norm_([shard_of(p) for p in model.parameters()], 0.1)
        assert total >= 0

    def shard_of(p):
        part = p.detach().to_local()
        part.grad = p.grad.to_local()
        return part

    loop(model, sgd(model), rank, between=clip)


def sharded_late(rank):
    from torch.distributed.fsdp import fully_shard

    model = net()
    optimizer = sgd(model)
    loop(fully_shard(model), optimizer, rank)


def same_augmentations(rank):
    """Each rank has samples of its own; the noise on them is the same everywhere."""
    model = DDP(net())
    torch.manual_seed(5)

    def data(rank, step):
        x, y = batch(rank, step)
        return x + 0.1 * torch.randn(x.shape), y

    loop(model, sgd(model), rank, data=data)


def accumulated_loudly(rank):
    """Every micro-batch is averaged over the ranks; only the last has to be."""
    model = DDP(net())
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(4):
            loss_of(model, *batch(rank, 4 * step + part)).backward()
        optimizer.step()


def lost_now_and_then(rank):
    """At two steps of twelve a part of the average does not arrive at rank 1."""
    model, steps = net(), iter(range(STEPS))

    def lossy(model):
        average(model)
        if next(steps) in (3, 8) and rank == 1:
            model[0].weight.grad[4:].zero_()

    loop(model, sgd(model), rank, between=lossy)


def clipped_on_rank_0(rank):
    """Both ranks have the same gradients, and one of them clips."""
    model = net()

    def clip(model):
        average(model)
        if rank == 0:
            for p in model.parameters():
                p.grad *= 0.5

    loop(model, sgd(model), rank, between=clip)


PLANTED = {
    accumulated_loudly: ("distributed-desync/without-no-sync", "rank_trainings.py"),
    lost_now_and_then: ("distributed-desync/lost-on-the-way", "0.weight"),
    clipped_on_rank_0: ("distributed-desync/own-clip", "0.weight"),
    sharded_late: ("distributed-desync/sharded-late", "rank_trainings.py"),
    same_augmentations: ("distributed-desync/same-random-numbers", "rank_trainings.py"),
    never_wrapped: ("distributed-desync/gradients-not-averaged", "0.weight"),
    around_the_wrapper: ("distributed-desync/gradients-not-averaged", "rank_trainings.py"),
    no_sync_on_the_last: ("distributed-desync/gradients-not-averaged", "rank_trainings.py"),
    head_outside: ("distributed-desync/parameters-outside", "2.weight"),
    other_weights: ("distributed-desync/initial-weights", "0.weight"),
    other_rates: ("distributed-desync/learning-rates", "rank_trainings.py"),
    summed: ("distributed-desync/summed-gradients", "rank_trainings.py"),
    averaged_twice: ("distributed-desync/averaged-twice", "rank_trainings.py"),
    same_data: ("distributed-desync/same-data", "rank_trainings.py"),
    no_set_epoch: ("distributed-desync/set-epoch", "rank_trainings.py"),
    other_lengths: ("distributed-desync/different-lengths", "rank_trainings.py"),
    other_mode: ("distributed-desync/mode", "rank_trainings.py"),
    other_dtype: ("distributed-desync/dtype", "0.weight (rank_trainings.py:"),
    small_batch_norm: ("normalization-error/not-synchronised", "1"),
    own_buffers: ("distributed-desync/buffers", "running"),
    nan_on_rank_1: ("forward-nonfinite/one-rank", "rank_trainings.py"),
    bit_flip: ("distributed-desync/bit-flip", "2.weight"),
    written_on_rank_1: ("distributed-desync/weights-drift", "2.weight"),
    lost_state: ("distributed-desync/weights-drift", "rank_trainings.py"),
    clip_of_the_shard: ("distributed-desync/own-clip", "rank_trainings.py"),
}
NOTES = (same_augmentations, accumulated_loudly)  # of these, nothing is wrong for certain


def with_a_log(rank, step):
    """Rank 1 takes the logarithm of negative numbers, once."""
    x, y = batch(rank, step)
    return (x.log() if rank == 1 and step == 6 else x), y


def log_in_ddp(rank):
    model = DDP(net())
    loop(model, sgd(model), rank, data=with_a_log)


def log_in_fsdp(rank):
    model = shard_by_layer(net())
    loop(model, sgd(model), rank, data=with_a_log)


def log_in_tensor_parallel(rank):
    """Both ranks are given the same batch: both take the logarithm."""
    model = split_by_units(net())
    sgd_ = torch.optim.SGD(model.parameters(), lr=0.05)
    loop(model, sgd_, 1, data=with_a_log)


def flipped_in_memory(rank):
    """A bit of a weight of rank 1 turns between two steps, and no operation has done it."""
    model = DDP(net())
    address = model.module[2].weight.data_ptr() + 4 * 3

    def after(step):
        if rank == 1 and step == 6:
            ctypes.c_uint32.from_address(address).value ^= 1 << 4

    loop(model, sgd(model), rank, after=after)


def computed_wrongly(rank):
    """Two bits of a weight of rank 1 are others than its update has made: no operation has written them."""
    model = DDP(net())
    address = model.module[0].weight.data_ptr() + 4 * 5

    def after(step):
        if rank == 1 and step == 6:
            ctypes.c_uint32.from_address(address).value ^= 0b101 << 19

    loop(model, sgd(model), rank, after=after)


def flipped_by_code(rank):
    model = DDP(net())

    def after(step):
        if rank == 1 and step == 6:
            model.module[2].weight.data.view(torch.int32)[0, 3] ^= 1 << 4

    loop(model, sgd(model), rank, after=after)


def flipped_by_an_address(rank):
    """Code that PyTorch does not run, and that has asked where the weight lies, as a kernel does."""
    model = DDP(net())

    def after(step):
        if rank == 1 and step == 6:
            ctypes.c_uint32.from_address(model.module[2].weight.data_ptr() + 4 * 3).value ^= 1 << 4

    loop(model, sgd(model), rank, after=after)


def other_decay(rank):
    """Code: from one step on, rank 1 does something else with the same gradients."""
    model = DDP(net())
    optimizer = sgd(model)

    def after(step):
        if rank == 1 and step == 5:
            optimizer.param_groups[0]["weight_decay"] = 0.1

    loop(model, optimizer, rank, after=after)


def clamped_everywhere(rank):
    """Every rank writes its weights between two steps, and alike."""
    model = DDP(net())

    def after(step):
        with torch.no_grad():
            model.module[2].weight.clamp_(-0.3, 0.3)

    loop(model, sgd(model), rank, after=after)


# taped: the operation and its line are named from the specimen of rank 1
TAPED = (log_in_ddp, log_in_fsdp, log_in_tensor_parallel)


# healthy ---------------------------------------------------------------------------------------------------


def wrapped(rank):
    model = DDP(net())
    return loop(model, sgd(model), rank)


def wrapped_after_the_optimizer(rank):
    """DDP leaves the parameters what they are: unlike fully_shard, it may come late."""
    model = net()
    optimizer = sgd(model)
    loop(DDP(model), optimizer, rank)


def averaged_by_hand(rank):
    model = net()
    loop(model, sgd(model), rank, between=average)


def summed_of_shares(rank):
    """Each rank's loss is its part of the mean over all: the sum is right."""
    model = net()
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        (loss_of(model, *batch(rank, step)) / WORLD).backward()
        average(model, 1)
        optimizer.step()


def accumulated(rank):
    model = DDP(net())
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        with model.no_sync():
            loss_of(model, *batch(rank, 2 * step)).backward()
        loss_of(model, *batch(rank, 2 * step + 1)).backward()
        optimizer.step()


def uneven_with_join(rank):
    model = DDP(net())
    optimizer = sgd(model)
    with Join([model]):
        for step in range(STEPS + 3 * rank):
            x, y = batch(rank, step, 8 if step < STEPS - 1 else 3)
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()


def local_steps(rank):
    """Local SGD: ranks train apart, and are averaged every fourth step."""
    model = net()

    def after(step):
        if step % 4 == 3:
            for p in model.parameters():
                dist.all_reduce(p.data)
                p.data /= WORLD

    loop(model, torch.optim.SGD(model.parameters(), lr=0.05), rank, after=after)


class Half(nn.Module):
    """Half of the units of a hidden layer; what both ranks' halves say is added up."""

    def __init__(self, rank):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))
        torch.manual_seed(1 + rank)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 1, bias=False)
        nn.init.zeros_(self.up.bias)

    def forward(self, x):
        own = self.down(self.up(x).tanh())
        whole = own.detach().clone()
        dist.all_reduce(whole)
        return own + (whole - own).detach() + self.bias


def halves_of_a_layer(rank):
    """Tensor parallelism by hand: one batch, one loss, weights of each rank's own."""
    model = Half(rank)
    loop(model, sgd(model), rank, data=lambda rank, step: batch(0, step))


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList(nn.Linear(4, 1) for _ in range(4))

    def forward(self, x):
        return self.experts[int(x.sum() * 1000) % 4](x)


def experts(rank):
    model = DDP(Experts(), find_unused_parameters=True)
    loop(model, sgd(model), rank)


def average_on_rank_0(rank):
    model = DDP(net())
    ema = torch.optim.swa_utils.AveragedModel(model.module) if rank == 0 else None
    loop(model, sgd(model), rank, after=lambda step: ema and ema.update_parameters(model.module))


def own_augmentations(rank):
    model = DDP(net())
    torch.manual_seed(5 + rank)

    def data(rank, step):
        x, y = batch(rank, step)
        return x + 0.1 * torch.randn(x.shape), y

    loop(model, sgd(model), rank, data=data)


def own_dropout(rank):
    model = DDP(nn.Sequential(net(), nn.Dropout(0.2)))
    torch.manual_seed(100 + rank)
    return loop(model, sgd(model), rank)


def shared_loss(rank):
    """The loss of all ranks together: the same number everywhere, of different data."""
    model = DDP(net())
    optimizer = sgd(model)
    for step in range(STEPS):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        parts = torch.distributed.nn.all_gather((model(x) - y).square())
        torch.cat(list(parts)).mean().backward()
        optimizer.step()


def normalised(rank):
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)))
    return loop(model, sgd(model), rank, data=lambda rank, step: batch(rank, step, 32))


def told_of_epochs(rank):
    data = TensorDataset(*batch(0, 0, 48))
    sampler = DistributedSampler(data, WORLD, rank, shuffle=True)
    model = DDP(net())
    optimizer = sgd(model)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, 6, sampler=sampler):
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()


def fully_sharded(rank):
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(net())
    clip = torch.nn.utils.clip_grad_norm_
    return loop(model, sgd(model), rank, between=lambda model: clip(model.parameters(), 1.0))


def shard_by_layer(model):
    from torch.distributed.fsdp import fully_shard

    for layer in (model[0], model[2]):
        fully_shard(layer)
    return fully_shard(model)


def split_by_units(model):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (WORLD,))
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def optimizer_of(training, model):
    return sgd(model) if training is fully_sharded else torch.optim.AdamW(model.parameters(), lr=0.01)


def normed_net():
    """A layer between the two that nothing makes tensor-parallel."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 1))


def deeper_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4), *normed_net())


def hybrid_sharded(rank):
    """HSDP: shards within pairs of ranks, copies between them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    model = normed_net()
    for layer in (model[0], model[2], model[3]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return loop(model, optimizer_of(hybrid_sharded, model), rank)


def sharded_and_split(rank):
    """FSDP2 over pairs of ranks that share one tensor-parallel model: each pair has its own data."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    model = deeper_net()
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    parallelize_module(model, mesh["model"], plan)
    for layer in (model[0], model[1], model[2], model[4], model[5]):
        fully_shard(layer, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    return loop(model, optimizer_of(sharded_and_split, model), rank // 2)


def sharded_by_layer(rank):
    """In mixed precision, with an optimizer that keeps averages."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = net()
    for layer in (model[0], model[2]):
        fully_shard(layer, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    fully_shard(model)
    return loop(model, torch.optim.AdamW(model.parameters(), lr=0.01), rank)


def tensor_parallel(rank):
    model = split_by_units(net())
    return loop(model, torch.optim.SGD(model.parameters(), lr=0.05), 0)


def pipeline(rank):
    """Two stages whose layers have the same names and shapes, by hand."""
    torch.manual_seed(rank)
    stage = nn.Linear(4, 4)
    optimizer = sgd(stage)
    for step in range(STEPS):
        optimizer.zero_grad()
        pass_through(stage, rank, batch(0, step)[0])
        optimizer.step()
    return parts_of(stage)


def pass_through(stage, rank, x):
    """Even ranks send to the next and get the gradient back."""
    if rank % 2 == 0:
        out = stage(x)
        dist.send(out.detach(), rank + 1)
        gradient = torch.empty_like(out)
        dist.recv(gradient, rank + 1)
        out.backward(gradient)
    else:
        given = torch.empty(8, 4)
        dist.recv(given, rank - 1)
        given.requires_grad_()
        stage(given).square().mean().backward()
        dist.send(given.grad, rank - 1)


def two_pipelines(rank):
    """Two copies of a pipeline with two stages, averaged stage by stage."""
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    torch.manual_seed(rank % 2)
    stage = nn.Linear(4, 4)
    optimizer = sgd(stage)
    for step in range(STEPS):
        optimizer.zero_grad()
        pass_through(stage, rank, batch(rank // 2, step)[0])
        for p in stage.parameters():
            dist.all_reduce(p.grad, group=pairs[rank % 2])
            p.grad /= 2
        optimizer.step()
    return parts_of(stage)


def scheduled_pipeline(rank):
    """Two stages under torch's own schedule, four micro-batches a step."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    torch.manual_seed(rank)
    part = nn.Sequential(nn.Linear(4, 4), nn.Tanh()) if rank == 0 else nn.Linear(4, 1)
    stage = PipelineStage(part, rank, WORLD, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 4, loss_fn=nn.functional.mse_loss)
    optimizer = sgd(part)
    losses = []
    for step in range(STEPS):
        x, y = batch(0, step)
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=losses)
        optimizer.step()
    return [loss.detach() for loss in losses] + parts_of(part)


HEALTHY = (
    halves_of_a_layer,
    wrapped,
    wrapped_after_the_optimizer,
    averaged_by_hand,
    summed_of_shares,
    accumulated,
    uneven_with_join,
    local_steps,
    experts,
    average_on_rank_0,
    own_augmentations,
    own_dropout,
    shared_loss,
    normalised,
    told_of_epochs,
    fully_sharded,
    tensor_parallel,
    pipeline,
    scheduled_pipeline,
)
# trained twice, watched and not: the same to the last bit
COMPARED = (
    wrapped,
    own_dropout,
    normalised,
    fully_sharded,
    sharded_by_layer,
    tensor_parallel,
    pipeline,
    scheduled_pipeline,
)


# taped, with weights that part: what doing the step before again must say, and a part of where
DONE_AGAIN = {
    flipped_in_memory: ("distributed-desync/bit-flip", "2.weight"),
    computed_wrongly: ("distributed-desync/bit-flip", "0.weight"),
    flipped_by_code: ("distributed-desync/weights-drift", "2.weight (rank_trainings.py:"),
    flipped_by_an_address: ("distributed-desync/weights-drift", "2.weight (rank_trainings.py:"),
    written_on_rank_1: ("distributed-desync/weights-drift", "2.weight (rank_trainings.py:"),
    other_decay: ("distributed-desync/weights-drift", "rank_trainings.py:"),
}
NOTHING_PARTS = (wrapped, averaged_by_hand, clamped_everywhere, local_steps)


OF_FOUR = (wrapped, fully_sharded, hybrid_sharded, sharded_and_split, tensor_parallel, two_pipelines)


# all of them -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def watched(out, taped=False, only=None):
    """As a rank that a script has started is watched."""
    from gradproof.probes.hooks import attach
    from gradproof.probes.names import Names
    from gradproof.probes.taping import begin_taping
    from gradproof.probes.watch import open_session

    session = open_session(out, command=[__file__], names=Names())
    if taped:
        begin_taping(session, None, only=only)
    with attach(session):
        yield
        session.close()


def run_all(rank, folder, names=()):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=WORLD)
    alone = WORLD == 2 and not names
    for training in (*PLANTED, *HEALTHY) if WORLD == 2 else ():
        if not names or training.__name__ in names:
            with watched(Path(folder) / training.__name__):
                training(rank)
            dist.barrier()
    for training in TAPED if alone else ():
        with watched(Path(folder) / training.__name__, taped=True, only=6):
            training(rank)
        dist.barrier()
    for training in (*DONE_AGAIN, *NOTHING_PARTS) if WORLD == 2 else ():
        if not names or training.__name__ in names:
            with watched(Path(folder) / f"{training.__name__}_taped", taped=True):
                training(rank)
            dist.barrier()
    for training in COMPARED if alone else OF_FOUR if WORLD == 4 else ():
        if names and training.__name__ not in names:
            continue
        plain = training(rank)
        with watched(Path(folder) / f"{training.__name__}_again", taped=True):
            seen = training(rank)
        same = len(plain) == len(seen) and all(map(torch.equal, plain, seen))
        print(f"{training.__name__}: {'identical' if same else 'DIFFERENT'}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore", FutureWarning)
    run_all(int(os.environ["RANK_OF_TEST"]), sys.argv[1], sys.argv[2:])
