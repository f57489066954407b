"""What a user typed wrong is said before anything starts: one message, a hint, exit 2."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.serving import serving

pytestmark = pytest.mark.e2e


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "vcli.cli", "serve", "--port", "0", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environ},
    )


def assert_refused(done: subprocess.CompletedProcess[str], *words: str, status: int = 2) -> None:
    assert done.returncode == status, done.stderr
    assert done.stderr.count("error: ") == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert "  → " in done.stderr
    for word in words:
        assert word in done.stderr


def copy_of(folder: Path, target: Path) -> Path:
    """The checkpoint with its weights linked, to be damaged."""
    target.mkdir()
    for path in folder.iterdir():
        if path.suffix == ".safetensors":
            (target / path.name).symlink_to(path)
        else:
            shutil.copy(path, target / path.name)
    return target


def test_no_such_folder() -> None:
    assert_refused(run("/no/such/folder"), "/no/such/folder")


def test_folder_without_config(tmp_path: Path, demo_model: Path) -> None:
    model = copy_of(demo_model, tmp_path / "m")
    (model / "config.json").unlink()
    assert_refused(run(str(model)), "config.json", str(model))


def test_folder_without_weights(tmp_path: Path, demo_model: Path) -> None:
    model = copy_of(demo_model, tmp_path / "m")
    (model / "model.safetensors").unlink()
    assert_refused(run(str(model)), "safetensors", str(model))


def test_unsupported_architecture_lists_the_supported(tmp_path: Path, demo_model: Path) -> None:
    model = copy_of(demo_model, tmp_path / "m")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "architectures": ["Foo"]}))
    assert_refused(run(str(model)), "'Foo'", "LlamaForCausalLM", "Qwen3ForCausalLM")


def test_unreadable_file(tmp_path: Path, demo_model: Path) -> None:
    """A folder in the place of a file cannot be read, not even by root."""
    model = copy_of(demo_model, tmp_path / "m")
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").mkdir()
    assert_refused(run(str(model)), "model.safetensors")


def test_sizes_that_do_not_fit_the_model(demo_model: Path) -> None:
    assert_refused(run(str(demo_model), "-tp", "8"), "8", "4, 5, 6, 9")
    assert_refused(run(str(demo_model), "-pp", "31"), "30")
    assert_refused(run(str(demo_model), "--max-model-len", "100000"), "100000", "8192")


def test_port_in_use_names_the_holder(demo_model: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        done = run(str(demo_model), "--port", port)
    assert_refused(done, port, f"pid {os.getpid()}", "--port")


def test_kv_cache_too_small_for_one_request(demo_model: Path) -> None:
    done = run(str(demo_model), "--kv-cache-memory", "1M")
    assert_refused(done, "--kv-cache-memory", "--max-model-len")


@pytest.mark.parametrize(
    ("file", "field", "value"),
    [
        ("tokenizer_config.json", "chat_template", ["a"]),
        ("generation_config.json", "temperature", -4),
        ("generation_config.json", "top_k", 2**70),
    ],
)
def test_wrong_field_beside_the_tokenizer_is_found_before_the_start(
    tmp_path: Path, demo_model: Path, file: str, field: str, value: object
) -> None:
    model = copy_of(demo_model, tmp_path / "m")
    path = model / file
    config = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**config, field: value}))
    (model / "chat_template.jinja").unlink(missing_ok=True)
    done = run(str(model))
    assert_refused(done, file, field)
    assert "EngineCore" not in done.stderr


def test_chat_template_that_is_no_text_is_found_before_the_start(
    tmp_path: Path, demo_model: Path
) -> None:
    model = copy_of(demo_model, tmp_path / "m")
    (model / "chat_template.jinja").write_bytes(b"\xff\xfe")
    done = run(str(model))
    assert_refused(done, "chat_template.jinja")
    assert "EngineCore" not in done.stderr


@pytest.mark.slow
def test_truncated_weights_are_found_before_the_start(tmp_path: Path, demo_model: Path) -> None:
    model = truncated(demo_model, tmp_path / "m")
    assert_refused(run(str(model)), "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("layout", [[], ["-tp", "3"]], ids=["tp1", "tp3"])
def test_truncated_weights_without_preflight_are_exit_5_with_rank_phase_and_file(
    tmp_path: Path, demo_model: Path, layout: list[str]
) -> None:
    model = truncated(demo_model, tmp_path / "m")
    with serving([str(model), "--no-preflight", *layout], folder=tmp_path) as server:
        assert server.wait_exit(timeout_s=60) == 5
        assert server.output.count("error: ") == 1
        for word in ("rank ", "weights", "model.safetensors"):
            assert word in server.output
        server.wait_nothing_left()


@pytest.mark.slow
def test_missing_tensor_is_exit_5_with_rank_phase_and_tensor(
    tmp_path: Path, demo_model: Path
) -> None:
    from safetensors.torch import load_file, save_file

    model = copy_of(demo_model, tmp_path / "m")
    tensors = load_file(model / "model.safetensors")
    del tensors["model.layers.7.mlp.up_proj.weight"]
    (model / "model.safetensors").unlink()
    save_file(tensors, model / "model.safetensors")
    arguments = [str(model), "--no-preflight", "-tp", "3"]
    with serving(arguments, folder=tmp_path) as server:
        assert server.wait_exit(timeout_s=60) == 5
        assert server.output.count("error: ") == 1
        for word in ("rank ", "weights", "model.layers.7.mlp.up_proj.weight"):
            assert word in server.output
        server.wait_nothing_left()


def truncated(folder: Path, target: Path) -> Path:
    model = copy_of(folder, target)
    whole = (folder / "model.safetensors").read_bytes()
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    return model
