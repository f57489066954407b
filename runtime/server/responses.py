"""OpenAI's response bodies, as msgspec structs: a streamed token costs microseconds to encode."""

from collections.abc import Sequence

import msgspec

from vcli.runtime.engine.output_processor import RequestOutput
from vcli.runtime.engine.tokenizer import Tokenizer
from vcli.runtime.messages import TokenLogprobs

_LOWEST_LOGPROB = -9999.0  # JSON has no infinity


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """`cached_tokens` came from the prefix cache."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Token counts of a whole response."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(msgspec.Struct, frozen=True):
    """A likely token at one place."""

    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(msgspec.Struct, frozen=True):
    """The token at one place, and the most likely ones."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of a chat choice."""

    content: list[ContentLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of a text completion, as columns."""

    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]


class AssistantMessage(msgspec.Struct, frozen=True):
    """The answer."""

    content: str
    role: str = "assistant"
    refusal: None = None


class Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a chunk adds to the answer."""

    role: str | None = None
    content: str | None = None


class ChatChoice(msgspec.Struct, frozen=True):
    """One answer."""

    index: int
    message: AssistantMessage
    finish_reason: str
    logprobs: ChatLogprobs | None = None
    stop_reason: str | int | None = None


class ChatChunkChoice(msgspec.Struct, frozen=True):
    """One answer's part of a chunk."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class CompletionChoice(msgspec.Struct, frozen=True):
    """One continuation, or its part of a chunk."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """Body of a chat completion."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: str = "chat.completion"


class ChatCompletionChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a streamed chat completion."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    object: str = "chat.completion.chunk"


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """Body of a text completion, or one event of a streamed one."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    object: str = "text_completion"


class UsageCounter:
    """Adds up the token counts of several choices; `num_choices` of them share one prompt."""

    def __init__(self, num_choices: int) -> None:
        self._num_choices = num_choices
        self._prompt: dict[int, tuple[int, int]] = {}
        self._generated: dict[int, int] = {}

    def count(self, output: RequestOutput) -> None:
        """Take the numbers of an output."""
        place = output.index // self._num_choices
        _, cached = self._prompt.get(place, (0, 0))
        # The later choices of one prompt find it cached by the first: that is no saving.
        if output.index % self._num_choices == 0:
            cached = output.num_cached_tokens
        self._prompt[place] = (output.num_prompt_tokens, cached)
        self._generated[output.index] = output.num_generated_tokens

    def usage(self) -> Usage:
        """The sums."""
        prompt = sum(tokens for tokens, _ in self._prompt.values())
        generated = sum(self._generated.values())
        cached = sum(tokens for _, tokens in self._prompt.values())
        return Usage(prompt, generated, prompt + generated, PromptTokensDetails(cached))


def chat_logprobs(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprobs] | None
) -> ChatLogprobs | None:
    """The log-probabilities of some tokens, as a chat completion shows them."""
    if entries is None:
        return None
    content = []
    for entry in entries:
        top = [
            TopLogprob(*_chat_token(tokenizer, token, value))
            for token, value in zip(entry.top_token_ids, entry.top_logprobs, strict=True)
        ]
        content.append(ContentLogprob(*_chat_token(tokenizer, entry.token_id, entry.logprob), top))
    return ChatLogprobs(content)


def completion_logprobs(
    tokenizer: Tokenizer,
    entries: Sequence[TokenLogprobs] | None,
    text_offsets: Sequence[int],
) -> CompletionLogprobs | None:
    """The log-probabilities of some tokens, as a text completion shows them.

    The sampled token is always among the most likely ones, as the last where it is not one.
    """
    if entries is None:
        return None
    result = CompletionLogprobs([*text_offsets], [], [], [])
    for entry in entries:
        likely = dict(zip(entry.top_token_ids, entry.top_logprobs, strict=True))
        likely.setdefault(entry.token_id, entry.logprob)
        result.token_logprobs.append(_finite(entry.logprob))
        result.tokens.append(_label(tokenizer.token_bytes(entry.token_id)))
        result.top_logprobs.append(_by_label(tokenizer, likely, first=entry.token_id))
    return result


def _chat_token(
    tokenizer: Tokenizer, token_id: int, logprob: float
) -> tuple[str, float, list[int]]:
    data = tokenizer.token_bytes(token_id)
    return _text_of(data) or _escaped(data), _finite(logprob), [*data]


def _by_label(tokenizer: Tokenizer, likely: dict[int, float], *, first: int) -> dict[str, float]:
    """`first` has its label in any case; another token of the same bytes is named by its id."""
    labels = {token: _label(tokenizer.token_bytes(token)) for token in likely}
    owners = {labels[first]: first}
    for token, label in labels.items():
        if owners.setdefault(label, token) != token:
            labels[token] = f"token_id:{token}"
    return {labels[token]: _finite(logprob) for token, logprob in likely.items()}


def _label(data: bytes) -> str:
    """A token of a text completion: its text, `bytes:\\xf0\\x9f` for a part of a character."""
    text = _text_of(data)
    return f"bytes:{_escaped(data)}" if text is None else text


def _text_of(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _escaped(data: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST_LOGPROB)
