# The sample-corrected layers beside torch.nn's: constructor, state, bit-identical outputs, and the gradient with every option.
from __future__ import annotations

import copy
import inspect
import io
import pickle
from collections.abc import Iterator
from itertools import product
from typing import Any

import conv_oracles
import pytest
import torch
from oracles import close
from sample_oracles import sample_gradients
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import affine_divergence.nn as ann

# torch's own: of its convolution, and of every Function that it compiles.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]
LAYERS: dict[Any, Any] = {getattr(ann, f"SampleCorrected{name}"): getattr(nn, name) for name in ("Linear", "Conv1d", "Conv2d", "Conv3d")}
layers = pytest.mark.parametrize("layer", LAYERS)
KERNELS = {1: (4,), 2: (3, 2), 3: (2, 1, 3)}
SIZES = {0: (), 1: (9,), 2: (6, 7), 3: (4, 4, 6)}
WIDE = torch.float64


def _dims(layer: Any) -> int:
    return len(SIZES) - 1 if layer.__name__.endswith("3d") else 0 if layer.__name__.endswith("Linear") else int(layer.__name__[-2])


def _make(layer: Any, channels: tuple[int, int] = (4, 6), **arguments: Any) -> Any:
    dims = _dims(layer)
    return layer(*channels, **arguments) if not dims else layer(*channels, KERNELS[dims], **arguments)


def _input(layer: Any, dtype: torch.dtype = WIDE) -> Tensor:
    return torch.randn(2, 4, *SIZES[_dims(layer)], dtype=dtype)


def _cases() -> Iterator[tuple[Any, dict[str, Any]]]:
    for layer in LAYERS:
        dims = _dims(layer)
        singles: list[dict[str, Any]] = [{}, {"bias": False}, {"device": "cpu"}]
        if dims:
            uneven = tuple((2, 1, 1)[:dims])
            singles += [{"stride": 2}, {"stride": uneven}, {"dilation": uneven}, {"groups": 2}]
            singles += [
                {"padding": padding, "padding_mode": mode}
                for padding, mode in product((1, uneven, "same", "valid"), ("zeros", "reflect", "replicate", "circular"))
            ]
            singles.append({"padding": uneven, "padding_mode": "circular", "stride": 2, "groups": 2, "bias": False})
        yield from ((layer, single) for single in singles)


cases = pytest.mark.parametrize(
    ("layer", "arguments"), list(_cases()), ids=lambda v: v.__name__ if isinstance(v, type) else str(v).replace(" ", "")
)


def _wanted(layer: Any, module: Any, x: Tensor, g: Tensor) -> list[Tensor]:
    """The gradients by the definition."""
    learns = True, module.bias is not None
    if not _dims(layer):
        return [*sample_gradients(g, x, learns)][: 1 + learns[1]]
    patches = conv_oracles.conv_patches(x, module.kernel_size, module.stride, module.padding, module.dilation, module.padding_mode)
    rows = conv_oracles.vectors(patches, module.groups).transpose(0, 1).flatten(1, 2)
    of_groups = g.flatten(2).unflatten(1, (module.groups, -1)).permute(1, 0, 3, 2).flatten(1, 2)
    parts = [sample_gradients(*each, learns) for each in zip(of_groups, rows, strict=True)]
    weight_grad, bias_grad = (torch.cat(each) for each in zip(*parts, strict=True))
    return [weight_grad.view_as(module.weight), bias_grad][: 1 + learns[1]]


@cases
def test_only_the_gradients_differ_from_torchs_and_they_are_the_definitions(layer: Any, arguments: dict[str, Any]) -> None:
    module, plain = _make(layer, dtype=WIDE, **arguments), _make(LAYERS[layer], dtype=WIDE, **arguments)
    plain.load_state_dict(module.state_dict())
    x = _input(layer).requires_grad_()
    z, wanted = module(x), plain(x)
    assert torch.equal(z, wanted)
    upstream = torch.randn_like(z)
    x_grad, *gradients = torch.autograd.grad(z, [x, *module.parameters()], upstream)
    assert torch.equal(x_grad, torch.autograd.grad(wanted, x, upstream)[0])
    for actual, expected in zip(gradients, _wanted(layer, module, x, upstream), strict=True):
        close(actual, expected)


@cases
def test_constructor_initialisation_and_description_are_those_of_torchs_layer(layer: Any, arguments: dict[str, Any]) -> None:
    torch.manual_seed(7)
    plain = _make(LAYERS[layer], **arguments)
    torch.manual_seed(7)
    module = _make(layer, **arguments)
    assert list(module.state_dict()) == list(plain.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), plain.parameters(), strict=True))
    assert module.extra_repr() == plain.extra_repr()
    assert repr(module) == repr(plain).replace(type(plain).__name__, layer.__name__)


@layers
def test_the_signature_is_torchs_and_the_layer_is_one_of_torchs(layer: Any) -> None:
    assert inspect.signature(layer) == inspect.signature(LAYERS[layer])
    module = _make(layer)
    assert isinstance(module, LAYERS[layer])
    plain = _make(LAYERS[layer])
    plain.load_state_dict(module.state_dict())
    module.load_state_dict(plain.state_dict())


@layers
def test_a_swapped_class_makes_torchs_layer_this_one(layer: Any) -> None:
    module, plain = _make(layer, dtype=WIDE), _make(LAYERS[layer], dtype=WIDE)
    module.load_state_dict(plain.state_dict())
    plain.__class__ = layer
    x = _input(layer)
    gradients = [torch.autograd.grad(m(x).square().sum(), list(m.parameters())) for m in (module, plain)]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@layers
