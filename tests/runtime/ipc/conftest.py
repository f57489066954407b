"""Children at the other end of a queue, ended with the test."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from vcli.runtime.ipc.handles import ReaderHandle, WriterHandle

StartChild = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start_child() -> Iterator[StartChild]:
    children: list[subprocess.Popen[str]] = []

    def start(
        role: str,
        *,
        read: ReaderHandle | None = None,
        write: WriterHandle | None = None,
        count: int = 0,
    ) -> subprocess.Popen[str]:
        handles = msgspec.json.encode({"read": read, "write": write}).decode()
        script = str(Path(__file__).with_name("queue_child.py"))
        fds = [fd for handle in (read, write) if handle is not None for fd in handle.fds()]
        child = subprocess.Popen(
            [sys.executable, script, role, handles, str(count)],
            pass_fds=fds,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        children.append(child)
        return child

    yield start
    for child in children:
        child.kill()
        child.wait(10)
        for stream in (child.stdin, child.stdout):
            if stream is not None:
                stream.close()


@pytest.fixture
def count_fds() -> Callable[[], int]:
    return lambda: len(list(Path("/proc/self/fd").iterdir()))
