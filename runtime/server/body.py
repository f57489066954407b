"""The body of a POST: read within a limit, JSON, of the right shape; else an error by name."""

from collections.abc import Mapping
from typing import Any, Final, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from vcli.runtime.errors import RequestError
from vcli.runtime.server.errors import BodyTooLargeError, MediaTypeError
from vcli.runtime.server.json_values import shown

MAX_BODY_BYTES: Final = 32 << 20

_VALUE_ERROR: Final = "Value error, "
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
_WHAT_IT_MUST_BE: Final[Mapping[str, str]] = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "string": "a string",
    "list": "a list",
    "dict": "an object",
    "model": "an object",
}

Body = TypeVar("Body", bound=BaseModel)


async def read_body(
    request: Request, schema: type[Body], *, max_bytes: int = MAX_BODY_BYTES
) -> Body:
    """The body of `request` as a `schema`.

    Raises:
        MediaTypeError: it is compressed, or not declared to be JSON (415).
        BodyTooLargeError: longer than `max_bytes` (413); no more than that was read.
        RequestError: missing, no JSON object, or a field is wrong (400).
    """
    raw = await _read(request, max_bytes)
    if not raw.strip():
        raise RequestError("the request has no body", hint="send a JSON object")
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        raise MediaTypeError(
            f"the body is sent with content-encoding {shown(coding)}", hint="send it uncompressed"
        )
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise MediaTypeError(
            f"the body is sent as {shown(media_type)}"
            if media_type
            else "the body has no content type",
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
        value = msgspec.json.decode(raw.removeprefix(_BYTE_ORDER_MARK))
    except RecursionError as error:
        raise RequestError("the body is nested too deeply") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(
            f"the body is no valid JSON: {error}", hint="send a JSON object in UTF-8"
        ) from error
    if not isinstance(value, dict):
        raise RequestError(f"the body must be a JSON object, it is {shown(value)}")
    return value


def _schema_error(error: ValidationError) -> RequestError:
    """The first field that does not fit, with its path and its value."""
    first = error.errors(include_url=False)[0]
    path = ""
    for part in first["loc"]:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += f".{part}" if path else part
    if first["type"] == "missing":
        return RequestError(f"{path}: is required", parameter=path)
    message = _must_be(first["type"], first["msg"], first.get("ctx", {}))
    if message.startswith("must "):
        message += f", it is {shown(first['input'])}"
    return RequestError(f"{path}: {message}", parameter=path)


def _must_be(kind: str, message: str, context: Mapping[str, Any]) -> str:
    """In the words of JSON; pydantic's are those of Python."""
    if kind == "literal_error":
        return f"must be {context['expected']}"
    known = _WHAT_IT_MUST_BE.get(kind.partition("_")[0])
    return f"must be {known}" if known else message.removeprefix(_VALUE_ERROR)
