"""NUMA, left-overs, interfaces, InfiniBand, capacity: made-up trees, and real left-overs."""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.diagnostics.test_host_checks import WITH_MODEL
from tests.support.check_cases import Case, check_case
from tests.support.fake_host import GIB, HEALTHY_HOST, FakeNetwork, FakePackages
from tests.support.fake_nvml import FakeGpu, FakeNvml, gpu_facts
from vcli.diagnostics import Dialect, ModelInput, PortUse, Status
from vcli.topology import NicFacts, ProcessFacts

PASS, WARN, FAIL, SKIP, UNKNOWN = Status.PASS, Status.WARN, Status.FAIL, Status.SKIP, Status.UNKNOWN
TWO_NODES = {"nnodes": 2, "tp": 2, "master_addr": "10.0.0.1"}
SOCKETS = (tuple(range(8)), tuple(range(8, 16)))
ALL = {"allowed_cpus": frozenset(range(16))}
BUSY = {"proc/loadavg": "5.1 4.0 0.1 1/300 1234"}
QUOTA = "sys/fs/cgroup/user.slice/cpu.max"

BOUND = {"host": {"numa_cpus": SOCKETS}, "config": {"tp": 2, "numa_bind": True}}

NUMA_CASES = [
    Case(
        id="NUMA-01",
        status=PASS,
        says="16 CPUs on 2 NUMA nodes",
        host={"numa_cpus": SOCKETS},
        more=ALL,
    ),
    Case(
        id="NUMA-01",
        status=WARN,
        says="no allowed CPU on NUMA node 1",
        remedy="taskset -c 0-7,8-15",
        host={"numa_cpus": SOCKETS, "gpus": gpu_facts(2, numa_node=[0, 1])},
        more={"allowed_cpus": frozenset(range(4))},
    ),
    Case(id="NUMA-02", status=SKIP, says="no --numa-bind"),
    Case(id="NUMA-02", status=PASS, says="2 of 2 ranks bound", **BOUND, more=ALL),
    Case(
        id="NUMA-02",
        status=FAIL,
        says="no allowed CPU for rank 1 on NUMA node 1",
        remedy="taskset -c 8-15",
        more={"allowed_cpus": frozenset(range(4))},
        **BOUND,
    ),
    Case(id="NUMA-03", status=PASS, says="allowed", more={"memory_policy": lambda: 0}),
    Case(id="NUMA-03", status=PASS, says="not needed", more={"memory_policy": lambda: 1}),
    Case(
        id="NUMA-03",
        status=FAIL,
        says="Operation not permitted",
        remedy="--cap-add SYS_NICE",
        config={"numa_bind": True},
        more={"memory_policy": lambda: 1, "dialect": Dialect.DOCKER},
    ),
    Case(id="NUMA-03", status=SKIP, more={"memory_policy": lambda: None}),
    Case(id="NUMA-04", status=SKIP),
    Case(
        id="NUMA-04",
        status=FAIL,
        environ={"PATH": "/nonexistent"},
        more={"process": ProcessFacts(numa_bind=True)},
    ),
    Case(id="NUMA-05", status=PASS, says="no quota"),
    Case(id="NUMA-05", status=PASS, says="8 CPUs", files={QUOTA: "800000 100000"}, more=ALL),
    Case(
        id="NUMA-05",
        status=WARN,
        says="2 CPUs for 6 busy processes",
        remedy="docker run --cpus 6",
        files={QUOTA: "200000 100000"},
        config={"tp": 4},
        more={**ALL, "dialect": Dialect.DOCKER},
    ),
    Case(id="NUMA-05", status=FAIL, says="0.5 CPUs", files={QUOTA: "50000 100000"}, more=ALL),
    Case(
        id="NUMA-05",
        status=PASS,
        files={QUOTA: "200000 100000"},
        more={"allowed_cpus": frozenset((0, 1))},
    ),
    Case(id="NUMA-06", status=PASS, says="vcli sets"),
    Case(id="NUMA-06", status=PASS, says="OMP_NUM_THREADS=8", environ={"OMP_NUM_THREADS": "8"}),
    Case(
        id="NUMA-06",
        status=WARN,
        says="OMP_NUM_THREADS=16 for 2 ranks on 16 CPUs",
        remedy="export OMP_NUM_THREADS=8",
        environ={"OMP_NUM_THREADS": "16"},
        config={"tp": 2},
    ),
    Case(id="NUMA-08", status=PASS, says="room for all threads", config={"tp": 2}),
    Case(
        id="NUMA-08",
        status=WARN,
        says="load average 4 beside 2 ranks with OMP_NUM_THREADS=8 on 16 CPUs",
        remedy="export OMP_NUM_THREADS=6 ",
        files=BUSY,
        config={"tp": 2},
    ),
    Case(id="NUMA-08", status=PASS, says="one thread", files=BUSY, config={"tp": 16}),
    Case(
        id="NUMA-08",
        status=PASS,
        says="room for all threads",
        files={"proc/loadavg": "9.0 0.4 0.1 1/300 1234"},
        config={"tp": 2},
    ),
    Case(
        id="NUMA-08",
        status=PASS,
        says="room for all threads",
        files=BUSY,
        environ={"OMP_NUM_THREADS": "4"},
        config={"tp": 2},
    ),
    Case(
        id="NUMA-08",
        status=SKIP,
        says="8 of 16 CPUs",
        files=BUSY,
        host={"cpu_count": 8, "numa_cpus": SOCKETS},
    ),
    Case(id="NUMA-08", status=SKIP, says="load average", files={"proc/loadavg": ""}),
    Case(id="NUMA-07", status=SKIP, says="one NUMA node"),
    Case(
        id="NUMA-07",
        status=WARN,
        remedy="kernel.numa_balancing=0",
        host={"numa_cpus": SOCKETS, "gpus": gpu_facts(1)},
        files={"proc/sys/kernel/numa_balancing": "1"},
    ),
    Case(id="NUMA-07", status=PASS, host={"numa_cpus": SOCKETS, "gpus": gpu_facts(1)}),
]


