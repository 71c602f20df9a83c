# CIFAR-10 as Hugging Face parquet files: train-*.parquet and test-*.parquet, columns img (or image) and label.
from __future__ import annotations

from typing import TYPE_CHECKING

from affine_divergence.lab.errors import BadInputError, first_line

from ._source import Item, Source

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import polars

_IMAGE_COLUMNS = ("img", "image")


def find_parquet(path: Path) -> list[Source]:
    """The sources of this form in a folder or in its data/ or plain_text/."""
    sources = []
    for root in (path, path / "data", path / "plain_text"):
        train, test = (tuple(sorted(root.glob(f"{split}-*.parquet"))) for split in ("train", "test"))
        if train and test:
            sources.append(Source("parquet files", root, train, test, read_parquet))
        elif train or test:
            missing = "test" if train else "train"
            raise BadInputError(f"{root}: wanted train-*.parquet and test-*.parquet, found no {missing}-*.parquet; add the missing files")
    return sources


def read_parquet(path: Path) -> Iterator[Item]:
    frame, column = _frame(path)
    images, labels = frame[column].struct.field("bytes").to_list(), frame["label"].to_list()
    for row, (image, label) in enumerate(zip(images, labels, strict=True)):
        place = f"{path}, row {row}"
        if image is None or label is None:
            raise BadInputError(f"{place}: the {'image' if image is None else 'label'} is empty; download the file again")
        yield Item(place, image, label)


def _frame(path: Path) -> tuple[polars.DataFrame, str]:
    import polars as pl

    try:
        # From the open file: given a name, polars would take the [ and * in it for a pattern.
        with path.open("rb") as file:
            schema = pl.read_parquet_schema(file)
            column = next((name for name in _IMAGE_COLUMNS if _holds_bytes(schema.get(name))), None)
            label = schema.get("label")
            if column is None or label is None or not label.is_integer():
                found = ", ".join(f"{name}: {dtype}" for name, dtype in schema.items())
                raise BadInputError(f"{path}: wanted columns img (or image) with bytes, and label (integer), found {found or 'none'}")
            file.seek(0)
            return pl.read_parquet(file, columns=[column, "label"], use_pyarrow=False), column
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        raise BadInputError(f"{path}: not a whole parquet file ({first_line(error)}); download it again") from error


def _holds_bytes(dtype: polars.DataType | None) -> bool:
    import polars as pl

    return isinstance(dtype, pl.Struct) and any(field.name == "bytes" and field.dtype == pl.Binary for field in dtype.fields)
