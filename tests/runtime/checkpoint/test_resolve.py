"""What the user types as MODEL, and where it leads."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from vcli.runtime.checkpoint import convert_gguf, resolve_model
from vcli.runtime.checkpoint import resolve as resolve_module
from vcli.topology.errors import ConfigError, UnfitError

MakeGguf = Callable[..., Path]
MakeTensors = Callable[..., dict[str, np.ndarray]]


@pytest.fixture
def gguf_path(tmp_path: Path, make_gguf: MakeGguf, make_tensors: MakeTensors) -> Path:
    return make_gguf(tmp_path / "tiny-model.gguf", make_tensors("llama", hidden=32, layers=1))


@pytest.fixture
def environ(tmp_path: Path, real_environ: dict[str, str]) -> dict[str, str]:
    return real_environ | {"VCLI_HOME": str(tmp_path / "home"), "HOME": str(tmp_path)}


def test_no_model_is_the_demo(real_environ: dict[str, str], demo_model: Path) -> None:
    model = resolve_model(None, environ=real_environ, report=print)
    assert (model.path, model.name, model.source) == (demo_model, "SmolLM2-135M-Instruct", "demo")


def test_folder_is_used_as_it_is(
    tmp_path: Path, gguf_path: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "org" / "name"
    convert_gguf(gguf_path, folder, report=print)
    monkeypatch.chdir(folder)
    for typed in (str(folder), "~/org/name", "."):
        model = resolve_model(typed, environ=environ, report=print)
        assert (model.path.resolve(), model.name, model.source) == (folder, "name", "folder")
    monkeypatch.chdir(tmp_path)  # a folder here goes before the hub
    assert resolve_model("org/name", environ=environ, report=print).source == "folder"


def test_gguf_is_converted_once_and_again_when_it_changes(
    gguf_path: Path, environ: dict[str, str], make_gguf: MakeGguf, make_tensors: MakeTensors
) -> None:
    lines: list[str] = []
    first = resolve_model(str(gguf_path), environ=environ, report=lines.append)
    again = resolve_model(str(gguf_path), environ=environ, report=lines.append)
    assert first == again
    assert (first.name, first.source) == ("tiny-model", "gguf")
    assert lines == ["converting tiny-model.gguf to float32 safetensors, this happens once"]
    # Same size and same modification time, other content.
    status = gguf_path.stat()
    tensors = make_tensors("llama", hidden=32, layers=1)
    make_gguf(gguf_path, {name: tensor + 1 for name, tensor in tensors.items()})
    os.utime(gguf_path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert gguf_path.stat().st_size == status.st_size
    assert resolve_model(str(gguf_path), environ=environ, report=print).path != first.path


def test_large_gguf_becomes_bfloat16(
    gguf_path: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolve_module, "MAX_FLOAT32_BYTES", 1000)
    model = resolve_model(str(gguf_path), environ=environ, report=print)
    assert '"dtype": "bfloat16"' in (model.path / "config.json").read_text()


def test_damage_in_the_cache_is_told_with_the_command(
    gguf_path: Path, environ: dict[str, str]
) -> None:
    model = resolve_model(str(gguf_path), environ=environ, report=print)
    (model.path / "tokenizer.json").unlink()
    with pytest.raises(UnfitError, match="damaged") as caught:
        resolve_model(str(gguf_path), environ=environ, report=print)
    assert f"rm -r {model.path}" in caught.value.hint
    shutil.rmtree(model.path)
    assert resolve_model(str(gguf_path), environ=environ, report=print) == model


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("", "no folder or .gguf file"),
        ("nonsense", "no folder or .gguf file"),
        ("./org/name", "no folder or .gguf file"),
        ("a/b/c", "no folder or .gguf file"),
        ("absent.gguf", "cannot read absent.gguf: No such file"),
        ("/dev/null", "no folder or .gguf file"),
        ("/etc/passwd", "is a file"),
    ],
)
def test_what_is_no_model_is_told(environ: dict[str, str], typed: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolve_model(typed, environ=environ, report=print)
    assert caught.value.exit_status == 2
    assert caught.value.hint


def test_unreachable_hub_is_one_message_with_the_ways_out(environ: dict[str, str]) -> None:
    offline = environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": ""}
    with pytest.raises(UnfitError, match=r"^org/name is no folder here") as caught:
        resolve_model("org/name", environ=offline, report=print)
    assert caught.value.exit_status == 1
    assert "\n" not in caught.value.message
    for way_out in ("local folder", ".gguf", "VCLI_DEMO_WHEEL", "HF_HUB_OFFLINE", "HF_ENDPOINT"):
        assert way_out in caught.value.hint


def test_offline_hub_model_comes_from_the_cache(
    tmp_path: Path, gguf_path: Path, environ: dict[str, str]
) -> None:
    offline = environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    with pytest.raises(UnfitError, match="HF_HUB_OFFLINE is set"):
        resolve_model("org/name", environ=offline, report=print)
    repository = tmp_path / "hf" / "hub" / "models--org--name"
    commit = "0123456789abcdef0123456789abcdef01234567"
    convert_gguf(gguf_path, repository / "snapshots" / commit, report=print)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    model = resolve_model("org/name", environ=offline, report=print)
    assert (model.path, model.name) == (repository / "snapshots" / commit, "org/name")
    assert model.source == "hub"


def test_package_needs_neither_torch_nor_transformers(
    gguf_path: Path, environ: dict[str, str]
) -> None:
    code = (
        "import os, sys\n"
        "from vcli.runtime.checkpoint import check_weights, resolve_model\n"
        "lazy = {'numpy', 'gguf', 'tokenizers', 'huggingface_hub'} & set(sys.modules)\n"
        "model = resolve_model(sys.argv[1], environ=os.environ, report=print)\n"
        "check_weights(model.path)\n"
        "print(lazy, {'torch', 'transformers'} & set(sys.modules))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(gguf_path)],
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.splitlines()[-1] == "set() set()"
