# affdiv rule: how often the rule of the verdicts gives each of them in simulated studies.
from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from affine_divergence.lab.errors import BadInputError

if TYPE_CHECKING:
    from affine_divergence.lab.claims import Verdict

VERDICTS: tuple[Verdict, ...] = ("reproduced", "equivalent", "undecided", "contradicted")
LEADS = (-1.0, 0.0, 0.5, 1.0, 2.0)


def rule(
    *,
    cells: Annotated[int, Parameter(help="Cells of the claim.")] = 4,
    rivals: Annotated[int, Parameter(help="Other methods in each cell.")] = 5,
    seeds: Annotated[int, Parameter(help="Seeds in each cell.")] = 10,
    deviation: Annotated[float, Parameter(help="Standard deviation of one run over seeds, in points.")] = 0.6,
    spread: Annotated[float, Parameter(help="Standard deviation of the true lead over cells, in points.")] = 0.0,
    studies: Annotated[int, Parameter(help="Studies to simulate for each lead.")] = 200,
    seed: Annotated[int, Parameter(help="Seed of the simulation.")] = 0,
) -> None:
    """Simulate level and power of the verdicts: studies of a method that leads every rival by a known number of points.

    Prints how many percent of the studies get each verdict, by the rule of version 4 (tendency) and by the strict one.
    """
    for name, value, least in (("cells", cells, 1), ("rivals", rivals, 1), ("seeds", seeds, 2), ("studies", studies, 1), ("seed", seed, 0)):
        if value < least:
            raise BadInputError(f"--{name} must be at least {least}, got {value}")
    for option, size in (("deviation", deviation), ("spread", spread)):
        if not 0.0 <= size < float("inf"):
            raise BadInputError(f"--{option} must be a number of points, at least 0, got {size}")
    from affine_divergence.lab.claims import simulate

    print(f"{cells} cells, {rivals} rivals, {seeds} seeds, deviation {deviation:g}, spread {spread:g}; % of {studies} studies")
    print(f"{'true lead':>9}  {'rule':<9}" + "".join(f"{verdict:>14}" for verdict in VERDICTS))
    for lead in LEADS:
        found = simulate(
            lead, studies=studies, cells=cells, rivals=rivals, seeds=seeds, deviation=deviation, spread=spread, seed=seed
        )
        for name, counts in (("tendency", found.tendency), ("strict", found.strict)):
            print(f"{lead:>9g}  {name:<9}" + "".join(f"{100 * counts[verdict] / studies:>14.1f}" for verdict in VERDICTS))
