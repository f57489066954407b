"""POST /v1/completions: one or several prompts, each with n choices."""

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator

from starlette.responses import Response

from vcli.runtime.engine.input_processor import TextPrompt
from vcli.runtime.engine.output_processor import OutputOptions, RequestOutput
from vcli.runtime.errors import RequestError
from vcli.runtime.messages import EngineRequest, TokenLogprobs
from vcli.runtime.server.errors import json_response
from vcli.runtime.server.protocol import MAX_PROMPTS, CompletionRequest
from vcli.runtime.server.responses import (
    Completion,
    CompletionChoice,
    UsageCounter,
    completion_logprobs,
)
from vcli.runtime.server.sse import EventStream, WholeResponse, event
from vcli.runtime.server.state import ServerState

_DEFAULT_MAX_TOKENS = 16


async def create_completion(state: ServerState, body: CompletionRequest) -> Response:
    """The response to a completion request; the work happens while it is sent.

    Raises:
        RequestError: the request is wrong.
        EngineDeadError: the engine is dead.
    """
    state.admit(body.model)
    body.check()
    prompts = body.prompts()
    if len(prompts) * body.n > MAX_PROMPTS:
        raise RequestError(
            f"n={body.n} choices of {len(prompts)} prompts are more than {MAX_PROMPTS}",
            parameter="n",
        )
    sampling = body.sampling(state.engine.inputs.default_sampling)
    request_id = f"cmpl-{uuid.uuid4().hex}"
    requests: list[EngineRequest] = []
    for place, prompt in enumerate(prompts):
        await asyncio.sleep(0)  # short prompts are tokenised here, and others want their turn
        if isinstance(prompt, str):
            tokenised = await state.engine.inputs.tokenize(
                TextPrompt(text=prompt, add_special_tokens=body.add_special_tokens)
            )
        else:
            tokenised = prompt
        requests += await state.engine.prepare(
            request_id if len(prompts) == 1 else f"{request_id}-{place}",
            tokenised,
            sampling,
            num_choices=body.n,
            default_max_tokens=_DEFAULT_MAX_TOKENS,
        )
    answer = _Answer(state, request_id, requests, body.output_options(), body)
    return EventStream(answer.events()) if body.stream else WholeResponse(answer.whole)


class _Answer:
    """One text completion on its way."""

    def __init__(
        self,
        state: ServerState,
        request_id: str,
        requests: list[EngineRequest],
        options: OutputOptions,
        body: CompletionRequest,
    ) -> None:
        self._tokenizer = state.engine.tokenizer
        self._model = state.served_name
        self._request_id = request_id
        self._created = int(time.time())
        self._num_requests = len(requests)
        self._outputs = state.engine.run(requests, options)
        self._include_usage = body.include_usage
        self._usage = UsageCounter(body.n)

    async def whole(self) -> Response:
        texts = [""] * self._num_requests
        logprobs: list[list[TokenLogprobs] | None] = [None] * self._num_requests
        offsets: list[list[int]] = [[] for _ in range(self._num_requests)]
        last: list[RequestOutput | None] = [None] * self._num_requests
        async with contextlib.aclosing(self._outputs) as outputs:
            async for output in outputs:
                texts[output.index] += output.text
                if output.logprobs is not None:
                    logprobs[output.index] = (logprobs[output.index] or []) + output.logprobs
                    offsets[output.index] += output.text_offsets
                last[output.index] = output
                self._usage.count(output)
        choices = [
            CompletionChoice(
                output.index,
                texts[output.index],
                completion_logprobs(self._tokenizer, logprobs[output.index], offsets[output.index]),
                output.finish_reason,
                output.stop_reason,
            )
            for output in last
            if output is not None
        ]
        return json_response(self._completion(choices, self._usage))

    async def events(self) -> AsyncGenerator[bytes, None]:
        async with contextlib.aclosing(self._outputs) as outputs:
            async for output in outputs:
                self._usage.count(output)
                choice = CompletionChoice(
                    output.index,
                    output.text,
                    completion_logprobs(self._tokenizer, output.logprobs, output.text_offsets),
                    output.finish_reason,
                    output.stop_reason,
                )
                yield event(self._completion([choice], None))
        if self._include_usage:
            yield event(self._completion([], self._usage))

    def _completion(
        self, choices: list[CompletionChoice], usage: UsageCounter | None
    ) -> Completion:
        return Completion(
            id=self._request_id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=None if usage is None else usage.usage(),
        )
