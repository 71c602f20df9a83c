# The rows that are kept for a scatter: in the order of what the layer, or the attention it is in, was given.
from __future__ import annotations

import itertools

import pytest
import torch
from diagnosis_cases import rows
from torch import Tensor, nn

import affine_divergence as ad
from affine_divergence.diagnostics import _diagnose
from affine_divergence.diagnostics._records import Samples

BATCH, TOKENS, KEYS = 2, 3, 5


class _Attends(nn.Module):
    """An attention that is asked for some tokens alone, of some keys alone."""

    def __init__(self, *, batch_first: bool, by_keyword: bool = False, batched: bool = True, other_sizes: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        options = {"kdim": 6, "vdim": 7} if other_sizes else {}
        self.attention = nn.MultiheadAttention(4, 2, batch_first=batch_first, **options)
        self.by_keyword, self.batch_first, self.batched = by_keyword, batch_first, batched

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        """Of tensors with the batch first."""
        if not self.batched:
            query, key, value, mask = query[0], key[0], value[0], mask[0]
        elif not self.batch_first:
            query, key, value = (t.transpose(0, 1) for t in (query, key, value))
        given = {"query": query, "key": key, "value": value} if self.by_keyword else {}
        z: Tensor = self.attention(*([] if given else (query, key, value)), key_padding_mask=mask, **given)[0]
        return z if self.batch_first or not self.batched else z.transpose(0, 1)


@pytest.fixture
def _all_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_diagnose, "_SAMPLED", 10)


def _asked(axes: tuple[int, ...], batch: int, tokens: list[int], *, batch_first: bool) -> set[int]:
    """The flattened places of tokens of one batch entry."""
    if len(axes) == 1:
        return set(tokens)
    return {batch * axes[1] + t if batch_first else t * axes[1] + batch for t in tokens}


@pytest.mark.usefixtures("_all_sampled")
@pytest.mark.parametrize("by_keyword", [False, True])
@pytest.mark.parametrize(("batch_first", "batched"), [(True, True), (False, True), (True, False), (False, False)])
@pytest.mark.parametrize(("itself", "other_sizes"), [(True, False), (False, False), (False, True)])
def test_rows_of_an_attentions_projections_lie_as_its_inputs(
    itself: bool, batch_first: bool, batched: bool, other_sizes: bool, by_keyword: bool
) -> None:
    model = _Attends(batch_first=batch_first, by_keyword=by_keyword, batched=batched, other_sizes=other_sizes).double()
    keys = TOKENS if itself else KEYS
    query = rows(BATCH, TOKENS, 4)
    key, value = (rows(BATCH, KEYS, size, seed=2) for size in ((6, 7) if other_sizes else (4, 4)))
    batch, token, heard = 1 if batched else 0, 2, [0, 2]
    mask = torch.ones(BATCH, keys, dtype=torch.bool)
    mask[:, heard] = False  # two keys: the gradient of a lone one is 0
    found = ad.diagnose(model, (query, query if itself else key, query if itself else value, mask), None, lambda z: _of(z, batch, token))
    samples = {one.module.removeprefix("attention."): one for one in found.samples}
    assert set(samples) == {"q_proj", "k_proj", "v_proj", "out_proj"}
    for name, number, tokens in (("q", TOKENS, [token]), ("out", TOKENS, [token]), ("k", keys, heard), ("v", keys, heard)):
        one = samples[f"{name}_proj"]
        assert one.axes == ((number,) if not batched else (BATCH, number) if batch_first else (number, BATCH))
        assert one.index == tuple(range(one.total))
        with_gradient = _asked(one.axes, batch, tokens, batch_first=batch_first)
        assert {place for place, size in zip(one.index, one.gradient, strict=True) if size > 0} == with_gradient
        # The multipliers and alignments are those of the same rows: of the others nothing is divided.
        assert {place for place, m in zip(one.index, one.multiplier, strict=True) if abs(m) < float("inf")} == with_gradient


def _of(z: Tensor, batch: int, token: int) -> Tensor:
    return (z[batch, token] if z.ndim == 3 else z[token]).sin().sum()


@pytest.mark.usefixtures("_all_sampled")
def test_the_two_layouts_of_one_attention_have_the_same_numbers_in_their_places() -> None:
    query, mask = rows(BATCH, TOKENS, 4), torch.zeros(BATCH, TOKENS, dtype=torch.bool)
    first, last = (
        {one.module: one for one in ad.diagnose(_Attends(batch_first=way).double(), (query, query, query, mask), None, _bent).samples}
        for way in (True, False)
    )
    for name, one in first.items():
        assert one.axes == last[name].axes[::-1] == (BATCH, TOKENS)
        for b, t in itertools.product(range(BATCH), range(TOKENS)):
            assert _at(one, (b, t)) == pytest.approx(_at(last[name], (t, b)), rel=1e-8)


def _bent(z: Tensor) -> Tensor:
    return (z.sin() * torch.linspace(-1, 1, z.numel(), dtype=z.dtype).view_as(z)).sum()


def _at(samples: Samples, place: tuple[int, int]) -> list[float]:
    at = samples.index.index(place[0] * samples.axes[1] + place[1])
    return [column[at] for column in (samples.multiplier, samples.alignment, samples.gradient)]


@pytest.mark.usefixtures("_all_sampled")
def test_all_layers_of_an_encoder_have_the_axes_of_its_input() -> None:
    model = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.0).double()
    found = ad.diagnose(model, rows(BATCH, TOKENS, 4), None, _bent)
    assert {one.axes for one in found.samples} == {(BATCH, TOKENS)}
    assert len(found.samples) == 6
