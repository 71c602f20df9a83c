# matching_lr with convolutions: every patch counts, however the layer pads, strides, groups or transposes.
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import affine_divergence as ad
from affine_divergence.nn import (
    AffineLikeLinear,
    PatchNormConv1d,
    PatchNormConv2d,
    PatchNormConv3d,
    PatchNormConvTranspose1d,
    PatchNormConvTranspose2d,
    PatchNormConvTranspose3d,
    SampleCorrectedConv1d,
    SampleCorrectedConv2d,
    SampleCorrectedConv3d,
)

LR = 0.1
PLAIN: dict[type[nn.Module], Any] = {
    PatchNormConv1d: nn.Conv1d,
    PatchNormConv2d: nn.Conv2d,
    PatchNormConv3d: nn.Conv3d,
    PatchNormConvTranspose1d: nn.ConvTranspose1d,
    PatchNormConvTranspose2d: nn.ConvTranspose2d,
    PatchNormConvTranspose3d: nn.ConvTranspose3d,
}


def _images(*shape: int, seed: int = 0) -> Tensor:
    """Images of very different lengths."""
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return torch.logspace(-1, 1, shape[0], dtype=torch.float64).reshape(-1, *[1] * (len(shape) - 1)) * x


def _pair(kind: Any, *arguments: Any, ours: dict[str, Any], **options: Any) -> tuple[nn.Module, nn.Module]:
    corrected, plain = kind(*arguments, **options, **ours).double(), PLAIN[kind](*arguments, **options).double()
    plain.load_state_dict(corrected.state_dict())
    return corrected, plain


def _mean_self_term(layer: nn.Module, x: Tensor) -> float:
    """The definition: for each output number, what it moves by when the parameters move along its own gradient."""
    numbers = layer(x).flatten()
    parameters = [p for p in layer.parameters() if p.requires_grad]
    terms = [sum(g.square().sum() for g in torch.autograd.grad(z, parameters, retain_graph=True)) for z in numbers]
    return float(sum(terms)) / len(terms)


FORMS: dict[str, dict[str, Any]] = {
    "affine-like": {},
    "affine-like-gain": {"gain": 3.0},
    "norm-like": {"form": "norm-like"},
    "norm-like-gain-eps": {"form": "norm-like", "gain": 0.5, "eps": 0.5},
}
every_form = pytest.mark.parametrize("ours", FORMS.values(), ids=FORMS)
every_bias = pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])

SHAPES: dict[str, tuple[Any, dict[str, Any], tuple[int, ...]]] = {
    "1d": (PatchNormConv1d, {"padding": 2}, (2, 4, 5)),
    "2d": (PatchNormConv2d, {"stride": 2, "padding": (1, 0)}, (2, 4, 4, 5)),
    "3d": (PatchNormConv3d, {"dilation": (1, 1, 2)}, (2, 4, 3, 3, 5)),
    "groups": (PatchNormConv2d, {"groups": 2, "padding": 1}, (2, 4, 3, 3)),
    "depthwise": (PatchNormConv2d, {"groups": 4, "padding": 1}, (2, 4, 3, 3)),
    "same": (PatchNormConv1d, {"padding": "same", "kernel_size": 4}, (2, 4, 5)),
    "valid": (PatchNormConv1d, {"padding": "valid"}, (2, 4, 5)),
    "reflect": (PatchNormConv2d, {"padding": (1, 2), "padding_mode": "reflect"}, (2, 4, 3, 4)),
    "replicate": (PatchNormConv2d, {"padding": (2, 1), "padding_mode": "replicate"}, (2, 4, 3, 4)),
    "circular": (PatchNormConv1d, {"padding": "same", "padding_mode": "circular", "kernel_size": 2}, (2, 4, 4)),
    "unbatched": (PatchNormConv2d, {"padding": 1, "groups": 2}, (4, 3, 3)),
    "transposed-1d": (PatchNormConvTranspose1d, {"stride": 2, "output_padding": 1}, (2, 4, 3)),
    "transposed-2d": (PatchNormConvTranspose2d, {"stride": 2, "padding": 1, "groups": 2}, (2, 4, 2, 3)),
    "transposed-3d": (PatchNormConvTranspose3d, {"dilation": (1, 2, 1), "padding": 1}, (2, 4, 2, 2, 2)),
    "transposed-unbatched": (PatchNormConvTranspose1d, {"padding": 1}, (4, 3)),
}
every_shape = pytest.mark.parametrize(("kind", "options", "shape"), SHAPES.values(), ids=SHAPES)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")  # torch's own
@every_form
@every_bias
@every_shape
def test_for_one_layer_it_is_the_rate_times_the_ratio_of_the_mean_self_terms_of_its_outputs(
    kind: Any, options: dict[str, Any], shape: tuple[int, ...], bias: bool, ours: dict[str, Any]
) -> None:
    corrected, plain = _pair(kind, 4, 4, **{"kernel_size": 3, **options}, bias=bias, ours=ours)
    x = _images(*shape)
    wanted = LR * _mean_self_term(plain, x) / _mean_self_term(corrected, x)
    assert ad.matching_lr(corrected, x, LR) == pytest.approx(wanted, rel=1e-10)


