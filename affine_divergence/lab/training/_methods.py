# What each method does around one affine layer, for the replicas of a stack that use it.
#
# Every method but BatchNorm works on rows: with a' the row a, or a less its mean (LayerNorm), the layer is
#     z = s·(Wa') + b, or s·(Wa' + b) (affine-like),   s = (α‖a'‖² + β)^(−1/2),
# so that four of them share one product before the first layer, where a is the image, and differ in α and β alone.
# BatchNorm works on columns and gives the layer x = (a − μ)/√(v + ε). No method has parameters. The gradient-only corrections
# have the layer of none: `_gradient_only` says how they step.
from __future__ import annotations

import torch
from torch import Tensor

from affine_divergence.functional._rows import DEFAULT_EPS
from affine_divergence.lab.trial import GRADIENT_ONLY, Method

TORCH_EPS = 1e-5  # nn.BatchNorm's and nn.LayerNorm's default; nn.RMSNorm's is float32's epsilon
MOMENTUM = 0.1
LEAKY_SLOPE = 0.01

# The replicas' order in a stack: those that are treated together stand side by side.
SCALED: tuple[Method, ...] = ("rms-norm", "norm-like", "affine-like", "layer-norm")
ORDER: tuple[Method, ...] = ("batch-norm", "none", *GRADIENT_ONLY, *SCALED)


def scale_rule(method: Method, features: int) -> tuple[float, float]:
    """α and β of a method that scales rows of that many features."""
    match method:
        case "rms-norm":
            return 1.0 / features, DEFAULT_EPS
        case "norm-like":
            return 1.0, DEFAULT_EPS
        case "affine-like":
            return 1.0, 1.0
        case "layer-norm":
            return 1.0 / features, TORCH_EPS
        case _:
            raise ValueError(f"{method} scales no rows")


class BatchNorm:
    """Features centred and scaled over the batch; by running statistics outside training and for one row, which torch refuses.

    Layout: (…, B, features), normalised in place over B.
    """

    def __init__(self, leading: tuple[int, ...], features: int, like: Tensor) -> None:
        self.running_mean = like.new_zeros(*leading, 1, features)
        self.running_var = like.new_ones(*leading, 1, features)

    def keep(self, index: Tensor) -> None:
        """Go on with some of the replicas."""
        self.running_mean, self.running_var = self.running_mean[index], self.running_var[index]

    def normalise_(self, a: Tensor, training: bool) -> Tensor:
        rows = a.shape[-2]
        self._batch_statistics = training and rows > 1
        if self._batch_statistics:
            mean = a.mean(-2, keepdim=True)
            a -= mean  # in two passes: torch.var_mean over rows took five times as long
            var = a.square().mean(-2, keepdim=True)
            self.running_mean.lerp_(mean, MOMENTUM)
            self.running_var.lerp_(var * (rows / (rows - 1)), MOMENTUM)
        else:
            a -= self.running_mean
            var = self.running_var
        self._inverse = (var + TORCH_EPS).rsqrt_()
        self._normalised = a.mul_(self._inverse)
        return self._normalised

    def backward_(self, dx: Tensor) -> None:
        if self._batch_statistics:
            radial = (dx * self._normalised).mean(-2, keepdim=True)
            dx -= dx.mean(-2, keepdim=True)
            dx.addcmul_(self._normalised, radial, value=-1.0)
        dx *= self._inverse


class RowScale:
    """s = (α‖a‖² + β)^(−1/2) of every row, with its derivative. Layout: (K, B, 1)."""

    def __init__(self, methods: list[Method], features: int, like: Tensor) -> None:
        rules = torch.tensor([scale_rule(method, features) for method in methods], dtype=torch.float64).to(like).view(-1, 2, 1, 1)
        self.alpha, self.beta = rules[:, 0], rules[:, 1]

    def scale(self, square: Tensor) -> Tensor:
        """The scale s of rows with the squared norms ‖a‖², (K, B, 1)."""
        return torch.addcmul(self.beta, self.alpha, square).rsqrt_()

    def curvature(self, s: Tensor) -> Tensor:
        """−α s³: ds = curvature · (a · da)."""
        return s.pow(3).mul_(self.alpha).neg_()
