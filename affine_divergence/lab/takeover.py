# Taking results over from a table of trials, so that a study goes on on another machine.
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from affine_divergence.lab.errors import BadInputError
from affine_divergence.lab.grid import Grid
from affine_divergence.lab.stages import missing, scores
from affine_divergence.lab.store import Record, Store
from affine_divergence.lab.trial import Trial


@dataclass(frozen=True)
class Takeover:
    """Finished trials that the grid asks for and the store lacks, with the claims that they were run for if the store holds none."""

    records: Sequence[Record]
    claims: str | None
    said: str

    def apply(self, store: Store, say: Callable[[str], None]) -> None:
        """Store them; the queue was planned without them."""
        if self.claims is not None:
            store.put({"claims": self.claims})
        if self.records:
            store.add(self.records)
            store.begin([])
        say(self.said)


def take_over(table: Path, grid: Grid, store: Store, digest: str) -> Takeover:
    """What is to be taken over from a table of trials, checked; the store is left as it is."""
    from affine_divergence.lab.claims import parse_claims
    from affine_divergence.lab.frame import from_frame, read_parquet

    frame = read_parquet(table)
    _, records, claims = from_frame(frame)
    if claims is not None:
        parse_claims(claims, f"the claims in {table}").judged_by(grid.claims, grid.protocols)
    for name, wanted, what in (("study", grid.study, "the study"), ("data_digest", digest, "trials on images with the digest")):
        others = sorted(str(value) for value in frame.filter(frame["status"] != "failed")[name].unique() if value != wanted)
        if others:
            raise BadInputError(f"{table} holds {what} {', '.join(others)}, this is {wanted}; take the table of the same study and images")
    found = {record.trial: record for record in records if record.outcome.status != "failed"}
    stored = scores(store.records())
    asked = _asked(grid, stored, found)
    if not asked:
        raise BadInputError(f"{table} holds no finished trial that the grid asks for; run without --resume-from")
    taken = [found[trial] for trial in asked if trial not in stored]
    said = f"{len(taken)} of the {len(records)} trials of {table} taken over"
    return Takeover(taken, None if stored else claims, said)  # the claims are those that were current when the study began


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
