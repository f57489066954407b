"""A core that does not answer is named to whoever waits; one that is only busy is not."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.core_ends import WAIT_S, CoreChild
from tests.support.fake_executor import FAULT_HANG, FAULT_LOCK, fake_engine_config
from tests.support.fake_model import VOCAB_SIZE, generate_alone
from tests.support.processes import wait_until
from tests.support.tiny_tokenizer import tiny_tokenizer
from vcli.runtime.engine.async_engine import AsyncEngine
from vcli.runtime.errors import EngineDeadError, FailureReport
from vcli.runtime.process.silence import SilenceWatch
from vcli.runtime.sampling_params import SamplingParams

pytestmark = [pytest.mark.process, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Iterator[CoreChild]:
    monkeypatch.syspath_prepend(str(ROOT))
    child = CoreChild(fake_engine_config())
    child.group.wait_ready(WAIT_S)
    yield child
    child.group.shutdown(2.0, asked=False)


class Engine(AsyncEngine):
    """A front end of `child` that gives up on a core after `limit_s`."""

    def __init__(self, child: CoreChild, folder: Path, *, limit_s: float) -> None:
        self.own_failures: list[FailureReport] = []
        super().__init__(
            child.socket,
            tiny_tokenizer(folder),
            max_model_len=64,
            vocab_size=VOCAB_SIZE,
            on_own_failure=self.own_failures.append,
            core_watch=SilenceWatch("EngineCore", child.pid, stall_s=1.0, limit_s=limit_s),
        )

    async def tokens(self, prompt: list[int], max_tokens: int = 4) -> list[int]:
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        found: list[int] = []
        async for output in self.generate("r", prompt, sampling):
            found += output.token_ids
        return found

    async def until(self, claim: Callable[[], object]) -> None:
        await asyncio.to_thread(wait_until, lambda: bool(claim()), WAIT_S)


def run(child: CoreChild, folder: Path, body, *, limit_s: float) -> None:
    async def main() -> None:
        engine = Engine(child, folder, limit_s=limit_s)
        await engine.start()
        try:
            await asyncio.wait_for(body(engine), 60)
        finally:
            await engine.close()

    asyncio.run(main())


def test_core_that_holds_the_interpreter_is_named_and_given_up(
    child: CoreChild, tmp_path: Path
) -> None:
    async def body(engine: Engine) -> None:
        asked = asyncio.create_task(engine.tokens([FAULT_LOCK, 1]))
        await engine.until(lambda: engine.trouble)
        assert f"EngineCore pid {child.pid} has not answered for" in engine.trouble
        with pytest.raises(EngineDeadError) as caught:
            await asked
        report = caught.value.report
        assert (report.process, report.pid, report.kind) == (
            "EngineCore",
            child.pid,
            "ProcessStuck",
        )
        assert engine.own_failures == [report]

    run(child, tmp_path, body, limit_s=7.0)


def test_core_whose_step_takes_long_answers_and_is_not_named(
    child: CoreChild, tmp_path: Path
) -> None:
    async def body(engine: Engine) -> None:
        asked = asyncio.create_task(engine.tokens([FAULT_HANG, 1]))
        # Each of them is a sign of life that was asked for after two seconds of silence.
        await engine.until(lambda: engine._client.num_heard >= 4)
        assert engine.failure is None
        assert engine.trouble == ""
        asked.cancel()

    run(child, tmp_path, body, limit_s=7.0)


def test_stopped_core_is_named_and_its_requests_go_on_with_it(
    child: CoreChild, tmp_path: Path
) -> None:
    async def body(engine: Engine) -> None:
        os.kill(child.pid, signal.SIGSTOP)
        asked = asyncio.create_task(engine.tokens([1, 2, 3]))
        await engine.until(lambda: engine.trouble)
        assert f"EngineCore pid {child.pid} is stopped" in engine.trouble
        os.kill(child.pid, signal.SIGCONT)
        assert await asked == generate_alone([1, 2, 3], 4)
        await engine.until(lambda: not engine.trouble)

    run(child, tmp_path, body, limit_s=60.0)


def test_core_that_was_stopped_is_given_up_though_its_client_has_left(
    child: CoreChild, tmp_path: Path
) -> None:
    async def body(engine: Engine) -> None:
        os.kill(child.pid, signal.SIGSTOP)
        asked = asyncio.create_task(engine.tokens([1, 2, 3]))
        await engine.until(lambda: engine._core_watch.is_owed)
        asked.cancel()
        await engine.until(lambda: engine.failure)
        assert engine.failure.kind == "ProcessStopped"

    run(child, tmp_path, body, limit_s=1.0)
