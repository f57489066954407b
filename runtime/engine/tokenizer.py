"""Text to token ids and back, with the `tokenizers` package alone.

`Tokenizer.from_folder` reads the files of a checkpoint the way transformers 5 does and gives the
same ids, without importing it: tokenizer.json decides how text is cut and whether a beginning or
end token is added (`add_bos_token` in tokenizer_config.json counts only without that file).
"""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from vcli.runtime.engine.chat_template import ChatTemplate
from vcli.runtime.errors import RequestError
from vcli.topology.errors import ConfigError

_SAMPLING_OPTIONS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_NAMED_SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class Tokenizer:
    """A tokenizer with its special tokens, the ids that end a text, and a chat template if any."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        eos_token_ids: Sequence[int] = (),
        chat_template: ChatTemplate | None = None,
        default_sampling: Mapping[str, float] | None = None,
        origin: str = "the model",
    ) -> None:
        self._backend = backend
        self._origin = origin
        self.special_tokens = dict(special_tokens or {})
        self.chat_template = chat_template
        #: what the model's authors recommend for sampling options that a request leaves open
        self.default_sampling = dict(default_sampling or {})
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        self.special_token_ids = frozenset(
            number for number, token in backend.get_added_tokens_decoder().items() if token.special
        )

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        """The tokenizer of a checkpoint folder.

        Raises:
            ConfigError: no tokenizer.json, or a file that cannot be understood.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(
                f"{folder} has no tokenizer.json",
                hint="save the model again with transformers' save_pretrained, "
                "which writes the file",
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises nothing finer
            raise ConfigError(
                f"{path} is damaged: {error}", hint="download the model again"
            ) from error
        backend.no_truncation()
        backend.no_padding()
        config = read_json_object(folder / "tokenizer_config.json")
        special_tokens = _special_tokens(folder, config)
        _add_missing_tokens(backend, config, special_tokens)
        source = _chat_template_source(folder, config)
        return cls(
            backend,
            special_tokens=special_tokens,
            eos_token_ids=_eos_token_ids(folder, backend, special_tokens),
            chat_template=(
                None if source is None else ChatTemplate(source, special_tokens, origin=str(folder))
            ),
            default_sampling=_default_sampling(folder),
            origin=str(folder),
        )

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The underlying tokenizer, for incremental decoding."""
        return self._backend

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest token id."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; the model's beginning-of-text token is added when it has one."""
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`; bytes that are no UTF-8 become U+FFFD."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def encode_messages(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        arguments: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation in the model's chat format.

        Raises:
            RequestError: the model has no chat template, or it refused the messages.
        """
        if self.chat_template is None:
            raise RequestError(
                f"{self._origin} has no chat template",
                parameter="messages",
                hint="use /v1/completions, or a model that was tuned for chat",
            )
        text = self.chat_template.render(
            messages, add_generation_prompt=add_generation_prompt, arguments=arguments
        )
        return self.encode(text, add_special_tokens=False)

    def token_text(self, token_id: int) -> str:
        """One token as text, special ones too; U+FFFD where it is a part of a character."""
        return self._backend.decode([token_id], skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of one token, also where it is only a part of a character."""
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        if self._is_byte_level and token_id not in self.special_token_ids:
            values = [_BYTE_OF_CHARACTER.get(character) for character in token]
            known = [value for value in values if value is not None]
            if len(known) == len(values):
                return bytes(known)
        return self.token_text(token_id).encode()

    @cached_property
    def _is_byte_level(self) -> bool:
        description = json.loads(self._backend.to_str()).get("decoder") or {}
        return description.get("type") == "ByteLevel"


def _byte_level_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE: printable Latin-1 is itself, the rest follows U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + place): byte for place, byte in enumerate(others)})
    return alphabet


_BYTE_OF_CHARACTER = _byte_level_alphabet()


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; empty when there is no such file.

    Raises:
        ConfigError: the file is no JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object, it holds {type(value).__name__}")
    return value


def _token_content(value: object) -> str | None:
    """A special token is written as its text, or as an object with its text as `content`."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    merged = {**read_json_object(folder / "special_tokens_map.json"), **config}
    contents = {name: _token_content(merged.get(name)) for name in _NAMED_SPECIAL_TOKENS}
    return {name: content for name, content in contents.items() if content is not None}


def _add_missing_tokens(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> None:
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    declared = config.get("added_tokens_decoder") or {}
    for _, entry in sorted(declared.items(), key=lambda item: int(item[0])):
        content = _token_content(entry)
        if content is None or content in known:
            continue
        flags = {
            name: bool(entry[name])
            for name in ("single_word", "lstrip", "rstrip", "normalized", "special")
            if isinstance(entry, Mapping) and name in entry
        }
        backend.add_tokens([tokenizers.AddedToken(content, **flags)])
        known.add(content)
    for content in special_tokens.values():
        if content not in known:
            backend.add_special_tokens([tokenizers.AddedToken(content, special=True)])
            known.add(content)


def _chat_template_source(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    value = config.get("chat_template")
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value}
        value = named.get("default")
    return value if isinstance(value, str) else None


def _eos_token_ids(
    folder: Path, backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str]
) -> list[int]:
    """Ids that end a text: the tokenizer's, generation_config.json's and config.json's."""
    found: list[int] = []
    token = special_tokens.get("eos_token")
    number = None if token is None else backend.token_to_id(token)
    if number is not None:
        found.append(number)
    for name in ("generation_config.json", "config.json"):
        value = read_json_object(folder / name).get("eos_token_id")
        entries = value if isinstance(value, list) else [value]
        found += [entry for entry in entries if isinstance(entry, int)]
    return found


def _default_sampling(folder: Path) -> dict[str, float]:
    config = read_json_object(folder / "generation_config.json")
    return {
        name: config[name]
        for name in _SAMPLING_OPTIONS
        if isinstance(config.get(name), int | float) and not isinstance(config[name], bool)
    }
