# What a trial ran on: source, versions, processor.
from __future__ import annotations

import hashlib
import platform
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent
TRAINING_SOURCES = ("functional", "lab/training", "lab/data", "lab/pattern.py", "lab/trial.py")


def source_digest() -> str:
    """The hash of every source file that a trial's result depends on."""
    digest = hashlib.sha256()
    for source in TRAINING_SOURCES:
        path = PACKAGE / source
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            digest.update(f"{file.relative_to(PACKAGE).as_posix()}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def provenance(data_digest: str, device: str = "cpu") -> dict[str, str | int]:
    import torch

    from affine_divergence.lab.devices import device_name

    return {
        "source_digest": source_digest(),
        "data_digest": data_digest,
        "device": device_name(device),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
