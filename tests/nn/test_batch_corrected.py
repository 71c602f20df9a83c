# The batch-corrected layers beside torch.nn's: constructor, state, bit-identical outputs, and the gradient with every option.
from __future__ import annotations

import copy
import gc
import inspect
import io
import math
import pickle
from collections.abc import Iterator
from itertools import product
from typing import Any

import conv_oracles
import pytest
import torch
from batch_oracles import WIDE, augmented, joined, realised_share, ridge, ridge_of_patches
from oracles import close
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import affine_divergence.nn as ann

# torch's own: of its convolution, of every Function that it compiles, and of its rules for forward mode.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script(_method)?` is deprecated:DeprecationWarning"),
]
LAYERS: dict[Any, Any] = {getattr(ann, f"BatchCorrected{name}"): getattr(nn, name) for name in ("Linear", "Conv1d", "Conv2d", "Conv3d")}
layers = pytest.mark.parametrize("layer", LAYERS)
KERNELS = {1: (4,), 2: (3, 2), 3: (2, 1, 3)}
SIZES = {0: (), 1: (9,), 2: (6, 7), 3: (4, 4, 6)}
OWN = {"damping": 1e-3, "decay": 0.0, "every": 1, "process_group": None}


def _dims(layer: Any) -> int:
    return 0 if layer.__name__.endswith("Linear") else int(layer.__name__[-2])


def _make(layer: Any, **arguments: Any) -> Any:
    sizes = (4, 6) if not _dims(layer) else (4, 6, KERNELS[_dims(layer)])
    return layer(*sizes, **arguments)


def _input(layer: Any, batch: int = 2, dtype: torch.dtype = WIDE) -> Tensor:
    return torch.randn(batch, 4, *SIZES[_dims(layer)], dtype=dtype)


def _wanted(layer: Any, module: Any, x: Tensor, g: Tensor, damping: float = 1e-3) -> Tensor:
    """The gradient of [W b] by the definition."""
    bias = module.bias is not None
    if not _dims(layer):
        return ridge(augmented(x, bias=bias), g, damping)
    padding = module.padding
    patches = conv_oracles.conv_patches(x, module.kernel_size, module.stride, padding, module.dilation, module.padding_mode)
    return ridge_of_patches(patches, g, module.groups, damping, bias=bias)


def _gradient(module: Any) -> Tensor:
    return joined(module.weight.grad, None if module.bias is None else module.bias.grad)


def _cases() -> Iterator[tuple[Any, dict[str, Any]]]:
    for layer in LAYERS:
        dims = _dims(layer)
        singles: list[dict[str, Any]] = [{}, {"bias": False}, {"damping": 0.3}, {"damping": 0.0}, {"device": "cpu"}]
        if dims:
            uneven = tuple((2, 1, 1)[:dims])
            singles += [{"stride": 2}, {"stride": uneven}, {"dilation": uneven}, {"groups": 2}]
            singles += [
                {"padding": padding, "padding_mode": mode}
                for padding, mode in product((1, uneven, "same", "valid"), ("zeros", "reflect", "replicate", "circular"))
            ]
            singles.append({"padding": uneven, "padding_mode": "circular", "stride": 2, "groups": 2, "damping": 0.1, "bias": False})
        yield from ((layer, single) for single in singles)


CASES = list(_cases())
cases = pytest.mark.parametrize(("layer", "arguments"), CASES, ids=lambda v: v.__name__ if isinstance(v, type) else str(v).replace(" ", ""))


