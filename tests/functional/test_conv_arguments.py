# Wrong arguments to the convolutions are refused with what was wanted, what came and the way out.
from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from conv_maps import FUNCTIONS
from torch import Tensor

import affine_divergence.functional as AF

X, WEIGHT, BIAS = torch.ones(2, 3, 5, 5), torch.ones(4, 3, 2, 2), torch.ones(4)
TX, TWEIGHT = torch.ones(2, 3, 5, 5), torch.ones(3, 4, 2, 2)

both = pytest.mark.parametrize("kind", ["affine-like", "norm-like"])


def _refused(error: type[Exception], message: str, function: Any, *args: Any, **kwargs: Any) -> None:
    with pytest.raises(error, match=re.escape(message)):
        function(*args, **kwargs)


@both
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([[1.0]], WEIGHT), "x must be a torch.Tensor, got list; convert it with torch.as_tensor"),
        ((np.ones((2, 3, 5, 5)), WEIGHT), "x must be a torch.Tensor, got ndarray"),
        ((X.int(), WEIGHT), "x must be a real floating-point tensor, got torch.int32; convert it first, as with x.float()"),
        ((X.cfloat(), WEIGHT), "x must be a real floating-point tensor, got torch.complex64"),
        ((X, WEIGHT.long()), "weight must be a real floating-point tensor, got torch.int64"),
        ((X, WEIGHT, True), "bias must be a torch.Tensor, got bool"),
        ((X, WEIGHT, BIAS.long()), "bias must be a real floating-point tensor, got torch.int64"),
        ((X, WEIGHT, None, 1.0), "stride must be a whole number or 2 of them, got 1.0"),
        ((X, WEIGHT, None, (1, None)), "stride must be a whole number or 2 of them, got (1, None)"),
        ((X, WEIGHT, None, True), "stride must be a whole number or 2 of them, got True"),
        ((X, WEIGHT, None, 1, 0.5), "padding must be a whole number or 2 of them, got 0.5"),
        ((X, WEIGHT, None, 1, 0, "2"), "dilation must be a whole number or 2 of them, got '2'"),
        ((X, WEIGHT, None, 1, 0, 1, 1.0), "groups must be a whole number, got float"),
    ],
)
def test_what_is_of_the_wrong_type_is_a_type_error(kind: str, arguments: tuple[Any, ...], message: str) -> None:
    _refused(TypeError, message, FUNCTIONS[kind, False, 2], *arguments)


@both
@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((X, torch.ones(4, 3, 2)), {}, "weight must have the shape (C_out, C_in/groups, K_h, K_w), none of them 0, got (4, 3, 2)"),
        ((X, torch.ones(4, 3, 0, 2)), {}, "none of them 0, got (4, 3, 0, 2)"),
        ((X[0, 0], WEIGHT), {}, "x must have the shape (N, C_in, H, W) or (C_in, H, W), got (5, 5)"),
        ((X.unsqueeze(0), WEIGHT), {}, "x must have the shape (N, C_in, H, W) or (C_in, H, W), got (1, 2, 3, 5, 5)"),
        (
            (X[:, :2], WEIGHT),
            {},
            "x must have 3 channels to go with a weight of shape (C_out, C_in/groups, K_h, K_w) = (4, 3, 2, 2) and groups = 1, got 2 in "
            "(2, 2, 5, 5)",
        ),
        ((X, WEIGHT), {"groups": 2}, "x must have 6 channels"),
        ((X, WEIGHT), {"groups": 3}, "C_out = 4, the first size of weight, must be divisible by groups = 3"),
        ((X, WEIGHT), {"groups": 0}, "groups must be 1 or more, got 0"),
        ((X, WEIGHT, torch.ones(3)), {}, "bias must have the shape (C_out,) = (4,), got (3,)"),
        ((X, WEIGHT, torch.ones(1)), {}, "bias must have the shape (C_out,) = (4,), got (1,)"),
        ((X, WEIGHT), {"stride": 0}, "stride must be 1 or more, got 0"),
        ((X, WEIGHT), {"stride": (1, -1)}, "stride must be 1 or more, got (1, -1)"),
        ((X, WEIGHT), {"stride": (1, 1, 1)}, "stride must be one number or 2, one for each axis, got (1, 1, 1)"),
        ((X, WEIGHT), {"stride": ()}, "stride must be one number or 2, one for each axis, got ()"),
        ((X, WEIGHT), {"padding": -1}, "padding must be 0 or more, got -1"),
        ((X, WEIGHT), {"padding": "full"}, "padding must be whole numbers, \"same\" or \"valid\", got 'full'"),
        ((X, WEIGHT), {"padding": "same", "stride": 2}, 'padding "same" needs a stride of 1, got (2, 2)'),
        ((X, WEIGHT), {"dilation": 0}, "dilation must be 1 or more, got 0"),
        ((X, WEIGHT), {"dilation": 5}, "the kernel reaches over (6, 6), more than the padded input of size (5, 5)"),
        ((X[..., :1], WEIGHT), {}, "the kernel reaches over (2, 2), more than the padded input of size (5, 1)"),
        ((X, WEIGHT), {"gain": 0.0}, "gain must be positive, got 0.0"),
    ],
)
def test_shapes_and_options_that_do_not_fit_are_a_value_error(
    kind: str, arguments: tuple[Any, ...], options: dict[str, Any], message: str
) -> None:
    _refused(ValueError, message, FUNCTIONS[kind, False, 2], *arguments, **options)


