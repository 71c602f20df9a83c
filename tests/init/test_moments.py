# The Gaussian moments of activation functions, against quadrature by another rule.
from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy.integrate import quad

from affine_divergence.init._moments import NONLINEARITIES, second_moment, slope_moment, variance_for

FUNCTIONS = {
    "linear": (lambda z: z, np.ones_like),
    "tanh": (np.tanh, lambda z: 1.0 / np.cosh(z) ** 2),
    "relu": (lambda z: np.maximum(z, 0.0), lambda z: (z > 0.0) * 1.0),
    "leaky_relu": (lambda z: np.where(z > 0.0, z, 0.01 * z), lambda z: np.where(z > 0.0, 1.0, 0.01)),
}


@pytest.mark.parametrize("q", [1e-6, 0.1, 1.0, 7.0])
@pytest.mark.parametrize("nonlinearity", NONLINEARITIES)
def test_moments_match_adaptive_quadrature(nonlinearity: str, q: float) -> None:
    for measured, of in zip((second_moment, slope_moment), FUNCTIONS[nonlinearity], strict=True):

        def density(zeta: float, of: Callable[[float], float] = of) -> float:
            return float(of(math.sqrt(q) * zeta) ** 2 * math.exp(-0.5 * zeta**2) / math.sqrt(2.0 * math.pi))

        expected = quad(density, -12.0, 0.0, epsabs=1e-14)[0] + quad(density, 0.0, 12.0, epsabs=1e-14)[0]
        assert measured(q, nonlinearity) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("moment", [1e-9, 0.01, 0.5, 0.9])
@pytest.mark.parametrize("nonlinearity", NONLINEARITIES)
def test_variance_inverts_the_second_moment(nonlinearity: str, moment: float) -> None:
    assert second_moment(variance_for(moment, nonlinearity), nonlinearity) == pytest.approx(moment, rel=1e-12)


def test_tanh_refuses_a_mean_square_it_cannot_reach() -> None:
    with pytest.raises(ValueError, match="below 1"):
        variance_for(1.5, "tanh")


def test_unknown_nonlinearity_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="linear, tanh, relu, leaky_relu"):
        second_moment(1.0, "softsign")