@cases
def test_outputs_are_torchs_and_gradients_the_definition_with_the_options_given(layer: Any, arguments: dict[str, Any]) -> None:
    module = _make(layer, dtype=WIDE, **arguments)
    plain = _make(LAYERS[layer], dtype=WIDE, **{k: v for k, v in arguments.items() if k not in OWN})
    plain.load_state_dict(module.state_dict())
    for batch in (1, 30 if not _dims(layer) else 2):
        x = _input(layer, batch).requires_grad_()
        z, theirs = module(x), plain(x)
        assert torch.equal(z, theirs)
        g = torch.randn_like(z)
        module.zero_grad()
        z.backward(g)
        assert torch.equal(x.grad, torch.autograd.grad(theirs, x, g)[0])  # type: ignore[arg-type]
        close(_gradient(module), _wanted(layer, module, x, g, arguments.get("damping", 1e-3)), tolerance=1e-8)


@layers
def test_the_constructor_is_that_of_torchs_layer_then_options_by_name_only(layer: Any) -> None:
    ours, theirs = (list(inspect.signature(c).parameters.values()) for c in (layer, LAYERS[layer]))
    assert [(p.name, p.kind, p.default) for p in ours[: len(theirs)]] == [(p.name, p.kind, p.default) for p in theirs]
    assert [(p.name, p.kind, p.default) for p in ours[len(theirs) :]] == [
        (name, inspect.Parameter.KEYWORD_ONLY, default) for name, default in OWN.items()
    ]


@cases
def test_initialisation_and_state_are_those_of_torchs_layer_with_the_same_seed(layer: Any, arguments: dict[str, Any]) -> None:
    torch.manual_seed(7)
    plain = _make(LAYERS[layer], **{k: v for k, v in arguments.items() if k not in OWN})
    torch.manual_seed(7)
    module = _make(layer, **arguments, decay=0.9)
    module(_input(layer, dtype=torch.float32)).sum().backward()
    assert isinstance(module, LAYERS[layer])
    assert list(module.state_dict()) == list(plain.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(module.state_dict().values(), plain.state_dict().values(), strict=True))
    assert [*module.named_buffers()] == []
    plain.load_state_dict(module.state_dict())
    module.load_state_dict(plain.state_dict())
    assert module.extra_repr().startswith(plain.extra_repr())


def test_the_options_are_shown() -> None:
    assert repr(ann.BatchCorrectedLinear(3, 2)) == "BatchCorrectedLinear(in_features=3, out_features=2, bias=True, damping=0.001)"
    assert repr(ann.BatchCorrectedConv1d(2, 2, 3, groups=2, damping=0.0, decay=0.95, every=10)) == (
        "BatchCorrectedConv1d(2, 2, kernel_size=(3,), stride=(1,), groups=2, damping=0, decay=0.95, every=10)"
    )


