"""HOST checks on made-up hosts: each fails or warns for its reason, and passes without it."""

from pathlib import Path

import pytest

from tests.support.check_cases import Case, check_case
from tests.support.fake_host import GIB, FakeNetwork
from vcli.diagnostics import Dialect, Status, detect_dialect
from vcli.topology import model_spec_from_config

PASS, WARN, FAIL, SKIP, UNKNOWN = Status.PASS, Status.WARN, Status.FAIL, Status.SKIP, Status.UNKNOWN
TWO_NODES = {"nnodes": 2, "tp": 2, "master_addr": "10.0.0.1"}


def small_llama() -> object:
    return model_spec_from_config(
        {
            "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
            "vocab_size": 128256, "max_position_embeddings": 8192, "dtype": "bfloat16",
        },
        source="test",
    )  # fmt: skip


WITH_MODEL = {"plan_with": {"model": small_llama(), "dtype": "bfloat16"}}

CASES = [
    Case(id="HOST-01", status=PASS, says="Linux 6.8.0-generic"),
    Case(id="HOST-01", status=WARN, says="4.18", host={"kernel": "4.18.0-553.el8"}),
    Case(id="HOST-01", status=FAIL, says="darwin", host={"platform": "darwin"}, remedy="Linux"),
    Case(id="HOST-02", status=PASS),
    Case(
        id="HOST-02",
        status=WARN,
        files={"proc/version": "Linux version 5.15.90-Microsoft-standard-WSL2"},
        says="WSL",
    ),
    Case(id="HOST-03", status=PASS, says="bare metal"),
    Case(
        id="HOST-03",
        status=PASS,
        says="docker, in Slurm job 42",
        environ={"SLURM_JOB_ID": "42"},
        more={"dialect": Dialect.DOCKER},
    ),
    Case(id="HOST-04", status=SKIP, says="one node"),
    Case(id="HOST-04", status=PASS, says="10.0.0.1", config=TWO_NODES),
    Case(
        id="HOST-04",
        status=WARN,
        says="127.0.1.1, which is loopback; vcli uses eth0, other launchers do not",
        remedy="10.0.0.1 gpu-a",
        config=TWO_NODES,
        more={"network": FakeNetwork(names={"gpu-a": ("127.0.1.1",)})},
    ),
    Case(
        id="HOST-04",
        status=WARN,
        says="no interface of this host",
        config=TWO_NODES,
        more={"network": FakeNetwork(names={"gpu-a": ("10.9.9.9",)})},
    ),
    Case(
        id="HOST-04",
        status=FAIL,
        says="127.0.1.1, which is loopback, and no interface toward node 0 is known",
        remedy="GLOO_SOCKET_IFNAME=INTERFACE",
        config=TWO_NODES,
        host={"nics": ()},
        more={"network": FakeNetwork(names={"gpu-a": ("127.0.1.1",)})},
    ),
    Case(
        id="HOST-04",
        status=WARN,
        says="does not resolve",
        remedy="GLOO_SOCKET_IFNAME=eth0",
        config=TWO_NODES,
        more={"network": FakeNetwork(names={})},
    ),
    Case(
        id="HOST-04",
        status=PASS,
        says="GLOO_SOCKET_IFNAME=eth0",
        config=TWO_NODES,
        environ={"GLOO_SOCKET_IFNAME": "eth0"},
        more={"network": FakeNetwork(names={"gpu-a": ("127.0.1.1",)})},
    ),
    Case(id="HOST-05", status=PASS, says="60.0 GiB free", more=WITH_MODEL),
    Case(
        id="HOST-05",
        status=FAIL,
        says="8.0 GiB free, the weights of 1 rank and their rings need 15.5 GiB",
        host={"memory_available_bytes": 8 * GIB},
        more=WITH_MODEL,
    ),
    Case(
        id="HOST-05",
        status=WARN,
        says="17.0 GiB free",
        host={"memory_available_bytes": 17 * GIB},
        more=WITH_MODEL,
    ),
    Case(
        id="HOST-05",
        status=FAIL,
        says="1.0 GiB free",
        remedy="docker run --memory 19g",
        host={"memory_limit_bytes": 1 * GIB},
        more={**WITH_MODEL, "dialect": Dialect.DOCKER},
    ),
    Case(id="HOST-06", status=PASS, says="none killed"),
    Case(
        id="HOST-06",
        status=WARN,
        says="3 killed",
        files={"sys/fs/cgroup/user.slice/memory.events": "oom 5\noom_kill 3\n"},
    ),
    Case(id="HOST-06", status=SKIP, says="of its own", files={"proc/self/cgroup": "0::/"}),
    Case(id="HOST-07", status=PASS, says="free for caches"),
    Case(id="HOST-08", status=PASS),
    Case(
        id="HOST-08",
        status=WARN,
        says="/home/me/.triton/cache (TRITON_CACHE_DIR) is on nfs4",
        remedy="export TRITON_CACHE_DIR=/tmp/triton-cache",
        files={
            "proc/self/mountinfo": (
                "21 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
                "35 21 0:44 / /home rw,relatime shared:1 - nfs4 server:/home rw\n"
            )
        },
    ),
    Case(id="HOST-10", status=PASS, says="of children only (ptrace_scope=1)"),
    Case(
        id="HOST-10",
        status=PASS,
        says="of any own process",
        files={"proc/sys/kernel/yama/ptrace_scope": "0"},
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_verdict(case: Case, tmp_path: Path) -> None:
    check_case(case, tmp_path)


def statvfs_with(free_bytes: int):
    import os

    real = os.statvfs

    def fake(path: object) -> os.statvfs_result:
        values = list(real(path))
        values[0] = values[1] = 4096
        values[4] = values[3] = free_bytes // 4096
        return os.statvfs_result(values)

    return fake


@pytest.mark.parametrize(
    ("free", "status"), [(0.5, FAIL), (5, WARN), (50, PASS)], ids=["full", "low", "roomy"]
)
def test_room_for_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: float, status: Status
) -> None:
    monkeypatch.setattr("vcli.diagnostics.checks.disk.os.statvfs", statvfs_with(int(free * GIB)))
    check_case(Case(id="HOST-07", status=status), tmp_path)


@pytest.mark.parametrize(
    ("environ", "files", "dialect"),
    [
        ({}, {}, Dialect.BARE_METAL),
        ({}, {".dockerenv": "x"}, Dialect.DOCKER),
        ({}, {"run/.containerenv": "x"}, Dialect.DOCKER),
        ({}, {"proc/1/cgroup": "12:pids:/docker/abc"}, Dialect.DOCKER),
        ({"KUBERNETES_SERVICE_HOST": "10.1.0.1"}, {".dockerenv": "x"}, Dialect.KUBERNETES),
        ({"SLURM_JOB_ID": "7"}, {}, Dialect.SLURM),
        ({"SLURM_JOB_ID": "7"}, {".dockerenv": "x"}, Dialect.DOCKER),
    ],
)
def test_surroundings_are_told_apart(
    tmp_path: Path, environ: dict[str, str], files: dict[str, str], dialect: Dialect
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert detect_dialect(environ, tmp_path) is dialect
