"""Chat and text completions through OpenAI's own client and a real server."""

import math

import openai
import pytest

from tests.support.serving_core import NAME, Serving
from vcli.runtime.engine.tokenizer import Tokenizer

MESSAGES = [{"role": "user", "content": "Say hello"}]


def last_request(served: Serving):
    return served.core.requests[-1]


def test_chat_gives_text_reason_and_usage(served: Serving, tokenizer: Tokenizer, text: str) -> None:
    answer = served.client.chat.completions.create(model=NAME, messages=MESSAGES)
    (choice,) = answer.choices
    prompt = tokenizer.encode_messages(MESSAGES)
    assert (choice.message.role, choice.message.content) == ("assistant", text)
    assert choice.finish_reason == "stop"
    assert answer.model == NAME
    assert answer.id.startswith("chatcmpl-")
    assert last_request(served).prompt_token_ids == prompt
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == len(tokenizer.encode(text)) + 1
    assert answer.usage.total_tokens == len(prompt) + len(tokenizer.encode(text)) + 1
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 2


def test_streamed_chat_begins_with_the_role_and_ends_with_reason_and_usage(
    served: Serving, text: str
) -> None:
    chunks = list(
        served.client.chat.completions.create(
            model=NAME, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert [c.choices[0].finish_reason for c in chunks[:-1]][-1] == "stop"
    assert all(c.usage is None for c in chunks[:-1])
    assert chunks[-1].choices == []
    whole = served.client.chat.completions.create(model=NAME, messages=MESSAGES)
    assert chunks[-1].usage == whole.usage
    assert len({chunk.id for chunk in chunks}) == 1


def test_stream_without_usage_has_none_and_ends_with_done(served: Serving) -> None:
    body = {"model": NAME, "prompt": "x", "stream": True}
    with served.http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert all('"usage":null' in line for line in lines[:-1])


@pytest.mark.parametrize("stream", [False, True])
def test_completion_ends_at_the_stop_string_and_shows_nothing_of_it(
    served: Serving, stream: bool
) -> None:
    answer = served.client.completions.create(
        model=NAME, prompt="x", stop=["STOP"], max_tokens=50, stream=stream
    )
    parts = list(answer) if stream else [answer]
    assert "".join(part.choices[0].text for part in parts) == "Hello, wörld! 🙂 "
    assert parts[-1].choices[0].finish_reason == "stop"
    assert parts[-1].choices[0].stop_reason == "STOP"


def test_completion_defaults_to_sixteen_tokens_and_chat_to_what_fits(served: Serving) -> None:
    short = served.client.completions.create(model=NAME, prompt="x")
    assert short.usage is not None
    assert (short.usage.completion_tokens, short.choices[0].finish_reason) == (16, "length")
    served.client.chat.completions.create(model=NAME, messages=MESSAGES)
    request = last_request(served)
    assert request.sampling.max_tokens == 200 - len(request.prompt_token_ids)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_chat_obeys_both_names_of_its_limit(served: Serving, name: str) -> None:
    answer = served.client.chat.completions.create(model=NAME, messages=MESSAGES, **{name: 3})
    assert answer.choices[0].finish_reason == "length"
    assert last_request(served).sampling.max_tokens == 3


def test_n_choices_have_seeds_in_a_row_and_count_the_prompt_once(
    served: Serving, text: str
) -> None:
    answer = served.client.chat.completions.create(model=NAME, messages=MESSAGES, n=3, seed=40)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert {choice.message.content for choice in answer.choices} == {text}
    requests = served.core.requests[-3:]
    assert [request.sampling.seed for request in requests] == [40, 41, 42]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(requests[0].prompt_token_ids)


def test_sampling_options_reach_the_core(served: Serving) -> None:
    served.client.completions.create(
        model=NAME,
        prompt="x",
        temperature=0.25,
        top_p=0.5,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        max_tokens=9,
        seed=3,
        extra_body={
            "top_k": 7,
            "min_p": 0.1,
            "repetition_penalty": 1.5,
            "stop_token_ids": [250],
            "ignore_eos": True,
            "min_tokens": 2,
            "something_nobody_knows": 1,
        },
    )
    sampling = last_request(served).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.25, 0.5, 7)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.1, 1.5)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
    assert (sampling.max_tokens, sampling.min_tokens, sampling.seed) == (9, 2, 3)
    assert (sampling.stop_token_ids, sampling.ignore_eos) == ((250,), True)
    served.client.completions.create(model=NAME, prompt="x", extra_body={"top_k": -1})
    assert last_request(served).sampling.top_k == 0


