# Every model of architectures.py diagnosed with both optimisers: a file of records each, and the tables of docs/diagnosis.md.
#
#     python examples/diagnose_architectures.py FOLDER          # all of them
#     python examples/diagnose_architectures.py FOLDER vit      # this one alone, and the tables of all whose files are in the folder
from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import architectures
import torch
from torch.nn import functional as F

import affine_divergence as ad

RATES = {"SGD": 0.1, "AdamW": 1e-3}
KINDS = ("none", "affine-like", "norm-like", "sample", "batch")
ARCHITECTURES: dict[str, tuple[Any, Any, Any]] = {
    "bert": (architectures.bert, architectures.bert_batch, None),
    "gpt2": (architectures.gpt2, architectures.gpt2_batch, None),
    "llama": (architectures.llama, architectures.llama_batch, None),
    "vit": (architectures.vit, architectures.vit_batch, None),
    "resnet18": (architectures.resnet18, architectures.resnet18_batch, F.cross_entropy),
}


def diagnosed(name: str, optimizer: str) -> ad.diagnostics.Diagnosis:
    """The diagnosis of one of them, without the rows that a scatter shows."""
    make, batch, loss_fn = ARCHITECTURES[name]
    model, given = make(), batch()
    inputs, targets = given if isinstance(given, tuple) else (given, None)
    torch.manual_seed(architectures.SEED)  # the masks of dropout
    step = getattr(torch.optim, optimizer)(model.parameters(), lr=RATES[optimizer])
    return replace(ad.diagnose(model, inputs, targets, loss_fn, optimizer=step), samples=())


def table(folder: Path) -> list[str]:
    """A line for each architecture and optimiser, medians over the calls."""
    lines = [
        "| | layers | skipped | step of | G_ii, p95/p5 | interference | alignment | uphill | efficiency | real/predicted | look | broken |",
        f"|{'---|' * 12}",
    ]
    for name, optimizer, found in _read(folder):
        rows, verdicts, loss = found.rows, [row.verdict for row in found.rows], found.loss
        assert loss is not None
        widest = max(rows, key=_apart)
        cells = [
            name,
            str(sum(one.status == "measured" for one in found.coverage)),
            str(sum(one.status == "skipped" for one in found.coverage)),
            f"{optimizer}, {RATES[optimizer]:g}",
            f"{median(map(_apart, rows)):.2f}, at most {_apart(widest):.1f}",
            f"{median(row.interference for row in rows):.3g}",
            f"{median(row.alignment_median for row in rows):.2f}",
            f"{median(row.below_zero for row in rows):.0%}",
            f"{median(row.efficiency for row in rows):.2f}",
            f"{loss.realised / loss.predicted:.2g}",
            str(verdicts.count("look")),
            str(verdicts.count("broken")),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def corrections(folder: Path) -> list[str]:
    """A line for each architecture: medians over the calls for plain descent and under each correction, and steps of one length."""
    lines = [
        f"| | {' | '.join(f'alignment: {kind}' if kind == 'none' else kind for kind in KINDS)} | uphill: none | batch "
        "| loss: none | sample | batch |",
        f"|{'---|' * (len(KINDS) + 6)}",
    ]
    for name, optimizer, found in _read(folder):
        if optimizer == "SGD":
            steps = {step.kind: step.realised for step in found.steps}
            cells = [
                name,
                *(f"{_median_of(found, kind, 'alignment_median'):.2f}" for kind in KINDS),
                *(f"{_median_of(found, kind, 'below_zero'):.0%}" for kind in ("none", "batch")),
                *(f"{steps[kind]:.3f}" for kind in ("none", "sample", "batch")),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def _read(folder: Path) -> Iterator[tuple[str, str, ad.diagnostics.Diagnosis]]:
    for name in ARCHITECTURES:
        for optimizer in RATES:
            path = folder / f"{name}-{optimizer}.jsonl"
            if path.exists():
                (found,) = ad.diagnostics.load(path)
                yield name, optimizer, found


def _apart(row: Any) -> float:
    return row.self_term_p95 / row.self_term_p5 if row.self_term_p5 else math.inf


def _median_of(found: ad.diagnostics.Diagnosis, kind: str, measure: str) -> float:
    return median(getattr(one, measure) for one in found.counterfactual if one.kind == kind and not one.reason)


def main(folder: str, *names: str) -> None:
    """Diagnose them with both optimisers, write the files and print the tables."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name in names or ARCHITECTURES:
        for optimizer in RATES:
            diagnosed(name, optimizer).save(Path(folder) / f"{name}-{optimizer}.jsonl")
    print("\n".join([*table(Path(folder)), "", *corrections(Path(folder))]))


if __name__ == "__main__":
    main(*sys.argv[1:])
