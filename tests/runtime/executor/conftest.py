"""Executors of fake workers, ended with the test; children import from the repository's folder."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.fake_worker import fake_config
from vcli.runtime.config import DeadlineConfig
from vcli.runtime.executor.multiproc import MultiprocExecutor

Make = Callable[..., MultiprocExecutor]


@pytest.fixture(autouse=True)
def importable_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[3])


@pytest.fixture
def make() -> Iterator[Make]:
    """An executor of a class of `fake_worker` that is not started yet; `deadlines` by name."""
    made: list[MultiprocExecutor] = []

    def make(
        worker_cls: str = "FakeWorker", num_ranks: int = 2, **deadlines: float
    ) -> MultiprocExecutor:
        limits = {"start_s": 30.0, "execute_model_s": 20.0, "shutdown_s": 2.0, **deadlines}
        executor = MultiprocExecutor(
            fake_config(num_ranks, deadlines=DeadlineConfig(**limits), log_level="CRITICAL"),
            on_message=lambda _: None,
            worker_cls=f"tests.support.fake_worker:{worker_cls}",
            ring_bytes=1 << 18,
        )
        made.append(executor)
        return executor

    yield make
    for executor in made:
        executor.shutdown()


@pytest.fixture
def started(make: Make) -> MultiprocExecutor:
    """Two ranks that take calls."""
    executor = make()
    executor.start()
    return executor
