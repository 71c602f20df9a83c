# Options and fixtures of the whole test run: one thread, and the real images where their folder is given.
from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from affine_divergence.diagnostics import _faults

torch.set_num_threads(1)

# A shell ignores the interruption for what it starts in the background, and so would all that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cifar10", metavar="PATH", help="the real CIFAR-10, in any form that can be read; skipped without")
    parser.addoption("--slow", action="store_true", help="also the tests marked slow, which take minutes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--slow"):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="takes minutes: pytest --slow"))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    # A test alone draws what it draws in the whole run; not by the seeds that tests themselves take, or two draws would be one.
    torch.manual_seed(20251222)


@pytest.fixture
def faults_told() -> None:
    """Faults of a diagnosis in one layer are told in its coverage, as users have it; else a test fails by them."""


@pytest.fixture(autouse=True)
def _faults_raised(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "faults_told" not in request.fixturenames:
        monkeypatch.setattr(_faults, "unforeseen", _raised)


def _raised(error: Exception) -> str:
    raise error


@pytest.fixture(scope="session")
def cifar10(request: pytest.FixtureRequest) -> Path:
    path = request.config.getoption("--cifar10")
    if path is None:
        pytest.skip("the real CIFAR-10 was not given: pytest --cifar10 PATH")
    return Path(path)
