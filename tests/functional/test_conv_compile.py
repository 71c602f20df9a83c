# torch.compile in one graph, torch.export and ONNX: outputs and gradients of the convolutions as in eager mode.
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conv_maps import EVERY, PLAIN, TABLE, ConvMap
from exporting import Model, onnxruntime_output
from maps import gradients
from oracles import TOLERANCE, close
from torch import Tensor

from affine_divergence.functional import patch_sqnorm

SIZES = {1: (7,), 2: (5, 6), 3: (3, 4, 4)}

one_of_each_kind = pytest.mark.parametrize("map_", [m for m in PLAIN if m.dims == 2 and m.bias and not m.transposed], ids=str)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _compiled(map_: ConvMap, backend: Any = "aot_eager", dynamic: bool | None = None) -> Callable[..., Tensor]:
    return torch.compile(lambda x, weight, bias: map_(x, weight, bias), fullgraph=True, backend=backend, dynamic=dynamic)


def _agree(compiled: Callable[..., Tensor], map_: ConvMap, *tensors: Tensor | None, tolerance: float | None = None) -> None:
    z, eager = compiled(*tensors), map_(*tensors)  # type: ignore[arg-type]
    assert z.dtype == eager.dtype
    close(z, eager, tolerance=tolerance)
    upstream = torch.randn(z.shape, generator=torch.Generator().manual_seed(1)).to(z.dtype)
    for actual, wanted in zip(gradients(z, upstream, *tensors), gradients(eager, upstream, *tensors), strict=True):
        assert actual.dtype == wanted.dtype
        close(actual, wanted, tolerance=tolerance)


@pytest.mark.parametrize("map_", EVERY[::5], ids=str)
def test_outputs_and_gradients_are_those_of_eager_mode(map_: ConvMap) -> None:
    _agree(_compiled(map_), map_, *map_.tensors(2, *SIZES[map_.dims]))


@pytest.mark.parametrize("map_", TABLE[::300], ids=str)
def test_geometries_of_all_sorts_are_those_of_eager_mode(map_: ConvMap) -> None:
    _agree(_compiled(map_), map_, *map_.tensors(2, *{1: (9,), 2: (6, 7), 3: (4, 3, 5)}[map_.dims]))


@one_of_each_kind
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_dtypes_are_those_of_eager_mode(map_: ConvMap, dtype: torch.dtype) -> None:
    _agree(_compiled(map_), map_, *map_.tensors(2, *SIZES[map_.dims], dtype=dtype), tolerance=2 * TOLERANCE[dtype])


