"""Text while tokens arrive: equal to decoding all at once, and stop strings wherever cut."""

import itertools
import random

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from tests.support.tiny_tokenizer import END, tiny_tokenizer
from vcli.runtime.engine.detokenizer import IncrementalDetokenizer, StopStringFilter
from vcli.runtime.engine.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def byte_fallback() -> Tokenizer:
    """As Llama 2's: words with a space mark, unknown characters as byte tokens."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁hi", "hi", "▁you", "a"]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={word: number for number, word in enumerate(words)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    return Tokenizer(backend)


def pieces_of(tokenizer: Tokenizer, token_ids: list[int], **options: object) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, **options)
    return [*(detokenizer.add(token) for token in token_ids), detokenizer.flush()]


def byte_tokens(tokenizer: Tokenizer, data: bytes) -> list[int]:
    by_byte = {tokenizer.token_bytes(number): number for number in range(tokenizer.vocab_size)}
    return [by_byte[bytes([byte])] for byte in data]


@given(text=st.text(max_size=40))
@settings(max_examples=150, deadline=None)
def test_text_in_single_bytes_comes_out_whole_and_never_half_a_character(
    byte_level: Tokenizer, text: str
) -> None:
    pieces = pieces_of(byte_level, byte_tokens(byte_level, text.encode()))
    assert "".join(pieces) == text
    assert REPLACEMENT in text or all(REPLACEMENT not in piece for piece in pieces)


@given(data=st.binary(max_size=60))
@example(data=b"\xff" * 40)
@example(data=b"\xf0\x9f" * 20)
@example(data=b"a\xe2\x82")
@settings(max_examples=200, deadline=None)
def test_any_bytes_equal_decoding_all_at_once(byte_level: Tokenizer, data: bytes) -> None:
    tokens = byte_tokens(byte_level, data)
    assert "".join(pieces_of(byte_level, tokens)) == byte_level.decode(tokens)


@given(tokens=st.lists(st.integers(0, 260), max_size=50))
@settings(max_examples=200, deadline=None)
def test_any_tokens_special_ones_too_equal_decoding_all_at_once(
    byte_level: Tokenizer, tokens: list[int]
) -> None:
    for skip in (True, False):
        assert "".join(
            pieces_of(byte_level, tokens, skip_special_tokens=skip)
        ) == byte_level.decode(tokens, skip_special_tokens=skip)


@given(text=st.text(alphabet="hi you a€日🙂\n", max_size=30))
@settings(max_examples=100, deadline=None)
def test_byte_fallback_equals_decoding_all_at_once(byte_fallback: Tokenizer, text: str) -> None:
    tokens = byte_fallback.encode(text)
    assert "".join(pieces_of(byte_fallback, tokens)) == byte_fallback.decode(tokens)


def test_byte_fallback_keeps_a_character_that_an_invalid_byte_follows(
    byte_fallback: Tokenizer,
) -> None:
    tokens = [byte + 1 for byte in "€".encode()] + [
        0xFF + 1,
        byte_fallback.backend.token_to_id("a"),
    ]
    assert "".join(pieces_of(byte_fallback, tokens)) == f"€{REPLACEMENT}a"


def test_first_word_after_a_prompt_keeps_its_space(byte_fallback: Tokenizer) -> None:
    hi, you = (byte_fallback.backend.token_to_id(word) for word in ("▁hi", "▁you"))
    assert pieces_of(byte_fallback, [you]) == ["you", ""]
    assert pieces_of(byte_fallback, [you], prompt_token_ids=[hi]) == [" you", ""]


def test_prompt_that_ends_inside_a_character_adds_nothing(byte_level: Tokenizer) -> None:
    head, tail = byte_tokens(byte_level, b"\xe2\x82"), byte_tokens(byte_level, b"\xac!")
    assert "".join(pieces_of(byte_level, tail, prompt_token_ids=head)) == f"{REPLACEMENT}!"


def test_window_stays_short_in_a_long_run_of_invalid_bytes(byte_level: Tokenizer) -> None:
    """The cost of a token must not grow with the length of the run."""
    longest = 0

    class Counting(IncrementalDetokenizer):
        def _decode(self, token_ids: list[int]) -> str:
            nonlocal longest
            longest = max(longest, len(token_ids))
            return super()._decode(token_ids)

    detokenizer = Counting(byte_level)
    for token in byte_tokens(byte_level, b"\xff\x80" * 500):
        detokenizer.add(token)
    assert longest < 30


def test_skipped_special_token_inside_a_character_does_not_break_it(byte_level: Tokenizer) -> None:
    end = byte_level.backend.token_to_id(END)
    first, *rest = byte_tokens(byte_level, "é".encode())
    assert pieces_of(byte_level, [first, end, *rest]) == ["", "", "é", ""]


def filtered(pieces: list[str], stop: list[str], **options: bool) -> tuple[list[str], str | None]:
    stop_filter = StopStringFilter(stop, **options)
    shown = [stop_filter.add(piece) for piece in pieces]
    return [*shown, stop_filter.flush()], stop_filter.matched


def test_stop_string_over_three_pieces_is_cut_and_nothing_of_it_was_shown() -> None:
    shown, matched = filtered(["one S", "TO", "P two"], ["STOP"])
    assert shown == ["one ", "", "", ""]
    assert matched == "STOP"


def test_start_of_a_stop_string_is_shown_as_soon_as_it_cannot_become_one() -> None:
    shown, matched = filtered(["a ST", "ART"], ["STOP"])
    assert shown == ["a ", "START", ""]
    assert matched is None


def test_held_text_is_shown_at_the_end() -> None:
    assert filtered(["a STO"], ["STOP"]) == (["a ", "STO"], None)


def test_stop_string_is_kept_when_asked_for() -> None:
    assert filtered(["a ST", "OP b"], ["STOP"], include_in_output=True)[0] == ["a ", "STOP", ""]


@given(
    text=st.text(alphabet="abc", max_size=24),
    stop=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3),
    seed=st.integers(0, 2**16),
)
@example(text="abc", stop=["abc", "b"], seed=0)
@settings(max_examples=300, deadline=None)
def test_result_does_not_depend_on_how_the_text_is_cut(
    text: str, stop: list[str], seed: int
) -> None:
    generator = random.Random(seed)
    cuts = sorted(generator.sample(range(len(text) + 1), min(3, len(text) + 1)))
    edges = [0, *cuts, len(text)]
    pieces = [text[low:high] for low, high in itertools.pairwise(edges)]
    whole, cut, single = (filtered(cutting, stop) for cutting in ([text], pieces, list(text)))
    assert ("".join(whole[0]), whole[1]) == ("".join(cut[0]), cut[1])
    assert ("".join(whole[0]), whole[1]) == ("".join(single[0]), single[1])
    ends = [text.find(word) + len(word) for word in stop if word in text]
    if ends:
        assert text[: min(ends)].endswith(str(whole[1]))
    else:
        assert "".join(whole[0]) == text
