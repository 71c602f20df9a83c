# Wrong arguments are refused with what was wanted, what came and the way out.
from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from maps import Map, every_kind

from affine_divergence.functional import affine_like_linear, norm_like_linear
from affine_divergence.nn import AffineLikeLinear, L2Norm, NormLikeLinear

X, WEIGHT, BIAS = torch.ones(2, 3), torch.ones(4, 3), torch.ones(4)


def _refused(error: type[Exception], message: str, function: Any, *args: Any, **kwargs: Any) -> None:
    with pytest.raises(error, match=re.escape(message)):
        function(*args, **kwargs)


@every_kind
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([[1.0, 2.0]], WEIGHT), "x must be a torch.Tensor, got list; convert it with torch.as_tensor"),
        ((np.ones((2, 3)), WEIGHT), "x must be a torch.Tensor, got ndarray"),
        ((None, WEIGHT), "x must be a torch.Tensor, got NoneType"),
        ((X, 1.0), "weight must be a torch.Tensor, got float"),
        ((X, WEIGHT, True), "bias must be a torch.Tensor, got bool"),
        ((X.int(), WEIGHT), "x must be a real floating-point tensor, got torch.int32; convert it first, as with x.float()"),
        ((X.bool(), WEIGHT), "x must be a real floating-point tensor, got torch.bool"),
        ((X.cfloat(), WEIGHT), "x must be a real floating-point tensor, got torch.complex64"),
        ((X, WEIGHT.long()), "weight must be a real floating-point tensor, got torch.int64; convert it first, as with weight.float()"),
        ((X, WEIGHT, BIAS.long()), "bias must be a real floating-point tensor, got torch.int64; convert it first, as with bias.float()"),
    ],
)
def test_anything_but_real_floating_point_tensors_is_a_type_error(map_: Map, arguments: tuple[Any, ...], message: str) -> None:
    _refused(TypeError, message, map_.function, *arguments)


@every_kind
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((X, BIAS), "weight must have the shape (d_out, d_in), got (4,)"),
        ((X, WEIGHT.unsqueeze(0)), "weight must have the shape (d_out, d_in), got (1, 4, 3)"),
        ((X.mT, WEIGHT), "x must have the shape (…, 3) to go with a weight of shape (d_out, d_in) = (4, 3), got (3, 2)"),
        ((torch.tensor(1.0), WEIGHT), "x must have the shape (…, 3) to go with a weight of shape (d_out, d_in) = (4, 3), got ()"),
        ((torch.ones(2, 1), WEIGHT), "got (2, 1)"),  # it would broadcast
        ((X, WEIGHT, torch.ones(3)), "bias must have the shape (d_out,) = (4,), got (3,)"),
        ((X, WEIGHT, torch.ones(1)), "bias must have the shape (d_out,) = (4,), got (1,)"),  # so would these
        ((X, WEIGHT, torch.ones(2, 4)), "bias must have the shape (d_out,) = (4,), got (2, 4)"),
    ],
)
def test_shapes_that_do_not_fit_are_a_value_error_even_where_they_would_broadcast(
    map_: Map, arguments: tuple[Any, ...], message: str
) -> None:
    _refused(ValueError, message, map_.function, *arguments)


TAKES_GAIN = {
    "affine_like_linear": lambda gain: affine_like_linear(X, WEIGHT, BIAS, gain=gain),
    "norm_like_linear": lambda gain: norm_like_linear(X, WEIGHT, BIAS, gain=gain),
    "AffineLikeLinear": lambda gain: AffineLikeLinear(3, 4, gain=gain),
    "NormLikeLinear": lambda gain: NormLikeLinear(3, 4, gain=gain),
}
takes_gain = pytest.mark.parametrize("make", TAKES_GAIN.values(), ids=TAKES_GAIN)

TAKES_EPS = {
    "norm_like_linear": lambda eps: norm_like_linear(X, WEIGHT, BIAS, eps=eps),
    "NormLikeLinear": lambda eps: NormLikeLinear(3, 4, eps=eps),
    "L2Norm": lambda eps: L2Norm(eps=eps),
}
takes_eps = pytest.mark.parametrize("make", TAKES_EPS.values(), ids=TAKES_EPS)


