"""What the trainer trains: a module with PyTorch's optimizer, or the explicit model with its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from gradproof.errors import UserError
from gradproof.lm.adam import AdamSettings, FlatAdamW, clip_global_norm
from gradproof.lm.explicit_gpt import ExplicitGPT
from gradproof.lm.ranks import Ranks
from gradproof.lm.shape import parameter_shapes

Batch = tuple[Tensor, Tensor]


class ModuleLearner:
    """An nn.Module that returns its loss, under AdamW; alone, with DDP, or sharded by FSDP2."""

    def __init__(
        self,
        module: nn.Module,
        adam: AdamSettings,
        ranks: Ranks,
        *,
        autocast: torch.dtype | None = None,
        compiled: bool = False,
        shard: bool = False,
    ) -> None:
        self.module, self.ranks, self.autocast = module.to(ranks.device), ranks, autocast
        self.shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
        if shard:
            shard_module(module, ranks)
        # as the optimizer knows them: FSDP2 shows others while a group is gathered
        self.parameters = dict(zip(self.shapes, module.parameters(), strict=True))
        self.optimizer = torch.optim.AdamW(
            [
                {
                    "params": [p for p in self.parameters.values() if p.dim() > 1],
                    "weight_decay": adam.weight_decay,
                },
                {"params": [p for p in self.parameters.values() if p.dim() == 1], "weight_decay": 0.0},
            ],
            lr=0.0,
            betas=(adam.beta1, adam.beta2),
            eps=adam.eps,
            fused=True,
        )
        self.model: Any = module
        if compiled:
            self.model = torch.compile(module)
        if ranks.world > 1 and not shard:
            ids = [ranks.device.index] if ranks.device.type == "cuda" else None
            self.model = nn.parallel.DistributedDataParallel(self.model, device_ids=ids)

    def accumulate(self, parts: Sequence[Batch]) -> Tensor:
        """Gradients of the mean loss over the micro-batches of all ranks; returns that loss."""
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.ranks.device)
        for i, (inputs, targets) in enumerate(parts):
            waits = i < len(parts) - 1 and hasattr(self.model, "no_sync")  # DDP sends gradients once a step
            with self.model.no_sync() if waits else nullcontext():
                loss = self._loss(inputs, targets) / len(parts)
                loss.backward()
            total += loss.detach()
        return self.ranks.mean(total)

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        device = self.ranks.device
        inputs, targets = inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)
        with self._autocast():
            return self.model(inputs, targets)

    def _autocast(self) -> AbstractContextManager:
        return torch.autocast(self.ranks.device.type, self.autocast) if self.autocast else nullcontext()

    def clip(self, limit: float) -> Tensor:
        """Clips by the global norm; returns the norm before."""
        return full(torch.nn.utils.clip_grad_norm_(self.parameters.values(), limit))

    def update(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()

    @torch.no_grad()
    def evaluate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with evaluation_mode(self.module):
            return self._loss(inputs, targets)

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        with evaluation_mode(self.module), self._autocast():
            return self.module(tokens)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Weights, and Adam's m and v, whole and on the CPU, after a step; every rank has to call it."""
        weights, adam = {}, {}
        for name, parameter in self.parameters.items():
            weights[name] = full(parameter).cpu()
            for short, key in (("m", "exp_avg"), ("v", "exp_avg_sq")):
                adam[f"{short}.{name}"] = full(self.optimizer.state[parameter][key]).cpu()
        return weights, adam

    @torch.no_grad()
    def load(self, weights: dict[str, Tensor], adam: dict[str, Tensor], steps: int) -> None:
        """The inverse of `state`, on however many ranks it was written."""
        fused_on_gpu = self.ranks.device.type == "cuda"
        for name, parameter in self.parameters.items():
            parameter.copy_(part_of(weights[name], parameter))
            if steps:
                at = torch.tensor(float(steps), device=self.ranks.device if fused_on_gpu else "cpu")
                self.optimizer.state[parameter] = {
                    "step": at,
                    "exp_avg": part_of(adam[f"m.{name}"], parameter).clone(),
                    "exp_avg_sq": part_of(adam[f"v.{name}"], parameter).clone(),
                }


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    module.eval()
    try:
        yield
    finally:
        module.train()


def shard_module(module: nn.Module, ranks: Ranks) -> None:
    """FSDP2: each block of the model is gathered when it runs; the rest is one more group."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if ranks.world == 1:
        raise UserError(
            "--shard needs more than one process: torchrun --nproc-per-node=2 -m gradproof train --shard"
        )
    mesh = init_device_mesh(ranks.device.type, (ranks.world,))
    for child in module.modules():
        if type(child).__name__ == "Block":
            fully_shard(child, mesh=mesh)
    fully_shard(module, mesh=mesh)


def full(tensor: Tensor) -> Tensor:
    """The whole of a tensor of which each rank may hold a part."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach()


def part_of(whole: Tensor, like: Tensor) -> Tensor:
    """What this rank holds of a tensor that is laid out like another."""
    if not hasattr(like, "device_mesh"):
        return whole.to(like.device)
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements)  # type: ignore[attr-defined]


class ExplicitLearner:
    """The model without autograd and its optimizer; ranks add up one flat gradient."""

    def __init__(self, model: ExplicitGPT, adam: AdamSettings, ranks: Ranks) -> None:
        self.model, self.ranks = model, ranks
        self.shapes = parameter_shapes(model.shape)
        self.optimizer = FlatAdamW(model.flat_parameters, self.shapes, adam)

    def accumulate(self, parts: Sequence[Batch]) -> Tensor:
        """Gradients of the mean loss over the micro-batches of all ranks; returns that loss."""
        self.model.zero_gradients()
        total = torch.zeros((), device=self.ranks.device)
        for inputs, targets in parts:
            loss = self.model.forward(inputs.to(self.ranks.device), targets.to(self.ranks.device))
            self.model.backward(scale=1 / len(parts))
            total += loss / len(parts)
        if self.ranks.world > 1:
            self.model.flat_gradients.copy_(self.ranks.mean(self.model.flat_gradients))
        return self.ranks.mean(total)

    def clip(self, limit: float) -> Tensor:
        """Clips by the global norm; returns the norm before."""
        return clip_global_norm(self.model.flat_gradients, limit)

    def update(self, lr: float) -> None:
        self.optimizer.step(self.model.flat_gradients, lr)

    def evaluate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.model.forward(inputs.to(self.ranks.device), targets.to(self.ranks.device))

    def logits(self, tokens: Tensor) -> Tensor:
        return self.model.logits(tokens)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Weights, and Adam's m and v, on the CPU."""
        adam = {f"m.{name}": m.cpu().clone() for name, m in self.optimizer.m.items()}
        adam |= {f"v.{name}": v.cpu().clone() for name, v in self.optimizer.v.items()}
        return {name: p.cpu().clone() for name, p in self.model.parameters.items()}, adam

    def load(self, weights: dict[str, Tensor], adam: dict[str, Tensor], steps: int) -> None:
        """The inverse of `state`."""
        self.model.load(weights)
        self.optimizer.steps = steps
        for name in self.shapes:
            self.optimizer.m[name].copy_(adam[f"m.{name}"])
            self.optimizer.v[name].copy_(adam[f"v.{name}"])


Learner = ModuleLearner | ExplicitLearner
