"""Conversion of hand-made GGUF files: exact weights, and one message for every damaged file."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from vcli.runtime.checkpoint import check_folder, check_weights, convert_gguf
from vcli.topology.errors import ConfigError

MakeGguf = Callable[..., Path]
MakeTensors = Callable[..., dict[str, np.ndarray]]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, make_gguf: MakeGguf, make_tensors: MakeTensors):
    folder = tmp_path_factory.mktemp("small")
    return make_gguf(folder / "m.gguf", make_tensors("llama", hidden=32, layers=1))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("has_head", [False, True])
def test_float32_weights_come_back_exactly(
    tmp_path: Path, make_gguf: MakeGguf, make_tensors: MakeTensors, family: str, has_head: bool
) -> None:
    tensors = make_tensors(family, hidden=32, layers=2)
    if has_head:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    convert_gguf(
        make_gguf(tmp_path / "m.gguf", tensors, family=family), tmp_path / "out", report=print
    )
    check_folder(tmp_path / "out")
    check_weights(tmp_path / "out")
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    assert set(loaded) == set(tensors)
    assert all(torch.equal(loaded[name], torch.from_numpy(tensors[name])) for name in tensors)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] is not has_head


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1"])
def test_quantised_weights_are_the_gguf_packages_bfloat16(
    tmp_path: Path, make_gguf: MakeGguf, make_tensors: MakeTensors, kind: str
) -> None:
    quantisation = gguf.GGMLQuantizationType[kind]
    tensors = make_tensors("llama", hidden=32, layers=1)
    path = make_gguf(tmp_path / "m.gguf", tensors, quantisation=quantisation)
    convert_gguf(path, tmp_path / "out", dtype="bfloat16", report=print)
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    for name, tensor in tensors.items():
        expected = tensor
        if tensor.ndim == 2:
            packed = gguf.quants.quantize(tensor, quantisation)
            expected = gguf.quants.dequantize(packed, quantisation)
        assert torch.equal(loaded[name], torch.from_numpy(expected).to(torch.bfloat16)), name


def test_llama3_rope_parameters_are_recovered_from_the_factors(
    tmp_path: Path, make_gguf: MakeGguf, make_tensors: MakeTensors
) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip
    config = LlamaConfig(head_dim=64, rope_parameters=parameters, max_position_embeddings=131072)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 500000.0 ** (-np.arange(0, 64, 2) / 64)
    tensors = make_tensors("llama", hidden=32, layers=1)
    tensors["model.layers.0.self_attn.q_proj.weight"] = np.zeros((4 * 64, 32), np.float32)
    tensors["model.layers.0.self_attn.k_proj.weight"] = np.zeros((2 * 64, 32), np.float32)
    tensors["rope_freqs.weight"] = (plain / scaled.numpy()).astype(np.float32)
    changes = {"llama.rope.freq_base": 500000.0, "llama.attention.key_length": 64}
    path = make_gguf(tmp_path / "m.gguf", tensors, changes=changes)
    convert_gguf(path, tmp_path / "out", report=print)
    scaling = json.loads((tmp_path / "out" / "config.json").read_text())["rope_scaling"]
    assert scaling == {name: parameters[name] for name in parameters if name != "rope_theta"}


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"general.architecture": "gemma"}, "'gemma' cannot be converted"),
    "experts": ({"llama.expert_count": 8}, "mixture of experts"),
    "split": ({"split.count": 3}, "one of 3 parts"),
    "pre-tokenizer": ({"tokenizer.ggml.pre": "tekken"}, "'tekken' is not known"),
    "tokenizer": ({"tokenizer.ggml.model": "bert"}, "'bert' cannot be converted"),
    "no tokens": ({"tokenizer.ggml.tokens": None}, "holds no tokenizer"),
    "layers": ({"llama.block_count": 2}, "lacks 9 tensors"),
    "heads": ({"llama.attention.head_count": 2}, "attn_q.weight has 32 rows"),
    "no size": ({"llama.context_length": None}, "context_length must be"),
    "size is text": ({"llama.context_length": "8"}, "context_length must be"),
    "bos out of range": ({"tokenizer.ggml.bos_token_id": 999}, "cannot be used"),
    "merge": ({"tokenizer.ggml.merges": ["ab"]}, "without two parts"),
    "merge of nothing": ({"tokenizer.ggml.merges": ["zz yy"]}, "cannot be used"),
    "partial rope": ({"llama.rope.dimension_count": 4}, "rotary embedding of 4 of 8"),
    "rope scaling": ({"llama.rope.scaling.type": "longrope"}, "'longrope' cannot be converted"),
}


@pytest.mark.parametrize("refusal", REFUSALS)
def test_what_cannot_be_converted_is_told(
    tmp_path: Path, make_gguf: MakeGguf, make_tensors: MakeTensors, refusal: str
) -> None:
    changes, message = REFUSALS[refusal]
    tensors = make_tensors("llama", hidden=32, layers=1)
    path = make_gguf(tmp_path / "m.gguf", tensors, changes=changes)
    with pytest.raises(ConfigError) as caught:
        convert_gguf(path, tmp_path / "out", report=print)
    assert message in caught.value.message
    assert str(path) in caught.value.message
    assert not (tmp_path / "out").exists()


def test_surplus_tensor_is_told(
    tmp_path: Path, make_gguf: MakeGguf, make_tensors: MakeTensors
) -> None:
    tensors = make_tensors("qwen2", hidden=32, layers=1)
    with pytest.raises(ConfigError, match=r"does not have, first blk\.0\.attn_k\.bias"):
        convert_gguf(make_gguf(tmp_path / "m.gguf", tensors), tmp_path / "out", report=print)


def test_every_truncation_is_told(tmp_path: Path, small: Path) -> None:
    whole = small.read_bytes()
    path = tmp_path / "cut.gguf"
    for num_bytes in [0, 3, 4, 7, 8, 20, *range(24, len(whole), 997), len(whole) - 64]:
        path.write_bytes(whole[:num_bytes])
        with pytest.raises(ConfigError) as caught:
            convert_gguf(path, tmp_path / "out", report=print)
        assert "cut short" in caught.value.message or num_bytes < 4, caught.value.message


def test_garbage_never_gives_another_error(tmp_path: Path, small: Path) -> None:
    rng = np.random.default_rng(5)
    whole = np.frombuffer(small.read_bytes(), np.uint8)
    path = tmp_path / "garbage.gguf"
    num_refused = 0
    for _ in range(150):
        damaged = whole.copy()
        places = rng.integers(4, 9000, 3)
        damaged[places] = rng.integers(0, 256, 3)
        path.write_bytes(damaged.tobytes())
        try:
            convert_gguf(path, tmp_path / "out", report=print)
        except ConfigError:
            num_refused += 1
    assert num_refused > 20


#: one value `a`: an array of arrays of arrays ...
NESTED_ARRAYS = (
    b"GGUF\x03\x00\x00\x00"
    + struct.pack("<QQQcI", 0, 1, 1, b"a", 9)
    + struct.pack("<IQ", 9, 1) * 5000
)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PK\x03\x04 a zip file", "no GGUF file"),
        (b"version https://git-lfs.github.com/spec/v1", "git-lfs pointer"),
        (b"GGUF\x01\x00\x00\x00" + bytes(16), "version 1"),
        (b"GGUF\x00\x00\x00\x03" + bytes(16), "big-endian"),
        (b"GGUF\x03\x00\x00\x00" + b"\xff" * 16, "cut short"),
        (NESTED_ARRAYS, "nested array"),
    ],
)
def test_other_files_are_told(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "out", report=print)


def test_unreadable_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Is a directory"):
        convert_gguf(tmp_path, tmp_path / "out", report=print)
