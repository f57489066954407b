"""A rank inside the executor's own process: its worker, and the thread that runs all calls on it.

The caller goes on while a step runs, and a rank that hangs in a collective does not take the
caller along: the call's deadline, or another rank's failure, still settles it.
"""

import contextlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from vcli.runtime.config import EngineConfig
from vcli.runtime.errors import FailedWithOutput, FailureReport
from vcli.runtime.executor.base import RpcCall
from vcli.runtime.executor.rpc import RpcClient
from vcli.runtime.log import get_logger
from vcli.runtime.messages import ChildState
from vcli.runtime.process.failures import report_error
from vcli.runtime.process.held import HELD_HINT, SLOW_HINT, describe_holds
from vcli.runtime.worker.call_messages import RankActivity
from vcli.runtime.worker.dispatch import (
    CollectiveWorker,
    DeviceWorker,
    RankWorker,
    make_worker,
    rpc_methods,
)
from vcli.runtime.worker.progress import ProgressLine
from vcli.runtime.worker.replies import PendingResult
from vcli.topology.errors import ExitStatus
from vcli.topology.names import TITLE_PREFIX

logger = get_logger(__name__)

#: Results that are on their way when the rank ends.
_LAST_RESULTS_S = 1.0


class LocalRank:
    """Starts the worker of `rank`, runs calls in their order, and tells `rpc` the results."""

    def __init__(
        self,
        config: EngineConfig,
        rank: int,
        *,
        worker_cls: str,
        rpc: RpcClient,
        on_state: Callable[[ChildState], None],
    ) -> None:
        self._config = config
        self._plan = config.plan.rank_plan(rank, config.parallel.data_parallel_rank or 0)
        self._rank = rank
        self._worker_cls = worker_cls
        self._rpc = rpc
        self._on_state = on_state
        self._worker: RankWorker | None = None
        self.title = self._plan.title.removeprefix(TITLE_PREFIX)
        self.state = "imported"
        self.methods: Mapping[str, Callable[..., Any]] = {}
        self._started_s = time.monotonic()
        self._doing: tuple[str, float] | None = None
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._resolutions: SimpleQueue[Callable[[Exception | None], None] | None] = SimpleQueue()
        self._resolver: threading.Thread | None = None
        # What the device still computes: the rank is busy until it is done.
        self._on_device: deque[tuple[str, float]] = deque()
        self._thread = threading.Thread(target=self._run_jobs, name=self.title, daemon=True)

    def start(
        self, rendezvous_path: str | None = None, progress: ProgressLine | None = None
    ) -> "Future[None]":
        """Load the worker; the future is done when it can take calls."""
        self._started_s = time.monotonic()
        loaded: Future[None] = Future()

        def load() -> None:
            try:
                self._load(rendezvous_path, progress)
            except Exception as error:  # noqa: BLE001 - border: the loop of this rank
                loaded.set_exception(error)
            except SystemExit as error:  # foreign code; it would end this thread and nobody knew
                loaded.set_exception(RuntimeError(f"SystemExit: {error}"))
            else:
                loaded.set_result(None)

        self._jobs.put(load)
        self._thread.start()
        return loaded

    def submit(self, call_id: int, call: RpcCall) -> None:
        """Run a call after those before it."""
        self._jobs.put(lambda: self._serve(call_id, call))

    def activity(self) -> RankActivity | None:
        """What the rank does now, its device included."""
        try:
            doing: tuple[str, float] | None = self._on_device[0]
        except IndexError:
            doing = self._doing
        return None if doing is None else RankActivity(doing[0], time.monotonic() - doing[1])

    def late_report(self, limit_s: float) -> FailureReport:
        """The failure of a start in which this rank was not ready after `limit_s`."""
        (hold,) = describe_holds([os.getpid()])
        return FailureReport(
            process=self.title,
            phase=self.state,
            kind="StartTimeout",
            message=f"not ready after {limit_s:g} s" + (f": {hold}" if hold else ""),
            rank=self._rank,
            hint=HELD_HINT if hold else SLOW_HINT,
            exit_status=int(ExitStatus.START_FAILED),
        )

    def stop(self, timeout_s: float) -> None:
        """Shut the worker down after the calls that were made; one that hangs is left behind."""
        if self._thread.ident is None:
            return
        self._jobs.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            doing = self.activity()
            state = self.state if doing is None else doing.describe()
            logger.info("%s did not end: %s", self.title, state)

    def _load(self, rendezvous_path: str | None, progress: ProgressLine | None) -> None:
        self._worker = make_worker(
            self._worker_cls,
            self._config,
            self._rank,
            rendezvous_path=rendezvous_path,
            report=self._report_state,
        )
        if isinstance(self._worker, CollectiveWorker) and progress is not None:
            self._worker.trace_collectives(progress)
        torch = sys.modules.get("torch")
        if torch is not None and torch.get_num_threads() > self._plan.omp_num_threads:
            # A child gets its share of the CPUs by its environment; this process has its own.
            torch.set_num_threads(self._plan.omp_num_threads)
        self._worker.init_device()
        self._worker.load_model()
        self.methods = rpc_methods(self._worker)

    def _run_jobs(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            # Nothing of a call lives while the next one is waited for.
            del job
        if self._resolver is not None:
            self._resolutions.put(None)
            self._resolver.join(_LAST_RESULTS_S)
        worker, self._worker = self._worker, None
        if worker is not None:
            with contextlib.suppress(Exception):  # peers may be gone; there is nobody to tell
                worker.shutdown()

    def _serve(self, call_id: int, call: RpcCall) -> None:
        self._doing = (call.name, time.monotonic())
        try:
            self._settle(call_id, call, lambda: self.run(call))
        finally:
            self._doing = None

    def _settle(self, call_id: int, call: RpcCall, compute: Callable[[], Any]) -> None:
        """Tell `rpc` what `compute` gives; what a device still computes is waited for elsewhere."""
        try:
            result = compute()
        except FailedWithOutput as error:
            report = self._failure_of(error, call)
            self._rpc.deliver_output_of_failed(self._rank, call_id, report, error.output)
        except Exception as error:  # noqa: BLE001 - border: the loop of this rank
            self._rpc.deliver_failure(call_id, self._failure_of(error, call))
        else:
            if isinstance(result, PendingResult):
                self._resolve_later(
                    call,
                    lambda failure: self._settle(call_id, call, lambda: _resolved(result, failure)),
                )
            else:
                self._rpc.deliver(self._rank, call_id, result)

    def _resolve_later(self, call: RpcCall, job: Callable[[Exception | None], None]) -> None:
        self._on_device.append((call.name, time.monotonic()))
        if self._resolver is None:
            self._resolver = threading.Thread(
                target=self._run_resolutions, name=f"{self.title}-results", daemon=True
            )
            self._resolver.start()
        self._resolutions.put(job)

    def _run_resolutions(self) -> None:
        failure: Exception | None = None
        try:
            if isinstance(self._worker, DeviceWorker):
                self._worker.bind_thread()
        except Exception as error:  # noqa: BLE001 - border: each call here is told of it
            failure = error
        while (job := self._resolutions.get()) is not None:
            job(failure)
            self._on_device.popleft()
            del job

    def _failure_of(self, error: Exception, call: RpcCall) -> Any:
        return report_error(
            error, process=self.title, phase=call.name, rank=self._rank, is_serving=True
        )

    def run(self, call: RpcCall) -> Any:
        """The result of a call on the worker, in this thread: the rank's own."""
        if isinstance(call.method, str):
            return self.methods[call.method](*call.args, **call.kwargs)
        return call.method(self._worker, *call.args, **call.kwargs)

    def _report_state(self, state: str, fraction: float | None = None, detail: str = "") -> None:
        self.state = state
        self._on_state(
            ChildState(
                process=self.title,
                state=state,
                seconds=time.monotonic() - self._started_s,
                pid=os.getpid(),
                rank=self._rank,
                fraction=fraction,
                detail=detail,
            )
        )


def _resolved(result: PendingResult, failure: Exception | None) -> Any:
    """The result, or the failure that kept its thread from the device."""
    if failure is not None:
        raise failure
    return result.resolve()
