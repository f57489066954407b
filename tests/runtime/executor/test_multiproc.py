"""Two worker processes serve calls; a call that fails by itself spoils no other."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fake_worker import FAKE_WORKER, Payload, fake_config, fake_step, rank_of
from vcli.runtime.errors import RpcTimeoutError, WorkerError
from vcli.runtime.executor.multiproc import MultiprocExecutor
from vcli.runtime.messages import ChildMessage, ChildReady, ChildState, KVCacheConfig
from vcli.topology.config import ParallelConfig
from vcli.topology.errors import ConfigError

pytestmark = pytest.mark.process

MESSAGES: list[ChildMessage] = []
RING_BYTES = 1 << 20


@pytest.fixture(scope="module")
def executor() -> Iterator[MultiprocExecutor]:
    executor = MultiprocExecutor(
        fake_config(2, worker_extension_cls="tests.support.fake_worker:FakeExtension"),
        on_message=MESSAGES.append,
        worker_cls=FAKE_WORKER,
        ring_bytes=RING_BYTES,
    )
    executor.start()
    yield executor
    executor.shutdown()


def test_each_worker_reports_its_states_in_order(executor: MultiprocExecutor) -> None:
    assert set(executor.worker_pids) == {"Worker_TP0", "Worker_TP1"}
    for rank, (title, pid) in enumerate(executor.worker_pids.items()):
        states = [
            message.state
            for message in MESSAGES
            if isinstance(message, ChildState) and (message.process, message.pid) == (title, pid)
        ]
        expected = ["spawned", "imported", "device", "joined", "groups", "weights"]
        assert states[: len(expected)] == expected, rank
    assert sum(isinstance(message, ChildReady) for message in MESSAGES) == 2


def test_step_gives_the_result_of_the_output_rank(executor: MultiprocExecutor) -> None:
    result = executor.execute_model(fake_step(7, number=3))
    assert result is not None
    assert (result.step, result.token_ids) == (7, [4])


def test_steps_in_flight_are_settled_each_with_its_own_result(
    executor: MultiprocExecutor,
) -> None:
    futures = [executor.execute_model(fake_step(step), non_block=True) for step in range(50)]
    steps = [result.step for future in reversed(futures) if (result := future.result(10))]
    assert steps == list(reversed(range(50)))


def test_results_come_in_the_order_of_ranks(executor: MultiprocExecutor) -> None:
    assert executor.collective_rpc("sleep_on", args=([0], 0.05)) == [0, 1]


def test_reply_rank_alone_replies(executor: MultiprocExecutor) -> None:
    assert executor.collective_rpc("raise_on", args=([],), unique_reply_rank=1) == 1


def test_functions_are_called_with_the_worker_first(executor: MultiprocExecutor) -> None:
    offset = 100
    assert executor.collective_rpc(rank_of, args=(10,)) == [10, 11]
    assert executor.collective_rpc(lambda worker: worker.rank + offset) == [100, 101]


def test_start_calls_reach_all_workers(executor: MultiprocExecutor) -> None:
    assert executor.determine_available_memory() == [1000, 1001]
    executor.initialize_from_config(KVCacheConfig(num_blocks=3, block_size=16))
    executor.compile_or_warm_up_model()
    executor.check_health()


def test_group_that_all_ranks_report_is_listed_once(executor: MultiprocExecutor) -> None:
    assert [(report.kind, report.ranks) for report in executor.group_reports()] == [("TP", [0, 1])]


def test_methods_of_the_extension_can_be_called(executor: MultiprocExecutor) -> None:
    assert executor.collective_rpc("doubled_rank") == [0, 2]


@pytest.mark.parametrize("name", ["_private", "__init__", "config", "nothing"])
def test_only_public_methods_can_be_called(executor: MultiprocExecutor, name: str) -> None:
    with pytest.raises(ConfigError, match=name) as refused:
        executor.collective_rpc(name)
    assert "execute_model" in refused.value.hint


def test_reply_rank_that_does_not_exist_is_refused(executor: MultiprocExecutor) -> None:
    with pytest.raises(ConfigError, match="unique_reply_rank=2 of 2"):
        executor.collective_rpc("echo", args=(1,), unique_reply_rank=2)


@pytest.mark.parametrize("ranks", [[0], [1], [0, 1]])
def test_next_call_after_a_failed_one_sees_no_old_reply(
    executor: MultiprocExecutor, ranks: list[int]
) -> None:
    for attempt in range(5):
        with pytest.raises(WorkerError) as failed:
            executor.collective_rpc("raise_on", args=(ranks, f"attempt {attempt}"))
        report = failed.value.report
        assert report.message == f"attempt {attempt} on rank {report.rank}"
        assert report.rank in ranks
        assert executor.collective_rpc("echo", args=(attempt,)) == [attempt, attempt]
    assert not executor.is_failed


def test_error_carries_the_remote_traceback(executor: MultiprocExecutor) -> None:
    with pytest.raises(WorkerError) as failed:
        executor.collective_rpc("raise_on", args=([1],))
    report = failed.value.report
    assert (report.process, report.phase, report.kind) == ("Worker_TP1", "raise_on", "ValueError")
    assert report.pid == executor.worker_pids["Worker_TP1"]
    assert "in raise_on" in report.traceback


def test_failure_of_a_rank_that_does_not_reply_ends_the_call_at_once(
    executor: MultiprocExecutor, tmp_path: Path
) -> None:
    def raise_on_one_and_keep_zero_busy(worker):
        if worker.rank == 1:
            raise ValueError("at once")
        worker.wait_for_file_on([0], str(gate))

    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with pytest.raises(WorkerError, match="at once"):
        executor.collective_rpc(raise_on_one_and_keep_zero_busy, unique_reply_rank=0)
    gate.write_text("")
    assert executor.collective_rpc("echo", args=("next",)) == ["next", "next"]


def test_deadline_names_the_rank_and_its_method_and_the_late_reply_is_dropped(
    executor: MultiprocExecutor,
) -> None:
    with pytest.raises(RpcTimeoutError) as late:
        executor.collective_rpc("sleep_on", args=([1], 0.4), timeout_s=0.15)
    assert "no answer within 0.15 s from rank 1 (Worker_TP1, in sleep_on for" in late.value.message
    assert "rank 0" not in late.value.message
    assert executor.collective_rpc("echo", args=("next",)) == ["next", "next"]


def test_rank_that_is_only_busy_is_healthy_and_it_is_told_with_what(
    executor: MultiprocExecutor, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    busy = executor.collective_rpc("wait_for_file_on", args=([1], str(gate)), non_block=True)
    executor.check_health(timeout_s=0.15)
    assert executor.busy_with(0) is None
    doing = executor.busy_with(1)
    assert doing is not None
    assert doing.describe().startswith("in wait_for_file_on for ")
    gate.write_text("")
    assert busy.result(5) == [0, 1]
    executor.check_health()
    assert executor.busy_with(1) is None


def test_result_that_can_not_be_sent_is_the_failure_of_its_call(
    executor: MultiprocExecutor,
) -> None:
    with pytest.raises(WorkerError, match="pickle"):
        executor.collective_rpc("unpicklable")
    assert executor.collective_rpc("echo", args=(1,)) == [1, 1]


def test_arguments_and_results_may_be_larger_than_the_rings(executor: MultiprocExecutor) -> None:
    data = bytes(range(256)) * 4096 * 3
    assert len(data) > 2 * RING_BYTES
    assert executor.collective_rpc("echo", args=(data,)) == [data, data]


def test_arguments_do_not_live_until_the_next_call(executor: MultiprocExecutor) -> None:
    executor.collective_rpc("remember", args=(Payload(),))
    assert executor.collective_rpc("still_has_payload") == [False, False]


def test_torch_is_not_loaded_by_anything_but_the_worker(executor: MultiprocExecutor) -> None:
    assert executor.collective_rpc("loaded", args=("torch",)) == [False, False]


def test_several_nodes_are_refused() -> None:
    parallel = ParallelConfig(tensor_parallel_size=2, nnodes=2)
    with pytest.raises(ConfigError, match="nnodes=2"):
        MultiprocExecutor(fake_config(2, parallel=parallel), on_message=lambda _: None)