def _moved(layer: nn.Module, image: Tensor, lr: float) -> float:
    """How many times its own gradient step at rate LR the one position of an image moves in a real step at rate lr: −⟨δz, g⟩/(LR ‖g‖²)."""
    z = layer(image)
    z.retain_grad()
    z.sin().sum().backward()
    before = [p.detach().clone() for p in layer.parameters()]
    with torch.no_grad():
        for p in layer.parameters():
            p -= lr * p.grad  # type: ignore[arg-type, operator]
            p.grad = None
        change = layer(image) - z
        for p, value in zip(layer.parameters(), before, strict=True):
            p.copy_(value)
    return (-(change * z.grad).sum() / (LR * z.grad.square().sum())).item()


ONE_PATCH: dict[str, tuple[Any, tuple[int, ...], int]] = {
    "1d": (PatchNormConv1d, (3,), 0),
    "2d": (PatchNormConv2d, (3, 3), 0),
    "3d": (PatchNormConv3d, (3, 3, 3), 0),
    "transposed-1d": (PatchNormConvTranspose1d, (3,), 2),
    "transposed-2d": (PatchNormConvTranspose2d, (3, 3), 2),
}


SAMPLE_CORRECTED = {
    PatchNormConv1d: SampleCorrectedConv1d,
    PatchNormConv2d: SampleCorrectedConv2d,
    PatchNormConv3d: SampleCorrectedConv3d,
}
PLAIN |= {sample: PLAIN[patch_norm] for patch_norm, sample in SAMPLE_CORRECTED.items()}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")  # torch's own
@every_bias
@pytest.mark.parametrize("name", [name for name, (kind, _, _) in SHAPES.items() if kind in SAMPLE_CORRECTED])
def test_for_a_sample_corrected_layer_it_is_the_rate_times_the_mean_self_term_of_the_plain_one(name: str, bias: bool) -> None:
    kind, options, shape = SHAPES[name]
    corrected, plain = _pair(SAMPLE_CORRECTED[kind], 4, 4, **{"kernel_size": 3, **options}, bias=bias, ours={})
    x = _images(*shape)
    assert ad.matching_lr(corrected, x, LR) == pytest.approx(LR * _mean_self_term(plain, x), rel=1e-10)  # no patch is black


@every_form
@every_bias
@pytest.mark.parametrize(("kind", "size", "padding"), ONE_PATCH.values(), ids=ONE_PATCH)
def test_a_real_step_at_the_matching_rate_moves_single_patches_as_far_on_average_as_the_plain_layer(
    kind: Any, size: tuple[int, ...], padding: int, bias: bool, ours: dict[str, Any]
) -> None:
    corrected, plain = _pair(kind, 2, 4, 3, padding=padding, bias=bias, ours=ours)
    x = _images(6, 2, *size)
    assert corrected(x).shape == (6, 4, *[1] * len(size))
    matched = ad.matching_lr(corrected, x, LR)
    moved = sum(_moved(corrected, image.unsqueeze(0), matched) for image in x)
    assert moved == pytest.approx(sum(_moved(plain, image.unsqueeze(0), LR) for image in x), rel=1e-9)


def test_an_even_kernel_with_padding_same_is_matched_without_a_word_from_torch() -> None:
    torch.set_warn_always(True)
    try:
        ad.matching_lr(PatchNormConv1d(2, 3, 4, padding="same"), torch.randn(2, 2, 6), LR)
    finally:
        torch.set_warn_always(False)


def test_for_an_affine_like_convolution_it_is_the_rate_times_the_mean_of_the_patches_squared_norms_plus_one() -> None:
    layer, x = PatchNormConv2d(4, 6, 3, stride=2, padding=1, groups=2).double(), _images(3, 4, 6, 7)
    wanted = LR * (ad.functional.patch_sqnorm(x, 3, stride=2, padding=1, groups=2) + 1).mean().item()
    assert ad.matching_lr(layer, x, LR) == pytest.approx(wanted, rel=1e-12)


