# Small sources of CIFAR-10 in every form on disk, written from given arrays.
from __future__ import annotations

import copyreg
import io
import pickle
import struct
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import polars as pl
from PIL import Image

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
TRAIN, TEST = 60, 20

Split = tuple[np.ndarray, np.ndarray]  # images (n, 3, 32, 32) uint8, labels (n,)


def splits(seed: int = 0) -> tuple[Split, Split]:
    rng = np.random.default_rng(seed)
    return tuple((rng.integers(0, 256, (n, 3, 32, 32), np.uint8), rng.integers(0, 10, n)) for n in (TRAIN, TEST))


def encode(image: np.ndarray, form: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0))).save(buffer, form)
    return buffer.getvalue()


def frame(images: list[bytes | None], labels: list[Any], column: str = "img") -> pl.DataFrame:
    rows = [{"bytes": image, "path": f"{i}.png"} for i, image in enumerate(images)]
    return pl.DataFrame({column: rows, "label": labels}, schema_overrides={column: pl.Struct({"bytes": pl.Binary, "path": pl.String})})


def parquet(root: Path, data: tuple[Split, Split], form: str = "PNG", column: str = "img", shards: int = 1) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for name, (images, labels) in zip(("train", "test"), data, strict=True):
        for shard, rows in enumerate(np.array_split(np.arange(len(labels)), shards)):
            table = frame([encode(images[i], form) for i in rows], [int(labels[i]) for i in rows], column)
            table.write_parquet(root / f"{name}-{shard:05}-of-{shards:05}.parquet")
    return root


def folders(root: Path, data: tuple[Split, Split], form: str = "PNG") -> Path:
    for name, (images, labels) in zip(("train", "test"), data, strict=True):
        for label in CLASSES:
            (root / name / label).mkdir(parents=True)
        for i, (image, label) in enumerate(zip(images, labels, strict=True)):
            (root / name / CLASSES[label] / f"{i:04}.{'png' if form == 'PNG' else 'jpg'}").write_bytes(encode(image, form))
    return root


def batches(root: Path, data: tuple[Split, Split], dump: Callable[[Any], bytes]) -> Path:
    root.mkdir(parents=True)
    (images, labels), test = data
    parts = zip(np.array_split(images, 5), np.array_split(labels, 5), strict=True)
    for name, (x, y) in [*((f"data_batch_{i}", part) for i, part in enumerate(parts, 1)), ("test_batch", test)]:
        batch = {b"batch_label": b"a batch", b"labels": y.tolist(), b"data": x.reshape(len(x), 3072), b"filenames": [b"a.png"] * len(x)}
        (root / name).write_bytes(dump(batch))
    return root


class _Python2Pickler(pickle._Pickler):
    # Python 2 wrote every string as bytes, as the archive of CIFAR-10 has them.
    dispatch: ClassVar[dict[type, Any]] = dict(pickle._Pickler.dispatch)

    def save_bytes(self, value: bytes) -> None:
        n = len(value)
        self.write((b"U" + bytes([n]) if n < 256 else b"T" + struct.pack("<i", n)) + value)
        self.memoize(value)

    def save_text(self, value: str) -> None:
        self.save_bytes(value.encode())

    dispatch[bytes], dispatch[str] = save_bytes, save_text


def python2(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Python2Pickler(buffer, 2).dump(value)
    return buffer.getvalue().replace(b"numpy._core.", b"numpy.core.").replace(copyreg.__name__.encode(), b"copy_reg")


DUMPS: dict[str, Callable[[Any], bytes]] = {
    "python 2": python2,
    "protocol 2, numpy 1": lambda value: pickle.dumps(value, 2).replace(b"numpy._core.", b"numpy.core."),
    "protocol 2": lambda value: pickle.dumps(value, 2),
    "protocol 4": lambda value: pickle.dumps(value, 4),
    "protocol 5": lambda value: pickle.dumps(value, 5),
}

# The same images in every form without loss.
LOSSLESS: dict[str, Callable[[Path, tuple[Split, Split]], Path]] = {
    "parquet": parquet,
    "parquet in data/": lambda root, data: parquet(root / "data", data).parent,
    "parquet in plain_text/": lambda root, data: parquet(root / "plain_text", data, column="image").parent,
    "parquet in 3 shards": lambda root, data: parquet(root, data, shards=3),
    "class folders": folders,
    **{f"batches, {name}": lambda root, data, dump=dump: batches(root, data, dump) for name, dump in DUMPS.items()},
    "batches, their parent": lambda root, data: batches(root / "cifar-10-batches-py", data, python2).parent,
}
