"""Every rank is a process that somebody else started (torchrun), and runs the engine itself.

    torchrun --> rank 0: engine core, worker 0      all of them make the same calls in the same
             --> rank 1: engine core, worker 1      order, and each gets what every other one gets

There is no driver. The engines must do the same: the same requests, added and aborted at the same
steps; what they decide follows from that alone. A call's results go to all ranks (msgpack, over
gloo), so on each of them this is an executor like any other. A rank that fails in a step ends by
itself, and the launcher ends the others.
"""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ClassVar, Protocol

import msgspec

from vcli.runtime.config import EngineConfig
from vcli.runtime.errors import FailedWithOutput, FailureReport, WorkerError
from vcli.runtime.executor.base import RankReply, RpcCall
from vcli.runtime.executor.uniproc import UniProcExecutor
from vcli.runtime.messages import ChildMessage, GroupReport, ModelRunnerOutput
from vcli.runtime.process.failures import report_error
from vcli.runtime.worker.call_messages import STEP_METHODS
from vcli.runtime.worker.dispatch import DEFAULT_WORKER_CLS, check_rpc_method
from vcli.runtime.worker.replies import PendingResult
from vcli.topology.errors import ConfigError


class ExchangingWorker(Protocol):
    """What this back end needs of its worker besides the usual."""

    def exchange(self, data: bytes) -> list[bytes]:
        """The bytes of all ranks."""

    def hand_out(self, data: bytes, src_rank: int) -> bytes:
        """The bytes of one rank."""


class _Answer(msgspec.Struct, array_like=True):
    """What one rank tells the others of a call."""

    value: Any = None
    failure: FailureReport | None = None
    has_output: bool = False


class ExternalLauncherExecutor(UniProcExecutor):
    """The rank `config.launched` of the plan; results of calls must be what msgpack can carry."""

    can_overlap_steps: ClassVar[bool] = False

    def __init__(
        self,
        config: EngineConfig,
        *,
        on_message: Callable[[ChildMessage], None],
        worker_cls: str = DEFAULT_WORKER_CLS,
    ) -> None:
        rank = _checked_rank(config)
        super().__init__(config, on_message=on_message, worker_cls=worker_cls, rank=rank)

    def group_reports(self) -> list[GroupReport]:
        """The verified groups of all ranks, one report for each distinct group."""
        distinct: dict[tuple[str, tuple[int, ...]], GroupReport] = {}
        for reports in self._start_call("group_reports"):
            for report in msgspec.convert(reports, list[GroupReport]):
                distinct.setdefault((report.kind, tuple(report.ranks)), report)
        return list(distinct.values())

    def _submit(self, call: RpcCall) -> "Future[Any]":
        if isinstance(call.method, str) and self._failure is None and not self._is_shut_down:
            check_rpc_method(call.method, self._local.methods)
        pending = self._rpc.book(call.name, timeout_s=call.timeout_s, reply_rank=self._rank)
        here = self._on_all_ranks(call)
        here.__qualname__ = call.name  # for messages and for what counts as a step
        self._rpc.note_sent(pending)
        self._local.submit(pending.call_id, RpcCall(here, (), {}, call.timeout_s, call.reply_rank))
        return pending.future

    def _on_all_ranks(self, call: RpcCall) -> Callable[[ExchangingWorker], Any]:
        def run_and_exchange(worker: ExchangingWorker) -> Any:
            if call.name in STEP_METHODS:
                return self._step_result(worker, call)
            mine = msgspec.msgpack.encode(self._answer(worker, call))
            decoder = msgspec.msgpack.Decoder(_Answer)
            return _merged(call, [decoder.decode(data) for data in worker.exchange(mine)])

        return run_and_exchange

    def _step_result(self, worker: ExchangingWorker, call: RpcCall) -> ModelRunnerOutput | None:
        # Not caught: the others may be in a collective of the step, and can't be told here.
        result = self._local.run(call)
        if isinstance(result, PendingResult):
            result = result.resolve()
        data = worker.hand_out(msgspec.msgpack.encode(result), self._config.plan.output_rank)
        return msgspec.msgpack.decode(data, type=ModelRunnerOutput | None)

    def _answer(self, worker: ExchangingWorker, call: RpcCall) -> _Answer:
        try:
            # As plain values, so that all ranks see the same, the one that made it included.
            return _Answer(msgspec.to_builtins(self._local.run(call)))
        except FailedWithOutput as error:
            return _Answer(
                msgspec.to_builtins(error.output), self._failure_of(error, call), has_output=True
            )
        except Exception as error:  # noqa: BLE001 - border: as in a worker's loop
            return _Answer(failure=self._failure_of(error, call))

    def _failure_of(self, error: Exception, call: RpcCall) -> FailureReport:
        return report_error(
            error, process=self._local.title, phase=call.name, rank=self._rank, is_serving=True
        )


def _merged(call: RpcCall, answers: list[_Answer]) -> Any:
    """The value of a call from what all ranks answered; the same on all ranks."""
    for answer in answers:
        if answer.failure is not None and not (answer.has_output and call.aggregate is not None):
            raise WorkerError(answer.failure)
    if call.aggregate is not None:
        return call.aggregate(
            [
                RankReply(rank=rank, value=answer.value, failure=answer.failure)
                for rank, answer in enumerate(answers)
            ]
        )
    if call.reply_rank is not None:
        return answers[call.reply_rank].value
    return [answer.value for answer in answers]


def _checked_rank(config: EngineConfig) -> int:
    """The rank of this process, if launcher and plan agree on the world."""
    launched = config.launched
    if launched is None:
        raise ConfigError(
            "the back end external_launcher runs in a process that torchrun or mpirun started; "
            "vcli serve starts its ranks itself",
            hint="--distributed-executor-backend mp, or give EngineConfig.launched",
        )
    plan = config.plan
    if launched.world_size != plan.torch_world:
        raise ConfigError(
            f"the launcher started {launched.world_size} ranks, the plan has {plan.torch_world}",
            hint=f"torchrun --nproc-per-node {plan.torch_world}, or other parallel sizes",
        )
    if plan.torch_world != plan.world_size:
        raise ConfigError(
            f"external_launcher runs one replica, the plan has {plan.torch_world} ranks in "
            f"replicas of {plan.world_size}",
            hint="leave out --data-parallel-size",
        )
    planned = plan.rank_plan(launched.rank).local_rank
    if launched.local_rank != planned:
        raise ConfigError(
            f"rank {launched.rank} is the local rank {launched.local_rank} for the launcher and "
            f"{planned} in the plan",
            hint="give the number of nodes by --nnodes, and equally many ranks to each",
        )
    return launched.rank
