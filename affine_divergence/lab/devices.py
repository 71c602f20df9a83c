# The device that stacks are trained on: whether it is there, and its name.
from __future__ import annotations

from affine_divergence.lab.errors import BadInputError, first_line


def check_device(device: str) -> None:
    """Raise BadInputError for a device that this machine does not have; torch is imported for others than the CPU only."""
    if device == "cpu":
        return
    import torch

    try:
        wanted = torch.device(device)
    except RuntimeError as error:
        raise BadInputError(f"--device {device} is no device: {first_line(error)}; write {_choices()}") from error
    there = {"cpu": wanted.index is None, "cuda": (wanted.index or 0) < torch.cuda.device_count(), "mps": torch.backends.mps.is_available()}
    if not there.get(wanted.type, False):
        raise BadInputError(f"--device {device} is not there; write {_choices()}")


def device_name(device: str) -> str:
    """What a record calls the device: the name of the graphics processor, or its kind."""
    import torch

    kind = torch.device(device).type
    return torch.cuda.get_device_name(device) if kind == "cuda" else kind


def _choices() -> str:
    import torch

    found = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count())), *(["mps"] if torch.backends.mps.is_available() else [])]
    return " or ".join(found)
