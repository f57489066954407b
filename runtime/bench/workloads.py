"""What the engine benchmark asks: three fixed sets of requests, or as many alike as wanted.

The fixed sets come from one random sequence, so that every engine that draws them gets the same
tokens and lengths.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from vcli.topology.errors import ConfigError

WORKLOAD_NAMES: Final = ("one-stream", "batch32", "mixed256")

_SEED: Final = 0
#: token ids of the fixed sets, both ends included
_LOWEST_ID, _HIGHEST_ID = 10, 9000
_MAX_REQUESTS: Final = 100_000
_MAX_LENGTH: Final = 2**24


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """A prompt, and how many tokens are generated for it."""

    prompt_token_ids: list[int]
    output_tokens: int

    @property
    def total_tokens(self) -> int:
        """Prompt and output."""
        return len(self.prompt_token_ids) + self.output_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests that are sent at once. `temperature` 0 is greedy."""

    name: str
    requests: tuple[BenchRequest, ...]
    temperature: float = 0.0

    @property
    def prompt_tokens(self) -> int:
        """Of all requests."""
        return sum(len(request.prompt_token_ids) for request in self.requests)

    @property
    def output_tokens(self) -> int:
        """Of all requests."""
        return sum(request.output_tokens for request in self.requests)

    def check_fits(self, *, vocab_size: int, max_model_len: int) -> None:
        """Whether a model can run it.

        Raises:
            ConfigError: a token id or a length is beyond the model.
        """
        highest = max(max(request.prompt_token_ids) for request in self.requests)
        if highest >= vocab_size:
            raise ConfigError(
                f"workload {self.name} has token ids up to {highest}, the model's vocabulary has "
                f"{vocab_size} tokens",
                hint="--num-prompts 8 --input-len 64 --output-len 64 takes ids that it has",
            )
        longest = max(request.total_tokens for request in self.requests)
        if longest > max_model_len:
            raise ConfigError(
                f"workload {self.name} has requests of {longest} tokens, the engine takes "
                f"{max_model_len}",
                hint=f"--max-model-len {longest} where the model allows it, or shorter requests: "
                "--num-prompts 8 --input-len 64 --output-len 64",
            )


def fixed_workloads(name: str) -> tuple[Workload, ...]:
    """The set `name`, or all of them for `all`.

    `one-stream`: 128 tokens in, 256 out. `batch32`: 32 of 512 in, 256 out. `mixed256`: 256 of
    100-1024 in and out, sampled at temperature 0.6.

    Raises:
        ConfigError: there is no such set.
    """
    check_name(name)
    # One sequence for all three: what is not wanted is drawn all the same.
    draw = random.Random(_SEED)
    one = (_request(draw, 128, 256),)
    batch = tuple(_request(draw, 512, 256) for _ in range(32))
    mixed = tuple(_mixed_request(draw) for _ in range(256))
    drawn = (
        Workload(name="one-stream", requests=one),
        Workload(name="batch32", requests=batch),
        Workload(name="mixed256", requests=mixed, temperature=0.6),
    )
    return tuple(workload for workload in drawn if name in ("all", workload.name))


def check_name(name: str) -> None:
    """Whether there is such a set.

    Raises:
        ConfigError: there is none.
    """
    if name not in (*WORKLOAD_NAMES, "all"):
        raise ConfigError(
            f"--workload {name!r} is unknown", hint=f"--workload {', '.join(WORKLOAD_NAMES)}, all"
        )


def equal_workload(
    *, num_prompts: int, input_len: int, output_len: int, vocab_size: int
) -> Workload:
    """`num_prompts` requests of equal lengths with random token ids, greedy."""
    draw = random.Random(_SEED)
    highest = vocab_size - 1
    lowest = min(_LOWEST_ID, highest)
    return Workload(
        name=f"{num_prompts}x{input_len}+{output_len}",
        requests=tuple(
            BenchRequest([draw.randint(lowest, highest) for _ in range(input_len)], output_len)
            for _ in range(num_prompts)
        ),
    )


def check_counts(counts: Sequence[tuple[str, int]]) -> None:
    """Whether numbers of requests and lengths, by their flags, can be meant.

    Raises:
        ConfigError: one is below 1, or far beyond any machine.
    """
    for flag, value in counts:
        most = _MAX_REQUESTS if flag == "--num-prompts" else _MAX_LENGTH
        if not 1 <= value <= most:
            raise ConfigError(f"{flag} {value} must be 1 to {most}", hint=f"{flag} 64")


def _request(draw: random.Random, input_len: int, output_len: int) -> BenchRequest:
    return BenchRequest(
        [draw.randint(_LOWEST_ID, _HIGHEST_ID) for _ in range(input_len)], output_len
    )


def _mixed_request(draw: random.Random) -> BenchRequest:
    """The prompt's length, its tokens, then the output's length: the order is part of the set."""
    prompt = _request(draw, draw.randint(100, 1024), 0).prompt_token_ids
    return BenchRequest(prompt, draw.randint(100, 1024))
