"""The worker inside this process: the back end for one rank."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, ClassVar

from vcli.runtime.config import EngineConfig
from vcli.runtime.errors import StartupError, WorkerDiedError
from vcli.runtime.executor.base import Executor, RpcCall
from vcli.runtime.executor.local_rank import LocalRank
from vcli.runtime.executor.rpc import RpcClient
from vcli.runtime.executor.waiting import FdWaiter, Waiter
from vcli.runtime.messages import ChildMessage
from vcli.runtime.process.failures import report_error
from vcli.runtime.worker.call_messages import RankActivity
from vcli.runtime.worker.dispatch import DEFAULT_WORKER_CLS, check_rpc_method
from vcli.topology.names import TITLE_PREFIX

#: How long a worker that is busy may take to end; the process itself is about to.
_LEAVE_S = 0.5


class UniProcExecutor(Executor):
    """Calls run in a thread of their own, so deadlines hold and the caller goes on meanwhile."""

    can_overlap_steps: ClassVar[bool] = True

    def __init__(
        self,
        config: EngineConfig,
        *,
        on_message: Callable[[ChildMessage], None],
        worker_cls: str = DEFAULT_WORKER_CLS,
        rank: int = 0,
    ) -> None:
        super().__init__(config, on_message=on_message, worker_cls=worker_cls)
        self._rank = rank
        dp_rank = config.parallel.data_parallel_rank or 0
        ranks = [config.plan.rank_plan(place, dp_rank) for place in range(config.plan.world_size)]
        self._rpc = RpcClient(
            [plan.title.removeprefix(TITLE_PREFIX) for plan in ranks],
            activity=self._activity,
            on_step_failure=self._fail,
            stall_s=config.deadlines.stall_s,
        )
        self._local = LocalRank(
            config, rank, worker_cls=worker_cls, rpc=self._rpc, on_state=on_message
        )
        self._is_shut_down = False

    @property
    def worker_pids(self) -> Mapping[str, int]:
        """None: the worker has no process of its own."""
        return {}

    def start(self) -> None:
        """Load the worker in this process."""
        self._rpc.start()
        deadlines = self._config.deadlines
        try:
            self._local.start().result(deadlines.start_left_s())
        except FutureTimeoutError as error:
            report = self._local.late_report(deadlines.start_s)
            self.shutdown()
            raise StartupError(report) from error
        except Exception as error:
            report = report_error(
                error,
                process=self._local.title,
                phase=self._local.state,
                rank=self._rank,
                is_serving=False,
            )
            self.shutdown()
            raise StartupError(report) from error

    def shutdown(self) -> None:
        """Give back what the worker took; one that hangs is left to the end of the process."""
        if self._is_shut_down:
            return
        self._is_shut_down = True
        self._rpc.fail(WorkerDiedError(self._shutdown_report()))
        self._rpc.close()
        self._local.stop(_LEAVE_S)

    def waiter(self, fds: Sequence[int]) -> Waiter:
        """A wait for `fds`; the results come from the worker's thread."""
        return FdWaiter(fds, self.spin, lambda: self._rpc.has_pending)

    def _submit(self, call: RpcCall) -> "Future[Any]":
        if isinstance(call.method, str) and self._failure is None and not self._is_shut_down:
            check_rpc_method(call.method, self._local.methods)
        pending = self._rpc.book(
            call.name,
            timeout_s=call.timeout_s,
            reply_rank=call.reply_rank,
            aggregate=call.aggregate,
        )
        self._rpc.note_sent(pending)
        self._local.submit(pending.call_id, call)
        return pending.future

    def _activity(self, rank: int) -> RankActivity | None:
        return self._local.activity() if rank == self._rank else None
