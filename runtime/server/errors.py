"""Errors as OpenAI's JSON body and an HTTP status."""

from typing import Any

import msgspec
from fastapi.exceptions import RequestValidationError
from starlette.responses import Response

from vcli.runtime.errors import EngineDeadError, RequestError
from vcli.topology.errors import VcliError

#: what pydantic writes into an error's path besides the fields: the source and tried union types
_NO_FIELDS = frozenset({"body", "str", "list[int]", "list[str]", "list[list[int]]"})


class ErrorDetail(msgspec.Struct, frozen=True):
    """What is wrong; `param` names the field, `code` is for programs."""

    message: str
    type: str
    param: str | None
    code: str | int | None


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every response that is not a success."""

    error: ErrorDetail


class UnknownModelError(RequestError):
    """The request names a model that is not served here (404)."""


class DrainingError(VcliError):
    """The server is about to stop and takes no new requests (503)."""


def error_of(error: VcliError) -> tuple[int, ErrorBody]:
    """The HTTP status and the body that tell `error`."""
    message = f"{error.message} ({error.hint})" if error.hint else error.message
    match error:
        case UnknownModelError():
            status, kind, code = 404, "invalid_request_error", "model_not_found"
        case RequestError():
            status, kind, code = 400, "invalid_request_error", "invalid_value"
        case EngineDeadError():
            status, kind, code = 503, "server_error", "engine_dead"
        case DrainingError():
            status, kind, code = 503, "server_error", "shutting_down"
        case _:
            status, kind, code = 500, "server_error", "internal_error"
    parameter = error.parameter if isinstance(error, RequestError) else None
    return status, ErrorBody(ErrorDetail(message, kind, parameter, code))


def error_response(error: VcliError) -> Response:
    """`error` as a response."""
    status, body = error_of(error)
    return json_response(body, status=status)


def plain_error_response(status: int, message: str) -> Response:
    """An HTTP error that no route made: an unknown path, a wrong method."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return json_response(ErrorBody(ErrorDetail(message, kind, None, status)), status=status)


def validation_error_response(error: RequestValidationError) -> Response:
    """A body that does not fit the schema: 400, with the path of the first wrong field."""
    first: dict[str, Any] = dict(error.errors()[0])
    path = [str(part) for part in first.get("loc", ()) if str(part) not in _NO_FIELDS]
    where = ".".join(path) or None
    message = str(first.get("msg", "invalid"))
    return error_response(
        RequestError(message if where is None else f"{where}: {message}", parameter=where)
    )


def json_response(body: Any, *, status: int = 200) -> Response:
    """`body` (structs, dicts, lists) as a JSON response."""
    return Response(msgspec.json.encode(body), status_code=status, media_type="application/json")
