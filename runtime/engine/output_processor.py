"""Engine outputs to what a caller of the engine sees: text, finish reasons, counts.

All methods run on the event loop's thread. One `OutputStream` belongs to one caller; the requests
of the caller (n choices, several prompts) share it.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Protocol

from vcli.runtime.engine.detokenizer import IncrementalDetokenizer, StopStringFilter
from vcli.runtime.engine.token_places import PlacedTokens
from vcli.runtime.engine.tokenizer import Tokenizer
from vcli.runtime.errors import RequestError
from vcli.runtime.messages import EngineOutput, EngineRequest, TokenLogprobs
from vcli.topology.errors import VcliError


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """How the output is shown; nothing here changes what the model does."""

    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """News of one request: `text` and `token_ids` are what came since the last output.

    `index` is the request's place in the list that the caller gave. `stop_reason` is the stop
    string or the stop token id that ended it, None for end-of-text tokens and limits. `logprobs`
    are those of the tokens whose place in the text has become certain; `text_offsets` says where
    each begins, in characters of the request's whole text.
    """

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    num_prompt_tokens: int
    num_generated_tokens: int
    num_cached_tokens: int
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    text_offsets: list[int] = field(default_factory=list)


class RequestObserver(Protocol):
    """Told about the times of requests, for metrics. Seconds."""

    def first_token(self, seconds: float) -> None:
        """The first token came so long after the request."""

    def next_token(self, seconds: float) -> None:
        """So long after the token before."""

    def finished(self, reason: str, seconds: float) -> None:
        """The request took so long; `reason` is the finish reason, `abort` or `error`."""


class SilentObserver:
    """Records nothing."""

    def first_token(self, seconds: float) -> None:
        """Ignored."""

    def next_token(self, seconds: float) -> None:
        """Ignored."""

    def finished(self, reason: str, seconds: float) -> None:
        """Ignored."""


class OutputStream:
    """Outputs that wait for their caller; a slow caller finds them merged, one per request."""

    def __init__(self) -> None:
        self._waiting: dict[str, RequestOutput] = {}
        self._error: VcliError | None = None
        self._arrived = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        """Add an output; merged with one of the same request that was not fetched yet."""
        earlier = self._waiting.get(output.request_id)
        if earlier is not None:
            output.text = earlier.text + output.text
            output.token_ids = earlier.token_ids + output.token_ids
            if earlier.logprobs is not None:
                output.logprobs = earlier.logprobs + (output.logprobs or [])
                output.text_offsets = earlier.text_offsets + output.text_offsets
        self._waiting[output.request_id] = output
        self._arrived.set()

    def fail(self, error: VcliError) -> None:
        """Let the caller's next `get` raise `error`, after what has arrived."""
        self._error = error
        self._arrived.set()

    async def get(self) -> RequestOutput:
        """The next output; waits for as long as the engine lives, which calls `fail` otherwise."""
        while not self._waiting:
            if self._error is not None:
                raise self._error
            self._arrived.clear()
            await self._arrived.wait()
        return self._waiting.pop(next(iter(self._waiting)))


