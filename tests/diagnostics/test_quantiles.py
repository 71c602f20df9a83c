# Quantiles and sums of the rows that are not masked: on a CPU, and as a GPU takes them, without waiting for an answer.
from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from affine_divergence.diagnostics import _measures
from affine_divergence.diagnostics._measures import Moved, RowSums, summary
from affine_divergence.diagnostics._quantiles import _by_partition, _by_sorting

WAYS = pytest.mark.parametrize("way", [_by_partition, _by_sorting])


@WAYS
@pytest.mark.parametrize("rows", [1, 2, 3, 20, 101])
def test_they_are_numpys_of_the_rows_that_are_used(way, rows: int) -> None:
    values, used = torch.randn(rows, dtype=torch.float64), torch.rand(rows) < 0.7
    used[0] = True
    wanted = np.quantile(values[used].numpy(), [0.05, 0.5, 0.95])
    assert way(values, used, (0.05, 0.5, 0.95)).tolist() == pytest.approx(wanted.tolist(), rel=1e-14)


@WAYS
def test_without_a_row_or_with_one_that_is_no_number_there_is_none(way) -> None:
    values, used = torch.tensor([1.0, math.nan, 3.0], dtype=torch.float64), torch.tensor([True, True, False])
    assert all(map(math.isnan, way(values, used, (0.5,)).tolist()))
    assert all(map(math.isnan, way(values, torch.zeros(3, dtype=torch.bool), (0.5,)).tolist()))
    assert way(values, torch.tensor([True, False, True]), (0.5,)).tolist() == [2.0]


@WAYS
def test_infinite_rows_that_are_used_count(way) -> None:
    values, used = torch.tensor([1.0, math.inf, 2.0], dtype=torch.float64), torch.tensor([True, True, True])
    assert way(values, used, (0.0, 0.5, 1.0)).tolist() == [1.0, 2.0, math.inf]


def test_a_summary_is_the_same_where_masked_rows_are_left_out_and_where_they_count_as_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    gg, dot, square = torch.rand(3, 50, dtype=torch.float64)
    dot, square = dot - 0.7, square + 1.0
    used = torch.rand(50) < 0.6
    gg[~used] = 0.0
    square[:5] = dot[:5] = 0.0
    sums = RowSums(gg, used, gg, (), None, None)
    compact = vars(summary(sums, Moved(dot, square), 0.1))
    monkeypatch.setattr(_measures, "_without_masked", lambda sums, moved: (sums.gg, moved, sums.used))
    counted = vars(summary(sums, Moved(dot, square), 0.1))
    assert {name: value.item() for name, value in counted.items()} == pytest.approx({n: v.item() for n, v in compact.items()}, rel=1e-13)
    assert all(math.isfinite(value.item()) for value in counted.values())
