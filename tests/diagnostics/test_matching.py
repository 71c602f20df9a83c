# matching_lr: its value, that the steps really match, and that the model is left as it was.
from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import affine_divergence as ad
from affine_divergence.nn import AffineLikeLinear, BatchCorrectedLinear, L2Norm, NormLikeLinear, SampleCorrectedLinear

LR = 0.1


def _rows(n: int = 8, d: int = 5, seed: int = 0) -> Tensor:
    lengths = torch.logspace(-1, 1, n, dtype=torch.float64).unsqueeze(1)
    return lengths * torch.randn(n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _sqnorms(x: Tensor) -> Tensor:
    return (x * x).sum(-1)


SINGLE: dict[str, tuple[Callable[[], nn.Module], Callable[[Tensor], float]]] = {
    "affine-like": (lambda: AffineLikeLinear(5, 4), lambda q: (q + 1).mean().item()),
    "affine-like-gain": (lambda: AffineLikeLinear(5, 4, gain=3.0), lambda q: (q + 1).mean().item() / 9),
    "affine-like-no-bias": (lambda: AffineLikeLinear(5, 4, bias=False), lambda q: (q.mean() / (q / (q + 1)).mean()).item()),
    "norm-like": (lambda: NormLikeLinear(5, 4, eps=0.0), lambda q: (q + 1).mean().item() / 2),
    "norm-like-gain": (lambda: NormLikeLinear(5, 4, eps=0.0, gain=3.0), lambda q: (q + 1).mean().item() / 18),
    "norm-like-no-bias": (lambda: NormLikeLinear(5, 4, bias=False, eps=0.0), lambda q: q.mean().item()),
    "sample": (lambda: SampleCorrectedLinear(5, 4), lambda q: (q + 1).mean().item()),
    "sample-no-bias": (lambda: SampleCorrectedLinear(5, 4, bias=False), lambda q: q.mean().item()),
    "norm-like-eps": (lambda: NormLikeLinear(5, 4, eps=0.5), lambda q: ((q + 1).mean() / (q / (q + 0.5) + 1).mean()).item()),
}
single = pytest.mark.parametrize(("make", "factor"), SINGLE.values(), ids=SINGLE)


@single
def test_for_one_layer_it_is_the_rate_times_the_ratio_of_mean_self_terms(
    make: Callable[[], nn.Module], factor: Callable[[Tensor], float]
) -> None:
    x = _rows()
    assert ad.matching_lr(make().double(), x, LR) == pytest.approx(LR * factor(_sqnorms(x)), rel=1e-12)


def _multiplier(model: nn.Module, row: Tensor, lr: float) -> float:
    """How many times its own gradient step at rate LR one row moves in a real step at rate lr: −⟨δz, g⟩/(LR ‖g‖²)."""
    z = model(row)
    z.retain_grad()
    z.sin().sum().backward()
    before = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            p -= lr * p.grad  # type: ignore[arg-type, operator]
            p.grad = None
        change = model(row) - z
        for p, value in zip(model.parameters(), before, strict=True):
            p.copy_(value)
    return (-(change * z.grad).sum() / (LR * _sqnorms(z.grad).sum())).item()


@single
def test_a_real_step_at_the_matching_rate_moves_rows_as_far_on_average_as_the_plain_layer(
    make: Callable[[], nn.Module], factor: Callable[[Tensor], float]
) -> None:
    x, corrected = _rows(), make().double()
    plain = nn.Linear(5, 4, bias=corrected.bias is not None).double()
    plain.load_state_dict(corrected.state_dict())
    matched = ad.matching_lr(corrected, x, LR)
    moved = sum(_multiplier(corrected, row.unsqueeze(0), matched) for row in x) / len(x)
    wanted = sum(_multiplier(plain, row.unsqueeze(0), LR) for row in x) / len(x)
    assert moved == pytest.approx(wanted, rel=1e-9)


class _Net(nn.Module):
    def __init__(self, affine: Any, norm: Any, plain: Any = nn.Linear) -> None:
        super().__init__()
        self.first, self.second, self.head = affine(5, 7), norm(7, 6), plain(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.head(self.second(self.first(x).tanh()).relu())
        return h


def test_for_several_layers_the_plain_rows_are_those_of_the_plain_twin_and_layers_count_equally() -> None:
    torch.manual_seed(0)
    model = _Net(AffineLikeLinear, NormLikeLinear).double()
    twin = _Net(nn.Linear, nn.Linear).double()
    twin.load_state_dict(model.state_dict())
    x = _rows()

    with torch.no_grad():
        plain_second = twin.first(x).tanh()
        plain = [(_sqnorms(x) + 1).mean(), (_sqnorms(plain_second) + 1).mean()]
        q = _sqnorms(model.first(x).tanh())
        corrected = [1.0, (q / (q + 2**-23) + 1).mean()]
    assert ad.matching_lr(model, x, LR) == pytest.approx(LR * float(sum(plain) / sum(corrected)), rel=1e-12)


def test_a_layer_of_few_rows_counts_as_much_as_one_of_many() -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.many, self.few = AffineLikeLinear(5, 4), AffineLikeLinear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            h: Tensor = self.few(self.many(x).mean(0, keepdim=True))
            return h

    model, x = Pooled().double(), _rows()
    with torch.no_grad():
        pooled = nn.functional.linear(x, model.many.weight, model.many.bias).mean(0, keepdim=True)
    wanted = ((_sqnorms(x) + 1).mean() + (_sqnorms(pooled) + 1).mean()).item() / 2
    assert ad.matching_lr(model, x, LR) == pytest.approx(LR * wanted, rel=1e-12)


def test_a_layer_called_several_times_counts_the_rows_of_all_its_calls() -> None:
    layer = AffineLikeLinear(5, 5, gain=2.0).double()

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.again = layer, layer

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.layer(x), self.again(x[:2])])

    x = _rows()
    wanted = (torch.cat([_sqnorms(x), _sqnorms(x[:2])]) + 1).mean().item()
    assert ad.matching_lr(Twice(), x, LR) == pytest.approx(LR * wanted / 4, rel=1e-12)


