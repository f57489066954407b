"""The HTTP application: routes, and every error in OpenAI's shape."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from importlib import metadata
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from vcli.runtime.engine.async_engine import AsyncEngine
from vcli.runtime.engine.input_processor import TextPrompt
from vcli.runtime.errors import RequestError
from vcli.runtime.server.body import read_body
from vcli.runtime.server.chat import create_chat_completion
from vcli.runtime.server.chat_messages import chat_prompt
from vcli.runtime.server.completions import create_completion
from vcli.runtime.server.errors import (
    error_response,
    json_response,
    plain_error_response,
)
from vcli.runtime.server.json_values import shortened
from vcli.runtime.server.metrics import CONTENT_TYPE, ServerMetrics
from vcli.runtime.server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from vcli.runtime.server.readiness import ReadinessProbe
from vcli.runtime.server.state import ServerState
from vcli.topology.errors import VcliError


def build_app(
    engine: AsyncEngine,
    *,
    served_name: str,
    metrics: ServerMetrics,
    server_info: Mapping[str, Any] | None = None,
    version: str = "",
) -> FastAPI:
    """The application over a started or yet unstarted `engine`, which it neither starts nor closes.

    `version` is the installed one unless given.
    `server_info` is shown as it is by /server_info. The shared state is `app.state.server`.
    """
    version = version or _installed_version()
    state = ServerState(
        engine=engine, served_name=served_name, server_info=server_info or {}, version=version
    )
    app = FastAPI(
        title="vcli",
        version=version,
        lifespan=_lifespan,
        docs_url=None,
        redoc_url=None,
        # A redirect drops the body or the method in many clients; a 404 says what is wrong.
        redirect_slashes=False,
    )
    app.state.server = state
    metrics.watch_engine(lambda: engine.stats)
    _add_error_handlers(app)
    _add_openai_routes(app, state)
    _add_token_routes(app, state)
    _add_operator_routes(app, state, metrics)
    return app


def _installed_version() -> str:
    try:
        return metadata.version("vcli-toolkit")
    except metadata.PackageNotFoundError:
        return "unknown"


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    yield


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(VcliError)
    async def known(request: Request, error: VcliError) -> Response:
        return error_response(error)

    @app.exception_handler(HTTPException)
    async def plain(request: Request, error: HTTPException) -> Response:
        where = f"{request.method} {shortened(request.url.path)}"
        response = plain_error_response(error.status_code, f"{where}: {error.detail}")
        response.headers.update(error.headers or {})
        if response.headers.get("allow") == "GET":  # see `_get`
            response.headers["allow"] = "GET, HEAD"
        return response

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        # Starlette raises it again after this response, so that it reaches the log, and uvicorn
        # then closes the connection.
        response = plain_error_response(500, f"bug in vcli: {type(error).__name__}: {error}")
        response.headers["connection"] = "close"
        return response


_Handler = TypeVar("_Handler", bound=Callable[..., Awaitable[Response]])


def _get(app: FastAPI, path: str) -> Callable[[_Handler], _Handler]:
    """A route for GET, and for HEAD as HTTP has it; uvicorn leaves the body out."""

    def add(handler: _Handler) -> _Handler:
        app.get(path, response_model=None)(handler)
        app.head(path, response_model=None, include_in_schema=False)(handler)
        return handler

    return add


def _add_openai_routes(app: FastAPI, state: ServerState) -> None:
    @app.post("/v1/chat/completions", response_model=None)
    async def chat_completions(request: Request) -> Response:
        return await create_chat_completion(state, await read_body(request, ChatCompletionRequest))

    @app.post("/v1/completions", response_model=None)
    async def completions(request: Request) -> Response:
        return await create_completion(state, await read_body(request, CompletionRequest))

    @_get(app, "/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [_model_card(state)]})

    @_get(app, "/v1/models/{name:path}")
    async def model(name: str) -> Response:
        if not name:
            raise HTTPException(404)
        state.check_model(name)
        return json_response(_model_card(state))


def _model_card(state: ServerState) -> dict[str, Any]:
    return {
        "id": state.served_name,
        "object": "model",
        "created": state.started_at,
        "owned_by": "vcli",
        "root": state.served_name,
        "parent": None,
        "max_model_len": state.engine.inputs.max_model_len,
    }


def _add_token_routes(app: FastAPI, state: ServerState) -> None:
    tokenizer = state.engine.tokenizer

    @app.post("/tokenize", response_model=None)
    async def tokenize(request: Request) -> Response:
        body = await read_body(request, TokenizeRequest)
        state.check_model(body.model)
        if body.messages is not None:
            prompt = chat_prompt(
                body.messages,
                add_generation_prompt=body.add_generation_prompt,
                arguments=body.chat_template_kwargs,
            )
            token_ids = await state.engine.inputs.tokenize(prompt)
        elif body.prompt is not None:
            token_ids = await state.engine.inputs.tokenize(
                TextPrompt(text=body.prompt, add_special_tokens=body.add_special_tokens)
            )
        else:
            raise RequestError("prompt or messages is needed", parameter="prompt")
        texts = None
        if body.return_token_strs:
            texts = await asyncio.to_thread(
                lambda: [tokenizer.token_text(token) for token in token_ids]
            )
        return json_response(
            {
                "count": len(token_ids),
                "max_model_len": state.engine.inputs.max_model_len,
                "tokens": token_ids,
                "token_strs": texts,
            }
        )

    @app.post("/detokenize", response_model=None)
    async def detokenize(request: Request) -> Response:
        body = await read_body(request, DetokenizeRequest)
        state.check_model(body.model)
        state.engine.inputs.check_token_ids(body.tokens, parameter="tokens")
        if len(body.tokens) > state.engine.inputs.max_model_len:
            raise RequestError(
                f"tokens has {len(body.tokens)} ids, at most "
                f"max_model_len={state.engine.inputs.max_model_len} are taken",
                parameter="tokens",
            )
        return json_response({"prompt": tokenizer.decode(body.tokens, skip_special_tokens=False)})


def _add_operator_routes(app: FastAPI, state: ServerState, metrics: ServerMetrics) -> None:
    probe = ReadinessProbe(state)

    @_get(app, "/health")
    async def health() -> Response:
        state.engine.check_alive()
        return Response(status_code=200)

    @_get(app, "/ready")
    async def ready() -> Response:
        status, body = await probe.check()
        return json_response(body, status=status)

    @_get(app, "/metrics")
    async def metrics_text() -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE)

    @_get(app, "/version")
    async def version() -> Response:
        return json_response({"version": state.version})

    @_get(app, "/server_info")
    async def server_info() -> Response:
        return json_response(state.server_info)
