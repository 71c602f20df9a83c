# The PatchNorm layers beside torch.nn's convolutions: constructor, initialisation, state, and the effect of every option.
from __future__ import annotations

import copy
import inspect
import io
import pickle
import warnings
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from conv_maps import ConvMap
from oracles import close
from torch import nn

import affine_divergence.nn as ann

LAYERS: dict[Any, Any] = {
    getattr(ann, f"PatchNorm{name}"): getattr(nn, name)
    for name in (f"Conv{transpose}{dims}d" for transpose, dims in product(("", "Transpose"), (1, 2, 3)))
}
layers = pytest.mark.parametrize("layer", LAYERS)
forms = pytest.mark.parametrize("form", ["affine-like", "norm-like"])


def _dims(layer: Any) -> int:
    return int(layer.__name__[-2])


def _transposed(layer: Any) -> bool:
    return "Transpose" in layer.__name__


def _cases() -> Iterator[tuple[Any, dict[str, Any]]]:
    """Every option alone and together with others; unequal numbers for the axes."""
    for layer in LAYERS:
        dims = _dims(layer)
        uneven = tuple((2, 1, 1)[:dims])
        singles: list[dict[str, Any]] = [
            {},
            {"stride": 2},
            {"stride": uneven},
            {"padding": 1},
            {"padding": uneven},
            {"dilation": 2},
            {"dilation": uneven},
            {"groups": 2},
            {"bias": False},
            {"device": "cpu"},
            {"dtype": torch.float32},
            {"form": "norm-like"},
            {"form": "norm-like", "eps": 0.0},
            {"form": "norm-like", "eps": 0.7, "gain": 0.3, "bias": False},
            {"gain": 2.5},
            {"gain": 3, "bias": False},
        ]
        if _transposed(layer):
            singles.append({"stride": 2, "output_padding": 1})
            singles.append({"stride": 2, "padding": uneven, "output_padding": 1, "groups": 2, "dilation": 2})
        else:
            paddings: list[dict[str, Any]] = [{"padding": p} for p in ("valid", "same", 2, uneven)]
            paddings.append({"padding": "same", "dilation": uneven})
            modes = ("zeros", "reflect", "replicate", "circular")
            singles += [{**padding, "padding_mode": mode} for padding, mode in product(paddings, modes)]
            singles += [
                {"padding": uneven, "padding_mode": mode, "stride": 2, "groups": 2, "form": "norm-like", "eps": 0.3, "gain": 1.7}
                for mode in modes
            ]
        yield from ((layer, {"dtype": torch.float64, **single}) for single in singles)


CASES = list(_cases())
cases = pytest.mark.parametrize(("layer", "arguments"), CASES, ids=lambda v: v.__name__ if isinstance(v, type) else str(v).replace(" ", ""))
KERNELS = {1: (4,), 2: (3, 2), 3: (2, 1, 3)}
SIZES = {1: (9,), 2: (6, 7), 3: (4, 4, 6)}
OWN = ("form", "gain", "eps")


def _definition(layer: Any, module: Any, arguments: dict[str, Any]) -> tuple[ConvMap, str]:
    geometry = {k: v for k, v in arguments.items() if k in ("stride", "padding", "dilation", "groups", "output_padding")}
    options = {k: float(v) for k, v in arguments.items() if k in ("gain", "eps")}
    kind, bias = arguments.get("form", "affine-like"), module.bias is not None
    map_ = ConvMap(kind, _dims(layer), _transposed(layer), KERNELS[_dims(layer)], (4, 6), bias, geometry, options)
    return map_, arguments.get("padding_mode", "zeros")


def _make(layer: Any, arguments: dict[str, Any]) -> Any:
    return layer(4, 6, KERNELS[_dims(layer)], **arguments)


@cases
def test_outputs_and_gradients_are_the_formula_with_the_options_given(layer: Any, arguments: dict[str, Any]) -> None:
    module = _make(layer, arguments)
    map_, mode = _definition(layer, module, arguments)
    x = torch.randn(2, 4, *SIZES[_dims(layer)], dtype=module.weight.dtype, requires_grad=True)
    z, expected = module(x), map_.expected(x, module.weight, module.bias, mode=mode)
    close(z, expected)
    upstream = torch.randn_like(z)
    leaves = [x, *module.parameters()]
    wanted_gradients = torch.autograd.grad(expected, leaves, upstream.double())
    for actual, wanted in zip(torch.autograd.grad(z, leaves, upstream), wanted_gradients, strict=True):
        close(actual, wanted)
    close(module(x[0]), expected[0].detach())
    assert torch.equal(module(input=x), z)


