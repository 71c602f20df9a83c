# All layers of the package, each with options and inputs of every rank, as torch lists its own modules in ModuleInfo entries.
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from affine_divergence import nn as ad_nn


@dataclass(frozen=True)
class Case:
    """Arguments of a layer, and the shape of an input."""

    arguments: tuple[int, ...]
    shape: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)


def linear(**options: Any) -> list[Case]:
    """Rows, one row and tokens, with and without a bias."""
    shapes = ((5, 4), (4,), (2, 3, 4))
    return [Case((4, 3), shape, {"bias": bias} | options) for bias in (True, False) for shape in shapes]


def convolution(dim: int, **options: Any) -> list[Case]:
    """A batch and one image, with and without a bias; also depthwise."""
    image = (2, *(5, 4, 3)[:dim])
    kinds = ((True, 1, (3, *image)), (False, 1, (3, *image)), (True, 1, image), (True, 2, (3, *image)))
    return [Case((2, 4, 2), shape, {"bias": bias, "groups": groups} | options) for bias, groups, shape in kinds]


LAYERS: dict[str, tuple[type[torch.nn.Module], list[Case]]] = {
    "AffineLikeLinear": (ad_nn.AffineLikeLinear, linear(gain="auto")),
    "NormLikeLinear": (ad_nn.NormLikeLinear, linear(gain=2.0)),
    "SampleCorrectedLinear": (ad_nn.SampleCorrectedLinear, linear()),
    "BatchCorrectedLinear": (ad_nn.BatchCorrectedLinear, linear()),
    "L2Norm": (ad_nn.L2Norm, [Case((), shape) for shape in ((5, 4), (4,), (2, 3, 4))]),
}
for _dim in (1, 2, 3):
    for _form in ("affine-like", "norm-like"):
        LAYERS[f"PatchNormConv{_dim}d-{_form}"] = (getattr(ad_nn, f"PatchNormConv{_dim}d"), convolution(_dim, form=_form))
    for _name in (f"PatchNormConvTranspose{_dim}d", f"SampleCorrectedConv{_dim}d", f"BatchCorrectedConv{_dim}d"):
        LAYERS[_name] = (getattr(ad_nn, _name), convolution(_dim))


def cases(name: str, dtype: torch.dtype = torch.float64) -> Iterator[tuple[torch.nn.Module, Tensor]]:
    """Layer and input of each case, always the same numbers; the input requires a gradient."""
    kind, found = LAYERS[name]
    for case in found:
        torch.manual_seed(0)
        layer = kind(*case.arguments, **case.options).to(dtype)
        yield layer, torch.randn(case.shape, dtype=torch.float64).to(dtype).requires_grad_()
