# s = (‖·‖² + offset)^(−1/2) and t = c·s: what tells the affine-like map from the norm-like one, for rows and for patches.
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from affine_divergence.functional._rows import inverse_root

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Scale:
    """Which of the two maps it is: the gain c, what is added to the squared norm, and whether s multiplies the bias too."""

    gain: float
    offset: float
    scales_bias: bool

    def __call__(self, sqnorm: Tensor) -> tuple[Tensor, Tensor]:
        """Of squared norms, their s and t = c·s."""
        s = inverse_root(sqnorm, self.offset)
        return s, s if self.gain == 1.0 else self.gain * s


def affine_like(gain: float) -> Scale:
    """That of z = c s (W x + b), with 1 under the root."""
    return Scale(gain, offset=1.0, scales_bias=True)


def norm_like(gain: float, eps: float) -> Scale:
    """That of z = c (s W x + b), with ε under the root."""
    return Scale(gain, offset=eps, scales_bias=False)
