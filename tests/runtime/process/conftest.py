"""Children of these tests import their targets from the repository's folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from vcli.runtime.process.fork_owner import ForkServer


@pytest.fixture(autouse=True)
def importable_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[3])


@pytest.fixture
def server() -> Iterator[ForkServer]:
    server = ForkServer.start(preload=("tests.support.fork_children",))
    yield server
    server.close()