@pytest.mark.parametrize(("frozen", "plain", "corrected"), [("bias", 8.0, 8 / 9), ("weight", 1.0, 1 / 9)])
def test_what_is_frozen_has_no_part_in_the_step(frozen: str, plain: float, corrected: float) -> None:
    layer = AffineLikeLinear(2, 3)
    getattr(layer, frozen).requires_grad_(False)
    assert ad.matching_lr(layer, torch.tensor([[2.0, 2.0]]), LR) == pytest.approx(LR * plain / corrected)


def test_sequences_and_images_count_every_position() -> None:
    x = _rows(12).reshape(2, 3, 2, 5)
    wanted = (_sqnorms(x) + 1).mean().item()
    assert ad.matching_lr(AffineLikeLinear(5, 4).double(), x, LR) == pytest.approx(LR * wanted, rel=1e-12)


def test_layers_that_are_not_called_do_not_count() -> None:
    model = nn.ModuleDict({"used": AffineLikeLinear(5, 4), "unused": NormLikeLinear(9, 9)}).double()
    model.forward = lambda x: model["used"](x)  # type: ignore[method-assign]
    x = _rows()
    assert ad.matching_lr(model, x, LR) == pytest.approx(LR * (_sqnorms(x) + 1).mean().item(), rel=1e-12)


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = AffineLikeLinear(5, 4)

    def forward(self, x: Tensor, scale: float = 1.0, shift: Tensor | None = None) -> Tensor:
        h: Tensor = self.layer(input=scale * x)
        return h if shift is None else h + shift


@pytest.mark.parametrize("form", [lambda x: x, lambda x: (x,), lambda x: [x, 1.0], lambda x: {"x": x}, lambda x: {"x": x, "scale": 1.0}])
def test_tensors_positional_and_keyword_inputs_mean_the_same(form: Callable[[Tensor], Any]) -> None:
    x = _rows()
    assert ad.matching_lr(_Two().double(), form(x), LR) == pytest.approx(LR * (_sqnorms(x) + 1).mean().item(), rel=1e-12)


def test_every_input_given_reaches_the_model() -> None:
    x = _rows()
    wanted = LR * (9 * _sqnorms(x) + 1).mean().item()
    for inputs in ((x, 3.0), {"scale": 3.0, "x": x, "shift": torch.ones(4)}):
        assert ad.matching_lr(_Two().double(), inputs, LR) == pytest.approx(wanted, rel=1e-12)


