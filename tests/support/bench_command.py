"""`vcli bench ...` in a process of its own, and tiny models to give to it."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "torch_dtype": "float32",
    "eos_token_id": 2,
}


def write_config(folder: Path, **overrides: object) -> Path:
    """A folder with config.json alone."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**TINY, **overrides}))
    return folder


@contextmanager
def bench_running(*arguments: str) -> Iterator[subprocess.Popen]:
    """The command while it runs; killed afterwards if it still does."""
    process = _start(*arguments)
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=30)


def _start(*arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "vcli.cli", "bench", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def pid_of(process: subprocess.Popen, title: str) -> int:
    """The process with `title` that came from the command."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                session = (entry / "stat").read_text().rsplit(")", 1)[1].split()[3]
                command = (entry / "cmdline").read_bytes().decode()
                if int(session) == process.pid and title in command:
                    found.append(int(entry.name))
    (pid,) = found
    return pid


def run_bench(*arguments: str) -> tuple[int, str, str]:
    """Status, stdout, stderr."""
    with bench_running(*arguments) as process:
        out, err = process.communicate(timeout=120)
    return process.returncode, out, err
