# How far a step moves the outputs of a layer at one call: G_ii of the layer, and of the plain layer that it corrects.
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import nn

from affine_divergence.diagnostics._kinds import KINDS, Kind, kind_of
from affine_divergence.diagnostics._maps import ConvMap, LinearMap, SampleMap, ScaledMap

if TYPE_CHECKING:
    from torch import Tensor

_KINDS = {cls: kind for cls, kind in KINDS.items() if kind.correction not in ("none", "batch")}
CORRECTED = tuple(_KINDS)
"""Layer types with a correction whose G_ii depends on one row alone; in the batch correction it depends on the other rows too."""


def is_measured(module: nn.Module) -> bool:
    """Whether it is a linear or convolutional layer, plain or of these types."""
    kind, _ = kind_of(module)
    return isinstance(module, CORRECTED) or (kind is not None and kind.correction == "none" and not isinstance(module, nn.Embedding))


@dataclass(frozen=True)
class LayerCall:
    """A call of such a layer: its input, further arguments and output; as the plain layer where its correction is left out."""

    layer: Any
    x: Tensor
    options: Sequence[Any]
    z: Tensor
    is_plain: bool = False

    def plain(self) -> LayerCall:
        """The same call of the plain layer."""
        return replace(self, is_plain=True)

    def multiplier(self) -> Tensor:
        """G_ii of each row, in float64: how far a gradient step moves it, in units of its own gradient."""
        map_, sample = self._map(), self._kind().correction == "sample" and not self.is_plain
        return self._self_term(SampleMap(map_) if sample and not isinstance(map_, ScaledMap) else map_)

    def row_sqnorm(self) -> Tensor:
        """‖r_i‖² of each row r_i that the learnable parameters multiply in the forward pass, in float64."""
        return self._self_term(self._map())

    def uncorrected(self) -> Tensor:
        """The output without the correction, in the dtype of the corrected one: the layers that follow count on it."""
        weight, bias = (None if p is None else p.to(self.z.dtype) for p in (self.layer.weight, self.layer.bias))
        vectors = self.plain()._map().product(self._batched(self.x).to(self.z.dtype), weight, bias)
        return vectors.reshape(self.z.shape)

    def _self_term(self, map_: LinearMap | ConvMap | ScaledMap | SampleMap) -> Tensor:
        needed = tuple(p is not None and p.requires_grad for p in (self.layer.weight, self.layer.bias))
        return map_.self_term(self._batched(self.x).double(), map_.vectors(self._batched(self.z)).double(), (needed[0], needed[1]))

    def _map(self) -> LinearMap | ConvMap | ScaledMap:
        map_ = self._kind().map_of(self.layer, self.x, self.options)
        assert isinstance(map_, LinearMap | ConvMap | ScaledMap)
        return map_.inner if self.is_plain and isinstance(map_, ScaledMap) else map_

    def _kind(self) -> Kind:
        found = next((kind for cls, kind in _KINDS.items() if isinstance(self.layer, cls)), None) or kind_of(self.layer)[0]
        assert found is not None
        return found

    def _batched(self, tensor: Tensor) -> Tensor:
        # Of an image alone, a batch of one; leading axes of a linear layer are all rows.
        alone = tensor.dim() == len(getattr(self.layer, "kernel_size", ())) + 1
        return tensor.unsqueeze(0) if alone else tensor