def orphan(title: str, parent: int, state: str = "S") -> dict[str, str]:
    return {
        "proc/1/cmdline": "/sbin/init",
        "proc/900/cmdline": title,
        "proc/900/stat": f"900 (x y) {state} {parent} " + "0 " * 17 + "100 0",
        "proc/uptime": "7301.0 1.0",
    }


LEFTOVER_CASES = [
    Case(id="HOST-09", status=PASS, says="none"),
    Case(
        id="HOST-09",
        status=WARN,
        says="pid 900 'VLLM::Worker_TP1' (2 h 1 m)",
        remedy="kill 900",
        files=orphan("VLLM::Worker_TP1", 1),
    ),
    Case(id="HOST-09", status=PASS, files=orphan("VLLM::Worker_TP1", 800)),
    Case(id="HOST-09", status=PASS, files=orphan("VLLM::Worker_TP1", 1, "Z")),
    Case(id="HOST-09", status=PASS, files=orphan("nginx: worker", 1)),
    Case(
        id="HOST-09",
        status=PASS,
        files={**orphan("vcli::EngineCore", 1), "proc/1/cmdline": "vcli::ApiServer"},
    ),
    Case(id="LIM-03", status=PASS, says="none", files={"dev/shm/somebody": "x"}),
    Case(
        id="LIM-03",
        status=WARN,
        says="/dev/shm/nccl-abc",
        remedy="rm /dev/shm/nccl-abc",
        files={"dev/shm/nccl-abc": "x" * 5000},
    ),
    Case(
        id="LIM-03",
        status=PASS,
        files={
            "dev/shm/psm_123": "x",
            "proc/12/maps": "7f00-7f01 rw-s 00000000 00:19 3 /dev/shm/psm_123\n",
        },
    ),
]


def rdma(state: str = "4: ACTIVE", rate: str = "400 Gb/sec", layer: str = "InfiniBand",
         device: str = "mlx5_0") -> dict[str, str]:  # fmt: skip
    base = f"sys/class/infiniband/{device}/ports/1"
    return {f"{base}/state": state, f"{base}/rate": rate, f"{base}/link_layer": layer}