class _RequestState:
    """One running request."""

    def __init__(
        self,
        request: EngineRequest,
        index: int,
        stream: OutputStream,
        options: OutputOptions,
        tokenizer: Tokenizer,
    ) -> None:
        sampling = request.sampling
        self.request_id = request.request_id
        self.index = index
        self.stream = stream
        self.arrived_at = time.monotonic()
        self.last_token_at: float | None = None
        self._include_stop = options.include_stop_str_in_output
        self._eos_token_ids = request.eos_token_ids
        self._min_tokens = sampling.min_tokens
        self._places = None if sampling.logprobs is None else PlacedTokens(tokenizer.token_bytes)
        self._detokenizer = IncrementalDetokenizer(
            tokenizer,
            skip_special_tokens=options.skip_special_tokens,
            prompt_token_ids=request.prompt_token_ids,
        )
        self._stop_filter = StopStringFilter(
            sampling.stop, include_in_output=options.include_stop_str_in_output
        )
        self._num_prompt_tokens = len(request.prompt_token_ids)
        self._num_generated_tokens = 0
        self._num_cached_tokens = 0
        self._num_shown = 0
        self._silent_token_ids: list[int] = []

    def process(self, output: EngineOutput) -> RequestOutput | None:
        """What the caller gets to see of `output`; None while its text is held back."""
        self._num_cached_tokens = output.num_cached_tokens or self._num_cached_tokens
        text = ""
        num_taken = 0
        for token_id, logprobs in self._with_logprobs(output):
            text += self._take(token_id, logprobs, is_stop=token_id == output.stop_token_id)
            num_taken += 1
            if self._stop_filter.matched is not None:
                break
        finish_reason = output.finish_reason
        if finish_reason is not None and self._stop_filter.matched is None:
            text += self._search(self._flush()) + self._stop_filter.flush()
        stop_reason: str | int | None = self._stop_filter.matched
        if stop_reason is not None:
            finish_reason = "stop"
        elif output.stop_token_id is not None and output.stop_token_id not in self._eos_token_ids:
            stop_reason = output.stop_token_id
        self._num_shown += len(text)
        shown, offsets = None, list[int]()
        if self._places is not None:
            is_over = finish_reason is not None
            shown, offsets = self._places.shown(self._num_shown, is_over=is_over)
        token_ids = self._silent_token_ids + output.new_token_ids[:num_taken]
        if not text and finish_reason is None and not shown:
            self._silent_token_ids = token_ids
            return None
        self._silent_token_ids = []
        return RequestOutput(
            request_id=self.request_id,
            index=self.index,
            text=text,
            token_ids=token_ids,
            logprobs=shown or None,
            text_offsets=offsets,
            num_prompt_tokens=self._num_prompt_tokens,
            num_generated_tokens=self._num_generated_tokens,
            num_cached_tokens=self._num_cached_tokens,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
        )

    def _with_logprobs(self, output: EngineOutput) -> Iterable[tuple[int, TokenLogprobs | None]]:
        logprobs = repeat(None) if output.logprobs is None else output.logprobs
        return zip(output.new_token_ids, logprobs, strict=False)

    def _take(self, token_id: int, logprobs: TokenLogprobs | None, *, is_stop: bool) -> str:
        self._num_generated_tokens += 1
        is_hidden = is_stop and not self._include_stop  # the last one: nothing completes it
        text = self._flush() if is_hidden else self._detokenizer.add(token_id)
        if self._places is not None and logprobs is not None:
            is_silent = is_hidden or self._detokenizer.skips(token_id)
            self._places.add(logprobs, is_silent=is_silent)
            shown = "" if is_hidden else text
            self._places.place(shown, num_pending=self._detokenizer.num_pending)
        return self._search(text)

    def _flush(self) -> str:
        text = self._detokenizer.flush()
        if self._places is not None:
            self._places.place(text, num_pending=0)
        return text

    def _search(self, text: str) -> str:
        if self._num_generated_tokens <= self._min_tokens:
            return self._stop_filter.pass_unsearched(text)
        return self._stop_filter.add(text)


class OutputProcessor:
    """The running requests of this front end, by id."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        observer: RequestObserver,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tokenizer = tokenizer
        self._observer = observer
        self._clock = clock
        self._states: dict[str, _RequestState] = {}

    @property
    def num_open(self) -> int:
        """Requests without a finish reason yet."""
        return len(self._states)

    @property
    def open_request_ids(self) -> list[str]:
        """Their ids."""
        return list(self._states)

    def add(self, requests: Sequence[EngineRequest], options: OutputOptions) -> OutputStream:
        """Register requests of one caller before they are sent to the core.

        Raises:
            RequestError: an id is in use.
        """
        for request in requests:
            if request.request_id in self._states:
                raise RequestError(
                    f"request id {request.request_id!r} is in use", parameter="request_id"
                )
        stream = OutputStream()
        for index, request in enumerate(requests):
            self._states[request.request_id] = _RequestState(
                request, index, stream, options, self._tokenizer
            )
        return stream

    def process(self, outputs: Iterable[EngineOutput]) -> list[str]:
        """Hand out one step's outputs; the ids that a stop string ended, for the core to abort."""
        ended_here: list[str] = []
        now = self._clock()
        for output in outputs:
            state = self._states.get(output.request_id)
            if state is None:  # aborted a moment ago
                continue
            if output.finish_reason == "error":
                self._finish(state, "error", now)
                state.stream.fail(RequestError(output.error or "the engine refused the request"))
                continue
            if output.new_token_ids:
                self._observe_tokens(state, now)
            news = state.process(output)
            if news is None:
                continue
            if news.finish_reason is not None:
                self._finish(state, news.finish_reason, now)
                if output.finish_reason is None:
                    ended_here.append(output.request_id)
            state.stream.put(news)
        return ended_here

    def discard(self, request_ids: Iterable[str]) -> list[str]:
        """Forget requests whose caller left; the ids that were still running."""
        now = self._clock()
        running = [number for number in request_ids if number in self._states]
        for request_id in running:
            self._finish(self._states[request_id], "abort", now)
        return running

    def fail_all(self, make_error: Callable[[], VcliError]) -> None:
        """End all requests with an error of their own each."""
        for state in list(self._states.values()):
            self._finish(state, "error", self._clock())
            state.stream.fail(make_error())

    def _finish(self, state: _RequestState, reason: str, now: float) -> None:
        del self._states[state.request_id]
        self._observer.finished(reason, now - state.arrived_at)

    def _observe_tokens(self, state: _RequestState, now: float) -> None:
        if state.last_token_at is None:
            self._observer.first_token(now - state.arrived_at)
        else:
            self._observer.next_token(now - state.last_token_at)
        state.last_token_at = now
