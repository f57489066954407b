"""Known faults of other engines, each by its symptom, and the right behaviour here.

The numbers are those of the list of known faults; what needs a whole `vcli` stands in
`test_symptoms_serve.py`.
"""

import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import fake_worker
from tests.support.fake_worker import SPEC, fake_config, fake_step
from tests.support.processes import opened_files, wait_until
from tests.support.tiny_model import tiny_checkpoint
from tests.support.worker_steps import engine_config, kv_config
from vcli.runtime.errors import (
    RpcTimeoutError,
    StartupError,
    WorkerDiedError,
    WorkerError,
)
from vcli.runtime.executor.multiproc import MultiprocExecutor
from vcli.runtime.process.facts import process_facts
from vcli.runtime.worker.worker import PhaseError, Worker
from vcli.topology import (
    GpuFacts,
    HostFacts,
    PlacementError,
    ProcessFacts,
    decide_start_method,
    plan_topology,
)
from vcli.topology.config import ParallelConfig
from vcli.topology.errors import ConfigError

pytestmark = pytest.mark.process

Make = Callable[..., MultiprocExecutor]


def test_1_error_on_a_rank_that_does_not_reply_does_not_hang_until_the_deadline(
    started: MultiprocExecutor,
) -> None:
    step = started.execute_model(
        fake_step(number=fake_worker.STEP_RAISES_ON_RANK_1), non_block=True
    )
    with pytest.raises(WorkerError, match="device-side assert on rank 1"):
        step.result(5.0)  # of the 20 s that a step may take here


def test_2_call_after_a_failed_and_a_late_one_does_not_get_their_data(
    started: MultiprocExecutor,
) -> None:
    with pytest.raises(WorkerError):
        started.collective_rpc("raise_on", args=([1],))
    with pytest.raises(RpcTimeoutError):
        started.collective_rpc("sleep_on", args=([0, 1], 0.3), timeout_s=0.1)
    assert started.collective_rpc("echo", args=("new",)) == ["new", "new"]


def test_13_initialised_cuda_is_seen_before_a_fork_with_who_did_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Device:
        def is_initialized(self) -> bool:
            return True

    torch = type(sys)("torch")
    vars(torch).update(cuda=Device(), xpu=None)
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "bitsandbytes", type(sys)("bitsandbytes"))
    decision = decide_start_method(process_facts({}), "fork")
    assert decision.value != "fork"
    assert "CUDA was initialised in this process by bitsandbytes" in " ".join(decision.reasons)


def test_18_groups_can_not_be_used_before_they_are_made() -> None:
    worker = Worker(engine_config(tiny_checkpoint()), 0, rendezvous=None, report=lambda *_: None)
    for method in (worker.load_model, worker.kv_bytes_per_block):
        with pytest.raises(PhaseError):
            method()
    with pytest.raises(PhaseError):
        worker.initialize_from_config(kv_config())


def test_21_idle_workers_burn_no_cpu(started: MultiprocExecutor) -> None:
    pids = [os.getpid(), *started.worker_pids.values()]
    assert started.collective_rpc("echo", args=(1,)) == [1, 1]
    before = [cpu_seconds(pid) for pid in pids]
    threading.Event().wait(1.0)  # what is measured, not a wait for anything
    used = [cpu_seconds(pid) - then for pid, then in zip(pids, before, strict=True)]
    assert max(used) <= 0.05, used


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_24_failed_start_tells_rank_phase_type_and_traceback(make: Make) -> None:
    with pytest.raises(StartupError) as failed:
        make("FailsToLoadAlone").start()
    report = failed.value.report
    assert (report.rank, report.phase, report.kind) == (1, "weights", "ValueError")
    assert "model.norm.weight" in report.message
    assert "in load_model" in report.traceback


@pytest.mark.parametrize(("dp", "tp"), [(1, 4), (2, 2), (4, 1)])
def test_25_threads_of_all_local_replicas_together_fill_the_cpus_once(dp: int, tp: int) -> None:
    plan = plan_topology(
        ParallelConfig(tensor_parallel_size=tp, data_parallel_size=dp),
        host=HostFacts(cpu_count=16),
        process=ProcessFacts(),
    )
    assert [rank.omp_num_threads for rank in plan.ranks] == [4] * 4


