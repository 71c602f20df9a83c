# The Monitor as a callback of the Trainer of transformers.
from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

from affine_divergence.diagnostics import Diagnosis, Monitor

from .trackers import Tracker

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError("this callback needs transformers and its Trainer: pip install 'transformers[torch]'") from error


class MonitorCallback(TrainerCallback):
    """An ad.Monitor while the Trainer trains: attached when training begins, detached when it ends.

    The Trainer tells its callbacks of no error: after one, the Monitor stays attached until the next training, or detach().
    In training over several processes the first one is watched, whose rows are a part of the batch. The gradient scaler of fp16 is
    reckoned with; DeepSpeed, which scales the loss by itself, shows none: there multipliers have its scale in them, see ad.Monitor.

    Args:
        every: steps of the optimizer from one diagnosis to the next; those at which the state's global step is a multiple of it.
        path: JSON lines file that every diagnosis is appended to, as that of ad.Monitor.
        log: whether the few aggregates become an entry of the Trainer's state.log_history.
        tracker: where they also go, as in affine_divergence.integrations.trackers, with the Trainer's step.
        include: patterns of the names of the modules to measure, as those of ad.Monitor.
        plain: whether the change that the plain gradient implies is measured too.
    """

    def __init__(
        self,
        every: int = 100,
        *,
        path: str | PathLike[str] | None = None,
        log: bool = True,
        tracker: Tracker | None = None,
        include: str | Sequence[str] | None = None,
        plain: bool = True,
    ) -> None:
        self.every, self.path, self.log, self.tracker, self.include, self.plain = every, path, log, tracker, include, plain
        self._monitor: Monitor | None = None

    @property
    def last(self) -> Diagnosis | None:
        """The last diagnosis, also after the training."""
        return None if self._monitor is None else self._monitor.last

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, optimizer: Any, **kwargs: Any) -> None:
        """Attach, to the optimizer inside that of accelerate and with its gradient scaler."""
        self.detach()
        if not state.is_world_process_zero:
            return

        def track(values: Mapping[str, float], step: int) -> None:
            counted = state.global_step + 1  # as the Trainer will have counted when it logs this step
            if self.log:
                state.log_history.append({**values, "epoch": state.epoch, "step": counted})
            if self.tracker is not None:
                self.tracker(values, counted)

        self._monitor = Monitor(
            model,
            optimizer,
            self.every,
            path=self.path,
            tracker=track,
            include=self.include,
            plain=self.plain,
        )
        self._monitor.steps = state.global_step  # which a checkpoint has restored by now
        self._monitor.attach()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Detach."""
        self.detach()

    def detach(self) -> None:
        """Take the Monitor's hooks off, if it is attached."""
        if self._monitor is not None:
            self._monitor.detach()