@one_of_each_kind
def test_autocast_is_that_of_eager_mode(map_: ConvMap) -> None:
    compiled, tensors = _compiled(map_), map_.tensors(2, *SIZES[map_.dims], dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        z, eager = compiled(*tensors), map_(*tensors)
    assert z.dtype == eager.dtype == torch.bfloat16
    close(z, eager)
    for actual, wanted in zip(*(gradients(f, torch.ones_like(f), *tensors) for f in (z, eager)), strict=True):
        assert actual.dtype == torch.float32
        close(actual, wanted, tolerance=2 * TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("map_", [m for m in EVERY if m.dims == 1 and m.bias], ids=str)
def test_black_images_have_the_gradients_of_eager_mode(map_: ConvMap) -> None:
    x, weight, bias = map_.tensors(2, *SIZES[map_.dims])
    x = torch.cat([torch.zeros_like(x[:1]), x[1:]]).detach().requires_grad_()
    _agree(_compiled(map_), map_, x, weight, bias)


@one_of_each_kind
def test_an_unbatched_image_and_channels_last_are_those_of_eager_mode(map_: ConvMap) -> None:
    _agree(_compiled(map_), map_, *map_.tensors(*SIZES[2]))
    x, weight, bias = map_.tensors(2, *SIZES[2])
    _agree(_compiled(map_), map_, x.detach().to(memory_format=torch.channels_last).requires_grad_(), weight, bias)


@one_of_each_kind
def test_one_graph_with_dynamic_sizes_serves_every_batch(map_: ConvMap) -> None:
    graphs: list[Any] = []

    def counting(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    compiled = _compiled(map_, backend=counting, dynamic=True)
    _, weight, bias = map_.tensors(*SIZES[2])
    for images in (7, 11, 13):  # not the size of anything else, which would be one variable with it
        x = map_.tensors(images, *SIZES[2])[0]
        close(compiled(x, weight, bias), map_(x, weight, bias))
    assert len(graphs) == 1


@pytest.mark.parametrize("kind", ["affine-like", "norm-like"])
def test_gains_that_vary_from_call_to_call_do_not_break_the_graph(kind: str) -> None:
    map_ = ConvMap(kind, 2, False, (3, 3))
    compiled = torch.compile(lambda x, weight, gain: map_.function(x, weight, gain=gain), fullgraph=True, backend="aot_eager")
    x, weight, _ = map_.tensors(2, 5, 5)
    for gain in (1.0, 2.0, 0.5):
        close(compiled(x, weight, gain), replace(map_, options={"gain": gain}).expected(x, weight))


def test_a_model_of_convolutions_has_no_graph_break() -> None:
    affine_like, norm_like = (ConvMap(kind, 2, False, (3, 3), (4, 4), geometry={"padding": 1}) for kind in ("affine-like", "norm-like"))
    x, weight, bias = affine_like.tensors(2, 5, 5)
    explained = torch._dynamo.explain(lambda x: norm_like(affine_like(x, weight, bias).relu(), weight, bias).tanh())(x)
    assert explained.graph_break_count == 0, explained.break_reasons
    assert explained.graph_count == 1


@pytest.mark.filterwarnings("ignore:`torch.jit.script(_method)?` is deprecated:DeprecationWarning")  # torch's own, at its first use
def test_inductors_code_gives_the_outputs_and_gradients_of_eager_mode() -> None:
    # Several maps in one graph: most of the time goes into the first kernel.
    maps = [
        ConvMap("affine-like", 2, False, (3, 3), (4, 4), geometry={"padding": 1, "stride": 2}),
        ConvMap("norm-like", 2, False, (3, 3), (4, 4), geometry={"padding": 1, "stride": 2, "groups": 4}),
    ]
    (x, *first), (_, *second) = (m.tensors(2, 6, 6, dtype=torch.float32) for m in maps)
    tensors = [x, *first, *second]

    def both(x: Tensor, w: Tensor, b: Tensor, v: Tensor, c: Tensor) -> Tensor:
        return maps[0](x, w, b) - 2 * maps[1](x, v, c)

    compiled = torch.compile(both, fullgraph=True)
    z, eager = compiled(*tensors), both(*tensors)
    close(z, eager)
    upstream = torch.randn(z.shape, generator=torch.Generator().manual_seed(1))
    for actual, wanted in zip(gradients(z, upstream, *tensors), gradients(eager, upstream, *tensors), strict=True):
        close(actual, wanted)


def _model(map_: ConvMap, dtype: torch.dtype) -> tuple[Model, Tensor]:
    x, weight, bias = map_.tensors(2, *SIZES[map_.dims], dtype=dtype)
    return Model(map_, weight, bias).eval(), x.detach()


@pytest.mark.parametrize("map_", [m for m in PLAIN if m.bias], ids=str)
def test_an_exported_program_computes_the_map_for_other_batches_too(map_: ConvMap) -> None:
    model, x = _model(map_, torch.float64)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("images")},))
    close(program.module()(x), model(x))
    more = torch.cat([x, 2 * x, x])
    close(program.module()(more), model(more))


@one_of_each_kind
def test_an_exported_program_with_dynamic_sizes_takes_other_images(map_: ConvMap) -> None:
    model, x = _model(map_, torch.float64)
    sizes = {0: torch.export.Dim("images"), 2: torch.export.Dim("height", min=4), 3: torch.export.Dim("width", min=4)}
    program = torch.export.export(model, (x,), dynamic_shapes=(sizes,))
    larger = map_.tensors(3, 9, 11)[0].detach()
    close(program.module()(larger), model(larger))


@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")  # torch's own, in its exporter
@pytest.mark.parametrize("map_", [m for m in PLAIN if m.bias and (m.kind == "norm-like") == (m.dims == 2)], ids=str)
def test_onnxruntime_computes_the_map(map_: ConvMap, tmp_path: Path) -> None:
    model, x = _model(map_, torch.float32)
    x[1] = 0.0
    close(onnxruntime_output(model, x, tmp_path), model(x))


def test_patch_norms_compile_to_one_graph() -> None:
    x = torch.randn(2, 4, 6, 6, dtype=torch.float64)
    compiled = torch.compile(lambda x: patch_sqnorm(x, (3, 2), 2, 1, 1, 2), fullgraph=True, backend="aot_eager")
    close(compiled(x), patch_sqnorm(x, (3, 2), 2, 1, 1, 2))