def gid(kind: str, address: str) -> dict[str, str]:
    base = "sys/class/infiniband/mlx5_0/ports/1"
    return {f"{base}/gid_attrs/types/3": kind, f"{base}/gids/3": address}


V4 = "0000:0000:0000:0000:0000:ffff:0a00:0001"
ROCE = rdma(layer="Ethernet")

IB_CASES = [
    Case(id="IB-01", status=SKIP, says="no InfiniBand"),
    Case(id="IB-01", status=PASS, says="1 port, 400 Gb/sec", files=rdma()),
    Case(id="IB-01", status=FAIL, says="mlx5_0 port 1 is 1: DOWN", remedy="NCCL_IB_HCA=^mlx5_0",
         files=rdma("1: DOWN")),
    Case(id="IB-01", status=WARN, says="mlx5_1 port 1",
         files={**rdma(), **rdma("1: DOWN", device="mlx5_1")}),
    Case(id="IB-01", status=PASS, environ={"NCCL_IB_HCA": "^mlx5_1"},
         files={**rdma(), **rdma("1: DOWN", device="mlx5_1")}),
    Case(id="IB-01", status=WARN, says="different rates",
         files={**rdma(), **rdma(rate="100 Gb/sec", device="mlx5_1")}),
    Case(id="IB-02", status=SKIP),
    Case(id="IB-02", status=FAIL, says="no /dev/infiniband", files=rdma()),
    Case(id="IB-02", status=PASS, files={**rdma(), "dev/infiniband/uverbs0": "x"}),
    Case(id="IB-03", status=SKIP, files=rdma()),
    Case(id="IB-03", status=FAIL, says="no RoCE v2", files={**ROCE, **gid("IB/RoCE v1", V4)}),
    Case(id="IB-03", status=PASS, files={**ROCE, **gid("RoCE v2", V4)}),
    Case(id="IB-03", status=WARN, says="NCCL_IB_GID_INDEX=1", remedy="NCCL_IB_GID_INDEX=3",
         environ={"NCCL_IB_GID_INDEX": "1"}, files={**ROCE, **gid("RoCE v2", V4)}),
    Case(id="IB-06", status=SKIP),
    Case(id="IB-06", status=PASS, more={"pause": lambda s: None},
         files={**rdma(), "sys/class/infiniband/mlx5_0/ports/1/counters/symbol_error": "9"}),
    Case(id="IB-07", status=SKIP),
    Case(id="IB-07", status=WARN, remedy="modprobe nvidia-peermem", files=rdma(),
         host={"gpus": gpu_facts(1)}),
    Case(id="IB-07", status=PASS, files={**rdma(), "sys/module/nvidia_peermem/version": "1"},
         host={"gpus": gpu_facts(1)}),
    Case(id="IB-07", status=PASS, says="DMA-BUF", host={"gpus": gpu_facts(1)},
         files={**rdma(), "proc/driver/nvidia/version": "NVIDIA UNIX Open Kernel Module"}),
]  # fmt: skip


def nics(*found: NicFacts) -> Mapping[str, Any]:
    return {"nics": (HEALTHY_HOST.nics[0], *found)}


def card(name: str, mtu: int, address: str = "10.0.0.1", speed: int = 100_000) -> NicFacts:
    return NicFacts(name=name, addresses=(address,), mtu=mtu, speed_mbit=speed)


def http(address: str) -> Mapping[str, Any]:
    use = PortUse(purpose="HTTP", address=address, port=8000, flag="--port", is_typed=False)
    return {"ports": (use,)}


