# What torch tests of all its modules, for all of ours: in-place use, gradients, forward mode, strides, meta tensors, checkpoints, pickling.
from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from layer_cases import LAYERS, cases
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from affine_divergence import nn as ad_nn

every_layer = pytest.mark.parametrize("name", LAYERS)
STRUCTURAL = [name for name in LAYERS if "Corrected" not in name]
IN_PLACE: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "relu_": (torch.relu_, torch.relu),
    "+=": (lambda z: z.add_(1.0), lambda z: z + 1.0),
    "z[0] =": (lambda z: z.index_fill_(0, torch.tensor([0]), 0.0), lambda z: z.index_fill(0, torch.tensor([0]), 0.0)),
}


def gradients(layer: torch.nn.Module, x: Tensor, after: Callable[[Tensor], Tensor] = lambda z: z) -> list[Tensor]:
    """Of x and all parameters, of a weighted sum of the output."""
    z = after(layer(x))
    weights = torch.cos(torch.arange(z.numel(), dtype=torch.float64)).view(z.shape).to(z.dtype)
    return list(torch.autograd.grad((z * weights).sum(), [x, *layer.parameters()]))


@every_layer
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("operation", IN_PLACE)
def test_output_can_be_changed_in_place(name: str, dtype: torch.dtype, operation: str) -> None:
    in_place, out_of_place = IN_PLACE[operation]
    for layer, x in cases(name, dtype):
        for found, wanted in zip(gradients(layer, x, in_place), gradients(layer, x, out_of_place), strict=True):
            assert torch.equal(found, wanted)


@every_layer
def test_module_with_in_place_activation_trains_like_one_without(name: str) -> None:
    for layer, x in cases(name, torch.float32):
        found = gradients(torch.nn.Sequential(layer, torch.nn.ReLU(inplace=True)), x)
        wanted = gradients(torch.nn.Sequential(layer, torch.nn.ReLU()), x)
        assert all(map(torch.equal, found, wanted))


@every_layer
def test_output_has_the_same_bits_with_and_without_a_graph(name: str) -> None:
    for dtype in (torch.float32, torch.float64):
        for layer, x in cases(name, dtype):
            with torch.no_grad():
                without = layer(x)
            assert torch.equal(layer(x), without)


@every_layer
@pytest.mark.parametrize("saved", [True, False])
def test_selective_checkpointing_gives_the_same_gradients(name: str, saved: bool) -> None:
    policy = CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.MUST_RECOMPUTE

    def contexts() -> tuple[object, object]:
        return create_selective_checkpoint_contexts(lambda *_, **__: policy)  # type: ignore[no-any-return]

    for layer, x in cases(name, torch.float32):
        wanted = gradients(layer, x)
        for one, other in zip(_checkpointed(layer, x, contexts), wanted, strict=True):
            torch.testing.assert_close(one, other)


def _checkpointed(layer: torch.nn.Module, x: Tensor, contexts: Callable[[], tuple[object, object]]) -> list[Tensor]:
    class Checkpointed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            z: Tensor = checkpoint(self.layer, x, use_reentrant=False, context_fn=contexts)
            return z

    return gradients(Checkpointed(), x)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # torch's own rules of forward mode are scripted
@pytest.mark.parametrize("name", STRUCTURAL)
def test_gradients_batched_gradients_and_forward_mode_agree_with_differences(name: str) -> None:
    for layer, x in cases(name):
        parameters = [p.detach().clone().requires_grad_() for p in layer.parameters()]
        names = [n for n, _ in layer.named_parameters()]

        def call(x: Tensor, *values: Tensor, layer: torch.nn.Module = layer, names: list[str] = names) -> Tensor:
            z: Tensor = torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))
            return z

        fast = "Linear" not in name  # without the batched check of forward mode, which a single row of a linear layer needs
        options = {"check_batched_grad": True, "check_forward_ad": True, "check_batched_forward_grad": not fast, "fast_mode": fast}
        assert torch.autograd.gradcheck(call, (x, *parameters), **options)


@every_layer
def test_input_gradients_of_corrected_layers_agree_with_differences(name: str) -> None:
    for layer, x in cases(name):
        assert torch.autograd.gradcheck(layer, (x,), check_batched_grad=True, fast_mode=True)


@every_layer
def test_output_and_gradients_are_independent_of_input_strides(name: str) -> None:
    for layer, x in cases(name):
        strided = x.detach().mT.contiguous().mT if x.dim() > 1 else torch.stack([x.detach(), x.detach()], -1)[..., 0]
        assert x.dim() == 1 or not strided.is_contiguous() or 1 in strided.shape
        strided.requires_grad_()
        torch.testing.assert_close(layer(strided), layer(x))
        for one, other in zip(gradients(layer, strided), gradients(layer, x), strict=True):
            torch.testing.assert_close(one, other)


TWINS = {
    f"{kind}Conv{dim}d": getattr(torch.nn, f"Conv{dim}d") for kind in ("SampleCorrected", "BatchCorrected", "PatchNorm") for dim in (2, 3)
}


@pytest.mark.parametrize("name", TWINS)
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("converted", ["input", "layer", "both", "none"])
def test_channels_last_gives_the_strides_of_torchs_convolution(name: str, groups: int, converted: str) -> None:
    dim = int(name[-2])
    memory_format = torch.channels_last if dim == 2 else torch.channels_last_3d
    layer, twin = (cls(4, 4, 3, groups=groups) for cls in (getattr(ad_nn, name), TWINS[name]))
    x = torch.randn(2, 4, *[5] * dim)
    if converted in ("layer", "both"):
        layer, twin = layer.to(memory_format=memory_format), twin.to(memory_format=memory_format)
    if converted in ("input", "both"):
        x = x.to(memory_format=memory_format)
    z, plain = layer(x), twin(x)
    assert z.stride() == plain.stride()
    z.sum().backward()
    plain.sum().backward()
    if "Corrected" in name:
        assert layer.weight.grad.stride() == twin.weight.grad.stride()


@every_layer
def test_meta_tensors_give_shapes(name: str) -> None:
    for layer, x in cases(name, torch.float32):
        on_meta, meta = copy.deepcopy(layer).to("meta"), x.detach().to("meta").requires_grad_()
        z = on_meta(meta)
        assert (z.shape, z.dtype, z.device.type) == (layer(x).shape, torch.float32, "meta")
        z.sum().backward()
        assert [p.grad is not None and p.grad.shape == p.shape for p in on_meta.parameters()] == [True] * len(list(layer.parameters()))


@pytest.mark.parametrize("name", [name for name in LAYERS if name.startswith("Batch")])
def test_running_average_works_on_meta_tensors(name: str) -> None:
    sizes = {"BatchCorrectedLinear": ((4, 3), (5, 4))}
    constructor, shape = sizes.get(name, ((2, 4, 2), (3, 2, *(5, 4, 3)[: int(name[-2]) if name[-1] == "d" else 0])))
    layer = getattr(ad_nn, name)(*constructor, decay=0.9, every=2, device="meta")
    for _ in range(3):
        layer(torch.empty(shape, device="meta")).sum().backward()
    assert layer.weight.grad.shape == layer.weight.shape


@every_layer
def test_layer_survives_pickling_copying_and_conversion(name: str) -> None:
    for layer, x in cases(name):
        for other in (pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)):
            assert repr(other) == repr(layer)
            assert torch.equal(other(x), layer(x))
        assert layer.float()(x.detach().float()).dtype == torch.float32
