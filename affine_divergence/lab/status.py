# How far a study is: its trials counted, from its store alone.
from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from affine_divergence.lab import lock
from affine_divergence.lab.stages import middling, scores, stages
from affine_divergence.lab.store import read, study_of


@dataclass(frozen=True)
class Status:
    """Trials of the grid by how they ended; running are those in stacks in flight. The total grows where tuning asks for more."""

    study: str
    data: str
    total: int
    total_known: bool
    done: int
    diverged: int
    failed: int
    running: int
    writer: str | None


def status_of(folder: Path) -> Status:
    """The status of the study in a store, whether a run is writing to it or not."""
    with read(folder) as store:
        grid, _ = study_of(store, folder)
        records, queue = store.records(), store.queue()
    accuracies = scores(records)
    wanted = {trial for stage in stages(grid, accuracies, middling(grid)) for trial in stage}
    ended = Counter(record.outcome.status for record in records if record.trial in wanted)
    writer = lock.holder(folder)
    return Status(
        study=grid.study,
        data=grid.data,
        total=len(wanted),
        total_known=all(trial in accuracies for trial in wanted if trial.role == "tuning"),
        done=ended["done"],
        diverged=ended["diverged"],
        failed=ended["failed"],
        running=0 if writer is None else sum(len(queued.trials) for queued in queue if queued.running),
        writer=writer,
    )
