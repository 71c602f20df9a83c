# CIFAR-10 from every form on disk: the same arrays, or one clear message.
from __future__ import annotations

import hashlib
import io
import os
import pickle
import struct
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import pytest
from lab.data import sources
from PIL import Image

from affine_divergence.lab.data import Dataset, load
from affine_divergence.lab.errors import BadInputError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("small")

PARTS = ("train_images", "train_labels", "test_images", "test_labels")


def pairs(images: np.ndarray, labels: np.ndarray) -> list[tuple[bytes, int]]:
    return sorted((image.tobytes(), int(label)) for image, label in zip(images, labels, strict=True))


def defined_digest(dataset: Dataset) -> str:
    arrays = [np.asarray(getattr(dataset, part)) for part in PARTS]
    return hashlib.sha256(b"".join(f"{a.dtype.str} {a.shape}\n".encode() + a.tobytes() for a in arrays)).hexdigest()[:16]


@pytest.mark.parametrize("form", sources.LOSSLESS)
def test_every_lossless_form_gives_the_images_that_were_stored(form: str, tmp_path: Path) -> None:
    data = sources.splits()
    dataset = load("cifar10", sources.LOSSLESS[form](tmp_path / "source", data), cache=tmp_path / "cache")
    assert (dataset.name, dataset.classes) == ("cifar10", 10)
    assert [getattr(dataset, part).dtype for part in PARTS] == [np.uint8, np.int64, np.uint8, np.int64]
    assert pairs(dataset.train_images, dataset.train_labels) == pairs(*data[0])
    assert pairs(dataset.test_images, dataset.test_labels) == pairs(*data[1])
    assert dataset.digest == defined_digest(dataset)


@pytest.mark.parametrize("form", sources.LOSSLESS)
def test_every_lossless_form_has_the_same_order_and_digest(form: str, tmp_path: Path) -> None:
    data = sources.splits()
    one = load("cifar10", sources.parquet(tmp_path / "one", data), cache=tmp_path / "cache")
    other = load("cifar10", sources.LOSSLESS[form](tmp_path / "other", data), cache=tmp_path / "cache")
    assert one.digest == other.digest
    for part in PARTS:
        np.testing.assert_array_equal(getattr(one, part), getattr(other, part))


def test_the_order_on_disk_does_not_matter_and_classes_are_mixed(tmp_path: Path) -> None:
    # The parquet files and the Python batches hold the same images in different orders, class folders have one class after another.
    (images, labels), test = sources.splits()
    data = (images, np.sort(labels)), test
    reverse = (images[::-1], np.sort(labels)[::-1]), test
    one = load("cifar10", sources.parquet(tmp_path / "one", data), cache=tmp_path / "cache")
    other = load("cifar10", sources.parquet(tmp_path / "other", reverse), cache=tmp_path / "cache")
    assert one.digest == other.digest
    assert len(set(one.train_labels[:20].tolist())) >= 5


def test_other_pixels_labels_or_split_have_another_digest(tmp_path: Path) -> None:
    (images, labels), test = sources.splits()
    pixel, label = images.copy(), labels.copy()
    pixel[0, 0, 0, 0] ^= 1
    label[0] = (label[0] + 1) % 10
    variants = [((images, labels), test), ((pixel, labels), test), ((images, label), test)]
    variants.append(((np.concatenate([test[0], images[20:]]), labels), (images[:20], test[1])))
    digests = [
        load("cifar10", sources.parquet(tmp_path / str(i), data), cache=tmp_path / "cache").digest for i, data in enumerate(variants)
    ]
    assert len(set(digests)) == 4


@pytest.mark.parametrize("form", [sources.parquet, sources.folders])
def test_jpeg_gives_what_pillow_decodes(form: Callable[..., Path], tmp_path: Path) -> None:
    data = sources.splits()
    dataset = load("cifar10-jpeg", form(tmp_path / "source", data, "JPEG"), cache=tmp_path / "cache")
    images, labels = data[0]
    lossy = [np.asarray(Image.open(io.BytesIO(sources.encode(image, "JPEG")))).transpose(2, 0, 1) for image in images]
    assert dataset.name == "cifar10-jpeg"
    assert pairs(dataset.train_images, dataset.train_labels) == pairs(np.stack(lossy), labels)


