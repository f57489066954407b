"""Signals as a program in a terminal gets them, whoever runs the tests."""

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture
def hang_up_ends() -> Iterator[None]:
    """SIGHUP is not ignored, as it is under nohup; processes that start meanwhile inherit that."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)
