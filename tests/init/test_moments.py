# The Gaussian moments of activation functions, against quadrature by another rule.
from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy.integrate import fixed_quad, quad

from affine_divergence.init._moments import NONLINEARITIES, joint_moment, joint_slope, second_moment, slope_moment, variance_for

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


@pytest.mark.parametrize("cosine", [-0.7, 0.0, 0.4, 0.95])
@pytest.mark.parametrize("nonlinearity", NONLINEARITIES)
def test_joint_moments_match_adaptive_quadrature(nonlinearity: str, cosine: float) -> None:
    q = 0.8
    for measured, of in zip((joint_moment, joint_slope), FUNCTIONS[nonlinearity], strict=True):

        def inner(a: float, of: Callable[[float], float] = of) -> float:
            # E of φ(√q(r a + √(1 − r²) b)) over b, split where the kink of a ReLU lies.
            aside = math.sqrt(1.0 - cosine**2)
            kink = min(max(-cosine * a / aside, -9.0), 9.0)
            parts = [fixed_quad(lambda b: of(math.sqrt(q) * (cosine * a + aside * b)) * normal(b), *part, n=60)[0] for part in
                     ((-9.0, kink), (kink, 9.0))]  # fmt: skip
            return float(of(math.sqrt(q) * a)) * sum(parts) * float(normal(a))

        expected = quad(inner, -9.0, 0.0, epsabs=1e-9)[0] + quad(inner, 0.0, 9.0, epsabs=1e-9)[0]
        assert measured(q, cosine, nonlinearity) == pytest.approx(expected, rel=1e-7, abs=1e-8)


@pytest.mark.parametrize("nonlinearity", NONLINEARITIES)
def test_joint_moments_at_cosine_one_are_those_of_one_variable(nonlinearity: str) -> None:
    assert joint_moment(0.8, 1.0, nonlinearity) == pytest.approx(second_moment(0.8, nonlinearity), rel=1e-12)
    assert joint_slope(0.8, 1.0, nonlinearity) == pytest.approx(slope_moment(0.8, nonlinearity), rel=1e-12)


@pytest.mark.parametrize("nonlinearity", NONLINEARITIES)
def test_joint_slope_is_the_derivative_of_the_joint_moment(nonlinearity: str) -> None:
    q, r, step = 0.8, 0.3, 1e-5
    difference = joint_moment(q, r + step, nonlinearity) - joint_moment(q, r - step, nonlinearity)
    assert joint_slope(q, r, nonlinearity) == pytest.approx(difference / (2.0 * step * q), rel=1e-6)


def test_cosine_beyond_one_is_refused() -> None:
    with pytest.raises(ValueError, match="between -1 and 1"):
        joint_moment(1.0, 1.5, "tanh")


def normal(x: float) -> float:
    return np.exp(-0.5 * x**2) / math.sqrt(2.0 * math.pi)
