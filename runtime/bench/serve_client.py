"""One streamed request to an OpenAI-compatible server, and the questions asked before the load."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from vcli.runtime.bench.http_client import (
    BrokenResponseError,
    HttpClient,
    HttpResponse,
    ServerGoneError,
)
from vcli.runtime.bench.serve_spec import RequestRecord, ServeBenchSpec
from vcli.topology.errors import ConfigError, UnfitError, VcliError

_PATHS: Final[Mapping[str, str]] = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
}
_QUESTION_S: Final = 30.0
_SHOWN_LETTERS: Final = 300


class StreamError(VcliError):
    """The answer to one request is an error, or no answer."""


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def has_text(self) -> bool:
        delta = self.delta
        return bool(self.text or (delta and (delta.content or delta.reasoning_content)))


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """What the server takes beside the bare protocol."""

    prompts: str
    """`tokens` or `text`."""
    has_extras: bool
    """It takes `ignore_eos` and reports its token counts."""

    def describe(self) -> str:
        """The form of a request, for people."""
        extras = "" if self.has_extras else " without ignore_eos and stream_options"
        return f"prompts as {self.prompts}{extras}"


class ServeClient:
    """Asks one server for one model's answers; belongs to one event loop."""

    def __init__(self, client: HttpClient, spec: ServeBenchSpec, model: str) -> None:
        self._client = client
        self._spec = spec
        self._model = model
        self.dialect = Dialect(
            prompts="text" if spec.endpoint == "chat" else "tokens", has_extras=True
        )
        self.running: set[RequestRecord] = set()
        """What is being measured; the pieces that came stand in `arrivals`."""

    async def settle(self) -> list[str]:
        """Find the dialect with a short request; the refusals on the way, each kind once.

        Raises:
            ConfigError: nobody is there, no such path, or no such model.
            UnfitError: the server cannot answer.
        """
        refusals: dict[str, tuple[str, _RefusedError]] = {}
        plain = replace(self.dialect, prompts="text")
        dialects = [self.dialect, plain, replace(plain, has_extras=False)]
        for dialect in dict.fromkeys(dialects):
            self.dialect = dialect
            try:
                async with asyncio.timeout(self._spec.request_timeout_s):
                    await self._ask(RequestRecord(index=0, sent_s=0.0, arrivals=[]), max_tokens=2)
            except TimeoutError:
                raise UnfitError(
                    f"the server gave no answer within {self._spec.request_timeout_s:g} s",
                    hint="is it ready? or raise --request-timeout",
                ) from None
            except _RefusedError as error:
                if error.status not in (400, 422):
                    raise _explain(error, self._model) from error
                refusals.setdefault(error.message, (dialect.describe(), error))
            except StreamError as error:
                raise UnfitError(f"the first request failed: {error.message}") from error
            except (ServerGoneError, BrokenResponseError) as error:
                raise unreachable(error) from error
            else:
                return [f"{form} ({said})" for said, (form, _) in refusals.items()]
        raise _explain_all(refusals, self._model)

    async def measure(self, index: int) -> RequestRecord:
        """Send one request and follow its answer; a failure stands in the record."""
        record = RequestRecord(index=index, sent_s=time.monotonic(), arrivals=[])
        self.running.add(record)
        try:
            async with asyncio.timeout(self._spec.request_timeout_s):
                await self._ask(record, max_tokens=self._spec.output_len)
        except TimeoutError:
            record.error = f"no whole answer within {self._spec.request_timeout_s:g} s"
        except VcliError as error:
            record.error = error.message
            record.is_connection_lost = isinstance(error, ServerGoneError | BrokenResponseError)
        finally:
            record.ended_s = record.ended_s or time.monotonic()
            self.running.remove(record)
        return record

    async def _ask(self, record: RequestRecord, *, max_tokens: int) -> None:
        body = self._body(record.index, max_tokens)
        num_pieces = 0
        usage: _Usage | None = None
        has_ended = False
        record.sent_s = time.monotonic()
        path = _PATHS[self._spec.endpoint]
        async with self._client.request(path, body) as response:
            if response.status != 200:
                raise _RefusedError(response.status, _error_text(await response.whole()))
            async with contextlib.aclosing(_events(response)) as events:
                async for now_s, data in events:
                    if data == b"[DONE]":
                        has_ended = True
                        continue
                    chunk = _decoded(data)
                    if chunk.error is not None:
                        raise StreamError(_error_text(data))
                    if any(choice.has_text for choice in chunk.choices):
                        num_pieces += 1
                        record.arrivals.append(now_s)
                    has_ended = has_ended or any(c.finish_reason for c in chunk.choices)
                    usage = chunk.usage or usage
                    record.ended_s = now_s
        if not has_ended:
            raise StreamError("the stream ended without a finish reason and without [DONE]")
        record.prompt_tokens = usage.prompt_tokens if usage else self._spec.input_len
        record.output_tokens = usage.completion_tokens if usage else num_pieces

    def _body(self, index: int, max_tokens: int) -> dict[str, Any]:
        spec = self._spec
        is_text = self.dialect.prompts == "text"
        prompt = spec.text_prompt(index) if is_text else spec.token_prompt(index)
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": max_tokens,
            "temperature": spec.temperature,
            "stream": True,
        }
        if spec.endpoint == "chat":
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        if self.dialect.has_extras:
            body["ignore_eos"] = True
            body["stream_options"] = {"include_usage": True}
        return body


