# A folder to download to, and what must be said and lie there afterwards.
from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from lab.data import archives

from affine_divergence.lab.data import Archive, download
from affine_divergence.lab.data._download import DownloadFailedError


def changed(content: bytes) -> bytes:
    """The same length, and one bit of the middle byte another."""
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


@dataclass
class Place:
    """A folder to download to, and what was said about it."""

    folder: Path
    archive: Archive
    files: dict[str, bytes]
    said: list[str] = field(default_factory=list)
    progress: list[tuple[int, int]] = field(default_factory=list)

    def download(self, **options: Any) -> Path:
        def progress(have: int, size: int) -> None:
            self.progress.append((have, size))

        return download("cifar10", self.archive, self.folder, say=self.said.append, progress=progress, **{"timeout": 20.0, **options})

    @property
    def part(self) -> Path:
        return self.folder / "archive.tar.gz.part"

    def fails(self, message: str, **options: Any) -> str:
        with pytest.raises(DownloadFailedError, match=message) as caught:
            self.download(**options)
        assert "\n" not in str(caught.value)
        assert not (self.folder / archives.FOLDER).exists()
        assert not (self.folder / "archive.tar.gz").exists()
        return str(caught.value)

    def is_whole(self) -> bool:
        names = {file.name for file in self.folder.iterdir() if not file.name.startswith(f"{archives.FOLDER}.bad")}
        whole = {file.name: file.read_bytes() for file in (self.folder / archives.FOLDER).iterdir()} == self.files
        return whole and names - {"archive.tar.gz.bad"} == {"archive.tar.gz", ".archive.tar.gz.lock", archives.FOLDER}