COUNTER = "sys/class/net/eth0/statistics/rx_errors"
NET_CASES = [
    Case(id="NET-05", status=SKIP, says="one node"),
    Case(id="NET-05", status=PASS, says="IPv4", config=TWO_NODES),
    Case(
        id="NET-05",
        status=FAIL,
        says="head is IPv6, this host has IPv4 only",
        config={**TWO_NODES, "master_addr": "head"},
        more={"network": FakeNetwork(names={"head": ("fd00::1",)})},
    ),
    Case(id="NET-10", status=SKIP, says="one node"),
    Case(id="NET-10", status=PASS, config=TWO_NODES, says="eth0 9000"),
    Case(
        id="NET-10",
        status=WARN,
        says="eth0 9000, eth1 1500",
        remedy="ip link set eth1 mtu 9000",
        config=TWO_NODES,
        host=nics(card("eth0", 9000), card("eth1", 1500, "10.0.1.1")),
    ),
    Case(id="NET-13", status=SKIP, says="one node"),
    Case(id="NET-13", status=PASS, says="eth0 is up", config=TWO_NODES,
         files={COUNTER: "3"}, more={"pause": lambda s: None}),
    Case(id="NET-13", status=FAIL, says="eth0 is down", config=TWO_NODES,
         files={"sys/class/net/eth0/operstate": "down"}),
    Case(id="NET-14", status=PASS, says="this host only", more=http("127.0.0.1")),
    Case(id="NET-14", status=PASS, more=http("0.0.0.0")),
    Case(id="NET-14", status=WARN, says="HTTP on 0.0.0.0", remedy="--host 127.0.0.1",
         host=nics(card("eth0", 1500, "8.8.4.4")), more=http("0.0.0.0")),
    Case(id="NET-14", status=WARN, says="without a token", remedy="export VCLI_JOB_TOKEN=",
         config=TWO_NODES),
    Case(id="NET-14", status=PASS, config=TWO_NODES, environ={"VCLI_JOB_TOKEN": "0123456789"}),
]  # fmt: skip

CUDA = {"device_type": "cuda", "nvml_module": FakeNvml([FakeGpu(), FakeGpu()])}
HUB = ModelInput(typed="Qwen/Qwen3-0.6B", is_hub_name=True)
FIT_CASES = [
    Case(id="FIT-04", status=SKIP, says="no model"),
    Case(id="FIT-04", status=PASS, says="15.0 GiB weights/rank", more=WITH_MODEL),
    Case(
        id="FIT-04",
        status=FAIL,
        says="nothing is left of 16.0 GiB",
        remedy="-tp 2",
        host={"gpus": gpu_facts(1, memory_total_bytes=16 * GIB)},
        more={**WITH_MODEL, **CUDA},
    ),
    Case(
        id="FIT-04",
        status=WARN,
        says="the model's length is 8,192",
        remedy="--max-model-len ",
        host={"gpus": gpu_facts(1, memory_total_bytes=18 * GIB)},
        more={**WITH_MODEL, **CUDA},
    ),
    Case(
        id="FIT-04",
        status=WARN,
        says="the model's length is 8,192",
        remedy="or free some memory",
        host={"memory_available_bytes": 16 * GIB},
        more=WITH_MODEL,
    ),
    Case(
        id="FIT-04",
        status=FAIL,
        says="nothing is left",
        remedy="free some memory, or name a smaller model",
        host={"memory_available_bytes": 12 * GIB},
        more=WITH_MODEL,
    ),
    Case(id="FIT-05", status=SKIP, says="planned for the CPU", more=WITH_MODEL),
    Case(id="FIT-05", status=PASS, host={"gpus": gpu_facts(1)}, more={**WITH_MODEL, **CUDA}),
    Case(
        id="FIT-05",
        status=WARN,
        says="GPU 0 has 60.0 GiB of 80.0 GiB free",
        remedy="--gpu-memory-utilization 0.75",
        host={"gpus": gpu_facts(1, memory_free_bytes=60 * GIB)},
        more={**WITH_MODEL, **CUDA},
    ),
    Case(id="FIT-06", status=SKIP),
    Case(id="FIT-06", status=PASS, says="bfloat16", more=WITH_MODEL),
    Case(
        id="FIT-06",
        status=FAIL,
        says="bfloat16 needs compute capability 8.0: GPU 0 NVIDIA H100 has 7.5",
        remedy="--dtype float16",
        host={"gpus": gpu_facts(1, compute_capability=(7, 5))},
        more={**WITH_MODEL, **CUDA},
    ),
    Case(id="RDV-09", status=SKIP),
    Case(id="RDV-09", status=PASS, says="within 2 ranks", config={**TWO_NODES, "tp": 2, "pp": 2}),
    Case(
        id="RDV-09",
        status=WARN,
        says="joined by 100 Gbit/s",
        remedy="-tp 1 -pp 2",
        config=TWO_NODES,
    ),
    Case(
        id="RDV-09",
        status=PASS,
        says="at 400 Gbit/s",
        config=TWO_NODES,
        host=nics(card("eth0", 9000, speed=400_000)),
    ),
    Case(id="ENV-06", status=SKIP),
    Case(id="ENV-06", status=PASS, says="will be downloaded", more={"model": HUB}),
    Case(
        id="ENV-06",
        status=FAIL,
        says="downloads are off",
        remedy="hf download Qwen/Qwen3-0.6B",
        environ={"HF_HUB_OFFLINE": "1"},
        more={"model": HUB},
    ),
    Case(id="RAY-06", status=SKIP, says="Ray is not used"),
    Case(
        id="RAY-06",
        status=WARN,
        remedy="remount,size=",
        environ={"RAY_ADDRESS": "auto"},
        host={"memory_total_bytes": 1 << 52},
    ),
    Case(
        id="RAY-06",
        status=PASS,
        environ={"RAY_ADDRESS": "auto"},
        host={"memory_total_bytes": 1 << 20},
    ),
    Case(id="COLL-07", status=SKIP),
    Case(id="COLL-07", status=PASS, more={"device_type": "cuda"}),
    Case(
        id="COLL-07",
        status=WARN,
        says="NCCL 2.28.9 hangs",
        remedy="--enforce-eager",
        config=TWO_NODES,
        more={
            "device_type": "cuda",
            "packages": FakePackages(versions={"nvidia-nccl-cu13": "2.28.9"}),
        },
    ),
]


