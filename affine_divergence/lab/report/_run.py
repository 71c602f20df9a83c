# How a study was run: versions, digests, times, stacks.
from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from affine_divergence.lab.frame import PROVENANCE
from affine_divergence.lab.store import Record


def how_it_was_run(records: Sequence[Record]) -> dict[str, str]:
    """What the trials were run with; several values of one thing are all shown, with the number of their trials."""
    status = Counter(record.outcome.status for record in records)
    roles = Counter(record.trial.role for record in records)
    run = {
        "trials": f"{', '.join(f'{count} {name}' for name, count in status.items())}"
        + (f"; {roles['tuning']} for tuning, {roles['evaluation']} for evaluation" if len(roles) > 1 else ""),
        "training time": f"{sum(record.outcome.cpu_seconds or 0.0 for record in records) / 60:.1f} CPU minutes",
        "stacks": f"of {_range([record.outcome.stack_size for record in records if record.outcome.stack_size])} trials",
    }
    for name in PROVENANCE:
        values = Counter(str(record.provenance.get(name)) for record in records)
        label = name.replace("_", " ")
        run[label] = "; ".join(value if len(values) == 1 else f"{value} ({count} trials)" for value, count in values.most_common())
    return run


TIMING_HEADERS = ("architecture", "method", "batch", "CPU time of a step of one trial", "trained")


def timings(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """The shapes of convolutional nets that were timed before they were trained, under TIMING_HEADERS: how each was trained then."""
    sizes: dict[tuple[str, ...], list[int]] = {}
    for record in records:
        if "timing" in record.provenance:
            cell, timing = record.trial.cell, str(record.provenance["timing"])
            shape = (cell.architecture, cell.method, str(cell.batch_size), timing)
            sizes.setdefault(shape, []).append(record.outcome.stack_size or 1)
    return [(*shape, f"together, at most {max(found)}" if max(found) > 1 else "alone") for shape, found in sorted(sizes.items())]


def _range(values: Sequence[int]) -> str:
    if not values:
        return "no"
    return str(min(values)) if min(values) == max(values) else f"{min(values)} to {max(values)}"
