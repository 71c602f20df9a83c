# Small archives in the shape of CIFAR-10's, and their descriptions with the right checksums.
from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path

from lab.data import sources

from affine_divergence.lab.data import Archive

FOLDER = "cifar-10-batches-py"


def batch_files(root: Path, seed: int = 0) -> dict[str, bytes]:
    folder = sources.batches(root, sources.splits(seed), sources.python2)
    (folder / "batches.meta").write_bytes(sources.python2({b"label_names": [b"airplane"]}))
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def pack(files: dict[str, bytes], *others: tarfile.TarInfo) -> bytes:
    """A .tar.gz of files in CIFAR-10's folder, and of other members whose content is b"odd"."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(f"{FOLDER}/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        for member in others:
            member.size = 3 if member.isreg() else 0
            tar.addfile(member, io.BytesIO(b"odd"))
    return buffer.getvalue()


def described(content: bytes, files: dict[str, bytes], url: str = "http://127.0.0.1:9/archive.tar.gz") -> Archive:
    md5s = {name: hashlib.md5(file).hexdigest() for name, file in files.items()}
    return Archive("archive.tar.gz", url, len(content), hashlib.sha256(content).hexdigest(), FOLDER, md5s)
