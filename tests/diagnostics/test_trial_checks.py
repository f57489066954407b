"""The checks of level L3 on what processes of a trial would have written."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.diagnostics.test_gpu_checks import links
from tests.support.check_cases import Case, check_case
from tests.support.fake_host import HEALTHY_HOST, make_context
from tests.support.fake_nvml import gpu_facts
from tests.support.fake_trial import LARGE, STEPS, TP, failed, hung, trial
from vcli.cli.runtime_checks import registry
from vcli.diagnostics import Level, Status, run_checks
from vcli.diagnostics.trial import Trial
from vcli.topology import LinkFacts

PASS, WARN, FAIL, SKIP = Status.PASS, Status.WARN, Status.FAIL, Status.SKIP
TWO = {"host": {"gpus": gpu_facts(2), "links": links("NV18", 2)}, "config": {"tp": 2}}
PCIE = {"host": {"gpus": gpu_facts(2), "links": links("PHB", 2)}, "config": {"tp": 2}}
NO_PEERS = {
    "host": {"gpus": gpu_facts(2), "links": (LinkFacts(first=0, second=1, can_access_peer=False),)},
    "config": {"tp": 2},
}
THREE = {"host": {"gpus": gpu_facts(3), "links": links("NV18", 3)}, "config": {"tp": 1}}


def given(result: Trial, **more: Any) -> Mapping[str, Any]:
    return {"try_devices": lambda additions: result, "device_type": "cuda", **more}


def case(id_: str, status: Status, result: Trial, says: str = "", **fields: Any) -> Case:
    more = given(result, **fields.pop("more", {}))
    return Case(id=id_, status=status, says=says, more=more, **{**TWO, **fields})


def pair(src: int, dst: int, speed: float, wrong: int = 0) -> dict[str, Any]:
    return {"src": src, "dst": dst, "GBps": speed, "wrong_bytes": wrong}


SKIPPED = Trial(skip_reason="no NVIDIA GPU")
ONE = trial(ranks=1, until="join")
NO_TORCH = failed("start", 0, "Traceback:\nModuleNotFoundError: No module named 'torch'", status=1)
HUNG_IN_SUM = trial(until="first sum", broken=hung("first sum", 0, 1))
OOM = "OutOfMemoryError: CUDA out of memory. Tried to allocate 256.00 MiB. GPU 1 has 30.00 MiB free"

DEVICE_CASES = [
    case("PROC-07", PASS, trial(), "2 processes"),
    case("PROC-07", SKIP, SKIPPED, "no NVIDIA GPU"),
    case("PROC-07", FAIL, Trial(devices=(0, 1), events=(NO_TORCH,)),
         "rank 0 (GPU 0) cannot import torch", remedy="pip install 'torch"),
    case("PROC-07", FAIL, Trial(devices=(0, 1), events=tuple(hung("start", 1))),
         "no progress for 20 s, killed: rank 1 (GPU 1) in 'start'"),
    case("CUDA-10", PASS, trial(), "sm_90 in torch 2.11.0+cu130"),
    case("CUDA-10", PASS, trial(device={"architectures": ["compute_80"]})),
    case("CUDA-10", PASS, trial(device={"capability": [8, 6]})),
    case("CUDA-10", FAIL, trial(device={"capability": [12, 0]}),
         "rank 0 (GPU 0) has sm_120, torch is built for sm_80, sm_90",
         remedy="pytorch.org/get-started"),
    case("CUDA-10", FAIL,
         trial(until="device", broken=[failed("device", 1, "RuntimeError: no kernel image")]),
         "rank 1 (GPU 1) failed in 'device': RuntimeError: no kernel image"),
    case("PROC-08", PASS, trial(), "fork becomes spawn: CUDA was initialised"),
    case("PROC-08", FAIL, trial(start_method={"fork": "fork"}), "would start children by fork"),
    case("GPU-09", PASS, trial(), "gen5 x16, 55 GB/s to the GPU, 53 back"),
    case("GPU-09", WARN, trial(host_copies=[{}, {"width": 8, "to_device_GBps": 27.0}]),
         "rank 1 (GPU 1) has gen5 x8 of gen5 x16; 27 GB/s", remedy="nvidia-smi -q -d PCIE -i 1"),
    case("GPU-12", PASS, trial(), "right on 2 GPUs"),
    case("GPU-12", FAIL, trial(product=[{}, {"num_wrong": 3}]), "GPU 1: 3 wrong rows",
         remedy="CUDA_VISIBLE_DEVICES=0"),
    case("GPU-12", WARN, trial(product=[{}, {"ms": 0.9}]), "GPU 1: 0.9 ms, the fastest 0.25 ms"),
    case("GPU-12", FAIL, trial(until="product", broken=[failed("product", 1, "boom", -9)]),
         "rank 1 (GPU 1) was killed by SIGKILL in 'product': boom"),
    case("LINK-02", PASS, trial(), "2 of 2 copies right, 371 to 380 GB/s"),
    case("LINK-02", SKIP, ONE, "one GPU"),
    case("LINK-02", FAIL, trial(peer_memory={"pairs": [pair(0, 1, 380, 512), pair(1, 0, 380)]}),
         "wrong after a copy: 0→1 512 bytes", remedy="NCCL_P2P_DISABLE=1"),
    case("LINK-02", FAIL, trial(until="peer memory", broken=hung("peer memory", 0, 1)),
         "rank 0 (GPU 0), rank 1 (GPU 1) in 'peer memory'"),
    case("LINK-02", WARN, trial(peer_memory={"pairs": [pair(0, 1, 60), pair(1, 0, 380)]}),
         "slow: 0→1 60 of 450 GB/s (NV18)"),
    case("LINK-02", WARN, trial(peer_memory={"pairs": [], "reason": "rank 0: no handles"}),
         "memory cannot be shared: rank 0: no handles", remedy="vcli doctor link-01"),
    case("LINK-02", SKIP, trial(peer_memory={"pairs": [], "reason": "none"}), "LINK-01",
         **NO_PEERS),
    case("LINK-02", SKIP, trial(until="device", broken=hung("device", 1)),
         "not reached: no progress for 20 s"),
    case("LINK-10", SKIP, trial(), "no two pairs"),
    case("LINK-10", PASS, trial(ranks=3, peer_memory={"pairs": [
        pair(0, 1, 380), pair(1, 0, 380), pair(1, 2, 370), pair(2, 1, 375)]}), **THREE),
    case("LINK-10", WARN, trial(ranks=3, peer_memory={"pairs": [
        pair(0, 1, 380), pair(1, 0, 380), pair(1, 2, 120), pair(2, 1, 375)]}),
         "1→2 120 GB/s, the median of NV18 is 378", remedy="nvlink -s -i 1", **THREE),
]  # fmt: skip

SLOW_SUM = {**TP, "busbw_GBps": 38.0}
SLOW = {f"all-reduce_{LARGE}": SLOW_SUM}
COLLECTIVE_CASES = [
    case("COLL-01", PASS, trial(), "2 ranks in 0.1 s"),
    case("COLL-01", FAIL, trial(until="gloo", broken=[failed("gloo", 0, "Connection refused")]),
         "failed in 'gloo': Connection refused", remedy="GLOO_SOCKET_IFNAME=lo"),
    case("COLL-01", SKIP, ONE, "one GPU"),
    case("COLL-02", PASS, trial(), "NCCL 2.28.9: 1 group, 0.1 s at most"),
    case("COLL-02", FAIL, HUNG_IN_SUM, "rank 0 (GPU 0), rank 1 (GPU 1) in 'first sum'",
         remedy="coll-06 --deep"),
    case("COLL-03", PASS, trial(), "right in TP"),
    case("COLL-03", FAIL, trial(results=[{}, {"wrong": ["all_to_all"]}]),
         "all_to_all of TP on rank 1 (GPU 1)", remedy="link-02"),
    case("COLL-03", SKIP, HUNG_IN_SUM, "not reached"),
    case("COLL-04", PASS, trial(), "sums of 256.0 MiB: TP 302 GB/s; 18 µs at 8 KiB"),
    case("COLL-04", WARN, trial(**SLOW),
         "TP 0-1 38 GB/s over NV18, 250 expected", remedy="vcli doctor link"),
    case("COLL-04", WARN, trial(**SLOW), "NCCL_P2P_DISABLE=1 is set",
         environ={"NCCL_P2P_DISABLE": "1"}, remedy="unset NCCL_P2P_DISABLE"),
    case("COLL-04", PASS, trial(**SLOW), "TP 38 GB/s", **PCIE),
    case("COLL-04", WARN, trial(**{f"all-reduce_{LARGE}": {**TP, "busbw_GBps": 5.0}}),
         "5 GB/s over PHB, 23 expected", **PCIE),
    case("COLL-04", PASS, trial(**{f"all-reduce_{LARGE}": {**TP, "busbw_GBps": 5.0}}),
         "TP 5 GB/s", **NO_PEERS),
    case("COLL-04", FAIL, trial(until=f"all-reduce {LARGE}",
                                broken=[failed(f"all-reduce {LARGE}", 1, OOM)]),
         "CUDA out of memory", remedy="vcli doctor gpu-03"),
    case("COLL-06", PASS, trial(), "none is needed"),
    case("COLL-06", SKIP, HUNG_IN_SUM, "--deep"),
    case("COLL-06", SKIP, ONE, "no two GPUs"),
    case("COLL-06", FAIL, HUNG_IN_SUM, "fails with each of NCCL_P2P_DISABLE=1",
         more={"is_deep": True}, remedy="NCCL_DEBUG=INFO"),
    case("COLL-08", PASS, trial(), "14 µs for 64 KiB"),
    case("COLL-08", FAIL, trial(until="graph", broken=hung("graph", 0)), "in 'graph'",
         remedy="--enforce-eager"),
    case("COLL-09", PASS, trial(status_server="NCCL version 2.28.9\nJob summary"), "2 lines"),
    case("COLL-09", SKIP, trial(status_server_problem="localhost:28028: Connection refused"),
         "Connection refused"),
]  # fmt: skip


@pytest.mark.parametrize("case", [*DEVICE_CASES, *COLLECTIVE_CASES], ids=str)
def test_verdict(case: Case, tmp_path: Path) -> None:
    check_case(case, tmp_path)


def test_the_switch_that_helps_names_the_cause(tmp_path: Path) -> None:
    tried = []

    def try_devices(additions: Mapping[str, str]) -> Trial:
        tried.append(dict(additions))
        return trial() if additions == {"NCCL_SHM_DISABLE": "1"} else HUNG_IN_SUM

    more = {"try_devices": try_devices, "device_type": "cuda", "is_deep": True}
    check_case(
        Case(id="COLL-06", status=WARN, says="NCCL works with NCCL_SHM_DISABLE=1: shared memory",
             remedy="export NCCL_SHM_DISABLE=1", more=more, **TWO),
        tmp_path,
    )  # fmt: skip
    assert tried == [{}, {"NCCL_P2P_DISABLE": "1"}, {"NCCL_SHM_DISABLE": "1"}]


def test_a_hang_blames_the_rank_that_is_behind() -> None:
    found = trial(until="gloo", broken=[*hung("gloo", 0), *hung("join", 1)])
    assert found.broken_step == "join"
    assert found.problem_text() == (
        "no progress for 20 s, killed: rank 1 (GPU 1) in 'join'; rank 0 (GPU 0) in 'gloo'"
    )


def test_a_process_that_was_killed_comes_before_those_that_lost_it() -> None:
    lost = failed("gloo", 0, "Connection closed by peer [127.0.0.1]:4242")
    found = trial(until="gloo", broken=[lost, failed("gloo", 1, "", -11)])
    assert found.problem_text() == "rank 1 (GPU 1) was killed by SIGSEGV in 'gloo'"


@pytest.mark.parametrize("step", ["start", *STEPS])
def test_one_break_is_one_failure(tmp_path: Path, step: str) -> None:
    broken = trial(until=step, broken=hung(step, 0, 1)) if step != "start" else Trial(
        devices=(0, 1), events=tuple(hung("start", 0, 1))
    )  # fmt: skip
    checks = registry()
    ids = {c.id for c in checks.checks if c.level is Level.L3} - {"CUDA-07", "PROC-09"}
    context = make_context(
        tmp_path, host=replace(HEALTHY_HOST, **TWO["host"]), config={"tp": 2}, **given(broken)
    )
    outcome = run_checks(
        checks.with_requirements(checks.get(id_) for id_ in ids), context,
        skip_ids=("CUDA-01", "CUDA-07"),
    )  # fmt: skip
    by_status = [result.id for result in outcome.results if result.status is FAIL]
    assert len(by_status) == 1, by_status
