"""An executor without workers: a thread computes the fake model, prompts can order a fault.

A prompt whose first token is one of the `FAULT_...` tokens makes its first step fail in that way.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from tests.support.fake_model import VOCAB_SIZE, FakeModelWorker
from tests.support.fake_worker import fake_memory_report, sleep_in_c_with_the_lock
from vcli.runtime.config import (
    CacheConfig,
    DeadlineConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
)
from vcli.runtime.core.core_proc import EngineCoreProc
from vcli.runtime.errors import FailureReport, RpcTimeoutError, WorkerDiedError, WorkerError
from vcli.runtime.executor.base import Executor, RpcCall
from vcli.runtime.messages import ChildMessage, ChildState, GroupReport, SchedulerOutput
from vcli.runtime.process.child import ChildContext
from vcli.runtime.worker.call_messages import RankActivity
from vcli.topology.config import ParallelConfig
from vcli.topology.model_spec import model_spec_from_config
from vcli.topology.planner import plan_topology

FAULT_RAISE = 990
"""Rank 1 raises in the step."""
FAULT_DIE = 991
"""The monitor reports rank 1 killed; the step's result never comes."""
FAULT_HANG = 992
"""The step never ends, and nobody says why."""
FAULT_BUG = 993
"""The step gives a result that does not belong to it."""
FAULT_LOCK = 994
"""The step never ends and never gives the interpreter back, so that nothing runs in the process."""
FAULTS = (FAULT_RAISE, FAULT_DIE, FAULT_HANG, FAULT_BUG, FAULT_LOCK)

HANGING_START = "hanging-start"
"""Name of a served model that never gets loaded."""

BYTES_PER_BLOCK = 1024


def fake_engine_config(
    *,
    num_kv_blocks: int = 64,
    block_size: int = 4,
    max_model_len: int = 64,
    tensor_parallel_size: int = 2,
    scheduler: SchedulerConfig | None = None,
    deadlines: DeadlineConfig | None = None,
    served_name: str = "fake",
) -> EngineConfig:
    """A valid configuration; the fake ranks have room for exactly `num_kv_blocks` blocks."""
    parallel = ParallelConfig(tensor_parallel_size=tensor_parallel_size)
    spec = model_spec_from_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": 8,
            "num_attention_heads": 2,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "vocab_size": VOCAB_SIZE,
            "max_position_embeddings": 128,
        },
        source="fake",
    )
    return EngineConfig(
        model=ModelConfig(
            path=Path("/nonexistent"),
            served_name=served_name,
            spec=spec,
            dtype="float32",
            max_model_len=max_model_len,
        ),
        cache=CacheConfig(
            block_size=block_size, kv_cache_memory_bytes=num_kv_blocks * BYTES_PER_BLOCK
        ),
        scheduler=scheduler or SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=32),
        parallel=parallel,
        plan=plan_topology(parallel),
        device_type="cpu",
        deadlines=deadlines or DeadlineConfig(),
    )


def killed_report(rank: int = 1) -> FailureReport:
    """What a monitor says of a rank that was killed."""
    return FailureReport(
        process=f"Worker_TP{rank}",
        phase="serving",
        kind="",
        message="killed by SIGKILL",
        rank=rank,
        pid=4242,
        exit_code=-9,
    )


