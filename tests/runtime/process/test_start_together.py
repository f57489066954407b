"""All children are started at once by every start method; and the server with torch is fit for it.

Each child gets ready only when all of them are there: a group that waited for one before it
starts the next would never be ready.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.child_targets import spec
from tests.support.processes import opened_devices
from vcli.runtime.messages import ChildMessage, ChildReady, ChildState
from vcli.runtime.process.fork_owner import DEFAULT_PRELOAD, ForkServer
from vcli.runtime.process.group import ChildGroup

pytestmark = pytest.mark.process

TITLES = [f"Worker_TP{rank}" for rank in range(3)]


@pytest.fixture(scope="module")
def torch_server() -> Iterator[ForkServer]:
    """The fork server as `vcli serve` has it; its modules take seconds to import."""
    with pytest.MonkeyPatch.context() as patch:
        # As users start it: libraries may have as many threads as there are CPUs.
        patch.delenv("OMP_NUM_THREADS", raising=False)
        server = ForkServer.start()
    yield server
    server.close()


def start_together(server: ForkServer | None, folder: Path) -> list[ChildMessage]:
    """What the children of a group that meets in `folder` say until all are ready."""
    messages: list[ChildMessage] = []
    group = ChildGroup(messages.append, lambda report: None)
    specs = [spec("ready_together", str(folder), len(TITLES), title=title) for title in TITLES]
    try:
        group.start(specs, starter=None if server is None else server.starter)
        assert group.wait_ready(30) == TITLES
    finally:
        group.shutdown(1.0, asked=False)
    return messages


def assert_all_started_before_one_was_ready(messages: list[ChildMessage]) -> None:
    first_ready = next(
        index for index, message in enumerate(messages) if isinstance(message, ChildReady)
    )
    started = {
        message.process for message in messages[:first_ready] if isinstance(message, ChildState)
    }
    assert started == set(TITLES)


def test_spawn_starts_all_children_before_one_is_ready(tmp_path: Path) -> None:
    assert_all_started_before_one_was_ready(start_together(None, tmp_path))


def test_fork_server_starts_all_children_before_one_is_ready(
    torch_server: ForkServer, tmp_path: Path
) -> None:
    assert_all_started_before_one_was_ready(start_together(torch_server, tmp_path))


def test_fork_starts_all_children_before_one_is_ready(tmp_path: Path) -> None:
    # In a process of its own: a copy is made of one that has a single thread.
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from vcli.runtime.process.fork_owner import ForkServer\n"
        "server = ForkServer.start('fork', preload=())\n"
        "from tests.runtime.process.test_start_together import *\n"
        "messages = start_together(server, Path(sys.argv[1]))\n"
        "server.close()\n"
        "assert_all_started_before_one_was_ready(messages)\n"
        "print('together')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": ":".join(entry for entry in sys.path if entry)},
    )
    assert done.stdout == "together\n", done.stderr[-3000:]


def test_server_that_has_imported_torch_has_one_task_and_no_device(
    torch_server: ForkServer, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    start_together(torch_server, tmp_path)
    assert torch_server.preloaded is not None
    assert torch_server.preloaded.problem == ""
    assert "torch" in DEFAULT_PRELOAD
    maps = Path(f"/proc/{torch_server.pid}/maps").read_text()
    assert "libtorch_cpu.so" in maps
    assert len(list(Path(f"/proc/{torch_server.pid}/task").iterdir())) == 1
    assert opened_devices(torch_server.pid) == []
    if torch.version.cuda is None:  # else cuBLAS maps it when torch is imported
        assert "libcuda" not in maps
