"""The headers show before a start whether config.json and weights belong together."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.tiny_model import FAMILIES, tiny_checkpoint
from vcli.runtime.checkpoint.expected import expected_tensors
from vcli.runtime.checkpoint.folder import check_weights
from vcli.runtime.distributed.parallel_state import single_rank_context
from vcli.runtime.models.registry import build_model
from vcli.topology import ConfigError, ModelSpec, model_spec_from_config


def _spec(folder: Path, **changes: Any) -> ModelSpec:
    config = json.loads((folder / "config.json").read_text())
    return model_spec_from_config({**config, **changes}, source="config.json")


def _copied(tmp_path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A tiny checkpoint whose header was changed."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_checkpoint("llama"), folder)
    path = folder / "model.safetensors"
    content = path.read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + length])
    change(header)
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + content[8 + length :])
    return folder


@pytest.mark.parametrize("has_biases", [False, True], ids=["plain", "biases"])
@pytest.mark.parametrize("is_tied", [False, True], ids=["own head", "tied head"])
@pytest.mark.parametrize("family", FAMILIES)
def test_expected_tensors_are_those_that_the_layers_read(
    family: str, is_tied: bool, has_biases: bool
) -> None:
    biases = {"attention_bias": True, "mlp_bias": True} if has_biases else {}
    spec = _spec(tiny_checkpoint(family), tie_word_embeddings=is_tied, **biases)
    model = build_model(
        spec,
        single_rank_context(),
        dtype=torch.float32,
        device="meta",
        layer_span=(0, spec.num_layers),
    )
    read = {weight.name: tuple(weight.shape) for weight in model.weight_map()}
    assert dict(expected_tensors(spec)) == read


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_of_the_family_passes(family: str) -> None:
    folder = tiny_checkpoint(family)
    assert check_weights(folder, _spec(folder))


def test_a_missing_tensor_is_named_with_its_file(tmp_path: Path) -> None:
    folder = _copied(tmp_path, lambda header: header.update(x=header.pop("model.norm.weight")))
    check_weights(folder)
    with pytest.raises(ConfigError, match=r"model\.norm\.weight") as caught:
        check_weights(folder, _spec(folder))
    assert str(folder / "model.safetensors") in caught.value.message


def test_a_wrong_shape_is_told_with_both(tmp_path: Path) -> None:
    folder = _copied(tmp_path, lambda header: header["model.norm.weight"].update(shape=[8, 8]))
    with pytest.raises(ConfigError, match=r"\[8, 8\].*\[64\]") as caught:
        check_weights(folder, _spec(folder))
    assert "model.safetensors: model.norm.weight" in caught.value.message


@pytest.mark.parametrize("dtype", ["I32", "F8_E9M9"])
def test_numbers_that_are_not_loaded_are_refused(tmp_path: Path, dtype: str) -> None:
    folder = _copied(tmp_path, lambda header: header["model.norm.weight"].update(dtype=dtype))
    with pytest.raises(ConfigError, match=f"model.norm.weight is stored as {dtype}"):
        check_weights(folder, _spec(folder))


@pytest.mark.parametrize("size", [1e400, "64", -1, None])
def test_a_size_that_is_none_is_refused(tmp_path: Path, size: object) -> None:
    folder = _copied(
        tmp_path, lambda header: header["model.norm.weight"].update(shape=[size], dtype="?")
    )
    with pytest.raises(ConfigError, match=r"model\.norm\.weight"):
        check_weights(folder, _spec(folder))


def test_a_config_of_more_layers_than_the_weights_is_refused_soon() -> None:
    folder = tiny_checkpoint("llama")
    with pytest.raises(ConfigError, match=r"model\.layers\.4\."):
        check_weights(folder, _spec(folder, num_hidden_layers=10_000))
