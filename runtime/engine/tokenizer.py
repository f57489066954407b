"""Text to token ids and back, with the `tokenizers` package alone.

`Tokenizer.from_folder` reads the files of a checkpoint the way transformers 5 does and gives the
same ids, without importing it: tokenizer.json decides how text is cut and whether a beginning or
end token is added (`add_bos_token` in tokenizer_config.json counts only without that file).
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from vcli.runtime.engine.chat_template import ChatTemplate
from vcli.runtime.engine.tokenizer_files import (
    added_tokens,
    chat_template_source,
    default_sampling,
    eos_token_ids,
    read_json_object,
    special_tokens,
)
from vcli.runtime.errors import RequestError
from vcli.topology.errors import ConfigError

#: steps that keep every byte of a text in some token; others may drop or merge without limit
_KEEPING_STEPS = frozenset(
    ("ByteLevel", "Digits", "Metaspace", "NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Prepend")
)
#: normal forms make at most so many bytes into one
_NORMAL_FORM_FACTOR = 4
_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")


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
        named = special_tokens(folder, config)
        _add_missing_tokens(backend, added_tokens(folder, config), named)
        source = chat_template_source(folder, config)
        eos_token = named.get("eos_token")
        own_eos_id = None if eos_token is None else backend.token_to_id(eos_token)
        return cls(
            backend,
            special_tokens=named,
            eos_token_ids=[
                *([] if own_eos_id is None else [own_eos_id]),
                *eos_token_ids(folder),
            ],
            chat_template=(
                None if source is None else ChatTemplate(source, named, origin=str(folder))
            ),
            default_sampling=default_sampling(folder),
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
        """Token ids of `text`; the model's beginning-of-text token is added when it has one.

        Other threads run meanwhile.

        Raises:
            RequestError: the tokenizer has no token for something in the text.
        """
        try:
            # Only the call for batches lets go of the interpreter lock.
            (encoding,) = self._backend.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
        except Exception as error:  # the package raises nothing finer
            raise RequestError(f"the text cannot be tokenised: {error}") from error
        return list(encoding.ids)

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
        text = self.render_messages(
            messages, add_generation_prompt=add_generation_prompt, arguments=arguments
        )
        return self.encode(text, add_special_tokens=False)

    def render_messages(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation in the model's chat format.

        Raises:
            RequestError: the model has no chat template, or it refused the messages.
        """
        if self.chat_template is None:
            raise RequestError(
                f"{self._origin} has no chat template",
                parameter="messages",
                hint="use /v1/completions, or a model that was tuned for chat",
            )
        return self.chat_template.render(
            messages, add_generation_prompt=add_generation_prompt, arguments=arguments
        )

    def token_text(self, token_id: int) -> str:
        """One token as text among others, special ones too; U+FFFD for a part of a character."""
        # Alone, a token of some tokenizers loses the space before it.
        before, text_before = self._anchor
        text = self._backend.decode([*before, token_id], skip_special_tokens=False)
        if text.startswith(text_before):
            return text.removeprefix(text_before)
        return self._backend.decode([token_id], skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of one token, also where it is only a part of a character."""
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._has_byte_tokens and _BYTE_TOKEN.fullmatch(token):
            return bytes.fromhex(token[3:5])
        if self._is_byte_level and token_id not in self.special_token_ids:
            values = [_BYTE_OF_CHARACTER.get(character) for character in token]
            known = [value for value in values if value is not None]
            if len(known) == len(values):
                return bytes(known)
        return self.token_text(token_id).encode()

    @cached_property
    def max_token_bytes(self) -> int | None:
        """Bytes of text that one token stands for at most; None where there is no such limit."""
        steps = [
            *_steps(self._pipeline["normalizer"]),
            *_steps(self._pipeline["pre_tokenizer"]),
        ]
        has_all_bytes = self._is_byte_level or bool(self._pipeline["model"].get("byte_fallback"))
        if not has_all_bytes or not all(_keeps_text(step) for step in steps):
            return None
        special = {token.content for token in self._backend.get_added_tokens_decoder().values()}
        longest = max(
            len(token) if self._is_byte_level and token not in special else len(token.encode())
            for token in self._backend.get_vocab(with_added_tokens=True)
        )
        return longest * (_NORMAL_FORM_FACTOR if self._pipeline["normalizer"] else 1)

    @cached_property
    def _pipeline(self) -> dict[str, Any]:
        """The tokenizer's description, without its vocabulary."""
        description: dict[str, Any] = json.loads(self._backend.to_str())
        for name in ("vocab", "merges"):
            description["model"].pop(name, None)
        return description

    @cached_property
    def _is_byte_level(self) -> bool:
        return any(step.get("type") == "ByteLevel" for step in _steps(self._pipeline["decoder"]))

    @cached_property
    def _has_byte_tokens(self) -> bool:
        return any(step.get("type") == "ByteFallback" for step in _steps(self._pipeline["decoder"]))

    @cached_property
    def _anchor(self) -> tuple[list[int], str]:
        """Some token to stand before another, and its text."""
        try:
            token_ids = self.encode("a", add_special_tokens=False)[-1:]
        except RequestError:
            return [], ""
        return token_ids, self._backend.decode(token_ids, skip_special_tokens=False)


def _steps(description: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The steps of a part of the pipeline, those of sequences in line."""
    if description is None:
        return []
    if description["type"] != "Sequence":
        return [description]
    inner = next((value for value in description.values() if isinstance(value, list)), [])
    return [step for entry in inner for step in _steps(entry)]


def _keeps_text(step: Mapping[str, Any]) -> bool:
    if step["type"] in ("Split", "Punctuation"):
        return step.get("behavior") != "Removed"
    if step["type"] == "Replace":
        return step.get("pattern") == {"String": " "} and bool(step.get("content"))
    return step["type"] in _KEEPING_STEPS


def _add_missing_tokens(
    backend: tokenizers.Tokenizer,
    declared: Sequence[tokenizers.AddedToken],
    named: Mapping[str, str],
) -> None:
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for token in declared:
        if token.content not in known:
            backend.add_tokens([token])
            known.add(token.content)
    for content in named.values():
        if content not in known:
            backend.add_special_tokens([tokenizers.AddedToken(content, special=True)])
            known.add(content)


def _byte_level_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE: printable Latin-1 is itself, the rest follows U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + place): byte for place, byte in enumerate(others)})
    return alphabet


_BYTE_OF_CHARACTER = _byte_level_alphabet()
