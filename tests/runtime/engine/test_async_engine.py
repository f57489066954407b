"""The engine's front end against a core on the other end of a real socket."""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_core import FakeCore
from tests.support.tiny_tokenizer import tiny_tokenizer
from vcli.runtime.engine.async_engine import AsyncEngine
from vcli.runtime.engine.core_client import CoreCallError
from vcli.runtime.engine.output_processor import OutputOptions, RequestOutput
from vcli.runtime.engine.tokenizer import Tokenizer
from vcli.runtime.errors import EngineDeadError, FailureReport, RequestError, RpcTimeoutError
from vcli.runtime.sampling_params import SamplingParams

TEXT = "Hello, wörld! 🙂 STOP and more"
GREEDY = SamplingParams(temperature=0.0)
KILLED = FailureReport(
    process="Worker_TP1", rank=1, pid=4242, phase="execute_model", kind="", exit_code=-9,
    message="killed by SIGKILL",
)  # fmt: skip


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return tiny_tokenizer(tmp_path)


@contextlib.asynccontextmanager
async def engine_on(core: FakeCore, tokenizer: Tokenizer) -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine(core.client_socket, tokenizer, max_model_len=200)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


def run(
    tokenizer: Tokenizer,
    body: Callable[[AsyncEngine, FakeCore], Coroutine[Any, Any, None]],
    **core_options: Any,
) -> None:
    """Run `body` with an engine whose core answers with TEXT."""

    async def main() -> None:
        with FakeCore(lambda request: tokenizer.encode(TEXT), **core_options) as core:
            async with engine_on(core, tokenizer) as engine:
                await asyncio.wait_for(body(engine, core), 20)

    asyncio.run(main())


async def collect(
    engine: AsyncEngine, sampling: SamplingParams = GREEDY, **options: Any
) -> list[RequestOutput]:
    return [output async for output in engine.generate("r", "Say hello", sampling, **options)]


async def until(condition: Callable[[], bool]) -> None:
    """Let the event loop run until `condition()`; the whole test has a deadline."""
    while not condition():  # noqa: ASYNC110 - what is awaited has no event of its own
        await asyncio.sleep(0.001)


def text_of(outputs: list[RequestOutput], index: int = 0) -> str:
    return "".join(output.text for output in outputs if output.index == index)


def test_deltas_make_the_text_and_the_last_has_reason_and_counts(tokenizer: Tokenizer) -> None:
    async def body(engine: AsyncEngine, core: FakeCore) -> None:
        outputs = await collect(engine)
        last = outputs[-1]
        script = tokenizer.encode(TEXT)
        assert text_of(outputs) == TEXT
        assert [token for output in outputs for token in output.token_ids] == [
            *script,
            tokenizer.eos_token_ids[0],
        ]
        assert (last.finish_reason, last.stop_reason) == ("stop", None)
        assert last.num_prompt_tokens == len(tokenizer.encode("Say hello"))
        assert last.num_generated_tokens == len(script) + 1
        assert last.num_cached_tokens == 2
        assert all(output.finish_reason is None for output in outputs[:-1])
        assert engine.stats.generation_tokens_total == len(script) + 1
        assert core.requests[0].eos_token_ids == tokenizer.eos_token_ids
        assert engine.num_open_requests == 0

    run(tokenizer, body)


def test_stop_string_ends_the_request_here_and_in_the_core(tokenizer: Tokenizer) -> None:
    async def body(engine: AsyncEngine, core: FakeCore) -> None:
        outputs = await collect(engine, SamplingParams(stop=("STOP",)))
        assert text_of(outputs) == "Hello, wörld! 🙂 "
        assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", "STOP")
        assert all("S" not in output.text for output in outputs)
        await asyncio.to_thread(core.wait, lambda core: core.aborted == ["r"])

    run(tokenizer, body, holds_after=len(tokenizer.encode("Hello, wörld! 🙂 STOP an")))


def test_stop_string_in_output_when_asked_for_and_not_before_min_tokens(
    tokenizer: Tokenizer,
) -> None:
    async def body(engine: AsyncEngine, core: FakeCore) -> None:
        sampling = SamplingParams(stop=("o",), min_tokens=6)
        outputs = await collect(
            engine, sampling, options=OutputOptions(include_stop_str_in_output=True)
        )
        assert text_of(outputs) == "Hello, wörld! 🙂 STOP and mo"

    run(tokenizer, body)


