# Fashion-MNIST from IDX files: the images that were stored, or one clear message.
from __future__ import annotations

import gzip
import hashlib
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from affine_divergence.lab.data import _fashion, load, locate, split_rows
from affine_divergence.lab.errors import BadInputError

PARTS = ("train_images", "train_labels", "test_images", "test_labels")
TRAIN, TEST = 60, 20
Images = dict[str, np.ndarray]


def idx(array: np.ndarray, kind: int = 8) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, kind, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


@pytest.fixture
def images() -> Images:
    rng = np.random.default_rng(0)
    made: Images = {}
    for split, n in (("train", TRAIN), ("t10k", TEST)):
        made[f"{split}-images-idx3-ubyte"] = rng.integers(0, 256, (n, 28, 28), np.uint8)
        made[f"{split}-labels-idx1-ubyte"] = rng.integers(0, 10, n)
    return made


def write(root: Path, images: Images, suffix: str = ".gz") -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for name, array in images.items():
        (root / f"{name}{suffix}").write_bytes(gzip.compress(idx(array), 1) if suffix == ".gz" else idx(array))
    return root


def in_order(images: Images, split: str) -> tuple[np.ndarray, np.ndarray]:
    x, y = images[f"{split}-images-idx3-ubyte"], images[f"{split}-labels-idx1-ubyte"]
    order = sorted(range(len(y)), key=lambda i: (hashlib.sha256(x[i].tobytes()).digest()[:8], y[i]))
    return x[order].reshape(-1, 1, 28, 28), y[order].astype(np.int64)


@pytest.fixture(autouse=True)
def digest(images: Images, monkeypatch: pytest.MonkeyPatch) -> str:
    """Fashion-MNIST made small: its counts and its digest are those of the images made here."""
    arrays = [array for split in ("train", "t10k") for array in in_order(images, split)]
    value = hashlib.sha256(b"".join(f"{a.dtype.str} {a.shape}\n".encode() + a.tobytes() for a in arrays)).hexdigest()[:16]
    monkeypatch.setattr(_fashion, "EXPECTED", {"train": TRAIN, "test": TEST})
    monkeypatch.setattr(_fashion, "DIGEST", value)
    return value