@layers
def test_every_option_of_the_constructor_has_an_effect(layer: Any) -> None:
    # Forwarded by hand, an option rots.
    x = torch.randn(2, 4, *SIZES[_dims(layer)])

    def outcome(**arguments: Any) -> tuple[Any, ...]:
        torch.manual_seed(3)
        module = layer(4, 6, 3, **{"stride": 2, "padding": 1, "form": "norm-like", **arguments})
        z = module(x.to(module.weight.dtype)) if module.weight.device.type == "cpu" else module.weight
        value = None if z.is_meta else round(z.detach().double().sum().item(), 6)
        return (*z.shape, z.dtype, z.device, len([*module.parameters()]), value)

    changes: dict[str, Any] = {
        "stride": 1, "padding": 0, "dilation": 2, "groups": 2, "bias": False, "device": "meta", "dtype": torch.float64,
        "form": "affine-like", "gain": 2.0, "eps": 0.5,
    }  # fmt: skip
    changes |= {"output_padding": 1} if _transposed(layer) else {"padding_mode": "circular"}
    taken = set(inspect.signature(layer).parameters) - {"in_channels", "out_channels", "kernel_size"}
    assert set(changes) | ({"padding_mode"} if _transposed(layer) else set()) == taken
    for name, value in changes.items():
        assert outcome(**{name: value}) != outcome(), name


@cases
def test_initialisation_and_attributes_are_those_of_torchs_layer_with_the_same_seed(layer: Any, arguments: dict[str, Any]) -> None:
    torch.manual_seed(7)
    plain = LAYERS[layer](4, 6, KERNELS[_dims(layer)], **{k: v for k, v in arguments.items() if k not in OWN})
    after = torch.random.get_rng_state()
    torch.manual_seed(7)
    module = _make(layer, arguments)
    assert torch.equal(torch.random.get_rng_state(), after)
    assert [name for name, _ in module.named_parameters()] == [name for name, _ in plain.named_parameters()]
    for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        assert (ours.dtype, ours.device, ours.requires_grad) == (theirs.dtype, theirs.device, theirs.requires_grad)
    torch.manual_seed(7)
    module.reset_parameters()
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), plain.parameters(), strict=True))
    theirs, ours = ({k: v for k, v in vars(m).items() if k not in ("_parameters", *OWN)} for m in (plain, module))
    assert ours == theirs
    assert set(vars(module)) - set(vars(plain)) == set(OWN)


@cases
def test_deep_copies_and_pickles_keep_every_option(layer: Any, arguments: dict[str, Any]) -> None:
    module = _make(layer, arguments)
    stream = io.BytesIO()
    torch.save(module, stream)
    stream.seek(0)
    x = torch.randn(2, 4, *SIZES[_dims(layer)], dtype=module.weight.dtype)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), torch.load(stream, weights_only=False)):
        assert type(twin) is layer
        assert repr(twin) == repr(module)
        assert twin.weight is not module.weight
        assert torch.equal(twin(x), module(x))


@layers
def test_the_constructor_is_that_of_torchs_layer_then_options_by_name_only(layer: Any) -> None:
    ours, theirs = (list(inspect.signature(c).parameters.values()) for c in (layer, LAYERS[layer]))
    assert [(p.name, p.kind, p.default) for p in ours[: len(theirs)]] == [(p.name, p.kind, p.default) for p in theirs]
    assert [(p.name, p.kind, p.default) for p in ours[len(theirs) :]] == [
        ("form", inspect.Parameter.KEYWORD_ONLY, "affine-like"),
        ("gain", inspect.Parameter.KEYWORD_ONLY, 1.0),
        ("eps", inspect.Parameter.KEYWORD_ONLY, None),
    ]


@layers
def test_positional_arguments_mean_what_they_mean_to_torchs_layer(layer: Any) -> None:
    middle = (1, 0, 2, False, 1) if _transposed(layer) else (1, 2, 2, False)
    positional = (4, 6, 3, 2, *middle, "zeros", "cpu", torch.float64)
    module, plain = layer(*positional), LAYERS[layer](*positional)
    x = torch.randn(2, 4, *[9] * _dims(layer), dtype=torch.float64)
    assert module(x).shape == plain(x).shape
    assert plain.extra_repr() == module.extra_repr().removesuffix(", form=affine-like, gain=1")


