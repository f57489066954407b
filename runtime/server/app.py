"""The HTTP application: routes, and every error in OpenAI's shape."""

import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from vcli.runtime.engine.async_engine import AsyncEngine
from vcli.runtime.errors import RequestError
from vcli.runtime.server.chat import create_chat_completion
from vcli.runtime.server.completions import create_completion
from vcli.runtime.server.errors import (
    error_response,
    json_response,
    plain_error_response,
    validation_error_response,
)
from vcli.runtime.server.metrics import CONTENT_TYPE, ServerMetrics
from vcli.runtime.server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    chat_prompt,
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

    `server_info` is shown as it is by /server_info. The shared state is `app.state.server`.
    """
    state = ServerState(
        engine=engine, served_name=served_name, server_info=server_info or {}, version=version
    )
    app = FastAPI(
        title="vcli", version=version or "0", lifespan=_lifespan, docs_url=None, redoc_url=None
    )
    app.state.server = state
    metrics.watch_engine(lambda: engine.stats)
    _add_error_handlers(app)
    _add_openai_routes(app, state)
    _add_token_routes(app, state)
    _add_operator_routes(app, state, metrics)
    return app


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    yield


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(VcliError)
    async def known(request: Request, error: VcliError) -> Response:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> Response:
        return validation_error_response(error)

    @app.exception_handler(HTTPException)
    async def plain(request: Request, error: HTTPException) -> Response:
        return plain_error_response(error.status_code, str(error.detail))

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        # Starlette raises it again after this response, so that it reaches the log, and uvicorn
        # then closes the connection.
        response = plain_error_response(500, f"bug in vcli: {type(error).__name__}: {error}")
        response.headers["connection"] = "close"
        return response


def _add_openai_routes(app: FastAPI, state: ServerState) -> None:
    @app.post("/v1/chat/completions", response_model=None)
    async def chat_completions(body: ChatCompletionRequest) -> Response:
        return await create_chat_completion(state, body)

    @app.post("/v1/completions", response_model=None)
    async def completions(body: CompletionRequest) -> Response:
        return await create_completion(state, body)

    @app.get("/v1/models", response_model=None)
    async def models() -> Response:
        return json_response({"object": "list", "data": [_model_card(state)]})

    @app.get("/v1/models/{name:path}", response_model=None)
    async def model(name: str) -> Response:
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
    async def tokenize(body: TokenizeRequest) -> Response:
        state.check_model(body.model)
        if body.messages is not None:
            prompt = chat_prompt(
                body.messages,
                add_generation_prompt=body.add_generation_prompt,
                arguments=body.chat_template_kwargs,
            )
            token_ids = await state.engine.inputs.tokenize(prompt)
        elif body.prompt is not None:
            token_ids = tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens)
        else:
            raise RequestError("prompt or messages is needed", parameter="prompt")
        texts = [tokenizer.token_text(token) for token in token_ids]
        return json_response(
            {
                "count": len(token_ids),
                "max_model_len": state.engine.inputs.max_model_len,
                "tokens": token_ids,
                "token_strs": texts if body.return_token_strs else None,
            }
        )

    @app.post("/detokenize", response_model=None)
    async def detokenize(body: DetokenizeRequest) -> Response:
        state.check_model(body.model)
        state.engine.inputs.check_token_ids(body.tokens, parameter="tokens")
        return json_response({"prompt": tokenizer.decode(body.tokens, skip_special_tokens=False)})


def _add_operator_routes(app: FastAPI, state: ServerState, metrics: ServerMetrics) -> None:
    probe = ReadinessProbe(state)

    @app.get("/health", response_model=None)
    async def health() -> Response:
        state.engine.check_alive()
        return Response(status_code=200)

    @app.get("/ready", response_model=None)
    async def ready() -> Response:
        status, body = await probe.check()
        return json_response(body, status=status)

    @app.get("/metrics", response_model=None)
    async def metrics_text() -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE)

    @app.get("/version", response_model=None)
    async def version() -> Response:
        return json_response({"version": state.version})

    @app.get("/server_info", response_model=None)
    async def server_info() -> Response:
        return json_response(state.server_info)
