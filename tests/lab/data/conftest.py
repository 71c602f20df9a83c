# CIFAR-10 made small: the counts that a whole copy must have, shrunk to those of the synthesised sources, and a site to download it from.
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from lab.data import archives, sources
from lab.data.places import Place
from lab.data.site import Site, serve

from affine_divergence.lab.data import _cifar


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cifar, "EXPECTED", {"train": sources.TRAIN, "test": sources.TEST})


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return archives.batch_files(tmp_path_factory.mktemp("archive") / "batches")


@pytest.fixture(scope="session")
def content(files: dict[str, bytes]) -> bytes:
    return archives.pack({**files, "readme.html": b"<html>"})


@pytest.fixture
def site(content: bytes, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("no_proxy", "*")
    with serve(Site(content)) as site:
        yield site


@pytest.fixture
def place(tmp_path: Path, content: bytes, files: dict[str, bytes], site: Site) -> Place:
    return Place(tmp_path / "new" / "place", archives.described(content, files, site.url), files)
