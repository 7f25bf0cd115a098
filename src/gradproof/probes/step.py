"""A step that is under way: what has been gathered since the last one ended, in the order in which it happened."""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch
from torch import Tensor

from gradproof.probes import tensors as measuring
from gradproof.probes.graphs import Captured
from gradproof.probes.reading import Reading

is_functorchs = torch._C._functorch.is_functorch_wrapped_tensor
KEEP = 1 << 18  # entries of an output up to which it is copied, to be measured with others in one call


class OpenStep:
    """What has been gathered since the last step ended."""

    def __init__(self, depth: int, sampled: bool = False) -> None:
        self.depth = depth
        self.waits = False  # for a GPU's numbers: a taped step is slow anyway
        self.sampled = sampled  # percentiles and exponents too
        self.order: list[str] = []
        self.backwards = 0
        self.is_fresh = True  # neither a backward nor a zero_grad so far
        self.used: list[
            tuple[weakref.ref[Tensor], int]
        ] = []  # gradients of the step before, as backward finds them
        self.added_to_used = False
        self.is_scaled = False
        self.row: dict[str, Any] = {}
        self.losses = 0  # sums of losses that travel with the step's other numbers
        self._far_losses: list[Tensor] = []
        self._far_samples: list[tuple[int, Tensor]] = []  # of a GPU, each with the place of its first row
        self.counted: list[list[int]] = []  # places of rows whose distributions were counted on a GPU
        self.rows: list[tuple[str, str]] = []  # (kind, name) of each measured tensor, in order
        self.norms: list[str] = []
        self.reading = Reading()
        # of a rank's fingerprints: kind and name of what was measured, what is known of the batch, when it was
        self.prints: list[list[tuple[str, str]]] = []
        self.batch: dict[str, float] = {}
        self.times: dict[str, float] = {}
        self._kept: list[tuple[str, str, Tensor]] = []
        self._kept_size = 0

    def backward_returned(self) -> None:
        """Where it has added to gradients that were there; those of master weights are none of its own."""
        held = ((held(), version) for held, version in self.used)
        self.added_to_used |= any(gradient is not None and gradient._version > v for gradient, v in held)
        self.used = []

    def close(self, **where: float) -> None:
        """The row is whole but for the numbers that are still on their way."""
        if self._far_losses:
            self._add_up_losses()
        if self._far_samples:
            self._count_samples()
        order = "".join(self.order)
        self.row.update(where, backwards=order.count("b"), order=order, depth=self.depth)

    def add_loss(self, loss: Tensor, weight: Tensor | None) -> bool:
        """A CPU's number can be read at once, False if it is not finite; a GPU's travels with the step's others."""
        usual = type(loss) is Tensor and loss.dtype is torch.float32 and loss.is_cpu and loss.numel() == 1
        if usual and not is_functorchs(loss):  # nothing else has to be asked
            return self._add_number(loss.item())
        if not measuring.is_measurable(loss):
            return True
        if loss.numel() != 1:
            loss = (loss.detach() * weight.detach()).sum() if weight is not None else loss.detach().sum()
        loss = loss.real if loss.is_complex() else loss
        if not loss.is_cpu:
            self._far_losses.append(loss.detach().reshape(()))  # no launch: micro-batches may be many
            return True
        return self._add_number(loss.item())

    def _add_number(self, loss: float) -> bool:
        self.row["loss"] = self.row.get("loss", 0.0) + loss
        return math.isfinite(loss)

    def _add_up_losses(self) -> None:
        """One sum for each device and precision, whatever the number of backwards."""
        groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for loss in self._far_losses:
            groups.setdefault((loss.device, loss.dtype), []).append(loss)
        for losses in groups.values():
            self.reading.add(f"loss {self.losses}", torch.stack(losses).sum(dtype=torch.float64))
            self.losses += 1
        self._far_losses = []

    def add_captured(self, captured: Captured) -> None:
        """What a CUDA graph has done once more; its numbers are copied, for the next replay writes over them."""
        self.order += captured.order
        self.backwards += captured.order.count("b")
        self.is_fresh = False
        for loss, weight in captured.losses:
            self.add_loss(loss.clone(), weight)
        if captured.clip_limit is not None:
            self.row["clip_limit"] = captured.clip_limit
        if captured.norm_before_clip is not None:
            self.reading.add("norm_before_clip", measuring.local(captured.norm_before_clip).clone())

    def measure(self, kind: str, named: dict[str, Tensor]) -> bool:
        """As `measure_rows`, for tensors of one kind."""
        return self.measure_rows([(kind, name, tensor) for name, tensor in named.items()])

    def measure_output(self, kind: str, name: str, tensor: Tensor) -> None:
        """Statistics and dead units; a small tensor is copied and measured with others later: it may change before."""
        if kind == "output" and tensor.dim() >= 2 and tensor.shape[0] > 1:
            self.reading.add(f"dead {name}", measuring.dead_share(tensor))
        if tensor.numel() > KEEP:
            self.measure_kept()
            self.measure_rows([(kind, name, tensor)])
            return
        self._kept.append((kind, name, tensor.clone()))
        self._kept_size += tensor.numel()
        if self._kept_size > 8 * KEEP:
            self.measure_kept()

    def measure_kept(self) -> None:
        kept, self._kept, self._kept_size = self._kept, [], 0
        self.measure_rows(kept)

    def measure_rows(self, rows: list[tuple[str, str, Tensor]]) -> bool:
        """Statistics of tensors into the step's reading: one call of the kernel for each device.

        False where a CPU's numbers, or such as are waited for, say at once that one is not finite.
        """
        finite = True
        groups: dict[torch.device, list[tuple[str, str, Tensor]]] = {}
        for row in rows:
            groups.setdefault(row[2].device, []).append(row)
        for group in groups.values():
            start, tensors = len(self.rows), [tensor for _, _, tensor in group]
            self.rows += [(kind, name) for kind, name, _ in group]
            statistics = measuring.measure(tensors)
            self.reading.add(f"stats {start}", statistics)
            if statistics.device.type == "cpu" or self.waits:
                finite &= not bool(statistics[:, [measuring.NAN, measuring.INF]].any())
            if self.sampled:
                self._add_sample(start, measuring.sample(tensors))
        return finite

    def _add_sample(self, start: int, sample: Tensor) -> None:
        """A CPU's sample is sorted and counted when the step is written; a GPU's there, all of them in one go."""
        if sample.is_cpu:
            self.reading.add(f"sample {start}", sample)
        else:
            self._far_samples.append((start, sample))

    def _count_samples(self) -> None:
        """Where they lie; those of very many tensors are narrower than others."""
        groups: dict[tuple[torch.device, int], list[tuple[int, Tensor]]] = {}
        for start, sample in self._far_samples:
            groups.setdefault((sample.device, sample.shape[1]), []).append((start, sample))
        for group in groups.values():
            rows = measuring.distributions_on_device(torch.cat([sample for _, sample in group]))
            self.reading.add(f"distribution {len(self.counted)}", rows)
            self.counted.append([start + i for start, sample in group for i in range(len(sample))])
        self._far_samples = []

    def measure_changes(self, named: dict[str, Tensor], before: list[Tensor]) -> None:
        """Statistics of weights, and of the updates that made them of what they were before."""
        groups: dict[torch.device, list[tuple[str, Tensor, Tensor]]] = {}
        for (name, weight), old in zip(named.items(), before, strict=True):
            groups.setdefault(weight.device, []).append((name, weight, old))
        for group in groups.values():
            start, (names, now, then) = len(self.rows), zip(*group, strict=True)
            self.rows += [(kind, name) for kind in ("weight", "update") for name in names]
            self.reading.add(f"stats {start}", measuring.measure_changes(now, then))
            if self.sampled:
                self._add_sample(start, measuring.sample_changes(now, then))

    def measure_norms(self, gradients: dict[str, Tensor]) -> bool:
        """Σx² of each gradient, and no more; False as in `measure_rows`."""
        finite = True
        for group in measuring.group_by_device(gradients).values():
            squares = measuring.square_sums(list(group.values()))
            self.reading.add(f"squares {len(self.norms)}", squares)
            self.norms += group
            if squares.device.type == "cpu" or self.waits:
                finite &= bool(torch.isfinite(squares.sum()))
        return finite