def test_brackets_and_stars_in_a_path_are_no_patterns(tmp_path: Path) -> None:
    root = sources.parquet(tmp_path / "a[0]*", sources.splits())
    assert len(load("cifar10", root, cache=tmp_path / "cache").train_images) == sources.TRAIN


def refused(name: str, path: Path | None, message: str, cache: Path) -> None:
    with pytest.raises(BadInputError, match=message) as caught:
        load(name, path, cache=cache)
    assert "\n" not in str(caught.value)
    assert path is None or str(path) in str(caught.value)


def test_the_name_must_say_whether_the_images_are_lossy(tmp_path: Path) -> None:
    data = sources.splits()
    lossy, exact = sources.parquet(tmp_path / "lossy", data, "JPEG"), sources.folders(tmp_path / "exact", data)
    raw = sources.batches(tmp_path / "raw", data, sources.python2)
    refused("cifar10", lossy, "lossy JPEG, which is called cifar10-jpeg, not cifar10; write --data cifar10-jpeg=", tmp_path / "cache")
    refused("cifar10-jpeg", exact, r"lossless \(PNG\), which is called cifar10, not .*; write --data cifar10=", tmp_path / "cache")
    refused("cifar10-jpeg", raw, r"lossless \(raw\), which is called cifar10, not cifar10-jpeg", tmp_path / "cache")


@pytest.mark.parametrize(("name", "first", "odd"), [("cifar10", "PNG", "JPEG"), ("cifar10-jpeg", "JPEG", "PNG")])
def test_one_image_of_the_other_encoding_is_refused(name: str, first: str, odd: str, tmp_path: Path) -> None:
    data = sources.splits()
    root = sources.folders(tmp_path / "source", data, first)
    file = sorted((root / "test" / "truck").iterdir())[-1]  # named .png or .jpg as before: the bytes count
    file.write_bytes(sources.encode(data[0][0][0], odd))
    refused(name, root, f"{file}: a {odd} image among {first} images", tmp_path / "cache")


