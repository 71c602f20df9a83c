# affdiv export: the trials of a store as a table, also before there is anything to report.
from __future__ import annotations

from pathlib import Path

from affine_divergence.cli.report import load
from affine_divergence.lab.errors import BadInputError
from affine_divergence.lab.frame import to_frame
from affine_divergence.lab.grid import grid_of


def export(source: Path, table: Path, /) -> None:
    """Write the finished trials of a study to a Parquet file, for `affdiv run --resume-from` on another machine.

    Parameters
    ----------
    source
        Store folder of affdiv run; a running study may be exported.
    table
        Parquet file to write.
    """
    text, records, claims = load(source)
    if not records:
        raise BadInputError(f"{source} holds no finished trial; wait until the study has some")
    study = grid_of(text, f"the grid in {source}", (record.trial for record in records)).study
    try:
        table.parent.mkdir(parents=True, exist_ok=True)
        to_frame(records, study, text, claims).write_parquet(table)
    except OSError as error:
        raise BadInputError(f"cannot write {table}: {error.strerror or error}; name another file") from error
    print(f"{table}: {len(records)} trials of {study}")
