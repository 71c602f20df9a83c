# affdiv status: how far a study is, also while it runs.
from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from affine_divergence.lab.status import status_of


def status(
    store: Path,
    /,
    *,
    json_: Annotated[bool, Parameter(name="--json", negative=(), help="One JSON object on one line, for programs.")] = False,
) -> None:
    """Show how many trials of a study are done, diverged, failed, and running now.

    Parameters
    ----------
    store
        Store folder of affdiv run.
    """
    found = asdict(status_of(store))
    if json_:
        print(json.dumps(found))
        return
    found["total"] = f"{found['total']}" if found.pop("total_known") else f"{found['total']} or more: tuning decides"
    for name, value in found.items():
        if value is not None:
            print(f"{name:<10}{value}")