class _Net(nn.Module):
    def __init__(self, conv: Callable[..., nn.Module], linear: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.conv, self.linear = conv(3, 4, 3, stride=2), linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.linear(self.conv(x).tanh().flatten(1))
        return h


def test_convolutions_and_linear_layers_of_one_model_count_equally_on_the_plain_twins_activations() -> None:
    model, twin = _Net(PatchNormConv2d, AffineLikeLinear).double(), _Net(nn.Conv2d, nn.Linear).double()
    twin.load_state_dict(model.state_dict())
    x = _images(4, 3, 5, 5)
    wanted = (_mean_self_term(twin.conv, x) + _mean_self_term(twin.linear, twin.conv(x).tanh().flatten(1))) / 2
    assert ad.matching_lr(model, x, LR) == pytest.approx(LR * wanted, rel=1e-10)


@pytest.mark.parametrize("frozen", ["weight", "bias"])
@every_form
def test_what_is_frozen_has_no_part_in_the_step(frozen: str, ours: dict[str, Any]) -> None:
    corrected, plain = _pair(PatchNormConv2d, 4, 4, 3, groups=2, ours=ours)
    for layer in (corrected, plain):
        getattr(layer, frozen).requires_grad_(False)
    x = _images(2, 4, 4, 4)
    wanted = LR * _mean_self_term(plain, x) / _mean_self_term(corrected, x)
    assert ad.matching_lr(corrected, x, LR) == pytest.approx(wanted, rel=1e-10)


def test_a_transposed_layer_may_be_asked_for_an_output_size() -> None:
    class Up(nn.Module):
        def __init__(self, up: nn.Module) -> None:
            super().__init__()
            self.up = up

        def forward(self, x: Tensor) -> Tensor:
            h: Tensor = self.up(output_size=[6], input=x)
            return h

    corrected, plain = _pair(PatchNormConvTranspose1d, 2, 3, 3, stride=2, padding=1, ours={})
    x = _images(2, 2, 3)
    assert ad.matching_lr(Up(corrected), x, LR) == pytest.approx(LR * _mean_self_term(Up(plain), x), rel=1e-10)


def test_a_black_image_counts_without_an_eps_too() -> None:
    corrected, plain = _pair(PatchNormConv2d, 2, 3, 3, padding=1, ours={"form": "norm-like", "eps": 0.0})
    x = _images(2, 2, 3, 3)
    x[1] = 0
    wanted = LR * _mean_self_term(plain, x) / _mean_self_term(corrected, x)  # 2 for the first image, 1 for the second
    assert ad.matching_lr(corrected, x, LR) == pytest.approx(wanted, rel=1e-10)


def test_narrow_images_are_summed_in_float64() -> None:
    x = torch.full((2, 3, 4, 4), 200.0, dtype=torch.float16)
    assert ad.matching_lr(PatchNormConv2d(3, 4, 3).half(), x, LR) == pytest.approx(LR * (27 * 200.0**2 + 1), rel=1e-12)


def test_autocast_changes_the_rate_by_rounding_only() -> None:
    model, x = nn.Sequential(PatchNormConv2d(3, 4, 3), nn.Tanh(), PatchNormConv2d(4, 2, 2, form="norm-like")), _images(4, 3, 5, 5).float()
    wanted = ad.matching_lr(model, x, LR)
    with torch.autocast("cpu", torch.bfloat16):
        assert ad.matching_lr(model, x, LR) == pytest.approx(wanted, rel=1e-2)


def test_the_layer_and_the_random_numbers_are_left_as_they_were() -> None:
    layer, x = PatchNormConv2d(3, 4, 3, padding=1), _images(2, 3, 4, 4).float()
    state, random = {name: value.clone() for name, value in layer.state_dict().items()}, torch.random.get_rng_state()
    ad.matching_lr(layer, x, LR)
    assert all(torch.equal(value, state[name]) for name, value in layer.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), random)
    assert all(p.grad is None and p.requires_grad for p in layer.parameters())


def test_no_images_are_refused() -> None:
    with pytest.raises(ValueError, match="none of the model's 1 corrected layers was called on these inputs, with rows in them"):
        ad.matching_lr(PatchNormConv2d(3, 4, 3), torch.zeros(0, 3, 4, 4), LR)
