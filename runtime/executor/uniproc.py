"""The worker inside this process: the back end for one rank."""

import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from vcli.runtime.errors import FailureReport, StartupError, WorkerDiedError, WorkerError
from vcli.runtime.executor.base import Executor, RpcCall
from vcli.runtime.executor.rpc import STEP_METHODS
from vcli.runtime.messages import ChildState
from vcli.runtime.process.failures import report_error
from vcli.runtime.worker.dispatch import RankWorker, check_rpc_method, make_worker, rpc_methods
from vcli.topology.names import TITLE_PREFIX


class UniProcExecutor(Executor):
    """Calls run in the caller's thread, also with `non_block`; the future is done at once.

    So a deadline can't be kept here: who waits for a call that hangs must be another process.
    """

    _worker: RankWorker | None = None
    _methods: Mapping[str, Callable[..., Any]] = {}
    _state = "imported"
    _started_s = 0.0

    @property
    def worker_pids(self) -> Mapping[str, int]:
        """None: the worker has no process of its own."""
        return {}

    def start(self) -> None:
        """Load the worker in this process."""
        self._started_s = time.monotonic()
        try:
            self._worker = make_worker(
                self._worker_cls,
                self._config,
                0,
                rendezvous_path=None,
                report=self._report_state,
            )
            self._worker.init_device()
            self._worker.load_model()
            self._methods = rpc_methods(self._worker)
        except Exception as error:
            report = self._report(error, self._state, is_serving=False)
            self.shutdown()
            raise StartupError(report) from error

    def shutdown(self) -> None:
        """Give back what the worker took."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.shutdown()

    def _submit(self, call: RpcCall) -> "Future[Any]":
        if self._failure is not None:
            raise WorkerDiedError(self._failure)
        worker = self._worker
        if worker is None:
            raise RuntimeError("the executor is not started, or was shut down")
        if isinstance(call.method, str):
            check_rpc_method(call.method, self._methods)
        future: Future[Any] = Future()
        try:
            result = self._run(worker, call)
        except Exception as error:  # noqa: BLE001 - border: the worker loop of this back end
            report = self._report(error, call.name, is_serving=True)
            if call.name in STEP_METHODS:
                self._fail(report)
            failure = WorkerError(report)
            failure.__cause__ = error
            future.set_exception(failure)
        else:
            future.set_result([result] if call.reply_rank is None else result)
        return future

    def _run(self, worker: RankWorker, call: RpcCall) -> Any:
        if isinstance(call.method, str):
            return self._methods[call.method](*call.args, **call.kwargs)
        return call.method(worker, *call.args, **call.kwargs)

    def _report_state(self, state: str, fraction: float | None = None, detail: str = "") -> None:
        self._state = state
        self._on_message(
            ChildState(
                process=self._title,
                state=state,
                seconds=time.monotonic() - self._started_s,
                pid=os.getpid(),
                rank=0,
                fraction=fraction,
                detail=detail,
            )
        )

    def _report(self, error: Exception, phase: str, *, is_serving: bool) -> FailureReport:
        return report_error(error, process=self._title, phase=phase, rank=0, is_serving=is_serving)

    @property
    def _title(self) -> str:
        return self._config.plan.rank_plan(0).title.removeprefix(TITLE_PREFIX)
