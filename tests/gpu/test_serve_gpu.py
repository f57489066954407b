"""A real `vcli serve` on GPUs: answers, and gives the memory back whatever is killed."""

import contextlib
import os
import signal
import time
from pathlib import Path

import httpx
import pytest
import torch

from tests.support.serving import Server, serving
from tests.support.tiny_model import tiny_checkpoint
from tests.support.tiny_tokenizer import write_tokenizer

NUM_GPUS = torch.cuda.device_count()

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NUM_GPUS == 0, reason="no CUDA device"),
]

LAYOUTS = [
    pytest.param(
        ["-tp", str(size)],
        id=f"tp{size}",
        marks=pytest.mark.skipif(size > NUM_GPUS, reason=f"needs {size} GPUs"),
    )
    for size in (1, 2, 4, 8)
]
#: Ranks of the servers that are killed: as many of a size as there are GPUs.
TP = max(size for size in (1, 2, 4, 8) if size <= max(NUM_GPUS, 1))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tiny random checkpoint with a tokenizer."""
    folder = tmp_path / "model"
    folder.mkdir()
    for path in tiny_checkpoint("llama").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    write_tokenizer(folder)
    return folder


@pytest.fixture
def graph_model(tmp_path: Path) -> Path:
    """One whose heads the Triton kernels take, so that its steps are CUDA graphs."""
    folder = tmp_path / "graph-model"
    folder.mkdir()
    for path in tiny_checkpoint("llama", head_dim=64).iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    write_tokenizer(folder)
    return folder


def graph_arguments(model: Path) -> list[str]:
    return [
        str(model), "--served-model-name", "tiny", "--dtype", "bfloat16", "--max-model-len", "256",
        "--kv-cache-memory", "64M", "--max-num-seqs", "8", "-tp", str(TP),
    ]  # fmt: skip


def used_on_all() -> int:
    """Bytes in use on all GPUs, by NVML; also what processes of other namespaces hold."""
    pynvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")

    pynvml.nvmlInit()
    try:
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        return sum(pynvml.nvmlDeviceGetMemoryInfo(handle).used for handle in handles)
    finally:
        pynvml.nvmlShutdown()


def ask(url: str) -> str:
    answer = httpx.post(
        f"{url}/v1/completions",
        json={
            "model": "tiny", "prompt": [5, 6, 7, 8, 9], "max_tokens": 24, "temperature": 0,
            "ignore_eos": True,
        },
        timeout=60,
    )  # fmt: skip
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def arguments(model: Path, *more: str) -> list[str]:
    return [
        str(model), "--served-model-name", "tiny", "--dtype", "float32", "--max-model-len", "256",
        "--kv-cache-memory", "64M", "--max-num-seqs", "8", *more,
    ]  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_greedy_text_on_gpus_is_that_of_the_cpu(
    tmp_path: Path, model: Path, layout: list[str]
) -> None:
    with serving(arguments(model, "--device", "cpu"), folder=tmp_path) as server:
        expected = ask(server.wait_serving())
    with serving(arguments(model, *layout), folder=tmp_path) as server:
        assert ask(server.wait_serving()) == expected
        if layout[1] != "1":
            assert "all-reduce" in server.output
            assert " verified" in server.output


#: last state that all ranks have reached when the victim is killed
PHASES = {"load": "groups", "warm-up": "kv", "serving": None}
VICTIMS = ["EngineCore", "serve"] + [f"Worker_TP{rank}" for rank in range(TP if TP > 1 else 0)]


def wait_phase(server: Server, phase: str) -> None:
    state = PHASES[phase]
    server.wait_line(r"serving tiny" if state is None else rf"ranks? [0-9-]+ {state}", timeout_s=90)


def wait_memory_free(before: int) -> None:
    killed_at = time.monotonic()
    while used_on_all() > before + 64 * 2**20:
        assert time.monotonic() - killed_at < 3
        time.sleep(0.02)


@pytest.mark.parametrize("title", VICTIMS)
@pytest.mark.parametrize("phase", PHASES)
def test_sigkill_gives_the_memory_of_the_gpus_back(
    tmp_path: Path, graph_model: Path, title: str, phase: str
) -> None:
    before = used_on_all()
    with serving(graph_arguments(graph_model), folder=tmp_path) as server:
        wait_phase(server, phase)
        victim = victim_of(server, title)
        os.kill(victim, signal.SIGKILL)
        if victim != server.pid:
            assert server.wait_exit() in (5, 6)
        server.wait_nothing_left(timeout_s=3)
        wait_memory_free(before)


def test_the_end_of_the_fork_server_is_survived_and_holds_no_memory(
    tmp_path: Path, graph_model: Path
) -> None:
    before = used_on_all()
    with serving(graph_arguments(graph_model), folder=tmp_path) as server:
        url = server.wait_serving()
        expected = ask(url)
        os.kill(victim_of(server, "ForkServer"), signal.SIGKILL)
        assert ask(url) == expected
        os.kill(server.pid, signal.SIGKILL)
        server.wait_nothing_left(timeout_s=3)
        wait_memory_free(before)


def victim_of(server: Server, title: str) -> int:
    if title == "serve":
        return server.pid
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with contextlib.suppress(StopIteration):
            return next(
                pid
                for pid, command in sorted(server.family().items(), reverse=True)
                if f"vcli::{title}" in command
            )
    return next(pid for pid, command in server.family().items() if "vcli::EngineCore" in command)
