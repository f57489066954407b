"""Sampling options of one request and their limits."""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import msgspec

from vcli.runtime.errors import RequestError

#: counts are int32 in the workers' tensors
MAX_COUNT: Final = 2**31 - 1
_MAX_STOP_STRINGS: Final = 64
_MAX_STOP_CHARACTERS: Final = 4096  # of one; each new piece of text is searched for all
_MAX_STOP_TOKEN_IDS: Final = 1024
#: no field has another name in the request
OWN_NAMES: Final[Mapping[str, str]] = MappingProxyType({})


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the next token is chosen and when a request ends.

    `temperature=0` is greedy. `top_k=0` and `top_p=1` and `min_p=0` keep every token.
    `max_tokens=None` means up to the model's context. Penalties are OpenAI's (presence, frequency:
    subtracted, over generated tokens) and Hugging Face's (repetition: divides or multiplies, over
    prompt and generated tokens). `stop` strings are searched by the front end, which also holds
    them back from the text; `stop_token_ids` end a request in the core.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change the logits."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    def verify(self, names: Mapping[str, str] = OWN_NAMES) -> None:
        """Check every limit; `names` are those of fields that the client calls otherwise.

        Raises:
            RequestError: a value out of range; names the field, the value and the limit.
        """
        max_tokens = names.get("max_tokens", "max_tokens")
        logprobs = names.get("logprobs", "logprobs")
        _in_range("temperature", self.temperature, 0.0, 100.0)
        _in_range("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _in_range("min_p", self.min_p, 0.0, 1.0)
        _in_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _in_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _in_range("repetition_penalty", self.repetition_penalty, 0.0, 100.0, low_open=True)
        _is_count("top_k", self.top_k, 0)
        _is_count(max_tokens, self.max_tokens, 1)
        _is_count("min_tokens", self.min_tokens, 0)
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise RequestError(f"seed={_shown(self.seed)} must fit 64 bits", parameter="seed")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens={self.min_tokens} is above {max_tokens}={self.max_tokens}",
                parameter="min_tokens",
            )
        if self.logprobs is not None and not 0 <= self.logprobs <= 20:
            raise RequestError(
                f"{logprobs}={_shown(self.logprobs)} must be between 0 and 20", parameter=logprobs
            )
        self._verify_stop()

    def _verify_stop(self) -> None:
        _not_more("stop", len(self.stop), _MAX_STOP_STRINGS, "strings")
        for text in self.stop:
            if not text:
                raise RequestError("stop must not hold an empty string", parameter="stop")
            _not_more("stop", len(text), _MAX_STOP_CHARACTERS, "characters in one string")
            check_text(text, parameter="stop")
        _not_more("stop_token_ids", len(self.stop_token_ids), _MAX_STOP_TOKEN_IDS, "ids")
        for number in self.stop_token_ids:
            _is_count("stop_token_ids", number, 0)


def check_text(text: str, *, parameter: str) -> None:
    """Raise RequestError for half of a surrogate pair, which no tokenizer and no UTF-8 has."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{parameter}: character {error.start} is U+{ord(text[error.start]):04X}, "
            "half of a surrogate pair and no text",
            parameter=parameter,
            hint="cut text between characters, not between UTF-16 units",
        ) from error


def _in_range(name: str, value: float, low: float, high: float, *, low_open: bool = False) -> None:
    inside = (low < value if low_open else low <= value) and value <= high
    if not inside or math.isnan(value):
        bound = "above" if low_open else "at least"
        raise RequestError(
            f"{name}={value} must be {bound} {low:g} and at most {high:g}", parameter=name
        )


def _is_count(name: str, value: int | None, low: int) -> None:
    if value is not None and not low <= value <= MAX_COUNT:
        raise RequestError(
            f"{name}={_shown(value)} must be at least {low} and at most {MAX_COUNT}",
            parameter=name,
        )


def _not_more(name: str, count: int, limit: int, what: str) -> None:
    if count > limit:
        raise RequestError(f"{name} has {count} {what}, at most {limit}", parameter=name)


def _shown(value: int) -> str:
    """Python refuses to write a number of thousands of digits."""
    return str(value) if abs(value) < 10**40 else f"a number of {value.bit_length()} bits"
