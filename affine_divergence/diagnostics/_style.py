# The look of every figure: type, grid, and SVG made small.
from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE: Any = {
    "font.size": 10,
    "font.family": "sans-serif",
    "svg.fonttype": "none",  # text as text: a quarter of the size of its outlines, and it can be searched
    "svg.hashsalt": "affine-divergence",
    "xtick.minor.size": 0,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.titlesize": 10,
    "grid.alpha": 0.25,
    "legend.frameon": False,
}
_NO_METADATA: Any = dict.fromkeys(("Date", "Creator", "Format", "Type"))


def svg(figure: Figure) -> str:
    """The figure as SVG, made small; closes it."""
    import matplotlib.pyplot as plt

    buffer = io.StringIO()
    with plt.rc_context(STYLE):
        figure.savefig(buffer, format="svg", metadata=_NO_METADATA)
    plt.close(figure)
    return compact(buffer.getvalue())


def compact(text: str) -> str:
    """The same picture in a third of the bytes: each style written once, a hundredth of a point for coordinates, no idle ids and groups."""
    text = re.sub(r"<!--.*?-->|<!DOCTYPE.*?>", "", text, flags=re.DOTALL)
    text = re.sub(r"\s*\n\s*", " ", re.sub(r">\s+<", "><", text)).strip() + "\n"
    text = re.sub(r' (?:d|x|y|transform)="[^"]*"', lambda found: re.sub(r"-?\d+\.\d{3,}", lambda n: f"{float(n[0]):.2f}", found[0]), text)
    used = set(re.findall(r"#(\w+)", text))
    text = re.sub(r' id="([^"]*)"', lambda found: found[0] if found[1] in used else "", text)
    classes: dict[str, str] = {}
    text = re.sub(r' style="([^"]*)"', lambda found: f' class="{classes.setdefault(found[1], f"c{len(classes)}")}"', text)
    rules = "".join(f".{name}{{{style}}}" for style, name in classes.items())
    text = text.replace("</style>", f"{rules}</style>", 1)
    before = ""
    while before != text:
        before, text = text, re.sub(r"<g>((?:<(?:path|use|text)\b[^>]*/>)*|<text\b[^>]*>[^<]*</text>)</g>", r"\1", text)
    return text
