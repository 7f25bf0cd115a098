"""What training the explicit model takes in memory: computed from its sizes, and as allocated."""

from __future__ import annotations

from dataclasses import dataclass, fields

from torch import Tensor

from gradproof.lm.adam import CHUNK, CHUNK_ON_GPU, FlatAdamW
from gradproof.lm.explicit_gpt import BlockActivations, ExplicitGPT, Workspace
from gradproof.lm.layers import CACHED_ELEMENTS, TALL_ROWS, samples_at_once

KINDS = ("embedding", "attention", "feed_forward", "norm", "output", "workspace")
COLUMNS = ("parameters", "gradients", "Adam m and v", "activations")

BLOCK_KIND = {
    "xhat1": "norm",
    "rstd1": "norm",
    "qkv": "attention",
    "attention": "attention",
    "mixed": "attention",
    "xhat2": "norm",
    "rstd2": "norm",
    "hidden": "feed_forward",
    "activated": "feed_forward",
}
WORKSPACE_KIND = {"stream": "embedding", "xhat": "norm", "rstd": "norm", "logits": "output", "last": "output"}


@dataclass(frozen=True)
class MemoryReport:
    """Bytes by column and kind of layer; str() is a table in MiB."""

    computed: dict[str, dict[str, int]]
    allocated: dict[str, dict[str, int]]

    @property
    def total(self) -> tuple[int, int]:
        """Computed and allocated bytes."""
        return _total(self.computed), _total(self.allocated)

    def __str__(self) -> str:
        rows = [f"{'MiB':14s}" + "".join(f"{c:>14s}" for c in (*COLUMNS, "total"))]
        lines = {kind: [self.allocated[c][kind] for c in COLUMNS] for kind in KINDS}
        lines["total"] = [sum(self.allocated[c].values()) for c in COLUMNS]
        for name, values in lines.items():
            rows.append(f"{name:14s}" + "".join(f"{v / 2**20:14.3f}" for v in (*values, sum(values))))
        computed, allocated = self.total
        agree = "they agree" if computed == allocated else "THEY DIFFER"
        rows.append(f"computed {computed:,} bytes, allocated {allocated:,} bytes: {agree}")
        return "\n".join(rows)


def _total(table: dict[str, dict[str, int]]) -> int:
    return sum(sum(column.values()) for column in table.values())


def memory_report(model: ExplicitGPT, optimizer: FlatAdamW, batch: int, time: int) -> MemoryReport:
    """The memory of training on (batch, time) tokens; allocates the activations if that has not happened."""
    model.allocate(batch, time)
    return MemoryReport(computed_bytes(model, batch, time), allocated_bytes(model, optimizer))


def computed_bytes(model: ExplicitGPT, B: int, T: int) -> dict[str, dict[str, int]]:
    """From the sizes alone."""
    s = model.shape
    V, C, H, L, N, F = s.vocabulary, s.width, s.heads, s.layers, B * T, 4 * s.width
    full, narrow = model.flat_parameters.element_size(), model.activations.itemsize
    mixed = narrow != full
    parameters = {
        "embedding": (V + s.context) * C,
        "attention": L * (4 * C * C + 4 * C),
        "feed_forward": L * (8 * C * C + 5 * C),
        "norm": (2 * L + 1) * 2 * C,
        "output": 0 if s.tied else V * C,
        "workspace": 0,
    }
    kept = 1 if model.recompute else L
    at_once = samples_at_once(B, H, T, model.flat_parameters.device)
    on_cpu = model.flat_parameters.device.type == "cpu"
    tall = min(N, TALL_ROWS) if on_cpu else N
    activations = {
        "embedding": full * N * C,
        "attention": kept * narrow * (N * 3 * C + N * C + B * H * T * T),
        "feed_forward": kept * narrow * 2 * N * F,
        "norm": kept * 2 * (narrow * N * C + full * N) + full * (N * C + N),
        "output": full * N * V + (full * N * C if mixed else 0),
        "workspace": narrow * (N * C + 3 * N * C + tall * F + at_once * (H * T * T + 7 * T * C) + T * T)
        + full * min(N, max(1, CACHED_ELEMENTS // C) if on_cpu else N) * C
        + (narrow * N * C if mixed else 0)
        + (full * N * C * (L + 1) if model.recompute else 0),
    }
    chunk = min(sum(parameters.values()), CHUNK if on_cpu else CHUNK_ON_GPU)
    shadow = narrow if mixed else 0  # a copy of the parameters in the activations' dtype
    return {
        "parameters": {kind: n * (full + shadow) for kind, n in parameters.items()},
        "gradients": {kind: n * full for kind, n in parameters.items()},
        "Adam m and v": {kind: 2 * n * full for kind, n in parameters.items()} | {"workspace": full * chunk},
        "activations": activations,
    }


def allocated_bytes(model: ExplicitGPT, optimizer: FlatAdamW) -> dict[str, dict[str, int]]:
    """From the storages that exist, each counted once."""
    seen: set[int] = set()
    table = {column: dict.fromkeys(KINDS, 0) for column in COLUMNS}

    def count(column: str, kind: str, tensor: Tensor | None) -> None:
        if tensor is not None and tensor.untyped_storage().data_ptr() not in seen:
            seen.add(tensor.untyped_storage().data_ptr())
            table[column][kind] += tensor.untyped_storage().nbytes()

    for block in model.blocks:
        for field in fields(BlockActivations):
            count("activations", BLOCK_KIND[field.name], getattr(block, field.name))
    for field in fields(Workspace):
        kind = WORKSPACE_KIND.get(field.name, "workspace")
        if field.name != "last" or model.work.last is not model.work.normed:
            count("activations", kind, getattr(model.work, field.name))
    count("Adam m and v", "workspace", optimizer.scratch)
    for stored in model.inputs:
        count("activations", "workspace", stored)

    flat = [("parameters", model.flat_parameters, model.parameters)]
    flat += [("parameters", model.flat_weights, model.weights)]
    flat += [("gradients", model.flat_gradients, model.gradients)]
    flat += [("Adam m and v", optimizer.flat_m, optimizer.m), ("Adam m and v", optimizer.flat_v, optimizer.v)]
    for column, whole, views in flat:
        storage = whole.untyped_storage()
        if storage.data_ptr() in seen:
            continue
        seen.add(storage.data_ptr())
        for name, view in views.items():
            table[column][kind_of(name)] += view.numel() * view.element_size()
        used = sum(view.numel() * view.element_size() for view in views.values())
        table[column]["workspace"] += storage.nbytes() - used  # 0, unless the flat buffer has gaps
    return table


def kind_of(parameter: str) -> str:
    """The kind of layer a parameter belongs to, from its name."""
    for kind in ("embedding", "attention", "feed_forward", "norm"):
        if kind in parameter:
            return kind
    return "output"
