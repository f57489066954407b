"""Errors as OpenAI's JSON body and an HTTP status."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

import msgspec
from starlette.responses import Response

from vcli.runtime.errors import EngineDeadError, RequestError
from vcli.topology.errors import VcliError

_CODES: Final[Mapping[int, str]] = {500: "internal_error"}


class ErrorDetail(msgspec.Struct, frozen=True):
    """What is wrong; `param` names the field, `code` is a word for programs, as OpenAI has it."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every response that is not a success."""

    error: ErrorDetail


class UnknownModelError(RequestError):
    """The request names a model that is not served here (404)."""


class BodyTooLargeError(RequestError):
    """The body of the request is longer than the server reads (413)."""


class MediaTypeError(RequestError):
    """The body of the request is not declared to be JSON (415)."""


class DrainingError(VcliError):
    """The server is about to stop and takes no new requests (503)."""


def error_of(error: VcliError) -> tuple[int, ErrorBody]:
    """The HTTP status and the body that tell `error`."""
    message = f"{error.message} ({error.hint})" if error.hint else error.message
    match error:
        case UnknownModelError():
            status, kind, code = 404, "invalid_request_error", "model_not_found"
        case BodyTooLargeError():
            status, kind, code = 413, "invalid_request_error", "body_too_large"
        case MediaTypeError():
            status, kind, code = 415, "invalid_request_error", "unsupported_media_type"
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
    code = _CODES.get(status) or HTTPStatus(status).phrase.lower().replace(" ", "_")
    return json_response(ErrorBody(ErrorDetail(message, kind, None, code)), status=status)


def json_response(body: Any, *, status: int = 200) -> Response:
    """`body` (structs, dicts, lists) as a JSON response."""
    return Response(msgspec.json.encode(body), status_code=status, media_type="application/json")
