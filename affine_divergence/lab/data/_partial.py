# A partial download: the file so far, and beside it a note of the address and version that it is a part of.
from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class PartialFile:
    path: Path

    @property
    def note(self) -> Path:
        return self.path.with_name(f"{self.path.name}.json")

    def size(self) -> int:
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0

    def drop(self) -> None:
        # The note first: without one a part is only trusted as far as the final checksum goes.
        self.note.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)

    def begin(self, url: str, version: str | None) -> None:
        """An empty part, of the file that `url` has in this version (an ETag or a date)."""
        self.drop()
        if version is not None:
            self.note.write_text(json.dumps({"url": url, "version": version}))
        self.path.touch()

    def version(self, url: str) -> str | None:
        """The version that the part is of, if it came from this URL: another server's means nothing here."""
        try:
            note = json.loads(self.note.read_text())
            version = note["version"] if note["url"] == url else None
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return version if isinstance(version, str) and version.isprintable() else None

    def append(self, content: bytes) -> None:
        # Unbuffered, so that on a full disk the file ends where writing failed and its size is what is there.
        with self.path.open("ab", buffering=0) as file:
            view = memoryview(content)
            while view:
                view = view[file.write(view) :]
