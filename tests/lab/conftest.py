# What tests of the lab share: a study that was run to its end in processes of its own, with nothing in its way.
from __future__ import annotations

from pathlib import Path

import pytest
from makers import STUDY
from running import affdiv


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of STUDY; not to be written to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "grid.toml").write_text(STUDY)
    done = affdiv(folder, "run", "grid.toml", "--store", "store", "--workers", "2")
    assert done.returncode == 0, done.stderr
    return folder / "store"