FORMS: dict[str, Callable[[Path, Images], object]] = {
    "as Debian installs them": lambda root, images: write(root, images),
    "unpacked": lambda root, images: write(root, images, ""),
    "both side by side, as torchvision leaves them": lambda root, images: (write(root, images), write(root, images, "")),
    "one level down": lambda root, images: write(root / "fashion-mnist", images),
    "two levels down": lambda root, images: write(root / "FashionMNIST" / "raw", images),
    "with a dot for the dash": lambda root, images: write(root, {n.replace("-idx", ".idx"): a for n, a in images.items()}, ""),
    "stored in another order": lambda root, images: write(root, {name: array[::-1] for name, array in images.items()}),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_images_that_were_stored_in_the_order_of_their_hashes(
    form: str, images: Images, digest: str, tmp_path: Path
) -> None:
    FORMS[form](tmp_path / "source", images)
    dataset = load("fashion-mnist", tmp_path / "source", cache=tmp_path / "cache")
    assert (dataset.name, dataset.classes, dataset.digest) == ("fashion-mnist", 10, digest)
    for part, array in zip(PARTS, [*in_order(images, "train"), *in_order(images, "t10k")], strict=True):
        assert getattr(dataset, part).dtype == array.dtype
        np.testing.assert_array_equal(getattr(dataset, part), array)
    train, validation = split_rows("fashion-mnist", TRAIN)
    assert (len(train), len(validation)) == (54, 6)


def test_a_second_load_decodes_nothing(images: Images, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = load("fashion-mnist", write(tmp_path / "source", images), cache=tmp_path / "cache")
    monkeypatch.setattr(_fashion, "read_idx", None)
    two = load("fashion-mnist", tmp_path / "source", cache=tmp_path / "cache")
    assert one.digest == two.digest
    assert isinstance(two.train_images, np.memmap)


def refused(path: Path | None, message: str, cache: Path) -> None:
    with pytest.raises(BadInputError, match=message) as caught:
        load("fashion-mnist", path, cache=cache)
    assert "\n" not in str(caught.value)
    assert path is None or str(path) in str(caught.value)


def test_without_a_path_debians_folder_is_used_or_its_package_named(
    images: Images, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_fashion, "DEBIAN", tmp_path / "debian")
    refused(None, "install Debian's package dataset-fashion-mnist, or write --data fashion-mnist=PATH", tmp_path / "cache")
    write(tmp_path / "debian", images)
    assert locate("fashion-mnist") == f"IDX files, {tmp_path / 'debian'}"
    assert len(load("fashion-mnist", cache=tmp_path / "cache").train_images) == TRAIN


def test_a_path_without_one_whole_source_is_named(images: Images, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    refused(tmp_path / "nowhere", "no such folder", cache)
    (tmp_path / "file").write_text("")
    refused(tmp_path / "file", "a file; wanted the folder that holds train-images-idx3-ubyte", cache)
    refused(tmp_path, "found no train-images-idx3-ubyte", cache)
    write(tmp_path / "a", images)
    (tmp_path / "a" / "t10k-labels-idx1-ubyte.gz").unlink()
    refused(tmp_path / "a", "wanted t10k-labels-idx1-ubyte or t10k-labels-idx1-ubyte.gz, found neither", cache)
    write(tmp_path / "b", images)
    refused(tmp_path, f"found several in {tmp_path}/a and {tmp_path}/b; give the folder of one", cache)


def test_other_images_in_files_of_the_same_names_are_refused(images: Images, tmp_path: Path) -> None:
    images["train-images-idx3-ubyte"][0, 0, 0] ^= 1
    refused(write(tmp_path / "source", images), "MNIST and KMNIST have files of the same names", tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
WHOLE = idx(np.zeros((TRAIN, 28, 28)))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (IMAGES, b"", "wanted an IDX file, which begins with 00 00, found an empty file"),
        (IMAGES, b"<html>", "wanted an IDX file, which begins with 00 00, found 3c 68 74 6d"),
        (IMAGES, idx(np.zeros((TRAIN, 28, 28)), kind=0x0D), "wanted an IDX file of uint8, found float32"),
        (IMAGES, idx(np.zeros((TRAIN, 28, 28)), kind=7), "wanted an IDX file of uint8, found the type 07"),
        (IMAGES, idx(np.zeros(TRAIN)), "wanted 3 dimensions, found 1; are images and labels exchanged"),
        (LABELS, WHOLE, "wanted 1 dimensions, found 3"),
        (IMAGES, WHOLE[:10], "it ends within its header"),
        (IMAGES, idx(np.zeros((TEST, 28, 28))), "wanted 60 × 28 × 28, its header says 20 × 28 × 28"),
        (IMAGES, idx(np.zeros((TRAIN, 32, 32))), "wanted 60 × 28 × 28, its header says 60 × 32 × 32"),
        (IMAGES, struct.pack(">BBBB3I", 0, 0, 8, 3, *[2**32 - 1] * 3), "its header says 4294967295 × 4294967295"),
        (IMAGES, WHOLE[:-1], "truncated, wanted 47,040 bytes after the header, found 47,039"),
        (IMAGES, WHOLE + b"\0", "more than the 47,040 bytes that its header announces"),
        (LABELS, idx(np.zeros(TRAIN - 1)), "wanted 60, its header says 59"),
        (LABELS, idx(np.array([0, 1, 10] + [0] * (TRAIN - 3))), "row 2: wanted a label from 0 to 9, found 10"),
    ],
)
def test_a_bad_file_is_named(name: str, content: bytes, message: str, packed: bool, images: Images, tmp_path: Path) -> None:
    file = write(tmp_path / "source", images) / f"{name}.gz"
    file.write_bytes(gzip.compress(content, 1) if packed else content)
    refused(tmp_path / "source", f"{file}.*{message}", tmp_path / "cache")


@pytest.mark.parametrize(
    "damage", [lambda content: content[:-1], lambda content: content[:200], lambda content: content[:300] + b"\0" * 9 + content[309:]]
)
def test_a_damaged_gzip_file_is_named(damage: Callable[[bytes], bytes], images: Images, tmp_path: Path) -> None:
    file = write(tmp_path / "source", images) / f"{IMAGES}.gz"
    file.write_bytes(damage(file.read_bytes()))
    refused(tmp_path / "source", f"{file}: not a whole gzip file .*; use a whole copy", tmp_path / "cache")
