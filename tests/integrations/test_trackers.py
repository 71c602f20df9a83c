# Trackers: what a Monitor hands on arrives as it is, at its step.
from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from affine_divergence.integrations.trackers import TensorBoard, logged_to

VALUES = {"divergence/alignment": 0.25, "divergence/below_zero": 0.5}


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_tensorboard_has_every_value_at_its_step(tmp_path: Path) -> None:
    tracker = TensorBoard(tmp_path)
    tracker(VALUES, 0)
    tracker({**VALUES, "divergence/alignment": -1.0}, 100)
    tracker.close()
    assert scalars(tmp_path) == {"divergence/alignment": [(0, 0.25), (100, -1.0)], "divergence/below_zero": [(0, 0.5), (100, 0.5)]}


def test_a_writer_of_ones_own_is_written_to(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path) as writer:
        writer.add_scalar("loss", 1.0, 7)
        TensorBoard(writer)(VALUES, 7)
    assert scalars(tmp_path) == {"loss": [(7, 1.0)], "divergence/alignment": [(7, 0.25)], "divergence/below_zero": [(7, 0.5)]}


def test_without_tensorboard_the_error_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match="pip install tensorboard"):
        TensorBoard(tmp_path)


def test_a_run_is_logged_to_by_a_dict_of_its_own() -> None:
    logged: list[tuple[dict[str, Any], int]] = []

    class Run:
        def log(self, data: dict[str, Any], *, step: int) -> None:
            logged.append((data, step))

    logged_to(Run())(VALUES, 3)
    logged[0][0]["more"] = 1.0  # the run may keep what it was given, and write in it
    assert logged == [({**VALUES, "more": 1.0}, 3)]
    assert "more" not in VALUES
