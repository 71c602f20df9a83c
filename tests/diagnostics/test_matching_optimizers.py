# matching_lr by optimiser and against a reference: real steps of Adam kinds, the closed forms, the refusals.
from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import affine_divergence as ad
from affine_divergence.nn import AffineLikeLinear, NormLikeLinear, PatchNormConv2d, SampleCorrectedConv2d, SampleCorrectedLinear

LR = 1e-5
D = 256
ADAM_KINDS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax, torch.optim.RMSprop)
every_adam = pytest.mark.parametrize("optimizer", ADAM_KINDS)


def _net(layer: Any, depth: int, **options: Any) -> nn.Sequential:
    torch.manual_seed(10)
    hidden = [part for _ in range(depth - 1) for part in (layer(D, D, **options), nn.Tanh())]
    return nn.Sequential(*hidden, layer(D, 10, **options)).double()


def _batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(128, D, dtype=torch.float64, generator=generator)
    return x, torch.randint(0, 10, (128,), generator=generator)


def _mean_step(model: nn.Sequential, optimizer: Any, lr: float) -> float:
    """The mean ‖δz_i‖ over rows and layers of one real step, at fixed inputs of each layer; the last of eight for RAdam, which warms up."""
    model, (x, target) = copy.deepcopy(model), _batch()
    layers = model[::2]
    stepper = optimizer(model.parameters(), lr=lr)
    for _ in range(8 if optimizer is torch.optim.RAdam else 1):
        calls = _calls(model, x)
        stepper.zero_grad()
        nn.functional.cross_entropy(model(x), target).backward()
        stepper.step()
    return sum((layer(x) - z).norm(dim=1).mean().item() for layer, (x, z) in zip(layers, calls, strict=True)) / len(layers)