class FakeExecutor(Executor):
    """All ranks are one thread, which runs the calls in their order."""

    def __init__(self, config: EngineConfig, *, on_message: Callable[[ChildMessage], None]) -> None:
        super().__init__(config, on_message=on_message)
        self.calls: list[str] = []
        self.stuck_ranks: set[int] = set()
        self.busy_ranks: dict[int, RankActivity] = {}
        self.gate = threading.Event()
        """Steps wait for it; set unless a test clears it."""
        self.gate.set()
        self.num_shutdowns = 0
        self.worker: FakeModelWorker | None = None
        self._queue: SimpleQueue[tuple[RpcCall, Future[Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="fake-ranks", daemon=True)

    def _activity(self, rank: int) -> RankActivity | None:
        return self.busy_ranks.get(rank)

    @property
    def worker_pids(self) -> Mapping[str, int]:
        return {"Worker_TP0": 4241, "Worker_TP1": 4242}

    def start(self) -> None:
        self.calls.append("start")
        for rank in range(self._config.plan.world_size):
            self._on_message(
                ChildState(
                    process=f"Worker_TP{rank}", state="weights", seconds=0.1, pid=4241 + rank
                )
            )
        if self._config.model.served_name == HANGING_START:
            threading.Event().wait(60)
        self._thread.start()

    def shutdown(self) -> None:
        self.num_shutdowns += 1
        self.gate.set()
        self._queue.put(None)

    def kill_rank(self, rank: int) -> None:
        """What the monitor does when it sees that a rank was killed."""
        self._fail(killed_report(rank))

    def _submit(self, call: RpcCall) -> "Future[Any]":
        if self._failure is not None:
            raise WorkerDiedError(self._failure)
        future: Future[Any] = Future()
        self._queue.put((call, future))
        return future

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            call, future = item
            self.calls.append(call.name)
            if call.name == "check_health" and call.reply_rank in self.stuck_ranks:
                self._time_out(call, future)
                continue
            try:
                result = self._execute(call)
            except Exception as error:  # noqa: BLE001 - whatever the fake raises is the result
                future.set_exception(error)
            else:
                if result is not _NEVER:
                    future.set_result(result)

    def _time_out(self, call: RpcCall, future: "Future[Any]") -> None:
        def expire() -> None:
            time.sleep(call.timeout_s)
            future.set_exception(RpcTimeoutError(f"{call.name}: no answer from {call.reply_rank}"))

        threading.Thread(target=expire, daemon=True).start()

    def _execute(self, call: RpcCall) -> Any:
        config = self._config
        if call.name == "execute_model":
            return self._step_result(call.args[0])
        values: dict[str, Callable[[], Any]] = {
            "determine_available_memory": lambda: config.cache.kv_cache_memory_bytes,
            "kv_bytes_per_block": lambda: BYTES_PER_BLOCK,
            "initialize_from_config": lambda: self._make_worker(*call.args),
            "compile_or_warm_up_model": lambda: None,
            "check_health": lambda: None,
            "group_reports": lambda: [_group_report(config.plan.world_size)],
            "memory_report": lambda: fake_memory_report(0),
        }
        value = values[call.name]()
        return value if call.reply_rank is not None else [value] * config.plan.world_size

    def _make_worker(self, kv: Any) -> None:
        self.worker = FakeModelWorker(
            kv,
            max_num_seqs=self._config.scheduler.max_num_seqs,
            max_num_batched_tokens=self._config.scheduler.max_num_batched_tokens,
        )

    def _step_result(self, out: SchedulerOutput) -> Any:
        fault = next((data.token_ids[0] for data in out.new if data.token_ids[0] in FAULTS), None)
        if fault == FAULT_HANG:
            return _NEVER
        if fault == FAULT_LOCK:
            sleep_in_c_with_the_lock(60)
        if fault == FAULT_DIE:
            threading.Thread(target=self.kill_rank, args=(1,), daemon=True).start()
            return _NEVER
        if fault == FAULT_RAISE:
            report = FailureReport(
                process="Worker_TP1",
                phase="execute_model",
                kind="ValueError",
                message="ordered",
                rank=1,
                pid=os.getpid(),
                traceback="Traceback (fake)",
            )
            self._fail(report)
            raise WorkerError(report)
        assert self.worker is not None
        # A step that waits for the gate must not see what comes later, so it runs first.
        result = self.worker.execute(out)
        if fault == FAULT_BUG:
            result.numbers.append(-5)
        self.gate.wait()
        return result


_NEVER = object()


def _group_report(world_size: int) -> GroupReport:
    return GroupReport(
        kind="TP",
        ranks=list(range(world_size)),
        transport="fake",
        version="0",
        all_reduce="fake",
        verified=True,
        all_reduce_us=1.0,
        all_reduce_bytes=4,
    )


def fake_core_main(context: ChildContext, config: EngineConfig, client_fd: int) -> None:
    """The engine core of a child process, with fake ranks; the rest is the real one."""
    core = EngineCoreProc(context, config, socket.socket(fileno=client_fd), FakeExecutor)
    status = core.run()
    if status != 0:
        raise SystemExit(int(status))
