# Times of several pieces of code, taken in turns in one process.
from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch


def interleaved(pieces: Mapping[str, Callable[[], object]], repeats: int, *, warm: int = 2) -> dict[str, float]:
    """The median seconds of CPU time of each piece over the rounds; every round runs each once, after some rounds of warming up."""
    times: dict[str, list[float]] = {name: [] for name in pieces}
    for repeat in range(-warm, repeats):
        for name, piece in pieces.items():
            start = time.process_time()
            piece()
            if repeat >= 0:
                times[name].append(time.process_time() - start)
    return {name: statistics.median(values) for name, values in times.items()}


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread, for times that do not depend on how many cores are free."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
