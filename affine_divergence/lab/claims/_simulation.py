# Simulated studies: how often the rules give each verdict when the true lead is known.
from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from affine_divergence.lab.claims._rule import Verdict, claim_verdict, unit_verdict
from affine_divergence.lab.claims._tendency import part_verdict, pool, standing, unit_standing
from affine_divergence.lab.statistics import evidence, holm


@dataclass(frozen=True)
class Simulated:
    """The verdicts of many simulated studies with one true lead, by the rule and by the strict one."""

    lead: float
    tendency: Counter[Verdict]
    strict: Counter[Verdict]


def simulate(lead: float, *, studies: int, cells: int, rivals: int, seeds: int, deviation: float, spread: float, seed: int) -> Simulated:
    """Judge studies whose method leads every rival by `lead` points on average over cells.

    A run's accuracy varies by `deviation` over seeds; the true lead of a cell by `spread` over cells, the same over all rivals.
    """
    random = np.random.default_rng(seed)
    tendency: Counter[Verdict] = Counter()
    strict: Counter[Verdict] = Counter()
    for _ in range(studies):
        runs = random.normal(0.0, deviation, (cells, rivals + 1, seeds))
        leads = lead + spread * random.normal(0.0, 1.0, (cells, 1, 1))
        first, second = _judged(runs[:, :1] - runs[:, 1:] + leads)
        tendency[first] += 1
        strict[second] += 1
    return Simulated(lead, tendency, strict)


def _judged(differences: NDArray[np.float64], margin: float = 0.5, level: float = 0.05) -> tuple[Verdict, Verdict]:
    """The verdicts on paired differences (cells, rivals, seeds)."""
    cells, rivals, _ = differences.shape
    found = [[evidence(list(values), level) for values in cell] for cell in differences]
    ahead = holm([one.p_greater for cell in found for one in cell])
    behind = holm([one.p_less for cell in found for one in cell])
    standings = []
    for i, cell in enumerate(found):
        places = range(i * rivals, (i + 1) * rivals)
        stands = [standing(ahead[k], behind[k], one.narrow, margin, level) for k, one in zip(places, cell, strict=True)]
        standings.append(unit_standing(stands))
    pooled = pool([(str(r), cells, evidence(list(differences[:, r].mean(axis=0)), level)) for r in range(rivals)], 1)
    units = holm([max(one.p_greater for one in cell) for cell in found])
    strict = [
        unit_verdict(
            units[i], behind[i * rivals : (i + 1) * rivals], [one.narrow for one in cell], margin, level, can_be_equivalent=True
        )
        for i, cell in enumerate(found)
    ]
    return part_verdict(standings, pooled, rivals, 1, margin, level), claim_verdict(strict)
