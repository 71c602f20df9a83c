# What a diagnosis says, as plain records: a row for each layer and call, the coverage, the loss, the self-check, what corrections would do.
#
# A number that is not defined, or was not asked for, is NaN; a rank that was not asked for is None. Numbers are Python's own.
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from os import PathLike

    import polars
    from matplotlib.figure import Figure

Verdict = Literal["ok", "look", "broken"]
VERDICTS: tuple[Verdict, ...] = ("broken", "look", "ok")  # worst first
Part = Literal["rows", "counterfactual", "steps", "checks", "coverage", "samples"]  # of a diagnosis: records of one kind


@dataclass(frozen=True, kw_only=True)
class Row:
    """One call of one layer in one step: what the step did to each row of its output, z_i, at the input that the call had.

    A row is what one output is made of: a row of a linear layer's input, a token of an embedding, the patch of one image, group and
    position of a convolution. δz_i is the change of z_i by the layer's own parameters alone, g_i = ∂L/∂z_i. Rows whose g_i is
    exactly 0, and tokens of an embedding's padding, are masked: counted, and left out of everything else. Names that end with
    _plain are of the change −lr · ∂L/∂θ, which plain gradient descent would have made at the same learning rate; the others of the
    change that the optimiser made.
    """

    module: str
    call: int  # 0, 1, … within the step
    type: str
    rows: int  # not masked
    masked: int
    multiplier_p5: float  # of −⟨δz_i, g_i⟩/(lr ‖g_i‖²): with one row and plain descent ‖x_i‖² + 1; ideal: one number for all rows
    multiplier_median: float
    multiplier_p95: float
    alignment_median: float  # of cos(δz_i, −g_i); ideal: 1
    below_zero: float  # the share of rows pushed uphill, ⟨δz_i, g_i⟩ > 0; ideal: 0
    interference: float  # Σ_i ‖g_i‖·‖Σ_{j≠i} G_ij g_j‖ / Σ_i G_ii ‖g_i‖², of the plain gradient; ideal: 0
    rank: int | None  # numerical rank of the rows [x_i; 1]; at most rank_limit
    update_ratio: float  # ‖δW‖/‖W‖
    efficiency: float  # Σ_i ⟨δz_i, g_i⟩ / (‖δZ‖ ‖g‖); ideal: −1
    verdict: Verdict
    reason: str
    multiplier_p5_plain: float
    multiplier_median_plain: float
    multiplier_p95_plain: float
    alignment_median_plain: float
    below_zero_plain: float
    update_ratio_plain: float
    efficiency_plain: float
    multiplier_mean: float
    multiplier_cv: float  # standard deviation over |mean| of the rows
    multiplier_mean_plain: float
    multiplier_cv_plain: float
    self_term_p5: float  # of the multiplier that row i would have alone, G_ii; NaN by a batch correction
    self_term_median: float
    self_term_p95: float
    rank_limit: int | None  # min(N, d + 1) of the N rows, masked ones too


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """A module that holds parameters, or is of a type that can be measured: whether it was measured, and if not why."""

    module: str
    type: str
    status: Literal["measured", "skipped"]
    reason: str  # "" where it was measured
    parameters: int  # numbers in the parameters that are its own
    calls: int  # forward calls that had something to learn from
    fired: int  # those of them whose gradient arrived
    shared: int = 0  # of its parameters those that another line counts: tied ones, so that sums have each once


@dataclass(frozen=True, kw_only=True)
class Check:
    """The self-check of a parameter: what the captured rows say plain gradient descent would change, against what it would change."""

    parameter: str
    error: float  # ‖predicted − actual‖/‖actual‖; of a Monitor after a common factor, by which clipping may have shortened gradients
    cosine: float  # between both; 1 whatever loss scale or clipping came between
    ok: bool
    reason: str


@dataclass(frozen=True, kw_only=True)
class LossChange:
    """The loss before and after the optimiser's step on the same batch with the same random numbers, and Σ ⟨∂L/∂θ, δθ⟩ over all θ."""

    before: float
    after: float
    predicted: float
    realised: float  # after − before
    repeated: float = math.nan  # before, by a second forward from the same beginning; NaN: not asked for


