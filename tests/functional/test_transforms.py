# Under torch.func: per-sample gradients, and maps over any of the arguments.
from __future__ import annotations

from itertools import product

import pytest
import torch
from maps import AFFINE_LIKE, NORM_LIKE, Map, every_map, gradients
from oracles import TOLERANCE, close
from torch import Tensor
from torch.func import grad, jacfwd, jacrev, vmap

# torch's own rules for forward mode are loaded through torch.jit.script, which torch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")


@every_map
@pytest.mark.parametrize("zero_row", [False, True], ids=["rows", "a-zero-row"])
def test_per_sample_gradients_are_those_of_a_loop_over_samples(map_: Map, zero_row: bool) -> None:
    x, *parameters = map_.tensors(4, 3, 5)
    samples = x.detach().clone()
    if zero_row:
        samples[2] = 0.0
    named = {name: p.detach() for name, p in zip(("weight", "bias"), parameters, strict=True) if p is not None}

    def loss(named: dict[str, Tensor], sample: Tensor) -> Tensor:
        return map_(sample, named["weight"], named.get("bias")).square().sum()

    at_once, inputs = vmap(grad(loss, argnums=(0, 1)), in_dims=(None, 0))(named, samples)
    for i, sample in enumerate(samples):
        leaves = [sample.clone().requires_grad_(), *(p for p in parameters if p is not None)]
        z = map_(*leaves)
        input_gradient, *wanted = gradients(z, 2 * z.detach(), *leaves)
        close(inputs[i], input_gradient)
        for name, expected in zip(named, wanted, strict=True):
            close(at_once[name][i], expected)


@every_map
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_per_sample_gradients_have_the_dtypes_of_their_tensors(map_: Map, dtype: torch.dtype) -> None:
    tensors = [t.detach() for t in map_.tensors(4, 3, 5, dtype=dtype) if t is not None]
    everything = tuple(range(len(tensors)))
    per_sample = vmap(grad(lambda *tensors: map_(*tensors).sum(), everything), (0, *(None for _ in tensors[1:])))(*tensors)
    assert [g.dtype for g in per_sample] == [dtype] * len(tensors)


MAPPED = [mapped for mapped in product([False, True], repeat=3) if any(mapped)]
SUBSETS = [(m, mapped) for m in [*AFFINE_LIKE, *NORM_LIKE] for mapped in MAPPED if m.bias or not mapped[2]]


def _name(value: Map | tuple[bool, ...]) -> str:
    return str(value) if isinstance(value, Map) else "".join(letter for letter, on in zip("xWb", value, strict=True) if on)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("map_", "mapped"), SUBSETS, ids=_name)
def test_mapping_over_any_of_the_arguments_is_a_loop_over_them(map_: Map, dtype: torch.dtype, mapped: tuple[bool, ...]) -> None:
    models = [map_.tensors(4, 3, 5, dtype=dtype, seed=seed) for seed in range(3)]
    arguments = [
        None if models[0][i] is None else torch.stack([m[i] for m in models]).detach() if on else models[0][i].detach()
        for i, on in enumerate(mapped)
    ]
    at_once = vmap(map_, in_dims=tuple(0 if on else None for on in mapped))(*arguments)
    for k in range(3):
        one = [a if a is None or not on else a[k] for a, on in zip(arguments, mapped, strict=True)]
        close(at_once[k], map_(*one), tolerance=2 * TOLERANCE[dtype])


@every_map
def test_forward_and_reverse_jacobians_are_equal(map_: Map) -> None:
    inputs = [t.detach() for t in map_.tensors(4, 3, 2) if t is not None]
    everything = tuple(range(len(inputs)))
    for forward, reverse in zip(jacfwd(map_, everything)(*inputs), jacrev(map_, everything)(*inputs), strict=True):
        close(forward, reverse)
