"""NET checks with a made-up network, and NET-04 with real listeners."""

import socket
from pathlib import Path

import pytest

from tests.support.check_cases import Case, check_case
from tests.support.fake_host import FakeNetwork
from vcli.diagnostics import PortUse, Status
from vcli.diagnostics.files import HostFiles
from vcli.diagnostics.holders import age_text, find_holder
from vcli.diagnostics.sockets import Network

PASS, WARN, FAIL, SKIP = Status.PASS, Status.WARN, Status.FAIL, Status.SKIP
TWO_NODES = {"nnodes": 2, "tp": 2, "master_addr": "10.0.0.1"}
SECOND = {**TWO_NODES, "node_rank": 1, "master_addr": "head"}


def http(port: int, *, is_typed: bool) -> PortUse:
    return PortUse(purpose="HTTP", address="127.0.0.1", port=port, flag="--port", is_typed=is_typed)


CASES = [
    Case(id="NET-01", status=SKIP, says="one node"),
    Case(
        id="NET-01",
        status=PASS,
        says="10.0.0.1 toward 10.0.0.1 (eth0, 100 Gbit/s, MTU 9000)",
        config=TWO_NODES,
    ),
    Case(
        id="NET-01",
        status=FAIL,
        says="no route to 10.0.0.1",
        config=TWO_NODES,
        more={"network": FakeNetwork(toward=None)},
    ),
    Case(
        id="NET-01",
        status=FAIL,
        says="cannot reach it",
        remedy="this host has 10.0.0.1 (eth0)",
        config={**TWO_NODES, "master_addr": "127.0.0.1"},
    ),
    Case(id="NET-02", status=SKIP, says="one node"),
    Case(id="NET-02", status=PASS, says="10.0.0.1", config=TWO_NODES),
    Case(id="NET-02", status=FAIL, says="head does not resolve", config=SECOND),
    Case(
        id="NET-02",
        status=FAIL,
        says="on node 1: that is this host itself",
        remedy="--master-addr ADDRESS, an address of node 0 that the others reach",
        config=SECOND,
        more={"network": FakeNetwork(names={"head": ("127.0.1.1",)})},
    ),
    Case(
        id="NET-02",
        status=FAIL,
        says="127.0.0.1 on node 1: that is this host itself",
        remedy="on node 0 `ip -br addr` shows them; this host, not node 0, has 10.0.0.1 (eth0)",
        config={**SECOND, "master_addr": "127.0.0.1"},
    ),
    Case(
        id="NET-02",
        status=WARN,
        says="after 2.0 s",
        config=SECOND,
        more={
            "network": FakeNetwork(names={"head": ("10.0.0.9",)}),
            "clock": iter([10.0, 12.0, 12.0]).__next__,
        },
    ),
    Case(id="NET-03", status=SKIP, says="one node"),
    Case(id="NET-03", status=PASS, config=TWO_NODES),
    Case(id="NET-03", status=SKIP, says="this is node 1", config=SECOND),
    Case(
        id="NET-03",
        status=FAIL,
        says="10.0.0.77 is no address of this host, which has 10.0.0.1",
        remedy="--master-addr 10.0.0.1",
        config={**TWO_NODES, "master_addr": "10.0.0.77"},
    ),
    Case(id="NET-04", status=SKIP, says="no fixed port"),
    Case(
        id="NET-04",
        status=PASS,
        says="8000 (HTTP) free",
        more={"ports": (http(8000, is_typed=False),)},
    ),
    Case(
        id="NET-04",
        status=WARN,
        says="port 8000 (HTTP) is in use",
        remedy="--port 8001",
        more={"ports": (http(8000, is_typed=False),), "network": FakeNetwork(taken=(8000,))},
    ),
    Case(
        id="NET-04",
        status=FAIL,
        remedy="--port 8003",
        more={
            "ports": (http(8000, is_typed=True),),
            "network": FakeNetwork(taken=(8000, 8001, 8002)),
        },
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_verdict(case: Case, tmp_path: Path) -> None:
    check_case(case, tmp_path)


def test_a_real_listener_is_named_with_its_pid(tmp_path: Path) -> None:
    import os

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        more = {"ports": (http(port, is_typed=True),), "network": Network()}
        result = check_case(Case(id="NET-04", status=FAIL, more=more), tmp_path)
        assert f"port {port} (HTTP) is in use" in result.measured
        holder = find_holder(HostFiles(), port)
        assert holder is not None
        assert holder.pid == os.getpid()
        assert f"pid {os.getpid()} (" in holder.describe()
        assert holder.age_s is not None
        assert holder.age_s < 3600 * 24
    check_case(Case(id="NET-04", status=PASS, more=more), tmp_path)


def test_ages_are_written_for_people() -> None:
    assert [age_text(s) for s in (42, 61, 3600 * 3 + 12 * 60, 86400 * 5 + 7200)] == [
        "42 s", "1 m", "3 h 12 m", "5 d 2 h",
    ]  # fmt: skip
