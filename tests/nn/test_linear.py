# AffineLikeLinear and NormLikeLinear beside torch.nn.Linear: constructor, initialisation, state, options.
from __future__ import annotations

import copy
import inspect
import io
import pickle
import warnings
from typing import Any

import pytest
import torch
from oracles import affine_like_linear, close, norm_like_linear
from torch import nn

import affine_divergence as ad
from affine_divergence.nn import AffineLikeLinear, NormLikeLinear

LAYERS = {AffineLikeLinear: affine_like_linear, NormLikeLinear: norm_like_linear}
layers = pytest.mark.parametrize("layer", LAYERS)

# Every option of the constructors, and what it must change.
OPTIONS: list[tuple[type[nn.Module], dict[str, Any], dict[str, Any]]] = [
    *((layer, {}, {}) for layer in LAYERS),
    *((layer, {"gain": 2.5}, {"gain": 2.5}) for layer in LAYERS),
    *((layer, {"gain": 3}, {"gain": 3.0}) for layer in LAYERS),
    *((layer, {"bias": False}, {}) for layer in LAYERS),
    *((layer, {"dtype": torch.float64}, {}) for layer in LAYERS),
    *((layer, {"device": "cpu"}, {}) for layer in LAYERS),
    (NormLikeLinear, {"eps": 0.0}, {"eps": 0.0}),
    (NormLikeLinear, {"eps": 0.7}, {"eps": 0.7}),
    (NormLikeLinear, {"eps": 0.7, "gain": 0.3, "bias": False}, {"eps": 0.7, "gain": 0.3}),
    (AffineLikeLinear, {"gain": 0.3, "bias": False, "dtype": torch.float64}, {"gain": 0.3}),
]
options = pytest.mark.parametrize(("layer", "arguments", "formula"), OPTIONS, ids=lambda v: v.__name__ if isinstance(v, type) else str(v))


@options
def test_the_output_is_the_formula_with_the_options_given(layer: Any, arguments: dict[str, Any], formula: dict[str, Any]) -> None:
    module = layer(5, 4, **arguments)
    x = torch.randn(3, 2, 5, dtype=module.weight.dtype)
    close(module(x), LAYERS[layer](x, module.weight, module.bias, **formula))
    function = ad.functional.affine_like_linear if layer is AffineLikeLinear else ad.functional.norm_like_linear
    assert torch.equal(module(x), function(x, module.weight, module.bias, **formula))
    assert torch.equal(module(input=x), module(x))


@options
def test_initialisation_is_bit_identical_to_that_of_linear_with_the_same_seed(
    layer: Any, arguments: dict[str, Any], formula: dict[str, Any]
) -> None:
    torch.manual_seed(7)
    plain = nn.Linear(5, 4, **{k: v for k, v in arguments.items() if k not in formula})
    after = torch.random.get_rng_state()
    torch.manual_seed(7)
    module = layer(5, 4, **arguments)
    assert torch.equal(torch.random.get_rng_state(), after)
    assert [name for name, _ in module.named_parameters()] == [name for name, _ in plain.named_parameters()]
    for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        assert (ours.dtype, ours.device, ours.requires_grad) == (theirs.dtype, theirs.device, theirs.requires_grad)
    torch.manual_seed(7)
    module.reset_parameters()
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), plain.parameters(), strict=True))


@options
def test_deep_copies_and_pickles_keep_every_option(layer: Any, arguments: dict[str, Any], formula: dict[str, Any]) -> None:
    module = layer(5, 4, **arguments)
    stream = io.BytesIO()
    torch.save(module, stream)
    stream.seek(0)
    x = torch.randn(3, 5, dtype=module.weight.dtype)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), torch.load(stream, weights_only=False)):
        assert type(twin) is layer
        assert {name: getattr(twin, name) for name in formula} == formula
        assert twin.weight is not module.weight
        assert torch.equal(twin(x), module(x))
        assert repr(twin) == repr(module)


@layers
def test_the_constructor_is_that_of_linear_then_options_by_name_only(layer: Any) -> None:
    ours, theirs = (list(inspect.signature(c).parameters.values()) for c in (layer, nn.Linear))
    assert [(p.name, p.kind, p.default) for p in ours[: len(theirs)]] == [(p.name, p.kind, p.default) for p in theirs]
    assert all(p.kind is p.KEYWORD_ONLY for p in ours[len(theirs) :])


@layers
def test_positional_and_named_arguments_mean_what_they_mean_to_linear(layer: Any) -> None:
    for module in (
        layer(5, 4, False, "cpu", torch.float64),
        layer(in_features=5, out_features=4, bias=False, device="cpu", dtype=torch.float64),
    ):
        assert (module.in_features, module.out_features, module.bias) == (5, 4, None)
        assert module.weight.shape == (4, 5)
        assert module.weight.dtype == torch.float64


