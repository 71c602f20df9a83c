# Sweeps: which settings of a study make a line along one axis, or stand beside each other as architectures.
from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import get_args

from affine_divergence.lab.summary import Setting
from affine_divergence.lab.trial import Start

AXES = ("width", "depth", "batch_size", "signal")
ARCHITECTURE = ("width", "depth", "pattern")
LABELS = {
    "width": "neurons in a hidden layer",
    "depth": "hidden layers",
    "batch_size": "batch size",
    "signal": "squared norm τ of a layer's input at the start",
    "start": "start",
}
CONVOLUTIONAL_LABELS = {
    "width": "channels",
    "depth": "convolutions",
    "batch_size": "batch size",
    "signal": LABELS["signal"],
    "start": "start",
    "architecture": "convolutions × channels, kernels and strides",
}
STARTS = get_args(Start)
UNORDERED = ("architecture", "start")
FEWEST = 3  # points that make a line worth drawing


@dataclass(frozen=True)
class Sweep:
    """Settings that differ in one axis alone, in its order; or in their architecture or start, which have none."""

    axis: str
    settings: tuple[Setting, ...]

    @property
    def title(self) -> str:
        cell, rate_from = self.settings[0].cell, next((one.rate_from for one in self.settings if one.rate_from), None)
        layer = "convolution" if cell.pattern else "layer"
        parts = {
            "depth": f"{cell.depth} {layer}{'s' if cell.depth > 1 else ''}",
            "width": f"{cell.width} channels" if cell.pattern else f"width {cell.width}",
            "pattern": cell.pattern,
            "activation": cell.activation,
            "batch_size": f"batch {cell.batch_size}",
            "budget": self.settings[0].budget,
        }
        if self.axis == "architecture":
            parts |= dict.fromkeys(ARCHITECTURE)
        elif self.axis == "batch_size" and cell.pattern:
            parts |= {"depth": cell.architecture} | dict.fromkeys(("width", "pattern"))
        rate = f"\nat the rate of batch {rate_from}" if rate_from else "\nrates tuned for each size" if self.axis == "batch_size" else ""
        first = ", ".join(text for name, text in parts.items() if text and name != self.axis)
        start = {"start": "", "signal": "start fixed-point"}.get(self.axis, cell.start_name)
        second = ", ".join(text for text in (start, cell.training_name) if text)
        return f"{first}\n{second}{rate}" if second else first + rate

    @property
    def quantity(self) -> str:
        """What is along the axis, in words."""
        return (CONVOLUTIONAL_LABELS if self.settings[0].cell.pattern else LABELS)[self.axis]

    @property
    def methods(self) -> list[str]:
        """Those to be drawn: on a line at least two of its settings have them."""
        counts = Counter(row.cell.name for setting in self.settings for row in setting.rows)
        return [method for method, count in counts.items() if count > 1 or not self.ordered]

    @property
    def ordered(self) -> bool:
        """Whether there is a line to draw through the settings."""
        return self.axis not in UNORDERED

    def x(self, setting: Setting) -> float:
        """Where a setting stands: at its depth, or log2 of its width, batch size or signal; architectures and starts at 0, 1, 2…."""
        if not self.ordered:
            return float(self.settings.index(setting))
        value = getattr(setting.cell, self.axis)
        return float(value) if self.axis == "depth" else math.log2(value)

    def label(self, setting: Setting) -> str:
        """What is written there."""
        cell = setting.cell
        if self.axis == "architecture":
            return f"{cell.depth} × {cell.width}\n{cell.pattern}"
        value = getattr(cell, self.axis)
        return f"{value:g}" if self.axis == "signal" else str(value)


def sweeps(settings: Sequence[Setting]) -> list[Sweep]:
    """Convolutional settings by architecture, then every line of at least three along width, depth or batch size, like beside like."""
    found = []
    for axis in AXES:
        lines = _alike(settings, (axis,))
        if axis == "batch_size":
            lines = {key: _completed(line, lines.get((key[0], None), [])) for key, line in lines.items()}
        for line in sorted((line for line in lines.values() if len(line) >= FEWEST), key=lambda line: _order(line[0])):
            found.append(Sweep(axis, tuple(sorted(line, key=lambda setting: getattr(setting.cell, axis)))))
    return [*_architectures(settings, found), *_starts(settings), *found]


def heading(found: Sequence[Sweep]) -> str:
    """What the figures of these sweeps are called together."""
    if all(sweep.axis in ("width", "depth", "batch_size") for sweep in found):
        return "Against width, depth and batch size"
    by = dict.fromkeys(sweep.axis for sweep in found if not sweep.ordered)
    along = dict.fromkeys(sweep.axis.replace("_", " ") for sweep in found if sweep.ordered)
    parts = [f"by {' and '.join(by)}"] * bool(by) + [f"against {' and '.join(along)}"] * bool(along)
    text = ", and ".join(parts)
    return text[0].upper() + text[1:]


def _architectures(settings: Sequence[Setting], lines: Sequence[Sweep]) -> list[Sweep]:
    # Those that no line along width or depth shows.
    shown = [setting for sweep in lines if sweep.axis in ARCHITECTURE for setting in sweep.settings]
    left = [setting for setting in settings if setting.cell.pattern and setting not in shown]
    groups = [group for group in _alike(left, ARCHITECTURE).values() if len(group) >= FEWEST]
    return [Sweep("architecture", tuple(sorted(group, key=_order))) for group in sorted(groups, key=lambda group: _order(group[0]))]


def _starts(settings: Sequence[Setting]) -> list[Sweep]:
    # Of several signals, which make a line of their own, the first stands for the start fixed-point.
    groups = []
    for group in _alike(settings, ("start", "signal")).values():
        firsts = {setting.cell.start: setting for setting in reversed(group)}
        if len(firsts) > 1:
            groups.append(sorted(firsts.values(), key=_order))
    return [Sweep("start", tuple(group)) for group in sorted(groups, key=lambda group: _order(group[0]))]


def _alike(settings: Sequence[Setting], but_for: Sequence[str]) -> dict[tuple[object, int | None], list[Setting]]:
    found: dict[tuple[object, int | None], list[Setting]] = {}
    for setting in settings:
        fixed = asdict(setting.cell) | {"method": None} | dict.fromkeys(but_for)
        found.setdefault((tuple(fixed.values()), setting.rate_from), []).append(setting)
    return found


def _completed(line: list[Setting], tuned: Sequence[Setting]) -> list[Setting]:
    # At the batch size whose rate is kept, that rate is the tuned one.
    size = line[0].rate_from
    if size is None or any(one.cell.batch_size == size for one in line):
        return line
    return [*line, *(one for one in tuned if one.cell.batch_size == size)]


def _order(setting: Setting) -> tuple[object, ...]:
    cell = setting.cell
    kind = (cell.pattern is not None, cell.activation != "tanh", cell.epochs is None)
    start = (STARTS.index(cell.start), cell.signal or 0.0)
    return *kind, cell.depth, cell.width, cell.pattern or "", setting.rate_from or 0, cell.batch_size, *start