@pytest.mark.parametrize("name", ["cifar10", "cifar10-jpeg"])
def test_without_a_path_the_way_to_give_one_and_the_forms_are_told(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    refused(name, None, rf"write --data {name}=PATH, .*parquet.*class folders.*cifar-10-batches-py", tmp_path)


def test_an_unknown_name_is_bad_input(tmp_path: Path) -> None:
    refused("cifar100", None, "unknown data set 'cifar100': wanted one of digits", tmp_path)


def test_a_path_without_a_source_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("")
    (tmp_path / "cifar.tar.gz").write_text("")
    refused("cifar10", tmp_path / "nowhere", "no such folder; wanted", tmp_path)
    refused("cifar10", tmp_path / "empty", "wanted Hugging Face .*; found an empty folder", tmp_path)
    refused("cifar10", tmp_path / "other", "found notes.txt", tmp_path)
    refused("cifar10", tmp_path / "cifar.tar.gz", "wanted the official cifar-10-python.tar.gz .*, found a file of 0 bytes", tmp_path)
    refused("cifar10", tmp_path / ("x" * 300), "cannot read .*: File name too long", tmp_path)


def test_two_sources_in_one_folder_are_not_chosen_between(tmp_path: Path) -> None:
    data = sources.splits()
    root = sources.parquet(tmp_path / "source", data)
    sources.batches(root / "cifar-10-batches-py", data, sources.python2)
    refused("cifar10", root, "wanted one source, found parquet files in .* and Python batches in ", tmp_path / "cache")


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("change", [-1, 1])
def test_any_other_count_is_truncated_or_wrong(split: str, change: int, tmp_path: Path) -> None:
    counts = {"train": sources.TRAIN, "test": sources.TEST}
    counts[split] += change
    rng = np.random.default_rng(1)
    data = tuple((rng.integers(0, 256, (n, 3, 32, 32), np.uint8), rng.integers(0, 10, n)) for n in counts.values())
    wanted = counts[split] - change
    message = f"wanted {wanted} {split} images, found {wanted + change} .*truncated or wrong"
    refused("cifar10", sources.parquet(tmp_path / "source", data), message, tmp_path / "cache")


# Parquet


def png_of_size(side: int) -> bytes:
    """A PNG whose header claims side × side pixels, and nothing behind it."""
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)), (b"IDAT", b""), (b"IEND", b"")]
    packed = [struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return sources.parquet(tmp_path / "source", sources.splits())


def rewrite(root: Path, images: dict[int, Any], labels: dict[int, Any]) -> Path:
    path = root / "test-00000-of-00001.parquet"
    old = pl.read_parquet(path)
    encoded, targets = old["img"].struct.field("bytes").to_list(), old["label"].to_list()
    for values, changes in ((encoded, images), (targets, labels)):
        for row, value in changes.items():
            values[row] = value
    sources.frame(encoded, targets).write_parquet(path)
    return path


@pytest.mark.parametrize("size", [0, 3, 1000, -1])
def test_a_truncated_parquet_file_is_named(size: int, table: Path, tmp_path: Path) -> None:
    file = table / "train-00000-of-00001.parquet"
    file.write_bytes(file.read_bytes()[:size])
    refused("cifar10", table, f"{file}: not a whole parquet file .*; download it again", tmp_path / "cache")


def test_a_missing_split_is_named(table: Path, tmp_path: Path) -> None:
    (table / "test-00000-of-00001.parquet").unlink()
    refused("cifar10", table, r"found no test-\*.parquet", tmp_path / "cache")


@pytest.mark.parametrize(
    ("columns", "found"),
    [
        ({"img": [b"x"], "label": [1]}, "img: Binary, label: Int64"),
        ({"img": [{"bytes": b"x", "path": "p"}], "label": ["cat"]}, "label: String"),
        ({"img": [{"bytes": b"x", "path": "p"}], "fine_label": [1]}, "fine_label: Int64"),
        ({"img": [{"path": "p"}], "label": [1]}, "img: Struct"),
        ({"img": [{"bytes": "text", "path": "p"}], "label": [1]}, "img: Struct"),
    ],
)
def test_other_columns_are_listed(columns: dict[str, Any], found: str, table: Path, tmp_path: Path) -> None:
    file = table / "train-00000-of-00001.parquet"
    pl.DataFrame(columns).write_parquet(file)
    wanted = r"wanted columns img \(or image\) with bytes, and label \(integer\)"
    refused("cifar10", table, rf"{file}: {wanted}, found .*{found}", tmp_path / "cache")


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (None, "the image is empty"),
        (b"", "wanted a PNG or JPEG image, found bytes that begin with nothing"),
        (b"GIF89a", "wanted a PNG or JPEG image, found bytes that begin with 47 49 46 38"),
        (sources.encode(np.zeros((3, 32, 32), np.uint8))[:60], "an image that cannot be decoded"),
        (png_of_size(60_000), "an image that cannot be decoded .*decompression bomb"),
        (sources.encode(np.zeros((3, 32, 32), np.uint8))[:20], "an image that cannot be decoded"),
        (sources.encode(np.zeros((3, 28, 32), np.uint8)), "wanted an image of 32×32 RGB, found 32×28 RGB"),
        (sources.encode(np.zeros((3, 32, 28), np.uint8)), "wanted an image of 32×32 RGB, found 28×32 RGB"),
        (sources.encode(np.zeros((4, 32, 32), np.uint8)), "wanted an image of 32×32 RGB, found 32×32 RGBA"),
    ],
)
def test_a_bad_image_is_named_by_file_and_row(image: bytes | None, message: str, table: Path, tmp_path: Path) -> None:
    file = rewrite(table, {7: image}, {})
    refused("cifar10", table, f"{file}, row 7: {message}", tmp_path / "cache")


@pytest.mark.parametrize(("label", "message"), [(10, "wanted a label from 0 to 9, found 10"), (-1, "found -1"), (None, "label is empty")])
def test_a_bad_label_is_named_by_file_and_row(label: int | None, message: str, table: Path, tmp_path: Path) -> None:
    file = rewrite(table, {}, {3: label})
    refused("cifar10", table, f"{file}, row 3: .*{message}", tmp_path / "cache")


# Class folders


def test_class_folders_must_be_the_ten_classes(tmp_path: Path) -> None:
    root = sources.folders(tmp_path / "source", sources.splits())
    (root / "train" / "cat").rename(root / "train" / "kitten")
    refused("cifar10", root, "train: wanted the ten folders airplane, .*; found no cat, also kitten", tmp_path / "cache")