@layers
@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"damping": -1.0}, ValueError, "damping must be zero or positive and finite, got -1.0"),
        ({"damping": None}, TypeError, "damping must be a number, got NoneType"),
        ({"decay": 1.0}, ValueError, r"decay must be in \[0, 1\), got 1.0; 0.0 keeps no average"),
        ({"decay": -0.1}, ValueError, r"decay must be in \[0, 1\), got -0.1"),
        ({"decay": math.nan}, ValueError, r"decay must be in \[0, 1\), got nan"),
        ({"decay": "0.9"}, TypeError, "decay must be a number, got str"),
        ({"every": 10}, ValueError, "every must be 1 without an average, got 10: .*nothing to keep; give a decay"),
        ({"every": 0, "decay": 0.9}, ValueError, "every must be 1 or more, got 0"),
        ({"every": 2.0, "decay": 0.9}, TypeError, "every must be a whole number, got float"),
        ({"process_group": 1}, TypeError, "process_group must be a torch.distributed.ProcessGroup or None, got int"),
    ],
)
def test_options_that_are_none_are_refused(layer: Any, options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        _make(layer, **options)


@layers
def test_an_option_set_later_is_the_one_used_and_checked(layer: Any) -> None:
    module, x = _make(layer, dtype=WIDE), _input(layer)
    module.damping = 0.5
    z = module(x)
    z.sum().backward()
    close(_gradient(module), _wanted(layer, module, x, torch.ones_like(z), 0.5), tolerance=1e-8)
    module.damping = -1.0
    with pytest.raises(ValueError, match="damping must be zero or positive"):
        module(x).sum().backward()


@layers
@pytest.mark.parametrize("batch", [1, 40])
@pytest.mark.parametrize("damping", [0.0, 1e-3, 1.0])
def test_the_share_is_what_a_step_realises(layer: Any, batch: int, damping: float) -> None:
    module, x = _make(layer, dtype=WIDE, damping=damping), _input(layer, batch)
    assert module.realised_share is None
    z = module(x)
    g = torch.randn_like(z)
    z.backward(g)
    plain = _make(LAYERS[layer], dtype=WIDE)
    with torch.no_grad():
        plain.weight.copy_(-module.weight.grad)
        plain.bias.copy_(-module.bias.grad)
        change = plain(x)
    share = module.realised_share
    assert (share.shape, share.requires_grad) == ((), False)
    close(share, (change * -g).sum() / g.square().sum())
    assert 0 <= share <= 1


def test_the_share_is_of_the_last_backward_and_nan_where_nothing_was_wanted() -> None:
    layer = ann.BatchCorrectedLinear(8, 4, dtype=WIDE)
    x, y = torch.randn(5, 8, dtype=WIDE), torch.randn(60, 8, dtype=WIDE)
    shares = []
    for batch in (x, y):
        g = torch.randn(len(batch), 4, dtype=WIDE)
        layer(batch).backward(g)
        shares.append(realised_share(augmented(batch), g, ridge(augmented(batch), g, 1e-3)))
        assert layer.realised_share == pytest.approx(shares[-1])
    assert shares[0] > 0.9 > 0.4 > shares[1]
    layer(x).backward(torch.zeros(5, 4, dtype=WIDE))
    assert layer.realised_share is not None
    assert layer.realised_share.isnan()
    layer(x[:0]).sum().backward()
    assert layer.realised_share.isnan()


@pytest.mark.parametrize(("layer", "options"), [(ann.BatchCorrectedLinear, {"decay": 0.9, "every": 2}), (ann.BatchCorrectedConv2d, {})])
def test_a_compiled_model_has_the_gradients_shares_and_averages_of_the_eager_one_in_one_graph(layer: Any, options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(_make(layer, dtype=WIDE, **options), nn.ReLU(inplace=True))
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for batch in (3, 3, 1, 5):
        x = _input(layer, batch)
        for ours in (compiled, eager):
            ours.zero_grad()
            (ours(x).square().mean() + ours(2 * x).sum()).backward()
        for a, b in zip(model.parameters(), eager.parameters(), strict=True):
            close(a.grad, b.grad)
        close(model[0].realised_share, eager[0].realised_share)
    model[0].damping = eager[0].damping = 0.5  # no graph holds it
    for ours in (compiled, eager):
        ours.zero_grad()
        ours(x).sum().backward()
    close(model[0].weight.grad, eager[0].weight.grad)


def test_a_compiled_layer_that_is_frozen_in_part_or_autocast_has_the_gradients_of_the_eager_one() -> None:
    for frozen, dtype in (("weight", None), ("bias", None), (None, torch.bfloat16)):
        torch._dynamo.reset()
        model = ann.BatchCorrectedConv2d(2, 4, 3, padding=1, padding_mode="circular")
        if frozen is not None:
            getattr(model, frozen).requires_grad_(False)
        compiled, x = torch.compile(model, fullgraph=True, backend="aot_eager"), torch.randn(2, 2, 5, 5)
        gradients = []
        for ours in (compiled, model):
            model.zero_grad()
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                z = ours(x)
            z.float().square().sum().backward()
            gradients.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        for a, b in zip(*gradients, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                close(a, b)


def test_layers_compiled_one_by_one_share_their_graphs() -> None:
    torch._dynamo.reset()
    graphs: list[Any] = []

    def counting(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    x = torch.randn(5, 4)
    for _ in range(12):  # torch gives up at eight graphs of one forward
        layer = ann.BatchCorrectedLinear(4, 4)
        layer.compile(backend=counting, fullgraph=True)
        layer(x).sum().backward()
        assert layer.realised_share is not None
    assert len(graphs) == 1


def test_inductor_makes_the_gradients_of_the_eager_layer() -> None:
    torch._dynamo.reset()
    model = nn.Sequential(ann.BatchCorrectedLinear(6, 8), nn.ReLU(), ann.BatchCorrectedLinear(8, 3, decay=0.5))
    eager, compiled = copy.deepcopy(model), torch.compile(model, fullgraph=True)
    x = torch.randn(20, 6)
    for ours in (compiled, eager):
        ours(x).square().mean().backward()
    for a, b in zip(model.parameters(), eager.parameters(), strict=True):
        close(a.grad, b.grad, tolerance=1e-4)
    close(model[0].realised_share, eager[0].realised_share)


@layers
def test_per_sample_gradients_are_those_of_batches_of_one_and_leave_the_layer_as_it_was(layer: Any) -> None:
    module = _make(layer, dtype=WIDE, decay=0.9)
    module(_input(layer)).sum().backward()
    average, share = copy.deepcopy(module._average), module.realised_share
    plain = _make(layer, dtype=WIDE)
    plain.load_state_dict(module.state_dict())
    x = _input(layer, 4)

    def loss(parameters: Any, x: Tensor, of: Any) -> Tensor:
        return torch.func.functional_call(of, parameters, (x,)).sin().sum()

    for of in (module, plain):
        gradients = torch.func.vmap(torch.func.grad(loss), (None, 0, None))(dict(of.named_parameters()), x, of)
        if of is plain:
            assert plain.realised_share is None
            for index in range(4):
                plain.zero_grad()
                loss(dict(plain.named_parameters()), x[index : index + 1], plain).backward()
                close(gradients["weight"][index], plain.weight.grad, tolerance=1e-9)
    assert module.realised_share is share
    assert torch.equal(module._average.total, average.total)
    whole = torch.func.grad(loss)(dict(plain.named_parameters()), x, plain)
    plain.zero_grad()
    loss(dict(plain.named_parameters()), x, plain).backward()
    close(whole["weight"], plain.weight.grad, tolerance=1e-9)


@layers
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_counts_each_backward_once(layer: Any, reentrant: bool) -> None:
    module, twin = _make(layer, dtype=WIDE, decay=0.5), _make(layer, dtype=WIDE, decay=0.5)
    twin.load_state_dict(module.state_dict())
    for _ in range(2):
        x = _input(layer).requires_grad_()
        checkpoint(module, x, use_reentrant=reentrant).sin().sum().backward()
        twin(x).sin().sum().backward()
    close(module.weight.grad, twin.weight.grad)
    assert module._average.backwards == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@layers
def test_under_autocast_outputs_are_torchs_and_gradients_keep_the_parameters_dtype(layer: Any, dtype: torch.dtype) -> None:
    module, plain = _make(layer), _make(LAYERS[layer])
    plain.load_state_dict(module.state_dict())
    x = _input(layer, dtype=torch.float32)
    with torch.autocast("cpu", dtype):
        z, theirs = module(x), plain(x)
    assert z.dtype == dtype
    assert torch.equal(z, theirs)
    g = 1e-4 * torch.randn(z.shape)
    z.backward(g.to(dtype))
    assert module.weight.grad.dtype == torch.float32
    close(_gradient(module), _wanted(layer, module, x, g.to(dtype)), tolerance=1e-3)


@layers
def test_deep_copies_and_pickles_keep_the_options_and_their_own_share(layer: Any) -> None:
    module = _make(layer, dtype=WIDE, damping=0.2, decay=0.5, every=2)
    stream = io.BytesIO()
    torch.save(module, stream)
    stream.seek(0)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), torch.load(stream, weights_only=False)):
        assert repr(twin) == repr(module)
        twin(_input(layer)).sum().backward()
        assert twin.realised_share is not None
        assert module.realised_share is None
        assert module._average is None


@pytest.mark.parametrize(("optimizer", "lr"), [(torch.optim.SGD, 1.0), (torch.optim.AdamW, 0.01), (torch.optim.RMSprop, 0.01)])
def test_any_optimiser_trains_a_model_of_the_layers(optimizer: Any, lr: float) -> None:
    model = nn.Sequential(
        ann.BatchCorrectedConv2d(1, 4, 3, padding=1), nn.ReLU(inplace=True), nn.Flatten(), ann.BatchCorrectedLinear(64, 2, damping=0.1)
    )
    x = torch.randn(12, 1, 4, 4)
    target = (x.mean((1, 2, 3)) > 0).long()
    steps, losses = optimizer(model.parameters(), lr=lr), []
    for _ in range(40):
        steps.zero_grad()
        losses.append(nn.functional.cross_entropy(model(x), target))
        losses[-1].backward()
        steps.step()
    assert losses[-1] < 0.7 * losses[0]


def test_a_layer_on_the_meta_device_knows_its_shapes() -> None:
    layer = ann.BatchCorrectedConv2d(2, 4, 3, device="meta")
    assert layer(torch.empty(3, 2, 5, 5, device="meta")).shape == (3, 4, 3, 3)
    layer = layer.to_empty(device="cpu")
    layer.reset_parameters()
    layer(torch.randn(3, 2, 5, 5)).sum().backward()
    assert torch.isfinite(layer.weight.grad).all()


def test_without_grad_it_is_torchs_layer_and_nothing_else() -> None:
    layer = ann.BatchCorrectedLinear(3, 2)
    with torch.no_grad():
        assert not layer(torch.randn(4, 3)).requires_grad
    layer.requires_grad_(False)
    x = torch.randn(4, 3, requires_grad=True)
    layer(x).sum().backward()
    assert layer.realised_share is None
    assert x.grad is not None


def test_derivatives_of_the_gradient_are_refused() -> None:
    layer, x = ann.BatchCorrectedLinear(3, 2), torch.randn(4, 3)
    (gradient,) = torch.autograd.grad(layer(x).square().sum(), layer.weight, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        gradient.sum().backward()
    with pytest.raises(RuntimeError, match="no forward mode"):
        torch.func.jvp(lambda x: layer(x), (x,), (x,))


def test_a_layer_that_nothing_holds_any_more_is_there_for_its_backward() -> None:
    x = torch.randn(5, 6, requires_grad=True)
    torch.manual_seed(0)
    z = ann.BatchCorrectedLinear(6, 4)(x)
    gc.collect()
    z.sum().backward()
    torch.manual_seed(0)
    close(x.grad, torch.autograd.grad(nn.Linear(6, 4)(x).sum(), x)[0])


@pytest.mark.parametrize("rows", [5, 30], ids=["dual", "primal"])
def test_several_upstream_gradients_may_be_given_at_once(rows: int) -> None:
    layer, g = ann.BatchCorrectedLinear(6, 4), torch.randn(3, rows, 4)
    x = torch.randn(rows, 6)
    z = layer(x)
    together = torch.autograd.grad(z, list(layer.parameters()), g, is_grads_batched=True, retain_graph=True)
    for place in range(3):
        for one, alone in zip(together, torch.autograd.grad(z, list(layer.parameters()), g[place], retain_graph=True), strict=True):
            close(one[place], alone)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")  # torch's own
def test_a_layer_without_outputs_has_empty_gradients() -> None:
    layer = ann.BatchCorrectedLinear(4, 0)
    layer(torch.randn(3, 4)).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.shape == (0, 4)