@pytest.mark.parametrize(
    "case", [*NUMA_CASES, *LEFTOVER_CASES, *IB_CASES, *NET_CASES, *FIT_CASES], ids=str
)
def test_verdict(case: Case, tmp_path: Path) -> None:
    check_case(case, tmp_path)


def growing(path: Path, text: str) -> Callable[[float], None]:
    """A pause in which a counter grows."""
    return lambda seconds: (path.write_text(text), None)[1]


@pytest.mark.parametrize(
    ("id_", "counter", "case", "says"),
    [
        ("NET-13", COUNTER, {"config": TWO_NODES}, "eth0: rx_errors +4"),
        (
            "IB-06",
            "sys/class/infiniband/mlx5_0/ports/1/counters/symbol_error",
            {"files": rdma()},
            "mlx5_0 symbol_error +4",
        ),
    ],
)
def test_counters_that_grow_warn(
    tmp_path: Path, id_: str, counter: str, case: dict[str, Any], says: str
) -> None:
    files = {**case.get("files", {}), counter: "3"}
    pause = growing(tmp_path / "root" / counter, "7")
    check_case(
        Case(
            id=id_,
            status=WARN,
            says=says,
            files=files,
            config=case.get("config", {}),
            more={"pause": pause},
        ),
        tmp_path,
    )


@pytest.mark.process
def test_a_real_orphan_with_an_engine_s_title_is_found() -> None:
    from vcli.diagnostics.checks.leftovers import find_leftover_processes
    from vcli.diagnostics.files import HostFiles

    # The launcher starts a worker and is gone; the worker tells when it has another parent.
    script = (
        "import os, time\nfrom setproctitle import setproctitle\n"
        "launcher = os.getpid()\n"
        "if os.fork(): os._exit(0)\n"
        "os.setsid(); setproctitle('VLLM::Worker_TP9')\n"
        "while os.getppid() == launcher: time.sleep(0.01)\n"
        "os.write(1, b'%d\\n' % os.getpid()); os.close(1); time.sleep(60)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, timeout=20
    )
    pid = int(done.stdout)
    try:
        found = {item.pid: item for item in find_leftover_processes(HostFiles())}
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        if parent != 1:
            pytest.skip(f"a subreaper (pid {parent}) adopts orphans here")
        if pid not in found:
            init = Path("/proc/1/cmdline").read_bytes()
            pytest.skip(f"process 1 is itself a launcher: {init[:40]!r}")
        assert found[pid].title == "VLLM::Worker_TP9"
    finally:
        os.kill(pid, 9)
