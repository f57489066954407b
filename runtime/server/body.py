"""The body of a POST: read within a limit, JSON, of the right shape; else an error by name."""

from typing import Any, Final, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from vcli.runtime.errors import RequestError
from vcli.runtime.server.errors import BodyTooLargeError, MediaTypeError

MAX_BODY_BYTES: Final = 32 << 20

#: what pydantic writes into an error's path besides the fields: tried types of a union
_NO_FIELDS: Final = frozenset({"str", "list[dict[str,any]]", "list[str]"})
_VALUE_ERROR: Final = "Value error, "

Body = TypeVar("Body", bound=BaseModel)


async def read_body(
    request: Request, schema: type[Body], *, max_bytes: int = MAX_BODY_BYTES
) -> Body:
    """The body of `request` as a `schema`.

    Raises:
        MediaTypeError: it is not declared to be JSON (415).
        BodyTooLargeError: longer than `max_bytes` (413); no more than that was read.
        RequestError: missing, no JSON object, or a field is wrong (400).
    """
    raw = await _read(request, max_bytes)
    if not raw.strip():
        raise RequestError("the request has no body", hint="send a JSON object")
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise MediaTypeError(
            f"the body is sent as {media_type!r}" if media_type else "the body has no content type",
            hint="send the header `content-type: application/json`",
        )
    value = _decode(raw)
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        raise _schema_error(error) from error


async def _read(request: Request, max_bytes: int) -> bytes:
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise BodyTooLargeError(
            f"the body has {announced} bytes, at most {max_bytes} are taken",
            hint="send fewer or shorter prompts",
        )
    chunks: list[bytes] = []
    num_bytes = 0
    try:
        async for chunk in request.stream():
            num_bytes += len(chunk)
            if num_bytes > max_bytes:
                raise BodyTooLargeError(
                    f"the body has more than {max_bytes} bytes, which is the limit",
                    hint="send fewer or shorter prompts",
                )
            chunks.append(chunk)
    except ClientDisconnect as error:
        raise RequestError("the client left before the body was complete") from error
    return b"".join(chunks)


def _decode(raw: bytes) -> dict[str, Any]:
    # msgspec refuses what is no text (half of a surrogate pair, wrong UTF-8) and no number (NaN,
    # infinity, thousands of digits), which Python's own decoder lets in.
    try:
        value = msgspec.json.decode(raw)
    except RecursionError as error:
        raise RequestError("the body is nested too deeply") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(
            f"the body is no valid JSON: {error}", hint="send a JSON object in UTF-8"
        ) from error
    if not isinstance(value, dict):
        raise RequestError(f"the body must be a JSON object, it is a {type(value).__name__}")
    return value


def _schema_error(error: ValidationError) -> RequestError:
    """The first field that does not fit, with its path."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    path = ""
    for part in first["loc"]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part not in _NO_FIELDS:
            path += f".{part}" if path else part
    message = "is required" if first["type"] == "missing" else first["msg"]
    return RequestError(
        f"{path}: {message.removeprefix(_VALUE_ERROR)}" if path else message,
        parameter=path or None,
    )