def test_copies_and_pickles_train_alike(layer: Any) -> None:
    module, x = _make(layer), _input(layer, torch.float32)
    stream = io.BytesIO()
    torch.save(module, stream)
    stream.seek(0)
    module(x).square().sum().backward()
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), torch.load(stream, weights_only=False)):
        assert type(twin) is layer
        twin.zero_grad()
        twin(x).square().sum().backward()
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(twin.parameters(), module.parameters(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@layers
def test_a_converted_layer_has_outputs_and_gradients_of_its_dtype(layer: Any, dtype: torch.dtype) -> None:
    module, x = _make(layer).to(dtype), _input(layer).to(dtype)
    z = module(x)
    z.square().sum().backward()
    assert {t.dtype for t in (z, module.weight.grad, module.bias.grad)} == {dtype}


@layers
def test_a_layer_on_the_meta_device_knows_its_shapes(layer: Any) -> None:
    module = _make(layer, device="meta")
    z = module(_input(layer, torch.float32).to("meta"))
    assert (z.shape, z.device.type) == (_make(LAYERS[layer])(_input(layer, torch.float32)).shape, "meta")
    z.sum().backward()
    assert module.weight.grad.shape == module.weight.shape


def _model(layer: Any, **arguments: Any) -> nn.Sequential:
    if not _dims(layer):
        return nn.Sequential(layer(4, 6), nn.ReLU(inplace=True), layer(6, 3, bias=False))
    return nn.Sequential(_make(layer, padding="same", **arguments), nn.ReLU(inplace=True), _make(layer, (6, 3), bias=False))


@layers
@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
def test_a_compiled_model_is_one_graph_with_the_outputs_and_gradients_of_eager_mode(layer: Any, autocast: bool) -> None:
    torch._dynamo.reset()
    model, x = _model(layer), _input(layer, torch.float32).requires_grad_()
    results = []
    for function in (torch.compile(model, fullgraph=True, backend="aot_eager"), model):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            z = function(x)
        results.append([z, *torch.autograd.grad(z.float().square().sum(), [x, *model.parameters()])])
    for actual, wanted in zip(*results, strict=True):
        assert actual.dtype == wanted.dtype
        close(actual, wanted, tolerance=2e-2 if autocast else None)


@pytest.mark.filterwarnings("ignore:`torch.jit.script(_method)?` is deprecated:DeprecationWarning")  # torch's own, at its first use
def test_inductors_code_gives_the_gradients_of_eager_mode() -> None:
    torch._dynamo.reset()
    layer, x = ann.SampleCorrectedLinear(4, 6), torch.randn(5, 4)
    compiled = torch.compile(layer, fullgraph=True)
    gradients = [torch.autograd.grad(f(x).square().sum(), list(layer.parameters())) for f in (compiled, layer)]
    for actual, wanted in zip(*gradients, strict=True):
        close(actual, wanted)


@layers
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not-reentrant"])
def test_checkpointing_gives_the_same_gradients(layer: Any, reentrant: bool) -> None:
    model, x = _model(layer), _input(layer, torch.float32).requires_grad_()
    twin = copy.deepcopy(model)
    model(x).square().sum().backward()
    checkpoint(twin, x, use_reentrant=reentrant).square().sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


@layers
def test_per_sample_gradients_of_the_layer_are_those_of_a_loop(layer: Any) -> None:
    module, x = _make(layer, dtype=WIDE), _input(layer)

    def loss(parameters: dict[str, Tensor], sample: Tensor) -> Tensor:
        z: Tensor = torch.func.functional_call(module, parameters, (sample,))
        return z.square().sum()

    parameters = {name: p.detach() for name, p in module.named_parameters()}
    at_once = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    for i, sample in enumerate(x):
        wanted = torch.autograd.grad(module(sample).square().sum(), list(module.parameters()))
        for name, expected in zip(parameters, wanted, strict=True):
            close(at_once[name][i], expected)


@layers
def test_micro_batches_add_up_to_the_batch(layer: Any) -> None:
    # Every sample has its own divisor, whatever it comes with.
    module, x = _make(layer, dtype=WIDE), torch.cat([_input(layer), _input(layer)])
    whole = torch.autograd.grad(module(x).sin().sum(), list(module.parameters()))
    for part in x.split([1, 3]):
        module(part).sin().sum().backward()
    for p, wanted in zip(module.parameters(), whole, strict=True):
        close(p.grad, wanted)


@layers
def test_a_frozen_layer_is_torchs_in_second_derivatives_too(layer: Any) -> None:
    module = _make(layer, dtype=WIDE).requires_grad_(False)
    x = _input(layer)[:1].requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: module(x).square().sum(), x)
    module.requires_grad_(True)
    (first,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        first.sum().backward()


def test_a_grad_scalers_step_in_float16_is_the_unscaled_one() -> None:
    layer = ann.SampleCorrectedLinear(16, 4)
    x = 300 * nn.functional.normalize(torch.randn(8, 16), dim=1)
    with torch.autocast("cpu", torch.float16):
        z = layer(x)
    upstream = torch.full_like(z, 1e-6)
    small = torch.autograd.grad(z, list(layer.parameters()), upstream, retain_graph=True)
    large = torch.autograd.grad(z, list(layer.parameters()), 2.0**14 * upstream)
    for a, b in zip(small, large, strict=True):
        assert torch.equal(2.0**14 * a, b)
        assert a.any()