@dataclass(frozen=True, kw_only=True)
class Counterfactual:
    """What a step of gradient descent would do to the same rows under a correction: fields as those of a Row.

    For the structural kinds g is held fixed at the captured one: a first-order prediction, as `basis` says.
    """

    kind: str  # "none", "affine-like", "norm-like", "sample", "batch"
    module: str
    call: int
    type: str
    rows: int
    masked: int
    multiplier_p5: float
    multiplier_median: float
    multiplier_p95: float
    multiplier_mean: float
    multiplier_cv: float
    alignment_median: float
    below_zero: float
    interference: float  # of the corrected G; NaN for batch, which has none of that form
    efficiency: float
    basis: str  # "exact" or "first order, g held fixed"
    reason: str  # why there are no numbers; "" where there are


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of the measured layers' parameters from the same point, all steps of one length: what it did to the loss."""

    kind: str  # "actual", "none", "sample", "batch"
    norm: float  # ‖δθ‖ over the measured layers' parameters
    predicted: float  # first order: Σ ⟨∂L/∂θ, δθ⟩
    realised: float


@dataclass(frozen=True, kw_only=True)
class Samples:
    """The rows of one call themselves, in the order of the layer's input, those of an attention's projections in that of the attention's.

    What a scatter shows.
    """

    module: str
    call: int
    axes: tuple[int, ...]  # the shape of the rows: (N,), (N, T), (N, groups, H, W), …
    index: tuple[int, ...]  # of each kept row in the flattened axes
    total: int  # rows before some were left out
    multiplier: tuple[float, ...]
    alignment: tuple[float, ...]
    gradient: tuple[float, ...]  # ‖g_i‖; 0 where masked


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What one training step does to the activations of every layer that can be measured. Prints as a table with verdicts.

    `rows` are in the order of the calls; `coverage` says what was measured, and why the rest was not.

    >>> print(Diagnosis(step=300, about={"model": "Net"}, coverage=(), rows=()))  # doctest: +ELLIPSIS
    Diagnosis of step 300
    Measured: 0 modules, 0 calls...
    """

    step: int
    about: Mapping[str, Any]  # model, optimiser, learning rates, versions, what was assumed
    coverage: Sequence[Coverage]
    rows: Sequence[Row]
    checks: Sequence[Check] = ()
    loss: LossChange | None = None
    counterfactual: Sequence[Counterfactual] = ()
    steps: Sequence[Step] = ()
    samples: Sequence[Samples] = field(default=(), repr=False)

    def worst(self) -> list[Row]:
        """The rows, broken ones first, then those to look at, in each by the share pushed uphill and the interference."""
        return sorted(self.rows, key=badness)

    def to_frame(self, what: Part = "rows") -> polars.DataFrame:
        """Records as a polars DataFrame: a line for each, with the step before its fields; NaN becomes null.

        what: "rows", "counterfactual", "steps", "checks", "coverage"; or "samples", of which each kept row of a call is a line.
        Raises ValueError for anything else.
        """
        from affine_divergence.diagnostics._frame import to_frame

        return to_frame([self], what)

    def plot(self) -> Figure:
        """The layers' multipliers on a log scale, as a matplotlib figure."""
        from affine_divergence.diagnostics._figures import multiplier_figure

        return multiplier_figure(self)

    def save_html(self, path: str | PathLike[str]) -> None:
        """Write one page that opens offline: coverage, table, figures, counterfactual, loss."""
        from affine_divergence.diagnostics._page import write_page

        write_page([self], path)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the diagnosis as JSON lines, from which `affine_divergence.diagnostics.load` has it back."""
        from affine_divergence.diagnostics._file import save

        save([self], path)

    def __str__(self) -> str:
        from affine_divergence.diagnostics._text import terminal_width, text

        return text(self, terminal_width())


def badness(row: Row) -> tuple[int, float, float]:
    """What rows are sorted by, the worst first."""
    return VERDICTS.index(row.verdict), -_high(row.below_zero), -_high(row.interference)


def _high(value: float) -> float:
    return -math.inf if math.isnan(value) else value
