# How a layer that keeps something from backward to backward is reached from its own backward, also from a compiled one.
#
# A compiled graph holds tensors and numbers: the layer is known to it by its number, and all that the backward does is one opaque
# operation. So the share that was realised, the average and the messages to other processes are those of the eager layer.
from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from affine_divergence.functional._geometry import Geometry

if TYPE_CHECKING:
    from affine_divergence.gradient._batch import Corrected


class Correcting(Protocol):
    """A layer that corrects the gradients of its own parameters."""

    def corrected(self, g: Tensor, x: Tensor, weight: Tensor, needed: tuple[bool, bool], geometry: Geometry, /) -> Corrected: ...


_layers: WeakValueDictionary[int, Correcting] = WeakValueDictionary()
_numbers = itertools.count()


def number_of(layer: Correcting) -> Tensor:
    """A number by which this layer is found as long as it lives; a tensor, since torch.compile would make a graph for each int."""
    number = next(_numbers)
    _layers[number] = layer
    return torch.tensor(number, device="cpu")


@dataclass(frozen=True)
class LayerGradients:
    """What a layer carries to the backward."""

    geometry: Geometry
    number: Tensor
    layer: Correcting | None  # kept alive until the backward, but by a compiled graph

    @staticmethod
    def of(geometry: Geometry, number: Tensor) -> LayerGradients:
        """Those of the layer with a number."""
        return LayerGradients(geometry, number, None if torch.compiler.is_compiling() else _found(number))

    def __call__(self, g: Tensor, x: Tensor, weight: Tensor, needed: tuple[bool, bool]) -> tuple[Tensor | None, Tensor | None]:
        if self.layer is None:
            weight_grad, bias_grad = _corrected(g, x, weight, *needed, _as_numbers(self.geometry), self.number)
            return weight_grad if needed[0] else None, bias_grad if needed[1] else None
        corrected = self.layer.corrected(g, x, weight, needed, self.geometry)
        return corrected.weight, corrected.bias


def _found(number: Tensor) -> Correcting:
    layer = _layers.get(int(number))
    if layer is None:
        raise RuntimeError(
            "a batch-corrected layer was deleted before the backward of its compiled forward, which asks it for its options; "
            "keep the layer until then"
        )
    return layer


# Not for CUDA graphs: they would replay the kernels without the layer's own bookkeeping.
@torch.library.custom_op(
    "affine_divergence::batch_corrected",
    mutates_args=(),
    schema="(Tensor g, Tensor x, Tensor weight, bool weight_learns, bool bias_learns, SymInt[] geometry, Tensor layer) -> (Tensor, Tensor)",
    tags=(torch.Tag.cudagraph_unsafe,),
)
def _corrected(
    g: Tensor, x: Tensor, weight: Tensor, weight_learns: bool, bias_learns: bool, geometry: Sequence[int], layer: Tensor
) -> tuple[Tensor, Tensor]:
    needed = weight_learns, bias_learns
    corrected = _found(layer).corrected(g, x, weight, needed, _from_numbers(geometry, weight))
    weight_grad, bias_grad = (g.new_empty(0) if t is None else t.to(weight.dtype).contiguous() for t in corrected[:2])
    return weight_grad, bias_grad


@_corrected.register_fake
def _(
    g: Tensor, x: Tensor, weight: Tensor, weight_learns: bool, bias_learns: bool, geometry: Sequence[int], layer: Tensor
) -> tuple[Tensor, Tensor]:
    weight_grad = weight.new_empty(weight.shape) if weight_learns else g.new_empty(0)
    return weight_grad, weight.new_empty(weight.shape[0]) if bias_learns else g.new_empty(0)


def _as_numbers(geometry: Geometry) -> list[int]:
    return [*geometry.stride, *geometry.padding, *geometry.dilation, *geometry.extra, geometry.groups]


def _from_numbers(numbers: Sequence[int], weight: Tensor) -> Geometry:
    dims = weight.dim() - 2
    stride, padding, dilation, extra = (tuple(numbers[i * dims : (i + 1) * dims]) for i in range(4))
    return Geometry(tuple(weight.shape[2:]), stride, padding, dilation, numbers[-1], extra, (0,) * dims)
