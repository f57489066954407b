"""One call to all ranks of a replica: the interface that every back end implements."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, overload

import msgspec

from vcli.runtime.config import EngineConfig
from vcli.runtime.errors import FailureReport, RpcTimeoutError
from vcli.runtime.executor.waiting import FdWaiter, Waiter, spin_of
from vcli.runtime.log import get_logger
from vcli.runtime.messages import (
    ChildMessage,
    GroupReport,
    KVCacheConfig,
    MemoryReport,
    ModelRunnerOutput,
    SchedulerOutput,
)
from vcli.runtime.process.held import HELD_HINT
from vcli.runtime.process.starter import Starter
from vcli.runtime.worker.call_messages import RankActivity
from vcli.runtime.worker.dispatch import DEFAULT_WORKER_CLS
from vcli.topology.errors import ConfigError

if TYPE_CHECKING:
    from vcli.runtime.executor.node_messages import NodeLinks

logger = get_logger(__name__)

StepResult = ModelRunnerOutput | None
FailureCallback = Callable[[FailureReport], None]

HEALTH_METHOD = "check_health"
#: Deadline of a health check, where the caller names none.
HEALTH_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReply:
    """What one rank answered: its result; or how it failed, and what it handed on all the same."""

    rank: int
    value: Any
    failure: FailureReport | None = None


Aggregate = Callable[[Sequence[RankReply]], Any]
"""From the replies of all ranks, in their order, to the value of a call; may raise."""


@dataclass(frozen=True, slots=True)
class RpcCall:
    """One call to all ranks. `reply_rank` None: the results of all, merged by `aggregate`."""

    method: str | Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    timeout_s: float
    reply_rank: int | None
    aggregate: Aggregate | None = None

    @property
    def name(self) -> str:
        """The method's or function's name, for messages."""
        if isinstance(self.method, str):
            return self.method
        return getattr(self.method, "__qualname__", None) or repr(self.method)


class Executor(ABC):
    """Runs the workers of one replica. Calls reach all ranks in the order in which they are made.

    A failed step (`execute_model`, `sample_tokens`, `execute_dummy_batch`) is the end of the
    executor, since peers of the failed rank may wait in a collective for ever. Any other call may
    fail by itself.

    `on_message` gets the start-up states of the workers, from a thread of the executor; it must
    not block.
    """

    can_overlap_steps: ClassVar[bool] = False
    """Whether `execute_model(non_block=True)` returns before the step is done, and the workers keep
    what they sample; a back end says so itself."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        on_message: Callable[[ChildMessage], None],
        worker_cls: str = DEFAULT_WORKER_CLS,
    ) -> None:
        self._config = config
        self._on_message = on_message
        self._worker_cls = worker_cls
        self._failure: FailureReport | None = None
        self._failure_callbacks: list[FailureCallback] = []
        self._failure_lock = threading.Lock()
        self._starter: Starter | None = None
        self.spin = spin_of(config)

    def use_starter(self, starter: Starter) -> None:
        """Have `start` bring up its processes by `starter`; otherwise they are spawned."""
        self._starter = starter

    def use_nodes(self, links: "NodeLinks") -> None:
        """Have ranks on other nodes too, reached by `links`; comes before `start`.

        Raises:
            ConfigError: this back end runs on one node.
        """
        raise ConfigError(f"{type(self).__name__} runs the ranks of one node")

    # ---- what a back end implements ---------------------------------------------------------

    @abstractmethod
    def start(self) -> None:
        """Start all ranks and wait until each has its device, groups and weights.

        Raises:
            StartupError: a rank failed, died or was missing at the deadline; the others are ended.
        """

    @abstractmethod
    def shutdown(self) -> None:
        """End all ranks and give back everything; may be called again, and from any thread."""

    @abstractmethod
    def _submit(self, call: RpcCall) -> "Future[Any]":
        """Send a call to all ranks; its future is done when all expected replies are there."""

    @property
    @abstractmethod
    def worker_pids(self) -> Mapping[str, int]:
        """Pid of each worker process by its title; empty when there is none."""

    def waiter(self, fds: Sequence[int]) -> Waiter:
        """A wait for `fds` in the calling thread, which takes the replies until it is closed."""
        return FdWaiter(fds, self.spin)

    def _result_of(self, future: "Future[Any]") -> Any:
        """The result of a call; a thread that has a `waiter` takes the replies meanwhile."""
        return future.result()

    # ---- calls ------------------------------------------------------------------------------

    @overload
    def execute_model(
        self, output: SchedulerOutput, *, non_block: Literal[False] = False
    ) -> StepResult: ...
    @overload
    def execute_model(
        self, output: SchedulerOutput, *, non_block: Literal[True]
    ) -> "Future[StepResult]": ...
    def execute_model(
        self, output: SchedulerOutput, *, non_block: bool = False
    ) -> "StepResult | Future[StepResult]":
        """Run one step on all ranks; gives the output rank's result."""
        future = self._submit(self._step("execute_model", (output,)))
        return future if non_block else self._result_of(future)

    @overload
    def sample_tokens(
        self, grammar: object | None, *, non_block: Literal[False] = False
    ) -> StepResult: ...
    @overload
    def sample_tokens(
        self, grammar: object | None, *, non_block: Literal[True]
    ) -> "Future[StepResult]": ...
    def sample_tokens(
        self, grammar: object | None, *, non_block: bool = False
    ) -> "StepResult | Future[StepResult]":
        """Sample the step that was executed with `defer_sampling`."""
        future = self._submit(self._step("sample_tokens", (grammar,)))
        return future if non_block else self._result_of(future)

    def execute_dummy_batch(self) -> None:
        """Take part in the collectives of a step without requests."""
        self._result_of(self._submit(self._step("execute_dummy_batch", ())))

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        *,
        timeout_s: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        non_block: bool = False,
        unique_reply_rank: int | None = None,
        aggregate: Aggregate | None = None,
    ) -> Any:
        """Call a public method of the worker, or a function with the worker first, on all ranks.

        Gives the results in the order of ranks, or the one of `unique_reply_rank`; with
        `non_block` a future of it. `timeout_s` counts from now and is that of a step by default.

        With `aggregate` every rank replies, and what it makes of the replies is the value. A rank
        that raised `FailedWithOutput` counts as a reply there; any other failure ends the call.

        Raises:
            ConfigError: the worker has no such method, there is no such rank, or both a rank and
                an aggregator were given.
            WorkerError: a rank raised; the others' results are dropped, the executor is well.
            WorkerDiedError: a rank is gone, or a step failed before.
            RpcTimeoutError: names the ranks that did not answer, and what they do.
        """
        num_ranks = self._config.plan.world_size
        if unique_reply_rank is not None and not 0 <= unique_reply_rank < num_ranks:
            raise ConfigError(f"unique_reply_rank={unique_reply_rank} of {num_ranks} ranks")
        if unique_reply_rank is not None and aggregate is not None:
            raise ConfigError("a call has a unique_reply_rank or an aggregator, not both")
        if timeout_s is None:
            timeout_s = self._config.deadlines.execute_model_s
        future = self._submit(
            RpcCall(
                method, tuple(args), dict(kwargs or {}), timeout_s, unique_reply_rank, aggregate
            )
        )
        return future if non_block else self._result_of(future)

    def determine_available_memory(self) -> list[int]:
        """Bytes for the KV cache on each rank."""
        return list(self._start_call("determine_available_memory"))

    def initialize_from_config(self, config: KVCacheConfig) -> None:
        """Allocate the KV cache on each rank."""
        self._start_call("initialize_from_config", config)

    def compile_or_warm_up_model(self) -> None:
        """Run every shape once that will be needed."""
        self._start_call("compile_or_warm_up_model")

    def group_reports(self) -> list[GroupReport]:
        """The verified groups, one report for each distinct group."""
        distinct: dict[tuple[str, tuple[int, ...]], GroupReport] = {}
        for reports in self._start_call("group_reports"):
            for report in reports:
                distinct.setdefault((report.kind, tuple(report.ranks)), report)
        return list(distinct.values())

    def memory_reports(self) -> list[MemoryReport]:
        """What the memory of each rank went to, beside what was planned."""
        reports = self._start_call("memory_report")
        # Where a launcher started the ranks, they come as plain values.
        return msgspec.convert(reports, list[MemoryReport])

    def check_health(self, timeout_s: float = HEALTH_TIMEOUT_S) -> None:
        """Return when every rank has answered, or is only busy; see `busy_with`.

        Raises:
            RpcTimeoutError: names the ranks that did not answer, and what they do.
            WorkerError, WorkerDiedError: a rank is not well.
        """
        try:
            self.collective_rpc(HEALTH_METHOD, timeout_s=timeout_s)
        except RpcTimeoutError as error:
            if not error.ranks or not all(self.busy_with(rank) for rank in error.ranks):
                raise

    def busy_with(self, rank: int) -> RankActivity | None:
        """The call that a rank is in, unless it is stopped, or stuck: beyond the stall deadline.

        A busy rank is well, and can't answer; but one does not get stuck in a health check.
        """
        activity = self._activity(rank)
        if activity is None or activity.method == HEALTH_METHOD or rank in self._stopped():
            return None
        return activity if activity.total_s <= self._config.deadlines.stall_s else None

    def _activity(self, rank: int) -> RankActivity | None:
        """What a rank does now, where a back end knows; None for nothing."""
        return None

    def _stopped(self) -> Mapping[int, str]:
        """Ranks whose process is stopped, each with a sentence that says what continues it."""
        return {}

    # ---- failure ----------------------------------------------------------------------------

    @property
    def is_failed(self) -> bool:
        """Whether nothing can be called any more."""
        return self._failure is not None

    def register_failure_callback(self, callback: FailureCallback) -> None:
        """Call `callback` once when the executor fails; at once when it has already."""
        with self._failure_lock:
            failure = self._failure
            if failure is None:
                self._failure_callbacks.append(callback)
                return
        callback(failure)

    def _fail(self, report: FailureReport) -> None:
        """Note the first failure and tell everybody who wants to know."""
        with self._failure_lock:
            if self._failure is not None:
                return
            self._failure = report
            callbacks, self._failure_callbacks = self._failure_callbacks, []
        logger.info("executor failed: %s", report.describe())
        for callback in callbacks:
            callback(report)

    def _shutdown_report(self) -> FailureReport:
        return FailureReport(
            process="Executor", phase="shutdown", kind="", message="the executor was shut down"
        )

    def _step(self, method: str, args: tuple[Any, ...]) -> RpcCall:
        timeout_s = self._config.deadlines.execute_model_s
        return RpcCall(method, args, {}, timeout_s, self._config.plan.output_rank)

    def _start_call(self, method: str, *args: Any) -> Any:
        left_s = self._config.deadlines.start_left_s()
        try:
            return self.collective_rpc(method, timeout_s=left_s, args=args)
        except RpcTimeoutError as error:
            holds = self._describe_holds(told=error.message)
            if not holds:
                raise
            raise RpcTimeoutError(
                f"{error.message}; {holds}", hint=HELD_HINT, ranks=error.ranks
            ) from error

    def _describe_holds(self, *, told: str) -> str:
        """Which ranks' processes here can't run, and why, as far as `told` does not say it."""
        return ""
