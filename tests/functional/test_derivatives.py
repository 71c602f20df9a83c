# First and second derivatives in both modes, by finite differences, away from zero and at a zero row.
from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from maps import AFFINE_LIKE, NORM_LIKE, Map, every_map
from oracles import TOLERANCE, close
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

# torch's own rules for forward mode are loaded through torch.jit.script, which torch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

# x/‖x‖ jumps at zero, so there is no finite difference to compare with there: test_zero_rows has its values.
CASES = [(m, zero_row) for m in [*AFFINE_LIKE, *NORM_LIKE] for zero_row in (False, True) if not zero_row or m.options.get("eps") != 0.0]
every_case = pytest.mark.parametrize(("map_", "zero_row"), CASES, ids=[f"{m}-a-zero-row" if zero_row else str(m) for m, zero_row in CASES])


def _inputs(map_: Map, zero_row: bool) -> list[Tensor]:
    x, *parameters = map_.tensors(3, 2, 3)
    if zero_row:
        x = x.detach().index_fill(0, torch.tensor([1]), 0.0).requires_grad_()
    return [t for t in (x, *parameters) if t is not None]


@every_case
def test_first_derivatives_agree_with_finite_differences_in_both_modes(map_: Map, zero_row: bool) -> None:
    inputs = _inputs(map_, zero_row)
    assert gradcheck(map_, inputs, check_forward_ad=True, check_backward_ad=True, check_batched_grad=True, check_batched_forward_grad=True)


@every_case
def test_second_derivatives_agree_with_finite_differences_reverse_and_forward_over_reverse(map_: Map, zero_row: bool) -> None:
    inputs = _inputs(map_, zero_row)
    eps = 1e-8 if zero_row and map_.kind == "norm-like" and "eps" not in map_.options else 1e-6  # x is to stay far below √ε = 3e-4
    assert gradgradcheck(map_, inputs, eps=eps, check_fwd_over_rev=True, check_rev_over_rev=True, check_batched_grad=True)


@every_map
def test_derivatives_of_batches_and_of_one_row_agree_with_finite_differences(map_: Map) -> None:
    for shape in ((), (2, 2)):
        inputs = [t for t in map_.tensors(3, 2, *shape) if t is not None]
        assert gradcheck(map_, inputs, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True)


@every_map
@pytest.mark.parametrize("index", [0, 1, -1], ids=["x", "weight", "last"])
def test_a_tangent_of_one_input_alone_is_carried_forward(map_: Map, index: int) -> None:
    inputs = [t.detach() for t in map_.tensors(3, 2, 4) if t is not None]
    tangent = torch.randn_like(inputs[index])

    def of_one(function: Any) -> Tensor:
        def varied(t: Tensor) -> Any:
            return function(*(t if i is inputs[index] else i for i in inputs))

        result: Tensor = torch.func.jvp(varied, (inputs[index],), (tangent,))[1]
        return result

    close(of_one(map_), of_one(map_.expected))


@every_map
@pytest.mark.parametrize("length", [1.0, 300.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_tangents_of_narrow_dtypes_are_those_of_the_definition(map_: Map, dtype: torch.dtype, length: float) -> None:
    # Tangents as long as their tensors: x·ẋ of rows of 300 is above float16's 65,504.
    inputs, tangents = ([t.detach() for t in map_.tensors(8, 4, 5, dtype=dtype, seed=seed) if t is not None] for seed in (0, 1))
    inputs[0], tangents[0] = length * inputs[0], length * tangents[0]
    z, tangent = torch.func.jvp(map_, tuple(inputs), tuple(tangents))
    wanted = torch.func.jvp(map_.expected, tuple(t.double() for t in inputs), tuple(t.double() for t in tangents))
    assert z.dtype == tangent.dtype == dtype
    close(z, wanted[0], tolerance=2 * TOLERANCE[dtype])
    close(tangent, wanted[1], tolerance=2 * TOLERANCE[dtype])


@every_map
def test_tangents_under_autocast_are_those_of_the_definition(map_: Map) -> None:
    inputs, tangents = ([t.detach() for t in map_.tensors(8, 4, 5, dtype=torch.float32, seed=seed) if t is not None] for seed in (0, 1))
    with torch.autocast("cpu", torch.bfloat16):
        z, tangent = torch.func.jvp(map_, tuple(inputs), tuple(tangents))
    wanted = torch.func.jvp(map_.expected, tuple(t.double() for t in inputs), tuple(t.double() for t in tangents))[1]
    assert z.dtype == tangent.dtype == torch.bfloat16
    close(tangent, wanted, tolerance=2 * TOLERANCE[torch.bfloat16])


@every_map
def test_the_hessian_is_that_of_the_definition(map_: Map) -> None:
    inputs = [t.detach() for t in map_.tensors(3, 2, 2) if t is not None]

    def hessian(function: Any) -> Any:
        return torch.func.hessian(lambda *tensors: function(*tensors).sin().sum(), argnums=tuple(range(len(inputs))))(*inputs)

    for row, expected_row in zip(hessian(map_), hessian(map_.expected), strict=True):
        for block, expected in zip(row, expected_row, strict=True):
            close(block, expected, scale=1.0)


@every_map
def test_a_forward_tangent_of_a_gradient_needs_no_graph_of_it(map_: Map) -> None:
    # Forward over reverse without create_graph: the statistics are then taken with gradients switched off.
    x, weight, bias = (None if t is None else t.detach() for t in map_.tensors(3, 2, 4))
    assert x is not None
    x[1] = 0.0
    direction = torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(1))
    tangents = []
    for create_graph in (False, True):
        leaf = x.clone().requires_grad_()
        with fwAD.dual_level():
            z = map_(fwAD.make_dual(leaf, direction), weight, bias)
            (gradient,) = torch.autograd.grad(z.square().sum(), leaf, create_graph=create_graph)
            tangents.append(fwAD.unpack_dual(gradient).tangent.detach())
    close(tangents[0], tangents[1])


@every_map
def test_a_forward_derivative_of_a_forward_derivative_is_the_hessian_also_at_a_zero_row_under_no_grad(map_: Map) -> None:
    x, weight, bias = map_.tensors(4, 3, 1)
    for row in (x.detach()[0], torch.zeros(4, dtype=torch.float64)):
        if map_.options.get("eps") == 0.0 and not row.any():
            continue  # singular there

        def f(v: Tensor) -> Tensor:
            return map_(v, weight.detach(), None if bias is None else bias.detach()).square().sum()

        wanted = torch.func.hessian(f)(row)
        with torch.no_grad():
            close(torch.func.jacfwd(torch.func.jacfwd(f))(row), wanted)
        assert wanted.any()
