# Sweeps: which settings of a study make a line along one axis, or stand beside each other as architectures.
from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from affine_divergence.lab.summary import Setting

AXES = ("width", "depth", "batch_size")
ARCHITECTURE = ("width", "depth", "pattern")
LABELS = {"width": "neurons in a hidden layer", "depth": "hidden layers", "batch_size": "batch size"}
CONVOLUTIONAL_LABELS = {
    "width": "channels",
    "depth": "convolutions",
    "batch_size": "batch size",
    "architecture": "convolutions × channels, kernels and strides",
}
FEWEST = 3  # points that make a line worth drawing


@dataclass(frozen=True)
class Sweep:
    """Settings that differ in one axis alone, in its order; or in their architecture, which has none."""

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
        return ", ".join(text for name, text in parts.items() if text and name != self.axis) + rate

    @property
    def quantity(self) -> str:
        """What is along the axis, in words."""
        return (CONVOLUTIONAL_LABELS if self.settings[0].cell.pattern else LABELS)[self.axis]

    @property
    def methods(self) -> list[str]:
        """Those to be drawn: on a line at least two of its settings have them."""
        counts = Counter(row.cell.method for setting in self.settings for row in setting.rows)
        return [method for method, count in counts.items() if count > 1 or not self.ordered]

    @property
    def ordered(self) -> bool:
        """Whether there is a line to draw through the settings."""
        return self.axis != "architecture"

    def x(self, setting: Setting) -> float:
        """Where a setting stands: at its depth, or log2 of its width or batch size; architectures at 0, 1, 2…."""
        if self.axis == "architecture":
            return float(self.settings.index(setting))
        value = getattr(setting.cell, self.axis)
        return float(value) if self.axis == "depth" else math.log2(value)

    def label(self, setting: Setting) -> str:
        """What is written there."""
        cell = setting.cell
        return f"{cell.depth} × {cell.width}\n{cell.pattern}" if self.axis == "architecture" else str(getattr(cell, self.axis))


def sweeps(settings: Sequence[Setting]) -> list[Sweep]:
    """Convolutional settings by architecture, then every line of at least three along width, depth or batch size, like beside like."""
    found = []
    for axis in AXES:
        lines = _alike(settings, (axis,))
        if axis == "batch_size":
            lines = {key: _completed(line, lines.get((key[0], None), [])) for key, line in lines.items()}
        for line in sorted((line for line in lines.values() if len(line) >= FEWEST), key=lambda line: _order(line[0])):
            found.append(Sweep(axis, tuple(sorted(line, key=lambda setting: getattr(setting.cell, axis)))))
    return [*_architectures(settings, found), *found]


def heading(found: Sequence[Sweep]) -> str:
    """What the figures of these sweeps are called together."""
    if all(sweep.ordered for sweep in found):
        return "Against width, depth and batch size"
    along = dict.fromkeys(sweep.axis.replace("_", " ") for sweep in found if sweep.ordered)
    return "By architecture" + (f", and against {' and '.join(along)}" if along else "")


def _architectures(settings: Sequence[Setting], lines: Sequence[Sweep]) -> list[Sweep]:
    # Those that no line along width or depth shows.
    shown = [setting for sweep in lines if sweep.axis in ARCHITECTURE for setting in sweep.settings]
    left = [setting for setting in settings if setting.cell.pattern and setting not in shown]
    groups = [group for group in _alike(left, ARCHITECTURE).values() if len(group) >= FEWEST]
    return [Sweep("architecture", tuple(sorted(group, key=_order))) for group in sorted(groups, key=lambda group: _order(group[0]))]


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
    return *kind, cell.depth, cell.width, cell.pattern or "", setting.rate_from or 0, cell.batch_size
