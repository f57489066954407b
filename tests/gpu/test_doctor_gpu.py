"""The real doctor on real GPUs: measured bandwidths, and the faults that it must name."""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch

NUM_GPUS = torch.cuda.device_count()
DEADLINE_S = 120

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.skipif(NUM_GPUS < 1, reason="needs a GPU"),
]
needs_two = pytest.mark.skipif(NUM_GPUS < 2, reason=f"needs 2 GPUs, {NUM_GPUS} are visible")

HOLDER = """
import sys, torch
index, mib = int(sys.argv[1]), int(sys.argv[2])
held = torch.zeros(mib << 20, dtype=torch.uint8, device=f"cuda:{index}")
torch.cuda.synchronize()
print("held", flush=True)
sys.stdin.read()
"""


class Ran:
    def __init__(self, *arguments: str, **variables: str) -> None:
        self.run = subprocess.run(
            [sys.executable, "-m", "vcli.cli", "doctor", *arguments, "--json"],
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        self.document = json.loads(self.run.stdout)
        self.checks: Mapping[str, Any] = {item["id"]: item for item in self.document["checks"]}

    def status(self, id_: str) -> str:
        return self.checks[id_]["status"]

    def measured(self, id_: str) -> str:
        return self.checks[id_]["measured"]

    def ids(self, status: str) -> dict[str, str]:
        return {id_: item["measured"] for id_, item in self.checks.items()
                if item["status"] == status}  # fmt: skip


@pytest.fixture(autouse=True)
def free_gpus() -> None:
    """What earlier tests of this process keep would make a GPU look taken."""
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def healthy() -> Ran:
    return Ran("-tp", str(NUM_GPUS))


@contextmanager
def held(index: int, mib: int) -> Iterator[int]:
    child = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(index), str(mib)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"held\n"
        yield child.pid
    finally:
        child.kill()
        child.wait()
        for stream in (child.stdin, child.stdout):
            assert stream is not None
            stream.close()


def processes_on_gpus() -> set[int]:
    pynvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")

    pynvml.nvmlInit()
    handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
    return {p.pid for handle in handles
            for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}  # fmt: skip


def test_a_healthy_machine_has_no_failure_and_nothing_unknown(healthy: Ran) -> None:
    assert healthy.ids("fail") == {}
    # PY-02 cannot know its needs where the code runs without having been installed.
    assert set(healthy.ids("unknown")) <= {"PY-02"}
    warnings = [item for item in healthy.checks.values() if item["status"] == "warn"]
    assert all(item["why"] and item["remedy"] for item in warnings)


def test_each_gpu_computes_copies_and_has_kernels(healthy: Ran) -> None:
    for id_ in ("CUDA-07", "CUDA-10", "GPU-12", "PROC-07", "PROC-08", "PROC-09"):
        assert healthy.status(id_) == "pass", healthy.measured(id_)
    assert "GB/s to the GPU" in healthy.measured("GPU-09")


@needs_two
def test_bandwidths_are_measured(healthy: Ran) -> None:
    for id_ in ("LINK-02", "COLL-01", "COLL-02", "COLL-03", "COLL-04", "COLL-06", "COLL-08"):
        assert healthy.status(id_) == "pass", healthy.measured(id_)
    num_pairs = NUM_GPUS * (NUM_GPUS - 1)
    assert f"{num_pairs} of {num_pairs} copies right" in healthy.measured("LINK-02")
    assert "GB/s" in healthy.measured("LINK-02")
    assert "sums of 256.0 MiB: TP " in healthy.measured("COLL-04")


@needs_two
def test_peer_access_that_is_switched_off_is_named() -> None:
    ran = Ran("-tp", "2", "env", "coll", NCCL_P2P_DISABLE="1")
    assert ran.status("ENV-03") == "warn"
    assert "NCCL_P2P_DISABLE=1" in ran.measured("ENV-03")
    if ran.document["host"]["links"][0]["kind"].startswith("NV"):
        assert ran.status("COLL-04") == "warn"
        assert "NCCL_P2P_DISABLE=1 is set" in ran.measured("COLL-04")
        assert ran.checks["COLL-04"]["remedy"] == "unset NCCL_P2P_DISABLE"


@needs_two
def test_a_hidden_gpu_is_named() -> None:
    ran = Ran("-tp", "2", CUDA_VISIBLE_DEVICES="0")
    assert ran.run.returncode == 1
    assert ran.status("CUDA-06") == "fail"
    assert "shows 1 GPU for 2 ranks" in ran.measured("CUDA-06")
    # In the words of where it runs: a shell, docker, Kubernetes or Slurm.
    assert "0,1" in ran.checks["CUDA-06"]["remedy"]
    assert ran.status("GPU-01") == "fail"
    assert ran.status("COLL-04") == "skip"


def test_held_memory_is_named_and_nothing_is_measured_beside_it() -> None:
    last = min(NUM_GPUS, 2) - 1
    with held(last, 20 << 10) as pid:
        # In a container NVML may number the processes as the host does.
        is_visible = pid in processes_on_gpus()
        ran = Ran("-tp", str(last + 1))
    assert ran.status("GPU-03") == "warn"
    assert f"GPU {last} has" in ran.measured("GPU-03")
    if is_visible:
        assert f"pid {pid}" in ran.measured("GPU-03")
        assert f"kill {pid}" in ran.checks["GPU-03"]["remedy"]
    assert ran.status("PROC-07") == "skip"
    assert f"GPU {last} is in use" in ran.measured("PROC-07")


def test_a_gpu_without_room_for_the_trial_is_told_so() -> None:
    free_bytes, _ = torch.cuda.mem_get_info(0)
    # What is left is for two contexts, of the holder and of the rank, and little more.
    with held(0, (free_bytes >> 20) - 1331):
        ran = Ran("proc-07", "gpu-12", "cuda-10", "gpu-03", "--deep")
    failed = [item for item in ran.checks.values() if item["status"] == "fail"]
    assert any("vcli doctor gpu-03" in item["remedy"] for item in failed), ran.checks
    assert "GPU 0 has" in ran.measured("GPU-03")


def test_a_fast_run_measures_nothing() -> None:
    ran = Ran("--fast")
    assert {"PROC-07", "COLL-04", "LINK-02"}.isdisjoint(ran.checks)


def test_no_process_is_left_on_a_gpu() -> None:
    before = processes_on_gpus()
    Ran("-tp", str(min(NUM_GPUS, 2)))
    assert processes_on_gpus() <= before
