# affdiv plan: what a grid file asks for, and what a store holds of it, before anything is trained.
from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from affine_divergence.lab.claims import claims_text, parse_claims
from affine_divergence.lab.errors import BadInputError
from affine_divergence.lab.forecast import forecast
from affine_divergence.lab.grid import Grid, read_grid
from affine_divergence.lab.rounds import unfinished
from affine_divergence.lab.stacks import Shape, Stack, shape_of, stacks
from affine_divergence.lab.stages import missing, scores, stages
from affine_divergence.lab.status import middling
from affine_divergence.lab.store import Store, read, study_of
from affine_divergence.lab.timings import Timings
from affine_divergence.lab.tuning import plan as plan_stage


def plan(
    grid: Path,
    /,
    *,
    store: Annotated[Path | None, Parameter(help="Store folder, to see what it already holds of the grid.")] = None,
) -> None:
    """Show how many cells and trials a grid file asks for, in how many stacks. Nothing is trained.

    Parameters
    ----------
    grid
        TOML file of the study.
    """
    checked, _ = read_grid(grid)
    parse_claims(claims_text()).named(checked.claims)
    lines = [f"study       {checked.study}, on {checked.data}", *_asked(checked)]
    if store is not None:
        with read(store) as results:
            lines += _held(checked, results, store)
    print("\n".join(lines))


def _asked(grid: Grid) -> list[str]:
    found = forecast(grid)
    first = plan_stage(grid, {}).missing
    return [
        f"cells       {found.cells}",
        *([] if grid.tuning is None else [f"tuning      {_range(found.tuning)}"]),
        f"evaluation  {_range(found.evaluation)}",
        f"total       {_range(found.total)}",
        f"first       {_count(len(first), 'trial')} in {_parts(stacks(first), {})}",
    ]


def _held(grid: Grid, store: Store, folder: Path) -> list[str]:
    held_grid, _ = study_of(store, folder)
    for name in ("study", "data"):
        held, asked = getattr(held_grid, name), getattr(grid, name)
        if held != asked:
            raise BadInputError(f"the store {folder} has the {name} {held}, not {asked}; name a store of this grid")
    records = store.records()
    accuracies = scores(records)
    wanted = {trial for stage in stages(grid, accuracies, middling(grid)) for trial in stage}
    ended = Counter(record.outcome.status for record in records if record.trial in wanted)
    ended_how = ", ".join(f"{ended[status]} {status}" for status in ("done", "diverged", "failed"))
    queue = unfinished(store, accuracies) if held_grid == grid else []  # a round that was begun is finished as it was planned
    sizes = Timings(store).sizes
    parts = [queued.trials for queued in queue] or stacks(missing(grid, accuracies), sizes)
    left = sum(map(len, parts))
    return [
        f"held        {ended_how}; {len(records) - ended.total()} that this grid does not ask for",
        f"next        {_count(left, 'trial')} in {_parts(parts, sizes)}" if left else "next        nothing: finished",
    ]


def _parts(parts: Sequence[Stack], sizes: Mapping[Shape, int]) -> str:
    count = _count(len(parts), "stack")
    if {shape_of(part[0]) for part in parts} - {None} <= sizes.keys():
        return count
    return f"at most {count}, fewer where training together is timed to be faster"


def _range(bounds: tuple[int, int]) -> str:
    least, most = bounds
    return _count(least, "trial") if least == most else f"at least {_count(least, 'trial')}, at most {most:,}"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"
