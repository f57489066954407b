"""Children of these tests import their targets from the repository's folder."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def importable_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[3])