class _Stateful(nn.Module):
    """Whatever a forward may move: running statistics in place, a buffer replaced, one made on the first call, random numbers."""

    def __init__(self, fail_on: int = 0) -> None:
        super().__init__()
        self.layer, self.norm, self.dropout = AffineLikeLinear(5, 4), nn.BatchNorm1d(4), nn.Dropout()
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("latest", None)
        self.register_buffer("view", torch.zeros(1).expand(4))
        self.calls, self.fail_on = itertools.count(1), fail_on  # not a number or a list: that is had back between the passes too

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.dropout(self.norm(self.layer(x)))
        self.average = 0.9 * self.average + 0.1 * h.detach().mean(0)
        self.latest = h.detach()
        if next(self.calls) == self.fail_on:
            raise RuntimeError("the model's own failure")
        return h


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("fail_on", [0, 1, 2], ids=["passes", "raises-corrected", "raises-plain"])
def test_the_model_and_the_random_numbers_are_left_as_they_were_also_when_it_raises(training: bool, fail_on: int) -> None:
    model = _Stateful(fail_on).train(training)
    model(torch.randn(8, 5)) if not fail_on else None
    model.calls = itertools.count(1)
    model.latest = None
    fired: list[str] = []
    model.layer.register_forward_hook(lambda *_: fired.append("own"))
    hooks = {name: [list(m._forward_hooks.items()), list(m._forward_pre_hooks.items())] for name, m in model.named_modules()}
    flags = {name: m.training for name, m in model.named_modules()}
    objects = {name: id(b) for name, b in model.named_buffers()}
    order = list(model.state_dict())
    state = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.random.get_rng_state()
    if fail_on:
        with pytest.raises(RuntimeError, match="the model's own failure"):
            ad.matching_lr(model, torch.randn(8, 5, generator=torch.Generator().manual_seed(0)), LR)
    else:
        ad.matching_lr(model, torch.randn(8, 5, generator=torch.Generator().manual_seed(0)), LR)
    assert torch.equal(torch.random.get_rng_state(), random)
    assert {name: m.training for name, m in model.named_modules()} == flags
    assert list(model.state_dict()) == order
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert {name: id(b) for name, b in model.named_buffers()} == objects
    assert model.latest is None
    assert {name: [list(m._forward_hooks.items()), list(m._forward_pre_hooks.items())] for name, m in model.named_modules()} == hooks
    assert not any(m._forward_hooks_with_kwargs for m in model.modules())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert fired


def test_both_measurements_see_the_same_dropout_masks() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(), AffineLikeLinear(5, 4)).double()
    x = _rows()
    random = torch.random.get_rng_state()
    dropped = model[0](x)
    torch.random.set_rng_state(random)
    assert ad.matching_lr(model, x, LR) == pytest.approx(LR * (_sqnorms(dropped) + 1).mean().item(), rel=1e-12)


