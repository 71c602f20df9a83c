# CIFAR-10 from its archive, by hand or as downloaded: the same images, checked before anything is opened.
from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
from lab.data import archives, sources

from affine_divergence.lab.data import ARCHIVES, download, downloads_folder, load, locate
from affine_divergence.lab.errors import BadInputError

pytestmark = pytest.mark.usefixtures("small")


@pytest.fixture(autouse=True)
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small archive that is the official one in these tests."""
    files = archives.batch_files(tmp_path / "made")
    path = tmp_path / "archive.tar.gz"
    path.write_bytes(archives.pack(files))
    monkeypatch.setitem(ARCHIVES, "cifar10", archives.described(path.read_bytes(), files))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    return path


def refused(path: Path, message: str, name: str = "cifar10") -> None:
    with pytest.raises(BadInputError, match=message) as caught:
        load(name, path, cache=path.parent / "cache")
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_archive_itself_can_be_the_path(archive: Path, tmp_path: Path) -> None:
    dataset = load("cifar10", archive, cache=tmp_path / "cache")
    assert dataset.digest == load("cifar10", tmp_path / "made", cache=tmp_path / "cache").digest
    assert len(dataset.train_images) == sources.TRAIN
    assert locate("cifar10", archive) == f"the official archive, {archive}"


def test_under_another_name_it_is_the_same_archive_and_not_decoded_again(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = load("cifar10", archive, cache=tmp_path / "cache")
    monkeypatch.setattr(tarfile, "open", None)
    assert load("cifar10", archive.rename(tmp_path / "cifar.tgz"), cache=tmp_path / "cache").digest == one.digest


def test_a_folder_with_nothing_but_the_archive_will_do(archive: Path, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    archive.rename(tmp_path / "folder" / archive.name)
    assert len(load("cifar10", tmp_path / "folder", cache=tmp_path / "cache").test_images) == sources.TEST


def test_the_archive_beside_its_folder_is_no_second_source(archive: Path, tmp_path: Path) -> None:
    (tmp_path / "made").rename(tmp_path / archives.FOLDER)
    assert locate("cifar10", tmp_path) == f"Python batches, {tmp_path / archives.FOLDER}"


def test_a_changed_archive_is_not_opened(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = bytearray(archive.read_bytes())
    content[1000] ^= 1
    archive.write_bytes(content)
    monkeypatch.setattr(tarfile, "open", None)
    refused(archive, "wanted the official archive.tar.gz of .* bytes with its SHA-256, found SHA-256 .* was wanted, and opened nothing")


def test_a_cut_archive_and_a_web_page_are_named(archive: Path) -> None:
    content = archive.read_bytes()
    archive.write_bytes(content[:-1])
    refused(archive, f"found a file of {len(content) - 1:,} bytes, and opened nothing; get it whole by affdiv data cifar10 --download")
    archive.write_bytes(b"\n<!doctype html>".ljust(len(content)))
    refused(archive, r"found a web page \(HTML\)")


def test_its_images_are_not_lossy(archive: Path) -> None:
    refused(archive, r"lossless \(raw\), which is called cifar10, not cifar10-jpeg", "cifar10-jpeg")


def test_without_a_path_the_download_is_found_or_told_how_to_make(archive: Path, tmp_path: Path) -> None:
    folder = downloads_folder("cifar10")
    assert folder == tmp_path / "xdg" / "affine-divergence" / "downloads" / "cifar10"
    with pytest.raises(BadInputError, match="affdiv data cifar10 --download brings it there, or write --data cifar10=PATH"):
        load("cifar10")
    folder.mkdir(parents=True)
    (folder / "archive.tar.gz.part").write_bytes(archive.read_bytes()[:-1])
    with pytest.raises(BadInputError, match="is not embedded and not in"):
        load("cifar10")
    archive.rename(folder / archive.name)
    assert locate("cifar10").startswith("the official archive, ")
    download("cifar10", ARCHIVES["cifar10"], folder, say=lambda text: None, progress=lambda have, size: None)
    assert locate("cifar10") == f"Python batches, {folder / archives.FOLDER}"
    assert len(load("cifar10", cache=tmp_path / "cache").train_images) == sources.TRAIN
