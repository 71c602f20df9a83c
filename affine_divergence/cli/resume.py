# affdiv resume: go on with the study that a store holds.
from __future__ import annotations

from pathlib import Path

from affine_divergence.cli._options import Cache, Data, Device, Workers
from affine_divergence.cli._training import train
from affine_divergence.lab.store import read, study_of


def resume(
    store: Path,
    /,
    *,
    data: Data = None,
    workers: Workers = None,
    cache: Cache = None,
    device: Device = "cpu",
) -> None:
    """Go on with a study where it stopped: the same stacks as if nothing had happened, hence the same results.

    Trials that failed are tried again.

    Parameters
    ----------
    store
        Store folder of affdiv run.
    """
    with read(store) as results:
        grid, text = study_of(results, store)
    train(grid, text, store, data=data, workers=workers, cache=cache, device=device)
