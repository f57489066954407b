"""The engine as the API server sees it: prompts in, an asynchronous stream of outputs out."""

import asyncio
import socket
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

from vcli.runtime.engine.core_client import FRONT_END, CoreClient
from vcli.runtime.engine.input_processor import InputProcessor, Prompt
from vcli.runtime.engine.output_processor import (
    OutputOptions,
    OutputProcessor,
    RequestObserver,
    RequestOutput,
    SilentObserver,
)
from vcli.runtime.engine.tokenizer import Tokenizer
from vcli.runtime.errors import EngineDeadError, FailureReport
from vcli.runtime.log import get_logger
from vcli.runtime.messages import (
    AbortRequests,
    EngineOutputs,
    EngineRequest,
    SchedulerStats,
    ShutdownCore,
)
from vcli.runtime.process.silence import LOOK_EVERY_S, SilenceWatch
from vcli.runtime.sampling_params import OWN_NAMES, SamplingParams
from vcli.topology.errors import VcliError

logger = get_logger(__name__)


class AsyncEngine:
    """Front end of one engine core. Belongs to one event loop; only `fail` is for any thread."""

    def __init__(
        self,
        core_socket: socket.socket,
        tokenizer: Tokenizer,
        *,
        max_model_len: int,
        vocab_size: int | None = None,
        default_sampling: Mapping[str, float] | None = None,
        observer: RequestObserver | None = None,
        on_own_failure: Callable[[FailureReport], None] | None = None,
        core_watch: SilenceWatch | None = None,
    ) -> None:
        """`on_own_failure` hears of a failure that no monitor of processes sees.

        `core_watch` names a core that does not answer; without it, nobody does.
        """
        self.tokenizer = tokenizer
        self.inputs = InputProcessor(
            tokenizer,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            default_sampling=default_sampling,
        )
        self.stats = SchedulerStats()
        self._outputs = OutputProcessor(tokenizer, observer=observer or SilentObserver())
        self._client = CoreClient(
            core_socket, on_outputs=self._on_outputs, on_failure=self._on_failure
        )
        self._on_own_failure = on_own_failure
        self._core_watch = core_watch
        self._watching: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self) -> None:
        """Connect to the core, in the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._client.start()
        if self._core_watch is not None:
            watching = self._watch_core(self._core_watch)
            self._watching = self._loop.create_task(watching, name="core-watch")

    @property
    def failure(self) -> FailureReport | None:
        """Why the engine is dead; None while it lives."""
        return self._client.failure

    @property
    def num_open_requests(self) -> int:
        """Requests without a finish reason yet."""
        return self._outputs.num_open

    @property
    def trouble(self) -> str:
        """What keeps the core from answering; empty where nothing is known."""
        return "" if self._core_watch is None else self._core_watch.trouble

    def check_alive(self) -> None:
        """Raise EngineDeadError when the engine is dead."""
        if self.failure is not None:
            raise EngineDeadError(self.failure)

    async def prepare(
        self,
        request_id: str,
        prompt: Prompt,
        sampling: SamplingParams,
        *,
        num_choices: int = 1,
        default_max_tokens: int | None = None,
        names: Mapping[str, str] = OWN_NAMES,
    ) -> list[EngineRequest]:
        """Tokenise and check; one request per choice. `names` as in `make_requests`.

        Raises:
            RequestError: the prompt or an option is wrong.
            EngineDeadError: nobody is there to run it.
        """
        self.check_alive()
        return self.inputs.make_requests(
            request_id,
            await self.inputs.tokenize(prompt),
            sampling,
            num_choices=num_choices,
            default_max_tokens=default_max_tokens,
            names=names,
        )

    async def generate(
        self,
        request_id: str,
        prompt: Prompt,
        sampling: SamplingParams,
        *,
        num_choices: int = 1,
        options: OutputOptions | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Prepare and run; see `prepare` and `run`."""
        requests = await self.prepare(request_id, prompt, sampling, num_choices=num_choices)
        outputs = self.run(requests, options)
        try:
            async for output in outputs:
                yield output
        finally:
            await outputs.aclose()

    async def run(
        self, requests: Sequence[EngineRequest], options: OutputOptions | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of prepared requests, until each has its finish reason.

        Leaving the iteration early (close it, or cancel the task in it) aborts what still runs.

        Raises:
            EngineDeadError: the engine is dead, or died meanwhile.
            RequestError: the engine refused a request.
        """
        self.check_alive()
        request_ids = [request.request_id for request in requests]
        stream = self._outputs.add(requests, options or OutputOptions())
        try:
            for request in requests:
                self._client.post(request)
            num_running = len(requests)
            while num_running:
                output = await stream.get()
                if output.finish_reason is not None:
                    num_running -= 1
                yield output
        finally:
            self.abort(request_ids)

    def abort(self, request_ids: Sequence[str]) -> None:
        """Forget these requests, here and in the core; finished and unknown ones are ignored."""
        running = self._outputs.discard(request_ids)
        if running:
            self._client.post(AbortRequests(request_ids=running))

    def abort_all(self, make_error: Callable[[], VcliError]) -> None:
        """End all open requests at once; each caller gets an error of its own."""
        running = self._outputs.open_request_ids
        self._outputs.fail_all(make_error)
        if running:
            self._client.post(AbortRequests(request_ids=running))

    async def call(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        """Run a method of the engine core; see `CoreClient.call`."""
        return await self._client.call(method, *arguments, timeout_s=timeout_s)

    def fail(self, report: FailureReport) -> None:
        """Declare the engine dead: open and later requests raise EngineDeadError. Any thread."""
        if self._loop is None or self._loop.is_closed():
            self._client.fail(report)
        else:
            self._loop.call_soon_threadsafe(self._client.fail, report)

    def shut_down_core(self, *, drain: bool) -> None:
        """Ask the core to stop; with `drain`, after what runs."""
        self._client.post(ShutdownCore(drain=drain))

    async def close(self) -> None:
        """Let go of the core's socket."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait({self._watching})
        await self._client.close()

    async def _watch_core(self, watch: SilenceWatch) -> None:
        """Look each second whether a core that owes an answer still runs."""
        num_heard = 0
        while self._client.failure is None:
            await asyncio.sleep(LOOK_EVERY_S)
            if self._client.num_heard != num_heard:
                num_heard = self._client.num_heard
                watch.heard()
            elif not (self.num_open_requests or self._client.num_calls or watch.is_owed):
                watch.rest()
            elif (report := watch.look()) is not None:
                self._client.fail(report)
                if self._on_own_failure is not None:
                    self._on_own_failure(report)
            elif watch.wants_to_ask():
                self._client.ask_for_sign_of_life()

    def _on_outputs(self, message: EngineOutputs) -> None:
        if message.stats is not None:
            self.stats = message.stats
        ended_here = self._outputs.process(message.outputs)
        if ended_here:
            self._client.post(AbortRequests(request_ids=ended_here))

    def _on_failure(self, report: FailureReport) -> None:
        if self._client.has_left_as_asked:
            logger.info("engine core ended as it was asked to")
        else:
            logger.info("engine dead: %s", report.describe())
        self._outputs.fail_all(lambda: EngineDeadError(report))
        if report.process == FRONT_END and self._on_own_failure is not None:
            self._on_own_failure(report)
