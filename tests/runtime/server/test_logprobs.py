"""Log-probabilities of tokens that are parts of characters, through OpenAI's own client."""

from collections.abc import Iterator

import pytest
import tokenizers
from openai.types.completion_choice import CompletionChoice
from tokenizers import decoders, models, pre_tokenizers, trainers

from tests.support.fake_core import FakeCore
from tests.support.serving_core import NAME, Serving, serving_core
from vcli.runtime.engine.chat_template import ChatTemplate
from vcli.runtime.engine.tokenizer import Tokenizer

TEXT = "Hé 🙂🙃 日本語 👩‍🚀 END of 世界 🌍"
END = "<|end|>"


def trained_bpe() -> Tokenizer:
    """A byte-level BPE whose merges cut characters: a space with half an emoji is one token."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[END],
    )
    backend.train_from_iterator([" 🙂 🙃 🌍 👩 🚀 🎉", " 日本語 世界 上下 三七"] * 50, trainer)
    return Tokenizer(backend, eos_token_ids=[backend.token_to_id(END)])


def byte_fallback() -> Tokenizer:
    """As Llama 2's: a mark for the space, byte tokens for what has none of its own."""
    words = ["<unk>", END, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁of", "of", "H", "日"]
    vocabulary = {word: number for number, word in enumerate([*words, "E", "N", "D", "f", "o"])}
    merges = [("o", "f"), ("▁", "of")]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(content=" ", left=1)]
    )  # fmt: skip
    backend.add_special_tokens([END])
    return Tokenizer(backend, eos_token_ids=[backend.token_to_id(END)])


@pytest.fixture(scope="module", params=[trained_bpe, byte_fallback])
def served(request: pytest.FixtureRequest) -> Iterator[Serving]:
    """Answers with TEXT; every byte is among the likely tokens."""
    tokenizer = request.param()
    tokenizer.chat_template = ChatTemplate("{{ messages[0]['content'] }}", {}, origin="the test")
    core = FakeCore(lambda _: tokenizer.encode(TEXT))
    bytes_of = {n: tokenizer.token_bytes(n) for n in range(tokenizer.vocab_size)}
    core.likely = [n for n, data in bytes_of.items() if len(data) == 1 and data[0] >= 0xF0]
    with serving_core(core, tokenizer) as serving:
        yield serving


def choices(served: Serving, *, stream: bool, **options: object) -> list[CompletionChoice]:
    """The choices in their order, those of a stream put together."""
    options = {"model": NAME, "prompt": "x", "max_tokens": 100, "logprobs": 4, **options}
    answer = served.client.completions.create(**options, stream=stream)
    if not stream:
        return answer.choices
    joined: dict[int, CompletionChoice] = {}
    for part in answer:
        (choice,) = part.choices
        whole = joined.setdefault(choice.index, choice)
        if whole is not choice:
            whole.text += choice.text
            whole.finish_reason = choice.finish_reason
            if choice.logprobs is not None:
                for name in ("tokens", "text_offset", "token_logprobs", "top_logprobs"):
                    getattr(whole.logprobs, name).extend(getattr(choice.logprobs, name))
    return [joined[index] for index in sorted(joined)]


def data_of(token: str) -> bytes:
    if token.startswith("bytes:"):
        return bytes.fromhex(token.removeprefix("bytes:").replace("\\x", ""))
    return token.encode()


def check_offsets(choice: CompletionChoice, shown: str) -> None:
    """Each token begins in the character at its offset; those cut off stand at the end."""
    assert choice.text == shown
    data, columns = b"", choice.logprobs
    assert columns is not None
    for token, offset in zip(columns.tokens, columns.text_offset, strict=True):
        begun = len(data.decode(errors="ignore"))
        assert offset == min(begun, len(shown)), (token, offset, begun)
        data += data_of(token)
    assert columns.text_offset == sorted(columns.text_offset)


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_of_parts_of_characters_are_named_by_bytes_and_placed_in_the_text(
    served: Serving, stream: bool
) -> None:
    for choice in choices(served, stream=stream, n=2):
        check_offsets(choice, TEXT)
        tokens = choice.logprobs.tokens
        assert b"".join(map(data_of, tokens)) == TEXT.encode() + END.encode()
        assert sum(token.startswith("bytes:") for token in tokens) > 10
        assert not any("\ufffd" in token for token in tokens)


@pytest.mark.parametrize("stream", [False, True])
def test_no_likely_token_is_lost_among_those_without_text(served: Serving, stream: bool) -> None:
    for choice in choices(served, stream=stream):
        for token, likely in zip(choice.logprobs.tokens, choice.logprobs.top_logprobs, strict=True):
            assert len(likely) == 4
            assert likely[token] == -0.5
            assert sum(key.startswith("bytes:\\xf") for key in likely) >= 3


def test_the_sampled_token_is_there_also_when_it_is_not_asked_for(served: Serving) -> None:
    (choice,) = choices(served, stream=False, logprobs=0)
    pairs = zip(choice.logprobs.tokens, choice.logprobs.top_logprobs, strict=True)
    assert all(likely == {token: -0.5} for token, likely in pairs)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "shown"),
    [
        ("🙃", "Hé 🙂"),  # inside a run of bytes
        ("END of", TEXT.partition("END")[0]),  # over tokens that were held back
        ("🚀 EN", TEXT.partition("🚀")[0]),
        ("🌍🌍", TEXT),  # begins, and never comes
    ],
)
def test_stop_strings_leave_offsets_inside_the_text(
    served: Serving, stream: bool, stop: str, shown: str
) -> None:
    for choice in choices(served, stream=stream, stop=[stop], n=2):
        check_offsets(choice, shown)
        assert choice.finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("limit", range(1, 24))
def test_a_limit_inside_a_character_leaves_every_token_placed(
    served: Serving, stream: bool, limit: int
) -> None:
    (choice,) = choices(served, stream=stream, max_tokens=limit)
    columns = choice.logprobs
    assert len(columns.tokens) == limit
    assert columns.text_offset == sorted(columns.text_offset)
    assert all(0 <= offset <= len(choice.text) for offset in columns.text_offset)
    for token, offset in zip(columns.tokens, columns.text_offset, strict=True):
        if not token.startswith("bytes:"):
            assert choice.text[offset:].startswith(token)


@pytest.mark.parametrize("stream", [False, True])
def test_chat_tokens_have_their_exact_bytes_and_escapes_for_a_name(
    served: Serving, stream: bool
) -> None:
    answer = served.client.chat.completions.create(
        model=NAME, messages=[{"role": "user", "content": "H"}], logprobs=True, top_logprobs=3,
        stream=stream,
    )  # fmt: skip
    parts = [part.choices[0].logprobs for part in (answer if stream else [answer])]
    entries = [entry for part in parts if part is not None for entry in part.content]
    data = b"".join(bytes(entry.bytes) for entry in entries)
    assert data == TEXT.encode() + END.encode()
    for named in [each for entry in entries for each in (entry, *entry.top_logprobs)]:
        exact = bytes(named.bytes)
        try:
            assert named.token == exact.decode()
        except UnicodeDecodeError:
            assert named.token == "".join(f"\\x{byte:02x}" for byte in exact)
