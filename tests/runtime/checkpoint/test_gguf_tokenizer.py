"""Tokenizers built from GGUF metadata."""

import json
import random
from itertools import pairwise
from pathlib import Path

import pytest
from tokenizers import Tokenizer, pre_tokenizers

from vcli.runtime.checkpoint.gguf_file import GgufFile
from vcli.runtime.checkpoint.gguf_tokenizer import tokenizer_from_gguf

TEXTS = [
    "The capital of France is Paris.",
    "x = 12345 + 67.8  # comment\n\n\tdef f(a, b):\r\n        return a ** b",
    "       32 blanks   before 7",
    "naïve café, Größe, Ελλάδα, Москва, 東京, مرحبا, हिन्दी",
    "emoji 🙂👩‍👩‍👧 ½ ² ٣ Ⅷ",
    "don't WE'LL they've I'm",
    "\x00\x01\ufeff\u200b",
    "",
]


def _pieces(pre_name: str, text: str) -> list[str]:
    file = GgufFile(
        path=Path("x.gguf"),
        tensors={},
        metadata={
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": pre_name,
            "tokenizer.ggml.tokens": ["a"],
        },
    )
    cut = tokenizer_from_gguf(file).pre_tokenizer.pre_tokenize_str(text)
    return [text[start:end] for _, (start, end) in cut]


@pytest.mark.parametrize(
    ("pre_name", "expected"),
    [
        # the digit rule comes first, so the blank stays alone
        ("smollm", ["I", "'m", " ", "1", "2", "3", "4", " ok", "!!", "\n\n"]),
        ("gpt-2", ["I", "'m", " 1234", " ok", "!!", "\n\n"]),
        ("qwen2", ["I", "'m", " ", "1", "2", "3", "4", " ok", "!!\n\n"]),
        ("llama-bpe", ["I", "'m", " ", "123", "4", " ok", "!!\n\n"]),
        ("default", ["I", "'", "m", " ", "123", "4", " ok", "!!", "\n\n"]),
    ],
)
def test_text_is_cut_by_the_named_rule(pre_name: str, expected: list[str]) -> None:
    assert _pieces(pre_name, "I'm 1234 ok!!\n\n") == expected


@pytest.mark.parametrize("text", TEXTS)
def test_demo_tokenizer_gives_text_back(demo_model: Path, text: str) -> None:
    tokenizer = Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_demo_rule_is_digits_then_byte_level(demo_model: Path) -> None:
    ours = Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    named = Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    named.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    for text in TEXTS:
        assert ours.encode(text).ids == named.encode(text).ids


def test_demo_chat_tokens_are_single_ids(demo_model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    config = json.loads((demo_model / "tokenizer_config.json").read_text())
    assert tokenizer.encode("<|im_start|>user\n").ids[0] == 1
    assert tokenizer.encode("Hi<|im_end|>").ids[-1] == 2
    assert (config["bos_token"], config["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert "add_generation_prompt" in config["chat_template"]
    assert tokenizer.decode(tokenizer.encode("Hi<|im_end|>").ids) == "Hi"


def _sentencepiece_file(*, has_prefix: bool) -> GgufFile:
    rng = random.Random(4)
    words = {"".join(rng.choices("abc▁", k=rng.randint(2, 4))) for _ in range(60)}
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = ["a", "b", "c", "▁", *sorted(words)]
    scores = [*range(-len(pieces), 0)]
    rng.shuffle(scores)
    return GgufFile(
        path=Path("x.gguf"),
        tensors={},
        metadata={
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *byte_tokens, *pieces],
            "tokenizer.ggml.scores": [0.0] * 259 + [float(score) for score in scores],
            "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.add_space_prefix": has_prefix,
        },
    )


def _merge_by_score(file: GgufFile, text: str) -> list[str]:
    """Sentencepiece's algorithm as it is defined: the best neighbouring pair, again and again."""
    tokens = file.metadata["tokenizer.ggml.tokens"]
    score = dict(zip(tokens, file.metadata["tokenizer.ggml.scores"], strict=True))
    pieces = list(text)
    while True:
        pairs = [left + right for left, right in pairwise(pieces)]
        known = [(score[pair], -place) for place, pair in enumerate(pairs) if pair in score]
        if not known:
            return pieces
        place = -max(known)[1]
        pieces[place : place + 2] = [pairs[place]]


@pytest.mark.parametrize("has_prefix", [True, False])
def test_sentencepiece_merges_by_score(has_prefix: bool) -> None:
    file = _sentencepiece_file(has_prefix=has_prefix)
    tokenizer = tokenizer_from_gguf(file)
    rng = random.Random(6)
    for _ in range(300):
        text = "".join(rng.choices("abc ", k=rng.randint(1, 20)))
        spaced = ("▁" if has_prefix else "") + text.replace(" ", "▁")
        assert tokenizer.encode(text).tokens == ["<s>", *_merge_by_score(file, spaced)]
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_sentencepiece_writes_unknown_letters_as_bytes() -> None:
    tokenizer = tokenizer_from_gguf(_sentencepiece_file(has_prefix=True))
    assert tokenizer.encode("é").tokens[-2:] == ["<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("aé b").ids) == "aé b"