@layers
def test_a_layer_on_the_meta_device_knows_its_shapes(layer: Any) -> None:
    module = layer(5, 4, device="meta")
    assert {p.device.type for p in module.parameters()} == {"meta"}
    z = module(torch.empty(3, 5, device="meta"))
    assert (z.shape, z.device.type) == ((3, 4), "meta")
    assert module.to_empty(device="cpu").weight.device.type == "cpu"


@layers
@pytest.mark.parametrize("bias", [True, False])
def test_state_dicts_are_exchanged_with_linear_both_ways(layer: Any, bias: bool) -> None:
    plain, module = nn.Linear(5, 4, bias), layer(5, 4, bias, gain=2.0)
    assert list(module.state_dict()) == list(plain.state_dict())
    module.load_state_dict(plain.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), plain.parameters(), strict=True))
    assert module.gain == 2.0
    fresh = nn.Linear(5, 4, bias)
    fresh.load_state_dict(layer(5, 4, bias).state_dict())


@layers
def test_the_layer_is_no_linear_to_tools_that_look_for_the_type(layer: Any) -> None:
    assert not isinstance(layer(5, 4), nn.Linear)
    assert not issubclass(nn.Linear, layer)


def test_the_options_are_shown() -> None:
    assert repr(AffineLikeLinear(3, 2)) == "AffineLikeLinear(in_features=3, out_features=2, bias=True, gain=1)"
    assert repr(AffineLikeLinear(3, 2, bias=False, gain=0.25)) == "AffineLikeLinear(in_features=3, out_features=2, bias=False, gain=0.25)"
    assert repr(NormLikeLinear(3, 2)) == "NormLikeLinear(in_features=3, out_features=2, bias=True, gain=1, eps=None)"
    assert repr(NormLikeLinear(3, 2, eps=0.0, gain=2)) == "NormLikeLinear(in_features=3, out_features=2, bias=True, gain=2, eps=0.0)"


@layers
def test_a_gain_set_later_is_the_gain_used(layer: Any) -> None:
    module, x = layer(5, 4), torch.randn(3, 5)
    before = module(x)
    module.gain = 4.0
    assert torch.equal(module(x), 4 * before)


@options
def test_a_model_of_the_layer_compiles_to_one_graph_with_the_same_outputs_and_gradients(
    layer: Any, arguments: dict[str, Any], formula: dict[str, Any]
) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(layer(5, 4, **arguments), nn.Tanh())
    x = torch.randn(3, 5, dtype=model[0].weight.dtype)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    close(compiled(x), model(x))
    actual_gradients, wanted_gradients = (torch.autograd.grad(m(x).square().sum(), list(model.parameters())) for m in (compiled, model))
    for actual, wanted in zip(actual_gradients, wanted_gradients, strict=True):
        close(actual, wanted)


@layers
def test_per_sample_gradients_of_the_layer_are_those_of_a_loop(layer: Any) -> None:
    module, x = layer(5, 4, dtype=torch.float64, gain=1.5), torch.randn(6, 5, dtype=torch.float64)

    def loss(parameters: dict[str, torch.Tensor], row: torch.Tensor) -> torch.Tensor:
        z: torch.Tensor = torch.func.functional_call(module, parameters, (row,))
        return z.square().sum()

    parameters = {name: p.detach() for name, p in module.named_parameters()}
    at_once = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    for i, row in enumerate(x):
        wanted = torch.autograd.grad(module(row).square().sum(), list(module.parameters()))
        for name, expected in zip(parameters, wanted, strict=True):
            close(at_once[name][i], expected)


@layers
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_conversion_to_another_dtype_converts_the_layer(layer: Any, dtype: torch.dtype) -> None:
    module = layer(5, 4).to(dtype)
    x = torch.randn(3, 5).to(dtype)
    z = module(x)
    assert z.dtype == dtype
    close(z, LAYERS[layer](x, module.weight, module.bias))


@layers
def test_parameters_of_no_size_are_initialised_as_linear_does(layer: Any) -> None:
    with warnings.catch_warnings(record=True) as theirs:
        warnings.simplefilter("always")
        nn.Linear(0, 3)
    with warnings.catch_warnings(record=True) as ours:
        warnings.simplefilter("always")
        module = layer(0, 3)
    assert [str(w.message) for w in ours] == [str(w.message) for w in theirs]
    assert module(torch.empty(2, 0)).shape == (2, 3)


@layers
def test_a_tied_weight_is_used_and_trained_through_both_layers(layer: Any) -> None:
    first, second = layer(4, 4), layer(4, 4)
    second.weight = first.weight
    second(first(torch.randn(3, 4))).sum().backward()
    assert first.weight.grad is second.weight.grad
    assert len(list(nn.Sequential(first, second).parameters())) == 3
