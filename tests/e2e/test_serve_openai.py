"""The embedded demo through OpenAI's own client."""

import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.support.serving import Server, serving

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NAME = "SmolLM2-135M-Instruct"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Iterator[Server]:
    """`vcli serve` without a model name: the demo itself."""
    with serving(
        ["--max-model-len", "2048", "--kv-cache-memory", "128M"],
        folder=tmp_path_factory.mktemp("demo"),
    ) as running:
        running.wait_serving()
        yield running


@pytest.fixture
def url(server: Server) -> str:
    return server.wait_serving()


@pytest.fixture
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


def test_chat_answers_the_question(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,
        max_tokens=32,
    )
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens > 10


def test_streamed_chat_is_the_same_text_in_pieces(client: openai.OpenAI) -> None:
    question = [{"role": "user", "content": "Name three colours."}]
    options = {"model": NAME, "messages": question, "temperature": 0, "max_tokens": 24}
    whole = client.chat.completions.create(**options)
    pieces = list(
        client.chat.completions.create(
            **options, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert text == whole.choices[0].message.content
    assert sum(1 for piece in pieces if piece.choices and piece.choices[0].delta.content) > 3
    assert pieces[-1].usage == whole.usage or (
        pieces[-1].usage is not None
        and pieces[-1].usage.completion_tokens == whole.usage.completion_tokens
    )


def test_completion_ends_at_stop_string_and_at_max_tokens(client: openai.OpenAI) -> None:
    counted = {"model": NAME, "prompt": "1, 2, 3, 4,", "temperature": 0}
    stopped = client.completions.create(**counted, max_tokens=40, stop=["8"])
    assert "7" in stopped.choices[0].text
    assert "8" not in stopped.choices[0].text
    assert stopped.choices[0].finish_reason == "stop"
    cut = client.completions.create(**counted, max_tokens=5)
    assert cut.choices[0].finish_reason == "length"
    assert cut.usage is not None
    assert cut.usage.completion_tokens == 5


def test_n_gives_different_choices_and_a_seed_gives_them_again(client: openai.OpenAI) -> None:
    options = {"model": NAME, "prompt": "My favourite animal is", "max_tokens": 12, "n": 3}
    first = client.completions.create(**options, temperature=1.0, seed=7)
    again = client.completions.create(**options, temperature=1.0, seed=7)
    other = client.completions.create(**options, temperature=1.0, seed=8)
    texts = [choice.text for choice in first.choices]
    assert sorted(choice.index for choice in first.choices) == [0, 1, 2]
    assert len(set(texts)) > 1
    assert texts == [choice.text for choice in again.choices]
    assert texts != [choice.text for choice in other.choices]


@pytest.mark.parametrize("prompt", ["🙂🙃🙂🙃🙂🙃🙂🙃", "世界你好 世界你好 世界你好 世界"])
def test_logprobs_of_emoji_and_chinese_name_bytes_and_fit_the_text(
    client: openai.OpenAI, prompt: str
) -> None:
    options = {
        "model": NAME, "prompt": prompt, "temperature": 0, "max_tokens": 24, "logprobs": 5,
        "extra_body": {"ignore_eos": True},
    }  # fmt: skip
    (choice,) = client.completions.create(**options).choices
    columns = choice.logprobs
    assert columns is not None
    assert any(token.startswith("bytes:") for token in columns.tokens)
    assert columns.text_offset == sorted(columns.text_offset)
    for token, offset, likely in zip(
        columns.tokens, columns.text_offset, columns.top_logprobs, strict=True
    ):
        assert token in likely
        assert len(likely) == 5
        if not token.startswith("bytes:"):
            assert choice.text[offset:].startswith(token)
    parts = [part.choices[0] for part in client.completions.create(**options, stream=True)]
    streamed = [part.logprobs for part in parts if part.logprobs is not None]
    assert "".join(part.text for part in parts) == choice.text
    assert [offset for part in streamed for offset in part.text_offset] == columns.text_offset
    assert [token for part in streamed for token in part.tokens] == columns.tokens


def test_models_and_health_and_ready(client: openai.OpenAI, url: str) -> None:
    assert [model.id for model in client.models.list()] == [NAME]
    assert httpx.get(f"{url}/health").status_code == 200
    assert httpx.get(f"{url}/ready").status_code == 200


def test_wrong_requests_are_400_and_name_the_field(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model=NAME, prompt="x", temperature=-1)
    with pytest.raises(openai.BadRequestError, match="2048"):
        client.completions.create(model=NAME, prompt=[1] * 3000)
    with pytest.raises(openai.NotFoundError, match="gpt-none"):
        client.completions.create(model="gpt-none", prompt="x")


@pytest.mark.parametrize("is_streaming", [True, False])
def test_a_client_that_leaves_gives_its_blocks_back_within_a_second(
    server: Server, url: str, is_streaming: bool
) -> None:
    free = "vcli:kv_blocks_free"
    before = server.metrics(url)[free]
    body = {
        "model": NAME, "prompt": "Once upon a time", "max_tokens": 2000, "ignore_eos": True,
        "stream": is_streaming,
    }  # fmt: skip
    timeout = httpx.Timeout(30, read=30 if is_streaming else 3)
    with httpx.Client(timeout=timeout) as leaving:
        if is_streaming:
            with leaving.stream("POST", f"{url}/v1/completions", json=body) as answer:
                lines = answer.iter_lines()
                while not next(lines):
                    pass
                while server.metrics(url)[free] >= before:
                    next(lines)
        else:
            with pytest.raises(httpx.ReadTimeout):
                leaving.post(f"{url}/v1/completions", json=body)
    left_at = time.monotonic()
    while server.metrics(url)[free] != before:
        assert time.monotonic() - left_at < 1.0
    assert server.metrics(url)["vcli:num_requests_running"] == 0


def test_a_gguf_file_is_served_the_same_way(tmp_path: Path, demo_gguf: Path) -> None:
    arguments = [str(demo_gguf), "--max-model-len", "512", "--kv-cache-memory", "64M"]
    environ = {"VCLI_HOME": str(tmp_path / "home")}
    with serving(arguments, folder=tmp_path, environ=environ) as server:
        url = server.wait_serving()
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
        answer = client.chat.completions.create(
            model=demo_gguf.stem,
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            temperature=0,
            max_tokens=32,
        )
        assert "Paris" in (answer.choices[0].message.content or "")
