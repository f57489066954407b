"""Offsets of tokens in the text of a request, whatever bytes the tokens are."""

from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.tiny_tokenizer import END, tiny_tokenizer
from vcli.runtime.engine.output_processor import OutputOptions, OutputProcessor, SilentObserver
from vcli.runtime.engine.tokenizer import Tokenizer
from vcli.runtime.messages import EngineOutput, EngineRequest, TokenLogprobs
from vcli.runtime.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def run(
    tokenizer: Tokenizer, tokens: Sequence[int], *, step: int, stop: Sequence[str] = ()
) -> tuple[str, list[int], list[int], list[tuple[int, int]]]:
    """Text, ids and offsets; and for each output the length shown and the highest offset."""
    processor = OutputProcessor(tokenizer, observer=SilentObserver())
    sampling = SamplingParams(logprobs=0, stop=tuple(stop), max_tokens=len(tokens))
    request = EngineRequest(request_id="r", prompt_token_ids=[1], sampling=sampling)
    stream = processor.add([request], OutputOptions())
    text, ids, offsets, shown = "", [], [], []
    for start in range(0, len(tokens), step):
        new = list(tokens[start : start + step])
        output = EngineOutput(
            request_id="r",
            new_token_ids=new,
            finish_reason="length" if start + step >= len(tokens) else None,
            logprobs=[TokenLogprobs(token, -1.0, [], []) for token in new],
        )
        processor.process([output])
        if stream._waiting:
            news = stream._waiting.popitem()[1]
            text += news.text
            ids += [entry.token_id for entry in news.logprobs or ()]
            offsets += news.text_offsets
            shown.append((len(text), max(news.text_offsets, default=0)))
    return text, ids, offsets, shown


def starts_of(parts: Sequence[bytes]) -> list[int]:
    """The character of each part's first byte, by decoding all that is before it and itself."""
    joined = b"".join(parts)
    begins = [sum(map(len, parts[:place])) for place in range(len(parts))]
    return [len(joined[: begin + 1].decode(errors="replace")) - 1 for begin in begins]


@given(data=st.binary(min_size=1, max_size=40), step=st.integers(1, 5))
@example(data=b"\xf0\x9f" * 12, step=1)
@example(data=b"\xff" * 30, step=1)
@example(data=b"\xf0\x9f\x99\x82\xf0\x9f\x99", step=2)
@settings(max_examples=200, deadline=None)
def test_each_byte_stands_at_its_character_for_any_bytes(
    tokenizer: Tokenizer, data: bytes, step: int
) -> None:
    by_byte = {tokenizer.token_bytes(number): number for number in range(tokenizer.vocab_size)}
    tokens = [by_byte[bytes([byte])] for byte in data]
    text, ids, offsets, _ = run(tokenizer, tokens, step=step)
    assert (text, ids) == (data.decode(errors="replace"), tokens)
    assert offsets == sorted(offsets)
    assert offsets == starts_of([bytes([byte]) for byte in data])


@given(
    text=st.text(alphabet="ab🙂é世", min_size=1, max_size=20),
    stop=st.lists(st.text(alphabet="ab🙂é世", min_size=1, max_size=3), max_size=2),
    step=st.integers(1, 4),
)
@settings(max_examples=200, deadline=None)
def test_no_token_is_given_before_the_text_that_it_stands_in(
    tokenizer: Tokenizer, text: str, stop: list[str], step: int
) -> None:
    tokens = tokenizer.encode(text)
    shown_text, ids, offsets, shown = run(tokenizer, tokens, step=step, stop=stop)
    assert ids == tokens[: len(ids)]
    starts = starts_of([tokenizer.token_bytes(token) for token in ids])
    assert offsets == [min(start, len(shown_text)) for start in starts]
    assert all(highest <= length for length, highest in shown)


def test_special_tokens_inside_a_character_and_at_the_end_have_a_place(
    tokenizer: Tokenizer,
) -> None:
    end = tokenizer.backend.token_to_id(END)
    first, *rest = tokenizer.encode("é")
    text, ids, offsets, _ = run(tokenizer, [first, end, *rest, end, *rest], step=1)
    assert (text, len(ids)) == ("é\ufffd", 3 + 2 * len(rest))
    assert offsets == [0, 0, *([0] * len(rest)), 1, *([1] * len(rest))]
