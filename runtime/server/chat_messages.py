"""The messages of a chat request, and their contents as plain text."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, PlainValidator

from vcli.runtime.engine.input_processor import ChatPrompt
from vcli.runtime.errors import RequestError
from vcli.runtime.server.json_values import shown

_Role = Literal["system", "developer", "user", "assistant", "tool", "function"]
_Content = str | list[dict[str, Any]] | None


def _checked_content(value: object) -> _Content:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(part, dict) for part in value):
        return value
    raise ValueError('must be a string or a list of parts, {"type": "text", "text": "..."}')


class ChatMessage(BaseModel):
    """One message. Further keys (`name`, `tool_calls`) are passed on to the chat template."""

    model_config = ConfigDict(extra="allow")

    role: _Role
    content: Annotated[_Content, PlainValidator(_checked_content)] = None
    tool_calls: list[dict[str, Any]] | None = None

    @property
    def calls_tools(self) -> bool:
        """Whether it needs no content."""
        calls = self.tool_calls or (self.model_extra or {}).get("function_call")
        return self.role == "assistant" and bool(calls)


def chat_prompt(
    messages: list[ChatMessage], *, add_generation_prompt: bool, arguments: Mapping[str, Any]
) -> ChatPrompt:
    """The conversation for the chat template, contents as plain text.

    Raises:
        RequestError: a message has no content, or one that is no text.
    """
    plain = []
    for place, message in enumerate(messages):
        entry = {"role": message.role, **(message.model_extra or {})}
        where = f"messages[{place}].content"
        if message.tool_calls is not None:
            entry["tool_calls"] = message.tool_calls
        if isinstance(message.content, list):
            entry["content"] = _text_of_parts(message.content, where)
        elif message.content is not None:
            entry["content"] = message.content
        elif not message.calls_tools:
            raise RequestError(f"{where} is required", parameter=where)
        plain.append(entry)
    return ChatPrompt(
        messages=plain, add_generation_prompt=add_generation_prompt, arguments=arguments
    )


def _text_of_parts(parts: list[dict[str, Any]], where: str) -> str:
    texts = []
    for place, part in enumerate(parts):
        kind = part.get("type")
        if kind not in ("text", "refusal"):
            raise RequestError(
                f"{where}[{place}] has type {shown(kind)}, only text is supported",
                parameter=f"{where}[{place}].type",
            )
        text = part.get(kind)
        if not isinstance(text, str):
            raise RequestError(
                f"{where}[{place}].{kind} must be a string, it is {shown(text)}",
                parameter=f"{where}[{place}].{kind}",
            )
        texts.append(text)
    return "\n".join(texts)
