# The batch correction written out in float64: rows, their Gram matrix, the ridge solution by singular values, and what a step does.
from __future__ import annotations

import conv_oracles
import torch
from torch import Tensor

WIDE = torch.float64


def augmented(x: Tensor, *, weight: bool = True, bias: bool = True) -> Tensor:
    """x (N, d) → the rows [x 1] (N, d + 1) of what learns."""
    x = x.detach().to(WIDE)
    parts = [x] * weight + [torch.ones(len(x), 1, dtype=WIDE)] * bias
    return torch.cat(parts, 1)


def ridge(rows: Tensor, g: Tensor, damping: float, cut: float = 1e-7) -> Tensor:
    """gᵀ (X̃X̃ᵀ + λI)⁻¹ X̃ with λ = damping · trace/N, singular values below cut of the largest left out."""
    u, s, vt = torch.linalg.svd(rows, full_matrices=False)
    kept = s > cut * s.max()
    weights = torch.where(kept, s / (s.square() + damping * s.square().sum() / len(rows)), torch.zeros_like(s))
    return g.detach().to(WIDE).mT @ u @ torch.diag(weights) @ vt


def realised_share(rows: Tensor, g: Tensor, gradient: Tensor) -> float:
    """⟨δZ, δZ*⟩/‖δZ*‖² of the step −gradient, where −g is wanted."""
    g = g.detach().to(WIDE)
    return float(((rows @ gradient.mT) * g).sum() / g.square().sum())


def joined(weight_grad: Tensor, bias_grad: Tensor | None) -> Tensor:
    """The gradient of [W b], a row for each output."""
    parts = [weight_grad.flatten(1)] + ([] if bias_grad is None else [bias_grad.unsqueeze(1)])
    return torch.cat(parts, 1).detach().to(WIDE)


def by_group(images: Tensor, groups: int) -> Tensor:
    """(N, C, *out) → (groups, images and positions, C/groups)."""
    return images.detach().to(WIDE).flatten(2).unflatten(1, (groups, -1)).permute(1, 0, 3, 2).flatten(1, 2)


def ridge_of_patches(patches: Tensor, g: Tensor, groups: int, damping: float, **learning: bool) -> Tensor:
    """patches (N, C, taps, *out) and g (N, C_out, *out) → the gradient of [W b], a row for each output channel."""
    of_groups = conv_oracles.vectors(patches.detach(), groups).transpose(0, 1).flatten(1, 2)
    upstreams = by_group(g, groups)
    return torch.cat([ridge(augmented(p, **learning), u, damping) for p, u in zip(of_groups, upstreams, strict=True)])
