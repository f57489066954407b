"""The tokenizer of a GGUF file as tokenizer.json and tokenizer_config.json, by `tokenizers` alone.

`tokenizer.ggml.model` names the algorithm (`gpt2`: byte-level BPE, `llama`: sentencepiece BPE);
for the first, `tokenizer.ggml.pre` names the rule that cuts the text before the merges apply.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vcli.runtime.checkpoint.gguf_config import special_token_ids
from vcli.runtime.checkpoint.gguf_file import GgufFile
from vcli.topology.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Token types of llama.cpp.
CONTROL_TOKEN = 3
USER_DEFINED_TOKEN = 4

_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenizer:
    """How text is cut: by each pattern in turn. `adds_bos` is what llama.cpp does unasked."""

    patterns: tuple[str, ...]
    ignores_merges: bool = False
    adds_bos: bool = False
    normalizes_nfc: bool = False


PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "smollm": PreTokenizer(patterns=(r"\p{N}", _GPT2)),
    "gpt-2": PreTokenizer(patterns=(_GPT2,)),
    "qwen2": PreTokenizer(patterns=(_ENGLISH + r"\p{N}" + _REST,), normalizes_nfc=True),
    "llama-bpe": PreTokenizer(
        patterns=(_ENGLISH + r"\p{N}{1,3}" + _REST,), ignores_merges=True, adds_bos=True
    ),
    "default": PreTokenizer(
        patterns=(
            r"[\p{P}\$\+<=>\^~\|]+",
            r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
            r"\p{N}+",
            r"[0-9][0-9][0-9]",
        )
    ),
}


def tokenizer_from_gguf(file: GgufFile) -> "Tokenizer":
    """The tokenizer that `file` describes, special tokens and the leading BOS included.

    Raises:
        ConfigError: an algorithm or a cutting rule that is not in the tables, or damaged lists.
    """
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ConfigError(
            f"{file.path} holds no tokenizer (tokenizer.ggml.tokens)",
            hint="use the safetensors checkpoint of the model",
        )
    algorithm = str(file.metadata.get("tokenizer.ggml.model", "unknown"))
    if algorithm == "gpt2":
        tokenizer, adds_bos = _byte_level_bpe(file, tokens)
    elif algorithm == "llama":
        tokenizer, adds_bos = _sentencepiece_bpe(file, tokens), True
    else:
        raise ConfigError(
            f"{file.path}: tokenizer {algorithm!r} cannot be converted",
            hint="supported: gpt2 (byte-level BPE) and llama (sentencepiece)",
        )
    _add_special_tokens(file, tokenizer, tokens)
    _add_bos(file, tokenizer, tokens, adds_bos=adds_bos)
    return tokenizer


def tokenizer_config_from_gguf(file: GgufFile) -> dict[str, Any]:
    """The tokenizer_config.json: names of the special tokens, the chat template."""
    tokens = file.metadata["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    for key, value in special_token_ids(file).items():
        token_id = value[0] if isinstance(value, list) else value
        config[key.removesuffix("_id")] = tokens[token_id]
    unknown = file.metadata.get("tokenizer.ggml.unknown_token_id")
    if isinstance(unknown, int):
        config["unk_token"] = tokens[unknown]
    template = file.metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        config["chat_template"] = template
    return config


def _byte_level_bpe(file: GgufFile, tokens: list[str]) -> tuple["Tokenizer", bool]:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre_name = str(file.metadata.get("tokenizer.ggml.pre", "default"))
    if pre_name not in PRE_TOKENIZERS:
        raise ConfigError(
            f"{file.path}: tokenizer.ggml.pre {pre_name!r} is not known",
            hint=f"supported: {', '.join(PRE_TOKENIZERS)}; or use its safetensors checkpoint",
        )
    pre = PRE_TOKENIZERS[pre_name]
    merges = [_merge(file, line) for line in file.metadata.get("tokenizer.ggml.merges", [])]
    tokenizer = Tokenizer(
        models.BPE(
            vocab=_vocabulary(tokens),
            merges=merges,
            fuse_unk=False,
            ignore_merges=pre.ignores_merges,
        )
    )
    if pre.normalizes_nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre.adds_bos


def _merge(file: GgufFile, line: str) -> tuple[str, str]:
    # A piece may itself hold a blank, never as its first character.
    left, blank, right = line[:1], "", ""
    cut = line.find(" ", 1)
    if cut > 0:
        left, blank, right = line[:cut], " ", line[cut + 1 :]
    if not (left and blank and right):
        raise ConfigError(
            f"{file.path}: tokenizer.ggml.merges has a line without two parts: {line!r}",
            hint="download or copy the file again",
        )
    return left, right


def _vocabulary(tokens: list[str]) -> dict[str, int]:
    """Token -> id; of a token listed twice the first id counts."""
    vocabulary: dict[str, int] = {}
    for token_id, token in enumerate(tokens):
        vocabulary.setdefault(token, token_id)
    return vocabulary


def _sentencepiece_bpe(file: GgufFile, tokens: list[str]) -> "Tokenizer":
    """Sentencepiece merges by the score of the result: the same as BPE with sorted merges."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = file.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise ConfigError(
            f"{file.path}: tokenizer.ggml.scores does not fit the {len(tokens)} tokens",
            hint="download or copy the file again",
        )
    vocabulary = _vocabulary(tokens)
    ranked: list[tuple[float, int, tuple[str, str]]] = []
    for token, token_id in vocabulary.items():
        splits = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        ranked.extend(
            (-scores[token_id], token_id, pair)
            for pair in splits
            if pair[0] in vocabulary and pair[1] in vocabulary
        )
    unknown = file.metadata.get("tokenizer.ggml.unknown_token_id", 0)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=[pair for _, _, pair in sorted(ranked)],
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    has_prefix = bool(file.metadata.get("tokenizer.ggml.add_space_prefix", True))
    prefix = [normalizers.Prepend("▁")] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(content=" ", left=1)] if has_prefix else []),
        ]
    )
    return tokenizer


def _add_special_tokens(file: GgufFile, tokenizer: "Tokenizer", tokens: list[str]) -> None:
    from tokenizers import AddedToken

    types = file.metadata.get("tokenizer.ggml.token_type", [])
    marked = [
        AddedToken(token, special=kind == CONTROL_TOKEN, normalized=False)
        for token, kind in zip(tokens, types, strict=False)
        if kind in (CONTROL_TOKEN, USER_DEFINED_TOKEN) and token
    ]
    tokenizer.add_tokens(marked)


def _add_bos(file: GgufFile, tokenizer: "Tokenizer", tokens: list[str], *, adds_bos: bool) -> None:
    from tokenizers import processors

    bos = special_token_ids(file).get("bos_token_id")
    if bos is None or not file.metadata.get("tokenizer.ggml.add_bos_token", adds_bos):
        return
    token = tokens[bos]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[token, "$A"], pair=[token, "$A", token, "$B:1"], special_tokens=[(token, bos)]
    )
