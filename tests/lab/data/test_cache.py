# The cache of decoded data sets: used, rebuilt where damaged, shared between processes.
from __future__ import annotations

import logging
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from lab.data import sources

from affine_divergence.lab.data import _cache, _cifar, load

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("small")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return sources.parquet(tmp_path / "source", sources.splits())


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry for every decoding."""
    calls: list[str] = []
    decode = _cifar.decode_source

    def counting(name: str, *arguments: Any) -> Any:
        calls.append(name)
        return decode(name, *arguments)

    monkeypatch.setattr(_cifar, "decode_source", counting)
    return calls


def only_folder(cache: Path) -> Path:
    (folder,) = cache.iterdir()  # and nothing else: no half-written folder stays behind
    return folder


def test_a_second_load_decodes_nothing_and_maps_the_same_arrays(source: Path, tmp_path: Path, decoded: list[str]) -> None:
    one, two = (load("cifar10", source, cache=tmp_path / "cache") for _ in range(2))
    assert decoded == ["cifar10"]
    assert one.digest == two.digest
    for dataset in (one, two):
        assert isinstance(dataset.train_images, np.memmap)
        assert not dataset.train_images.flags.writeable
    np.testing.assert_array_equal(one.test_images, two.test_images)
    assert sorted(file.name for file in only_folder(tmp_path / "cache").iterdir()) == [
        "meta.json",
        "test_images.npy",
        "test_labels.npy",
        "train_images.npy",
        "train_labels.npy",
    ]


@pytest.mark.parametrize("changed", [0, 1])
def test_other_bytes_in_one_split_are_decoded(changed: int, source: Path, tmp_path: Path, decoded: list[str]) -> None:
    one = load("cifar10", source, cache=tmp_path / "cache")
    data = list(sources.splits())
    data[changed] = sources.splits(seed=1)[changed]
    sources.parquet(source, (data[0], data[1]))
    two = load("cifar10", source, cache=tmp_path / "cache")
    assert len(decoded) == 2
    assert one.digest != two.digest


def test_an_image_moved_to_another_class_is_decoded_anew(tmp_path: Path, decoded: list[str]) -> None:
    # The bytes of all files are as before: their names are part of the key.
    root = sources.folders(tmp_path / "source", sources.splits())
    one = load("cifar10", root, cache=tmp_path / "cache")
    file = sorted((root / "train" / "airplane").iterdir())[-1]
    file.rename(root / "train" / "automobile" / "!first.png")
    two = load("cifar10", root, cache=tmp_path / "cache")
    assert len(decoded) == 2
    assert np.bincount(two.train_labels)[1] == np.bincount(one.train_labels)[1] + 1


def test_the_same_files_elsewhere_are_not_decoded_again(source: Path, tmp_path: Path, decoded: list[str]) -> None:
    load("cifar10", source, cache=tmp_path / "cache")
    load("cifar10", Path(shutil.copytree(source, tmp_path / "copy")), cache=tmp_path / "cache")
    assert len(decoded) == 1


@pytest.mark.parametrize(("xdg", "expected"), [("{}/xdg", "{}/xdg"), ("", "{}/home/.cache"), ("relative", "{}/home/.cache")])
def test_the_default_cache_follows_xdg(xdg: str, expected: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", xdg.format(tmp_path))
    load("cifar10", source)
    assert only_folder(Path(expected.format(tmp_path)) / "affine-divergence").is_dir()


def _shorten(folder: Path) -> None:
    file = folder / "train_images.npy"
    file.write_bytes(file.read_bytes()[:-1])


def _flip(folder: Path) -> None:
    file = folder / "train_images.npy"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def _empty(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a missing array": lambda folder: (folder / "test_labels.npy").unlink(),
    "a missing meta.json": lambda folder: (folder / "meta.json").unlink(),
    "a short array": _shorten,
    "an empty array": lambda folder: (folder / "train_images.npy").write_bytes(b""),
    "another shape": lambda folder: np.save(folder / "train_images.npy", np.zeros((3, 3, 32, 32), np.uint8)),
    "objects": lambda folder: np.save(folder / "train_labels.npy", np.array([{}]), allow_pickle=True),
    "a flipped bit": _flip,
    "a broken meta.json": lambda folder: (folder / "meta.json").write_text("{"),
    "a meta.json without digest": lambda folder: (folder / "meta.json").write_text('{"name": "cifar10"}'),
    "a meta.json with a list": lambda folder: (folder / "meta.json").write_text("[]"),
    "an empty folder": _empty,
    "a file in its place": lambda folder: (shutil.rmtree(folder), folder.write_text("")),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_cache_is_rebuilt_with_one_warning(
    damage: str, source: Path, tmp_path: Path, decoded: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    cache = tmp_path / "cache"
    good = load("cifar10", source, cache=cache)
    pixels = np.array(good.train_images)
    DAMAGES[damage](only_folder(cache))
    with caplog.at_level(logging.WARNING):
        rebuilt = load("cifar10", source, cache=cache)
    assert len(decoded) == 2
    np.testing.assert_array_equal(rebuilt.train_images, pixels)
    (record,) = caplog.records
    assert str(only_folder(cache)) in record.getMessage()
    assert "is damaged" in record.getMessage()
    assert "\n" not in record.getMessage()
    load("cifar10", source, cache=cache)
    assert len(decoded) == 2


def test_a_cache_that_cannot_be_written_is_done_without(
    source: Path, tmp_path: Path, decoded: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        dataset = load("cifar10", source, cache=tmp_path / "file")
    assert [f"cannot keep decoded cifar10 in {tmp_path / 'file'}" in record.getMessage() for record in caplog.records] == [True]
    assert dataset.digest == load("cifar10", source, cache=tmp_path / "cache").digest
    assert not dataset.train_images.flags.writeable


def test_a_full_disk_leaves_nothing_behind(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = np.save

    def full(path: Path, array: np.ndarray) -> None:
        if path.name == "test_images.npy":
            raise OSError(28, "No space left on device")
        save(path, array)

    monkeypatch.setattr(_cache.np, "save", full)
    dataset = load("cifar10", source, cache=tmp_path / "cache")
    assert dataset.train_images.shape == (sources.TRAIN, 3, 32, 32)
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("damaged", [False, True])
def test_the_loser_of_a_race_uses_the_winners_arrays(damaged: bool, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    if damaged:
        load("cifar10", source, cache=cache)
        _shorten(only_folder(cache))
    decode = _cifar.decode_source

    def overtaken(*arguments: Any) -> Any:
        arrays = decode(*arguments)
        monkeypatch.setattr(_cifar, "decode_source", decode)
        load("cifar10", source, cache=cache)  # the winner, from start to end, while this one decodes
        winner.append((only_folder(cache) / "train_images.npy").stat().st_ino)
        return arrays

    winner: list[int] = []
    monkeypatch.setattr(_cifar, "decode_source", overtaken)
    dataset = load("cifar10", source, cache=cache)
    assert winner == [(only_folder(cache) / "train_images.npy").stat().st_ino]
    assert isinstance(dataset.train_images, np.memmap)


RACER = f"""
import sys, time
from pathlib import Path
from affine_divergence.lab.data import _cifar, load
_cifar.EXPECTED = {{"train": {sources.TRAIN}, "test": {sources.TEST}}}
decode = _cifar.decode_source
def meet(*arguments):
    arrays = decode(*arguments)
    Path(sys.argv[3]).touch()
    while not Path(sys.argv[4]).exists():
        time.sleep(0.001)
    return arrays
_cifar.decode_source = meet
print(load("cifar10", Path(sys.argv[1]), cache=Path(sys.argv[2])).digest)
"""


def test_two_processes_at_once_end_with_one_cache(source: Path, tmp_path: Path) -> None:
    cache, here, there = tmp_path / "cache", str(tmp_path / "here"), str(tmp_path / "there")
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, str(source), str(cache), *meeting], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for meeting in ((here, there), (there, here))
    ]
    outputs = [racer.communicate(timeout=60) for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0], outputs
    assert [errors for _, errors in outputs] == ["", ""]
    folder = only_folder(cache)
    dataset = _cache.read(folder)
    assert dataset is not None
    assert [digest.strip() for digest, _ in outputs] == [dataset.digest] * 2
