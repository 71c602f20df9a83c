# The Monitor as a callback of Lightning.
from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

from affine_divergence.diagnostics import Diagnosis, Monitor

try:
    from lightning.pytorch import Callback
except ImportError:
    try:
        from pytorch_lightning import Callback
    except ImportError as error:
        raise ImportError("this callback needs Lightning: pip install lightning") from error


class MonitorCallback(Callback):
    """An ad.Monitor while the trainer fits: attached when training starts, detached when it ends, by an error too.

    It watches the optimizer of modules that have one. In training over several processes the first one is watched, whose rows are a
    part of the batch. The gradient scaler of "16-mixed" is reckoned with; a strategy that scales the loss by itself, as DeepSpeed's in
    float16, shows none: there multipliers have its scale in them, see ad.Monitor.

    Args:
        every: steps of the optimizer from one diagnosis to the next; those at which the trainer's global step is a multiple of it.
        path: JSON lines file that every diagnosis is appended to, as that of ad.Monitor.
        log: whether the few aggregates go to the trainer's loggers, at the trainer's global step.
        include: patterns of the names of the modules to measure, as those of ad.Monitor.
        plain: whether the change that the plain gradient implies is measured too.

    Raises:
        ValueError: when training starts, for a module with several optimizers.
    """

    def __init__(
        self,
        every: int = 100,
        *,
        path: str | PathLike[str] | None = None,
        log: bool = True,
        include: str | Sequence[str] | None = None,
        plain: bool = True,
    ) -> None:
        super().__init__()
        self.every, self.path, self.include, self.plain = every, path, include, plain
        self._logs = log  # not self.log, where Lightning puts the module's own
        self._monitor: Monitor | None = None

    @property
    def last(self) -> Diagnosis | None:
        """The last diagnosis, also after the training."""
        return None if self._monitor is None else self._monitor.last

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach, once the optimizer is there."""
        if not trainer.is_global_zero:
            return
        if len(trainer.optimizers) != 1:
            raise ValueError(
                f"MonitorCallback watches one optimizer, {type(pl_module).__name__} has {len(trainer.optimizers)}; in its on_train_start "
                "attach an ad.Monitor(self, optimizer) for each"
            )

        def track(values: Mapping[str, float], step: int) -> None:
            for logger in trainer.loggers:
                logger.log_metrics(dict(values), step=trainer.global_step)

        self._monitor = Monitor(
            pl_module,
            trainer.optimizers[0],
            self.every,
            path=self.path,
            tracker=track if self._logs else None,
            include=self.include,
            plain=self.plain,
            grad_scaler=trainer.scaler,
        )
        self._monitor.steps = trainer.global_step  # which a checkpoint has restored by now
        self._monitor.attach()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Detach."""
        self._detach()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Detach where the training breaks off."""
        self._detach()

    def _detach(self) -> None:
        if self._monitor is not None:
            self._monitor.detach()
