# Patterns of kernels and strides: what they mean, and which are refused.
from __future__ import annotations

import pytest
from pydantic import ValidationError

from affine_divergence.lab.pattern import Kernel, kernels
from affine_divergence.lab.trial import CONVOLUTIONAL, DAMPED, FULLY_CONNECTED, Trial


def trial(**fields: object) -> Trial:
    shape = {"data": "digits", "width": 4, "depth": 2, "activation": "tanh", "batch_size": 8, "learning_rate": 0.1, "seed": 0, "epochs": 1}
    return Trial(**(shape | fields))  # type: ignore[arg-type]


def test_a_pattern_is_repeated_over_the_depth_and_cut_there() -> None:
    assert kernels("k3s2", 2) == [Kernel(3, 2), Kernel(3, 2)]
    assert kernels("k5s2-k1s1", 1) == [Kernel(5, 2)]
    assert kernels("k11s4-k3s1-k3s2", 5) == [Kernel(11, 4), Kernel(3, 1), Kernel(3, 2), Kernel(11, 4), Kernel(3, 1)]


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("", "names kernels and strides, as k3s2-k3s1"),
        ("3x3", "names kernels and strides"),
        ("k3s2-", "names kernels and strides"),
        ("k3s0", "names kernels and strides"),
        ("k03s1", "names kernels and strides"),
        ("k4s2", "kernels are odd"),
        ("k3s1-k2s1", "kernels are odd"),
        ("k3s1-k3s1", "write k3s1"),
        ("k3s2-k1s1-k3s2-k1s1", "write k3s2-k1s1"),
    ],
)
def test_what_is_no_pattern_or_a_second_name_of_one_is_refused(pattern: str, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        trial(method="none", pattern=pattern)


def test_each_model_has_its_own_methods() -> None:
    for method in CONVOLUTIONAL:
        assert trial(method=method, pattern="k3s2").method == method
    for method in FULLY_CONNECTED:
        assert trial(method=method, damping=0.1 if method in DAMPED else None).method == method
    with pytest.raises(ValidationError, match="layer-norm is no method of convolutional nets, with a pattern, which have none, batch-norm"):
        trial(method="layer-norm", pattern="k3s2")
    with pytest.raises(ValidationError, match="rms-norm-sample is no method of fully-connected nets, without a pattern"):
        trial(method="rms-norm-sample")


def test_the_key_of_a_fully_connected_trial_is_as_it_was_before_there_were_patterns() -> None:
    assert trial(method="none").key == "c82fa162f983221f"
    assert trial(method="none", pattern="k3s2").key != trial(method="none").key


def test_convolutional_trials_share_a_stack_with_those_of_their_method_only() -> None:
    one = trial(method="none", pattern="k3s2")
    assert one.shared == trial(method="none", pattern="k3s2", learning_rate=0.5, seed=3).shared
    assert one.shared != trial(method="batch-norm", pattern="k3s2").shared
    assert trial(method="none").shared == trial(method="batch-norm").shared


def test_a_net_has_one_name() -> None:
    for pattern, depth, shorter in (("k3s2-k3s1", 1, "k3s2"), ("k3s2-k3s1-k3s2", 3, "k3s2-k3s1"), ("k3s1-k3s1-k3s2", 2, "k3s1")):
        with pytest.raises(ValidationError, match=f"at depth {depth} the pattern {pattern} is {shorter}: write that"):
            trial(method="none", pattern=pattern, depth=depth)
        assert kernels(pattern, depth) == kernels(shorter, depth)
    assert trial(method="none", pattern="k3s2-k3s1-k3s2", depth=4).depth == 4
    # Its first two layers alone would be a pattern that repeats itself; all three are not.
    assert trial(method="none", pattern="k3s1-k3s1-k3s2", depth=3).depth == 3
