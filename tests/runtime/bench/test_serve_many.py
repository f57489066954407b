"""A load of many requests with few places."""

import asyncio

import pytest

from tests.runtime.bench.test_serve_bench import DONE, run, streaming, text
from tests.support.scripted_server import scripted
from vcli.runtime.bench.serve_client import ServeClient


def test_requests_without_a_place_are_no_tasks_that_a_signal_must_cancel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    most, measure = 0, ServeClient.measure

    async def counting(self: ServeClient, index: int) -> object:
        nonlocal most
        most = max(most, len(asyncio.all_tasks()))
        return await measure(self, index)

    monkeypatch.setattr(ServeClient, "measure", counting)
    with scripted(streaming(text("a", "stop"), DONE)) as server:
        result = run(server, num_prompts=300, max_concurrency=2)
    assert len(result.successes) == 300
    assert most < 20
