"""What stands in for a tokenizer where weights are random and no tokenizer is there."""

from pathlib import Path

import pytest

from tests.support.bench_command import write_config
from tests.support.tiny_tokenizer import write_tokenizer
from vcli.runtime.checkpoint import check_folder
from vcli.runtime.config import ModelConfig
from vcli.runtime.engine.stand_in_tokenizer import tokenizer_of
from vcli.topology import ConfigError


def model_in(folder: Path, load_format: str) -> ModelConfig:
    return ModelConfig(
        path=folder,
        served_name="tiny",
        spec=check_folder(folder, needs_weights=False, needs_tokenizer=False),
        dtype="float32",
        max_model_len=64,
        load_format=load_format,
    )


def test_every_id_of_the_vocabulary_reads_as_text_and_every_text_has_ids(tmp_path):
    tokenizer = tokenizer_of(model_in(write_config(tmp_path), "dummy"))
    assert tokenizer.vocab_size == 512
    assert all(tokenizer.token_bytes(token_id) for token_id in range(512))
    ids = tokenizer.encode("Grüße, 東京")
    assert len(ids) == len("Grüße, 東京".encode())
    assert max(ids) < 512
    assert tokenizer.decode(ids) == "Grüße, 東京"
    assert tokenizer.decode([300, 511]) == " 300 511"
    assert tokenizer.eos_token_ids == (2,)


def test_a_tokenizer_that_is_there_is_taken(tmp_path):
    write_config(tmp_path)
    write_tokenizer(tmp_path)
    assert tokenizer_of(model_in(tmp_path, "dummy")).chat_template is not None


def test_real_weights_need_a_real_tokenizer(tmp_path):
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        tokenizer_of(model_in(write_config(tmp_path), "safetensors"))