def test_25_threads_of_the_plan_reach_the_worker(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    plan = plan_topology(
        ParallelConfig(tensor_parallel_size=2), model=SPEC, host=HostFacts(cpu_count=14)
    )
    executor = MultiprocExecutor(
        fake_config(2, plan=plan),
        on_message=lambda _: None,
        worker_cls=fake_worker.FAKE_WORKER,
        ring_bytes=1 << 18,
    )
    try:
        executor.start()
        assert executor.collective_rpc("environment", args=("OMP_NUM_THREADS",)) == ["7", "7"]
    finally:
        executor.shutdown()


def test_26_no_queue_has_a_file_that_could_be_removed_under_it(
    started: MultiprocExecutor,
) -> None:
    started.execute_model(fake_step())
    for pid in started.worker_pids.values():
        mapped = Path(f"/proc/{pid}/maps").read_text()
        opened = opened_files(pid)
        assert "memfd:vcli-steps" in mapped or "memfd:vcli-broadcast" in mapped
        assert "/dev/shm" not in mapped
        assert [name for name in opened if name.startswith("/dev/shm")] == []


def test_28_more_ranks_than_gpus_are_refused_with_the_number_of_nodes_that_holds_them() -> None:
    host = HostFacts(hostname="n1", gpus=tuple(GpuFacts(index=index) for index in range(8)))
    too_many = ParallelConfig(tensor_parallel_size=16)
    with pytest.raises(PlacementError, match=r"16 ranks on one node .* n1 has 8") as refused:
        plan_topology(too_many, host=host, device_type="cuda")
    assert "--nnodes 2" in refused.value.hint
    two_nodes = ParallelConfig(tensor_parallel_size=16, nnodes=2)
    assert len(plan_topology(two_nodes, host=host, device_type="cuda").ranks) == 16


def test_32_health_fails_with_a_dead_and_with_a_stuck_worker_and_not_with_a_busy_one(
    make: Make, tmp_path: Path
) -> None:
    executor = make(stall_s=3.0)
    executor.start()
    executor.check_health(timeout_s=5)
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    call = executor.collective_rpc("wait_for_file_on", args=([1], str(gate)), non_block=True)
    executor.check_health(timeout_s=0.1)  # it does not answer, but it is in a call since a moment
    wait_until(lambda: executor.busy_with(1) is None, 20)
    with pytest.raises(RpcTimeoutError, match=r"rank 1 \(Worker_TP1, in wait_for_file_on for 3\."):
        executor.check_health(timeout_s=0.1)
    gate.write_text("")
    assert call.result(5) == [0, 1]
    executor.check_health(timeout_s=5)
    os.kill(executor.worker_pids["Worker_TP1"], signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match="SIGKILL"):
        executor.check_health(timeout_s=5)


def test_32_health_fails_with_an_idle_worker_that_is_stopped(started: MultiprocExecutor) -> None:
    os.kill(started.worker_pids["Worker_TP1"], signal.SIGSTOP)
    with pytest.raises(RpcTimeoutError, match="rank 1") as missing:
        started.check_health(timeout_s=0.3)
    assert missing.value.ranks == (1,)


def test_33_rank_that_does_not_exist_is_not_taken_for_rank_0(started: MultiprocExecutor) -> None:
    for rank in (-1, 2):
        with pytest.raises(ConfigError, match=f"unique_reply_rank={rank}"):
            started.collective_rpc("echo", args=(1,), unique_reply_rank=rank)


def test_33_rank_that_two_processes_claim_is_refused(tmp_path: Path) -> None:
    from vcli.runtime.distributed.rendezvous import JoinError, RendezvousTarget, join_world

    store = tmp_path / "store"
    store.touch()
    target = RendezvousTarget(path=str(store))
    failures: queue.Queue[JoinError] = queue.Queue()

    def join() -> None:
        try:
            join_world("gloo", 0, 2, target, timeout_s=1.0)
        except JoinError as error:
            failures.put(error)

    threads = [threading.Thread(target=join) for _ in range(2)]
    for thread in threads:
        thread.start()
    messages = {failures.get(timeout=10).message for _ in threads}
    for thread in threads:
        thread.join()
    assert any("rank 0 is taken" in message for message in messages)


def test_34_rank_that_was_planned_and_never_comes_fails_the_start_by_name(make: Make) -> None:
    with pytest.raises(StartupError, match=r"1 of 2 processes not ready.*Worker_TP1.*weights"):
        make("NeverLoads", start_s=2.0).start()
