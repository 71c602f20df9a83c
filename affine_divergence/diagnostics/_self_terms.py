# G_ii of a corrected layer and of the plain one it is a correction of, at one call, by the maps of the table in _kinds.
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from affine_divergence.diagnostics._kinds import KINDS, Kind
from affine_divergence.diagnostics._maps import ConvMap, LinearMap, SampleMap, ScaledMap

if TYPE_CHECKING:
    from torch import Tensor, nn

_KINDS = {cls: kind for cls, kind in KINDS.items() if kind.correction not in ("none", "batch")}
CORRECTED = tuple(_KINDS)
"""The types of the layers whose corrected G_ii is known of a row alone; that of the batch correction hangs on the other rows."""


@dataclass(frozen=True)
class CorrectedCall:
    """A call of a layer of these types: what it was given and what it returned."""

    layer: Any
    x: Tensor
    options: Sequence[Any]
    z: Tensor

    def corrected(self) -> Tensor:
        """G_ii of the layer, of each row, in float64."""
        map_ = self._map()
        return self._self_term(map_ if isinstance(map_, ScaledMap) else SampleMap(map_))

    def plain(self) -> Tensor:
        """G_ii without the correction: ‖row‖² + 1, of what learns."""
        return self._self_term(self._plain_map())

    def uncorrected(self) -> Tensor:
        """The output without the correction, in the dtype of the corrected one: the layers that follow count on it."""
        weight, bias = (None if p is None else p.to(self.z.dtype) for p in (self.layer.weight, self.layer.bias))
        vectors = self._plain_map().product(self._batched(self.x).to(self.z.dtype), weight, bias)
        return vectors.reshape(self.z.shape)

    def _self_term(self, map_: LinearMap | ConvMap | ScaledMap | SampleMap) -> Tensor:
        needed = tuple(p is not None and p.requires_grad for p in (self.layer.weight, self.layer.bias))
        return map_.self_term(self._batched(self.x).double(), map_.vectors(self._batched(self.z)).double(), (needed[0], needed[1]))

    def _plain_map(self) -> LinearMap | ConvMap:
        map_ = self._map()
        return map_.inner if isinstance(map_, ScaledMap) else map_

    def _map(self) -> LinearMap | ConvMap | ScaledMap:
        map_ = _kind(self.layer).map_of(self.layer, self.x, self.options)
        assert isinstance(map_, LinearMap | ConvMap | ScaledMap)
        return map_

    def _batched(self, tensor: Tensor) -> Tensor:
        # Of an image alone, a batch of one; leading axes of a linear layer are all rows.
        alone = tensor.dim() == len(getattr(self.layer, "kernel_size", ())) + 1
        return tensor.unsqueeze(0) if alone else tensor


def _kind(layer: nn.Module) -> Kind:
    return next(kind for cls, kind in _KINDS.items() if isinstance(layer, cls))