class _RefusedError(StreamError):
    """The server answered with an HTTP error."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"HTTP {status}: {text}")
        self.status = status


async def served_model(client: HttpClient) -> str:
    """The first model that the server names.

    Raises:
        ConfigError: nobody is there, or no OpenAI-compatible server.
    """
    hint = "--base-url http://HOST:PORT of an OpenAI-compatible server, or --model NAME"
    try:
        async with asyncio.timeout(_QUESTION_S), client.request("/v1/models") as response:
            text = await response.whole()
            if response.status != 200:
                raise ConfigError(
                    f"GET /v1/models gave HTTP {response.status}: {_error_text(text)}", hint=hint
                )
            models = msgspec.json.decode(text, type=_Models).data
    except TimeoutError:
        raise UnfitError(
            f"the server gave no answer within {_QUESTION_S:g} s", hint="is it ready?"
        ) from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"GET /v1/models gave no list of models: {error}", hint=hint) from error
    except (ServerGoneError, BrokenResponseError) as error:
        raise unreachable(error) from error
    if not models:
        raise ConfigError("the server names no model", hint="--model NAME")
    return models[0].id


def unreachable(error: VcliError) -> ConfigError:
    """What to say when nobody answers at the address that was typed."""
    return ConfigError(
        error.message, hint="start a server there (vcli serve), or correct --base-url"
    )


def _explain_all(refusals: Mapping[str, tuple[str, _RefusedError]], model: str) -> VcliError:
    """When every form was refused: the first with its meaning, the others where they differ."""
    (_, first), *_ = refusals.values()
    explained = _explain(first, model)
    if len(refusals) == 1:
        return explained
    lines = [f"  {form}: {said}" for said, (form, _) in refusals.items()]
    return ConfigError("\n".join(["the server refuses the requests", *lines]), hint=explained.hint)


def _explain(error: _RefusedError, model: str) -> VcliError:
    if error.status == 404:
        return ConfigError(
            f"the server refuses model {model!r}: {error.message}",
            hint="leave --model out to take the one that is served, or correct --base-url",
        )
    if error.status in (401, 403):
        return ConfigError(error.message, hint="set OPENAI_API_KEY")
    if error.status < 500:
        return ConfigError(
            f"the server refuses the requests: {error.message}",
            hint="change what it names: --input-len, --output-len, --endpoint, --vocab-size",
        )
    return UnfitError(f"the server cannot answer: {error.message}")


async def _events(response: HttpResponse) -> AsyncGenerator[tuple[float, bytes], None]:
    """The data of each server-sent event, with the time of its last byte."""
    buffer = b""
    async with contextlib.aclosing(response.pieces()) as pieces:
        async for now_s, piece in pieces:
            *lines, buffer = (buffer + piece).split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    yield now_s, line[5:].strip()


def _decoded(data: bytes) -> _Chunk:
    try:
        return _DECODER.decode(data)
    except msgspec.DecodeError as error:
        raise StreamError(f"an event of the stream cannot be read: {error}") from error


_DECODER: Final = msgspec.json.Decoder(_Chunk)


def _error_text(body: bytes) -> str:
    """The message in an error's body, or its beginning."""
    try:
        value = msgspec.json.decode(body)
    except msgspec.DecodeError:
        value = body.decode(errors="replace")
    if isinstance(value, dict):
        inner = value.get("error", value)
        value = inner.get("message", inner) if isinstance(inner, dict) else inner
    return " ".join(str(value).split())[:_SHOWN_LETTERS] or "no reason given"
