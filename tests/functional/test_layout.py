# Strides, views and neighbours: what must not change a result.
from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from maps import Map, every_map, gradients
from oracles import TOLERANCE, close
from torch import Tensor

ROWS, D_IN, D_OUT = 12, 64, 6

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "every-other-feature": lambda x: torch.stack([x, x.neg()], -1).flatten(-2)[..., ::2],
    "every-other-row": lambda x: torch.stack([x, x.neg()], 1).flatten(0, 1)[::2],
    "transposed": lambda x: x.mT.contiguous().mT,
    "offset": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
}


def _layouts(x: Tensor) -> dict[str, Tensor]:
    return {name: layout(x) for name, layout in LAYOUTS.items()}


@every_map
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_output_does_not_depend_on_the_strides_of_the_input_where_the_plain_product_does_not_bit_for_bit(
    map_: Map, dtype: torch.dtype
) -> None:
    # On some CPUs the products of a transposed matrix round otherwise; the norms never do.
    x, weight, bias = map_.tensors(D_IN, D_OUT, ROWS, dtype=dtype)
    z, product = map_(x, weight, bias), F.linear(x, weight)
    for name, view in _layouts(x.detach()).items():
        assert torch.equal(view, x), name
        strided = map_(view, weight, bias)
        close(strided, z)
        assert torch.equal(strided, z) or not torch.equal(F.linear(view, weight), product), name


@every_map
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_do_not_depend_on_the_strides_of_the_input_bit_for_bit(map_: Map, dtype: torch.dtype, layout: str) -> None:
    x, weight, bias = map_.tensors(D_IN, D_OUT, ROWS, dtype=dtype)
    upstream = torch.linspace(-1, 1, ROWS * D_OUT, dtype=torch.float64).reshape(ROWS, D_OUT).to(dtype)
    wanted = gradients(map_(x, weight, bias), upstream, x, weight, bias)
    view = LAYOUTS[layout](x)
    for actual, expected in zip(gradients(map_(view, weight, bias), upstream, x, weight, bias), wanted, strict=True):
        assert torch.equal(actual, expected)


@every_map
def test_strided_and_expanded_upstream_gradients_give_the_gradients_of_dense_ones(map_: Map) -> None:
    x, weight, bias = map_.tensors(D_IN, D_OUT, ROWS)
    losses: dict[str, Callable[[Tensor], Tensor]] = {
        "sum": lambda z: z.sum(),
        "one-row-of-ones": lambda z: z.sum(0) @ torch.arange(1.0, D_OUT + 1, dtype=z.dtype),
        "every-other-output": lambda z: z[:, ::2].square().sum(),
        "transposed": lambda z: (z.mT @ torch.arange(1.0, ROWS + 1, dtype=z.dtype)).sum(),
        "one-output": lambda z: z[3, 2],
    }
    for loss in losses.values():
        z, expected = map_(x, weight, bias), map_.expected(x, weight, bias)
        tensors = [t for t in (x, weight, bias) if t is not None]
        for actual, wanted in zip(torch.autograd.grad(loss(z), tensors), torch.autograd.grad(loss(expected), tensors), strict=True):
            close(actual, wanted, scale=float(wanted.abs().max()) or 1.0)


@every_map
@pytest.mark.parametrize("upstream", ["expanded", "columns", "transposed"])
def test_the_layout_of_an_upstream_gradient_does_not_matter(map_: Map, upstream: str) -> None:
    x, weight, bias = map_.tensors(D_IN, D_OUT, ROWS)
    g = {
        "expanded": torch.tensor(0.5, dtype=torch.float64).expand(ROWS, D_OUT),
        "columns": torch.randn(D_OUT, dtype=torch.float64).expand(ROWS, D_OUT),
        "transposed": torch.randn(D_OUT, ROWS, dtype=torch.float64).mT,
    }[upstream]
    wanted = gradients(map_(x, weight, bias), g.contiguous(), x, weight, bias)
    for actual, expected in zip(gradients(map_(x, weight, bias), g, x, weight, bias), wanted, strict=True):
        close(actual, expected)


@every_map
def test_transposed_weights_and_strided_biases_give_the_same_map(map_: Map) -> None:
    x, weight, bias = map_.tensors(D_IN, D_OUT, ROWS)
    transposed = weight.mT.contiguous().mT
    strided = None if bias is None else torch.stack([bias, bias], 1)[:, 0]
    close(map_(x, transposed, strided), map_(x, weight, bias))


@every_map
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_row_alone_is_the_row_in_a_batch(map_: Map, dtype: torch.dtype) -> None:
    x, weight, bias = map_.tensors(D_IN, D_OUT, ROWS, dtype=dtype)
    z = map_(x, weight, bias)
    (gradient,) = gradients(z, torch.ones_like(z), x)
    for i in range(ROWS):
        row = x[i].detach().requires_grad_()
        alone = map_(row, weight, bias)
        close(alone, z[i])
        close(gradients(alone, torch.ones_like(alone), row)[0], gradient[i], tolerance=2 * TOLERANCE[dtype])


@every_map
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_without_a_graph_the_output_is_the_same_bit_for_bit(map_: Map, dtype: torch.dtype) -> None:
    tensors = map_.tensors(D_IN, D_OUT, ROWS, dtype=dtype)
    z = map_(*tensors)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(map_(*tensors), z)


@every_map
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_row_does_not_change_its_neighbours(map_: Map, bad: float) -> None:
    x, weight, bias = map_.tensors(D_IN, D_OUT, ROWS)
    spoilt = x.detach().clone()
    spoilt[3, 1] = bad
    others = torch.arange(ROWS) != 3
    z = map_(spoilt, weight, bias)
    assert not torch.isfinite(z[3]).all()
    close(z[others], map_(x, weight, bias)[others])


@every_map
def test_the_inputs_are_not_written_to(map_: Map) -> None:
    tensors = [t for t in map_.tensors(D_IN, D_OUT, ROWS) if t is not None]
    before = [t.detach().clone() for t in tensors]
    map_(*tensors).square().sum().backward()
    assert all(torch.equal(t, b) for t, b in zip(tensors, before, strict=True))


@every_map
def test_an_in_place_activation_after_the_map_leaves_its_gradients_right(map_: Map) -> None:
    x, weight, bias = map_.tensors(D_IN, D_OUT, ROWS)
    tensors = [t for t in (x, weight, bias) if t is not None]
    in_place = torch.autograd.grad(map_(*tensors).relu_().sum(), tensors)
    for actual, wanted in zip(in_place, torch.autograd.grad(map_.expected(*tensors).relu().sum(), tensors), strict=True):
        close(actual, wanted)
