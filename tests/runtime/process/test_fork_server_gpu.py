"""Copies of the fork server use CUDA as fresh processes do, whatever their parent has done."""

from pathlib import Path

import pytest

from tests.support.processes import opened_devices
from vcli.runtime.process.child import ChildSpec
from vcli.runtime.process.fork_owner import ForkServer
from vcli.runtime.process.group import ChildGroup

pytestmark = [pytest.mark.process, pytest.mark.gpu]


def test_children_use_cuda_though_their_parent_has_and_the_server_has_not() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    torch.ones(3, device="cuda").sum().item()
    server = ForkServer.start(preload=("torch", "vcli.runtime.worker.worker"))
    group = ChildGroup(lambda message: None, lambda report: None)
    try:
        spec = ChildSpec(
            target="tests.support.fork_children:use_cuda", arguments=(), title="Worker_TP0"
        )
        group.start([spec] * 3, starter=server.starter)
        assert group.wait_ready(120) == [3.0 * 512**3] * 3
        assert server.preloaded is not None
        assert server.preloaded.problem == ""
        # cuBLAS maps libcuda when torch is imported; what a copy could not bear is an open device.
        assert opened_devices(server.pid) == []
        assert opened_devices(group.pids[0]) != []
        assert len(list(Path(f"/proc/{server.pid}/task").iterdir())) == 1
        for pid in group.pids:
            assert f"PPid:\t{server.pid}\n" in Path(f"/proc/{pid}/status").read_text()
    finally:
        group.shutdown(2.0, asked=False)
        server.close()
