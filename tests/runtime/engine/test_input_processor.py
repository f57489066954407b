"""Limits and defaults of requests before they reach the engine core."""

import asyncio
from pathlib import Path

import pytest

from tests.support.tiny_tokenizer import tiny_tokenizer
from vcli.runtime.engine.input_processor import ChatPrompt, InputProcessor, Prompt, TextPrompt
from vcli.runtime.errors import RequestError
from vcli.runtime.messages import EngineRequest
from vcli.runtime.sampling_params import SamplingParams


@pytest.fixture
def inputs(tmp_path: Path) -> InputProcessor:
    return InputProcessor(tiny_tokenizer(tmp_path), max_model_len=20)


def make(inputs: InputProcessor, num_prompt_tokens: int, **options: object) -> EngineRequest:
    default = options.pop("default_max_tokens", None)
    (request,) = inputs.make_requests(
        "r", [1] * num_prompt_tokens, SamplingParams(**options), default_max_tokens=default
    )
    return request


def test_longest_prompt_leaves_one_token_and_a_longer_one_is_refused_with_both_numbers(
    inputs: InputProcessor,
) -> None:
    assert make(inputs, 19).sampling.max_tokens == 1
    with pytest.raises(RequestError, match=r"20 tokens, at most 19 fit") as raised:
        make(inputs, 20)
    assert raised.value.parameter == "prompt"


def test_max_tokens_defaults_to_what_is_left_or_to_the_smaller_default(
    inputs: InputProcessor,
) -> None:
    assert make(inputs, 5).sampling.max_tokens == 15
    assert make(inputs, 5, default_max_tokens=8).sampling.max_tokens == 8
    assert make(inputs, 15, default_max_tokens=8).sampling.max_tokens == 5
    assert make(inputs, 5, max_tokens=3, default_max_tokens=8).sampling.max_tokens == 3


@pytest.mark.parametrize(
    ("options", "parameter"),
    [
        ({"max_tokens": 16}, "max_tokens"),
        ({"min_tokens": 16}, "min_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_k": 2**31}, "top_k"),
        ({"top_k": 10**5000}, "top_k"),
        ({"min_tokens": 2**64}, "min_tokens"),
        ({"max_tokens": 2**64}, "max_tokens"),
        ({"seed": 10**5000}, "seed"),
        ({"logprobs": 10**5000}, "logprobs"),
        ({"stop_token_ids": (2**64,)}, "stop_token_ids"),
        ({"stop": ("a\ud800",)}, "stop"),
        ({"stop_token_ids": (259,)}, None),
        ({"stop_token_ids": (100000,)}, "stop_token_ids"),
    ],
)
def test_option_out_of_range_names_its_field(
    inputs: InputProcessor, options: dict[str, object], parameter: str | None
) -> None:
    if parameter is None:
        make(inputs, 5, **options)
        return
    with pytest.raises(RequestError) as raised:
        make(inputs, 5, **options)
    assert raised.value.parameter == parameter


@pytest.mark.parametrize("token_ids", [[], [-1], [1, 261]])
def test_empty_prompt_and_unknown_token_ids_are_refused(
    inputs: InputProcessor, token_ids: list[int]
) -> None:
    with pytest.raises(RequestError) as raised:
        inputs.make_requests("r", token_ids, SamplingParams())
    assert raised.value.parameter == "prompt"


def test_vocabulary_of_the_model_counts_not_that_of_the_tokenizer(tmp_path: Path) -> None:
    inputs = InputProcessor(tiny_tokenizer(tmp_path), max_model_len=20, vocab_size=300)
    assert inputs.make_requests("r", [299], SamplingParams())


def test_choices_have_ids_and_seeds_of_their_own(inputs: InputProcessor) -> None:
    requests = inputs.make_requests("r", [1], SamplingParams(seed=7), num_choices=3)
    assert [request.request_id for request in requests] == ["r-0", "r-1", "r-2"]
    assert [request.sampling.seed for request in requests] == [7, 8, 9]
    unseeded = inputs.make_requests("r", [1], SamplingParams(), num_choices=2)
    assert [request.sampling.seed for request in unseeded] == [None, None]
    highest = inputs.make_requests("r", [1], SamplingParams(seed=2**64 - 1), num_choices=2)
    assert highest[1].sampling.seed == 0
    negative = inputs.make_requests("r", [1], SamplingParams(seed=-5), num_choices=2)
    assert negative[1].sampling.seed == -4
    with pytest.raises(RequestError):
        inputs.make_requests("r", [1], SamplingParams(), num_choices=0)


def test_every_form_of_prompt_is_tokenised(inputs: InputProcessor) -> None:
    def tokens(prompt: Prompt) -> list[int]:
        return asyncio.run(inputs.tokenize(prompt))

    message = {"role": "user", "content": "hello"}
    hello = inputs.tokenizer.encode("hello")
    assert tokens("hello") == tokens(TextPrompt(text="hello")) == tokens(hello) == hello
    chat = inputs.tokenizer.encode_messages([message])
    assert tokens([message]) == tokens(ChatPrompt(messages=[message])) == chat
    long = "hello " * 2000  # goes through a thread
    roomy = InputProcessor(inputs.tokenizer, max_model_len=12000)
    assert asyncio.run(roomy.tokenize(long)) == inputs.tokenizer.encode(long)


@pytest.mark.parametrize("length", [1, 100_000])
def test_half_a_surrogate_pair_is_refused_in_every_form_of_prompt(
    inputs: InputProcessor, length: int
) -> None:
    text = "a" * length + "\ud800"
    for prompt in (text, TextPrompt(text=text), [{"role": "user", "content": text}]):
        with pytest.raises(RequestError, match="U\\+D800"):
            asyncio.run(inputs.tokenize(prompt))


def test_longest_text_that_can_fit_is_tokenised_and_one_byte_more_is_not(
    inputs: InputProcessor,
) -> None:
    limit = 20 * len("<|start|>")  # its longest token
    assert len(asyncio.run(inputs.tokenize("<|start|>" * 20))) == 20
    with pytest.raises(RequestError, match=rf"{limit + 1} bytes.*max_model_len=20 .*{limit} bytes"):
        asyncio.run(inputs.tokenize("<|start|>" * 20 + "a"))
