"""Prompts to `EngineRequest`s: tokenise, fill in defaults, check every limit."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from vcli.runtime.engine.tokenizer import Tokenizer
from vcli.runtime.errors import RequestError
from vcli.runtime.messages import EngineRequest
from vcli.runtime.sampling_params import OWN_NAMES, SamplingParams, check_text

_MAX_CHOICES = 128
_LONG_TEXT = 4096  # characters; longer prompts are tokenised in a thread
_MAX_LONG_TEXTS = 2  # at once: each needs hundreds of times the memory of its text


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """A conversation; `arguments` are further variables of the chat template."""

    messages: Sequence[Mapping[str, Any]]
    add_generation_prompt: bool = True
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPrompt:
    """Plain text; the beginning-of-text token is added unless told otherwise."""

    text: str
    add_special_tokens: bool = True


Prompt = str | TextPrompt | ChatPrompt | Sequence[int] | Sequence[Mapping[str, Any]]


class InputProcessor:
    """Makes requests that the engine core can run without further checks."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        max_model_len: int,
        vocab_size: int | None = None,
        default_sampling: Mapping[str, float] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.vocab_size = tokenizer.vocab_size if vocab_size is None else vocab_size
        self.default_sampling = dict(default_sampling or {})
        self._long_texts = asyncio.Semaphore(_MAX_LONG_TEXTS)
        longest = tokenizer.max_token_bytes
        #: no more bytes of text can be max_model_len tokens; None where tokens have no limit
        self._max_text_bytes = None if longest is None else max_model_len * longest

    async def tokenize(self, prompt: Prompt) -> list[int]:
        """Token ids of `prompt`; a long text does not hold up the event loop.

        Raises:
            RequestError: the text is no valid text or cannot fit whatever its tokens are; the chat
                template is missing or refused the messages.
        """
        if isinstance(prompt, str):
            prompt = TextPrompt(text=prompt)
        elif isinstance(prompt, Sequence):
            messages = [entry for entry in prompt if isinstance(entry, Mapping)]
            if not messages:
                return [entry for entry in prompt if isinstance(entry, int)]
            prompt = ChatPrompt(messages=messages)
        if isinstance(prompt, TextPrompt):
            tokenize, size = partial(self._tokenize_text, prompt), len(prompt.text)
        else:
            tokenize = partial(self._tokenize_chat, prompt)
            size = _chat_size(prompt)
        if size <= _LONG_TEXT:
            return tokenize()
        async with self._long_texts:
            return await asyncio.to_thread(tokenize)

    def _tokenize_chat(self, prompt: ChatPrompt) -> list[int]:
        text = self.tokenizer.render_messages(
            prompt.messages,
            add_generation_prompt=prompt.add_generation_prompt,
            arguments=prompt.arguments,
        )
        self._check_text(text, "messages")
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _tokenize_text(self, prompt: TextPrompt) -> list[int]:
        self._check_text(prompt.text, "prompt")
        return self.tokenizer.encode(prompt.text, add_special_tokens=prompt.add_special_tokens)

    def _check_text(self, text: str, parameter: str) -> None:
        check_text(text, parameter=parameter)
        num_bytes = len(text.encode())
        if self._max_text_bytes is not None and num_bytes > self._max_text_bytes:
            raise RequestError(
                f"{parameter} has {num_bytes} bytes of text, which cannot fit: "
                f"max_model_len={self.max_model_len} tokens hold at most "
                f"{self._max_text_bytes} bytes",
                parameter=parameter,
                hint="shorten the prompt, or serve with a higher --max-model-len",
            )

    def make_requests(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        num_choices: int = 1,
        default_max_tokens: int | None = None,
        names: Mapping[str, str] = OWN_NAMES,
    ) -> list[EngineRequest]:
        """One request per choice; the choices of a seeded request have seeds seed, seed+1, ...

        Without max_tokens the limit is what fits, at most `default_max_tokens`. `names` are what
        the client calls `prompt`, `max_tokens` and `logprobs`, where it calls them otherwise.

        Raises:
            RequestError: prompt empty, too long or with unknown ids, or a sampling option out of
                its range.
        """
        if not 1 <= num_choices <= _MAX_CHOICES:
            raise RequestError(
                f"n={num_choices} must be between 1 and {_MAX_CHOICES}", parameter="n"
            )
        sampling.verify(names)
        token_ids = list(prompt_token_ids)
        self._check_prompt(token_ids, names.get("prompt", "prompt"))
        self.check_token_ids(sampling.stop_token_ids, parameter="stop_token_ids")
        sampling = msgspec.structs.replace(
            sampling,
            max_tokens=self._max_tokens(
                len(token_ids),
                sampling,
                default_max_tokens,
                names.get("max_tokens", "max_tokens"),
            ),
        )
        requests = []
        for choice in range(num_choices):
            own = sampling
            if sampling.seed is not None and choice:
                seed = sampling.seed + choice
                # The upper end of the range wraps, so that every seed allows every n.
                own = msgspec.structs.replace(sampling, seed=seed - 2**64 * (seed >= 2**64))
            requests.append(
                EngineRequest(
                    request_id=request_id if num_choices == 1 else f"{request_id}-{choice}",
                    prompt_token_ids=token_ids,
                    sampling=own,
                    eos_token_ids=self.tokenizer.eos_token_ids,
                )
            )
        return requests

    def _check_prompt(self, token_ids: list[int], parameter: str) -> None:
        if not token_ids:
            raise RequestError(f"{parameter}: no tokens, at least 1 is needed", parameter=parameter)
        longest = self.max_model_len - 1
        if len(token_ids) > longest:
            raise RequestError(
                f"{parameter} has {len(token_ids)} tokens, at most {longest} fit "
                f"(max_model_len={self.max_model_len}, one token is left for the answer)",
                parameter=parameter,
                hint="shorten the prompt, or serve with a higher --max-model-len",
            )
        self.check_token_ids(token_ids, parameter=parameter)

    def check_token_ids(self, token_ids: Sequence[int], *, parameter: str) -> None:
        """Raise RequestError for an id that the model does not have."""
        if token_ids and (min(token_ids) < 0 or max(token_ids) >= self.vocab_size):
            wrong = next(t for t in token_ids if not 0 <= t < self.vocab_size)
            raise RequestError(
                f"{parameter}: token id {wrong} is outside the vocabulary "
                f"(0 to {self.vocab_size - 1})",
                parameter=parameter,
            )

    def _max_tokens(
        self, num_prompt_tokens: int, sampling: SamplingParams, default: int | None, name: str
    ) -> int:
        remaining = self.max_model_len - num_prompt_tokens
        if sampling.max_tokens is None:
            limit = remaining if default is None else min(default, remaining)
        elif sampling.max_tokens > remaining:
            raise RequestError(
                f"{name}={sampling.max_tokens} and a prompt of {num_prompt_tokens} tokens "
                f"are more than max_model_len={self.max_model_len}",
                parameter=name,
                hint=f"ask for at most {remaining} tokens",
            )
        else:
            limit = sampling.max_tokens
        if sampling.min_tokens > limit:
            raise RequestError(
                f"min_tokens={sampling.min_tokens} is above the {limit} tokens that fit",
                parameter="min_tokens",
            )
        return limit


def _chat_size(prompt: ChatPrompt) -> int:
    """Characters of the contents; anything else in the conversation counts as long."""
    size = _LONG_TEXT * bool(prompt.arguments) + len(prompt.messages)
    for message in prompt.messages:
        content = message.get("content")
        if isinstance(content, str) and set(message) <= {"role", "content"}:
            size += len(content)
        else:
            size += _LONG_TEXT
    return size
