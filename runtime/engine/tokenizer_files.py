"""What stands next to tokenizer.json in a checkpoint folder, checked field by field.

These files are foreign: whatever is in them gives a value of the right type or a `ConfigError`
that names the file and the field. All of it is read before anything is started.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

import tokenizers
from msgspec.structs import replace

from vcli.runtime.errors import RequestError
from vcli.runtime.sampling_params import MAX_COUNT, SamplingParams
from vcli.topology.errors import ConfigError

_SAMPLING_OPTIONS: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_NAMED_SPECIAL_TOKENS: Final = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_TOKEN_FLAGS: Final = ("single_word", "lstrip", "rstrip", "normalized", "special")
_HINT: Final = "mend the file, or download the model again"


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; empty when there is no such file.

    Raises:
        ConfigError: the file is no JSON object.
    """
    text = _read_text(path)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", hint=_HINT) from error
    if not isinstance(value, dict):
        raise ConfigError(
            f"{path} must hold a JSON object, it holds {type(value).__name__}", hint=_HINT
        )
    return value


def special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Text of each named special token; `config` (tokenizer_config.json) comes first."""
    found: dict[str, str] = {}
    for path, values in (
        (folder / "special_tokens_map.json", read_json_object(folder / "special_tokens_map.json")),
        (folder / "tokenizer_config.json", config),
    ):
        for name in _NAMED_SPECIAL_TOKENS:
            if name not in values:
                continue
            found.pop(name, None)
            if values[name] is not None:
                found[name] = _token_text(path, name, values[name])
    return found


def added_tokens(folder: Path, config: Mapping[str, Any]) -> list[tokenizers.AddedToken]:
    """The tokens that tokenizer_config.json declares, in the order of their ids."""
    path, name = folder / "tokenizer_config.json", "added_tokens_decoder"
    declared = config.get(name) or {}
    if not isinstance(declared, dict) or not all(key.isdecimal() for key in declared):
        _refuse(path, name, "must be an object with token ids as keys")
    tokens = []
    for key, entry in sorted(declared.items(), key=lambda item: int(item[0])):
        content = _token_text(path, f"{name}.{key}", entry)
        flags = {
            flag: bool(entry[flag])
            for flag in _TOKEN_FLAGS
            if isinstance(entry, Mapping) and flag in entry
        }
        tokens.append(tokenizers.AddedToken(content, **flags))
    return tokens


def chat_template_source(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The text of the chat template: chat_template.jinja, or the one in tokenizer_config.json."""
    text = _read_text(folder / "chat_template.jinja")
    if text is not None:
        return text
    path, name = folder / "tokenizer_config.json", "chat_template"
    value = config.get(name)
    if isinstance(value, list):
        for place, entry in enumerate(value):
            if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
                _refuse(path, f"{name}[{place}]", "must be an object with `name` and `template`")
        value = {entry["name"]: entry.get("template") for entry in value}
    if isinstance(value, dict):
        value = value.get("default")
    if value is not None and not isinstance(value, str):
        _refuse(path, name, f"must be text or named texts, it is {type(value).__name__}")
    if value is not None:
        _check_text(path, name, value)
    return value


def eos_token_ids(folder: Path) -> list[int]:
    """Ids that end a text by generation_config.json and config.json; -1 means none."""
    found: list[int] = []
    for file in ("generation_config.json", "config.json"):
        value = read_json_object(folder / file).get("eos_token_id")
        entries = value if isinstance(value, list) else [value]
        for entry in entries:
            if entry is None or entry == -1:
                continue
            if isinstance(entry, bool) or not isinstance(entry, int):
                _refuse(folder / file, "eos_token_id", "must be a token id or a list of them")
            if not 0 <= entry <= MAX_COUNT:
                _refuse(folder / file, "eos_token_id", f"must be 0 to {MAX_COUNT}")
            found.append(entry)
    return found


def default_sampling(folder: Path) -> dict[str, float]:
    """Sampling options that the model's authors recommend.

    They would be every request's, so a wrong one is refused here and not to the clients.
    """
    path = folder / "generation_config.json"
    config = read_json_object(path)
    found: dict[str, float] = {}
    for name in _SAMPLING_OPTIONS:
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            _refuse(path, name, f"must be a number, it is {type(value).__name__}")
        if name == "top_k":
            if not math.isfinite(min(value, MAX_COUNT + 1)) or value % 1:
                _refuse(path, name, f"must be a whole number, it is {value}")
            value = 0 if value == -1 else int(value)  # -1 is an older word for "all"
        try:
            replace(SamplingParams(), **{name: value}).verify()
        except RequestError as error:
            raise ConfigError(
                f"{path}: {error.message}", hint=f"mend {name} in the file, or remove it"
            ) from error
        found[name] = value
    return found


def _read_text(path: Path) -> str | None:
    if not path.exists():
        return None
    if not path.is_file():
        raise ConfigError(f"{path} is no regular file", hint=_HINT)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", hint=_HINT) from error


def _token_text(path: Path, name: str, value: object) -> str:
    """A special token is written as its text, or as an object with its text as `content`."""
    if isinstance(value, Mapping):
        value = value.get("content")
    if not isinstance(value, str):
        _refuse(path, name, "must be a token's text, or an object with its text as `content`")
    _check_text(path, name, value)
    return value


def _check_text(path: Path, name: str, value: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        _refuse(path, name, f"holds {value[error.start]!r}, half of a surrogate pair and no text")


def _refuse(path: Path, name: str, what: str) -> NoReturn:
    raise ConfigError(f"{path}: {name} {what}", hint=_HINT)