@both
@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((TX, torch.ones(3, 4, 2)), {}, "weight must have the shape (C_in, C_out/groups, K_h, K_w), none of them 0, got (3, 4, 2)"),
        ((TX[:, :2], TWEIGHT), {}, "x must have 3 channels to go with a weight of shape (C_in, C_out/groups, K_h, K_w) = (3, 4, 2, 2)"),
        ((TX, TWEIGHT), {"groups": 2}, "C_in = 3, the first size of weight, must be divisible by groups = 2"),
        ((TX, TWEIGHT, torch.ones(3)), {}, "bias must have the shape (C_out,) = (4,), got (3,)"),
        ((TX, TWEIGHT), {"output_padding": 1}, "output_padding (1, 1) must be smaller than stride (1, 1) or dilation (1, 1) on every axis"),
        ((TX, TWEIGHT), {"output_padding": -1}, "output_padding must be 0 or more, got -1"),
        ((TX, TWEIGHT), {"padding": 3}, "padding (3, 3) takes all of the output: size (5, 5) would become (0, 0); pad less"),
        ((TX, TWEIGHT), {"stride": 0}, "stride must be 1 or more, got 0"),
    ],
)
def test_transposed_shapes_and_options_that_do_not_fit_are_a_value_error(
    kind: str, arguments: tuple[Any, ...], options: dict[str, Any], message: str
) -> None:
    _refused(ValueError, message, FUNCTIONS[kind, True, 2], *arguments, **options)


@both
def test_padding_by_name_is_refused_for_transposed_convolutions(kind: str) -> None:
    _refused(TypeError, "padding must be a whole number or 2 of them, got 'same'", FUNCTIONS[kind, True, 2], TX, TWEIGHT, padding="same")


@both
@pytest.mark.parametrize("transposed", [False, True], ids=["conv", "transposed"])
@pytest.mark.parametrize(
    ("size", "options"),
    [((5, 5), {"stride": 9}), ((1, 1), {"padding": 1}), ((2, 5), {"dilation": (1, 4)}), ((5, 5), {"stride": np.int64(2)})],
    ids=str,
)
def test_what_torch_accepts_is_accepted_with_the_same_shape(
    kind: str, transposed: bool, size: tuple[int, int], options: dict[str, Any]
) -> None:
    x, weight = torch.ones(2, 3, *size), TWEIGHT if transposed else WEIGHT
    plain: Any = torch.nn.functional.conv_transpose2d if transposed else torch.nn.functional.conv2d
    if not plain(x, weight, **options).numel():
        return
    assert FUNCTIONS[kind, transposed, 2](x, weight, **options).shape == plain(x, weight, **options).shape


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=lambda f: f.__name__)
def test_the_arguments_are_those_of_torchs_function_then_options_by_name_only(function: Any) -> None:
    transposed, dims = "transpose" in function.__name__, int(function.__name__[-2])
    geometry = ["stride", "padding", "output_padding", "groups", "dilation"] if transposed else ["stride", "padding", "dilation", "groups"]
    options = ["gain"] if function.__name__.startswith("affine") else ["gain", "eps"]
    code = function.__code__
    assert list(code.co_varnames[: code.co_argcount]) == ["x", "weight", "bias", *geometry]
    assert list(code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]) == options
    defaults = {"stride": 1, "padding": 0, "output_padding": 0, "groups": 1, "dilation": 1}
    assert list(function.__defaults__) == [None, *(defaults[name] for name in geometry)]
    # By position as in torch, with a different number for each.
    numbers = [2, 1, 1, 1, 3] if transposed else [2, 1, 3, 1]
    x, weight = torch.ones(1, 2, *[7] * dims), torch.ones(2, 2, *[2] * dims)
    plain = getattr(torch.nn.functional, f"conv{'_transpose' * transposed}{dims}d")
    assert function(x, weight, None, *numbers).shape == plain(x, weight, None, *numbers).shape


def test_the_affine_like_convolutions_take_no_eps() -> None:
    _refused(TypeError, "unexpected keyword argument 'eps'", AF.affine_like_conv2d, X, WEIGHT, eps=1e-5)
    _refused(TypeError, "unexpected keyword argument 'eps'", AF.affine_like_conv_transpose2d, TX, TWEIGHT, eps=1e-5)


@pytest.mark.parametrize(
    ("error", "message", "arguments", "options"),
    [
        (TypeError, "x must be a torch.Tensor, got list", ([1.0], 2), {}),
        (TypeError, "x must be a real floating-point tensor, got torch.int64", (torch.ones(1, 1, 3).long(), 2), {}),
        (TypeError, "kernel_size must be a whole number or 2 of them, got 2.0", (X, 2.0), {}),
        (ValueError, "kernel_size must be 1 or more, got (0, 2)", (X, (0, 2)), {}),
        (ValueError, "x must have the shape (N, channels, *size), or (channels, *size) with a tuple as kernel_size", (X[0, 0], 2), {}),
        (ValueError, "got (2, 3, 5, 5) and kernel_size (2,)", (X, (2,)), {}),
        (ValueError, "x must have a number of channels that groups = 2 divides, got 3 in (2, 3, 5, 5)", (X, 2), {"groups": 2}),
        (ValueError, "groups must be 1 or more, got -1", (X, 2), {"groups": -1}),
        (ValueError, "the kernel reaches over (6, 6), more than the padded input of size (5, 5)", (X, 6), {}),
        (ValueError, 'padding "same" needs a stride of 1, got (2, 2)', (X, 2, 2, "same"), {}),
        (ValueError, "stride must be 1 or more, got 0", (X, 2, 0), {}),
    ],
)
def test_patch_sqnorm_says_what_it_wanted(
    error: type[Exception], message: str, arguments: tuple[Any, ...], options: dict[str, Any]
) -> None:
    _refused(error, message, AF.patch_sqnorm, *arguments, **options)


def test_a_vector_without_channels_is_no_image() -> None:
    x: Tensor = torch.ones(5)
    _refused(ValueError, "got (5,) and kernel_size 2", AF.patch_sqnorm, x, 2)