def test_options_left_open_are_the_models_and_named_ones_win(start) -> None:
    with start(default_sampling={"temperature": 0.6, "top_k": 20}) as served:
        served.client.completions.create(model=NAME, prompt="x", temperature=0.0)
        assert last_request(served).sampling.temperature == 0.0
        assert last_request(served).sampling.top_k == 20


def test_several_prompts_in_every_form(served: Serving, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ab")
    for prompt, tokens in [
        ("ab", [ids]),
        (ids, [ids]),
        (["ab", "c"], [ids, tokenizer.encode("c")]),
        ([ids, [7]], [ids, [7]]),
    ]:
        answer = served.client.completions.create(model=NAME, prompt=prompt, n=2, max_tokens=2)
        sent = served.core.requests[-2 * len(tokens) :]
        assert [choice.index for choice in answer.choices] == list(range(2 * len(tokens)))
        assert [request.prompt_token_ids for request in sent] == [t for t in tokens for _ in "12"]
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == sum(len(t) for t in tokens)
        assert answer.usage.completion_tokens == 4 * len(tokens)


def test_message_content_as_text_parts_and_further_keys_reach_the_template(
    served: Serving, tokenizer: Tokenizer
) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    served.client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": parts}])
    same = tokenizer.encode_messages([{"role": "user", "content": "a\nb"}])
    assert last_request(served).prompt_token_ids == same


def test_chat_logprobs_have_tokens_bytes_and_alternatives(served: Serving, text: str) -> None:
    answer = served.client.chat.completions.create(
        model=NAME, messages=MESSAGES, logprobs=True, top_logprobs=2, max_tokens=20
    )
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content or []
    assert len(content) == 20
    data = b"".join(bytes(entry.bytes or []) for entry in content)
    assert text.encode().startswith(data)
    assert all(math.isclose(entry.logprob, -0.5) for entry in content)
    assert [len(entry.top_logprobs) for entry in content] == [2] * 20
    assert content[0].top_logprobs[1].logprob == -9999.0  # minus infinity is no JSON


@pytest.mark.parametrize("stream", [False, True])
def test_completion_logprobs_are_columns_with_offsets(served: Serving, stream: bool) -> None:
    answer = served.client.completions.create(
        model=NAME, prompt="x", logprobs=1, max_tokens=4, stream=stream
    )
    parts = list(answer) if stream else [answer]
    columns = [part.choices[0].logprobs for part in parts if part.choices[0].logprobs]
    tokens = [token for column in columns for token in column.tokens]
    offsets = [offset for column in columns for offset in column.text_offset]
    assert tokens == ["H", "e", "ll", "o"]
    assert offsets == [0, 1, 2, 4]
    assert [top for column in columns for top in column.top_logprobs][2] == {"ll": -0.5}


def test_streamed_choices_carry_their_index(served: Serving, text: str) -> None:
    chunks = list(
        served.client.completions.create(
            model=NAME, prompt=["a", "b"], n=2, stream=True, max_tokens=60
        )
    )
    for index in range(4):
        assert "".join(c.choices[0].text for c in chunks if c.choices[0].index == index) == text


def test_models_are_listed_and_found(served: Serving) -> None:
    assert [model.id for model in served.client.models.list()] == [NAME]
    assert served.client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError):
        served.client.models.retrieve("gpt-none")
