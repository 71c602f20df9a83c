# Slopes: how a score of one seed changes along an axis.
from __future__ import annotations

import math
from collections.abc import Sequence


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Least squares: Σ(x − x̄)(y − ȳ)/Σ(x − x̄)².

    >>> slope([0.0, 1.0, 3.0], [5.0, 7.0, 11.0])
    2.0
    """
    if len(set(x)) < 2:
        raise ValueError(f"a slope needs two different places at least, got {list(x)}")
    x_mean, y_mean = math.fsum(x) / len(x), math.fsum(y) / len(y)
    products = math.fsum((a - x_mean) * (b - y_mean) for a, b in zip(x, y, strict=True))
    return products / math.fsum((a - x_mean) ** 2 for a in x)


def curvature(x: Sequence[float], y: Sequence[float]) -> float:
    """The coefficient of x² in the least-squares parabola: below 0 for a curve that rises and then falls.

    >>> round(curvature([0.0, 1.0, 2.0, 4.0], [1.0, 0.0, 3.0, 21.0]), 9)
    2.0
    """
    if len(set(x)) < 3:
        raise ValueError(f"a curvature needs at least three different places, got {list(x)}")
    squares = [a * a for a in x]
    rate, x_mean, mean = slope(x, squares), math.fsum(x) / len(x), math.fsum(squares) / len(x)
    bend = [square - mean - rate * (a - x_mean) for a, square in zip(x, squares, strict=True)]  # x² without its straight line
    return math.fsum(a * b for a, b in zip(bend, y, strict=True)) / math.fsum(a * a for a in bend)