@layers
def test_a_swapped_class_and_three_attributes_make_torchs_layer_this_one(layer: Any) -> None:
    plain = LAYERS[layer](4, 6, 3, padding=1, groups=2)
    x = torch.randn(2, 4, *[5] * _dims(layer))
    module = layer(4, 6, 3, padding=1, groups=2, form="norm-like", gain=1.5, eps=0.2)
    module.load_state_dict(plain.state_dict())
    plain.__class__ = layer
    plain.form, plain.gain, plain.eps = "norm-like", 1.5, 0.2
    assert torch.equal(plain(x), module(x))
    assert repr(plain) == repr(module)


@layers
@pytest.mark.parametrize("bias", [True, False])
def test_state_dicts_are_exchanged_with_torchs_layer_both_ways(layer: Any, bias: bool) -> None:
    plain, module = LAYERS[layer](4, 6, 3, bias=bias), layer(4, 6, 3, bias=bias, gain=2.0)
    assert list(module.state_dict()) == list(plain.state_dict())
    module.load_state_dict(plain.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), plain.parameters(), strict=True))
    assert module.gain == 2.0
    LAYERS[layer](4, 6, 3, bias=bias).load_state_dict(layer(4, 6, 3, bias=bias).state_dict())


@layers
def test_the_layer_is_no_convolution_to_tools_that_look_for_the_type(layer: Any) -> None:
    assert not isinstance(layer(4, 6, 3), (nn.modules.conv._ConvNd, *LAYERS.values()))
    assert not issubclass(LAYERS[layer], layer)


@pytest.mark.parametrize("layer", [layer for layer in LAYERS if _transposed(layer)])
@forms
def test_an_output_size_is_taken_as_by_torchs_layer(layer: Any, form: str) -> None:
    dims = _dims(layer)
    plain, module = LAYERS[layer](4, 6, 3, stride=2, padding=1), layer(4, 6, 3, stride=2, padding=1, form=form)
    x = torch.randn(2, 4, *[4] * dims)
    for size in ([8] * dims, [7] * dims, [2, 6, *[8] * dims]):
        assert module(x, output_size=size).shape == plain(x, output_size=size).shape
        assert torch.equal(module(x, size), module(x, output_size=size))
    assert module(x[0], output_size=[8] * dims).shape == (6, *[8] * dims)
    with pytest.raises(ValueError, match="requested an output size"):
        module(x, output_size=[9] * dims)
    wider = layer(4, 6, 3, stride=2, padding=1, output_padding=1, form=form)
    wider.load_state_dict(module.state_dict())
    assert torch.equal(module(x, output_size=[8] * dims), wider(x))


def test_the_options_are_shown() -> None:
    assert repr(ann.PatchNormConv2d(3, 2, 3)) == (
        "PatchNormConv2d(3, 2, kernel_size=(3, 3), stride=(1, 1), form=affine-like, gain=1)"
    )
    own: dict[str, Any] = {"form": "norm-like", "gain": 0.25, "eps": 0.0}
    module = ann.PatchNormConv1d(4, 2, 3, padding="same", groups=2, bias=False, padding_mode="reflect", **own)
    assert repr(module) == (
        "PatchNormConv1d(4, 2, kernel_size=(3,), stride=(1,), padding=same, groups=2, bias=False, padding_mode=reflect, "
        "form=norm-like, gain=0.25, eps=0.0)"
    )
    assert repr(ann.PatchNormConvTranspose3d(4, 2, 3, stride=2, output_padding=1, form="norm-like")) == (
        "PatchNormConvTranspose3d(4, 2, kernel_size=(3, 3, 3), stride=(2, 2, 2), output_padding=(1, 1, 1), "
        "form=norm-like, gain=1, eps=None)"
    )


@layers
def test_an_unknown_form_and_an_eps_without_use_are_refused(layer: Any) -> None:
    with pytest.raises(ValueError, match="form must be 'affine-like' or 'norm-like', got 'affine_like'"):
        layer(4, 6, 3, form="affine_like")
    for eps in (1e-5, 0.0):
        with pytest.raises(ValueError, match=r"the affine-like form takes no eps, got .*: its root never vanishes; form="):
            layer(4, 6, 3, eps=eps)
    with pytest.raises(ValueError, match="eps must be zero or positive, got -1"):
        layer(4, 6, 3, form="norm-like", eps=-1)
    with pytest.raises(ValueError, match="gain must be positive, got 0"):
        layer(4, 6, 3, gain=0)