def test_stop_token_is_not_shown_and_named_as_the_reason(tokenizer: Tokenizer) -> None:
    comma = tokenizer.encode(",")[0]

    async def body(engine: AsyncEngine, core: FakeCore) -> None:
        outputs = await collect(engine, SamplingParams(stop_token_ids=(comma,)))
        assert text_of(outputs) == "Hello"
        assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", comma)

    run(tokenizer, body)


def test_max_tokens_inside_a_character_ends_with_a_replacement(tokenizer: Tokenizer) -> None:
    limit = len(tokenizer.encode("Hello, w")) + 1

    async def body(engine: AsyncEngine, core: FakeCore) -> None:
        outputs = await collect(engine, SamplingParams(max_tokens=limit))
        assert text_of(outputs) == "Hello, w\ufffd"
        assert outputs[-1].finish_reason == "length"

    run(tokenizer, body)


def test_choices_come_with_their_index(tokenizer: Tokenizer) -> None:
    async def body(engine: AsyncEngine, core: FakeCore) -> None:
        outputs = await collect(engine, SamplingParams(seed=5), num_choices=3)
        assert [text_of(outputs, index) for index in range(3)] == [TEXT] * 3
        assert [request.sampling.seed for request in core.requests] == [5, 6, 7]

    run(tokenizer, body)


def test_slow_caller_gets_merged_outputs_and_loses_nothing(tokenizer: Tokenizer) -> None:
    async def body(engine: AsyncEngine, core: FakeCore) -> None:
        stream = engine.generate("r", "x", SamplingParams(logprobs=1))
        outputs = [await anext(stream)]
        await until(lambda: engine.num_open_requests == 0)
        outputs += [output async for output in stream]
        assert len(outputs) <= 3
        assert text_of(outputs) == TEXT
        logprobs = [entry for output in outputs for entry in output.logprobs or []]
        assert [entry.token_id for entry in logprobs] == [
            token for output in outputs for token in output.token_ids
        ]

    run(tokenizer, body)


@pytest.mark.parametrize("way", ["close", "cancel"])
def test_leaving_early_aborts_every_choice_in_the_core(tokenizer: Tokenizer, way: str) -> None:
    async def body(engine: AsyncEngine, core: FakeCore) -> None:
        if way == "close":
            stream = engine.generate("r", "x", GREEDY, num_choices=2)
            await anext(stream)
            await stream.aclose()
        else:
            task = asyncio.create_task(collect(engine, num_choices=2))
            await asyncio.to_thread(core.wait, lambda core: len(core.requests) == 2)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert engine.num_open_requests == 0
        await asyncio.to_thread(core.wait, lambda core: sorted(core.aborted) == ["r-0", "r-1"])

    run(tokenizer, body, holds_after=3)


def test_refused_request_raises_the_cores_words(tokenizer: Tokenizer) -> None:
    async def body(engine: AsyncEngine, core: FakeCore) -> None:
        core.refusal = "needs 9 KV blocks, there are 4"
        with pytest.raises(RequestError, match="9 KV blocks"):
            await collect(engine)

    run(tokenizer, body)


def test_id_in_use_is_refused_and_the_first_request_goes_on(tokenizer: Tokenizer) -> None:
    async def body(engine: AsyncEngine, core: FakeCore) -> None:
        first = engine.generate("r", "x", GREEDY)
        await anext(first)
        with pytest.raises(RequestError, match="in use"):
            await collect(engine)
        assert engine.num_open_requests == 1
        await first.aclose()

    run(tokenizer, body, holds_after=3)


def assert_killed(error: EngineDeadError) -> None:
    assert error.report == KILLED
    for word in ("rank 1", "pid 4242", "SIGKILL"):
        assert word in error.message