def test_class_folders_need_both_splits(tmp_path: Path) -> None:
    root = sources.folders(tmp_path / "source", sources.splits())
    (root / "test").rename(root / "validation")
    refused("cifar10", root, "wanted the folders train and test, found no test", tmp_path / "cache")


def test_a_file_among_the_images_is_named_and_a_hidden_one_passed_over(tmp_path: Path) -> None:
    root = sources.folders(tmp_path / "source", sources.splits())
    (root / "train" / ".DS_Store").write_text("")
    (root / "train" / "cat" / ".DS_Store").write_text("")
    load("cifar10", root, cache=tmp_path / "cache")
    (root / "train" / "cat" / "notes.txt").write_text("")
    refused("cifar10", root, r"cat/notes.txt: wanted images only \(.png, .jpg, .jpeg\)", tmp_path / "cache")


def test_a_damaged_image_file_is_named(tmp_path: Path) -> None:
    root = sources.folders(tmp_path / "source", sources.splits(), "JPEG")
    file = next((root / "train" / "frog").iterdir())
    file.write_bytes(file.read_bytes()[:-200])
    refused("cifar10-jpeg", root, f"{file}: an image that cannot be decoded", tmp_path / "cache")


# Python batches


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return sources.batches(tmp_path / "source", sources.splits(), sources.python2)


class Call:
    # Pickled as a call of a function: what a malicious file does.
    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_that_calls_the_shell_is_refused_and_not_run(protocol: int, archive: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    attack = pickle.dumps({b"data": Call(os.system, f"touch {trace}"), b"labels": []}, protocol)
    pickle.loads(attack)
    assert trace.exists()  # it would have
    trace.unlink()
    (archive / "data_batch_3").write_bytes(attack)
    refused("cifar10", archive, r"data_batch_3: refused, its pickle asks for (posix|nt)\.system", tmp_path / "cache")
    assert not trace.exists()


@pytest.mark.parametrize(
    ("function", "arguments", "named"),
    [
        (eval, ("1",), "builtins.eval"),
        (getattr, (1, "real"), "builtins.getattr"),
        (np.load, ("x.npy",), "numpy.load"),
        (__import__("_codecs").encode, ("x", "rot13"), "_codecs.encode to 'rot13'"),
    ],
)
def test_a_pickle_gets_nothing_but_arrays(
    function: Callable[..., Any], arguments: tuple[Any, ...], named: str, archive: Path, tmp_path: Path
) -> None:
    (archive / "data_batch_1").write_bytes(pickle.dumps(Call(function, *arguments), 4))
    refused("cifar10", archive, f"data_batch_1: refused, its pickle asks for {named}", tmp_path / "cache")


DATA = np.zeros((4, 3072), np.uint8)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a whole pickle"),
        (b"not a pickle", "not a whole pickle"),
        (pickle.dumps({b"data": DATA, b"labels": [1] * 4}, 2)[:-100], "not a whole pickle"),
        (pickle.dumps([1, 2], 2), "wanted b'data', a uint8 array .*found none"),
        (pickle.dumps({b"data": DATA.astype(np.float32), b"labels": [1] * 4}, 2), r"found float32 \(4, 3072\)"),
        (pickle.dumps({b"data": DATA[:, :784], b"labels": [1] * 4}, 2), r"found uint8 \(4, 784\)"),
        (pickle.dumps({b"data": DATA, b"labels": [1] * 3}, 2), "wanted b'labels', 4 integers, found a list of 3"),
        (pickle.dumps({b"data": DATA, b"fine_labels": [1] * 4}, 2), "wanted b'labels', 4 integers, found none"),
        (pickle.dumps({b"data": DATA, b"labels": ["cat"] * 4}, 2), "wanted b'labels', 4 integers"),
        (pickle.dumps({b"data": DATA, b"labels": [10] * 4}, 2), "row 0: wanted a label from 0 to 9, found 10"),
    ],
)
def test_a_broken_batch_is_named(content: bytes, message: str, archive: Path, tmp_path: Path) -> None:
    (archive / "data_batch_1").write_bytes(content)
    refused("cifar10", archive, f"data_batch_1.*{message}", tmp_path / "cache")


def test_a_missing_batch_is_named(archive: Path, tmp_path: Path) -> None:
    (archive / "data_batch_4").unlink()
    refused("cifar10", archive, "found no data_batch_4; unpack the archive again", tmp_path / "cache")