@takes_gain
@pytest.mark.parametrize(
    ("gain", "error", "message"),
    [
        (0.0, ValueError, "gain must be positive, got 0.0; 1.0 leaves the map as the formula states it"),
        (-1, ValueError, "gain must be positive, got -1"),
        (float("inf"), ValueError, "gain must be finite, got inf"),
        (float("nan"), ValueError, "gain must be finite, got nan"),
        (None, TypeError, "gain must be a number, got NoneType"),
        (True, TypeError, "gain must be a number, got bool"),
    ],
)
def test_a_gain_that_is_no_positive_number_is_refused(make: Any, gain: Any, error: type[Exception], message: str) -> None:
    _refused(error, message, make, gain)


@pytest.mark.parametrize("function", [affine_like_linear, norm_like_linear])
def test_functions_refuse_the_gain_auto_of_the_layers(function: Any) -> None:
    _refused(TypeError, "gain must be a number, got str", lambda gain: function(X, WEIGHT, BIAS, gain=gain), "auto")


@takes_gain
@pytest.mark.parametrize("gain", [torch.tensor(2.0), torch.nn.Parameter(torch.tensor(2.0))], ids=["tensor", "parameter"])
def test_a_tensor_is_refused_as_gain_since_it_would_not_learn(make: Any, gain: torch.Tensor) -> None:
    _refused(TypeError, "a learnable one would not get its gradient: multiply the output by it instead", make, gain)


@takes_eps
@pytest.mark.parametrize(
    ("eps", "error", "message"),
    [
        (-1e-9, ValueError, "eps must be zero or positive, got -1e-09; it is added to the squared norm under the root"),
        (float("inf"), ValueError, "eps must be finite, got inf"),
        (float("nan"), ValueError, "eps must be finite, got nan"),
        ("1e-5", TypeError, "eps must be a number, got str"),
        (False, TypeError, "eps must be a number, got bool"),
        (torch.tensor(1e-5), TypeError, "eps must be a number, got Tensor"),
    ],
)
def test_an_eps_that_is_no_number_from_zero_up_is_refused(make: Any, eps: Any, error: type[Exception], message: str) -> None:
    _refused(error, message, make, eps)


@takes_eps
@pytest.mark.parametrize("eps", [None, 0.0, 0, 1e-12, 1])
def test_zero_none_and_whole_numbers_are_allowed_as_eps(make: Any, eps: float | None) -> None:
    make(eps)


@takes_gain
@pytest.mark.parametrize("gain", [1, 2.5, 1e-3, np.float64(2.0)])
def test_every_positive_number_is_allowed_as_gain(make: Any, gain: float) -> None:
    make(gain)


def test_the_affine_like_map_takes_no_eps() -> None:
    for function, arguments in ((affine_like_linear, (X, WEIGHT)), (AffineLikeLinear, (3, 4))):
        _refused(TypeError, "unexpected keyword argument 'eps'", function, *arguments, eps=1e-5)


def test_options_are_given_by_name() -> None:
    _refused(TypeError, "positional arguments", affine_like_linear, X, WEIGHT, BIAS, 2.0)
    _refused(TypeError, "positional arguments", norm_like_linear, X, WEIGHT, BIAS, 2.0)
    _refused(TypeError, "positional arguments", AffineLikeLinear, 3, 4, True, None, None, 2.0)
    _refused(TypeError, "positional arguments", NormLikeLinear, 3, 4, True, None, None, 2.0)
    _refused(TypeError, "positional argument", L2Norm, 1e-5)


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [([1.0], TypeError, "x must be a torch.Tensor, got list"), (torch.ones(3, dtype=torch.long), TypeError, "got torch.int64")],
)
def test_l2_norm_refuses_what_is_no_floating_point_tensor(x: Any, error: type[Exception], message: str) -> None:
    _refused(error, message, L2Norm(), x)


def test_l2_norm_of_a_number_without_dimensions_is_a_value_error() -> None:
    _refused(ValueError, "x must have the shape (…, d), got ()", L2Norm(), torch.tensor(2.0))
