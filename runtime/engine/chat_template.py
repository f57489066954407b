"""Jinja chat templates, rendered in a sandbox as model authors expect them to be.

A template comes with the checkpoint, so it is foreign code: it sees plain data only, cannot change
it, and a failure in it is an error of the request.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from vcli.runtime.errors import RequestError
from vcli.topology.errors import ConfigError

#: whatever a template can raise when messages are not as it expects them
_TEMPLATE_FAILURES = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    RecursionError,
)


class _GenerationBlock(jinja2.ext.Extension):
    """Accepts `{% generation %}...{% endgeneration %}`, which only marks text for training."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares an instance variable

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, > and & for HTML, which a model must not see.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlock, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """A compiled chat template and the names of special tokens that it may use."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, origin: str) -> None:
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"the chat template of {origin} does not parse, line {error.lineno}: {error}",
                hint="mend the template, or download the model again",
            ) from error
        except (jinja2.TemplateError, RecursionError, ValueError, SyntaxError) as error:
            raise ConfigError(
                f"the chat template of {origin} cannot be compiled: {error}",
                hint="mend the template, or download the model again",
            ) from error
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text for `messages`; `arguments` are further variables of the template.

        Raises:
            RequestError: no messages, or the template refused them (roles out of order, say).
        """
        if not messages:
            raise RequestError("messages must hold at least one message", parameter="messages")
        variables: dict[str, Any] = {"tools": None, "documents": None, **self._special_tokens}
        variables.update(arguments or {})
        plain = [
            {key: value for key, value in message.items() if value is not None}
            for message in messages
        ]
        try:
            return self._template.render(
                variables, messages=plain, add_generation_prompt=add_generation_prompt
            )
        except _TEMPLATE_FAILURES as error:
            raise RequestError(
                f"the model's chat template refused the messages: {error}", parameter="messages"
            ) from error
