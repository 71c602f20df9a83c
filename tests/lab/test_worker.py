# A worker process: how it is set up where stacks are trained, and what it makes of errors.
from __future__ import annotations

import os

import pytest
import torch
from makers import trial
from running import until
from tasks import reporting, slowdown, state

from affine_divergence.lab import worker
from affine_divergence.lab.executors import Workers, processes
from affine_divergence.lab.worker import AllocationError, Progress, Setup, train_stack


def test_stacks_are_trained_with_one_thread_and_denormals_flushed_which_would_slow_deep_narrow_nets_down() -> None:
    with processes(1, Setup("digits")) as workers:
        (record,) = workers.submit(train_stack, (trial(epochs=None, steps=1),)).result()
        pid, threads, flushed = workers.submit(state).result()
        ratio = workers.submit(slowdown, 5).result()
        task = workers.submit(reporting)
        until(lambda: workers.progress(task) == Progress(0.5, 1.0), 5.0)
        assert task.result() == [0.25, 0.5]  # what was reported is no answer
        until(lambda: workers.progress(task) == Progress(0.0, 0.0), 5.0)
    assert (pid != os.getpid(), threads, flushed) == (True, 1, True)
    assert (record.outcome.reason, record.provenance["device"], record.provenance["threads"]) == (None, "cpu", 1)
    assert ratio < 2.0  # about 1; about 6 where they are not flushed


def test_train_stack_flushes_denormals_whoever_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    monkeypatch.setattr(worker, "_splits", object())
    monkeypatch.setattr("affine_divergence.lab.training.train", lambda *_, **__: found.append(state()[2]) or [])
    assert not state()[2]
    try:
        train_stack(())
    finally:
        torch.set_flush_denormal(False)
    assert found == [True]


@pytest.mark.parametrize("error", [MemoryError("Unable to allocate 9 TiB"), torch.OutOfMemoryError("CUDA out of memory"), None])
def test_what_does_not_fit_into_memory_is_told_apart_from_other_failures(error: Exception | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        if error is None:
            torch.empty(2**60)  # what torch itself says
        raise error or AssertionError

    monkeypatch.setattr(worker, "_splits", object())
    monkeypatch.setattr("affine_divergence.lab.training.train", fail)
    try:
        with pytest.raises(AllocationError, match=r"llocate|CUDA"):
            train_stack((trial(),))
        error = ValueError("something else")
        (record,) = train_stack((trial(),))
    finally:
        torch.set_flush_denormal(False)
    assert (record.outcome.status, record.outcome.reason) == ("failed", "ValueError: something else")


def test_workers_take_positional_arguments_and_pass_exceptions_on() -> None:
    workers = Workers(1, Setup("nothing"))
    with pytest.raises(TypeError, match="positional"):
        workers.submit(trial, seed=1)
    with pytest.raises(ValueError, match="unknown data set 'nothing'"):
        workers.submit(state).result()
    workers.shutdown()
