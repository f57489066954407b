"""What the server benchmark asks, and what one request gave."""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from vcli.topology.errors import ConfigError

Endpoint = Literal["completions", "chat"]
ENDPOINTS: Final[tuple[Endpoint, ...]] = ("completions", "chat")

_MAX_PROMPTS: Final = 1_000_000
_MAX_LENGTH: Final = 2**24
_MAX_TIMEOUT_S: Final = 7 * 86400
#: No answer comes in less, and a slower rate never ends.
_MIN_TIMEOUT_S: Final = 0.1
_MIN_RATE: Final = 0.001
#: about one token each, in most vocabularies
_WORDS: Final = (
    *("time", "day", "way", "world", "life", "hand", "part", "place", "work", "week"),
    *("case", "point", "number", "group", "problem", "fact", "water", "room", "area", "money"),
    *("story", "month", "right", "study", "book", "word", "business", "issue", "side", "kind"),
    *("head", "house", "service", "friend", "father", "power", "hour", "game", "line", "end"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeBenchSpec:
    """The load: `request_rate` requests a second on average (Poisson), inf: all at once.

    Raises:
        ConfigError: a number out of range, or an unknown endpoint.
    """

    endpoint: str
    num_prompts: int
    input_len: int
    output_len: int
    request_rate: float
    max_concurrency: int | None
    request_timeout_s: float
    temperature: float
    vocab_size: int
    seed: int

    def __post_init__(self) -> None:
        if self.endpoint not in ENDPOINTS:
            raise ConfigError(
                f"--endpoint {self.endpoint!r} is unknown", hint="--endpoint completions or chat"
            )
        for flag, value, lowest, highest in (
            ("--num-prompts", self.num_prompts, 1, _MAX_PROMPTS),
            ("--input-len", self.input_len, 1, _MAX_LENGTH),
            ("--output-len", self.output_len, 1, _MAX_LENGTH),
            ("--max-concurrency", self.max_concurrency or 1, 1, _MAX_PROMPTS),
            ("--vocab-size", self.vocab_size, 16, 2**31),
            ("--seed", self.seed, 0, 2**63 - 1),
        ):
            if not lowest <= value <= highest:
                raise ConfigError(
                    f"{flag} {value} must be {lowest} to {highest}", hint=f"{flag} {lowest}"
                )
        if self.max_concurrency == 0:
            raise ConfigError("--max-concurrency 0 must be at least 1", hint="leave it out")
        if not self.request_rate >= _MIN_RATE:
            raise ConfigError(
                f"--request-rate {self.request_rate:g} must be at least {_MIN_RATE:g} requests in "
                "a second",
                hint="--request-rate inf",
            )
        if not _MIN_TIMEOUT_S <= self.request_timeout_s <= _MAX_TIMEOUT_S:
            raise ConfigError(
                f"--request-timeout {self.request_timeout_s:g} must be at least "
                f"{_MIN_TIMEOUT_S:g} seconds and at most {_MAX_TIMEOUT_S:g}",
                hint="--request-timeout 600",
            )
        if not 0 <= self.temperature <= 100:
            raise ConfigError(
                f"--temperature {self.temperature:g} must be 0 to 100", hint="--temperature 0"
            )

    def start_times(self) -> Iterator[float]:
        """When each request is sent, in seconds from the beginning."""
        draw = random.Random(self.seed)
        now_s = 0.0
        for _ in range(self.num_prompts):
            yield now_s
            if math.isfinite(self.request_rate):
                now_s += draw.expovariate(self.request_rate)

    def token_prompt(self, index: int) -> list[int]:
        """The token ids of one prompt."""
        draw = random.Random(self.seed * _MAX_PROMPTS + index)
        return [draw.randrange(10, self.vocab_size) for _ in range(self.input_len)]

    def text_prompt(self, index: int) -> str:
        """The text of one prompt, of about as many tokens."""
        draw = random.Random(self.seed * _MAX_PROMPTS + index)
        return " ".join(draw.choice(_WORDS) for _ in range(self.input_len))


@dataclass(slots=True, kw_only=True, eq=False)
class RequestRecord:
    """One request. Times in seconds of the monotonic clock; `error` is empty for a success.

    `arrivals` are the times at which pieces of the answer came; several tokens may share one.
    """

    index: int
    sent_s: float
    arrivals: list[float]
    ended_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str = ""
    is_connection_lost: bool = False

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token."""
        return self.arrivals[0] - self.sent_s if self.arrivals else None

    @property
    def e2e_s(self) -> float:
        """Time to the end of the answer."""
        return self.ended_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time of an output token after the first; None for a single token."""
        if not self.arrivals or self.output_tokens < 2:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.output_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """Times between two pieces of the answer."""
        pairs = zip(self.arrivals, self.arrivals[1:], strict=False)
        return [after - before for before, after in pairs]
