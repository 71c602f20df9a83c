# Gaussian moments of an activation function: what mean-field theory needs to know of it.
#
# For a pre-activation z = √q ζ with ζ ~ N(0, 1):
#     second moment   E φ(z)²     the mean square that the next layer gets
#     slope moment    E φ′(z)²    the factor by which φ changes the mean square of a gradient
# and for two of them, z and z′, of one variance q and cosine (correlation) r:
#     joint moment    E φ(z) φ(z′)      the mean product that two samples' activations have
#     joint slope     E φ′(z) φ′(z′)    its derivative by q r (Price's theorem)
# Names are those of torch.nn.init.calculate_gain. Integrals are sums over an even grid: for a smooth function times a Gaussian these
# converge faster than any power of the spacing.
from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

LEAKY_SLOPE = 0.01  # the default of torch.nn.LeakyReLU
NONLINEARITIES = ("linear", "tanh", "relu", "leaky_relu")
_ZETA = np.linspace(-12.0, 12.0, 4801)
_GRID = np.linspace(-9.0, 9.0, 361)
_GRID_WEIGHT = np.exp(-0.5 * _GRID**2) / math.sqrt(2.0 * math.pi) * (_GRID[1] - _GRID[0])
_WEIGHT = np.exp(-0.5 * _ZETA**2) / math.sqrt(2.0 * math.pi) * (_ZETA[1] - _ZETA[0])


def second_moment(q: float, nonlinearity: str) -> float:
    """E φ(√q ζ)².

    >>> second_moment(2.0, "relu")
    1.0
    """
    if _kinked(nonlinearity):
        return 0.5 * q * (1.0 + _slope(nonlinearity) ** 2)
    return float(_WEIGHT @ np.tanh(math.sqrt(q) * _ZETA) ** 2)


def slope_moment(q: float, nonlinearity: str) -> float:
    """E φ′(√q ζ)².

    >>> slope_moment(2.0, "relu")
    0.5
    """
    if _kinked(nonlinearity):
        return 0.5 * (1.0 + _slope(nonlinearity) ** 2)
    return float(_WEIGHT @ (1.0 - np.tanh(math.sqrt(q) * _ZETA) ** 2) ** 2)


def joint_moment(q: float, r: float, nonlinearity: str) -> float:
    """E φ(z) φ(z′) of two pre-activations of variance q and cosine r.

    >>> joint_moment(2.0, 1.0, "relu") == second_moment(2.0, "relu")
    True
    """
    _check_cosine(r)
    if _kinked(nonlinearity):
        even, odd = _even_and_odd(nonlinearity)
        # E|a||b| of unit normal a, b with cosine r: the arc-cosine kernel of degree 1.
        absolute = 2.0 / math.pi * (math.sqrt((1.0 - r) * (1.0 + r)) + r * math.asin(r))
        return q * (odd**2 * r + even**2 * absolute)
    return _mean_product(np.tanh, q, r)


def joint_slope(q: float, r: float, nonlinearity: str) -> float:
    """E φ′(z) φ′(z′) of two pre-activations of variance q and cosine r.

    >>> joint_slope(2.0, 0.0, "relu")
    0.25
    """
    _check_cosine(r)
    if _kinked(nonlinearity):
        even, odd = _even_and_odd(nonlinearity)
        return odd**2 + even**2 * 2.0 / math.pi * math.asin(r)
    return _mean_product(lambda z: 1.0 - np.tanh(z) ** 2, q, r)


def variance_for(moment: float, nonlinearity: str) -> float:
    """The variance q of the pre-activation at which E φ(√q ζ)² is the given moment.

    Raises ValueError where no variance gives it: a Tanh has mean squares below 1 only.

    >>> variance_for(1.0, "relu")
    2.0
    """
    if _kinked(nonlinearity):
        return 2.0 * moment / (1.0 + _slope(nonlinearity) ** 2)
    if not moment < 0.99:
        raise ValueError(f"tanh gives mean squares below 1, and near 1 it is saturated; got {moment:g}, want less than 0.99")
    low, high = moment, 1.0  # tanh² z < z², so the variance is larger than the moment
    while second_moment(high, nonlinearity) < moment:
        low, high = high, 2.0 * high
    while high - low > 1e-15 * high:
        middle = 0.5 * (low + high)
        if middle in (low, high):
            break
        low, high = (middle, high) if second_moment(middle, nonlinearity) < moment else (low, middle)
    return high


def _mean_product(of: Callable[[NDArray[np.float64]], NDArray[np.float64]], q: float, r: float) -> float:
    # z = √q a and z′ = √q (r a + √(1 − r²) b) with a and b independent.
    a, b = _GRID[:, None], _GRID[None, :]
    other = of(math.sqrt(q) * (r * a + math.sqrt((1.0 - r) * (1.0 + r)) * b)) @ _GRID_WEIGHT
    return float((_GRID_WEIGHT * of(math.sqrt(q) * _GRID)) @ other)


def _even_and_odd(nonlinearity: str) -> tuple[float, float]:
    # φ(z) = odd · z + even · |z|
    slope = _slope(nonlinearity)
    return 0.5 * (1.0 - slope), 0.5 * (1.0 + slope)


def _check_cosine(r: float) -> None:
    if not -1.0 <= r <= 1.0:
        raise ValueError(f"expected a cosine between -1 and 1, got {r!r}")


def _kinked(nonlinearity: str) -> bool:
    # Whether the function is linear on either side of 0, so that its moments have a closed form.
    if nonlinearity not in NONLINEARITIES:
        raise ValueError(f"nonlinearity must be one of {', '.join(NONLINEARITIES)}, got {nonlinearity!r}")
    return nonlinearity != "tanh"


def _slope(nonlinearity: str) -> float:
    return {"linear": 1.0, "relu": 0.0, "leaky_relu": LEAKY_SLOPE}[nonlinearity]
