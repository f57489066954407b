"""OpenAI's requests as pydantic models, with vLLM's further sampling fields.

Fields that nobody knows are ignored, as OpenAI-compatible servers do. Fields that ask for something
vcli does not do are refused by name, unless they ask for nothing (`tools: []`). A field that is
null counts as left out.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, StrictInt, model_validator

from vcli.runtime.engine.input_processor import ChatPrompt
from vcli.runtime.engine.output_processor import OutputOptions
from vcli.runtime.errors import RequestError
from vcli.runtime.sampling_params import SamplingParams
from vcli.runtime.server.chat_messages import ChatMessage, chat_prompt
from vcli.runtime.server.json_values import Integer, Number, shown

#: field -> values that ask for nothing (besides null)
_UNSUPPORTED_CHAT: Mapping[str, tuple[Any, ...]] = {
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": ([], ["text"]),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "continue_final_message": (False,),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "add_special_tokens": (False,),
}
_UNSUPPORTED_COMPLETION: Mapping[str, tuple[Any, ...]] = {
    "echo": (False,),
    "suffix": ("",),
    "response_format": ({"type": "text"},),
    "prompt_embeds": (),
}
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "logit_bias": ({},),
    "best_of": (1,),
    "use_beam_search": (False,),
    "prompt_logprobs": (),
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": ([],),
    "guided_grammar": (),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "logits_processors": ([],),
    "truncate_prompt_tokens": (),
    "priority": (0,),
    "cache_salt": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "structural_tag": (),
    "json_schema": (),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "spaces_between_special_tokens": (True,),
    "detokenize": (True,),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
    "kv_transfer_params": ({},),
    "vllm_xargs": ({},),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
}
_PROMPT_FORMS = (
    "must be a string, a list of strings, a list of token ids or a list of lists of token ids"
)
MAX_PROMPTS = 2048  # of one request, each choice of each prompt


class _Body(BaseModel):
    """A JSON object in which null is the same as nothing."""

    @model_validator(mode="before")
    @classmethod
    def _leave_out_nulls(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if value is not None}


class StreamOptions(_Body):
    """`include_usage` adds a last chunk with the token counts."""

    include_usage: bool = False


_Stop = str | list[str]


def _checked_stop(value: object) -> _Stop | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(text, str) for text in value):
        return value
    raise ValueError("must be a string or a list of strings")


class _GenerationRequest(_Body):
    """What chat and text completions share."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    n: Integer = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Integer | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    seed: Integer | None = None
    stop: Annotated[_Stop | None, PlainValidator(_checked_stop)] = None
    stop_token_ids: list[StrictInt] | None = None
    ignore_eos: bool = False
    min_tokens: Integer = 0
    max_tokens: Integer | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    def output_options(self) -> OutputOptions:
        """How the text is shown."""
        return OutputOptions(
            include_stop_str_in_output=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
        )

    def _check(self, unsupported: Mapping[str, tuple[Any, ...]]) -> None:
        for name, value in (self.model_extra or {}).items():
            neutral = unsupported.get(name, _UNSUPPORTED.get(name))
            if neutral is not None and value is not None and value not in neutral:
                raise RequestError(
                    f"{name}={shown(value)} is not supported", parameter=name, hint="leave it out"
                )
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is for stream=true only", parameter="stream_options")

    def _sampling(
        self, defaults: Mapping[str, float], *, max_tokens: int | None, logprobs: int | None
    ) -> SamplingParams:
        return SamplingParams(
            temperature=_first(self.temperature, defaults.get("temperature"), 1.0),
            top_p=_first(self.top_p, defaults.get("top_p"), 1.0),
            top_k=_top_k(self.top_k, defaults),
            min_p=_first(self.min_p, defaults.get("min_p"), 0.0),
            repetition_penalty=_first(
                self.repetition_penalty, defaults.get("repetition_penalty"), 1.0
            ),
            presence_penalty=_first(self.presence_penalty, 0.0),
            frequency_penalty=_first(self.frequency_penalty, 0.0),
            seed=self.seed,
            stop=_stop_strings(self.stop),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_tokens,
            max_tokens=max_tokens,
            logprobs=logprobs,
        )


class ChatCompletionRequest(_GenerationRequest):
    """Body of POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: Integer | None = None
    logprobs: bool | None = None
    top_logprobs: Integer | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    def check(self) -> None:
        """Raise RequestError for the first field that asks for what vcli does not do."""
        self._check(_UNSUPPORTED_CHAT)
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs=true", parameter="top_logprobs")

    def prompt(self) -> ChatPrompt:
        """The conversation, contents as plain text."""
        return chat_prompt(
            self.messages,
            add_generation_prompt=self.add_generation_prompt,
            arguments=self.chat_template_kwargs,
        )

    def names(self) -> Mapping[str, str]:
        """What this client calls the fields that have other names within vcli."""
        names = {"prompt": "messages", "logprobs": "top_logprobs"}
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        return names

    def sampling(self, defaults: Mapping[str, float]) -> SamplingParams:
        """The sampling options; `defaults` fill those left open."""
        limit = (
            self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        )
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self._sampling(defaults, max_tokens=limit, logprobs=logprobs)


_CompletionPrompt = str | list[int] | list[str] | list[list[int]]


def _checked_prompt(value: object) -> _CompletionPrompt:
    """`value` when it is a prompt of one of the four forms, exactly (`true` is no token id)."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError(_PROMPT_FORMS)
    if _are_token_ids(value):
        return value
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"has {len(value)} prompts, at most {MAX_PROMPTS} in one request")
    if all(isinstance(entry, str) for entry in value):
        return value
    if all(isinstance(entry, list) and _are_token_ids(entry) for entry in value):
        return value
    raise ValueError(_PROMPT_FORMS)


def _are_token_ids(entries: list[Any]) -> bool:
    return all(type(entry) is int for entry in entries)


class CompletionRequest(_GenerationRequest):
    """Body of POST /v1/completions; without `max_tokens` it is 16, as OpenAI has it."""

    prompt: Annotated[_CompletionPrompt, PlainValidator(_checked_prompt)] = Field(
        default=None, validate_default=True
    )
    logprobs: Integer | None = None
    add_special_tokens: bool = True

    def check(self) -> None:
        """Raise RequestError for the first field that asks for what vcli does not do."""
        self._check(_UNSUPPORTED_COMPLETION)

    def prompts(self) -> list[str | list[int]]:
        """The prompts; a single one may be given without a list."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if all(isinstance(entry, int) for entry in self.prompt):
            return [[entry for entry in self.prompt if isinstance(entry, int)]]
        return [entry for entry in self.prompt if not isinstance(entry, int)]

    def sampling(self, defaults: Mapping[str, float]) -> SamplingParams:
        """The sampling options; `defaults` fill those left open."""
        return self._sampling(defaults, max_tokens=self.max_tokens, logprobs=self.logprobs)


class TokenizeRequest(_Body):
    """Body of POST /tokenize: `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


class DetokenizeRequest(_Body):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: list[StrictInt]


def _stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _top_k(value: int | None, defaults: Mapping[str, float]) -> int:
    chosen = int(_first(value, defaults.get("top_k"), 0))
    return 0 if chosen == -1 else chosen  # vLLM's and Hugging Face's older word for "all"


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)
