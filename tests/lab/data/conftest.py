# CIFAR-10 made small: the counts that a whole copy must have, shrunk to those of the synthesised sources.
from __future__ import annotations

import pytest
from lab.data import sources

from affine_divergence.lab.data import _cifar


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cifar, "EXPECTED", {"train": sources.TRAIN, "test": sources.TEST})
