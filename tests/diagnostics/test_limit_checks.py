"""LIM checks and the readers below them: limits, control groups of both versions."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.check_cases import Case, check_case
from tests.support.fake_host import HEALTHY_FILES, make_tree
from vcli.diagnostics import Dialect, Status
from vcli.diagnostics.cgroups import Cgroups
from vcli.diagnostics.files import HostFiles
from vcli.diagnostics.limits import OPEN_FILES, ZmqLimits, read_limit, read_zmq_limits

PASS, WARN, FAIL, SKIP, UNKNOWN = Status.PASS, Status.WARN, Status.FAIL, Status.SKIP, Status.UNKNOWN
LIMITS = HEALTHY_FILES["proc/self/limits"]
ROOT_USER = "Name:\tpython\nCapEff:\t000001ffffffffff\n"


def limited(name: str, soft: str, hard: str) -> dict[str, str]:
    lines = [line for line in LIMITS.splitlines() if not line.startswith(name)]
    return {"proc/self/limits": "\n".join((*lines, f"{name}   {soft}   {hard}   units", ""))}


RDMA = {"sys/class/infiniband/mlx5_0/node_type": "1: CA"}

NODES = {"nnodes": 2, "pp": 2, "master_addr": "10.0.0.1"}


def zmq(max_sockets: int = 1023, *, has_curve: bool = True) -> dict[str, Any]:
    limits = ZmqLimits(version="4.3.5", max_sockets=max_sockets, has_curve=has_curve)
    return {"zmq_limits": lambda: limits}


CASES = [
    Case(id="LIM-07", status=SKIP, says="one node"),
    Case(id="LIM-07", status=PASS, says="1023 sockets", config=NODES, more=zmq()),
    Case(
        id="LIM-07",
        status=FAIL,
        says="without CURVE",
        remedy="pip install",
        config=NODES,
        more=zmq(has_curve=False),
    ),
    Case(
        id="LIM-07", status=FAIL, says="4 sockets in a context, 8 needed", config=NODES, more=zmq(4)
    ),
    Case(
        id="LIM-07",
        status=FAIL,
        says="not installed",
        remedy="pip install pyzmq",
        config=NODES,
        more={"zmq_limits": lambda: None},
    ),
    Case(id="LIM-01", status=PASS, says="free in /dev/shm"),
    Case(id="LIM-02", status=PASS, says="16.0 MiB allocated"),
    Case(id="LIM-02", status=PASS, says="36.0 MiB", config={"tp": 2}, more={"device_type": "cuda"}),
    Case(id="LIM-04", status=SKIP, says="no RDMA"),
    Case(
        id="LIM-04",
        status=FAIL,
        says="8.0 MiB may be locked",
        remedy="docker run --ulimit memlock=-1:-1",
        files=RDMA,
        more={"dialect": Dialect.DOCKER},
    ),
    Case(
        id="LIM-04",
        status=WARN,
        says="128.0 MiB",
        files={**RDMA, **limited("Max locked memory", str(128 << 20), str(128 << 20))},
    ),
    Case(
        id="LIM-04",
        status=PASS,
        says="unlimited",
        files={**RDMA, **limited("Max locked memory", "unlimited", "unlimited")},
    ),
    Case(
        id="LIM-04", status=PASS, says="CAP_IPC_LOCK", files={**RDMA, "proc/self/status": ROOT_USER}
    ),
    Case(id="LIM-05", status=PASS, says="soft limit 1024, raised to 1088"),
    Case(
        id="LIM-05",
        status=FAIL,
        says="hard limit 1024, 1152 needed",
        remedy="ulimit -n 1152",
        config={"tp": 2},
        files=limited("Max open files", "256", "1024"),
    ),
    Case(
        id="LIM-05",
        status=WARN,
        remedy="fs.nr_open=1088",
        files={**limited("Max open files", "256", "unlimited"), "proc/sys/fs/nr_open": "1000"},
    ),
    Case(id="LIM-05", status=UNKNOWN, files={"proc/self/limits": ""}),
    Case(id="LIM-06", status=PASS, says="more tasks under RLIMIT_NPROC"),
    Case(
        id="LIM-06",
        status=FAIL,
        says="20 more tasks under the control group's pids.max, 160 needed",
        remedy="--pids-limit",
        more={"dialect": Dialect.DOCKER},
        files={
            "sys/fs/cgroup/user.slice/pids.max": "100",
            "sys/fs/cgroup/user.slice/pids.current": "80",
        },
    ),
    Case(
        id="LIM-06",
        status=FAIL,
        says="more tasks under kernel.threads-max, 220 needed",
        config={"tp": 2},
        files={"proc/sys/kernel/threads-max": "500"},
    ),
    Case(
        id="LIM-06",
        status=FAIL,
        says="under RLIMIT_NPROC",
        remedy="ulimit -u 460",
        files={
            **limited("Max processes", "150", "150"),
            "proc/77/status": "Name:\tx\nUid:\t0\t0\t0\t0\nThreads:\t40\n",
        },
    ),
    Case(
        id="LIM-06",
        status=PASS,
        says="threads-max",
        files={**limited("Max processes", "150", "150"), "proc/self/status": ROOT_USER},
    ),
    Case(id="LIM-08", status=PASS, says="below /tmp"),
    Case(
        id="LIM-08",
        status=FAIL,
        says="132 bytes below TMPDIR",
        remedy="export TMPDIR=/tmp",
        environ={"TMPDIR": "/" + "a" * 99},
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_verdict(case: Case, tmp_path: Path) -> None:
    check_case(case, tmp_path)


def test_several_gpu_ranks_want_a_gibibyte_of_shm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    real = os.statvfs("/")

    def small(path: object) -> os.statvfs_result:
        values = list(real)
        values[0] = values[1] = 1 << 20
        values[3] = values[4] = 200
        return os.statvfs_result(values)

    monkeypatch.setattr("vcli.diagnostics.checks.limits.os.statvfs", small)
    gpus = {"config": {"tp": 2}, "more": {"device_type": "cuda"}}
    check_case(Case(id="LIM-01", status=WARN, says="200.0 MiB free", **gpus), tmp_path)
    many = {"config": {"tp": 8}, "more": {"device_type": "cuda"}}
    check_case(
        Case(id="LIM-01", status=FAIL, says="576.0 MiB needed", remedy="size=1G", **many), tmp_path
    )
    check_case(Case(id="LIM-01", status=PASS), tmp_path)


def test_a_failure_of_shm_blocks_only_ranks_on_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, begin: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("vcli.diagnostics.checks.limits.os.posix_fallocate", full)
    on_cpu = check_case(Case(id="LIM-02", status=FAIL, says="No space left"), tmp_path)
    on_gpu = check_case(Case(id="LIM-02", status=FAIL, more={"device_type": "cuda"}), tmp_path)
    assert (on_cpu.refuses_launch, on_gpu.refuses_launch) == (False, True)


def test_limits_are_read_as_the_kernel_writes_them() -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = read_limit(HostFiles(), OPEN_FILES)
    assert limit is not None
    assert (limit.soft, limit.hard) == (soft, hard)


V2 = {
    "proc/self/cgroup": "0::/a.slice/b.scope",
    "sys/fs/cgroup/a.slice/memory.max": "1000000",
    "sys/fs/cgroup/a.slice/memory.current": "400000",
    "sys/fs/cgroup/a.slice/memory.stat": "anon 1\ninactive_file 100000\n",
    "sys/fs/cgroup/a.slice/b.scope/memory.max": "max",
    "sys/fs/cgroup/a.slice/b.scope/memory.current": "300000",
    "sys/fs/cgroup/a.slice/b.scope/cpu.max": "150000 100000",
    "sys/fs/cgroup/a.slice/cpu.max": "max 100000",
    "sys/fs/cgroup/a.slice/b.scope/pids.max": "50",
    "sys/fs/cgroup/a.slice/b.scope/pids.current": "20",
}
V1 = {
    "proc/self/cgroup": "5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n3:pids:/docker/abc\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "1000000",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": "300000",
    "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "150000",
    "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
    "sys/fs/cgroup/pids/pids.max": "50",
    "sys/fs/cgroup/pids/pids.current": "20",
}


@pytest.mark.parametrize("files", [V2, V1], ids=["version 2", "version 1 seen from a container"])
def test_the_tightest_control_group_counts(tmp_path: Path, files: dict[str, str]) -> None:
    groups = Cgroups(HostFiles(make_tree(tmp_path, files)))
    assert groups.memory_left_bytes() == 700_000
    assert groups.cpu_quota() == 1.5
    assert groups.pids_left() == 30


def test_no_limit_is_none(tmp_path: Path) -> None:
    groups = Cgroups(
        HostFiles(
            make_tree(
                tmp_path,
                {
                    "proc/self/cgroup": "5:memory:/\n",
                    "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
                    "sys/fs/cgroup/memory/memory.usage_in_bytes": "1",
                },
            )
        )
    )
    assert groups.memory_left_bytes() is None
    assert groups.cpu_quota() is None


def test_the_installed_zmq_tells_its_limits() -> None:
    limits = read_zmq_limits()
    assert limits is not None
    assert limits.max_sockets == 1023
    assert limits.has_curve
