# Where a Monitor's aggregates go: any function of (values, step) is a tracker, these make one of what people log to.
from __future__ import annotations

from collections.abc import Callable, Mapping
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

Tracker = Callable[[Mapping[str, float], int], object]


class Run(Protocol):
    """What can log a dict at a step, as a run of Weights & Biases and those modelled on it."""

    def log(self, data: dict[str, Any], *, step: int) -> object: ...


def logged_to(run: Run) -> Tracker:
    """A tracker that calls run.log(values, step=step).

    Weights & Biases drops what is logged for a step that is behind its own: let it count the steps of the optimizer too. MLflow needs
    no adapter, mlflow.log_metrics is a tracker.

    >>> class Printer:
    ...     def log(self, data, *, step):
    ...         print(step, data)
    >>> logged_to(Printer())({"alignment": 0.5}, 100)
    100 {'alignment': 0.5}
    """

    def track(values: Mapping[str, float], step: int) -> None:
        run.log(dict(values), step=step)

    return track


class TensorBoard:
    """A tracker that writes scalars to TensorBoard, by a SummaryWriter or into a folder of its own.

    Args:
        writer: a torch.utils.tensorboard.SummaryWriter, or the folder to write event files to.

    Raises:
        ImportError: a folder is given and tensorboard is not installed.
    """

    def __init__(self, writer: SummaryWriter | str | PathLike[str]) -> None:
        self.writer = _opened(fspath(writer)) if isinstance(writer, (str, PathLike)) else writer

    def __call__(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is left and close the writer."""
        self.writer.close()


def _opened(folder: str) -> SummaryWriter:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError("TensorBoard's event files need tensorboard: pip install tensorboard") from error
    return SummaryWriter(folder)