def _calls(model: nn.Sequential, x: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The input and output of each layer."""
    calls = []
    with torch.no_grad():
        for part in model:
            z = part(x)
            if not isinstance(part, nn.Tanh):
                calls.append((x, z))
            x = z
    return calls


@every_adam
@pytest.mark.parametrize(("layer", "overshoot"), [(AffineLikeLinear, 16.0), (SampleCorrectedLinear, 257.0)])
def test_adam_needs_its_own_rate_and_then_steps_as_far_as_the_plain_layer(layer: Any, overshoot: float, optimizer: Any) -> None:
    model, twin = _net(layer, 1), _net(nn.Linear, 1)
    plain = _mean_step(twin, optimizer, LR)
    for_sgd = ad.matching_lr(model, _batch()[0], LR)
    matched = ad.matching_lr(model, _batch()[0], LR, optimizer=optimizer)
    assert _mean_step(model, optimizer, for_sgd) / plain == pytest.approx(overshoot, rel=0.05)
    assert _mean_step(model, optimizer, matched) / plain == pytest.approx(1.0, abs=0.03)


@pytest.mark.parametrize("layer", [AffineLikeLinear, SampleCorrectedLinear])
def test_a_deep_model_under_adam_steps_as_far_as_its_twin_on_average(layer: Any) -> None:
    model, twin = _net(layer, 3), _net(nn.Linear, 3)
    matched = ad.matching_lr(model, _batch()[0], LR, optimizer=torch.optim.Adam)
    ratio = _mean_step(model, torch.optim.Adam, matched) / _mean_step(twin, torch.optim.Adam, LR)
    assert ratio == pytest.approx(1.0, abs=0.12)  # what a row's gradient shares with the step differs a little; at the rate for SGD 11.7


FORMS: dict[str, tuple[Any, Any]] = {
    "affine-like-gain": (lambda: AffineLikeLinear(5, 4, gain=3.0), lambda q: math.sqrt((q + 1).mean()) / 3),
    "affine-like-no-bias": (lambda: AffineLikeLinear(5, 4, bias=False), lambda q: math.sqrt(q.mean() / (q / (q + 1)).mean())),
    "norm-like": (lambda: NormLikeLinear(5, 4, eps=0.0, gain=2.0), lambda q: math.sqrt((q + 1).mean() / 8)),
    "sample": (lambda: SampleCorrectedLinear(5, 4), lambda q: 1.0),
}


@every_adam
@pytest.mark.parametrize(("make", "factor"), FORMS.values(), ids=FORMS)
def test_adam_factor_is_the_ratio_of_root_mean_squared_rows(make: Any, factor: Any, optimizer: Any) -> None:
    x = torch.logspace(-1, 1, 8, dtype=torch.float64).unsqueeze(1) * torch.randn(8, 5, dtype=torch.float64)
    model = make().double()
    wanted = pytest.approx(LR * factor(x.square().sum(1)), rel=1e-12)
    assert ad.matching_lr(model, x, LR, optimizer=optimizer) == wanted
    assert ad.matching_lr(model, x, LR, optimizer=optimizer(model.parameters())) == wanted


def test_adam_averages_the_roots_over_layers_of_the_plain_twin() -> None:
    x = torch.randn(6, 5, dtype=torch.float64)
    model = nn.Sequential(AffineLikeLinear(5, 7, gain=2.0), nn.Tanh(), SampleCorrectedLinear(7, 3)).double()
    with torch.no_grad():
        second = [h.tanh().square().sum(1).mean() + 1 for h in (nn.functional.linear(x, model[0].weight, model[0].bias), model[0](x))]
    wanted = (math.sqrt(x.square().sum(1).mean() + 1) + math.sqrt(second[0])) / (2.0 + math.sqrt(second[1]))
    assert ad.matching_lr(model, x, LR, optimizer=torch.optim.Adam) == pytest.approx(LR * wanted, rel=1e-12)


def test_momentum_and_its_wrapper_have_the_factor_of_sgd() -> None:
    model, x = AffineLikeLinear(5, 4).double(), torch.randn(6, 5, dtype=torch.float64)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9, nesterov=True)

    class Wrapper:
        optimizer = sgd

    for optimizer in (sgd, torch.optim.SGD, Wrapper()):
        assert ad.matching_lr(model, x, LR, optimizer=optimizer) == ad.matching_lr(model, x, LR)


@pytest.mark.parametrize(
    ("optimizer", "why"),
    [
        (torch.optim.LBFGS, "line search"),
        (torch.optim.Adagrad, "all past gradients"),
        (torch.optim.Muon, "orthogonal"),
        (torch.optim.Rprop, "signs of past gradients"),
        (torch.optim.ASGD, "its law of steps is unknown"),
        (torch.optim.SparseAdam, "its law of steps is unknown"),
    ],
)
def test_other_optimisers_are_refused_by_name_with_the_reason(optimizer: Any, why: str) -> None:
    known = "SGD, Adam, AdamW, NAdam, RAdam, Adamax, RMSprop"
    with pytest.raises(ValueError, match=f"no matching rate is known for {optimizer.__name__}: .*{why}.*{known}"):
        ad.matching_lr(AffineLikeLinear(2, 2), torch.ones(1, 2), LR, optimizer=optimizer)


@pytest.mark.parametrize(("optimizer", "name"), [("adam", "str"), (int, "int"), (nn.Linear(2, 2), "Linear")])
def test_what_is_no_optimiser_is_a_type_error(optimizer: Any, name: str) -> None:
    with pytest.raises(TypeError, match=rf"optimizer must be a torch\.optim\.Optimizer or its class, .*got {name}"):
        ad.matching_lr(AffineLikeLinear(2, 2), torch.ones(1, 2), LR, optimizer=optimizer)


class _Residual(nn.Module):
    """Convolutions without biases whose twin without normalisers has signals that vanish."""

    def __init__(self, conv: Any, norm: Any) -> None:
        super().__init__()
        self.convs = nn.ModuleList(conv(c, 8, 3, padding=1, bias=False) for c in (3, 8, 8, 8))
        self.norms = nn.ModuleList(norm(8) for _ in self.convs)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = norm(conv(x)).relu()
        h: Tensor = self.head(x.mean((2, 3)))
        return h


def _mean_patch(model: nn.Module, x: Tensor) -> list[Tensor]:
    seen: list[Tensor] = []
    handles = [
        conv.register_forward_pre_hook(lambda _, args: seen.append(ad.functional.patch_sqnorm(args[0], 3, padding=1).mean()))
        for conv in model.convs  # type: ignore[union-attr]
    ]
    with torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    return seen


def test_reference_replaces_a_twin_whose_signals_vanish() -> None:
    torch.manual_seed(1)
    model, trained = _Residual(SampleCorrectedConv2d, lambda _: nn.Identity()).double(), _Residual(nn.Conv2d, nn.BatchNorm2d).double()
    x = torch.randn(4, 3, 6, 6, dtype=torch.float64)
    wanted = LR * float(sum(_mean_patch(trained, x))) / 4
    assert ad.matching_lr(model, x, LR, reference=trained) == pytest.approx(wanted, rel=1e-10)
    assert ad.matching_lr(model, x, LR) < 0.4 * wanted
    roots = sum(math.sqrt(mean) for mean in _mean_patch(trained, x)) / sum(math.sqrt(mean) for mean in _mean_patch(model, x))
    found = ad.matching_lr(model, x, LR, optimizer=torch.optim.AdamW, reference=trained)
    assert found == pytest.approx(LR * roots, rel=1e-10)


def test_all_layers_of_a_reference_with_other_names_count() -> None:
    x = torch.randn(6, 5, dtype=torch.float64)
    model = nn.Sequential(AffineLikeLinear(5, 7), nn.Tanh(), AffineLikeLinear(7, 3)).double()
    trained = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3)).double()
    with torch.no_grad():
        wanted = (x.square().sum(1).mean() + 1 + trained[:3](x).square().sum(1).mean() + 1) / 2
    assert ad.matching_lr(model, x, LR, reference=trained) == pytest.approx(LR * float(wanted), rel=1e-12)


def test_a_corrected_reference_counts_as_it_is() -> None:
    model, x = nn.Sequential(AffineLikeLinear(5, 7, gain=2.0), nn.Tanh(), NormLikeLinear(7, 3)).double(), torch.randn(6, 5).double()
    assert ad.matching_lr(model, x, LR, reference=copy.deepcopy(model)) == pytest.approx(LR, rel=1e-12)


def test_reference_is_left_as_it_was() -> None:
    model, trained = _Residual(PatchNormConv2d, lambda _: nn.Identity()), _Residual(nn.Conv2d, nn.BatchNorm2d)
    state, random = copy.deepcopy(trained.state_dict()), torch.random.get_rng_state()
    ad.matching_lr(model, torch.ones(4, 3, 6, 6), LR, reference=trained)
    assert all(torch.equal(value, state[name]) for name, value in trained.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), random)
    assert not any(module._forward_hooks for module in trained.modules())


def test_useless_references_are_refused() -> None:
    model, x = AffineLikeLinear(5, 4), torch.ones(2, 5)
    with pytest.raises(TypeError, match=r"reference must be a torch\.nn\.Module, got float"):
        ad.matching_lr(model, x, LR, reference=0.1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the reference Tanh has no linear or convolutional layer"):
        ad.matching_lr(model, x, LR, reference=nn.Tanh())
    uncalled = nn.Tanh()
    uncalled.spare = nn.Linear(5, 4)
    with pytest.raises(ValueError, match="none of the reference's 1 linear and convolutional layers was called"):
        ad.matching_lr(model, x, LR, reference=uncalled)
