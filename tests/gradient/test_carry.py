# The carrier of corrected gradients in eager mode: torch's own outputs and input gradients, bit for bit, and the parameters' as asked.
from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from affine_divergence.gradient._carry import carried
from affine_divergence.nn import BatchCorrectedLinear, SampleCorrectedLinear

Pair = tuple[Tensor | None, Tensor | None]


def multiples(g: Tensor, x: Tensor, weight: Tensor, needed: tuple[bool, bool]) -> Pair:
    """Twice the plain weight gradient and three times the plain bias gradient of a linear map."""
    g, x = g.reshape(-1, g.shape[-1]).to(weight.dtype), x.reshape(-1, x.shape[-1]).to(weight.dtype)
    return 2 * g.mT @ x if needed[0] else None, 3 * g.sum(0) if needed[1] else None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return carried(F.linear, x, weight, bias, multiples)


def conv(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    def ones(g: Tensor, x: Tensor, weight: Tensor, needed: tuple[bool, bool]) -> Pair:
        return torch.ones_like(weight), torch.ones(len(weight))

    return carried(lambda *tensors: F.conv2d(*tensors, padding=1), x, weight, bias, ones)


class Layer(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def leaves(*shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """x (*shape, 5), weight (4, 5), bias (4)."""
    return [torch.randn(s).to(dtype).requires_grad_() for s in ((*shape, 5), (4, 5), (4,))]


def _doubled_and_tripled(actual: Any, plain: Any, **tolerances: float) -> None:
    torch.testing.assert_close(actual[0], 2 * plain[0], **tolerances)
    torch.testing.assert_close(actual[1], 3 * plain[1], **tolerances)


SHAPES = [(), (6,), (2, 3), (2, 2, 3), (0,), (2, 0)]


@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_outputs_and_input_gradients_are_bit_identical_to_torchs(
    shape: tuple[int, ...], dtype: torch.dtype, autocast: torch.dtype | None
) -> None:
    tensors = leaves(*shape, dtype=dtype)
    with torch.autocast("cpu", autocast) if autocast else nullcontext():
        z, plain = linear(*tensors), F.linear(*tensors)
    assert torch.equal(z, plain)
    assert (z.dtype, z.stride(), z.shape) == (plain.dtype, plain.stride(), plain.shape)
    upstream = torch.randn(z.shape).to(z.dtype)
    (x_grad, *gradients), (plain_x_grad, *plain_gradients) = (torch.autograd.grad(f, tensors, upstream) for f in (z, plain))
    assert torch.equal(x_grad, plain_x_grad)
    assert [g.dtype for g in gradients] == [dtype, dtype]
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5 if dtype == torch.float32 and not autocast else 5e-2
    _doubled_and_tripled(gradients, plain_gradients, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("layout", ["expanded", "strided", "transposed"])
def test_upstream_gradients_and_inputs_of_any_stride_give_torchs_input_gradient(layout: str) -> None:
    _, weight, bias = leaves()
    x = {"expanded": torch.randn(6, 5), "strided": torch.randn(6, 10)[:, ::2], "transposed": torch.randn(5, 6).mT}[layout].requires_grad_()
    upstream = {"expanded": torch.ones(()).expand(6, 4), "strided": torch.randn(6, 8)[:, 1::2], "transposed": torch.randn(4, 6).mT}[layout]
    z, plain = linear(x, weight, bias), F.linear(x, weight, bias)
    (x_grad, *gradients), (plain_x_grad, *plain_gradients) = (torch.autograd.grad(f, (x, weight, bias), upstream) for f in (z, plain))
    assert torch.equal(x_grad, plain_x_grad)
    _doubled_and_tripled(gradients, plain_gradients)


@pytest.mark.parametrize("x_learns", [True, False], ids=["hidden", "first"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_activation_in_place_after_the_layer_leaves_its_gradients_right(shape: tuple[int, ...], x_learns: bool) -> None:
    x, *parameters = leaves(*shape)
    x.requires_grad_(x_learns)
    wanted = [x, *parameters] if x_learns else parameters
    gradients, plain = (torch.autograd.grad(f(x, *parameters).relu_().square().sum(), wanted) for f in (linear, F.linear))
    assert not x_learns or torch.equal(gradients[0], plain[0])
    _doubled_and_tripled(gradients[-2:], plain[-2:])


@pytest.mark.parametrize("batched", [True, False], ids=["images", "image"])
def test_an_activation_in_place_after_a_convolution_keeps_its_memory_format(batched: bool) -> None:
    x = torch.randn(2, 3, 5, 4).to(memory_format=torch.channels_last)
    x, weight, bias = ((x if batched else x[0]), torch.randn(4, 3, 3, 3), torch.randn(4))
    for tensor in (x, weight, bias):
        tensor.requires_grad_()
    z, plain = conv(x, weight, bias), F.conv2d(x, weight, bias, padding=1)
    assert torch.equal(z, plain)
    assert z.stride() == plain.stride()
    (x_grad, weight_grad), (plain_x_grad,) = torch.autograd.grad(z.relu_().sum(), (x, weight)), torch.autograd.grad(plain.relu_().sum(), x)
    assert torch.equal(x_grad, plain_x_grad)
    assert torch.equal(weight_grad, torch.ones_like(weight))


def test_an_output_that_is_a_view_costs_no_copy_of_the_upstream_gradient() -> None:
    x, weight, bias = leaves(2, 3)
    assert F.linear(x.detach(), weight.detach(), bias.detach())._is_view()
    z = linear(x, weight, bias)
    assert not z._is_view()
    assert type(z.grad_fn).__name__ == "_CarryInPlaceBackward"  # not AsStrided, through which a changed view's goes


def test_an_input_changed_in_place_before_the_backward_is_refused_as_by_torch() -> None:
    for function in (linear, F.linear):
        x, weight, bias = leaves(6)
        x = 1 * x
        z = function(x, weight, bias)
        x.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.sum().backward()


def test_only_what_learns_gets_a_gradient_and_the_correction_is_told() -> None:
    told = []

    def telling(g: Tensor, x: Tensor, weight: Tensor, needed: tuple[bool, bool]) -> Pair:
        told.append(needed)
        return multiples(g, x, weight, (True, True))

    for learns in ((True, True), (True, False), (False, True)):
        x, weight, bias = leaves(6)
        weight.requires_grad_(learns[0])
        bias.requires_grad_(learns[1])
        carried(F.linear, x, weight, bias, telling).sum().backward()
        assert (weight.grad is not None, bias.grad is not None) == learns
    carried(F.linear, x, weight.requires_grad_(), None, telling).sum().backward()
    assert told == [(True, True), (True, False), (False, True), (True, False)]


def test_who_asks_for_the_gradient_of_one_parameter_alone_does_not_change_it() -> None:
    x, weight, bias = leaves(6)
    told = []

    def telling(g: Tensor, x: Tensor, weight: Tensor, needed: tuple[bool, bool]) -> Pair:
        told.append(needed)
        return multiples(g, x, weight, needed)

    torch.autograd.grad(carried(F.linear, x, weight, bias, telling).sum(), weight)
    assert told == [(True, True)]


def _forbidden(g: Tensor, x: Tensor, weight: Tensor, needed: tuple[bool, bool]) -> Pair:
    raise AssertionError("nothing learns")


# torch's own rules for forward mode are loaded through torch.jit.script, which torch deprecates.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "no-grad"])
def test_where_nothing_learns_it_is_torchs_operation_in_every_mode(frozen: bool) -> None:
    x, weight, bias = (t.double().detach() for t in leaves(3))
    weight.requires_grad_(not frozen)

    def function(x: Tensor) -> Tensor:
        with nullcontext() if frozen else torch.no_grad():
            return carried(F.linear, x, weight, bias, _forbidden)

    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        tangent = torch.autograd.forward_ad.unpack_dual(function(dual)).tangent
    torch.testing.assert_close(tangent, F.linear(torch.ones_like(x), weight).detach())
    if frozen:
        assert torch.autograd.gradcheck(function, x.requires_grad_(), check_forward_ad=True)
        assert torch.autograd.gradgradcheck(lambda x: function(x).square(), x)


def test_an_optimiser_that_steps_in_the_hook_of_a_gradient_finds_the_input_gradient_already_made() -> None:
    # Its weight changes in mid-backward. A hook on `.data` is the worse case: no version counter would tell.
    def step(parameter: Tensor) -> None:
        parameter.data.sub_(parameter.grad.sign())  # type: ignore[union-attr]

    def train(layer: type[nn.Linear]) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(layer(5, 4), nn.Tanh(), layer(4, 4), nn.Tanh(), layer(4, 3))
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(step)
        x = torch.linspace(-1, 1, 2 * 3 * 5).reshape(2, 3, 5).requires_grad_()
        model(x).square().sum().backward()
        assert x.grad is not None
        return [x.grad, *(p.detach() for p in model.parameters())]

    for actual, wanted in zip(train(Layer), train(nn.Linear), strict=True):
        assert torch.equal(actual, wanted)


def test_gradients_of_several_calls_and_of_micro_batches_add_up() -> None:
    x, weight, bias = leaves(6)
    both = torch.autograd.grad(linear(x[:2], weight, bias).square().sum() + linear(x[2:], weight, bias).square().sum(), (weight, bias))
    linear(x[:2], weight, bias).square().sum().backward()
    linear(x[2:], weight, bias).square().sum().backward()
    for summed, accumulated in zip(both, (weight.grad, bias.grad), strict=True):
        torch.testing.assert_close(summed, accumulated)
    _doubled_and_tripled(both, torch.autograd.grad(F.linear(x, weight, bias).square().sum(), (weight, bias)))


def test_a_layer_applied_to_its_own_output_gets_both_gradients() -> None:
    x = torch.randn(6, 4)
    weight, bias = torch.randn(4, 4, requires_grad=True), torch.randn(4, requires_grad=True)
    gradients, plain = (
        torch.autograd.grad(f(f(x, weight, bias).tanh(), weight, bias).square().sum(), (weight, bias)) for f in (linear, F.linear)
    )
    _doubled_and_tripled(gradients, plain)


def test_a_graph_that_is_kept_gives_the_gradients_again() -> None:
    x, weight, bias = leaves(6)
    loss = linear(x, weight, bias).relu_().square().sum()
    first, second = torch.autograd.grad(loss, (weight, bias), retain_graph=True), torch.autograd.grad(loss, (weight, bias))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_gives_the_same_gradients(reentrant: bool) -> None:
    model = nn.Sequential(Layer(5, 4), nn.ReLU(inplace=True), Layer(4, 4))
    twin = copy.deepcopy(model)
    x = torch.randn(6, 5, requires_grad=True)
    model(x).square().sum().backward()
    checkpoint(twin, x, use_reentrant=reentrant).square().sum().backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]


def _saved(function: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
    saved = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function(*tensors).sum().backward()
    return saved


@pytest.mark.parametrize("shape", [(6,), (2, 3)], ids=str)
def test_the_input_is_saved_once_and_the_output_not_at_all(shape: tuple[int, ...]) -> None:
    tensors = leaves(*shape)
    held = {t.untyped_storage().data_ptr() for t in tensors}
    saved = _saved(linear, tensors)
    assert {t.untyped_storage().data_ptr() for t in saved} <= held
    assert sum(t.data_ptr() == tensors[0].data_ptr() for t in saved) == 1


def test_saved_tensor_hooks_may_offload_what_is_saved() -> None:
    tensors = leaves(6)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().numpy().copy(), torch.from_numpy):
        z, expected = linear(*tensors), F.linear(*tensors)
    gradients, plain = torch.autograd.grad(z.sum(), tensors), torch.autograd.grad(expected.sum(), tensors)
    assert torch.equal(gradients[0], plain[0])
    _doubled_and_tripled(gradients[1:], plain[1:])


def test_a_weight_made_of_others_passes_its_gradient_on() -> None:
    layer = nn.utils.parametrizations.weight_norm(Layer(5, 4))
    plain = nn.utils.parametrizations.weight_norm(nn.Linear(5, 4))
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(6, 5)
    for module in (layer, plain):
        module(x).square().sum().backward()
    weights = zip(layer.parametrizations.weight.parameters(), plain.parametrizations.weight.parameters(), strict=True)  # type: ignore[union-attr]
    for ours, theirs in weights:
        torch.testing.assert_close(ours.grad, 2 * theirs.grad)  # type: ignore[operator]


def test_autocast_around_the_backward_does_not_round_the_correction() -> None:
    x, weight, bias = leaves(6)
    z = linear(x, weight, bias)
    outside = torch.autograd.grad(z.square().sum(), (weight, bias), retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        inside = torch.autograd.grad(z.square().sum(), (weight, bias))
    assert all(torch.equal(a, b) for a, b in zip(outside, inside, strict=True))


def test_mixed_dtypes_are_refused_in_torchs_words() -> None:
    x, weight, bias = leaves(6)
    for tensors in ((x.bfloat16(), weight, bias), (x, weight.half(), bias)):
        with pytest.raises(RuntimeError) as theirs:
            F.linear(*tensors)
        with pytest.raises(RuntimeError) as ours:
            linear(*tensors)
        assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize("layer", [SampleCorrectedLinear, BatchCorrectedLinear])
def test_selective_checkpointing_keeps_the_product_and_gives_the_same_gradients(layer: Any) -> None:
    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operation is torch.ops.aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE

    model, x = layer(6, 4), torch.randn(5, 6, requires_grad=True)
    contexts = partial(create_selective_checkpoint_contexts, policy)
    kept = torch.autograd.grad(checkpoint(model, x, use_reentrant=False, context_fn=contexts).sin().sum(), [x, *model.parameters()])
    plain = torch.autograd.grad(model(x).sin().sum(), [x, *model.parameters()])
    for one, other in zip(kept, plain, strict=True):
        assert torch.equal(one, other)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")  # of torch.jit
@pytest.mark.parametrize("layer", [SampleCorrectedLinear, BatchCorrectedLinear])
def test_a_traced_layer_is_torchs_own(layer: Any) -> None:
    model, x = layer(6, 4), torch.randn(5, 6)
    traced = torch.jit.trace(model, x)
    assert torch.equal(traced(x), model(x))
    assert "aten::linear" in str(traced.graph)
