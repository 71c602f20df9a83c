# The carrier under torch.func and torch.compile, and what it refuses there: forward mode and derivatives of its gradients.
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, vmap

from affine_divergence.gradient._carry import carried

# torch's own: its rules for forward mode are loaded through torch.jit.script, and torch.compile makes an object of every Function.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script(_method)?` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]
Pair = tuple[Tensor | None, Tensor | None]

refuses_forward_mode = pytest.raises(RuntimeError, match=r"a corrected gradient has no forward mode.*freeze weight and bias")
refuses_second_derivatives = pytest.raises(RuntimeError, match=r"cannot be differentiated again.*freeze its weight and bias")


def multiples(g: Tensor, x: Tensor, weight: Tensor, needed: tuple[bool, bool]) -> Pair:
    """Twice the plain weight gradient and three times the plain bias gradient, in float64; within a batch of its own."""
    g, x = g.reshape(-1, g.shape[-1]).double(), x.reshape(-1, x.shape[-1]).double()
    return 2 * g.mT @ x if needed[0] else None, 3 * g.sum(0) if needed[1] else None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return carried(F.linear, x, weight, bias, multiples)


class Layer(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def loss(weight: Tensor, bias: Tensor, x: Tensor) -> Tensor:
    return linear(x, weight, bias).relu_().square().sum()


def plain_loss(weight: Tensor, bias: Tensor, x: Tensor) -> Tensor:
    return F.linear(x, weight, bias).relu_().square().sum()


@pytest.fixture
def tensors() -> list[Tensor]:
    """weight (4, 3), bias (4) and x (5, 3)."""
    return [torch.randn(shape, dtype=torch.float64) for shape in ((4, 3), (4,), (5, 3))]


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _doubled_and_tripled(actual: Any, plain: Any) -> None:
    for ours, theirs, factor in zip(actual, plain, (2, 3, 1), strict=True):
        torch.testing.assert_close(ours, factor * theirs)


def test_the_gradient_transform_gives_the_corrected_gradients(tensors: list[Tensor]) -> None:
    _doubled_and_tripled(grad(loss, (0, 1, 2))(*tensors), grad(plain_loss, (0, 1, 2))(*tensors))


# Of weight, bias and x, over which are there many.
MAPPED = [(None, None, 0), (0, None, None), (None, 0, None), (0, 0, 0), (0, None, 0)]
mapped = pytest.mark.parametrize("mapped", MAPPED, ids=lambda m: "".join(n for n, a in zip("Wbx", m, strict=True) if a == 0))


def _many(tensors: list[Tensor], mapped: tuple[int | None, ...]) -> list[Tensor]:
    return [t if axis is None else torch.stack([t, 2 * t, -t]) for t, axis in zip(tensors, mapped, strict=True)]


@mapped
def test_per_sample_gradients_are_corrected_each_by_itself(tensors: list[Tensor], mapped: tuple[int | None, ...]) -> None:
    many = _many(tensors, mapped)
    _doubled_and_tripled(*(vmap(grad(f, (0, 1, 2)), mapped)(*many) for f in (loss, plain_loss)))


@mapped
def test_the_gradient_of_a_mapped_function_is_corrected(tensors: list[Tensor], mapped: tuple[int | None, ...]) -> None:
    # A weight for each sample does not say under vmap that it learns.
    many = _many(tensors, mapped)
    _doubled_and_tripled(*(grad(lambda *t, f=f: vmap(f, mapped)(*t).sum(), (0, 1, 2))(*many) for f in (loss, plain_loss)))


@mapped
def test_the_backward_of_a_mapped_function_is_corrected(tensors: list[Tensor], mapped: tuple[int | None, ...]) -> None:
    many = [t.requires_grad_() for t in _many(tensors, mapped)]
    _doubled_and_tripled(*(torch.autograd.grad(vmap(f, mapped)(*many).sum(), many) for f in (loss, plain_loss)))


def test_each_sample_of_a_mapped_gradient_has_a_call_of_its_own(tensors: list[Tensor]) -> None:
    weight, bias, x = tensors
    shapes = []

    def telling(g: Tensor, x: Tensor, weight: Tensor, needed: tuple[bool, bool]) -> Pair:
        shapes.append((tuple(g.shape), tuple(x.shape), needed))
        return multiples(g, x, weight, needed)

    vmap(grad(lambda w, x: carried(F.linear, x, w, bias, telling).sum()), (None, 0))(weight, x)
    assert shapes == [((4,), (3,), (True, False))]


def test_many_upstream_gradients_at_once_give_the_corrected_jacobian(tensors: list[Tensor]) -> None:
    weight, bias, x = (t.requires_grad_() for t in tensors)
    rows = torch.eye(20, dtype=torch.float64).reshape(20, 5, 4)
    batched, looped = (
        torch.autograd.grad(linear(x, weight, bias), (weight, bias, x), rows, is_grads_batched=True),
        [torch.autograd.grad(F.linear(x, weight, bias), (weight, bias, x), row) for row in rows],
    )
    _doubled_and_tripled(batched, [torch.stack(each) for each in zip(*looped, strict=True)])
    transformed = jacrev(lambda w, b, x: linear(x, w, b), (0, 1, 2))(*tensors)
    for ours, theirs in zip(transformed, batched, strict=True):
        torch.testing.assert_close(ours.flatten(0, 1), theirs)


def test_parameters_given_by_functional_call_are_the_ones_that_learn(tensors: list[Tensor]) -> None:
    x = tensors[2]
    module, plain = Layer(3, 4, dtype=torch.float64), nn.Linear(3, 4, dtype=torch.float64)
    named = {"weight": tensors[0], "bias": tensors[1]}
    ours, theirs = (grad(lambda n, m=m: functional_call(m, n, (x,)).square().sum())(named) for m in (module, plain))
    _doubled_and_tripled([ours["weight"], ours["bias"], x], [theirs["weight"], theirs["bias"], x])
    assert module.weight.grad is None


def _dual(*tensors: Tensor) -> list[Tensor]:
    return [forward_ad.make_dual(t, torch.ones_like(t)) for t in tensors]


def test_forward_mode_is_refused_where_a_parameter_learns(tensors: list[Tensor]) -> None:
    weight, bias, x = tensors
    for learning in ((weight.clone().requires_grad_(), bias), (weight, bias.clone().requires_grad_())):
        with refuses_forward_mode:
            jvp(lambda x, p=learning: linear(x, *p), (x,), (x,))
        with forward_ad.dual_level(), refuses_forward_mode:
            linear(*_dual(x), *learning)


def test_forward_mode_for_a_parameter_is_refused_also_where_nothing_is_recorded(tensors: list[Tensor]) -> None:
    weight, bias, x = tensors
    with refuses_forward_mode:
        jvp(lambda w: linear(x, w, bias), (weight,), (weight,))
    with refuses_forward_mode:
        jacfwd(lambda b: linear(x, weight, b))(bias)
    with refuses_forward_mode:
        jacfwd(jacrev(lambda w: linear(x, w, bias)))(weight)
    many = weight.expand(2, 4, 3)
    with refuses_forward_mode:
        jvp(lambda w: vmap(lambda w: linear(x, w, bias))(w), (many,), (many,))
    with forward_ad.dual_level(), torch.no_grad(), refuses_forward_mode:
        linear(x, *_dual(weight, bias))


def test_first_derivatives_made_for_second_ones_are_the_corrected_ones(tensors: list[Tensor]) -> None:
    learning = [t.requires_grad_() for t in tensors]
    ours = torch.autograd.grad(loss(*learning), learning, create_graph=True)
    _doubled_and_tripled(ours, torch.autograd.grad(plain_loss(*learning), learning))
    assert all(g.requires_grad for g in ours)
    ours[0].mul_(2)  # as one may with torch's
    ours[1].mul_(2)


# Losses whose ∂L/∂z depends on z, and on nothing.
LOSSES: dict[str, Callable[[Tensor], Tensor]] = {"square": lambda z: z.square().sum(), "sum": lambda z: z.sum()}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("of", [0, 1, 2], ids=["weight", "bias", "x"])
def test_a_derivative_of_any_first_gradient_is_refused(tensors: list[Tensor], of: int, name: str) -> None:
    weight, bias, x = (t.requires_grad_() for t in tensors)
    first = torch.autograd.grad(LOSSES[name](linear(x, weight, bias)), (weight, bias, x), create_graph=True)[of]
    with refuses_second_derivatives:
        first.square().sum().backward(retain_graph=True)
    for asked in (weight, bias) if of == 2 and name == "sum" else (weight, bias, x):
        with refuses_second_derivatives:
            torch.autograd.grad(first.sum(), asked, retain_graph=True, allow_unused=True)


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_a_gradient_penalty_is_refused_where_one_parameter_learns(tensors: list[Tensor], frozen: str) -> None:
    weight, bias, x = (t.requires_grad_() for t in tensors)
    {"weight": weight, "bias": bias}[frozen].requires_grad_(False)
    (first,) = torch.autograd.grad(linear(x, weight, bias).square().sum(), x, create_graph=True)
    with refuses_second_derivatives:
        first.square().sum().backward()


def test_a_gradient_penalty_is_refused_for_layers_before_and_after(tensors: list[Tensor]) -> None:
    x = tensors[2].requires_grad_()
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), Layer(4, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    (first,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    with refuses_second_derivatives:
        first.square().sum().backward()


@pytest.mark.parametrize("inner", [0, 1, 2], ids=["weight", "bias", "x"])
@pytest.mark.parametrize("outer", [0, 1, 2], ids=["weight", "bias", "x"])
def test_nested_gradient_transforms_are_refused(tensors: list[Tensor], inner: int, outer: int) -> None:
    if inner == outer == 2:  # nothing learns there
        torch.testing.assert_close(*(grad(lambda *t, f=f: grad(f, 2)(*t).square().sum(), 2)(*tensors) for f in (loss, plain_loss)))
        return
    with refuses_second_derivatives:
        grad(lambda *t: grad(loss, inner)(*t).square().sum(), outer)(*tensors)


def _compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, **{"backend": "aot_eager", **options})


def _agree(model: nn.Module, compiled: Callable[..., Tensor], x: Tensor, *, autocast: bool = False) -> None:
    results = []
    learning = [p for p in model.parameters() if p.requires_grad]
    for function in (compiled, model):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            z = function(x)
        results.append([z, *torch.autograd.grad(z.float().square().sum(), [*learning, *([x] if x.requires_grad else [])])])
    for actual, wanted in zip(*results, strict=True):
        assert actual.dtype == wanted.dtype
        torch.testing.assert_close(actual, wanted)


def _model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(Layer(3, 4), nn.ReLU(inplace=True), Layer(4, 4, bias=False), nn.Tanh()).to(dtype)


@pytest.mark.parametrize(
    ("shape", "x_learns", "autocast"),
    [((5,), True, False), ((5,), False, False), ((2, 5), True, False), ((), True, False), ((0,), True, False), ((2, 5), True, True)],
    ids=["rows", "first", "3d", "row", "no-rows", "autocast"],
)
def test_a_compiled_model_is_one_graph_with_the_outputs_and_gradients_of_eager_mode(
    shape: tuple[int, ...], x_learns: bool, autocast: bool
) -> None:
    model = _model()
    _agree(model, _compiled(model), torch.randn(*shape, 3).requires_grad_(x_learns), autocast=autocast)


@pytest.mark.parametrize("frozen", ["0.weight", "0.bias", "0."])
def test_a_compiled_model_leaves_frozen_parameters_without_a_gradient(frozen: str) -> None:
    model = _model()
    for name, p in model.named_parameters():
        p.requires_grad_(not name.startswith(frozen))
    _agree(model, _compiled(model), torch.randn(5, 3, requires_grad=True))


def test_one_graph_with_dynamic_sizes_serves_every_batch() -> None:
    model, graphs = _model(), []

    def counting(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    compiled = _compiled(model, backend=counting, dynamic=True)
    for rows in (5, 7, 64):
        _agree(model, compiled, torch.randn(rows, 3))
    assert len(graphs) == 1


@pytest.mark.parametrize("inside", [(None, None, 0), None], ids=["vmap-grad", "grad"])
def test_a_transform_inside_a_compiled_function_breaks_the_graph_and_is_right(tensors: list[Tensor], inside: Any) -> None:
    def transform(*tensors: Tensor) -> Any:
        gradients = grad(loss, (0, 1, 2))
        return (vmap(gradients, inside) if inside else gradients)(*tensors)

    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"cannot be compiled within a transform of torch\.func"):
        _compiled(transform)(*tensors)
    torch._dynamo.reset()
    for actual, wanted in zip(torch.compile(transform, backend="aot_eager")(*tensors), transform(*tensors), strict=True):
        torch.testing.assert_close(actual, wanted)


def test_a_transform_inside_a_compiled_function_compiles_where_nothing_is_recorded(tensors: list[Tensor]) -> None:
    weight, bias, x = tensors

    @torch.no_grad()
    def mapped(x: Tensor) -> Tensor:
        return vmap(lambda x: linear(x, weight, bias))(x)

    torch.testing.assert_close(_compiled(mapped)(x), F.linear(x, weight, bias))


@pytest.mark.parametrize("strict", [True, False])
def test_an_exported_graph_is_torchs_own(strict: bool) -> None:
    module = Layer(3, 4)
    exported = torch.export.export(module, (torch.randn(5, 3),), strict=strict)
    operations = [node.target for node in exported.graph.nodes if node.op == "call_function"]
    assert operations == [torch.ops.aten.linear.default]
