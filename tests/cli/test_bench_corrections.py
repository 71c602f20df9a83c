# affdiv bench corrections: every row, its ratio and its form, and that the sides of each comparison compute what the table says.
from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from batch_oracles import augmented, ridge
from oracles import close
from torch import Tensor, nn

from affine_divergence.cli.bench import bench
from affine_divergence.gradient import _average, _batch
from affine_divergence.lab.benchmarks import _conv_layers, _corrected_convs, _corrected_linear, _corrections, _rivals, corrections
from affine_divergence.lab.benchmarks._corrected_linear import (
    AVERAGE,
    AVERAGE_KEPT,
    BATCH,
    DAMPING,
    KFAC,
    KFAC_KEPT,
    OPACUS,
    PLAIN,
    SAMPLE,
    SKFAC,
    VMAP,
    Row,
    table,
)
from affine_divergence.nn import BatchCorrectedLinear

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script(_method)?` is deprecated:DeprecationWarning")  # as asdl is imported
OTHERS = (PLAIN, SAMPLE, BATCH, AVERAGE, AVERAGE_KEPT, OPACUS, VMAP, KFAC, SKFAC, KFAC_KEPT)
CONVS = slice(48, 72)
FEW, MANY = (4, 6, 5), (9, 4, 5)


def rows_of(lines: list[str], name_at: slice = slice(20, 64)) -> list[tuple[str, str, list[str]]]:
    """The rows of a table as shape, layer, and the rest."""
    start = next(place for place, line in enumerate(lines) if line.startswith("shape")) + 1
    return [(line[: name_at.start].strip(), line[name_at].strip(), line[name_at.stop :].split()) for line in lines[start:]]


def counted(pieces: Mapping[str, Callable[[], object]], repeats: int, *, warm: int = 2) -> dict[str, float]:
    """Instead of times: a millisecond, two, three, …"""
    for piece in pieces.values():
        piece()
    return {name: 1e-3 * (1 + place) for place, name in enumerate(pieces)}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_corrected_linear, "SHAPES", (FEW, MANY))
    monkeypatch.setattr(_corrected_linear, "LIMITED", (MANY,))


@pytest.mark.usefixtures("tiny")
def test_every_row_appears_in_ratio_to_the_plain_layer_of_its_shape() -> None:
    rows = rows_of([*_corrected_linear.corrected_linear(3)])
    assert [(shape, name) for shape, name, _ in rows] == [
        *[("(4, 6→5)", name) for name in OTHERS],
        *[("(9, 4→5)", name) for name in OTHERS if name != SKFAC],  # no Gram matrix is smaller there
    ]
    numbers = {(shape, name): [float(entry) for entry in rest if entry[0].isdigit()] for shape, name, rest in rows}
    ms = {row: entries[0] for row, entries in numbers.items()}
    for (shape, name), (_, ratio) in numbers.items():
        assert ratio == pytest.approx(ms[shape, name] / ms[shape, PLAIN], abs=0.001, rel=0.02 / ms[shape, PLAIN])


@pytest.mark.usefixtures("tiny")
def test_a_row_of_two_passes_is_the_mean_of_fifty_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_corrected_linear, "interleaved", counted)
    rows = {name: rest for shape, name, rest in rows_of([*_corrected_linear.corrected_linear(3)]) if shape == "(4, 6→5)"}
    assert rows[PLAIN] == ["1.00", "1.000"]
    assert rows[SAMPLE] == ["2.00", "2.000"]
    assert rows[AVERAGE_KEPT] == ["primal", "5.02", "5.020"]  # 5 ms, 1 in 50 of 6 ms
    assert rows[KFAC] == ["9.00", "9.000"]
    assert rows[KFAC_KEPT] == ["10.96", "10.960"]  # 11 ms, 1 in 50 as long as K-FAC's every step


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(("sample", "said"), [(1.1, "holds"), (1.11, "exceeded")])
def test_the_limit_is_marked_where_it_is_one(monkeypatch: pytest.MonkeyPatch, sample: float, said: str) -> None:
    def clock(pieces: Mapping[str, Any], repeats: int, *, warm: int = 2) -> dict[str, float]:
        return {name: sample if place == 1 else 1.0 for place, name in enumerate(pieces)}

    monkeypatch.setattr(_corrected_linear, "interleaved", clock)
    lines = [*_corrected_linear.corrected_linear(3)]
    marked = [(shape, name) for shape, name, rest in rows_of(lines) if rest[-1] == said]
    assert marked == [("(9, 4→5)", SAMPLE)]
    assert sum(line.endswith(("holds", "exceeded")) for line in lines) == 1


@pytest.mark.usefixtures("tiny")
def test_an_absent_package_says_how_to_install_it_and_the_other_rows_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "asdl", None)
    monkeypatch.setitem(sys.modules, "opacus", None)
    lines = [*_corrected_linear.corrected_linear(3)]
    for _, name, rest in rows_of(lines):
        packages = {OPACUS: "opacus", KFAC: "asdfghjkl", SKFAC: "asdfghjkl", KFAC_KEPT: "asdfghjkl"}
        if name in packages:
            assert " ".join(rest) == f"not installed: pip install {packages[name]}"
        else:
            assert float(rest[-1] if rest[-1] not in ("holds", "exceeded") else rest[-2]) > 0


def test_a_package_that_is_broken_is_not_called_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "asdl", None)
    monkeypatch.setattr(_corrected_linear, "missing", lambda module: None)
    with pytest.raises(ImportError):
        table(*_problem(FEW))


def test_gradients_of_all_samples_that_would_not_fit_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_corrected_linear, "SAMPLES_BYTES", 4 * 6 * 5 * 8 - 1)
    rows = table(*_problem(FEW))
    assert rows[OPACUS].instead == rows[VMAP].instead == "not run: the gradients of all samples are 0.0 GB"
    monkeypatch.setattr(_corrected_linear, "SAMPLES_BYTES", 4 * 6 * 5 * 8)
    assert table(*_problem(FEW))[VMAP].passes


def _problem(shape: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))
    rows, d_in, d_out = shape
    x = 2 * torch.randn(rows, d_in, dtype=torch.float64, generator=generator)
    return x.requires_grad_(), torch.randn(rows, d_out, dtype=torch.float64, generator=generator)


def _after(row: Row, x: Tensor, place: int = 0) -> Tensor:
    """The gradients of weight and bias that a pass leaves, and ∂L/∂x as torch's."""
    assert row.layer is not None
    for parameter in (x, *row.layer.parameters()):
        parameter.grad = None
    row.passes[place]()
    weight, bias = row.layer.weight.grad, row.layer.bias.grad
    assert isinstance(weight, Tensor)
    assert isinstance(bias, Tensor)
    return torch.cat([weight, bias[:, None]], 1)


@pytest.mark.parametrize("shape", [FEW, MANY], ids=str)
def test_every_row_hands_on_the_gradient_of_its_input(shape: tuple[int, int, int]) -> None:
    x, g = _problem(shape)
    for name, row in table(x, g).items():
        assert row.layer is not None
        for place in range(len(row.passes)):
            _after(row, x, place)
            assert x.grad is not None
            mean = name == KFAC_KEPT and place == 0  # of which loss asdl takes: the sum where it makes its matrices
            close(x.grad, g @ row.layer.weight.detach() / (len(x) if mean else 1))


@pytest.mark.parametrize("shape", [FEW, MANY], ids=str)
def test_the_sums_of_the_samples_gradients_are_the_sample_correction(shape: tuple[int, int, int]) -> None:
    x, g = _problem(shape)
    rows = table(x, g)
    augmented_x = augmented(x.detach())
    expected = sum(torch.outer(g_i, x_i) / (x_i @ x_i) for g_i, x_i in zip(g, augmented_x, strict=True))
    for name in (SAMPLE, OPACUS, VMAP):
        close(_after(rows[name], x), expected)
        close(_after(rows[name], x), expected)  # nothing is left over from pass to pass
    assert rows[OPACUS].layer is not None
    assert [getattr(parameter, "grad_sample") for parameter in rows[OPACUS].layer.parameters()] == [None, None]  # noqa: B009


@pytest.mark.parametrize("make", [_rivals.opacus_samples, _rivals.vmap_samples])
def test_the_samples_gradients_add_up_to_the_plain_one(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x, g = _problem(MANY)
    sums: list[Tensor] = []
    monkeypatch.setattr(_rivals, "_sum_corrected", lambda layer, x, samples: sums.extend(own.sum(0) for own in samples))
    make(nn.Linear(4, 5, dtype=torch.float64), x, g)()
    close(sums[0], g.mT @ x.detach())
    close(sums[1], g.sum(0))


@pytest.mark.parametrize("shape", [FEW, MANY], ids=str)
def test_the_batch_correction_and_its_averages_are_the_ridge_solution(shape: tuple[int, int, int]) -> None:
    x, g = _problem(shape)
    rows = table(x, g)
    for name in (BATCH, AVERAGE, AVERAGE_KEPT):  # the average of one batch is that batch's
        for place in range(len(rows[name].passes)):
            close(_after(rows[name], x, place), ridge(augmented(x.detach()), g, DAMPING), tolerance=1e-9)


@pytest.mark.parametrize("shape", [FEW, MANY, (5, 4, 6)], ids=str)
def test_k_fac_is_its_definition_in_both_forms(shape: tuple[int, int, int]) -> None:
    x, g = _problem(shape)
    left, right = _damped_inverses(x.detach(), g)
    expected = left @ torch.cat([g.mT @ x.detach() @ right, g.sum(0)[:, None]], 1) / len(x)
    rows = table(x, g)
    assert (SKFAC in rows) == (shape != MANY)
    for name in [KFAC, KFAC_KEPT, *[SKFAC] * (SKFAC in rows)]:
        for place in range(len(rows[name].passes)):
            close(_after(rows[name], x, place), expected, tolerance=1e-9)


def test_only_s_k_fac_inverts_by_gram_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    from asdl.operations import operation

    rows = table(*_problem(FEW))
    inverted: list[tuple[int, ...]] = []
    by_gram = operation.smw_inv
    monkeypatch.setattr(operation, "smw_inv", lambda rows, damping: inverted.append(tuple(rows.shape)) or by_gram(rows, damping))
    rows[KFAC].passes[0]()
    assert inverted == []
    rows[SKFAC].passes[0]()
    assert inverted == [(4, 6), (4, 5)]


def _damped_inverses(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    # (gᵀg/N + √damping/π)⁻¹ and (XᵀX/N + √damping·π)⁻¹, π² the ratio of the mean eigenvalues (Martens and Grosse 2015, section 6.3).
    inputs, outputs = x.mT @ x / len(x), g.mT @ g / len(g)
    pi = ((inputs.trace() / len(inputs)) / (outputs.trace() / len(outputs))).sqrt()
    parts = (outputs, DAMPING**0.5 / pi), (inputs, DAMPING**0.5 * pi)
    left, right = (torch.linalg.inv(matrix + damping * torch.eye(len(matrix)).double()) for matrix, damping in parts)
    return left, right


def test_k_fac_is_parallel_to_the_batch_correction_where_the_gradients_are_white() -> None:
    x, g = _problem(MANY)
    g = 3 * torch.linalg.qr(g)[0]
    layer, n = nn.Linear(4, 5, dtype=torch.float64), len(x)
    _rivals.kfac(layer, x, g, DAMPING, 50)(_rivals.FIRST)
    covariance = x.detach().mT @ x.detach() / n
    pi = (covariance.trace() / 4 / (9 / n)).sqrt()
    share = DAMPING**0.5 * pi * n / covariance.trace()  # of λ = damping · trace(XᵀX)/N in what K-FAC adds to XᵀX
    batch = BatchCorrectedLinear(4, 5, bias=False, dtype=torch.float64, damping=float(share))
    batch(x).backward(g)
    assert layer.weight.grad is not None
    assert batch.weight.grad is not None
    close(layer.weight.grad * (9 / n + DAMPING**0.5 / pi), batch.weight.grad, tolerance=1e-9)
    assert not torch.allclose(layer.weight.grad, batch.weight.grad)


def test_the_kept_inverse_is_kept_and_the_other_made(monkeypatch: pytest.MonkeyPatch) -> None:
    from asdl.operations import operation

    x, g = _problem(MANY)
    rows = table(x, g)
    _after(rows[AVERAGE_KEPT], x)
    made: list[str] = []
    inverse, cholesky = _average.Inverse, operation.cholesky_inv
    monkeypatch.setattr(_average, "Inverse", lambda *arguments: made.append("average") or inverse(*arguments))
    monkeypatch.setattr(operation, "cholesky_inv", lambda *arguments: made.append("K-FAC") or cholesky(*arguments))
    for name, count in ((AVERAGE_KEPT, 1), (KFAC_KEPT, 2)):
        kept, renewed = rows[name].passes
        kept()
        kept()
        assert made == []
        renewed()
        renewed()
        assert len(made) == 2 * count
        made.clear()


def test_the_form_in_the_table_is_the_one_that_solves(monkeypatch: pytest.MonkeyPatch) -> None:
    used = _spied(monkeypatch)
    for rows in (4, 5, 6):  # d + 1 = 5
        row = table(*_problem((rows, 4, 3)))[BATCH]
        row.passes[0]()
        assert used.pop() == row.form
    sizes = (9, 3), (10, 3), (11, 3), (1, 6)  # 9, 10, 11 and 16 positions, d + 1 = 10
    shapes = [_conv_layers.Shape(images, 2, side, 4, 3, groups=2) for images, side in sizes]
    monkeypatch.setattr(_corrected_convs, "SHAPES", shapes)
    monkeypatch.setattr(_corrected_convs, "BATCH_SHAPES", shapes)
    used.clear()
    forms = [rest[0] for _, name, rest in rows_of([*_corrected_convs.corrected_convs(3)], CONVS) if name == _corrected_convs.BATCH]
    assert forms == ["dual"] * 4 + ["primal"] * 4  # in two formats
    assert used == [form for form in forms for _ in range(4)]


def _spied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    used: list[str] = []
    for form in ("dual", "primal"):
        solve = getattr(_batch.Batch, f"_{form}")

        def spy(*arguments: Any, form: str = form, solve: Any = solve) -> Any:
            used.append(form)
            return solve(*arguments)

        monkeypatch.setattr(_batch.Batch, f"_{form}", spy)
    return used


def test_every_convolution_is_in_ratio_to_torchs_in_the_same_format(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = _conv_layers.Shape(2, 3, 6, 4, 3, padding=1), _conv_layers.Shape(2, 4, 8, 4, 3)
    monkeypatch.setattr(_corrected_convs, "SHAPES", shapes)
    monkeypatch.setattr(_corrected_convs, "BATCH_SHAPES", shapes[1:])
    seen: list[tuple[str, bool]] = []

    def passed(module: nn.Module, x: Tensor, upstream: Tensor) -> Callable[[], None]:
        seen.append((type(module).__name__, all(t.is_contiguous(memory_format=torch.channels_last) for t in (x, upstream, module.weight))))  # type: ignore[arg-type]
        return lambda: module(x).backward(upstream)

    monkeypatch.setattr(_corrected_convs, "interleaved", counted)
    monkeypatch.setattr(_corrected_convs, "one_pass", passed)
    rows = rows_of([*_corrected_convs.corrected_convs(3)], CONVS)
    kinds = {"Conv2d": ["1.00", "1.000"], "SampleCorrectedConv2d": ["2.00", "2.000"], "BatchCorrectedConv2d": ["primal", "3.00", "3.000"]}
    few = [*kinds][:2]
    first, second = ("(2, 3→4, 6×6) k3 p1", "(2, 4→4, 8×8) k3 p0")
    assert rows == [
        (f"{shape!s:<33}{name}", kind, kinds[kind])
        for shape, layers in ((first, few), (second, [*kinds]))
        for name in ("NCHW", "channels_last")
        for kind in layers
    ]
    assert seen == [(kind, last) for layers in (few, [*kinds]) for last in (False, True) for kind in layers]


def test_the_command_prints_both_tables(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(_corrected_linear, "SHAPES", (FEW,))
    monkeypatch.setattr(_corrected_convs, "SHAPES", (_conv_layers.Shape(2, 3, 6, 4, 3),))
    bench("corrections", repeats=3)
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "medians of 3 interleaved rounds" in printed.out
    assert " SKFAC" in printed.out
    assert "SampleCorrectedConv2d" in printed.out


def test_it_is_measured_with_one_thread_and_leaves_as_many_as_there_were(monkeypatch: pytest.MonkeyPatch) -> None:
    for part in ("corrected_linear", "corrected_convs"):
        monkeypatch.setattr(_corrections, part, lambda repeats: [f"{torch.get_num_threads()} of {repeats}"])
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert [*corrections(3)] == ["1 of 3", "", "1 of 3"]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
