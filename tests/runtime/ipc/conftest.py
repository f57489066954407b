"""Children at the other end of a queue, ended with the test."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from tests.support.ipc_queues import CAPACITY
from vcli.runtime.ipc import wakeup
from vcli.runtime.ipc.broadcast import BroadcastReader, BroadcastWriter
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


@pytest.fixture
def replies():
    made = [BroadcastReader.create(CAPACITY, f"reply-{i}", num_processes=99) for i in range(3)]
    readers = [reader for reader, _ in made]
    writers = [BroadcastWriter.attach(handle) for _, handle in made]
    yield readers, writers
    for end in (*writers, *readers):
        end.close()


@pytest.fixture
def no_recheck(monkeypatch):
    """Without the periodic second look, a lost ring is a hang; and threads switch everywhere."""
    monkeypatch.setattr(wakeup, "RECHECK_S", 1000.0)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval_s)