def test_the_models_own_hooks_work_on_the_plain_output_too() -> None:
    def halve(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output / 2

    hooked = nn.Sequential(AffineLikeLinear(5, 4), AffineLikeLinear(4, 3)).double()
    hooked[0].register_forward_hook(halve)
    x = _rows()
    with torch.no_grad():
        second = nn.functional.linear(x, hooked[0].weight, hooked[0].bias) / 2
    wanted = ((_sqnorms(x) + 1).mean() + (_sqnorms(second) + 1).mean()).item() / 2
    assert ad.matching_lr(hooked, x, LR) == pytest.approx(LR * wanted, rel=1e-12)


def test_bfloat16_activations_pass_through_float32_layers() -> None:
    # The corrected layers promote to float32, and so must the plain twin: nn.Linear after it refuses mixed dtypes.
    model = nn.Sequential(AffineLikeLinear(5, 4), nn.Linear(4, 3), NormLikeLinear(3, 2))
    x = _rows().bfloat16()
    assert ad.matching_lr(model, x, LR) == pytest.approx(ad.matching_lr(model, x.float(), LR), rel=1e-6)


def test_autocast_changes_the_rate_by_rounding_only() -> None:
    model, x = nn.Sequential(AffineLikeLinear(5, 4), nn.Tanh(), NormLikeLinear(4, 3)), _rows().float()
    wanted = ad.matching_lr(model, x, LR)
    with torch.autocast("cpu", torch.bfloat16):
        assert ad.matching_lr(model, x, LR) == pytest.approx(wanted, rel=1e-2)


def test_in_float16_the_rows_squared_norms_do_not_overflow() -> None:
    x = torch.full((2, 5), 200.0, dtype=torch.float16)
    assert ad.matching_lr(AffineLikeLinear(5, 4).half(), x, LR) == pytest.approx(LR * (5 * 200.0**2 + 1), rel=1e-12)


@single
def test_rows_in_float32_are_summed_in_float64(make: Callable[[], nn.Module], factor: Callable[[Tensor], float]) -> None:
    x, layer = _rows().float(), make()
    assert ad.matching_lr(layer, x, LR) == pytest.approx(LR * factor(_sqnorms(x.double())), rel=1e-12)


def test_gradients_already_there_stay() -> None:
    model = AffineLikeLinear(5, 4).double()
    model(_rows()).sum().backward()
    before = [p.grad for p in model.parameters()]
    values = [None if g is None else g.clone() for g in before]
    ad.matching_lr(model, _rows(), LR)
    for p, gradient, value in zip(model.parameters(), before, values, strict=True):
        assert p.grad is gradient
        assert gradient is not None
        assert value is not None
        assert torch.equal(gradient, value)


@pytest.mark.parametrize(
    ("model", "lr", "error", "message"),
    [
        (lambda x: x, LR, TypeError, r"model must be a torch\.nn\.Module, got function"),
        (AffineLikeLinear(5, 4), "0.1", TypeError, "lr must be a number, got str"),
        (AffineLikeLinear(5, 4), True, TypeError, "lr must be a number, got bool"),
        (AffineLikeLinear(5, 4), torch.tensor(0.1), TypeError, "lr must be a number, got Tensor"),
        (AffineLikeLinear(5, 4), 0.0, ValueError, r"lr must be positive and finite, got 0\.0"),
        (AffineLikeLinear(5, 4), -0.1, ValueError, r"lr must be positive and finite, got -0\.1"),
        (AffineLikeLinear(5, 4), float("inf"), ValueError, "lr must be positive and finite, got inf"),
        (AffineLikeLinear(5, 4), float("nan"), ValueError, "lr must be positive and finite, got nan"),
        (nn.Linear(5, 4), LR, ValueError, "no AffineLikeLinear, .* or SampleCorrected layer to match; pass the corrected"),
        (BatchCorrectedLinear(5, 4), LR, ValueError, "SampleCorrected layer to match"),
        (nn.Sequential(L2Norm(), nn.Linear(5, 4)), LR, ValueError, "no AffineLikeLinear, .* or SampleCorrected layer to match"),
    ],
)
def test_wrong_arguments_are_refused_with_the_way_out(model: Any, lr: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ad.matching_lr(model, torch.ones(2, 5), lr)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(0, 5), "none of the model's 1 corrected layers was called on these inputs, with rows in them"),
        (torch.full((2, 5), float("nan")), r"no rate matches: the mean multipliers of these inputs are nan \(plain\) and nan"),
        (torch.full((2, 5), float("inf")), "look for zero, infinite or NaN rows"),
    ],
)
def test_inputs_without_finite_rows_are_refused(x: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ad.matching_lr(AffineLikeLinear(5, 4), x, LR)


def test_zero_rows_without_a_bias_are_refused() -> None:
    with pytest.raises(ValueError, match=r"multipliers of these inputs are 0 \(plain\) and 0 \(corrected\); look for zero"):
        ad.matching_lr(AffineLikeLinear(5, 4, bias=False), torch.zeros(2, 5), LR)


def test_a_model_that_does_not_call_its_corrected_layers_is_refused() -> None:
    model = nn.MultiheadAttention(4, 2)
    model.out_proj = AffineLikeLinear(4, 4)  # type: ignore[assignment]
    x = torch.randn(3, 2, 4)
    with pytest.raises(ValueError, match="none of the model's 1 corrected layers was called"):
        ad.matching_lr(model, (x, x, x), LR)
