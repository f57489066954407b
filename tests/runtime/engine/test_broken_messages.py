"""Messages that cannot be sent or read, and bugs in the tasks that do: never a silent hang."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.fake_core import FakeCore
from tests.support.tiny_tokenizer import tiny_tokenizer
from vcli.runtime.engine.async_engine import AsyncEngine
from vcli.runtime.engine.output_processor import RequestOutput
from vcli.runtime.engine.tokenizer import Tokenizer
from vcli.runtime.errors import EngineDeadError, FailureReport, RequestError
from vcli.runtime.ipc.frames import AsyncFrames
from vcli.runtime.sampling_params import SamplingParams

TEXT = "Hello"
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return tiny_tokenizer(tmp_path)


def run(
    tokenizer: Tokenizer,
    body: Callable[[AsyncEngine, FakeCore], Coroutine[Any, Any, None]],
    **core_options: Any,
) -> None:
    """Run `body` with an engine whose core answers with TEXT."""

    async def main() -> None:
        with FakeCore(lambda request: tokenizer.encode(TEXT), **core_options) as core:
            engine = AsyncEngine(core.client_socket, tokenizer, max_model_len=200)
            await engine.start()
            try:
                await asyncio.wait_for(body(engine, core), 20)
            finally:
                await engine.close()

    asyncio.run(main())


async def collect(engine: AsyncEngine) -> list[RequestOutput]:
    return [output async for output in engine.generate("r", "x", GREEDY)]


def test_value_that_cannot_be_sent_is_that_requests_error_and_the_engine_goes_on(
    tokenizer: Tokenizer,
) -> None:
    async def body(engine: AsyncEngine, core: FakeCore) -> None:
        (request,) = await engine.prepare("bad", "x", GREEDY)
        for field, value in (("top_k", 2**70), ("stop", ("\ud800",)), ("seed", object())):
            sampling = msgspec.structs.replace(request.sampling, **{field: value})
            bad = msgspec.structs.replace(request, sampling=sampling)
            with pytest.raises(RequestError, match="cannot be sent"):
                await anext(engine.run([bad]))
        assert engine.num_open_requests == 0
        assert "".join(output.text for output in await collect(engine)) == TEXT

    run(tokenizer, body)


@pytest.mark.parametrize("direction", ["send", "recv"])
def test_bug_in_a_task_of_the_client_fails_the_engine_and_is_told(
    tokenizer: Tokenizer, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object) -> None:
        raise ZeroDivisionError("oh")

    async def main() -> None:
        told: list[FailureReport] = []
        with FakeCore(lambda request: []) as core:
            engine = AsyncEngine(
                core.client_socket, tokenizer, max_model_len=200, on_own_failure=told.append
            )
            monkeypatch.setattr(AsyncFrames, direction, broken)
            await engine.start()
            with pytest.raises(EngineDeadError, match="ZeroDivisionError: oh"):
                await asyncio.wait_for(collect(engine), 10)
            await engine.close()
        (report,) = told
        assert (report.process, report.kind) == ("ApiServer", "ZeroDivisionError")
        assert "in broken" in report.traceback

    asyncio.run(main())


def test_message_that_is_none_of_ours_fails_the_engine(tokenizer: Tokenizer) -> None:
    async def body(engine: AsyncEngine, core: FakeCore) -> None:
        task = asyncio.create_task(collect(engine))
        await asyncio.to_thread(core.wait, lambda core: len(core.requests) == 1)
        core.send_raw(b"nonsense")
        with pytest.raises(EngineDeadError, match="reading from the engine core"):
            await task

    run(tokenizer, body, holds_after=3)
