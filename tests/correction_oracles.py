# What gradient descent would do to a call's rows under each correction, written out in float64 at the captured ∂L/∂z.
from __future__ import annotations

import batch_oracles
import diagnosis_oracles as oracles
import torch
from diagnosis_oracles import Call, Row
from oracles import FLOAT32_EPS
from torch import Tensor

KINDS = ("none", "affine-like", "norm-like", "sample", "batch")
DAMPING = 1e-3


def counterfactual(kind: str, calls: list[Call], rate: float, bias: bool) -> list[Row]:
    """The rows of every call of one plain layer; x of a call is [x 1] of what learns, and a bias does or does not."""
    x, g, group, sqnorm = (torch.cat([getattr(call, part) for call in calls]) for part in ("x", "g", "group", "sqnorm"))
    same = group.unsqueeze(0) == group.unsqueeze(1)
    if kind == "batch":
        moved = -rate * _ridge_moves(calls, x, group)
        gram = None
    else:
        gram = _gram(kind, x, sqnorm, bias) * same
        moved = -rate * (gram @ g)
    sizes = [len(call.x) for call in calls]
    found = []
    for change, up, start in zip(moved.split(sizes), g.split(sizes), _starts(sizes), strict=True):
        row = oracles.measured(change, up, rate)
        if gram is None:
            row["interference"] = float("nan")
        else:
            terms = gram.diagonal()[start : start + len(up)]
            others = (gram - torch.diag(gram.diagonal()))[start : start + len(up)] @ g
            row["interference"] = oracles.of_gram(terms, terms, others, up)["interference"]
        found.append(row)
    return found


def _starts(sizes: list[int]) -> list[int]:
    return [sum(sizes[:i]) for i in range(len(sizes))]


def _gram(kind: str, x: Tensor, sqnorm: Tensor, bias: bool) -> Tensor:
    """G_ij, by which a step on row j moves row i."""
    products = x @ x.mT
    if kind == "none":
        return products
    if kind == "sample":
        n = products.diagonal()
        return products / n.where(n > 0, torch.ones_like(n))
    if kind == "affine-like":
        s = (sqnorm + 1).rsqrt()
        return s * products * s.mT
    s = (sqnorm + FLOAT32_EPS).rsqrt()
    return s * (products - float(bias)) * s.mT + float(bias)


def _ridge_moves(calls: list[Call], x: Tensor, group: Tensor) -> Tensor:
    """What the added ridge solutions of all calls do to each row."""
    moved = None
    for number in group.unique():
        gradient = sum(
            batch_oracles.ridge(call.x[call.group == number], call.g[call.group == number], DAMPING) for call in calls
        )
        part = (x @ gradient.mT) * (group == number).unsqueeze(1)
        moved = part if moved is None else moved + part
    assert moved is not None
    return moved
