# What each method does around one affine layer, forward and backward, for the replicas of a stack that use it.
#
# Layout: activations a (K, B, d), K replicas of B rows; before the first layer all replicas share the images (B, d).
# `enter` maps a to the layer's input, `leave` the layer's output to z; the two backward maps go the other way, in the
# order leave_backward, enter_backward, and return gradients of the same shapes. No method has parameters.
from __future__ import annotations

import torch
from torch import Tensor

from affine_divergence.functional._rows import DEFAULT_EPS
from affine_divergence.lab.trial import Method

TORCH_EPS = 1e-5  # nn.BatchNorm's and nn.LayerNorm's default; nn.RMSNorm's is float32's epsilon
MOMENTUM = 0.1


class Plain:
    """No correction: the layer's input and output as they are."""

    def enter(self, a: Tensor, training: bool) -> Tensor:
        return a

    def leave(self, y: Tensor) -> Tensor:
        return y

    def leave_backward(self, dz: Tensor) -> Tensor:
        return dz

    def enter_backward(self, dx: Tensor) -> Tensor:
        return dx


class RowNorm(Plain):
    """x̂ = (a − μ)/√(v + ε) with v = Σ or mean of squares over the row; μ = 0 where it is not centred."""

    def __init__(self, *, centred: bool, summed: bool, eps: float) -> None:
        self.centred, self.summed, self.eps = centred, summed, eps

    def enter(self, a: Tensor, training: bool) -> Tensor:
        if self.centred:
            a = a - a.mean(-1, keepdim=True)
        self._inverse = (self._total(a.square()) + self.eps).rsqrt_()
        self._normalised = a * self._inverse
        return self._normalised

    def enter_backward(self, dx: Tensor) -> Tensor:
        da = dx - self._normalised * self._total(dx * self._normalised)
        if self.centred:
            da -= dx.mean(-1, keepdim=True)
        return da.mul_(self._inverse)

    def _total(self, values: Tensor) -> Tensor:
        return values.sum(-1, keepdim=True) if self.summed else values.mean(-1, keepdim=True)


class BatchNorm(Plain):
    """Features centred and scaled over the batch; by running statistics outside training and for one row, which torch refuses."""

    def __init__(self, leading: tuple[int, ...], features: int, dtype: torch.dtype) -> None:
        self.running_mean = torch.zeros(*leading, 1, features, dtype=dtype)
        self.running_var = torch.ones(*leading, 1, features, dtype=dtype)

    def enter(self, a: Tensor, training: bool) -> Tensor:
        rows = a.shape[-2]
        self._batch_statistics = training and rows > 1
        if self._batch_statistics:
            mean = a.mean(-2, keepdim=True)
            a = a - mean  # in two passes: torch.var_mean over rows took five times as long
            var = a.square().mean(-2, keepdim=True)
            self.running_mean.lerp_(mean, MOMENTUM)
            self.running_var.lerp_(var * (rows / (rows - 1)), MOMENTUM)
        else:
            a, var = a - self.running_mean, self.running_var
        self._inverse = (var + TORCH_EPS).rsqrt_()
        self._normalised = a.mul_(self._inverse)
        return self._normalised

    def enter_backward(self, dx: Tensor) -> Tensor:
        if not self._batch_statistics:
            return dx * self._inverse
        da = dx - self._normalised * (dx * self._normalised).mean(-2, keepdim=True)
        return da.sub_(dx.mean(-2, keepdim=True)).mul_(self._inverse)


class AffineLike(Plain):
    """z = s·y with s = (‖a‖² + 1)^(−1/2)."""

    def enter(self, a: Tensor, training: bool) -> Tensor:
        self._input = a
        self._scale = (a.square().sum(-1, keepdim=True) + 1.0).rsqrt_()
        return a

    def leave(self, y: Tensor) -> Tensor:
        self._output = y * self._scale
        return self._output

    def leave_backward(self, dz: Tensor) -> Tensor:
        self._radial = (dz * self._output).sum(-1, keepdim=True)
        return dz * self._scale

    def enter_backward(self, dx: Tensor) -> Tensor:
        return torch.addcmul(dx, self._input, self._scale.square() * self._radial, value=-1.0)


def make_method(method: Method, leading: tuple[int, ...], features: int, dtype: torch.dtype) -> Plain:
    """The method before a layer of that many input features; leading is (K,) or, before the first layer, ()."""
    match method:
        case "none":
            return Plain()
        case "batch-norm":
            return BatchNorm(leading, features, dtype)
        case "layer-norm":
            return RowNorm(centred=True, summed=False, eps=TORCH_EPS)
        case "rms-norm":
            return RowNorm(centred=False, summed=False, eps=DEFAULT_EPS)
        case "norm-like":
            return RowNorm(centred=False, summed=True, eps=DEFAULT_EPS)
        case "affine-like":
            return AffineLike()
