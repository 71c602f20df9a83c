# affdiv plan: what a grid file asks for, and what a store holds of it, before anything is trained.
from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from affine_divergence.cli._options import Cache, Data, Device, Workers, data_path, worker_count
from affine_divergence.cli._progress import duration, progress
from affine_divergence.lab.budget import Cost, Course, costs, endings, expected, left_out
from affine_divergence.lab.claims import claims_text, parse_claims
from affine_divergence.lab.errors import BadInputError
from affine_divergence.lab.executors import processes
from affine_divergence.lab.forecast import forecast
from affine_divergence.lab.grid import Grid, read_grid
from affine_divergence.lab.rounds import unfinished
from affine_divergence.lab.stacks import Shape, Stack, shape_of, stacks
from affine_divergence.lab.stages import middling, missing, scores, stages
from affine_divergence.lab.store import Store, read, study_of
from affine_divergence.lab.timings import Probe, Timings, timed
from affine_divergence.lab.trial import Cell, Trial
from affine_divergence.lab.tuning import plan as plan_stage
from affine_divergence.lab.worker import Setup


def plan(
    grid: Path,
    /,
    *,
    store: Annotated[Path | None, Parameter(help="Store folder, to see what it already holds of the grid.")] = None,
    probe: Annotated[bool, Parameter(negative=(), help="Time steps of each shape of net; show the CPU time of each block.")] = False,
    hours: Annotated[float | None, Parameter(help="Wall time: show what would not be finished in it. Times steps as --probe does.")] = None,
    data: Data = None,
    workers: Workers = None,
    cache: Cache = None,
    device: Device = "cpu",
) -> None:
    """Show how many cells and trials a grid file asks for, in how many stacks, and on request what they cost. No trial is trained.

    Parameters
    ----------
    grid
        TOML file of the study.
    """
    checked, _ = read_grid(grid)
    parse_claims(claims_text()).judged_by(checked.claims, checked.protocols)
    if hours is not None and not hours > 0.0:
        raise BadInputError(f"--hours must be above 0, got {hours:g}")
    lines = [f"study       {checked.study}, on {checked.data}", *_asked(checked)]
    known: dict[Trial, float] = {}
    path = data_path(checked, data)
    if store is not None:
        with read(store) as results:
            lines += _held(checked, results, store)
            known = scores(results.records())
            remembered = results.get("data_path")
            path = Path(remembered) if path is None and remembered is not None else path
    print("\n".join(lines), flush=True)
    if probe or hours is not None:
        timings = _timed(expected(checked, known), Setup(checked.data, path, cache, device))
        print("\n".join(_costs(expected(checked, known), timings, hours, worker_count(workers))))


def _timed(course: Course, setup: Setup) -> Probe:
    with processes(1, setup) as executor, progress() as show:
        trials = [trial for stage in course.stages for trial in stage]
        return Probe(dict(timed(trials, executor, lambda finished, total: show("timing", finished, total, None))))


def _costs(course: Course, timings: Probe, hours: float | None, workers: int) -> list[str]:
    blocks = costs(course, timings.seconds)
    lines = ["", "CPU time of what is left, by timed steps, where no range of rates is extended" + _stopping(course.grid)]
    lines.append(f"{'block':<7}{'cells':>6}{'tuning':>9}{'CPU':>9}{'evaluation':>12}{'CPU':>9}{'together':>10}")
    total = [sum(values) for values in zip(*(astuple(block) for block in blocks), strict=True)]
    for name, block in [*((str(number), block) for number, block in enumerate(blocks, 1)), ("all", Cost(*total))]:
        tuning, evaluation = duration(block.tuning_seconds), duration(block.evaluation_seconds)
        lines.append(
            f"{name:<7}{block.cells:>6}{block.tuning:>9,}{tuning:>9}{block.evaluation:>12,}{evaluation:>9}{duration(block.seconds):>10}"
        )
    if hours is not None:
        lines += ["", *_within(course, timings, 3600.0 * hours, workers)]
    return lines


def _stopping(grid: Grid) -> str:
    return "; the stop rule saves some of it" if grid.tuning is not None and grid.tuning.stop is not None else ""


def _within(course: Course, timings: Probe, seconds: float, workers: int) -> list[str]:
    ends = endings(course, timings.seconds, timings.sizes, workers)
    within = f"{duration(seconds)} with {_count(workers, 'worker')}, a core each"
    last = max(ends.values(), default=0.0)
    if last <= seconds:
        return [f"{within}: all is finished, after {duration(last)}"]
    tuned = max((end for trial, end in ends.items() if trial.role == "tuning"), default=0.0)
    if tuned > seconds:
        return [f"{within}: tuning is not finished, which takes {duration(tuned)}; nothing is tested. All of it takes {duration(last)}"]
    evaluation = [trial for trial in ends if trial.role == "evaluation"]
    done = sum(ends[trial] <= seconds for trial in evaluation)
    lines = [f"{within}: {done:,} of {_count(len(evaluation), 'evaluation trial')} are finished. All takes {duration(last)}. Left out:"]
    for (setting, seeds), methods in left_out(course, lambda trial: ends[trial] <= seconds).items():
        lines.append(f"  {_named(setting)}: {_seeds(seeds)} of {', '.join(methods)}")
    return lines


def _named(cell: Cell) -> str:
    budget = f"{cell.epochs} epochs" if cell.epochs else f"{cell.steps} steps"
    return f"{cell.architecture}, {cell.activation}, batch {cell.batch_size}, {budget}"


def _seeds(seeds: Sequence[int]) -> str:
    # 0, 1, 2, 5 as "seeds 0–2, 5".
    runs = [list(run) for _, run in itertools.groupby(enumerate(seeds), key=lambda pair: pair[1] - pair[0])]
    spans = [str(run[0][1]) if len(run) == 1 else f"{run[0][1]}–{run[-1][1]}" for run in runs]
    return f"seed{'' if len(seeds) == 1 else 's'} {', '.join(spans)}"


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
    timings = Timings(store)
    sizes = timings.sizes
    parts = [queued.trials for queued in queue] or stacks(missing(grid, accuracies), sizes, timings.seconds)
    left = sum(map(len, parts))
    return [
        f"held        {ended_how}; {len(records) - ended.total()} that this grid does not ask for",
        f"next        {_count(left, 'trial')} in {_parts(parts, sizes)}" if left else "next        nothing: finished",
    ]


def _parts(parts: Sequence[Stack], sizes: Mapping[Shape, int]) -> str:
    count = _count(len(parts), "stack")
    if {shape_of(part[0]) for part in parts if part[0].pattern} <= sizes.keys():
        return count
    return f"at most {count}, fewer where training together is timed to be faster"


def _range(bounds: tuple[int, int]) -> str:
    least, most = bounds
    return _count(least, "trial") if least == most else f"at least {_count(least, 'trial')}, at most {most:,}"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"
