"""Damaged files next to tokenizer.json: a configuration error that names the file and the field."""

import json
import os
from pathlib import Path

import pytest

from tests.support.tiny_tokenizer import tiny_tokenizer, write_tokenizer
from vcli.runtime.engine.tokenizer import Tokenizer
from vcli.topology.errors import ConfigError


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("chat_template", ["a"]),
        ("chat_template", [{"template": "a"}]),
        ("chat_template", [{"name": "default", "template": 5}]),
        ("chat_template", 5),
        ("chat_template", "\ud800"),
        ("chat_template", "{{ " + "(" * 5000),
        ("added_tokens_decoder", ["a"]),
        ("added_tokens_decoder", {"x": {"content": "a"}}),
        ("added_tokens_decoder", {"-1": {"content": "a"}}),
        ("added_tokens_decoder", {"300": 5}),
        ("added_tokens_decoder", {"300": {"content": "\ud800"}}),
        ("eos_token", 5),
        ("eos_token", {"text": "a"}),
        ("pad_token", "\ud800"),
    ],
)
def test_wrong_field_of_tokenizer_config_is_refused(
    tmp_path: Path, field: str, value: object
) -> None:
    with pytest.raises(ConfigError) as raised:
        tiny_tokenizer(tmp_path, **{field: value})
    assert str(tmp_path) in raised.value.message
    assert field.replace("_", " ") in raised.value.message.replace("_", " ")
    assert raised.value.hint


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -4),
        ("temperature", "hot"),
        ("temperature", True),
        ("temperature", float("nan")),
        ("temperature", 10**400),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", 10**30),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_k", float("inf")),
        ("top_k", float("nan")),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("eos_token_id", "x"),
        ("eos_token_id", [True]),
        ("eos_token_id", [2**64]),
        ("eos_token_id", -5),
    ],
)
def test_wrong_recommendation_of_the_authors_is_refused_at_the_start(
    tmp_path: Path, field: str, value: object
) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({field: value}))
    with pytest.raises(ConfigError) as raised:
        Tokenizer.from_folder(tmp_path)
    assert "generation_config.json" in raised.value.message
    assert field in raised.value.message
    assert raised.value.hint


def test_older_spellings_of_the_authors_are_understood(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    config = {"top_k": -1, "temperature": 0, "top_p": None, "eos_token_id": -1}
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert Tokenizer.from_folder(tmp_path).default_sampling == {"top_k": 0, "temperature": 0}


@pytest.mark.parametrize(
    "name",
    [
        *("chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json"),
        *("generation_config.json", "config.json"),
    ],
)
@pytest.mark.parametrize("content", [b"\xff\xfe", b"[" * 100_000, "folder", "fifo"])
def test_file_that_cannot_be_read_is_refused_by_name(
    tmp_path: Path, name: str, content: bytes | str
) -> None:
    write_tokenizer(tmp_path)
    path = tmp_path / name
    path.unlink(missing_ok=True)
    if content == "folder":
        path.mkdir()
    elif content == "fifo":
        os.mkfifo(path)
    elif isinstance(content, bytes):
        path.write_bytes(content)
    if name.endswith(".jinja") and content == b"[" * 100_000:
        return  # that is a template
    with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
        Tokenizer.from_folder(tmp_path)
