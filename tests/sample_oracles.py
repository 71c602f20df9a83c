# The sample correction row by row and patch by patch in float64: the gradients it gives, and the step they make.
from __future__ import annotations

import torch
from torch import Tensor


def sample_gradients(g: Tensor, x: Tensor, learns: tuple[bool, bool]) -> tuple[Tensor, Tensor]:
    """Σ_i g_i x_iᵀ/n_i and Σ_i g_i/n_i over the rows, n_i = ‖x_i‖² (where W learns) + 1 (where b does); nothing where n_i = 0."""
    g, x = (rows.detach().double().reshape(-1, rows.shape[-1]) for rows in (g, x))
    weight_grad, bias_grad = g.new_zeros(g.shape[1], x.shape[1]), g.new_zeros(g.shape[1])
    for upstream, row in zip(g, x, strict=True):
        n = float(row @ row) * learns[0] + learns[1]
        if n:
            weight_grad += torch.outer(upstream, row) / n
            bias_grad += upstream / n
    return weight_grad, bias_grad


def interference(x: Tensor, learns: tuple[bool, bool]) -> Tensor:
    """M_ij = (x_i·x_j + 1)/(‖x_j‖² + 1), by which a step on row j moves row i; what does not learn is absent above and below."""
    rows = torch.cat([x * learns[0], torch.full((len(x), 1), float(learns[1]), dtype=x.dtype)], 1)
    products = rows @ rows.mT
    return products / products.diagonal().where(products.diagonal() > 0, torch.ones(()))
