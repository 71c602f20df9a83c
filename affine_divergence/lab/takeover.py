# Taking results over from a table of trials, so that a study goes on on another machine.
from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from affine_divergence.lab.errors import BadInputError
from affine_divergence.lab.grid import Grid
from affine_divergence.lab.stages import missing, scores
from affine_divergence.lab.store import Record, Store
from affine_divergence.lab.trial import Trial


def take_over(table: Path, grid: Grid, store: Store, digest: str, say: Callable[[str], None]) -> None:
    """Store the table's finished trials that the grid asks for and the store lacks; the queue was planned without them."""
    from affine_divergence.lab.frame import from_frame, read_parquet

    frame = read_parquet(table)
    _, records, claims = from_frame(frame)
    for name, wanted, what in (("study", grid.study, "the study"), ("data_digest", digest, "trials on images with the digest")):
        others = sorted(str(value) for value in frame.filter(frame["status"] != "failed")[name].unique() if value != wanted)
        if others:
            raise BadInputError(f"{table} holds {what} {', '.join(others)}, this is {wanted}; take the table of the same study and images")
    found = {record.trial: record for record in records if record.outcome.validation_accuracy is not None}
    stored = scores(store.records())
    asked = _asked(grid, stored, found)
    if not asked:
        raise BadInputError(f"{table} holds no finished trial that the grid asks for; run without --resume-from")
    if claims is not None and not stored:
        store.put({"claims": claims})  # those that were current when the study began
    taken = [trial for trial in asked if trial not in stored]
    if taken:
        store.add([found[trial] for trial in taken])
        store.begin([])
    say(f"{len(taken)} of the {len(records)} trials of {table} taken over")


def _asked(grid: Grid, stored: Mapping[Trial, float], found: Mapping[Trial, Record]) -> list[Trial]:
    # Stage by stage, as a run would have asked for them: later ones depend on the learning rates that the earlier ones choose.
    told, asked, absent = dict[Trial, float](), list[Trial](), set[Trial]()
    while stage := missing(grid, told, absent):
        for trial in stage:
            if trial in found:
                asked.append(trial)
            accuracy = stored[trial] if trial in stored else found[trial].outcome.validation_accuracy if trial in found else None
            if accuracy is None:
                absent.add(trial)
            else:
                told[trial] = accuracy
    return asked
