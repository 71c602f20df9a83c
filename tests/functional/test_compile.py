# torch.compile in one graph: outputs and gradients as in eager mode.
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from maps import PLAIN, Map, every_kind, every_map, gradients
from oracles import TOLERANCE, close
from torch import Tensor

from affine_divergence.functional import norm_like_linear


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _compiled(map_: Map, backend: str = "aot_eager", dynamic: bool | None = None) -> Callable[..., Tensor]:
    return torch.compile(lambda x, weight, bias: map_(x, weight, bias), fullgraph=True, backend=backend, dynamic=dynamic)


def _agree(compiled: Callable[..., Tensor], map_: Map, *tensors: Tensor | None, tolerance: float | None = None) -> None:
    z, eager = compiled(*tensors), map_(*tensors)  # type: ignore[arg-type]
    assert z.dtype == eager.dtype
    close(z, eager, tolerance=tolerance)
    upstream = torch.linspace(-1, 1, z.numel()).reshape(z.shape).to(z.dtype)
    for actual, wanted in zip(gradients(z, upstream, *tensors), gradients(eager, upstream, *tensors), strict=True):
        assert actual.dtype == wanted.dtype
        close(actual, wanted, tolerance=tolerance)


@every_map
def test_outputs_and_gradients_are_those_of_eager_mode(map_: Map) -> None:
    _agree(_compiled(map_), map_, *map_.tensors(5, 4, 6))


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_narrow_dtypes_are_those_of_eager_mode(map_: Map, dtype: torch.dtype) -> None:
    _agree(_compiled(map_), map_, *map_.tensors(5, 4, 6, dtype=dtype), tolerance=2 * TOLERANCE[dtype])


@every_kind
def test_in_float16_neither_squares_nor_products_overflow_in_the_compiled_map(map_: Map) -> None:
    compiled = _compiled(map_)
    squares = compiled(torch.full((1, 8), 100.0).half(), torch.ones(3, 8).half(), torch.zeros(3).half() if map_.bias else None)
    close(squares, torch.full((1, 3), 8**0.5, dtype=torch.float64))
    products = compiled(torch.full((1, 512), 300.0).half(), torch.ones(3, 512).half(), torch.zeros(3).half() if map_.bias else None)
    close(products, torch.full((1, 3), 512**0.5, dtype=torch.float64))


@every_kind
def test_in_float16_small_gradients_are_not_flushed_to_zero_by_the_compiled_map(map_: Map) -> None:
    x, weight, bias = map_.tensors(16, 4, 4, dtype=torch.float16)
    x = (250 * x.detach()).requires_grad_()
    z, expected = _compiled(map_)(x, weight, bias), map_.expected(x, weight, bias)
    upstream = torch.full_like(z, 1e-5)
    (actual,), (wanted,) = (gradients(f, upstream.to(f.dtype), weight) for f in (z, expected))
    close(actual, wanted, tolerance=TOLERANCE[torch.float16], scale=wanted.abs().max().item() + 2.0**-24 / TOLERANCE[torch.float16])