@pytest.mark.parametrize("teller", ["core", "monitor", "monitor after the socket ended"])
def test_death_ends_open_and_later_requests_and_calls_with_its_cause(
    tokenizer: Tokenizer, teller: str
) -> None:
    async def body(engine: AsyncEngine, core: FakeCore) -> None:
        core.replies["stuck"] = "silence"
        tasks = [
            asyncio.create_task(collect(engine)),
            asyncio.create_task(engine.call("stuck", timeout_s=15)),
        ]
        await asyncio.to_thread(core.wait, lambda core: len(core.requests) == 1)
        begun = time.monotonic()
        if teller == "core":
            core.fail(KILLED)
        else:
            if teller != "monitor":
                core.die()
            monitor = threading.Thread(target=engine.fail, args=[KILLED])
            monitor.start()
            monitor.join()
        for task in tasks:
            with pytest.raises(EngineDeadError) as raised:
                await task
            assert_killed(raised.value)
        assert time.monotonic() - begun < 0.25
        for attempt in (collect(engine), engine.call("ping", timeout_s=1)):
            with pytest.raises(EngineDeadError) as raised:
                await attempt
            assert_killed(raised.value)
        assert engine.failure == KILLED

    run(tokenizer, body, holds_after=3)


def test_end_of_the_socket_alone_is_death_within_half_a_second(tokenizer: Tokenizer) -> None:
    async def body(engine: AsyncEngine, core: FakeCore) -> None:
        task = asyncio.create_task(collect(engine))
        await asyncio.to_thread(core.wait, lambda core: len(core.requests) == 1)
        begun = time.monotonic()
        core.die()
        with pytest.raises(EngineDeadError, match=r"EngineCore.*connection"):
            await task
        assert time.monotonic() - begun < 0.5
        engine.fail(KILLED)  # too late: the first report counts
        await asyncio.sleep(0)
        assert engine.failure is not None
        assert engine.failure.process == "EngineCore"

    run(tokenizer, body, holds_after=3)


def test_death_before_start_is_not_forgotten(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        with FakeCore(lambda request: []) as core:
            engine = AsyncEngine(core.client_socket, tokenizer, max_model_len=200)
            engine.fail(KILLED)
            await engine.start()
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                await collect(engine)
            await engine.close()

    asyncio.run(main())


def test_end_of_the_socket_after_shutdown_says_that_it_was_shut_down(tokenizer: Tokenizer) -> None:
    async def body(engine: AsyncEngine, core: FakeCore) -> None:
        engine.shut_down_core(drain=True)
        await asyncio.to_thread(core.wait, lambda core: bool(core.shutdowns))
        assert core.shutdowns[0].drain
        core.die()
        await until(lambda: engine.failure is not None)
        with pytest.raises(EngineDeadError, match="shut down"):
            engine.check_alive()

    run(tokenizer, body)


@pytest.mark.parametrize("is_asked", [True, False])
def test_only_an_end_that_nobody_asked_for_is_logged_as_a_death(
    is_asked: bool, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(engine: AsyncEngine, core: FakeCore) -> None:
        if is_asked:
            engine.shut_down_core(drain=False)
            await asyncio.to_thread(core.wait, lambda core: bool(core.shutdowns))
        core.die()
        await until(lambda: engine.failure is not None)

    with caplog.at_level("INFO", logger="vcli"):
        run(tokenizer, body)
    assert ("engine dead" in caplog.text) is not is_asked
    assert ("ended as it was asked" in caplog.text) is is_asked


def test_calls_give_values_errors_and_timeouts(tokenizer: Tokenizer) -> None:
    async def body(engine: AsyncEngine, core: FakeCore) -> None:
        core.replies |= {"ping": 17, "stuck": "silence"}
        assert await engine.call("ping", timeout_s=5) == 17
        with pytest.raises(CoreCallError, match="no method nothing"):
            await engine.call("nothing", timeout_s=5)
        with pytest.raises(RpcTimeoutError, match=r"stuck within 0\.05 s"):
            await engine.call("stuck", timeout_s=0.05)

    run(tokenizer, body)


def test_observer_hears_of_tokens_and_ends(tokenizer: Tokenizer) -> None:
    class Recorder:
        def __init__(self) -> None:
            self.events: list[str] = []

        def first_token(self, seconds: float) -> None:
            self.events.append("first")

        def next_token(self, seconds: float) -> None:
            self.events.append("next")

        def finished(self, reason: str, seconds: float) -> None:
            self.events.append(reason)

    async def main() -> None:
        recorder = Recorder()
        with FakeCore(lambda request: [1, 2]) as core:
            engine = AsyncEngine(
                core.client_socket, tokenizer, max_model_len=200, observer=recorder
            )
            await engine.start()
            await collect(engine)
            assert recorder.events == ["first", "next", "next", "stop"]
            await engine.close()

    asyncio.run(main())