@layers
def test_what_torchs_layer_refuses_is_refused_in_its_words(layer: Any) -> None:
    for arguments in ({"groups": 3}, {"groups": 0}, {"padding_mode": "mirror"}, *(() if _transposed(layer) else ({"padding": "full"},))):
        with pytest.raises(ValueError) as theirs:
            LAYERS[layer](4, 6, 3, **arguments)
        with pytest.raises(ValueError) as ours:
            layer(4, 6, 3, **arguments)
        assert str(ours.value).replace("PatchNorm", "") == str(theirs.value)


@layers
def test_a_layer_on_the_meta_device_knows_its_shapes(layer: Any) -> None:
    module = layer(4, 6, 3, device="meta")
    x = torch.empty(2, 4, *[5] * _dims(layer), device="meta")
    z = module(x)
    assert (z.shape, z.device.type) == (LAYERS[layer](4, 6, 3, device="meta")(x).shape, "meta")
    assert module.to_empty(device="cpu").weight.device.type == "cpu"


@layers
def test_an_option_set_later_is_the_one_used(layer: Any) -> None:
    module, x = layer(4, 6, 3), torch.randn(2, 4, *[5] * _dims(layer))
    before = module(x)
    module.gain = 4.0
    close(module(x), 4 * before)
    module.form = "norm-like"
    assert not torch.allclose(module(x), 4 * before)


@layers
def test_a_model_of_the_layer_compiles_to_one_graph_with_the_same_outputs_and_gradients(layer: Any) -> None:
    torch._dynamo.reset()
    form = "norm-like" if _transposed(layer) else "affine-like"
    options = {} if _transposed(layer) else {"padding": 1, "padding_mode": "circular"}
    model = nn.Sequential(layer(2, 3, 3, form=form, dtype=torch.float64, **options), nn.ReLU(inplace=True))
    x = torch.randn(2, 2, *[4] * _dims(layer), dtype=torch.float64)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    close(compiled(x), model(x))
    actual_gradients, wanted_gradients = (torch.autograd.grad(m(x).square().sum(), list(model.parameters())) for m in (compiled, model))
    for actual, wanted in zip(actual_gradients, wanted_gradients, strict=True):
        close(actual, wanted)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@layers
def test_conversion_to_another_dtype_converts_the_layer(layer: Any, dtype: torch.dtype) -> None:
    module = layer(4, 6, 3).to(dtype)
    x = torch.randn(2, 4, *[5] * _dims(layer)).to(dtype)
    z = module(x)
    assert z.dtype == dtype
    close(z, ConvMap("affine-like", _dims(layer), _transposed(layer), (3,) * _dims(layer), (4, 6)).expected(x, module.weight, module.bias))


def test_channels_last_models_stay_so_through_layers_and_a_residual_connection() -> None:
    first, second = ann.PatchNormConv2d(4, 8, 3, padding=1), ann.PatchNormConv2d(8, 8, 3, padding="same", groups=4, form="norm-like")
    model = nn.Sequential(first, nn.ReLU(inplace=True), second).to(memory_format=torch.channels_last)
    x = torch.randn(2, 4, 5, 5).to(memory_format=torch.channels_last).requires_grad_()
    hidden = first(x)
    z = second(hidden.relu())
    z += hidden
    assert z.is_contiguous(memory_format=torch.channels_last)
    z.square().sum().backward()
    assert x.grad is not None
    assert x.grad.is_contiguous(memory_format=torch.channels_last)
    assert all(p.grad is not None for p in model.parameters())


@layers
def test_parameters_of_no_size_are_initialised_as_by_torchs_layer(layer: Any) -> None:
    caught = []
    for kind in (LAYERS[layer], layer):
        with warnings.catch_warnings(record=True) as raised:
            warnings.simplefilter("always")
            kind(0, 3, 3)
        caught.append([str(w.message) for w in raised])
    assert caught[0] == caught[1]


@layers
def test_a_tied_weight_is_used_and_trained_through_both_layers(layer: Any) -> None:
    first, second = layer(4, 4, 3, padding=1), layer(4, 4, 3, padding=1)
    second.weight = first.weight
    second(first(torch.randn(2, 4, *[5] * _dims(layer)))).sum().backward()
    assert first.weight.grad is second.weight.grad
    assert len(list(nn.Sequential(first, second).parameters())) == 3
