"""POST /v1/chat/completions."""

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator

from starlette.responses import Response

from vcli.runtime.engine.output_processor import OutputOptions, RequestOutput
from vcli.runtime.messages import EngineRequest, TokenLogprobs
from vcli.runtime.server.errors import json_response
from vcli.runtime.server.protocol import ChatCompletionRequest
from vcli.runtime.server.responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    Delta,
    UsageCounter,
    chat_logprobs,
)
from vcli.runtime.server.sse import EventStream, WholeResponse, event
from vcli.runtime.server.state import ServerState


async def create_chat_completion(state: ServerState, body: ChatCompletionRequest) -> Response:
    """The response to a chat request; the work happens while it is sent.

    Raises:
        RequestError: the request is wrong.
        EngineDeadError: the engine is dead.
    """
    state.admit(body.model)
    body.check()
    request_id = f"chatcmpl-{uuid.uuid4().hex}"
    requests = await state.engine.prepare(
        request_id,
        body.prompt(),
        body.sampling(state.engine.inputs.default_sampling),
        num_choices=body.n,
        names=body.names(),
    )
    answer = _Answer(state, request_id, requests, body.output_options(), body.include_usage)
    return EventStream(answer.events()) if body.stream else WholeResponse(answer.whole)


class _Answer:
    """One chat completion on its way."""

    def __init__(
        self,
        state: ServerState,
        request_id: str,
        requests: list[EngineRequest],
        options: OutputOptions,
        include_usage: bool,
    ) -> None:
        self._tokenizer = state.engine.tokenizer
        self._model = state.served_name
        self._request_id = request_id
        self._created = int(time.time())
        self._num_choices = len(requests)
        self._outputs = state.engine.run(requests, options)
        self._include_usage = include_usage

    async def whole(self) -> Response:
        texts = [""] * self._num_choices
        logprobs: list[list[TokenLogprobs] | None] = [None] * self._num_choices
        last: list[RequestOutput | None] = [None] * self._num_choices
        usage = UsageCounter(self._num_choices)
        async with contextlib.aclosing(self._outputs) as outputs:
            async for output in outputs:
                texts[output.index] += output.text
                if output.logprobs is not None:
                    logprobs[output.index] = (logprobs[output.index] or []) + output.logprobs
                last[output.index] = output
                usage.count(output)
        choices = [
            ChatChoice(
                output.index,
                AssistantMessage(texts[output.index]),
                output.finish_reason or "",
                chat_logprobs(self._tokenizer, logprobs[output.index]),
                output.stop_reason,
            )
            for output in last
            if output is not None
        ]
        return json_response(
            ChatCompletion(
                id=self._request_id,
                created=self._created,
                model=self._model,
                choices=choices,
                usage=usage.usage(),
            )
        )

    async def events(self) -> AsyncGenerator[bytes, None]:
        usage = UsageCounter(self._num_choices)
        is_first = True
        async with contextlib.aclosing(self._outputs) as outputs:
            async for output in outputs:
                if is_first:
                    is_first = False
                    for index in range(self._num_choices):
                        opening = ChatChunkChoice(index, Delta(role="assistant", content=""))
                        yield self._chunk([opening])
                usage.count(output)
                choice = ChatChunkChoice(
                    output.index,
                    Delta(content=output.text) if output.text else Delta(),
                    chat_logprobs(self._tokenizer, output.logprobs),
                    output.finish_reason,
                    output.stop_reason,
                )
                yield self._chunk([choice])
        if self._include_usage:
            yield self._chunk([], usage)

    def _chunk(self, choices: list[ChatChunkChoice], usage: UsageCounter | None = None) -> bytes:
        return event(
            ChatCompletionChunk(
                id=self._request_id,
                created=self._created,
                model=self._model,
                choices=choices,
                usage=None if usage is None else usage.usage(),
            )
        )
