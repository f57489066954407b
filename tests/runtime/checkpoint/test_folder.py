"""Every fault of a model folder gives one message with the path and the next command."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from vcli.runtime.checkpoint import check_folder, check_weights, convert_gguf
from vcli.topology.errors import ConfigError


@pytest.fixture
def folder(
    tmp_path: Path,
    make_gguf: Callable[..., Path],
    make_tensors: Callable[..., dict[str, np.ndarray]],
) -> Path:
    path = make_gguf(tmp_path / "m.gguf", make_tensors("llama", hidden=32, layers=1))
    convert_gguf(path, tmp_path / "model", report=print)
    return tmp_path / "model"


def _index(folder: Path, weight_map: object) -> None:
    text = json.dumps({"weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)


def _dangling(path: Path) -> None:
    path.unlink()
    path.symlink_to("/nonexistent/blob")


def _directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def _device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


FAULTS: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "config.json does not exist", "name the"),
    "config cut": (lambda f: (f / "config.json").write_text("{"), "not valid JSON", "again"),
    "config list": (lambda f: (f / "config.json").write_text("[]"), "no JSON object", "again"),
    "config directory": (lambda f: _directory(f / "config.json"), "cannot be read", "name the"),
    "architecture": (
        lambda f: (f / "config.json").write_text('{"architectures": ["BertModel"]}'),
        "'BertModel' is not supported",
        "LlamaForCausalLM",
    ),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "holds no", "download"),
    "pickle": (
        lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
        "holds no",
        "pickle",
    ),
    "dangling weights": (
        lambda f: _dangling(f / "model.safetensors"),
        "is a link to /nonexistent/blob, which does not exist",
        "again",
    ),
    "missing part": (
        lambda f: _index(f, {"a": "model.safetensors", "b": "model-2.safetensors"}),
        "lacks model-2.safetensors",
        "model-2.safetensors",
    ),
    "empty index": (lambda f: _index(f, {}), "has no weight_map", "again"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json", "AutoTokenizer"),
    "tokenizer cut": (
        lambda f: (f / "tokenizer.json").write_bytes((f / "tokenizer.json").read_bytes()[:-9]),
        "not valid JSON",
        "again",
    ),
    "tokenizer not text": (
        lambda f: (f / "tokenizer.json").write_bytes(b'{"a": "\xff\xfe"}'),
        "not valid JSON",
        "again",
    ),
    "git-lfs": (
        lambda f: (f / "tokenizer.json").write_text("version https://git-lfs"),
        "git-lfs pointer",
        "git lfs pull",
    ),
    "config nested": (
        lambda f: (f / "config.json").write_text('{"a":' * 100_000 + "1" + "}" * 100_000),
        "nested too deeply",
        "again",
    ),
    "index out of the folder": (
        lambda f: _index(f, {"a": "../other/model.safetensors"}),
        "outside of the model's folder",
        "again",
    ),
    "index from the root": (
        lambda f: _index(f, {"a": "/etc/passwd"}),
        "outside of the model's folder",
        "again",
    ),
    "index of long names": (lambda f: _index(f, {"a": "x" * 5000}), "lacks xxx", "download"),
    **{
        f"pipe {name}": (lambda f, name=name: _pipe(f / name), f"{name} is a named pipe", "")
        for name in (
            "config.json",
            "tokenizer.json",
            "model.safetensors",
            "model.safetensors.index.json",
            "generation_config.json",
            "tokenizer_config.json",
            "chat_template.jinja",
        )
    },
    "endless device": (lambda f: _device(f / "tokenizer.json"), "is a device, not a file", ""),
}


def test_good_folder_passes(folder: Path) -> None:
    check_folder(folder)
    assert len(check_weights(folder)) == 11


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_told_with_path_and_hint(folder: Path, fault: str) -> None:
    damage, message, hint = FAULTS[fault]
    damage(folder)
    with pytest.raises(ConfigError) as caught:
        check_folder(folder)
    assert message in caught.value.message
    assert str(folder) in caught.value.message
    assert hint in caught.value.hint


def test_absent_folder_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        check_folder(tmp_path / "absent")


def test_folder_with_only_a_gguf_points_to_it(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    with pytest.raises(ConfigError) as caught:
        check_folder(tmp_path)
    assert str(tmp_path / "m.gguf") in caught.value.hint


def test_truncated_weights_pass_the_folder_check_and_fail_the_weight_check(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    check_folder(folder)
    with pytest.raises(ConfigError, match="cut short") as caught:
        check_weights(folder)
    assert str(path) in caught.value.message


def test_index_that_misplaces_a_tensor_is_told(folder: Path) -> None:
    _index(folder, {"model.norm.weight": "model.safetensors", "x": "model.safetensors"})
    check_folder(folder)
    with pytest.raises(ConfigError, match="lacks x, which"):
        check_weights(folder)


def test_weights_that_became_a_pipe_are_refused_by_the_weight_check(folder: Path) -> None:
    _pipe(folder / "model.safetensors")
    with pytest.raises(ConfigError, match="is a named pipe"):
        check_weights(folder)


@pytest.mark.parametrize("length", [256, 5000])
def test_a_name_that_no_folder_can_have_is_told(tmp_path: Path, length: int) -> None:
    with pytest.raises(ConfigError, match=r"File name too long|does not exist") as caught:
        check_folder(tmp_path / ("x" * length))
    assert len(caught.value.message) < 400
