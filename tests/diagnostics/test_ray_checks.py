"""The RAY checks on raylets that the files of a made-up host show."""

import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.check_cases import Case, check_case
from tests.support.fake_host import FakePackages
from tests.support.fake_nvml import gpu_facts
from vcli.diagnostics import Status
from vcli.diagnostics.packages import Interpreter

PASS, WARN, FAIL, SKIP = Status.PASS, Status.WARN, Status.FAIL, Status.SKIP
SITE = "opt/env/lib/python3.12/site-packages"
RAY = {"RAY_ADDRESS": "auto"}
TWO_NODES = {"tp": 2, "nnodes": 2, "master_addr": "10.0.0.1"}


def raylet(pid: int = 77, *, ip: str = "10.0.0.1", gpus: str = "GPU,2,", environ: str = "",
           gcs: str = "10.0.0.1:6379") -> dict[str, str]:  # fmt: skip
    words = [
        f"/{SITE}/ray/core/src/ray/raylet/raylet", f"--node_ip_address={ip}",
        f"--static_resource_list=node:{ip},1.0,CPU,8,{gpus}memory,1000",
        f"--session_dir=/tmp/ray/session_{pid}", f"--gcs-address={gcs}",
    ]  # fmt: skip
    return {
        f"proc/{pid}/cmdline": "\0".join(words),
        f"proc/{pid}/environ": environ or "HOME=/root",
        f"{SITE}/ray-2.49.1.dist-info/METADATA": "x",
    }


def here(version: str | None = "2.49.1", python: tuple[int, int, int] = (3, 12, 4)) -> Any:
    versions = {} if version is None else {"ray": version}
    return {"packages": FakePackages(versions=versions), "interpreter": Interpreter(version=python)}


def case(id_: str, status: Status, says: str = "", **fields: Any) -> Case:
    return Case(id=id_, status=status, says=says, **{"environ": RAY, "files": raylet(), **fields})


CUDA = {"device_type": "cuda"}
CASES = [
    *(case(f"RAY-0{number}", SKIP, "Ray is not used", environ={}) for number in range(1, 8)),
    case("RAY-01", PASS, "ray 2.49.1, Python 3.12", more=here()),
    case("RAY-01", PASS, "no Ray node", more=here(), files={}),
    case("RAY-01", FAIL, "not installed", more=here(None), remedy="pip install ray"),
    case("RAY-01", FAIL, "ray 2.30.0 here, 2.49.1 on the node", more=here("2.30.0"),
         remedy="pip install 'ray==2.49.1', with Python 3.12"),
    case("RAY-01", FAIL, "Python 3.11 here, 3.12 on the node", more=here(python=(3, 11, 7))),
    case("RAY-02", PASS, "Ray would start one", files={}),
    case("RAY-02", FAIL, "the plan has 2 nodes", files={}, config=TWO_NODES,
         remedy="ray start --address 10.0.0.1:6379"),
    case("RAY-02", Status.UNKNOWN, "no host:port", environ={"RAY_ADDRESS": "head:port"}),
    case("RAY-03", PASS, "10.0.0.1"),
    case("RAY-03", SKIP, "no Ray node", files={}),
    case("RAY-03", FAIL, "Ray has 172.17.0.2, which is no address of this host",
         files=raylet(ip="172.17.0.2"), config=TWO_NODES,
         remedy="ray start --node-ip-address 10.0.0.1"),
    case("RAY-03", FAIL, "Ray has 127.0.0.1, the way to node 0 begins at 10.0.0.1",
         files=raylet(ip="127.0.0.1"), config=TWO_NODES),
    case("RAY-04", PASS, "2 GPUs for 2 ranks", config={"tp": 2}, more=CUDA,
         host={"gpus": gpu_facts(2)}),
    case("RAY-04", FAIL, "0 GPUs for 2 ranks", config={"tp": 2}, more=CUDA,
         files=raylet(gpus=""), host={"gpus": gpu_facts(2)}, remedy="ray start --num-gpus 2"),
    case("RAY-04", SKIP, "planned for the CPU"),
    case("RAY-05", PASS, "equal"),
    case("RAY-05", PASS, "equal", files=raylet(environ="NCCL_DEBUG=INFO\0HOME=/root")),
    case("RAY-05", FAIL, "NCCL_SOCKET_IFNAME: eth0 here, not set there",
         environ={**RAY, "NCCL_SOCKET_IFNAME": "eth0"},
         remedy="export NCCL_SOCKET_IFNAME=eth0; ray start"),
    case("RAY-05", FAIL, "NCCL_ALGO: not set here, Ring there",
         files=raylet(environ="NCCL_ALGO=Ring\0")),
    case("RAY-07", PASS, "pid 77"),
    case("RAY-07", WARN, "2 raylets: pid 77 (/tmp/ray/session_77), pid 99",
         files={**raylet(), **raylet(99)}, remedy="ray stop   (or kill 77)"),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_verdict(case: Case, tmp_path: Path) -> None:
    check_case(case, tmp_path)


@pytest.fixture
def listener() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize("from_file", [True, False])
def test_a_control_store_that_listens_passes(
    tmp_path: Path, listener: int, from_file: bool
) -> None:
    address = f"127.0.0.1:{listener}"
    files: Mapping[str, str] = {"tmp/ray/ray_current_cluster": address} if from_file else {}
    environ = RAY if from_file else {"RAY_ADDRESS": f"ray://{address}"}
    check_case(case("RAY-02", PASS, f"{address} answers", files=files, environ=environ), tmp_path)


def test_a_control_store_that_is_gone_fails(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    files = raylet(gcs=f"127.0.0.1:{port}")
    check_case(
        case("RAY-02", FAIL, f"127.0.0.1:{port}: Connection refused", files=files,
             remedy=f"ray start --head --port {port}"), tmp_path
    )  # fmt: skip
