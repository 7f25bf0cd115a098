"""What a wrong gradient looks like next to the right one: scaled, negated, transposed, wrong in some rows."""

from __future__ import annotations

import math

import torch

PIECE = 1 << 20  # entries, so that what is made of them stays in the cache


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """In float64; complex numbers as pairs."""
    return torch.view_as_real(tensor.to(torch.complex128)) if tensor.is_complex() else tensor.double()


def distance_between(got: torch.Tensor, truth: torch.Tensor) -> float:
    """|got − truth| in float64, piece by piece: no second copy of a large tensor."""
    square = torch.zeros((), dtype=torch.float64, device=truth.device)
    pieces = [tensor.detach().reshape(-1).split(PIECE) for tensor in (got, truth)]
    for mine, right in zip(*pieces, strict=True):
        apart = (wide(mine) - wide(right)).flatten()
        square += apart @ apart
    return math.sqrt(float(square))


def relative_error(got: torch.Tensor, truth: torch.Tensor) -> float:
    """|got − truth| / |truth|; infinite when anything is not finite."""
    distance = float(torch.linalg.vector_norm(wide(got) - wide(truth)))
    size = float(torch.linalg.vector_norm(wide(truth)))
    return distance / size if size > 0 else (0.0 if distance == 0 else float("inf"))


def cosine(got: torch.Tensor, truth: torch.Tensor) -> float:
    a, b = wide(got).flatten(), wide(truth).flatten()
    return float(a @ b / (a.norm() * b.norm()).clamp_min(1e-300))


def describe_difference(got: torch.Tensor | None, truth: torch.Tensor, tolerance: float) -> str:
    """One line: how the gradient that came back differs from the derivative."""
    if got is None:
        return "no gradient comes back"
    if got.shape != truth.shape:
        return f"shape {list(got.shape)} instead of {list(truth.shape)}"
    got, truth = wide(got), wide(truth)
    if not bool(torch.isfinite(got).all()):
        return f"{int((~torch.isfinite(got)).sum())} of {got.numel()} entries are not finite"
    if not bool(got.any()):
        return "zero"
    size = float((truth * truth).sum())
    if size == 0:
        return "not zero, though the derivative is"
    scale = float((got * truth).sum()) / size
    close = max(20 * tolerance, 1e-3)
    if relative_error(got, scale * truth) <= close and scale != 0:
        return (
            "the sign is wrong" if abs(scale + 1) <= close else f"{scale:.4g} × expected{_hint(scale, truth)}"
        )
    for name, other in _rearranged(truth):
        if relative_error(got, other) <= close:
            return name
    return _where(got, truth, close)


def _hint(scale: float, truth: torch.Tensor) -> str:
    for dim, size in enumerate(truth.shape):
        for factor, word in (
            (size, "a sum where a mean was meant"),
            (1 / max(size, 1), "divided once too often"),
        ):
            if size > 1 and abs(scale / factor - 1) < 1e-3:
                return f" ({word}? dimension {dim} has {size} entries)"
    return ""


def _rearranged(truth: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    others = []
    if truth.dim() >= 2 and truth.shape[-1] == truth.shape[-2]:
        others.append(("transposed", truth.mT))
    for dim in range(truth.dim()):
        if truth.shape[dim] > 1:
            others.append((f"shifted by one along dimension {dim}", truth.roll(1, dim)))
            others.append((f"shifted by minus one along dimension {dim}", truth.roll(-1, dim)))
            others.append((f"reversed along dimension {dim}", truth.flip(dim)))
    return others


def _where(got: torch.Tensor, truth: torch.Tensor, close: float) -> str:
    """Rows, columns or everything: the slices along one dimension that differ, if it is not all of them."""
    best = ""
    fewest = 1.0
    for dim in range(truth.dim()):
        size = truth.shape[dim]
        if size < 2:
            continue
        moved_got, moved_truth = (
            got.movedim(dim, 0).reshape(size, -1),
            truth.movedim(dim, 0).reshape(size, -1),
        )
        wrong = (moved_got - moved_truth).norm(dim=1) > close * moved_truth.norm(
            dim=1
        ) + 1e-12 * moved_truth.norm()
        share = float(wrong.double().mean())
        if 0 < share < fewest:
            fewest = share
            rows = wrong.nonzero().flatten().tolist()
            state = (
                "zero"
                if not bool(moved_got[wrong].any())
                else f"{relative_error(moved_got[wrong], moved_truth[wrong]):.2g} off"
            )
            best = f"{state} at {ranges(rows)} of dimension {dim} (size {size}), right elsewhere"
    text = f"{relative_error(got, truth):.2g} off, cosine {cosine(got, truth):.4f}"
    remainder = got - truth
    flat = remainder.flatten()
    if truth.numel() > 1 and float(flat.std()) < 1e-3 * float(flat.abs().mean()):
        return f"{text}: a constant {float(flat.mean()):.3g} too much"
    return best or text


def ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 7] as "0–2, 7"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    words = [f"{part[0]}–{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts]
    return ", ".join(words[:6]) + (f", … ({len(numbers)} in all)" if len(words) > 6 else "")