@pytest.mark.parametrize("map_", [m for m in PLAIN if m.bias], ids=str)
@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.float16)], ids=str)
def test_mixed_dtypes_are_those_of_eager_mode(map_: Map, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    x, weight, bias = map_.tensors(5, 4, 6, dtype=dtypes[1])
    _agree(_compiled(map_), map_, x.detach().to(dtypes[0]).requires_grad_(), weight, bias, tolerance=2 * TOLERANCE[torch.bfloat16])


@every_kind
@pytest.mark.parametrize("shape", [(), (2, 3), (0,), (2, 0)], ids=str)
def test_one_row_batches_and_no_rows_are_those_of_eager_mode(map_: Map, shape: tuple[int, ...]) -> None:
    _agree(_compiled(map_), map_, *map_.tensors(5, 4, *shape))


@every_kind
def test_strided_inputs_and_expanded_upstream_gradients_give_those_of_the_definition(map_: Map) -> None:
    x, weight, bias = map_.tensors(10, 5, 6)
    compiled = torch.compile(lambda x, w, b: map_(x[:, ::2], w[:, 1::2], b).sum(), fullgraph=True, backend="aot_eager")
    sums = compiled(x, weight, bias), map_.expected(x[:, ::2], weight[:, 1::2], bias).sum()
    for actual, wanted in zip(*(gradients(f, torch.ones_like(f), x, weight, bias) for f in sums), strict=True):
        close(actual, wanted)


@every_kind
def test_autocast_is_that_of_eager_mode(map_: Map) -> None:
    compiled = _compiled(map_)
    tensors = map_.tensors(5, 4, 6, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        z, eager = compiled(*tensors), map_(*tensors)
    assert z.dtype == eager.dtype == torch.bfloat16
    close(z, eager)
    actual_gradients, wanted_gradients = (gradients(f, torch.ones_like(f), *tensors) for f in (z, eager))
    for actual, wanted in zip(actual_gradients, wanted_gradients, strict=True):
        assert actual.dtype == torch.float32
        close(actual, wanted, tolerance=2 * TOLERANCE[torch.bfloat16])


@every_map
def test_a_zero_row_has_the_gradients_of_eager_mode(map_: Map) -> None:
    x, weight, bias = map_.tensors(5, 4, 3)
    x = x.detach().index_fill(0, torch.tensor([1]), 0.0).requires_grad_()
    _agree(_compiled(map_), map_, x, weight, bias)


@pytest.mark.parametrize("norm", [1e-12, 1e-14, 1e-17])
def test_without_an_eps_the_gradient_of_a_very_short_row_is_that_of_eager_mode(norm: float) -> None:
    weight = torch.tensor([[1.0, 2.0], [3.0, -1.0]])
    rows = [torch.tensor([[0.6 * norm, 0.8 * norm]], requires_grad=True) for _ in range(2)]
    compiled = torch.compile(lambda x: norm_like_linear(x, weight, eps=0.0), fullgraph=True, backend="aot_eager")
    for x, function in zip(rows, (compiled, lambda x: norm_like_linear(x, weight, eps=0.0)), strict=True):
        function(x).backward(torch.tensor([[1.0, 0.5]]))
    # ∂x = (u − (u·x̂) x̂)/‖x‖ with u = (2.5, 1.5) and x̂ = (0.6, 0.8)
    expected = torch.tensor([[2.5 - 2.7 * 0.6, 1.5 - 2.7 * 0.8]], dtype=torch.float64) / norm
    for x in rows:
        assert x.grad is not None
        torch.testing.assert_close(x.grad.double() * norm, expected * norm, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("map_", [m for m in PLAIN if m.bias], ids=str)
def test_one_graph_with_dynamic_sizes_serves_every_batch(map_: Map) -> None:
    graphs: list[Any] = []

    def counting(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(lambda x, weight, bias: map_(x, weight, bias), fullgraph=True, backend=counting, dynamic=True)
    _, weight, bias = map_.tensors(5, 4)
    for rows in (3, 7, 64):
        x = torch.randn(rows, 5, dtype=torch.float64)
        close(compiled(x, weight, bias), map_(x, weight, bias))
    assert len(graphs) == 1


@pytest.mark.parametrize("map_", [m for m in PLAIN if m.bias], ids=str)
def test_gains_that_vary_from_call_to_call_do_not_break_the_graph(map_: Map) -> None:
    # From the second value on torch.compile takes the number for a variable.
    compiled = torch.compile(lambda x, weight, gain: map_.function(x, weight, gain=gain), fullgraph=True, backend="aot_eager")
    x, weight, _ = map_.tensors(5, 4, 6)
    for gain in (1.0, 2.0, 0.5, 3.0):
        close(compiled(x, weight, gain), map_.oracle(x, weight, gain=gain))


@every_kind
def test_a_model_around_the_map_has_no_graph_break(map_: Map) -> None:
    x, weight, bias = map_.tensors(5, 5, 4)

    def model(x: Tensor) -> Tensor:
        return map_(map_(x, weight, bias).relu(), weight, bias).tanh()

    explained = torch._dynamo.explain(model)(x)
    assert explained.graph_break_count == 0, explained.break_reasons
    assert explained.graph_count == 1


@pytest.mark.filterwarnings("ignore:`torch.jit.script(_method)?` is deprecated:DeprecationWarning")  # torch's own, at its first use
def test_inductors_code_gives_the_outputs_and_gradients_of_eager_mode() -> None:
    # Both maps in one graph: most of the time goes into the first kernel.
    affine_like, norm_like = (m for m in PLAIN if m.bias)
    both = Map("both", lambda x, weight, bias: affine_like(x, weight, bias) - 2 * norm_like(x, weight, bias), affine_like.oracle)
    _agree(_compiled(both, "inductor"), both, *both.tensors(20, 12, 6, dtype=torch.float32))
